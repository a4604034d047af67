#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws decode attention against the sharing degree: how many rows share a prefix.

    bench/plot_shared.py FILE... [-o docs/shared.svg] [--cells degree_] [--setup TEXT]

From result files alone: cells named DEGREE_N, N rows to a prefix. Routes balanced and shared, the
limit, the null read of each page once, and peers by the cell's name from any of the files.
--setup takes rows with this text in `setup` only. Needs matplotlib.
"""
import argparse
import sys

import plotting
import result_files

OURS = {"balanced": ("tab:gray", "o"), "shared": ("tab:blue", "o")}
OTHERS = ("tab:orange", "tab:green", "tab:red", "tab:purple")


def collect(paths, prefix, setup):
    """{name: {degree: microseconds}} of routes, limit, null read and peers; and the last row."""
    lines, last = {}, None
    for path in paths:
        for row in result_files.read(path):
            degree = row["cell"][len(prefix):]
            if not row["cell"].startswith(prefix) or not degree.isdecimal():
                continue
            if setup not in (row.get("setup") or ""):
                continue
            found = {}
            if row["route"] in OURS:
                last = row
                found = {row["route"]: result_files.number(row, "gpu_us"),
                         "limit": result_files.number(row, "limit_us")}
            if row["route"] == "shared":
                found["null read, each page once"] = result_files.null_us(row)
            for name, us in {**found, **result_files.peers(row)}.items():
                if us:
                    lines.setdefault(name, {})[int(degree)] = us
    if last is None:
        sys.exit(f"plot_shared: no cells {prefix}N of routes {', '.join(OURS)} in {paths}")
    return lines, last


def draw(lines, last, out):
    from matplotlib.ticker import FuncFormatter

    figure, axes = plotting.begin(7.2)
    others = iter(OTHERS * 4)
    for name, points in sorted(lines.items(), key=lambda line: max(line[1].values())):
        degrees = sorted(points)
        style = {"color": "0.2", "linestyle": "--"}
        if name in OURS:
            style = {"color": OURS[name][0], "marker": OURS[name][1]}
        elif name not in ("limit", "null read, each page once"):
            style = {"color": next(others), "marker": "s", "linestyle": ":"}
        elif name != "limit":
            style = {"color": "0.6", "linestyle": ":"}
        axes.plot(degrees, [points[d] for d in degrees], label=name, **style)
    for d, us in lines.get("shared", {}).items():
        limit = lines.get("limit", {}).get(d)
        if limit:
            axes.annotate(f"{us / limit:.2f}", (d, us), textcoords="offset points", xytext=(0, 6),
                          ha="center", fontsize=7, color="tab:blue")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({d for points in lines.values() for d in points}))
    plain = FuncFormatter(lambda x, _: f"{x:g}")
    for formatter in (axes.xaxis.set_major_formatter, axes.yaxis.set_major_formatter,
                      axes.yaxis.set_minor_formatter):
        formatter(plain)
    axes.set_xlabel("rows that share a prefix (blue figures: over the limit)")
    axes.set_ylabel("microseconds a layer")
    axes.grid(which="both", linewidth=0.4, color="0.88")
    plotting.end(figure, axes, "Shared prefixes", last, out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("-o", "--out", default="docs/shared.svg")
    parser.add_argument("--cells", default="degree_")
    parser.add_argument("--setup", default="")
    args = parser.parse_args()
    try:
        lines, last = collect(args.files, args.cells, args.setup)
        draw(lines, last, args.out)
    except (OSError, ValueError, ImportError) as e:
        sys.exit(f"plot_shared: {e}")
    print(f"plot_shared: {args.out}: {', '.join(sorted(lines))}")


if __name__ == "__main__":
    main()
