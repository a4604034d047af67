#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ten times the requests that `pkv serve` can answer: what those get that it refuses, what the
others lose, and whether /health still answers.

usage: serve_overload.py PKV MODEL [--seconds S] [--times N] [--csv FILE] [--loose]

First as many clients as the server takes ask in turn: the best rate. Then requests arrive at random
times at N times that rate, each on a connection of its own. The exit code is 1 where a refusal took
50 ms or more or had no Retry-After, /health 100 ms or more, or less than 90 % of the best was
answered (times are 99th percentiles; the longest are shown); with --loose, for machines that do
other things beside, only at 20 times these times, or where nothing was answered.
"""
import argparse
import asyncio
import csv
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time

TOKENS, AT_ONCE = 24, 16
SKIPPED = 77


def start(pkv, model):
    """(process, port); the log is read and dropped."""
    process = subprocess.Popen(
        [pkv, "serve", model, "--port", "0", "--threads", "1", "--requests", str(AT_ONCE), "--rows",
         "8", "--ctx", "512", "--cache", "8192", "--no-access-log", "--connections", "4096"],
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    found = re.search(rb":(\d+)$", process.stderr.readline().strip())
    if not found:
        sys.exit("serve_overload: the server does not start")
    return process, int(found[1])


async def ask(port, method, path, fields=None):
    """(status, head, body, seconds)"""
    body = json.dumps(fields).encode() if fields else b""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % (method, path, len(body)) + body)
        got = await reader.read(-1)
    finally:
        writer.close()
    took = time.perf_counter() - begin
    head, _, rest = got.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]) if head else 0, head, rest, took


async def complete(port, number):
    return await ask(port, b"POST", b"/v1/completions",
                     {"prompt": "Say %d words about rivers." % number, "max_tokens": TOKENS,
                      "temperature": 0, "ignore_eos": True})


async def wait_ready(port):
    while (await ask(port, b"GET", b"/ready"))[0] != 200:
        await asyncio.sleep(0.1)


def rate_of(times, seconds):
    """Answers a second, the first fifth left out: nothing can be answered at its start."""
    return sum(0.2 * seconds < t <= seconds for t in times) / (0.8 * seconds)


async def best_rate(port, seconds):
    """Answers a second when exactly as many ask as may; for longer where there are too few."""
    begin = time.perf_counter()
    asked, done = itertools.count(10000), []

    async def client():
        while time.perf_counter() < begin + seconds or len(done) < 2 * AT_ONCE:
            if (await complete(port, next(asked)))[0] == 200:
                done.append(time.perf_counter() - begin)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return rate_of(done, max(seconds, sorted(done)[-AT_ONCE]))


async def overload(port, seconds, rate, answers, probes):
    """Requests at random times; (status, seconds, Retry-After, when it came) of each."""
    begin = time.perf_counter()
    pick, tasks = random.Random(1), []

    async def one(number):
        status, head, _, took = await complete(port, number)
        answers.append((status, took, b"\nretry-after:" in head.lower(),
                        time.perf_counter() - begin))

    async def probe():
        while time.perf_counter() < begin + seconds:
            status, _, _, took = await ask(port, b"GET", b"/health")
            probes.append((status, took))
            await asyncio.sleep(0.05)

    tasks.append(asyncio.ensure_future(probe()))
    due = begin
    while due < begin + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(one(20000 + len(tasks))))
        due += pick.expovariate(rate)
    await asyncio.gather(*tasks)


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def judge(row, served, loose):
    """What is not as it should be. Two seconds beside other work are too few for a rate."""
    slack = 20 if loose else 1
    faults = []
    if row["other"] or row["no_retry_after"]:
        faults.append("answers that are neither 200 nor 503 with Retry-After")
    if row["refused"] == 0:
        faults.append("nothing was refused")
    if row["refusal_p99_ms"] >= 50 * slack:
        faults.append("refusals are slow")
    if row["health_p99_ms"] >= 100 * slack:
        faults.append("/health is slow")
    if served == 0 or (not loose and row["goodput"] < 0.9 * row["best"]):
        faults.append("goodput falls")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("pkv")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--csv")
    parser.add_argument("--note", default="")
    parser.add_argument("--loose", action="store_true")
    o = parser.parse_args()
    if not os.access(o.model, os.R_OK):
        print("serve_overload: no model: skipped")
        return SKIPPED
    process, port = start(o.pkv, o.model)
    answers, probes = [], []
    try:
        asyncio.run(wait_ready(port))
        best = asyncio.run(best_rate(port, o.seconds))
        asyncio.run(overload(port, o.seconds, o.times * best, answers, probes))
    finally:
        process.terminate()
        process.communicate(timeout=60)
    refused = [a for a in answers if a[0] == 503]
    goodput = rate_of([a[3] for a in answers if a[0] == 200], o.seconds)
    row = {"seconds": o.seconds, "best": round(best, 2),
           "offered": round(len(answers) / o.seconds, 2),
           "goodput": round(goodput, 2), "refused": len(refused),
           "other": sum(a[0] not in (200, 503) for a in answers),
           "no_retry_after": sum(not a[2] for a in refused),
           "refusal_p50_ms": round(quantile([a[1] for a in refused], 0.5) * 1e3, 2),
           "refusal_p99_ms": round(quantile([a[1] for a in refused], 0.99) * 1e3, 2),
           "refusal_most_ms": round(max((a[1] for a in refused), default=0) * 1e3, 2),
           "health_p50_ms": round(quantile([p[1] for p in probes], 0.5) * 1e3, 2),
           "health_p99_ms": round(quantile([p[1] for p in probes], 0.99) * 1e3, 2),
           "health_most_ms": round(max((p[1] for p in probes), default=0) * 1e3, 2),
           "note": o.note}
    for name, value in row.items():
        print("%-16s %s" % (name, value))
    if o.csv:
        fresh = not os.path.exists(o.csv)
        with open(o.csv, "a", newline="", encoding="utf-8") as file:
            if fresh:
                file.write("# answers a second; times in ms as the client sees them\n"
                           "# command: python3 bench/serve_overload.py build/release/pkv MODEL\n")
            writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)
    faults = judge(row, sum(a[0] == 200 for a in answers), o.loose)
    for fault in faults:
        print("not as it should be: " + fault)
    return 1 if faults or process.returncode != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
