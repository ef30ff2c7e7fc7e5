# What only this project's own tests, examples and benchmarks are built with; nothing of it reaches a user.

option(KVMELD_WERROR "Treat warnings as errors" OFF)
set(KVMELD_SANITIZE "" CACHE STRING "Build everything with -fsanitize=THIS, for example address,undefined")

add_library(kvmeld_development INTERFACE)
target_compile_options(kvmeld_development INTERFACE
  -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow $<$<BOOL:${KVMELD_WERROR}>:-Werror>)
if(KVMELD_SANITIZE)
  target_compile_options(kvmeld_development INTERFACE
    -fsanitize=${KVMELD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1)
  target_link_options(kvmeld_development INTERFACE -fsanitize=${KVMELD_SANITIZE})
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()

# kvmeld_needs(WHAT PACKAGE FOUND): one clear line instead of a failure in the middle of a build.
function(kvmeld_needs what package found)
  if(NOT found)
    message(FATAL_ERROR "${what} need ${package}: install it, or configure without them")
  endif()
endfunction()
