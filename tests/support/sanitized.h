/* SPDX-License-Identifier: Apache-2.0 */
/* Whether this build watches itself: everything is slower there, and some of it not as measured. */
#ifndef PKV_TEST_SANITIZED_H
#define PKV_TEST_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED 0
#endif

#endif
