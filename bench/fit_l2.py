#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits what L2 is worth to attention that reads every row, and checks it on steps left out.

    bench/fit_l2.py RESULTS.csv [--cells bench/cells/l2.cells] [--route balanced]

The model of `pkv bench sched --simulate` (src/cli/bench_sched_cost.h), a layer:

    read latency + unique / memory rate + missed / memory rate + hit / L2 rate
    hit = (total - unique) * min(1, L2 / working set), the working set being what rows share

Unknown are latency, both rates and L2's size. Cells in the file's order are fitted (even ones) and
checked (odd ones), then the other way round, then all are fitted; errors are relative. Needs numpy.
"""
import argparse
import itertools
import re
import sys

import numpy
import result_files

TOKEN = 4096  # bytes of a layer: 8 KV heads of 128, K and V in 2 bytes


def geometry(path):
    """{cell: (total, unique, shared) in bytes} of a cells file with GROUPSxROWSxPREFIX+OWN."""
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
            elif alone:
                length, rows = map(int, alone.groups())
                tokens = (rows * length, rows * length, 0)
            else:
                continue
            cells[words[0]] = tuple(TOKEN * n for n in tokens)
    return cells


def columns(rows, l2):
    """What each row reads: once, again from memory, again from L2, and 1 for the latency."""
    total, unique, shared = (rows[:, i] for i in range(3))
    again = total - unique
    hit = again * numpy.minimum(1.0, numpy.divide(l2, shared, out=numpy.ones_like(shared),
                                                  where=shared > 0))
    return numpy.stack([numpy.ones(len(rows)), unique + again - hit, hit], axis=1)


def fit(rows):
    """(latency us, memory TB/s, L2 TB/s, L2 MB) with the least sum of squared relative errors."""
    best = None
    for l2 in itertools.chain(range(20, 200, 2), (1e6,)):
        matrix = columns(rows, l2 * 1e6) / rows[:, 3:4]
        solution, *_ = numpy.linalg.lstsq(matrix, numpy.ones(len(rows)), rcond=None)
        if min(solution) <= 0:
            continue
        error = numpy.sum((matrix @ solution - 1) ** 2)
        if best is None or error < best[0]:
            best = (error, solution[0], 1e-6 / solution[1], 1e-6 / solution[2], l2)
    return best[1:]


def errors(rows, found):
    latency, memory, l2_rate, l2 = found
    times = columns(rows, l2 * 1e6) @ numpy.array([latency, 1e-6 / memory, 1e-6 / l2_rate])
    return times / rows[:, 3] - 1


def say(name, found, rows):
    off = errors(rows, found)
    print(f"{name:24} latency {found[0]:5.2f} us, memory {found[1]:.2f} TB/s, L2 {found[2]:.2f} "
          f"TB/s, L2 size {found[3]:g} MB; {len(rows)} steps: error mean {numpy.mean(abs(off)):.1%}, "
          f"largest {max(abs(off)):.1%}")
    return off


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results")
    parser.add_argument("--cells", default="bench/cells/l2.cells")
    parser.add_argument("--route", default="balanced")
    args = parser.parse_args()
    shapes, names, rows = geometry(args.cells), [], []
    for row in result_files.read(args.results):
        time = result_files.number(row, "gpu_us")
        if row["route"] == args.route and row["cell"] in shapes and time:
            names.append(row["cell"])
            rows.append((*shapes[row["cell"]], time))
    if len(rows) < 20:
        sys.exit(f"fit_l2: {len(rows)} steps of route {args.route}, at least 20 are needed")
    rows = numpy.array(rows, dtype=float)
    for name, fitted, checked in (("fit even, check odd", rows[0::2], rows[1::2]),
                                  ("fit odd, check even", rows[1::2], rows[0::2])):
        say(name, fit(fitted), checked)
    off = say("all", fit(rows), rows)
    for name, row, error in zip(names, rows, off):
        print(f"  {name:18} {row[2] / 1e6:6.1f} MB shared, {row[0] / 1e6:7.1f} MB read: "
              f"{row[3]:7.2f} us, model {error:+.1%}")


if __name__ == "__main__":
    main()
