#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits what L2 is worth to attention that reads every row, and checks it on steps left out.

    bench/fit_l2.py RESULTS.csv... [--cells bench/cells/l2.cells] [--route balanced] [--sms 132]
        [--check RESULTS.csv]

The model of `pkv bench sched --simulate` (src/cli/bench_sched_{cost,reuse}.h), a layer:

    latency + row time * rows + ((all / L2 rate)^p + (missed / memory rate)^p)^(1/p)

`balanced` cuts the line of (row, KV head) segments into two equal parts an SM, which are read at
one speed, the last segment of a part first. So it is known when each place of a prefix is read, and
how many different bytes are read until it is read again (their footprint; Xiang, Ding, Luo, Bao
2013, "HOTL"). It is still there with the chance min(1, L2 / footprint).

Unknown are latency, row time, both rates, L2's size and p. Half of the steps are fitted and the
others checked, then the other way round; each is predicted from all others; then all are fitted.
Errors are relative. --check: steps of another run, by what was fitted; those with their rows in
another order ("permuted") apart, as the model has groups side by side. Cells of the comparison with
peers (shared_b.., tree_..) are known by name. Needs numpy.
"""
import argparse
import itertools
import re
import sys

import numpy
import result_files

TOKEN = 4096  # bytes of a layer: 8 KV heads of 128, K and V in 2 bytes


def geometry(path):
    """{cell: (total, unique, shared in bytes, rows)} of a file with GROUPSxROWSxPREFIX+OWN."""
    cells = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            words = line.split("#")[0].split()
            shared = re.fullmatch(r"(\d+)x(\d+)x(\d+)\+(\d+)", words[1]) if words[1:] else None
            alone = re.fullmatch(r"(\d+)x(\d+)", words[1]) if words[1:] else None
            if shared:
                groups, rows, prefix, own = map(int, shared.groups())
                tokens = (groups * rows * (prefix + own), groups * (prefix + rows * own),
                          groups * prefix)
                count = groups * rows
            elif alone:
                length, rows = map(int, alone.groups())
                tokens = (rows * length, rows * length, 0)
                count = rows
            else:
                continue
            cells[words[0]] = (*(TOKEN * n for n in tokens), count)
    return cells


def named(cell):
    """The same of a cell of bench/peer_cells.py, None of others."""
    one = re.fullmatch(r"shared_b(\d+)_p(\d+)_s(\d+)", cell)
    two = re.fullmatch(r"tree_(\d+)x(\d+)_(\d+)x(\d+)", cell)
    if not one and not two:
        return None
    groups, prefix, rows, own = (map(int, two.groups()) if two else
                                 (1, int(one[2]), int(one[1]), int(one[3])))
    return tuple(TOKEN * n for n in (groups * rows * (prefix + own), groups * (prefix + rows * own),
                                     groups * prefix)) + (groups * rows,)


# --- the walk over the plan --------------------------------------------------------------------

HEADS, PLACES = 8, 4  # KV heads of a row; places of a prefix that are looked at (16 fit the same)


def reads(groups, rows, parts):
    """(when each place of each group and head is read, [group, head, place, row] in order, and when
    all ends) in segments' times."""
    segments = groups * rows * HEADS
    part = segments / parts
    at = numpy.arange(segments)[:, None] + (numpy.arange(PLACES) + 0.5) / PLACES
    first = numpy.minimum((at / part).astype(int), parts - 1) * part
    start = numpy.maximum(first, numpy.floor(at))
    end = numpy.minimum(first + part, numpy.floor(at) + 1)
    when = (first + part - end) + (at - start)
    return numpy.sort(when.reshape(groups, rows, HEADS, PLACES).transpose(0, 2, 3, 1)), part


def missed(shape, l2, sms):
    """Bytes of a step that come from memory: (total, unique, shared, rows) of a cell."""
    total, unique, shared, count = shape
    if not shared:
        return total
    rows = round((total - unique) / shared) + 1
    groups = max(1, round(count / rows))
    when, span = reads(groups, rows, 2 * sms)
    gaps = numpy.sort(numpy.diff(when).ravel())
    if not len(gaps):
        return total
    ends = numpy.sort(numpy.concatenate([when[..., 0].ravel(), span - when[..., -1].ravel()]))
    window = numpy.minimum(gaps, 0.999 * span)
    untouched = numpy.zeros_like(window)  # place-times of windows that see nothing of a place
    for waits in (gaps, ends):
        sums = numpy.concatenate([[0], numpy.cumsum(waits)])
        longer = numpy.searchsorted(waits, window, side="right")
        untouched += sums[-1] - sums[longer] - (len(waits) - longer) * window
    touched = 1 - untouched / (span - window) / (groups * HEADS * PLACES)
    own = (unique - shared) * window / span
    footprint = numpy.clip(shared * touched + own, 1, shared + own)
    return unique + (total - unique) * (1 - numpy.mean(numpy.minimum(1, l2 / footprint)))


