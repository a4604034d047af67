#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the command of a result file again and compares.

    bench/verify_results.py [--pkv PKV] [--tolerance PERCENT] FILE [ROW]

ROW counts from 1; without it every row is compared, each command run once. Of files whose rows
stand under a line "# command: pkv bench attention ...". Must be equal: bytes, rows, launches, and
what else does not depend on time. Must agree within the tolerance: on a GPU gpu_us (5 %) and, for
both, its ratio over the null read of the same run (GPU 5 %, CPU 35 %: there only ratios mean
something). The error may be at most twice what it was. Times of another device are not compared.

Exit status: 0 everything agrees, 1 something does not, 2 it could not be run here.
"""
import argparse
import os
import shlex
import subprocess
import sys
import tempfile

import result_files

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
EQUAL = ("bytes", "rows", "launches", "ctas_sm", "state_bytes", "padded_bytes", "setup")
GPU_PERCENT, CPU_PERCENT = 5.0, 35.0


class CannotRun(Exception):
    """Why a command cannot be run again here."""


def narrowed(command, row):
    """The command for one row alone. CPU rows carry setup and threads behind the cell's name."""
    words = shlex.split(command)
    name, *rest = row["cell"].split()
    words += ["--only", name, "--route", row["route"]]
    if rest and rest[-1] == "threads":
        words += ["--threads", rest[-2]]
    return words


def run_again(words, program):
    """Rows of a fresh file that this command writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "again.csv")
        done = subprocess.run([program, *words[1:], "--csv", out], cwd=ROOT, check=False,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if "no CUDA device to measure" in done.stderr:
            raise CannotRun(done.stderr.strip())
        if not os.path.exists(out):
            raise CannotRun(f"{shlex.join(words)}: exit {done.returncode}: {done.stderr.strip()}")
        sys.stderr.write(done.stderr)
        return result_files.read(out)


def off_percent(now, before):
    return 100.0 * abs(now / before - 1.0) if now and before else None


def ratio(row):
    gpu, null = result_files.number(row, "gpu_us"), result_files.null_us(row)
    return gpu / null if gpu and null else None


def compare(before, now, tolerance):
    """([what does not agree, ...], a line of figures)"""
    wrong = [f"{column} is {now[column]}, was {before[column]}" for column in EQUAL
             if column in before and column in now and before[column] != now[column]]
    error, had = result_files.number(now, "error"), result_files.number(before, "error")
    if error is not None and had is not None and not error <= 2 * had:
        wrong.append(f"error is {error:g}, was {had:g}")
    if before["device"] != now["device"]:
        return wrong, f"made on {before['device']}, this is {now['device']}: times not compared"
    on_gpu = "--device cuda" in (before["command"] or "")
    most = tolerance or (GPU_PERCENT if on_gpu else CPU_PERCENT)
    figures = []
    checks = [("over the null read", ratio(now), ratio(before))]
    if on_gpu:
        checks.insert(0, ("gpu_us", *(result_files.number(r, "gpu_us") for r in (now, before))))
    for name, value, old in checks:
        off = off_percent(value, old)
        if off is None:
            wrong.append(f"{name} is missing")
            continue
        figures.append(f"{name} {value:.3f}, was {old:.3f}")
        if off > most:
            wrong.append(f"{name} is {value:.3f}, was {old:.3f}: {off:.1f} % off, {most:g} allowed")
    return wrong, "; ".join(figures)


def check_command(path, command):
    if command is None:
        raise CannotRun(f"{path} does not say what made its rows: no line '# command: ...' above")
    if command.split()[:3] != ["pkv", "bench", "attention"]:
        raise CannotRun(f"'{command}' is not pkv's: run it by hand")


def pairs(path, rows, chosen, program):
    """(row, the same row of a new run or None)"""
    if chosen is not None:
        check_command(path, rows[chosen - 1]["command"])
        new = run_again(narrowed(rows[chosen - 1]["command"], rows[chosen - 1]), program)
        yield rows[chosen - 1], new[0] if new else None
        return
    for command in dict.fromkeys(row["command"] for row in rows):
        check_command(path, command)
        new = {(row["cell"], row["route"]): row
               for row in run_again(shlex.split(command), program)}
        for row in rows:
            if row["command"] == command:
                yield row, new.get((row["cell"], row["route"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pkv", default=os.path.join(ROOT, "build/release/pkv"))
    parser.add_argument("--tolerance", type=float, metavar="PERCENT")
    parser.add_argument("file")
    parser.add_argument("row", nargs="?", type=int)
    args = parser.parse_args()
    bad = count = 0
    try:
        rows = result_files.read(args.file)
        if args.row is not None and not 1 <= args.row <= len(rows):
            raise CannotRun(f"{args.file} has {len(rows)} rows, there is no row {args.row}")
        for before, now in pairs(args.file, rows, args.row, os.path.abspath(args.pkv)):
            count += 1
            name = f"line {before['line']}, {before['cell']}, {before['route']}"
            wrong, figures = compare(before, now, args.tolerance) if now else (["no row now"], "")
            print(f"{'differs' if wrong else 'agrees'}: {name}: {figures}")
            for text in wrong:
                print(f"    {text}")
            bad += bool(wrong)
    except (CannotRun, ValueError, OSError) as e:
        print(f"verify_results: {e}", file=sys.stderr)
        return 2
    print(f"verify_results: {count} rows, {bad} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
