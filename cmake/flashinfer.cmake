# pkv_flashinfer.so: FlashInfer's decode kernels behind plain C (src/measure/flashinfer_shim.h), for
# `pkv calibrate` and `pkv bench policy`. Optional: where the headers of the PyPI package
# flashinfer-python are. PKV_FLASHINFER_DIR names its folder flashinfer/data, or OFF.
set(PKV_FLASHINFER_DIR "" CACHE PATH "FlashInfer's folder flashinfer/data; OFF = without it")
set(pkv_fi "${PKV_FLASHINFER_DIR}")
if(pkv_fi STREQUAL "")
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(Python3_FOUND)
    execute_process(COMMAND ${Python3_EXECUTABLE} -c "import importlib.util as u, os
spec = u.find_spec('flashinfer')
print(os.path.join(spec.submodule_search_locations[0], 'data') if spec else '')"
      OUTPUT_VARIABLE pkv_fi OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
if(pkv_fi AND EXISTS "${pkv_fi}/include/flashinfer/attention/decode.cuh")
  message(STATUS "FlashInfer: ${pkv_fi}")
  add_library(pkv_flashinfer MODULE src/measure/flashinfer_shim.cu)
  set_target_properties(pkv_flashinfer PROPERTIES PREFIX "" CUDA_ARCHITECTURES 90a
    CUDA_STANDARD 17 CUDA_VISIBILITY_PRESET hidden)
  # Its own CCCL before the toolkit's: as include folders of ours, not as system ones.
  target_include_directories(pkv_flashinfer PRIVATE src "${pkv_fi}/include"
    "${pkv_fi}/cccl/libcudacxx/include" "${pkv_fi}/cccl/cub" "${pkv_fi}/cccl/thrust")
  # Its headers throw; the shim catches all of it.
  target_compile_options(pkv_flashinfer PRIVATE --expt-relaxed-constexpr -w -Xcompiler=-fexceptions)
  target_link_libraries(pkv_flashinfer PRIVATE CUDA::cudart_static)
else()
  message(STATUS "FlashInfer: not found, route flashinfer will say so")
endif()
