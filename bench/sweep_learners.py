#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sweeps the open constants of the learning stop policies over simulated cells.

    bench/sweep_learners.py PKV [--csv FILE] [--commit TEXT] [--rounds N]

Every setting starts from the shipped prior (or none) and runs each cell --rounds times, its table
saved and loaded between; the last round counts, against `always` in the same cell. A row says how
the setting did in one cell, the table printed at the end how it did over all.
"""
import argparse
import csv
import itertools
import os
import statistics
import subprocess
import sys
import tempfile

DRAWN = ("--simulate", "--order", "tree")
CELLS = {  # where stopping pays, where it costs, and where nothing is shared
    "ada_lockstep_8": "--profile rtx6000-ada --groups 8 --decode 256 --max-batch 800 "
                      "--prefix-cache all --bypass-limit -1 --route ordinary",
    "ada_20": "--profile rtx6000-ada --groups 20 --prefix 4K-10K --route ordinary",
    "h200_8": "--groups 8 --prefix 1K-10K --route ordinary",
    "h200_8_shared": "--groups 8 --prefix 1K-10K --route shared",
    "h200_64_b64": "--groups 64 --prefix 1K-10K --max-batch 64 --bypass-limit -1 --route ordinary",
    "h200_16_shift": "--groups 16 --prefix 1K-10K --rate 20 --shift --route ordinary",
    "h200_none": "--groups none --prefix 1K-10K --route ordinary",
}
UCB = {"ucb_bonus": (1e-9, 20, 200, 2000, 20000), "prior_weight": (-1, 4, 64)}
Q = {"q_rate": (0.02, 0.1, 0.3), "q_discount": (0.5, 0.9, 0.98), "q_explore": (-1, 0.05, 0.2),
     "prior_weight": (4,)}
HEAD = ("commit", "policy", "ucb_bonus", "q_rate", "q_discount", "q_explore", "prior_weight",
        "cell",
        "rounds", "tokens_s", "over_always", "first_round_over_always", "more_steps")


def tokens_s(pkv, cell, policy, extra=()):
    """(tokens a second, steps) of one simulated run."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.csv")
        subprocess.run([pkv, "bench", "sched", *DRAWN, "--policy", policy, *CELLS[cell].split(),
                        *extra, "--csv", path], check=True, stdout=subprocess.DEVNULL)
        with open(path, encoding="utf-8") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return float(rows[0]["tokens_s"]), int(rows[0]["steps"])


def settings(policy):
    """Every combination of the policy's constants."""
    grid = UCB if policy == "ucb" else Q
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values))


def run(pkv, policy, constants, cell, rounds):
    """[(tokens a second, steps)] of the rounds, one table through all of them."""
    extra = [part for name, value in constants.items()
             for part in ("--" + name.replace("_", "-"), repr(value))]
    with tempfile.TemporaryDirectory() as folder:
        extra += ["--learner", os.path.join(folder, "table")]
        return [tokens_s(pkv, cell, policy, extra + ["--seed", str(1 + i)]) for i in range(rounds)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pkv")
    parser.add_argument("--csv")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    always = {(cell, seed): tokens_s(args.pkv, cell, "always", ["--seed", str(seed)])
              for cell in CELLS for seed in (1, args.rounds)}
    out = open(args.csv, "w", encoding="utf-8", newline="") if args.csv else sys.stderr
    out.write("# Simulated; `always` is 1. The last of the rounds, a table through all of them.\n"
              f"# command: bench/sweep_learners.py PKV --rounds {args.rounds}\n")
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(HEAD)
    print(f"{'':58}" + "".join(f"{cell[:14]:>15}" for cell in CELLS))
    for policy in ("ucb", "q-learning"):
        for constants in settings(policy):
            line = []
            for cell in CELLS:
                done = run(args.pkv, policy, constants, cell, args.rounds)
                last = done[-1][0] / always[cell, args.rounds][0]
                first = done[0][0] / always[cell, 1][0]
                rows.writerow([args.commit, policy, *(constants.get(k, "") for k in HEAD[2:7]),
                               cell,
                               args.rounds, f"{done[-1][0]:.1f}", f"{last:.4f}", f"{first:.4f}",
                               done[-1][1] - always[cell, args.rounds][1]])
                line.append(last)
            words = " ".join(f"{k}={v:g}" for k, v in constants.items())
            print(f"{policy:11}{words:47}" + "".join(f"{x:15.3f}" for x in line) +
                  f"   mean {statistics.mean(line):.3f} least {min(line):.3f}", flush=True)
    if args.csv:
        out.close()


if __name__ == "__main__":
    main()
