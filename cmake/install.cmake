# SPDX-License-Identifier: Apache-2.0
# The headers and a CMake package for native authors. In a wheel everything is relative to the
# installed Python package (jaxbridge.get_include(), jaxbridge.get_cmake_dir()).
include(CMakePackageConfigHelpers)

if(DEFINED SKBUILD)
  set(jaxbridge_include_dir include)
  set(jaxbridge_cmake_dir cmake)
else()
  set(jaxbridge_include_dir ${CMAKE_INSTALL_INCLUDEDIR})
  set(jaxbridge_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/jaxbridge)
endif()

install(
  DIRECTORY ${PROJECT_SOURCE_DIR}/include/jaxbridge
  DESTINATION ${jaxbridge_include_dir}
  FILES_MATCHING
  PATTERN "*.hpp")
install(TARGETS jaxbridge_headers EXPORT jaxbridgeTargets INCLUDES DESTINATION ${jaxbridge_include_dir})
install(EXPORT jaxbridgeTargets NAMESPACE jaxbridge:: DESTINATION ${jaxbridge_cmake_dir})

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/jaxbridgeConfig.cmake.in ${PROJECT_BINARY_DIR}/jaxbridgeConfig.cmake
  INSTALL_DESTINATION ${jaxbridge_cmake_dir})
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/jaxbridgeConfigVersion.cmake
  VERSION ${PROJECT_VERSION}
  COMPATIBILITY SameMinorVersion
  ARCH_INDEPENDENT)
install(FILES ${PROJECT_BINARY_DIR}/jaxbridgeConfig.cmake ${PROJECT_BINARY_DIR}/jaxbridgeConfigVersion.cmake
        DESTINATION ${jaxbridge_cmake_dir})
