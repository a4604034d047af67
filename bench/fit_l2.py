#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits what L2 is worth to attention that reads every row, and checks it on steps left out.

    bench/fit_l2.py RESULTS.csv... [--cells FILE...] [--route balanced] [--sms 132]
        [--check RESULTS.csv...]

The model of `pkv bench sched --simulate` (src/cli/bench_sched_{cost,reuse}.h), a layer:

    latency + row time * rows + ((all / L2 rate)^p + (missed / memory rate)^p)^(1/p)

`balanced` cuts the line of (row, KV head) segments into two equal parts an SM, which are read side
by side, the last segment of a part first, at speeds that differ a little. So it is known when each
place of a prefix is read, and how many different bytes are read until it is read again (their
footprint; Xiang, Ding, Luo, Bao 2013, "HOTL"). It is still there with the chance
min(1, L2 / footprint).

Unknown are latency, row time, both rates, L2's size, p and the spread of the speeds. Half of the
steps are fitted and the others checked, then the other way round; each is predicted from all
others; then all are fitted. Errors are relative. --check: steps of other runs, by what was fitted,
those with permuted rows apart. Cells of the comparison with peers (shared_b.., tree_..) are known
by name. Needs numpy.
"""
import argparse
import re
import sys

import numpy
import result_files

TOKEN = 4096  # bytes of a layer: 8 KV heads of 128, K and V in 2 bytes
HEADS, PLACES = 8, 8  # KV heads of a row; places of a prefix that are looked at
L2_MB, POWERS, SPREADS = (18, 20, 22, 24, 28), (1.3, 1.5, 1.7, 1.9), (0.01, 0.02, 0.03, 0.04)


def groups_of(words):
    """[(rows, prefix, own)] of words as GROUPSxROWSxPREFIX+OWN or LENGTHxROWS."""
    groups = []
    for word in words:
        shared = re.fullmatch(r"(\d+)x(\d+)x(\d+)\+(\d+)", word)
        if shared:
            count, rows, prefix, own = map(int, shared.groups())
            groups += [(rows, prefix, own)] * count
        else:
            length, rows = map(int, word.split("x"))
            groups += [(1, 0, length)] * rows
    return groups


def named(cell):
    """The same of a cell of bench/peer_cells.py, None of others."""
    one = re.fullmatch(r"shared_b(\d+)_p(\d+)_s(\d+)", cell)
    two = re.fullmatch(r"tree_(\d+)x(\d+)_(\d+)x(\d+)", cell)
    if one:
        rows, prefix, own = map(int, one.groups())
        return [(rows, prefix, own)]
    if two:
        count, prefix, rows, own = map(int, two.groups())
        return [(rows, prefix, own)] * count
    return None


def steps_of(paths, shapes, route):
    """{(cell, whether its rows are permuted): (groups, us)}"""
    found = {}
    for row in (row for path in paths for row in result_files.read(path)):
        time = result_files.number(row, "gpu_us")
        groups = shapes.get(row["cell"]) or named(row["cell"])
        if row["route"] == route and groups and time:
            key = row["cell"], "permuted" in row.get("setup", "")
            found.setdefault(key, (groups, time))  # hnd comes first where there are more
    return found


class Walk:
    """A step, followed: bytes of all rows, different bytes, rows, and what L2 misses of them."""

    def __init__(self, groups, permuted, parts, spread):
        rows = numpy.repeat(numpy.arange(len(groups)), [group[0] for group in groups])
        if permuted:
            rows = numpy.random.default_rng(1).permutation(rows)
        length = numpy.repeat([sum(groups[g][1:]) for g in rows], HEADS).astype(float)
        begin = numpy.concatenate([[0], numpy.cumsum(length)])
        part = begin[-1] / parts
        slow = 1 + 2 * spread * (numpy.sin(numpy.arange(parts) * 12.9898) * 43758.5453 % 1)
        last = part * (1 + 2 * spread)
        gaps, ends = [], []
        for g, (count, prefix, _) in enumerate(groups):
            if count < 2:
                continue
            segments = (numpy.nonzero(rows == g)[0][:, None] * HEADS + numpy.arange(HEADS)).T
            at = begin[segments][..., None] + (numpy.arange(PLACES) + 0.5) / PLACES * prefix
            index = numpy.minimum((at / part).astype(int), parts - 1)
            start = numpy.maximum(index * part, begin[segments][..., None])
            end = numpy.minimum((index + 1) * part, begin[segments + 1][..., None])
            when = numpy.sort(((index + 1) * part - end + at - start) * slow[index], axis=1)
            gaps.append(numpy.diff(when, axis=1).ravel())
            ends += [when[:, 0].ravel(), last - when[:, -1].ravel()]
        shared = TOKEN * sum(prefix for count, prefix, _ in groups if count > 1)
        own = TOKEN * sum(count * own for count, _, own in groups)
        self.total, self.unique, self.rows = TOKEN * length.sum() / HEADS, shared + own, len(rows)
        self.footprint = numpy.zeros(0)
        if gaps:
            gaps, ends = numpy.sort(numpy.concatenate(gaps)), numpy.sort(numpy.concatenate(ends))
            window = numpy.minimum(gaps, 0.999 * last)
            untouched = numpy.zeros_like(window)  # place-times of windows that see nothing of it
            for waits in (gaps, ends):
                sums = numpy.concatenate([[0], numpy.cumsum(waits)])
                longer = numpy.searchsorted(waits, window, side="right")
                untouched += sums[-1] - sums[longer] - (len(waits) - longer) * window
            touched = 1 - untouched / (last - window) / (len(ends) / 2)
            self.footprint = numpy.maximum(1, shared * touched + own * window / last)

    def missed(self, l2_mb):
        if not len(self.footprint):
            return self.total
        held = numpy.mean(numpy.minimum(1, l2_mb * 1e6 / self.footprint))
        return self.unique + (self.total - self.unique) * (1 - held)


class Steps:
    """Walks and times of many steps as columns."""

    def __init__(self, steps, parts, spread):
        walks = [Walk(groups, permuted, parts, spread)
                 for (_, permuted), (groups, _) in steps.items()]
        self.us = numpy.array([us for _, us in steps.values()])
        self.total, self.rows = (numpy.array([getattr(w, name) for w in walks], dtype=float)
                                 for name in ("total", "rows"))
        self.missed = {l2: numpy.array([w.missed(l2) for w in walks]) for l2 in L2_MB}

    def off(self, known, l2, power):
        latency, row, memory, l2_rate = known
        spent = (self.total / l2_rate) ** power + (self.missed[l2] / memory) ** power
        return (latency + row * self.rows + spent ** (1 / power)) / self.us - 1


def fit(spreads, picked):
    """(error, spread, L2 MB, power, (latency, row, memory, L2 rate)) of the picked steps"""
    best = None
    for spread, steps in spreads.items():
        for l2 in L2_MB:
            for power in POWERS:
                known = numpy.array([5.0, 0.07, 4.6e6, 9.8e6])
                for _ in range(12):  # Gauss and Newton
                    now = steps.off(known, l2, power)
                    slopes = [(steps.off(known * (1 + 1e-3 * (i == numpy.arange(4))), l2, power)
                               - now)[picked] / (1e-3 * known[i]) for i in range(4)]
                    step = numpy.linalg.lstsq(numpy.stack(slopes, 1), -now[picked], rcond=None)[0]
                    known = known + numpy.clip(step, -0.3 * known, 0.3 * known)
                error = numpy.sum(steps.off(known, l2, power)[picked] ** 2)
                if best is None or error < best[0]:
                    best = (error, spread, l2, power, known)
    return best


def tell(name, off):
    print(f"{name:22} {len(off)} steps: error mean {numpy.mean(abs(off)):.1%}, largest "
          f"{max(abs(off)):.1%}, within 10 %: {numpy.sum(abs(off) <= 0.1)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+")
    parser.add_argument("--cells", nargs="+",
                        default=["bench/cells/l2.cells", "bench/cells/l2_phase.cells"])
    parser.add_argument("--route", default="balanced")
    parser.add_argument("--sms", type=int, default=132)
    parser.add_argument("--check", nargs="+", default=[])
    args = parser.parse_args()
    parts, shapes = 2 * args.sms, {}
    for path in args.cells:
        with open(path, encoding="utf-8") as file:
            for words in (line.split("#")[0].split() for line in file):
                if words:
                    shapes[words[0]] = groups_of(words[1:])
    steps = steps_of(args.results, shapes, args.route)
    if len(steps) < 20:
        sys.exit(f"fit_l2: {len(steps)} steps of route {args.route}, at least 20 are needed")
    spreads = {spread: Steps(steps, parts, spread) for spread in SPREADS}
    every = numpy.arange(len(steps))

    def left(fitted, checked):
        _, spread, l2, power, known = fit(spreads, fitted)
        return spreads[spread].off(known, l2, power)[checked]

    tell("fit even, check odd", left(every[0::2], every[1::2]))
    tell("fit odd, check even", left(every[1::2], every[0::2]))
    alone = numpy.array([left(numpy.delete(every, i), i) for i in every])
    tell("each from all others", alone)
    _, spread, l2, power, known = fit(spreads, every)
    off = spreads[spread].off(known, l2, power)
    tell("all", off)
    once = 1e-6 * (known[2] ** -power + known[3] ** -power) ** (-1 / power)
    print(f"read_us {known[0]:.2f}, row_us {known[1]:.4f}, read_tb_s {once:.3f} (memory alone "
          f"{known[2] / 1e6:.2f}), l2_tb_s {known[3] / 1e6:.2f}, l2_mb {l2}, overlap {power}, "
          f"parts {parts}, spread {spread}")
    for (name, _), (_, us), error, other in zip(steps, steps.values(), off, alone):
        print(f"  {name:22} {us:7.2f} us, model {error:+.1%}, from all others {other:+.1%}")
    for path in args.check:
        for permuted in (False, True):
            others = {key: step for key, step in steps_of([path], shapes, args.route).items()
                      if key[1] == permuted}
            if not others:
                continue
            off = Steps(others, parts, spread).off(known, l2, power)
            print(path)
            tell("  permuted" if permuted else "  another run", off)
            for (name, _), (_, us), error in zip(others, others.values(), off):
                print(f"  {name:22} {us:7.2f} us, model {error:+.1%}")


if __name__ == "__main__":
    main()
