# Flags of every target of ours. No -march=native, no -ffast-math: masks and NaN must mean
# something.
add_library(pkv_flags INTERFACE)
# What users run: tables of addresses are read-only once it has started, the stack holds no code;
# overwritten return addresses and copies past an object's end are seen and end the process.
set(pkv_hardened -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack)
set(pkv_guards -fstack-protector-strong)
if(NOT PKV_SANITIZE AND CMAKE_BUILD_TYPE MATCHES "^(Release|RelWithDebInfo|MinSizeRel)$")
  list(APPEND pkv_guards -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3) # of optimised code alone
endif()
set(pkv_c_flags -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes -Werror
  -fno-math-errno -ffp-contract=off ${pkv_guards})
if(PKV_PYTHON_PACKAGE)
  list(REMOVE_ITEM pkv_c_flags -Werror) # pip runs with whatever compiler there is
endif()
target_compile_options(pkv_flags INTERFACE "$<$<COMPILE_LANGUAGE:C>:${pkv_c_flags}>")
target_compile_definitions(pkv_flags INTERFACE _GNU_SOURCE)
if(PKV_ASSERTS OR CMAKE_BUILD_TYPE STREQUAL "Debug")
  target_compile_definitions(pkv_flags INTERFACE PKV_ASSERTS=1)
endif()
if(PKV_SANITIZE)
  target_compile_options(pkv_flags INTERFACE -fsanitize=${PKV_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  target_link_options(pkv_flags INTERFACE -fsanitize=${PKV_SANITIZE})
  if(NOT PKV_FUZZ)
    # Lines and no variables: less to compile. Not -O1: tests that compute then take minutes each.
    target_compile_options(pkv_flags INTERFACE -g1)
  endif()
  # Instrumented code hides from gcc what it sees in a plain build.
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    target_compile_options(pkv_flags INTERFACE -Wno-maybe-uninitialized)
  endif()
endif()
if(PKV_COVERAGE)
  target_compile_options(pkv_flags INTERFACE --coverage -O1 -fprofile-update=atomic)
  target_link_options(pkv_flags INTERFACE --coverage)
endif()
if(PKV_FUZZ)
  target_compile_options(pkv_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
