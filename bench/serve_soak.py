#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A `pkv serve` under load for minutes: streams, clients that leave, requests that are wrong, a
pool that is nearly full. Watches that memory stays, that every page is accounted for, that texts
are those of an idle server, and that the end is clean. Exit status 1 when anything is not so.

usage: serve_soak.py PKV MODEL [--minutes M] [--streams N] [--csv FILE]
"""
import argparse
import asyncio
import csv
import json
import os
import random
import re
import struct
import subprocess
import sys
import time

TOPICS = "river basin fjord harbor kernel meadow orchid quartz saddle timber valley zephyr".split()
BAD = [b"", b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "max_tokens": -1}', b"[" * 2000,
       b'{"prompt": "\\ud83d"}', b'{"prompt": "a", "temperature": "hot"}', b"\xff\xfe{}",
       b'{"prompt": [99999999]}', b'{"prompt": "a", "n": 1000}', b'{"prompt": ""}']


def make_requests(count):
    """Half of them share a beginning; half are greedy, half sampled with a seed."""
    pick = random.Random(5)
    shared = "You are a guide to the " + " and the ".join(pick.choices(TOPICS, k=30)) + ". "
    return [{"prompt": (shared if i % 2 else "") + "Tell me, in case %d, of the %s." % (
                 i, pick.choice(TOPICS)),
             "max_tokens": pick.randrange(40, 120), "ignore_eos": True, "seed": i,
             "temperature": 0.9 if i % 4 > 1 else 0} for i in range(count)]


class Soak:
    def __init__(self, args):
        self.args, self.requests = args, make_requests(args.requests)
        self.wanted, self.counts, self.wrong, self.samples = [], {}, [], []
        self.process = subprocess.Popen(
            [args.pkv, "serve", args.model, "--port", "0", "--ctx", "1024", "--rows",
             str(args.streams), "--requests", str(2 * args.streams), "--cache", str(args.cache),
             "--no-access-log", "--connections", str(4 * args.streams)],
            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        line = self.process.stderr.readline().decode()
        self.port = int(re.search(r":(\d+)$", line.strip())[1])

    async def open(self, path, body):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
        await writer.drain()
        return reader, writer

    async def get(self, path):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                     % path.encode())
        answer = await reader.read()
        writer.close()
        return answer.decode()

    async def stream(self, fields, leave_after=None):
        """The text of an answer; None where this client left before its end."""
        reader, writer = await self.open("/v1/completions", json.dumps(
            dict(fields, stream=True)).encode())
        text, events, done = "", 0, False
        try:
            while True:
                line = await reader.readline()
                if not line:
                    break
                if not line.startswith(b"data: "):
                    continue
                events += 1
                if leave_after is not None and events > leave_after:
                    if leave_after % 2:  # a reset
                        writer.get_extra_info("socket").setsockopt(
                            1, 13, struct.pack("ii", 1, 0))
                    return None
                if line == b"data: [DONE]\n":
                    done = True
                else:
                    text += json.loads(line[6:])["choices"][0]["text"]
        finally:
            writer.close()
        if not done:
            raise AssertionError("a stream ended without [DONE]: %r" % text)
        return text

    async def cold(self):
        """What an idle server answers, nothing of it cached."""
        for i, fields in enumerate(self.requests):
            self.wanted.append(await self.stream(dict(fields, cache_salt="cold-%d" % i)))

    def note(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    async def one(self, pick):
        chance, i = pick.random(), pick.randrange(len(self.requests))
        if chance < 0.01:
            reader, writer = await self.open("/v1/completions", pick.choice(BAD))
            answer = await reader.read()
            writer.close()
            if not answer.startswith(b"HTTP/1.1 4"):
                self.wrong.append("a wrong request got %r" % answer[:60])
            self.note("malformed")
        elif chance < 0.11:
            await self.stream(self.requests[i], leave_after=pick.randrange(30))
            self.note("left")
        else:
            text = await self.stream(self.requests[i])
            if text != self.wanted[i]:
                self.wrong.append("request %d: %r, alone %r" % (i, text, self.wanted[i]))
            self.note("equal")

    async def client(self, number, end):
        pick = random.Random(number)
        while time.monotonic() < end and len(self.wrong) < 5:
            try:
                await self.one(pick)
            except (ConnectionError, asyncio.IncompleteReadError, AssertionError) as error:
                self.wrong.append("client %d: %r" % (number, error))

    def memory_mib(self):
        with open("/proc/%d/smaps_rollup" % self.process.pid, encoding="ascii") as text:
            # Pages of the mapped model come and go with what else the machine does.
            return int(re.search(r"^Anonymous:\s+(\d+)", text.read(), re.M)[1]) / 1024

    async def watch(self, begin, end):
        while time.monotonic() < end:
            text = await self.get("/metrics")
            m = {k: float(v) for k, v in re.findall(r"^pkv_(\w+) (\S+)$", text, re.M)}
            pages = [int(m["kv_pages_" + n]) for n in ("in_use", "cached", "free", "total")]
            if sum(pages[:3]) != pages[3]:
                self.wrong.append("pages in use, cached, free, total: %r" % pages)
            self.samples.append({
                "seconds": round(time.monotonic() - begin, 1),
                "anonymous_mib": round(self.memory_mib(), 3),
                "files": len(os.listdir("/proc/%d/fd" % self.process.pid)),
                "pages_in_use": pages[0], "pages_cached": pages[1], "pages_total": pages[3],
                "live": int(m["num_requests_live"]), "running": int(m["num_requests_running"]),
                "preemptions": int(m["num_preemptions_total"]),
                "generated": int(m["generation_tokens_total"])})
            await asyncio.sleep(2)

    def slope(self):
        """MiB an hour, by least squares over the later two thirds."""
        late = self.samples[len(self.samples) // 3:]
        x = [s["seconds"] / 3600 for s in late]
        y = [s["anonymous_mib"] for s in late]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / max(
            1e-12, sum((a - mean_x) ** 2 for a in x))

    async def run(self):
        while " 200 " not in (await self.get("/ready")).split("\r\n")[0]:
            await asyncio.sleep(0.05)
        await self.cold()
        begin = time.monotonic()
        end = begin + 60 * self.args.minutes
        await asyncio.gather(self.watch(begin, end),
                             *(self.client(i, end) for i in range(self.args.streams)))
        for _ in range(1000):
            text = await self.get("/metrics")
            if "pkv_kv_pages_in_use 0\n" in text and "pkv_num_requests_live 0\n" in text:
                return text
            await asyncio.sleep(0.01)
        self.wrong.append("pages are still in use at the end")
        return text

    def finish(self):
        self.process.terminate()
        log = self.process.communicate(timeout=120)[1].decode()
        if self.process.returncode != 0:
            self.wrong.append("exit status %d" % self.process.returncode)
        if re.search("^\\S+ (error|warn) |Sanitizer", log, re.M):
            self.wrong.append("the log says: " + log[:2000])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pkv")
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--cache", type=int, default=8192, help="tokens: the smaller, the fuller")
    parser.add_argument("--slope", type=float, default=1.0, help="MiB an hour that are allowed")
    parser.add_argument("--requests", type=int, default=24, help="different ones")
    parser.add_argument("--csv")
    args = parser.parse_args()
    if not os.access(args.model, os.R_OK):
        print("the model is not there")
        return 77
    soak = Soak(args)
    try:
        text = asyncio.run(soak.run())
    finally:
        soak.finish()
    late = soak.samples[len(soak.samples) // 3:]
    usage = sum(s["pages_in_use"] for s in late) / max(1, sum(s["pages_total"] for s in late))
    slope = soak.slope()
    rows = [float(re.search(r"^pkv_decode_rows_per_step_%s (\S+)$" % n, text, re.M)[1])
            for n in ("sum", "count")]
    summary = {"minutes": args.minutes, "streams": args.streams, "answers": soak.counts,
               "mib_an_hour": round(slope, 3), "pool_in_use": round(usage, 3),
               "decode_rows_a_step": round(rows[0] / max(1, rows[1]), 2),
               "preemptions": late[-1]["preemptions"], "generated": late[-1]["generated"],
               "wrong": len(soak.wrong)}
    print(json.dumps(summary))
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as out:
            out.write("# command: bench/serve_soak.py pkv MODEL --minutes %g --streams %d --cache "
                      "%d\n# %s\n" % (args.minutes, args.streams, args.cache, json.dumps(summary)))
            writer = csv.DictWriter(out, soak.samples[0])
            writer.writeheader()
            writer.writerows(soak.samples)
    if slope > args.slope and args.minutes >= 3:
        soak.wrong.append("memory grows by %.2f MiB an hour" % slope)
    for line in soak.wrong:
        print(line, file=sys.stderr)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
