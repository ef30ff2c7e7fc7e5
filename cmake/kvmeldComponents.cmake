# The optional parts, one function for the source tree and for the installed package.
#
# kvmeld_component(NAME) makes the target kvmeld::NAME and sets kvmeld_NAME_FOUND; where something is missing it sets
# kvmeld_NAME_REASON to one line that says what to do. It never stops the configuration itself.

set(kvmeld_known_components cuda llama)

function(kvmeld_component name)
  set(found FALSE)
  set(reason "")
  if(TARGET kvmeld::${name})
    set(found TRUE)
  elseif(name STREQUAL "cuda")
    _kvmeld_component_cuda()
  elseif(name STREQUAL "llama")
    _kvmeld_component_llama()
  else()
    list(JOIN kvmeld_known_components ", " known)
    set(reason "there is no component '${name}' (known: ${known})")
  endif()
  set(kvmeld_${name}_FOUND ${found} PARENT_SCOPE)
  set(kvmeld_${name}_REASON "${reason}" PARENT_SCOPE)
endfunction()

# Headers *.cuh. nvcc may be off the PATH, so the toolkit is searched, not the compiler.
macro(_kvmeld_component_cuda)
  find_package(CUDAToolkit 12.0 QUIET)
  if(CUDAToolkit_FOUND)
    add_library(kvmeld::cuda INTERFACE IMPORTED ${kvmeld_component_scope})
    target_link_libraries(kvmeld::cuda INTERFACE kvmeld::kvmeld CUDA::cudart)
    # A language standard, the only thing that a consumer's nvcc must be told. CMake 3.25 has no name for it.
    if("cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
      target_compile_features(kvmeld::cuda INTERFACE cuda_std_20)
    else()
      target_compile_options(kvmeld::cuda INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>")
    endif()
    set(found TRUE)
  else()
    set(reason "no CUDA Toolkit 12 or newer; install it, or set CUDAToolkit_ROOT")
  endif()
endmacro()

# llama.cpp: a target of the same build, an installed tree named by KVMELD_LLAMA_ROOT, or the default search paths.
macro(_kvmeld_component_llama)
  set(KVMELD_LLAMA_ROOT "" CACHE PATH "A folder with llama.cpp's include/ (llama.h, ggml.h, ...) and lib/")
  if(TARGET llama)
    add_library(kvmeld::llama INTERFACE IMPORTED ${kvmeld_component_scope})
    target_link_libraries(kvmeld::llama INTERFACE kvmeld::kvmeld llama)
    set(found TRUE)
  else()
    # Looked up anew each time, so that a changed root is followed.
    set(hints HINTS "${KVMELD_LLAMA_ROOT}" PATH_SUFFIXES include lib NO_CACHE)
    find_path(kvmeld_llama_include llama.h ${hints})
    find_library(kvmeld_llama_library llama ${hints})
    find_library(kvmeld_ggml_library ggml ${hints})
    find_library(kvmeld_ggml_base_library ggml-base ${hints})
    if(kvmeld_llama_include AND kvmeld_llama_library AND kvmeld_ggml_library AND kvmeld_ggml_base_library)
      add_library(kvmeld::llama INTERFACE IMPORTED ${kvmeld_component_scope})
      target_include_directories(kvmeld::llama INTERFACE "${kvmeld_llama_include}")
      target_link_libraries(kvmeld::llama INTERFACE kvmeld::kvmeld
        "${kvmeld_llama_library}" "${kvmeld_ggml_library}" "${kvmeld_ggml_base_library}")
      set(found TRUE)
    else()
      set(reason "no llama.h with libllama, libggml and libggml-base; set KVMELD_LLAMA_ROOT (examples/support/get_engine.sh builds one)")
    endif()
  endif()
endmacro()
