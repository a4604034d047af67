/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines and one progress bar below them. On a terminal the bar is redrawn in place; elsewhere there
 * is a plain line each quarter of the way. Text that a model wrote is printed without its control
 * characters.
 */
#ifndef PKV_CLI_TERMINAL_H
#define PKV_CLI_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct pkv_terminal {
  bool is_terminal, utf8, bar_shown;
  int width;
  int64_t drawn_ns; /* when the bar was drawn last */
  int quarter;      /* plain mode: the last quarter that was told */
} pkv_terminal;

typedef struct pkv_bar {
  const char *label;
  double done; /* 0 .. 1 */
} pkv_bar;

/* Looks at stdout. */
void pkv_terminal_init(pkv_terminal *t);
/* Prints a line above the bar. */
void pkv_terminal_line(pkv_terminal *t, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Draws the bars with `note` behind them, at most ten times a second unless `now` is set. */
void pkv_terminal_bars(pkv_terminal *t, const pkv_bar *bars, int count, const char *note, bool now);
void pkv_terminal_clear(pkv_terminal *t); /* takes the bar away */

/*
 * How many bytes of text[bytes] make the next line of at most `columns` columns: up to the end of a
 * paragraph or list item, else up to the last blank that fits, else as many characters as fit.
 * 0: no complete line yet (more may come); `final` gives the rest then. Other newlines count as
 * blanks; blanks behind a line belong to it.
 */
size_t pkv_wrap_line(const char *text, size_t bytes, int columns, bool final);
/* Replaces control characters by blanks, in place. */
void pkv_text_tame(char *text, size_t bytes);

#endif
