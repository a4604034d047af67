# libpkv for the Python package (pyproject.toml sets PKV_PYTHON_PACKAGE): with CUDA where there is a
# compiler and PKV_CUDA does not say otherwise; for another GPU than the default target's add
# -DCMAKE_CUDA_ARCHITECTURES.
find_program(PKV_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
if(PKV_NVCC)
  set(pkv_cuda_default ON)
  if(NOT DEFINED CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${PKV_NVCC})
  endif()
endif()

# One file persistentkv/libpkv.so: wheels hold no links, so it has no version in its name, and
# xxHash is compiled in.
function(pkv_python_library)
  target_compile_definitions(pkv PRIVATE XXH_INLINE_ALL)
  pkv_shared(pkv ARCHIVES pkv LIBRARIES ${pkv_cuda_runtime})
  set_property(TARGET pkv_shared PROPERTY VERSION)
  set_property(TARGET pkv_shared PROPERTY SOVERSION)
  install(TARGETS pkv_shared LIBRARY DESTINATION persistentkv)
endfunction()
