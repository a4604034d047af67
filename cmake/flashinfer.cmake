# pkv_flashinfer.so: FlashInfer's decode kernels behind plain C (include/pkv/flashinfer.h), for
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
function(pkv_flashinfer_module name version)
  add_library(${name} MODULE src/measure/flashinfer_shim.cu)
  set_target_properties(${name} PROPERTIES PREFIX "" CUDA_ARCHITECTURES 90a
    CUDA_STANDARD 17 CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${name} PRIVATE include ${ARGN})
  # Its headers throw; the shim catches all of it.
  target_compile_options(${name} PRIVATE --expt-relaxed-constexpr -w -Xcompiler=-fexceptions)
  target_compile_definitions(${name} PRIVATE PKV_FLASHINFER_VERSION="${version}")
  target_link_libraries(${name} PRIVATE CUDA::cudart_static)
endfunction()
if(pkv_fi AND EXISTS "${pkv_fi}/include/flashinfer/attention/decode.cuh")
  set(pkv_fi_version "of unknown version")
  if(EXISTS "${pkv_fi}/../_build_meta.py")
    file(STRINGS "${pkv_fi}/../_build_meta.py" pkv_fi_line REGEX "^__version__")
    string(REGEX REPLACE ".*\"([^\"]+)\".*" "\\1" pkv_fi_version "${pkv_fi_line}")
  endif()
  message(STATUS "FlashInfer ${pkv_fi_version}: ${pkv_fi}")
  # Its own CCCL before the toolkit's: as include folders of ours, not as system ones.
  pkv_flashinfer_module(pkv_flashinfer "${pkv_fi_version}" "${pkv_fi}/include"
    "${pkv_fi}/cccl/libcudacxx/include"
    "${pkv_fi}/cccl/cub" "${pkv_fi}/cccl/thrust")
else()
  message(STATUS "FlashInfer: not found, route flashinfer will say so")
endif()

# The release that the seed's paper compares with, from PyPI's source package: its folder, unpacked.
set(PKV_FLASHINFER_025_DIR "" CACHE PATH "unpacked flashinfer_python-0.2.5, for bench paper")
if(PKV_FLASHINFER_025_DIR)
  pkv_flashinfer_module(pkv_flashinfer_025 0.2.5 "${PKV_FLASHINFER_025_DIR}/include"
    "${PKV_FLASHINFER_025_DIR}/3rdparty/cutlass/include")
  target_compile_definitions(pkv_flashinfer_025 PRIVATE PKV_FLASHINFER_OLD)
endif()
