/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/terminal.h"

#include <langinfo.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"

#define REDRAW_NS      INT64_C(100000000)
#define DEFAULT_WIDTH  80
#define SMALLEST_WIDTH 40
#define BAR_LIMIT      60

void pkv_terminal_init(pkv_terminal *t) {
  struct winsize size;
  memset(t, 0, sizeof *t);
  t->is_terminal = isatty(STDOUT_FILENO) == 1;
  t->width = DEFAULT_WIDTH;
  t->quarter = -1;
  if (t->is_terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    t->width = size.ws_col;
  if (t->width < SMALLEST_WIDTH) t->width = SMALLEST_WIDTH;
  (void)setlocale(LC_CTYPE, "");
  t->utf8 = strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

void pkv_terminal_clear(pkv_terminal *t) {
  if (t->bar_shown) (void)fputs("\r\033[K", stdout);
  t->bar_shown = false;
  (void)fflush(stdout);
}

void pkv_terminal_line(pkv_terminal *t, const char *format, ...) {
  va_list args;
  pkv_terminal_clear(t);
  va_start(args, format);
  (void)vprintf(format, args);
  va_end(args);
  (void)putchar('\n');
  (void)fflush(stdout);
  t->drawn_ns = 0; /* the bar comes back with the next call */
}

static int percent(double done) {
  if (!(done > 0.0)) return 0;
  return done >= 1.0 ? 100 : (int)(100.0 * done);
}

static void draw_bar(const pkv_terminal *t, const pkv_bar *bar, int cells) {
  const int full = cells * percent(bar->done) / 100;
  (void)printf("%s ", bar->label);
  (void)fputs(t->utf8 ? "\033[36m" : "[", stdout);
  for (int i = 0; i < cells; i++) {
    const char *const cell = t->utf8 ? "\xe2\x94\x81" : "#";
    if (i == full) (void)fputs(t->utf8 ? "\033[90m" : "", stdout);
    (void)fputs(i < full || t->utf8 ? cell : ".", stdout);
  }
  (void)fputs(t->utf8 ? "\033[0m" : "]", stdout);
  (void)printf(" %3d %%  ", percent(bar->done));
}

/* Outside a terminal: a line whenever the whole reached the next quarter. */
static void plain_progress(pkv_terminal *t, const pkv_bar *bars, int count, const char *note) {
  double sum = 0.0;
  for (int i = 0; i < count; i++)
    sum += bars[i].done > 1.0 ? 1.0 : bars[i].done;
  const int quarter = (int)(4.0 * sum / count);
  if (quarter <= t->quarter) return;
  t->quarter = quarter;
  for (int i = 0; i < count; i++)
    (void)printf("%s%s %d %%", i == 0 ? "-- " : ", ", bars[i].label, percent(bars[i].done));
  (void)printf("%s%s\n", note[0] != '\0' ? ", " : "", note);
  (void)fflush(stdout);
}

void pkv_terminal_bars(pkv_terminal *t, const pkv_bar *bars, int count, const char *note,
                       bool now) {
  const int64_t clock = pkv_clock_ns();
  if (!t->is_terminal) {
    plain_progress(t, bars, count, note);
    return;
  }
  if (!now && t->bar_shown && clock - t->drawn_ns < REDRAW_NS) return;
  int used = (int)strlen(note) + 1;
  for (int i = 0; i < count; i++)
    used += (int)strlen(bars[i].label) + 11;
  int cells = (t->width - used) / count;
  if (cells > BAR_LIMIT) cells = BAR_LIMIT;
  if (cells < 4) cells = 4;
  (void)fputs("\r\033[K", stdout);
  for (int i = 0; i < count; i++)
    draw_bar(t, &bars[i], cells);
  (void)fputs(note, stdout);
  (void)fflush(stdout);
  t->bar_shown = true;
  t->drawn_ns = clock;
}

/* Does the newline in front of `next` end a line of its own: a paragraph, or an item of a list? */
static bool breaks_line(char next) {
  return next == '\n' || next == '-' || next == '*' || (next >= '0' && next <= '9');
}

size_t pkv_wrap_line(const char *text, size_t bytes, int columns, bool final) {
  size_t blank = 0; /* bytes up to and with the last blank that fits */
  int column = 0;
  for (size_t i = 0; i < bytes; i++) {
    const unsigned char c = (unsigned char)text[i];
    const bool is_blank = c == ' ' || c == '\n';
    if (c == '\n' && i + 1 < bytes && breaks_line(text[i + 1])) return i + 1;
    if (c == '\n' && i + 1 == bytes) return final ? bytes : 0;
    if ((c & 0xc0u) == 0x80u) continue; /* inside a character */
    if (column == columns && !is_blank) return blank > 0 ? blank : i;
    if (is_blank && i > 0) blank = i + 1;
    if (column < columns) column++;
  }
  return final ? bytes : 0;
}

void pkv_text_tame(char *text, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f) text[i] = ' ';
}
