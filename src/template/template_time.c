/* SPDX-License-Identifier: Apache-2.0 */
/* strftime_now: a date in English, whatever the machine's language. */
#include <stdio.h>

#include "template/template_parts.h"

typedef struct moment {
  int64_t year;
  int month, day, week_day, year_day, hour, minute, second; /* from 1, 1, Sunday 0, 1 */
} moment;

static bool leap(int64_t year) {
  return (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
}

static moment moment_of(int64_t now) {
  static const int days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  int64_t day = now / 86400;
  const int rest = (int)(now % 86400);
  moment m = {.year = 1970,
              .month = 1,
              .week_day = (int)((day + 4) % 7),
              .hour = rest / 3600,
              .minute = rest / 60 % 60,
              .second = rest % 60};
  m.year += 400 * (day / 146097);
  for (day %= 146097; day >= 365 + leap(m.year); m.year++)
    day -= 365 + leap(m.year);
  m.year_day = (int)day + 1;
  for (int i = 0; i < 12; i++) {
    const int n = days[i] + (i == 1 && leap(m.year));
    if (day < n) break;
    day -= n;
    m.month++;
  }
  m.day = (int)day + 1;
  return m;
}

/* One conversion; false: not known. plain: %-d, without the leading zero. */
static bool convert(char *out, size_t size, char c, bool plain, const moment *m) {
  static const char *const days[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                     "Thursday", "Friday", "Saturday"};
  static const char *const months[] = {"January",   "February", "March",    "April",
                                       "May",       "June",     "July",     "August",
                                       "September", "October",  "November", "December"};
  const int hour12 = m->hour % 12 == 0 ? 12 : m->hour % 12, year2 = (int)(m->year % 100);
  const char *const two = plain ? "%d" : "%02d";
  switch (c) {
  case 'a':
    return snprintf(out, size, "%.3s", days[m->week_day]) > 0;
  case 'A':
    return snprintf(out, size, "%s", days[m->week_day]) > 0;
  case 'b':
  case 'h':
    return snprintf(out, size, "%.3s", months[m->month - 1]) > 0;
  case 'B':
    return snprintf(out, size, "%s", months[m->month - 1]) > 0;
  case 'd':
    return snprintf(out, size, two, m->day) > 0;
  case 'e':
    return snprintf(out, size, plain ? "%d" : "%2d", m->day) > 0;
  case 'm':
    return snprintf(out, size, two, m->month) > 0;
  case 'y':
    return snprintf(out, size, two, year2) > 0;
  case 'Y':
    return snprintf(out, size, "%lld", (long long)m->year) > 0;
  case 'H':
    return snprintf(out, size, two, m->hour) > 0;
  case 'I':
    return snprintf(out, size, two, hour12) > 0;
  case 'M':
    return snprintf(out, size, two, m->minute) > 0;
  case 'S':
    return snprintf(out, size, two, m->second) > 0;
  case 'p':
    return snprintf(out, size, "%s", m->hour < 12 ? "AM" : "PM") > 0;
  case 'j':
    return snprintf(out, size, plain ? "%d" : "%03d", m->year_day) > 0;
  case 'F':
    return snprintf(out, size, "%lld-%02d-%02d", (long long)m->year, m->month, m->day) > 0;
  case 'T':
    return snprintf(out, size, "%02d:%02d:%02d", m->hour, m->minute, m->second) > 0;
  case 'D':
    return snprintf(out, size, "%02d/%02d/%02d", m->month, m->day, year2) > 0;
  case '%':
    return snprintf(out, size, "%%") > 0;
  default:
    return false;
  }
}

bool pkv_tpl_strftime(tpl_run *r, tpl_value *out, const tpl_text *format) {
  const moment m = moment_of(r->now > (int64_t)1 << 40 ? (int64_t)1 << 40 : r->now);
  const bool trusted = pkv_tpl_all_trusted(format);
  tpl_builder b = {0};
  for (size_t i = 0; i < format->n; i++) {
    char text[64];
    if (format->p[i] != '%') {
      if (!pkv_tpl_put_bytes(r, &b, format->p + i, 1, trusted)) return false;
      continue;
    }
    const bool plain = i + 1 < format->n && format->p[i + 1] == '-';
    i += 1 + (size_t)plain;
    if (i >= format->n || !convert(text, sizeof text, format->p[i], plain, &m))
      return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "a date's format that is not known");
    if (!pkv_tpl_put_bytes(r, &b, text, strlen(text), trusted)) return false;
  }
  return pkv_tpl_work(r, 8 * format->n) && pkv_tpl_built(r, &b, out);
}
