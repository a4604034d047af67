#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits what L2 is worth to attention that reads every row, and checks it on steps left out.

    bench/fit_l2.py RESULTS.csv... [--cells bench/cells/l2.cells] [--route balanced] [--sms 132]
        [--walk]

The model of `pkv bench sched --simulate` (src/cli/bench_sched_cost.h), a layer:

    read latency + row time * rows + (unique + missed) / memory rate + hit / L2 rate
    hit = (total - unique) * min(1, L2 / working set) ^ 0.5, the working set being what rows share;
    all of it with one group, or no more rows than SMs: they read a part of it at a time

Unknown are latency, row time, both rates and L2's size. Half of the cells are fitted and the others
checked, then the other way round, then all are fitted; errors are relative. Cells of the comparison
with peers (shared_b.., tree_..) are known by name. Needs numpy.

--walk: a model that follows the plan instead. `balanced` cuts the line of (row, KV head) segments
into two equal parts an SM, which are read at one speed, the last segment of a part first. So it is
known when each token of a prefix is read, and how many different bytes are read until it is read
again (their footprint; Xiang, Ding, Luo, Bao 2013, "HOTL"). It is still there with the chance
min(1, L2 / footprint). Time: latency + row time * rows + ((total / L2 rate)^p +
(missed / memory rate)^p)^(1/p). Every step is also predicted from all others.
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


def columns(rows, l2, sms):
    """The latency's 1, rows, what is read from memory, and again from L2."""
    total, unique, shared, count = (rows[:, i] for i in range(4))
    again = total - unique
    share = numpy.minimum(1.0, numpy.divide(l2, shared, out=numpy.ones_like(shared),
                                            where=shared > 0))
    copies = numpy.divide(again, shared, out=numpy.zeros_like(shared), where=shared > 0) + 1
    hit = again * numpy.where((count <= sms) | (count / copies < 1.5), 1.0, numpy.sqrt(share))
    return numpy.stack([numpy.ones(len(rows)), count, unique + again - hit, hit], axis=1)


def fit(rows, sms):
    """(latency us, row us, memory TB/s, L2 TB/s, L2 MB): least sum of squared relative errors."""
    best = None
    for l2 in range(8, 160):
        matrix = columns(rows, l2 * 1e6, sms) / rows[:, 4:5]
        solution, *_ = numpy.linalg.lstsq(matrix, numpy.ones(len(rows)), rcond=None)
        if min(solution) <= 0:
            continue
        error = numpy.sum((matrix @ solution - 1) ** 2)
        if best is None or error < best[0] * 0.999:
            best = (error, solution[0], solution[1], 1e-6 / solution[2], 1e-6 / solution[3], l2)
    return best[1:]


def errors(rows, found, sms):
    latency, row, memory, l2_rate, l2 = found
    known = numpy.array([latency, row, 1e-6 / memory, 1e-6 / l2_rate])
    return columns(rows, l2 * 1e6, sms) @ known / rows[:, 4] - 1


def hits(rows, found):
    """The share of what is read again that came from L2, if all else is as fitted."""
    latency, row, memory, l2_rate, _ = found
    total, unique, _, count, time = (rows[:, i] for i in range(5))
    again = total - unique
    spent = latency + row * count + total * 1e-6 / memory - time
    whole = again * 1e-6 * (1 / memory - 1 / l2_rate)
    return numpy.divide(spent, whole, out=numpy.zeros_like(spent), where=whole > 0)


# --- the walk over the plan --------------------------------------------------------------------

HEADS, PHASES = 8, 16  # KV heads of a row; places of a prefix that are looked at


def reads(groups, rows, parts):
    """(when each place of each group and head is read, [group, head, place, row] in order, and when
    all ends) in segments' times."""
    segments = groups * rows * HEADS
    part = segments / parts
    at = numpy.arange(segments)[:, None] + (numpy.arange(PHASES) + 0.5) / PHASES
    first = numpy.minimum((at / part).astype(int), parts - 1) * part
    start = numpy.maximum(first, numpy.floor(at))
    end = numpy.minimum(first + part, numpy.floor(at) + 1)
    when = (first + part - end) + (at - start)
    return numpy.sort(when.reshape(groups, rows, HEADS, PHASES).transpose(0, 2, 3, 1)), part


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
    touched = 1 - untouched / (span - window) / (groups * HEADS * PHASES)
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


