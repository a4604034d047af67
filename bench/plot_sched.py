#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the scheduler's figures from its result files.

    bench/plot_sched.py RATIOS.csv ORDERS.csv [-o docs/sched.svg]

Above, what a step takes in each order against the requests that wait (8 groups, 10K tokens), as
measured. Below, simulated tokens a second of every order and policy over fcfs with always, where
all requests come at once; the two routes of attention beside each other. Needs matplotlib.
"""
import argparse
import csv

ORDERS = ("fcfs", "lpm", "dfs-weight", "cht", "tree")
POLICIES = ("always", "static", "static-chain", "ucb", "q-learning", "marginal")


def rows(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def draw_steps(axes, path):
    """p50 of a step over the number of waiting requests."""
    found = {}
    for row in rows(path):
        if row["op"] == "step" and row["groups"] == "8" and float(row["p50_us"]) > 0:
            found.setdefault(row["order"], []).append((int(row["waiting"]), float(row["p50_us"])))
    for name, points in found.items():
        points.sort()
        axes.plot(*zip(*points), marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="requests waiting (8 groups)", ylabel="a step, us",
             title="finish + best + admit, p50, measured")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def draw_policies(axes, path, device, groups, route):
    """Bars of every order and policy over fcfs x always."""
    found = {}
    for row in rows(path):
        if (row["device"] == device and row["workload"].startswith(f"{groups} groups prefix 1000-")
                and row["rate"] == "0" and row["max_batch"] == "500" and row["route"] == route
                and row["bypass_limit"] == "32" and row["prefix_cache"] == "batch"):
            found[row["order"], row["policy"]] = float(row["tokens_s"])
    base = found["fcfs", "always"]
    for i, policy in enumerate(POLICIES):
        axes.bar([k + (i - 2.5) * 0.14 for k in range(len(ORDERS))],
                 [found[order, policy] / base for order in ORDERS], width=0.13, label=policy)
    axes.axhline(1, color="0.35", linewidth=0.8)
    axes.set_xticks(range(len(ORDERS)), ORDERS, fontsize=7)
    axes.set_title(f"{device}, {groups} groups, {route}", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ratios")
    parser.add_argument("orders")
    parser.add_argument("-o", "--out", default="docs/sched.svg")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "persistentkv"  # the same bytes each time
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9.5, 8.5))
    grid = figure.add_gridspec(3, 2, hspace=0.45)
    draw_steps(figure.add_subplot(grid[0, :]), args.ratios)
    for i, device in enumerate(("h200", "rtx6000-ada")):
        for k, route in enumerate(("ordinary", "shared")):
            axes = figure.add_subplot(grid[1 + i, k])
            draw_policies(axes, args.orders, device, 8, route)
            if i == 0 and k == 0:
                axes.legend(fontsize=6, ncol=3, loc="lower center")
            if k == 0:
                axes.set_ylabel("simulated tokens/s over fcfs x always", fontsize=7)
    figure.savefig(args.out, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
