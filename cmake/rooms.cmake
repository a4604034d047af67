# The server's page as bytes in a C file.
function(pkv_page_source out)
  set(page ${PROJECT_SOURCE_DIR}/src/server/dashboard.html)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${page})
  file(READ ${page} hex HEX)
  string(REGEX REPLACE "(................................................)" "\\1\n" hex "${hex}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
  set(source ${PROJECT_BINARY_DIR}/dashboard_page.c)
  file(CONFIGURE OUTPUT ${source} CONTENT
    "#include \"server/dashboard_page.h\"\n
const unsigned char pkv_dashboard_page[] = {\n@hex@\n};
const size_t pkv_dashboard_page_bytes = sizeof pkv_dashboard_page;\n" @ONLY)
  set(${out} ${source} PARENT_SCOPE)
endfunction()

# A room is a folder of src/; its files are found, so that a new file needs no line here.
function(pkv_room_sources out)
  set(sources)
  foreach(room ${ARGN})
    set(folder src/${room})
    if(room STREQUAL "cpu" OR room STREQUAL "cuda")
      set(folder src/backend/${room})
    endif()
    file(GLOB found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.c)
    list(APPEND sources ${found})
    if(room STREQUAL "server")
      pkv_page_source(found)
      list(APPEND sources ${found})
    endif()
    if(room STREQUAL "cuda")
      file(GLOB found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cu)
      list(APPEND sources ${found})
    endif()
  endforeach()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# One file an instruction set: only files so named get its flags, everything else is built for the
# baseline. On other processors such a file compiles to nothing.
function(pkv_isa_flags target)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    foreach(source ${ARGN})
      if(source MATCHES "_neondot\\.c$")
        set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
          "-march=armv8.2-a+dotprod")
      endif()
    endforeach()
  endif()
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    return()
  endif()
  foreach(source ${ARGN})
    if(source MATCHES "_avx2\\.c$")
      set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
        "-mavx2;-mfma;-mf16c;-ffp-contract=off")
    elseif(source MATCHES "_avx512\\.c$")
      set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
        "-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-ffp-contract=off")
    elseif(source MATCHES "_avx512vnni\\.c$")
      set(flags "-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vnni")
      set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
        "${flags};-ffp-contract=off")
    elseif(source MATCHES "_avx512bf16\\.c$")
      set(flags "-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512bf16")
      set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
        "${flags};-ffp-contract=off")
    endif()
  endforeach()
endfunction()

