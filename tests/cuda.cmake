# Every .cuh compiled by nvcc with -std=c++20 and no other flag, linked twice into one program; and tests/cuda/*.cu.
# Custom commands rather than CMake's CUDA language: that needs nvcc on the PATH, and CMake 3.25 knows no CUDA20.

find_package(CUDAToolkit 12.0 QUIET)
if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
  skipped_test(cuda/headers "no nvcc of CUDA 12 or newer")
  skipped_test(cuda/internal_linkage "no nvcc of CUDA 12 or newer")
  skip_folder(cuda cu "no nvcc of CUDA 12 or newer")
  return()
endif()
set(nvcc "${CUDAToolkit_NVCC_EXECUTABLE}")
set(nvcc_command ${launcher} "${nvcc}" -std=c++20 "-I${PROJECT_SOURCE_DIR}/include")
set(cuda_dir "${CMAKE_CURRENT_BINARY_DIR}/cuda_objects")
file(MAKE_DIRECTORY "${cuda_dir}")

# nvcc_object(SOURCE OBJECT [FLAG...])
function(nvcc_object source object)
  add_custom_command(OUTPUT "${object}"
    COMMAND ${nvcc_command} ${ARGN} -MD -MF "${object}.d" -MT "${object}" -c "${source}" -o "${object}"
    DEPENDS "${source}" DEPFILE "${object}.d" COMMENT "nvcc: ${source}" VERBATIM)
endfunction()

file(GLOB_RECURSE cuda_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/include/*.cuh")
if(cuda_headers)
  set(objects "")
  set(all "// Every CUDA header once more, beside the umbrella.\n#include <kvmeld/kvmeld.hpp>\n")
  foreach(header IN LISTS cuda_headers)
    string(REGEX REPLACE "[/.]" "_" name "${header}")
    file(CONFIGURE OUTPUT "${cuda_dir}/${name}.cu" CONTENT "#include <${header}>\n")
    nvcc_object("${cuda_dir}/${name}.cu" "${cuda_dir}/${name}.o")
    list(APPEND objects "${cuda_dir}/${name}.o")
    string(APPEND all "#include <${header}>\n")
  endforeach()
  string(APPEND all "int main() {}\n")
  file(CONFIGURE OUTPUT "${cuda_dir}/all.cu" CONTENT "${all}")
  nvcc_object("${cuda_dir}/all.cu" "${cuda_dir}/all.o")
  # What a file under nvcc includes beside them: sessions, replicas, stores; a warning of nvcc's is an error there. Bodies of templates
  # are read where they are instantiated.
  file(GLOB beside RELATIVE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/include/kvmeld/replica/*.hpp"
    "${PROJECT_SOURCE_DIR}/include/kvmeld/stores/*.hpp"
    "${PROJECT_SOURCE_DIR}/include/kvmeld/anchors/*.hpp"
    "${PROJECT_SOURCE_DIR}/include/kvmeld/coordinator/coordinator.hpp")
  list(FILTER beside EXCLUDE REGEX "openssl|zstd")
  if(NOT kvmeld_redis_FOUND)
    list(FILTER beside EXCLUDE REGEX "redis")
  endif()
  set(sessions "")
  foreach(header IN LISTS beside)
    string(APPEND sessions "#include <${header}>\n")
  endforeach()
  file(CONFIGURE OUTPUT "${cuda_dir}/sessions.cu" @ONLY CONTENT "#include <kvmeld/cuda/render.cuh>
${sessions}using Merger = decltype(kvmeld::merger());
template class kvmeld::replica::RenderWorker<Merger>;
template class kvmeld::replica::AgentSession<>;
")
  nvcc_object("${cuda_dir}/sessions.cu" "${cuda_dir}/sessions.o" -Werror all-warnings)
  list(APPEND objects "${cuda_dir}/sessions.o")
  # And two files that never saw nvcc, in the same program.
  foreach(unit IN ITEMS host host_again)
    file(CONFIGURE OUTPUT "${cuda_dir}/${unit}.cpp" CONTENT "#include <kvmeld/kvmeld.hpp>\n#include <kvmeld/gather.hpp>\n")
  endforeach()
  add_library(cuda_headers_host OBJECT "${cuda_dir}/host.cpp" "${cuda_dir}/host_again.cpp")
  target_link_libraries(cuda_headers_host PRIVATE kvmeld::kvmeld)
  add_custom_command(OUTPUT "${cuda_dir}/headers"
    COMMAND "${nvcc}" ${objects} "${cuda_dir}/all.o" $<TARGET_OBJECTS:cuda_headers_host> -o "${cuda_dir}/headers"
    DEPENDS ${objects} "${cuda_dir}/all.o" cuda_headers_host $<TARGET_OBJECTS:cuda_headers_host>
    COMMENT "nvcc: CUDA headers linked twice" COMMAND_EXPAND_LISTS VERBATIM)
  add_custom_target(cuda_headers ALL DEPENDS "${cuda_dir}/headers")
  add_test(NAME cuda/headers COMMAND "${cuda_dir}/headers")
endif()

file(GLOB cuda_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cu")
if(cuda_sources)
  add_library(cuda_test_main STATIC support/cuda_main.cpp)
  target_link_libraries(cuda_test_main PUBLIC Catch2::Catch2)
  target_include_directories(cuda_test_main SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  # From Catch2 3 on there is a library to link, too.
  get_target_property(catch_type Catch2::Catch2 TYPE)
  set(catch_library "")
  if(NOT catch_type STREQUAL "INTERFACE_LIBRARY")
    set(catch_library "$<TARGET_FILE:Catch2::Catch2>")
  endif()
  foreach(source IN LISTS cuda_sources)
    cmake_path(GET source STEM stem)
    set(program "${cuda_dir}/test_${stem}")
    nvcc_object("${source}" "${program}.o" "-I${CMAKE_CURRENT_SOURCE_DIR}")
    add_custom_command(OUTPUT "${program}"
      COMMAND "${nvcc}" "${program}.o" $<TARGET_FILE:cuda_test_main> ${catch_library} -o "${program}"
      DEPENDS "${program}.o" cuda_test_main COMMENT "nvcc: linking ${stem}" VERBATIM)
    add_custom_target(cuda_${stem} ALL DEPENDS "${program}")
    add_test(NAME cuda/${stem} COMMAND "${program}")
    set_tests_properties(cuda/${stem} PROPERTIES LABELS cuda SKIP_RETURN_CODE 77)
    list(APPEND cuda_test_objects "${program}.o")
  endforeach()
  add_test(NAME cuda/internal_linkage
    COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/cuda/internal_linkage.sh" "${CMAKE_NM}" ${cuda_test_objects})
  set_tests_properties(cuda/internal_linkage PROPERTIES LABELS cuda)
  add_custom_target(cuda_internal_linkage DEPENDS ${cuda_test_objects})
endif()