def walk_time(known, rows, misses, power):
    latency, row, memory, l2_rate = known
    spent = (rows[:, 0] / l2_rate) ** power + (misses / memory) ** power
    return latency + row * rows[:, 3] + spent ** (1 / power)


def walk_fit(rows, tables, picked):
    """(error, L2 MB, power, (latency, row, memory, L2 rate), relative errors of all)"""
    best = None
    for l2, misses in tables.items():
        for power in (1.1, 1.2, 1.3, 1.4):
            known = numpy.array([5.0, 0.07, 4.6e6, 9.8e6])

            def off(at):
                return walk_time(at, rows, misses, power) / rows[:, 4] - 1

            for _ in range(12):  # Gauss and Newton
                now = off(known)
                slopes = [(off(known * (1 + 1e-3 * (i == numpy.arange(4)))) - now)[picked]
                          / (1e-3 * known[i]) for i in range(4)]
                step = numpy.linalg.lstsq(numpy.stack(slopes, 1), -now[picked], rcond=None)[0]
                known = known + numpy.clip(step, -0.3 * known, 0.3 * known)
            now = off(known)
            error = numpy.sum(now[picked] ** 2)
            if best is None or error < best[0]:
                best = (error, l2, power, known, now)
    return best


def tell(name, off):
    print(f"{name:22} {len(off)} steps: error mean {numpy.mean(abs(off)):.1%}, largest "
          f"{max(abs(off)):.1%}, within 10 %: {numpy.sum(abs(off) <= 0.1)}")


def walk(names, rows, sms):
    """Fits, says how well, and returns (latency, row, memory, L2 rate), L2 MB and power."""
    tables = {l2: numpy.array([missed(r[:4], l2 * 1e6, sms) for r in rows])
              for l2 in range(24, 36, 2)}
    every = numpy.arange(len(rows))

    for name, fitted, checked in (("fit even, check odd", every[0::2], every[1::2]),
                                  ("fit odd, check even", every[1::2], every[0::2])):
        tell(name, walk_fit(rows, tables, fitted)[4][checked])
    alone = numpy.array([walk_fit(rows, tables, numpy.delete(every, i))[4][i] for i in every])
    tell("each from all others", alone)
    _, l2, power, known, off = walk_fit(rows, tables, every)
    tell("all", off)
    once = 1e-6 * (known[2] ** -power + known[3] ** -power) ** (-1 / power)
    print(f"read_us {known[0]:.2f}, row_us {known[1]:.4f}, read_tb_s {once:.3f} (memory alone "
          f"{known[2] / 1e6:.2f}), l2_tb_s {known[3] / 1e6:.2f}, l2_mb {l2}, overlap {power}, "
          f"parts {2 * sms}")
    for name, row, error, left, misses in zip(names, rows, off, alone, tables[l2]):
        again = row[0] - row[1]
        print(f"  {name:22} {row[3]:4.0f} rows, {row[2] / 1e6:6.1f} MB shared, {row[0] / 1e6:7.1f} "
              f"MB read: {row[4]:7.2f} us, model {error:+.1%}, from all others {left:+.1%}"
              + (f", hits {(row[0] - misses) / again:.2f}" if again > 0 else ""))
    return known, l2, power


def steps_of(paths, shapes, route):
    """{(cell, whether its rows are in another order): (total, unique, shared, rows, us)}"""
    found = {}
    for row in (row for path in paths for row in result_files.read(path)):
        time = result_files.number(row, "gpu_us")
        shape = shapes.get(row["cell"]) or named(row["cell"])
        if row["route"] == route and shape and time:
            key = row["cell"], "permuted" in row.get("setup", "")
            found.setdefault(key, (*shape, time))  # hnd comes first where there are more
    return found


def check(steps, known, l2, power, sms):
    for permuted in (False, True):
        names = [name for name, other in steps if other == permuted]
        rows = numpy.array([steps[name, permuted] for name in names], dtype=float)
        misses = numpy.array([missed(r[:4], l2 * 1e6, sms) for r in rows])
        off = walk_time(known, rows, misses, power) / rows[:, 4] - 1
        tell("another run" + (", permuted" if permuted else ""), off)
        for name, row, error in zip(names, rows, off):
            side = steps.get((name, False), row)[4]
            print(f"  {name:22} {row[4]:7.2f} us, model {error:+.1%}"
                  + (f", side by side {side:.2f} us" if permuted else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+")
    parser.add_argument("--cells", default="bench/cells/l2.cells")
    parser.add_argument("--route", default="balanced")
    parser.add_argument("--sms", type=int, default=132)
    parser.add_argument("--check")
    args = parser.parse_args()
    shapes = geometry(args.cells)
    steps = steps_of(args.results, shapes, args.route)
    if len(steps) < 20:
        sys.exit(f"fit_l2: {len(steps)} steps of route {args.route}, at least 20 are needed")
    rows = numpy.array(list(steps.values()), dtype=float)
    found = walk([name for name, _ in steps], rows, args.sms)
    if args.check:
        check(steps_of([args.check], shapes, args.route), *found, args.sms)


if __name__ == "__main__":
    main()
