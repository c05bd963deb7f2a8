# SPDX-License-Identifier: Apache-2.0
# GTest::gtest_main from the system, or from its release where there is a network.
find_package(GTest CONFIG QUIET)
if(TARGET GTest::gtest_main)
  message(STATUS "GoogleTest: found on the system, ${GTest_DIR}")
  return()
endif()

set(JAXBRIDGE_GTEST_URL
    "https://github.com/google/googletest/releases/download/v1.15.2/googletest-1.15.2.tar.gz"
    CACHE STRING "Where GoogleTest comes from when the system has none")
set(archive ${PROJECT_BINARY_DIR}/_deps/googletest-1.15.2.tar.gz)
set(sha256 7b42b4d6ed48810c5362c265a17faebe90dc2373c885e5216439d37927f02926)

# Downloaded here, not by FetchContent, whose failure doesn't say what to install.
set(found "")
if(EXISTS ${archive})
  file(SHA256 ${archive} found)
endif()
if(NOT found STREQUAL sha256)
  message(STATUS "GoogleTest: not on the system, downloading it (1 MB)")
  file(DOWNLOAD ${JAXBRIDGE_GTEST_URL} ${archive} TIMEOUT 120 STATUS status)
  list(GET status 0 code)
  list(GET status 1 reason)
  if(code EQUAL 0)
    file(SHA256 ${archive} found)
    if(NOT found STREQUAL sha256)
      set(reason "SHA-256 of the download is ${found}, expected ${sha256}")
    endif()
  endif()
  if(NOT found STREQUAL sha256)
    file(REMOVE ${archive})
    message(
      FATAL_ERROR
        "jaxbridge: the C++ tests need GoogleTest. It is not installed, and downloading it failed (${reason}).\n"
        "Install it: apt-get install libgtest-dev   (Debian, Ubuntu)\n"
        "            dnf install gtest-devel        (Fedora)\n"
        "or configure with -DJAXBRIDGE_BUILD_TESTS=OFF to build without the C++ tests.")
  endif()
endif()

include(FetchContent)
set(INSTALL_GTEST OFF)
set(BUILD_GMOCK OFF)
FetchContent_Declare(googletest URL ${archive} DOWNLOAD_EXTRACT_TIMESTAMP TRUE)
FetchContent_MakeAvailable(googletest)
