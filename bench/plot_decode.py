#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws decode attention over the cells: our time and the best peer's, over the null read.

    bench/plot_decode.py FILE... [-o docs/decode.svg] [--route balanced] [--setup TEXT]

From result files alone. The first file with a row of the route gives the cells, their order, our
time and the null read; peers may stand in it or in any other file, by the cell's name. Figures of
an earlier run ("anchor:") are drawn hollow. --setup takes rows with this text in `setup` only.
Needs matplotlib.
"""
import argparse
import sys

import plotting
import result_files


def ours(paths, route, setup):
    """[(cell, gpu_us, null_us, bytes)] of the first file that has the route, and its last row."""
    for path in paths:
        cells, last = {}, None
        for row in result_files.read(path):
            gpu, null = result_files.number(row, "gpu_us"), result_files.null_us(row)
            if row["route"] != route or setup not in (row.get("setup") or ""):
                continue
            if not gpu or not null:
                continue
            cells[row["cell"]] = (row["cell"], gpu, null, result_files.number(row, "bytes") or 0.0)
            last = row
        if cells:
            return list(cells.values()), last
    sys.exit(f"plot_decode: no row of route {route} with gpu_us and a null read in {paths}")


def best_peers(paths, setup):
    """{cell: (microseconds, name)} of this run where there is one, else of an earlier one."""
    found = {}
    for path in paths:
        for row in result_files.read(path):
            if setup not in (row.get("setup") or setup):
                continue
            for name, us in result_files.peers(row).items():
                rank = (name.startswith("anchor:"), us)
                if row["cell"] not in found or rank < found[row["cell"]][0]:
                    found[row["cell"]] = (rank, us, name)
    return {cell: (us, name) for cell, (_, us, name) in found.items()}


def draw(cells, peers, last, out):
    figure, axes = plotting.begin(0.34 * len(cells) + 2.5)
    spots = range(len(cells))
    mine = [gpu / null for _, gpu, null, _ in cells]
    axes.axhline(1.0, color="0.35", linewidth=1.0, label="null read of the same pages")
    for earlier, face, text in ((False, "tab:orange", "best peer, same run"),
                                (True, "none", "best peer, earlier run")):
        points = [(i, peers[c[0]][0] / c[2]) for i, c in enumerate(cells)
                  if c[0] in peers and peers[c[0]][1].startswith("anchor:") == earlier]
        if points:
            axes.scatter(*zip(*points), s=34, marker="s", facecolors=face, edgecolors="tab:orange",
                         label=text, zorder=3)
    axes.scatter(spots, mine, s=34, color="tab:blue", label=f"pkv, {last['route']}", zorder=4)
    for i, ratio in enumerate(mine):
        axes.annotate(f"{ratio:.2f}", (i, ratio), textcoords="offset points", xytext=(0, -13),
                      ha="center", fontsize=6, color="tab:blue")
    axes.set_xticks(spots, [f"{name}  ({size / 1e6:.0f} MB)" for name, _, _, size in cells],
                    rotation=90, fontsize=7)
    axes.set_ylabel("time of a layer / null read")
    axes.set_ylim(bottom=0.9)
    axes.grid(axis="y", linewidth=0.4, color="0.85")
    plotting.end(figure, axes, "Ragged decode", last, out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("-o", "--out", default="docs/decode.svg")
    parser.add_argument("--route", default="balanced")
    parser.add_argument("--setup", default="")
    args = parser.parse_args()
    try:
        cells, last = ours(args.files, args.route, args.setup)
        peers = best_peers(args.files, args.setup)
        draw(cells, peers, last, args.out)
    except (OSError, ValueError, ImportError) as e:
        sys.exit(f"plot_decode: {e}")
    ahead = sum(gpu < peers[name][0] for name, gpu, _, _ in cells if name in peers)
    known = sum(cell[0] in peers for cell in cells)
    print(f"plot_decode: {args.out}: {len(cells)} cells, {known} with peers, ahead of the best in "
          f"{ahead}")


if __name__ == "__main__":
    main()
