/* SPDX-License-Identifier: Apache-2.0 */
/* The page at "/", made from dashboard.html when the build is configured. */
#ifndef PKV_SERVER_DASHBOARD_PAGE_H
#define PKV_SERVER_DASHBOARD_PAGE_H

#include <stddef.h>

extern const unsigned char pkv_dashboard_page[];
extern const size_t pkv_dashboard_page_bytes;

#endif
