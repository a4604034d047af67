#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""coverage.py BUILD [--missed FILE]: lines of each room of src/ that BUILD's programs have run.

BUILD was configured with PKV_COVERAGE, and its tests were run: gcov's counts are added up over all
objects that have a line. --missed writes the lines that no test has run, as PATH:LINE, to FILE.
Prints a table: room, lines, run, per cent.
"""
import argparse
import collections
import json
import os
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../.."))


def counts(build):
    """{path: {line: times run}} of the files below src/."""
    data = []
    for folder, _, names in os.walk(build):
        data += [os.path.join(folder, name) for name in names if name.endswith(".gcda")]
    found = collections.defaultdict(collections.Counter)
    for start in range(0, len(data), 50):
        done = subprocess.run(["gcov", "--json-format", "--stdout", *data[start:start + 50]],
                              capture_output=True, text=True, check=True, cwd=build)
        for text in done.stdout.splitlines():
            for file in json.loads(text)["files"] if text.startswith("{") else ():
                path = os.path.relpath(os.path.join(build, file["file"]), ROOT)
                if path.startswith("src" + os.sep):
                    for line in file["lines"]:
                        found[path][line["line_number"]] += line["count"]
    return found


def room_of(path):
    parts = path.split(os.sep)
    return parts[2] if parts[1] == "backend" and len(parts) > 3 else parts[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("build")
    parser.add_argument("--missed")
    options = parser.parse_args()
    found = counts(os.path.abspath(options.build))
    if not found:
        print("coverage: no counts in " + options.build)
        return 1
    rooms = collections.defaultdict(lambda: [0, 0])
    for path, lines in found.items():
        rooms[room_of(path)][0] += len(lines)
        rooms[room_of(path)][1] += sum(count > 0 for count in lines.values())
    if options.missed:
        with open(options.missed, "w", encoding="utf-8") as file:
            for path in sorted(found):
                file.writelines(f"{path}:{line}\n" for line in sorted(found[path])
                                if found[path][line] == 0)
    print("room,lines,run,percent")
    for room, (lines, run) in sorted(rooms.items()):
        print(f"{room},{lines},{run},{100 * run / lines:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