def walk(names, rows, sms):
    tables = {l2: numpy.array([missed(r[:4], l2 * 1e6, sms) for r in rows])
              for l2 in range(24, 36, 2)}
    every = numpy.arange(len(rows))

    def tell(name, off):
        print(f"{name:20} {len(off)} steps: error mean {numpy.mean(abs(off)):.1%}, largest "
              f"{max(abs(off)):.1%}, within 10 %: {numpy.sum(abs(off) <= 0.1)}")

    for name, fitted, checked in (("fit even, check odd", every[0::2], every[1::2]),
                                  ("fit odd, check even", every[1::2], every[0::2])):
        tell(name, walk_fit(rows, tables, fitted)[4][checked])
    alone = numpy.array([walk_fit(rows, tables, numpy.delete(every, i))[4][i] for i in every])
    tell("each from all others", alone)
    _, l2, power, known, off = walk_fit(rows, tables, every)
    tell("all", off)
    print(f"latency {known[0]:.2f} us, row {known[1]:.3f} us, memory {known[2] / 1e6:.2f} TB/s, L2 "
          f"{known[3] / 1e6:.2f} TB/s, {l2} MB, power {power}")
    for name, row, error, left, misses in zip(names, rows, off, alone, tables[l2]):
        again = row[0] - row[1]
        print(f"  {name:22} {row[3]:4.0f} rows, {row[2] / 1e6:6.1f} MB shared, {row[0] / 1e6:7.1f} "
              f"MB read: {row[4]:7.2f} us, model {error:+.1%}, from all others {left:+.1%}"
              + (f", hits {(row[0] - misses) / again:.2f}" if again > 0 else ""))


def say(name, found, rows, sms):
    off = errors(rows, found, sms)
    print(f"{name:20} latency {found[0]:.2f} us, row {found[1]:.3f} us, memory {found[2]:.2f} "
          f"TB/s, L2 {found[3]:.2f} TB/s, {found[4]} MB; {len(rows)} steps: error mean "
          f"{numpy.mean(abs(off)):.1%}, largest {max(abs(off)):.1%}, within 10 %: "
          f"{numpy.sum(abs(off) <= 0.1)}")
    return off


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+")
    parser.add_argument("--cells", default="bench/cells/l2.cells")
    parser.add_argument("--route", default="balanced")
    parser.add_argument("--sms", type=int, default=132)
    parser.add_argument("--walk", action="store_true", help="the model that follows the plan")
    args = parser.parse_args()
    shapes, times = geometry(args.cells), {}
    for row in (row for path in args.results for row in result_files.read(path)):
        time = result_files.number(row, "gpu_us")
        shape = shapes.get(row["cell"]) or named(row["cell"])
        if row["route"] == args.route and shape and time:
            times.setdefault(row["cell"], (*shape, time))  # hnd comes first where there are more
    names, rows = list(times), list(times.values())
    if len(rows) < 20:
        sys.exit(f"fit_l2: {len(rows)} steps of route {args.route}, at least 20 are needed")
    rows = numpy.array(rows, dtype=float)
    if args.walk:
        walk(names, rows, args.sms)
        return
    for name, fitted, checked in (("fit even, check odd", rows[0::2], rows[1::2]),
                                  ("fit odd, check even", rows[1::2], rows[0::2])):
        say(name, fit(fitted, args.sms), checked, args.sms)
    found = fit(rows, args.sms)
    off = say("all", found, rows, args.sms)
    for name, row, error, hit in zip(names, rows, off, hits(rows, found)):
        print(f"  {name:22} {row[3]:4.0f} rows, {row[2] / 1e6:6.1f} MB shared, {row[0] / 1e6:7.1f} "
              f"MB read: {row[4]:7.2f} us, model {error:+.1%}"
              + (f", hits {hit:.2f}" if row[2] > 0 else ""))


if __name__ == "__main__":
    main()
