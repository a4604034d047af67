#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""error_returns.py BUILD FOLDER...: error returns of src/FOLDER that no program of BUILD has run.

BUILD was configured with PKV_COVERAGE, and its tests were run (./run coverage). An error return is
a line that makes a status or a refusal, or passes one on: gcov's calls and branches tell whether it
did, which the count of its line does not. Prints them as PATH:LINE: text, then how many there are:
made and passed on, and how many of each have run.
"""
import argparse
import collections
import os
import re
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../.."))
MADE = re.compile(r"\b(PKV_CHECK\w*|PKV_FAIL|pkv_fail|pkv_api_refuse|pkv_http_respond_busy)\(|"
                  r"\breturn (PKV_E_\w+|MHD_NO);")
PASSED = re.compile(r"\bPKV_TRY\(")
LINE = re.compile(r"^ *([0-9#=-]+)\*?: *(\d+):(.*)$")
PART = re.compile(r"^(call|branch) +\d+ (?:returned|taken|never executed) ?(\d+)?")


def gcov(build, folders):
    """The text of gcov about objects whose names say that they are of these folders."""
    data = [os.path.join(folder, name) for folder, _, names in os.walk(build) for name in names
            if name.endswith(".gcda")]
    data = [d for d in data if any("/src/%s/" % f in d for f in folders)]
    # Counts of an object that was compiled again since are left out, with a word on stderr.
    done = subprocess.run(["gcov", "-b", "-c", "--stdout", *data], stdout=subprocess.PIPE,
                          text=True, check=False, cwd=build, errors="replace")
    return done.stdout.splitlines()


def sites(lines, folders):
    """{(path, line): [text, kind, run]}; one that is compiled into several objects is run when it
    is in one of them."""
    found = collections.OrderedDict()
    path = at = None
    parts = []

    def end():
        if at is None:
            return
        number, count, text = at
        kind = "made" if MADE.search(text) else "passed on" if PASSED.search(text) else None
        if kind is None or text.lstrip().startswith(("#", "*", "/*")):
            return
        wanted = "call" if kind == "made" else "branch"
        run = count and all(c > 0 for what, c in parts if what == wanted)
        site = found.setdefault((path, number), [text.strip(), kind, False])
        site[2] = site[2] or bool(run)

    for line in lines:
        part = PART.match(line)
        if part:
            parts.append((part[1], int(part[2] or 0)))
            continue
        whole = LINE.match(line)
        if not whole:
            continue
        end()
        at, parts = None, []
        if whole[2] == "0":
            if whole[3].startswith("Source:"):
                path = os.path.relpath(whole[3][7:], ROOT)
        elif path and any(path.startswith("src/%s/" % f) for f in folders) and whole[1] != "-":
            at = (int(whole[2]), int(whole[1]) if whole[1].isdigit() else 0, whole[3])
    end()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("build")
    parser.add_argument("folders", nargs="+")
    options = parser.parse_args()
    found = sites(gcov(os.path.abspath(options.build), options.folders), options.folders)
    if not found:
        print("error_returns: no counts in " + options.build)
        return 1
    for (path, number), (text, _, run) in sorted(found.items()):
        if not run:
            print(f"{path}:{number}: {text}")
    for kind in ("made", "passed on"):
        runs = [run for _, k, run in found.values() if k == kind]
        print(f"{kind}: {len(runs)}, run: {sum(runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
