#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws how good the policy is: predicted against measured time, and regret.

    bench/plot_policy.py FILE.csv [-o docs/policy.svg]

FILE is what `pkv bench policy --csv` wrote: a row for each batch and route, with `chosen` = a digit
for each policy. Needs matplotlib.
"""
import argparse
import collections
import csv

POLICIES = ["static", "roofline, seed's", "roofline, here", "calibrated", "calibrated, seed's"]
OURS = ("balanced", "shared")


def batches(path):
    """[{route: row}], the rows of one batch together, in the order of the file."""
    found, key = [], None
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            at = tuple(row[name] for name in ("trace", "seed", "active", "tokens"))
            if at != key or row["route"] in found[-1]:
                found.append({})
                key = at
            found[-1][row["route"]] = row
    return found


def regrets(found):
    """{policy: [regret of each batch]}: over all routes, "calibrated, seed's" over the seed's."""
    out = collections.defaultdict(list)
    for batch in found:
        for i, policy in enumerate(POLICIES):
            routes = [r for r in batch if policy != POLICIES[-1] or r not in OURS]
            best = min(float(batch[r]["step_us"]) for r in routes)
            for r in routes:
                if batch[r]["chosen"][i] == "1":
                    out[policy].append(float(batch[r]["step_us"]) / best - 1)
    return out


def draw(found, out):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "persistentkv"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6))
    points = collections.defaultdict(list)
    for batch in found:
        for route, row in batch.items():
            if float(row["predicted_us"]) > 0:
                points[route].append((float(row["step_us"]), float(row["predicted_us"])))
    for route, pairs in points.items():
        left.plot(*zip(*pairs), ".", markersize=3, label=route)
    measured = [x for pairs in points.values() for x, _ in pairs]
    ends = [min(measured), max(measured)]
    left.plot(ends, ends, color="0.35", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="measured, us a layer",
             ylabel="predicted, us a layer")  # fmt: skip
    left.legend(fontsize=7)
    for policy, values in regrets(found).items():
        values.sort()
        share = [100 * (i + 1) / len(values) for i in range(len(values))]
        right.step([100 * v for v in values], share, where="post", label=policy)
    right.axvline(3, color="0.7", linewidth=1)
    right.set(xscale="symlog", xlim=(0, None),
              xlabel="regret, %", ylabel="batches with at most that, %")
    right.legend(fontsize=7, loc="lower right")
    row = next(iter(found[0].values()))
    figure.suptitle(f"{row['device']}: {len(found)} held-out batches", fontsize=10)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("-o", "--out", default="docs/policy.svg")
    args = parser.parse_args()
    draw(batches(args.file), args.out)


if __name__ == "__main__":
    main()
