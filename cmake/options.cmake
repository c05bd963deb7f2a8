# SPDX-License-Identifier: Apache-2.0
# What every target of ours is compiled with.

# __FILE__ and debug information name the checkout otherwise, and two builds of one source differ.
add_compile_options("-ffile-prefix-map=${PROJECT_SOURCE_DIR}=." "-ffile-prefix-map=${PROJECT_BINARY_DIR}=build")

# jaxbridge_own(target): warnings are for our own code alone, so they are no global flags, and they
# come with JAXBRIDGE_STRICT alone, so that a new compiler's new warning never stops a user's build.
function(jaxbridge_own target)
  if(JAXBRIDGE_STRICT)
    target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # Warns of std::string's operator+ itself (GCC bug 105651).
      target_compile_options(${target} PRIVATE -Wno-restrict)
    endif()
    target_compile_definitions(${target} PRIVATE _GLIBCXX_ASSERTIONS)
  endif()
endfunction()
