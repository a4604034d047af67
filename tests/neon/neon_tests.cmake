# libpkv for AArch64 and the tests that compare its kernels, by a cross compiler and without any
# library for that processor: cmocka.h here stands for cmocka's, xxHash is compiled in.
target_compile_definitions(pkv PRIVATE XXH_INLINE_ALL)
target_compile_options(pkv PRIVATE -idirafter /usr/include) # xxhash.h, which is no processor's
set_source_files_properties(${PROJECT_SOURCE_DIR}/src/base/hash.c TARGET_DIRECTORY pkv
  PROPERTIES COMPILE_OPTIONS -Wno-array-bounds) # in xxHash's inlined code
set(tests ${PROJECT_SOURCE_DIR}/tests)
set(support)
foreach(name attn_case append_case weight_blocks)
  list(APPEND support ${tests}/support/${name}.c)
endforeach()
add_library(neon_support STATIC ${tests}/neon/neon_cmocka.c ${support})
target_include_directories(neon_support PUBLIC
  ${tests}/neon ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
target_link_libraries(neon_support PUBLIC pkv_flags pkv)
target_compile_definitions(neon_support PUBLIC PKV_TEST_THIN)
target_link_options(neon_support PUBLIC -static)
foreach(name diff/test_matmul diff/test_dense_ops diff/test_append diff/test_attend_blocks
    unit/test_dispatch)
  string(REGEX REPLACE ".*/test_" "" short ${name})
  add_executable(neon_${short} ${tests}/${name}.c)
  target_link_libraries(neon_${short} PRIVATE neon_support)
endforeach()
