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
  pkv_python_install(pkv_shared)
endfunction()

# persistentkv/libpkv_engine.so beside it, for persistentkv.Engine, where the libraries are that it
# needs; the package works without.
function(pkv_python_engine)
  pkg_check_modules(PCRE2 IMPORTED_TARGET libpcre2-8)
  pkg_check_modules(UTF8PROC IMPORTED_TARGET libutf8proc)
  pkg_check_modules(JANSSON IMPORTED_TARGET jansson>=2.14)
  if(NOT PCRE2_FOUND OR NOT UTF8PROC_FOUND OR NOT JANSSON_FOUND)
    message(WARNING "no persistentkv.Engine: it needs PCRE2, utf8proc and Jansson")
    return()
  endif()
  set(foreign PkgConfig::PCRE2 PkgConfig::UTF8PROC PkgConfig::JANSSON)
  pkv_rooms(pkv_engine template grammar model engine)
  target_compile_definitions(pkv_engine PRIVATE XXH_INLINE_ALL)
  target_link_libraries(pkv_engine PUBLIC pkv PRIVATE ${foreign})
  pkv_shared(pkv_engine ARCHIVES pkv pkv_engine LIBRARIES ${foreign} ${pkv_cuda_runtime})
  pkv_python_install(pkv_engine_shared)
endfunction()

function(pkv_python_install library)
  set_property(TARGET ${library} PROPERTY VERSION)
  set_property(TARGET ${library} PROPERTY SOVERSION)
  install(TARGETS ${library} LIBRARY DESTINATION persistentkv)
endfunction()