# Static library `name` of the given rooms; internal symbols stay reachable for the tests.
function(pkv_rooms name)
  pkv_room_sources(sources ${ARGN})
  if(NOT sources)
    file(WRITE ${PROJECT_BINARY_DIR}/${name}_empty.c "typedef int pkv_empty;\n")
    set(sources ${PROJECT_BINARY_DIR}/${name}_empty.c)
  endif()
  add_library(${name} STATIC ${sources})
  if(name STREQUAL "pkv")
    pkv_isa_flags(pkv ${sources})
  endif()
  target_include_directories(${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:pkv_flags>)
endfunction()

# Shared library lib<name>.so of the static libraries ARCHIVES, whole, and the foreign LIBRARIES
# they need. It exports what tools/abi.txt lists for those archives, and nothing else.
function(pkv_shared name)
  cmake_parse_arguments(arg "" "" "ARCHIVES;LIBRARIES" ${ARGN})
  file(STRINGS ${PROJECT_SOURCE_DIR}/tools/abi.txt lines REGEX "^[a-z]")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/tools/abi.txt)
  set(symbols)
  foreach(line ${lines})
    string(REPLACE " " ";" line "${line}")
    list(GET line 0 library)
    if(library IN_LIST arg_ARCHIVES)
      list(GET line 1 symbol)
      string(APPEND symbols "    ${symbol};\n")
    endif()
  endforeach()
  set(script ${PROJECT_BINARY_DIR}/${name}.map)
  file(CONFIGURE OUTPUT ${script}
    CONTENT "PKV_0 {\n  global:\n@symbols@  local:\n    *;\n};\n" @ONLY)

  file(WRITE ${PROJECT_BINARY_DIR}/${name}_shared.c "typedef int pkv_empty;\n")
  add_library(${name}_shared SHARED ${PROJECT_BINARY_DIR}/${name}_shared.c)
  set_target_properties(${name}_shared PROPERTIES OUTPUT_NAME ${name} EXPORT_NAME ${name}
    VERSION ${PROJECT_VERSION} SOVERSION 0 LINK_DEPENDS ${script})
  target_include_directories(${name}_shared INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  set(whole)
  foreach(archive ${arg_ARCHIVES})
    string(APPEND whole ,$<TARGET_FILE:${archive}>)
    set_property(TARGET ${name}_shared APPEND PROPERTY LINK_DEPENDS $<TARGET_FILE:${archive}>)
    add_dependencies(${name}_shared ${archive})
  endforeach()
  target_link_libraries(${name}_shared PRIVATE
    "$<BUILD_INTERFACE:-Wl,--whole-archive${whole},--no-whole-archive>"
    "$<BUILD_INTERFACE:${arg_LIBRARIES}>" Threads::Threads m)
  target_link_options(${name}_shared PRIVATE
    -Wl,--version-script=${script} -Wl,-Bsymbolic-functions -Wl,-z,defs -Wl,--as-needed
    ${pkv_hardened} $<$<BOOL:${PKV_COVERAGE}>:--coverage>)
endfunction()

# The command `pkv` from the given rooms; <target>_parts are its objects, which tests link as well.
function(pkv_command target)
  pkv_room_sources(sources ${ARGN})
  set(libraries pkv_flags pkv_server pkv_engine pkv PkgConfig::JANSSON)
  add_library(${target}_parts OBJECT ${sources})
  pkv_isa_flags(${target}_parts ${sources})
  target_include_directories(${target}_parts PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target}_parts PRIVATE ${libraries})
  add_executable(${target} $<TARGET_OBJECTS:${target}_parts>)
  set_target_properties(${target} PROPERTIES OUTPUT_NAME pkv)
  target_link_options(${target} PRIVATE ${pkv_hardened})
  target_link_libraries(${target} PRIVATE ${libraries})
endfunction()

# CUDA, where it is wanted, there is a compiler, and the room has files. Sets PKV_HAVE_CUDA.
macro(pkv_find_cuda)
  set(PKV_HAVE_CUDA OFF)
  pkv_room_sources(cuda_sources cuda)
  if(PKV_CUDA AND cuda_sources)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a-real) # ./run build --all-arch: all of them
    endif()
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    # C-like: nothing of the C++ runtime library is needed.
    string(APPEND CMAKE_CUDA_FLAGS " -Xcompiler=-fno-exceptions,-fno-threadsafe-statics")
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(PKV_HAVE_CUDA ON)
    if(PKV_CUDA_STRICT)
      file(GLOB fast_sets CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/backend/cuda/decode_*_64.cu
        ${PROJECT_SOURCE_DIR}/src/backend/cuda/decode_*_128.cu)
      # One of its kernels may spill a little, which tools/check_cuda_build holds it to.
      list(REMOVE_ITEM fast_sets ${PROJECT_SOURCE_DIR}/src/backend/cuda/decode_e4m3_128.cu)
      set_source_files_properties(${fast_sets} PROPERTIES COMPILE_OPTIONS
        "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error")
    endif()
  endif()
endmacro()

# The default build makes the library for one architecture. That the kernels compile for the others,
# too, is seen on one set of each kind; `./run build --all-arch` puts all into the library.
function(pkv_cuda_other_targets)
  if(CMAKE_CUDA_ARCHITECTURES STREQUAL "90a-real")
    set(room ${PROJECT_SOURCE_DIR}/src/backend/cuda)
    add_library(pkv_cuda_other OBJECT ${room}/decode_f16_64.cu ${room}/append.cu
      ${room}/shared_f16.cu)
    target_include_directories(pkv_cuda_other PRIVATE
      ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    set_target_properties(pkv_cuda_other PROPERTIES
      CUDA_ARCHITECTURES "80-real;86-real;89-real;90-virtual")
  endif()
endfunction()
