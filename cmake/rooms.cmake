# A room is a folder of src/; its files are found, so that a new file needs no line here.
function(pkv_room_sources out)
  set(sources)
  foreach(room ${ARGN})
    if(room STREQUAL "cpu")
      set(folder src/backend/cpu)
    else()
      set(folder src/${room})
    endif()
    file(GLOB found CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${folder}/*.c)
    list(APPEND sources ${found})
  endforeach()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# One file an instruction set: only files so named get its flags, everything else is built for the baseline.
function(pkv_isa_flags)
  foreach(source ${ARGN})
    if(source MATCHES "_avx2\\.c$")
      set_source_files_properties(${source} TARGET_DIRECTORY pkv PROPERTIES COMPILE_OPTIONS
        "-mavx2;-mfma;-mf16c;-ffp-contract=off")
    endif()
  endforeach()
endfunction()

# Static library `name` of the given rooms; internal symbols stay reachable for the tests.
function(pkv_rooms name)
  pkv_room_sources(sources ${ARGN})
  if(NOT sources)
    file(WRITE ${CMAKE_BINARY_DIR}/${name}_empty.c "typedef int pkv_empty;\n")
    set(sources ${CMAKE_BINARY_DIR}/${name}_empty.c)
  endif()
  add_library(${name} STATIC ${sources})
  if(name STREQUAL "pkv")
    pkv_isa_flags(${sources})
  endif()
  target_include_directories(${name} PUBLIC
    $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>
    PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:pkv_flags>)
endfunction()

# The command `pkv` from the given rooms.
function(pkv_command target)
  pkv_room_sources(sources ${ARGN})
  if(sources)
    add_executable(${target} ${sources})
    set_target_properties(${target} PROPERTIES OUTPUT_NAME pkv)
    target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/src)
    target_link_libraries(${target} PRIVATE pkv_flags pkv_engine pkv PkgConfig::JANSSON)
  endif()
endfunction()
