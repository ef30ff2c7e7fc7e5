# Bytes must not depend on how a program was built. Each tests/identity/*.cpp prints digests, one a line, and is built by
# every compiler, optimisation level and instruction set below; the test compares all outputs and prints the digest.

find_program(KVMELD_CLANGXX NAMES clang++ clang++-14 clang++-15 clang++-16 clang++-17 clang++-18 clang++-19)
find_program(KVMELD_GXX NAMES g++)
find_program(KVMELD_CCACHE ccache)
set(launcher "")
if(KVMELD_CCACHE)
  set(launcher "${KVMELD_CCACHE}")
endif()

set(identity_builds
  "O0:-O0"
  "O3:-O3"
  "native:-O3 -march=native -ffp-contract=fast"
  "portable:-O1 -DKVMELD_X86_DISPATCH=0")
# What processors other than x86 run: once is enough. -O3 and the native instruction set: each by one compiler, without --long.
set(left_out KVMELD_CLANGXX:portable)
set(identity_count 7)
if(NOT KVMELD_TEST_LONG)
  list(APPEND left_out KVMELD_GXX:O3 KVMELD_CLANGXX:native)
  set(identity_count 5)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND identity_builds "fma_off:-O2 -mavx2 -mfma -ffp-contract=off" "fma_fast:-O2 -mavx2 -mfma -ffp-contract=fast")
  set(identity_count 11)
endif()

# What this machine cannot build or run is said by the test, which then ends as skipped.
set(lacking "")
foreach(compiler IN ITEMS KVMELD_GXX:g++ KVMELD_CLANGXX:clang++)
  string(REPLACE ":" ";" compiler "${compiler}")
  list(GET compiler 0 variable)
  if(NOT ${variable})
    list(GET compiler 1 compiler_name)
    list(APPEND lacking "no ${compiler_name}")
  endif()
endforeach()
if(KVMELD_TEST_LONG AND EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo cpu_flags REGEX "^flags.* avx2 " LIMIT_COUNT 1)
  if(NOT cpu_flags AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(FILTER identity_builds EXCLUDE REGEX "mavx2")
    list(APPEND lacking "a processor without AVX2")
  endif()
endif()
list(JOIN lacking ", " lacking)

file(GLOB identity_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/identity/*.cpp")
foreach(source IN LISTS identity_sources)
  cmake_path(GET source STEM stem)
  set(programs "")
  foreach(compiler IN ITEMS KVMELD_GXX KVMELD_CLANGXX)
    if(NOT ${compiler})
      continue()
    endif()
    cmake_path(GET ${compiler} FILENAME compiler_name)
    foreach(build IN LISTS identity_builds)
      string(REGEX REPLACE ":.*" "" build_name "${build}")
      if("${compiler}:${build_name}" IN_LIST left_out)
        continue()
      endif()
      string(REGEX REPLACE "^[^:]*:" "" flags "${build}")
      separate_arguments(flags)
      set(program "${CMAKE_CURRENT_BINARY_DIR}/identity/${stem}_${compiler_name}_${build_name}")
      # Two steps, since ccache keeps objects only.
      add_custom_command(OUTPUT "${program}"
        COMMAND ${launcher} "${${compiler}}" -std=c++20 ${flags} "-I${PROJECT_SOURCE_DIR}/include" "-I${CMAKE_CURRENT_SOURCE_DIR}"
          -MD -MF "${program}.d" -MT "${program}" -c "${source}" -o "${program}.o"
        COMMAND "${${compiler}}" "${program}.o" -pthread -o "${program}"
        DEPENDS "${source}" DEPFILE "${program}.d" COMMENT "identity: ${stem}, ${compiler_name} ${build_name}" VERBATIM)
      list(APPEND programs "${program}")
    endforeach()
  endforeach()
  add_custom_target(identity_${stem} ALL DEPENDS ${programs})
  add_test(NAME identity/${stem} COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/support/equal_output.sh" ${identity_count} "${lacking}" ${programs})
  set_tests_properties(identity/${stem} PROPERTIES LABELS identity SKIP_RETURN_CODE 77)
endforeach()
add_test(NAME identity/equal_output COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/support/equal_output_check.sh")
set_tests_properties(identity/equal_output PROPERTIES LABELS identity)
add_custom_target(identity_equal_output)
file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/identity")
