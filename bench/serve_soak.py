#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A `pkv serve` under load for minutes or hours: streams, clients that leave, requests that are
wrong, a pool that is nearly full. Watches that memory stays, that every page is accounted for, that
texts are those of an idle server, and that the end is clean. Exit status 1 when anything is not so.

All streams pause now and then until the server is idle: what it holds then is all that it keeps.

usage: serve_soak.py PKV MODEL [--minutes M] [--streams N] [--csv FILE] [--report FILE]
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
import threading
import time

TOPICS = "river basin fjord harbor kernel meadow orchid quartz saddle timber valley zephyr".split()
BAD = [b"", b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "max_tokens": -1}', b"[" * 2000,
       b'{"prompt": "\\ud83d"}', b'{"prompt": "a", "temperature": "hot"}', b"\xff\xfe{}",
       b'{"prompt": [99999999]}', b'{"prompt": "a", "n": 1000}', b'{"prompt": ""}']
ASIDE = [("/tokenize", b'{"content": "A harbor and a kernel."}'), ("/health", None),
         ("/detokenize", b'{"tokens": [5, 6, 7, 8, 9]}'), ("/v1/models", None), ("/slots", None),
         ("/apply-template", b'{"messages": [{"role": "user", "content": "Say it."}]}'),
         ("/props", None)]
SCHEMA = {"type": "object", "properties": {"name": {"enum": TOPICS}, "far": {"type": "boolean"}},
          "required": ["name", "far"]}
# What a request asks for beside its text, in turn.
KINDS = [{}, {"temperature": 0.9}, {"stop": ["the ", ". "], "temperature": 0.7, "top_p": 0.9},
         {"temperature": 1.0, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
          "presence_penalty": 0.2, "frequency_penalty": 0.1},
         {"temperature": 0.8, "logprobs": 3, "logit_bias": {"11": -5}},
         {"temperature": 1.1, "n": 2},
         {"chat": True, "temperature": 0.9, "top_logprobs": 2, "logprobs": True},
         {"chat": True, "response_format": {"type": "json_schema", "json_schema": {
             "name": "place", "schema": SCHEMA}}}]

CONTEXT = 1024  # tokens
SLOPE_MINUTES = 3  # of the runs whose memory is judged


def make_requests(count, longest):
    """Half of them share a beginning."""
    pick = random.Random(5)
    shared = "You are a guide to the " + " and the ".join(pick.choices(TOPICS, k=30)) + ". "
    made = []
    for i in range(count):
        text = (shared if i % 16 < 8 else "") + "Tell me, in case %d, of the %s." % (
            i, pick.choice(TOPICS))
        fields = dict(KINDS[i % len(KINDS)], seed=i, ignore_eos=True, temperature=KINDS[
            i % len(KINDS)].get("temperature", 0), max_tokens=pick.randrange(longest // 3, longest))
        if fields.pop("chat", False):
            fields["messages"] = [{"role": "user", "content": text}]
            fields["ignore_eos"] = False
        else:
            fields["prompt"] = text
        made.append(fields)
    return made


def fit(points):
    """(slope, half of its 95 % interval) of the least squares line; the points stand for
    themselves, so make means of what is correlated before."""
    n = len(points)
    if n < 3:
        return 0.0, float("inf")
    mean_x, mean_y = (sum(p[i] for p in points) / n for i in (0, 1))
    across = sum((x - mean_x) ** 2 for x, _ in points) or 1e-12
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / across
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    students = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
    return slope, students.get(n - 2, 2.1) * (left / (n - 2) / across) ** 0.5


def means(samples, column, parts=20):
    """Means of so many stretches of time: neighbouring samples are no two measurements."""
    size = max(1, len(samples) // parts)
    cut = [samples[i:i + size] for i in range(0, len(samples) - size + 1, size)]
    return [(sum(s["seconds"] for s in c) / len(c) / 3600, sum(s[column] for s in c) / len(c))
            for c in cut]


class Soak:
    def __init__(self, args):
        self.args, self.requests = args, make_requests(args.requests, args.longest)
        self.wanted, self.counts, self.wrong, self.samples = [], {}, [], []
        self.going = None
        self.process = subprocess.Popen(
            [args.pkv, "serve", args.model, "--port", "0", "--ctx", str(CONTEXT), "--rows",
             str(args.streams), "--requests", str(4 * args.streams), "--cache", str(args.cache),
             "--page", str(args.page), "--threads", str(args.threads),
             "--no-access-log", "--connections", str(4 * args.streams),
             # A machine that stands still for minutes is no fault of a client's.
             *(word for name in ("header", "body", "idle", "stall", "progress")
               for word in ("--%s-timeout" % name, "900"))],
            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        line = self.process.stderr.readline().decode()
        self.port = int(re.search(r":(\d+)$", line.strip())[1])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # nobody waits

    async def open(self, method, path, body):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % (method.encode(), path.encode(), len(body)) +
                     body)
        await writer.drain()
        return reader, writer

    async def whole(self, method, path, body=b""):
        reader, writer = await self.open(method, path, body)
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()

    async def stream(self, fields, leave_after=None):
        """The texts of an answer's choices; None where this client left before their end."""
        chat = "messages" in fields
        reader, writer = await self.open(
            "POST", "/v1/chat/completions" if chat else "/v1/completions",
            json.dumps(dict(fields, stream=True)).encode())
        texts, events, done = [""] * fields.get("n", 1), 0, False
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
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    said = choice["delta"].get("content") if chat else choice["text"]
                    texts[choice["index"]] += said or ""
        finally:
            writer.close()
        if not done:
            raise AssertionError("a stream ended without [DONE]: %r" % texts)
        return texts

    async def cold(self):
        """What an idle server answers, nothing of it cached."""
        for i, fields in enumerate(self.requests):
            self.wanted.append(await self.stream(dict(fields, cache_salt="cold-%d" % i)))

    async def warm(self):
        """Touches what was allotted at the start and else comes in when first used: the scratch of
        the longest prompt, each page, a row of logits for each row (192 KiB with SmolLM2)."""
        await self.stream({"prompt": [5 + i for i in range(CONTEXT - 24)], "max_tokens": 1})
        most = max(1, self.args.cache // self.args.streams - self.args.page - 6)
        rounds, since = 0, 0
        while since < 3 and rounds < 20:  # chance says how many rows a step has
            before = self.memory()[0]
            await asyncio.gather(*(self.stream({"prompt": "%d" % i, "max_tokens": min(24, most),
                                                "ignore_eos": True})
                                   for i in range(self.args.streams)))
            rounds += 1
            since = since + 1 if self.memory()[0] == before else 0
        print("warm after %d rounds: anonymous %.2f MiB" % (rounds, self.memory()[0]),
              file=sys.stderr, flush=True)

    def note(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    async def one(self, pick):
        chance, i = pick.random(), pick.randrange(len(self.requests))
        if chance < 0.01:
            answer = await self.whole("POST", "/v1/completions", pick.choice(BAD))
            if not answer.startswith("HTTP/1.1 4"):
                self.wrong.append("a wrong request got %r" % answer[:60])
            self.note("malformed")
        elif chance < 0.11:
            if await self.stream(self.requests[i], leave_after=pick.randrange(20)) is None:
                self.note("left")
            else:
                self.note("done before it left")
        else:
            texts = await self.stream(self.requests[i])
            if texts != self.wanted[i]:
                self.wrong.append("request %d: %r, alone %r" % (i, texts, self.wanted[i]))
            self.note("equal" if texts == self.wanted[i] else "different")

    def goes_on(self, end):
        return time.monotonic() < end and len(self.wrong) < 5

    async def client(self, number, end):
        pick = random.Random(number)
        while self.goes_on(end):
            await self.going.wait()
            try:
                await self.one(pick)
            except (ConnectionError, asyncio.IncompleteReadError, AssertionError) as error:
                self.wrong.append("client %d: %r" % (number, error))

    async def aside(self, end):
        """What costs no step of the engine: the routes of text and state."""
        while self.goes_on(end):
            await self.going.wait()
            for path, body in ASIDE:
                try:
                    answer = await self.whole("POST" if body else "GET", path, body or b"")
                except OSError as error:
                    answer = repr(error)
                if not answer.startswith("HTTP/1.1 200"):
                    self.wrong.append("%s: %r" % (path, answer[:60]))
                self.note("aside")
                await asyncio.sleep(0.1)

    def memory(self):
        """MiB of anonymous memory now, and the most that was resident."""
        with open("/proc/%d/status" % self.process.pid, encoding="ascii") as text:
            found = dict(re.findall(r"^(RssAnon|VmHWM):\s+(\d+) kB", text.read(), re.M))
        # Pages of the mapped model come and go with what else the machine does.
        return int(found["RssAnon"]) / 1024, int(found["VmHWM"]) / 1024

    async def sample(self, begin, idle):
        text = await self.whole("GET", "/metrics")
        m = {k: float(v) for k, v in re.findall(r"^pkv_(\w+) (\S+)$", text, re.M)}
        pages = [int(m["kv_pages_" + n]) for n in ("in_use", "cached", "free", "total")]
        if sum(pages[:3]) != pages[3]:
            self.wrong.append("pages in use, cached, free, total: %r" % pages)
        anonymous, most = self.memory()
        made = {"seconds": round(time.monotonic() - begin, 1), "idle": int(idle),
                "anonymous_mib": round(anonymous, 3), "resident_peak_mib": round(most, 3),
                "heap_mib": round(m["heap_bytes"] / 2 ** 20, 5),
                "files": len(os.listdir("/proc/%d/fd" % self.process.pid)),
                "pages_in_use": pages[0], "pages_cached": pages[1], "pages_total": pages[3],
                "live": int(m["num_requests_live"]), "running": int(m["num_requests_running"]),
                "preemptions": int(m["num_preemptions_total"]),
                "evictions": int(m["kv_evictions_total"]),
                "requests": int(m["http_requests_total"]),
                "generated": int(m["generation_tokens_total"])}
        self.samples.append(made)
        return made

    async def rest(self, begin):
        """All streams pause; what is held when nothing runs."""
        self.going.clear()
        for _ in range(3000):
            text = await self.whole("GET", "/metrics")
            if all("pkv_%s\n" % n in text for n in (
                    "kv_pages_in_use 0", "num_requests_live 0", "http_connections 1")):
                break
            await asyncio.sleep(0.1)
        else:
            self.wrong.append("pages, requests or connections are left when nothing runs")
        made = await self.sample(begin, True)
        print("%(seconds)8.0f s  idle: heap %(heap_mib).3f MiB, anonymous %(anonymous_mib).2f, "
              "files %(files)d, requests %(requests)d" % made, "wrong", len(self.wrong),
              self.counts, file=sys.stderr, flush=True)
        self.going.set()

    async def watch(self, begin, end):
        pause = 60 * self.args.minutes / self.args.rests
        due = begin + pause
        while time.monotonic() < end:
            if time.monotonic() >= due:
                due += pause
                await self.rest(begin)
                await asyncio.sleep(self.args.every)  # the streams begin again
            await self.sample(begin, False)
            await asyncio.sleep(self.args.every)

    async def run(self):
        self.going = asyncio.Event()
        self.going.set()
        while " 200 " not in (await self.whole("GET", "/ready")).split("\r\n")[0]:
            await asyncio.sleep(0.05)
        await self.cold()
        if self.args.minutes >= SLOPE_MINUTES:
            await self.warm()
        begin = time.monotonic()
        end = begin + 60 * self.args.minutes
        await asyncio.gather(self.watch(begin, end), self.aside(end),
                             *(self.client(i, end) for i in range(self.args.streams)))
        await self.rest(begin)
        return await self.whole("GET", "/metrics")

    def finish(self):
        self.process.terminate()
        log = self.process.communicate(timeout=120)[1].decode()
        if self.process.returncode != 0:
            self.wrong.append("exit status %d" % self.process.returncode)
        if re.search("^\\S+ (error|warn) |Sanitizer", log, re.M):
            self.wrong.append("the log says: " + log[:2000])

    def summary(self, metrics):
        late = self.samples[len(self.samples) // 3:]
        busy, idle = ([s for s in late if s["idle"] == i] for i in (0, 1))
        rows = [float((re.findall(r"^pkv_decode_rows_per_step_%s (\S+)$" % n, metrics, re.M) or [
            0])[0]) for n in ("sum", "count")]
        args, last = self.args, self.samples[-1]
        made = {"minutes": args.minutes, "streams": args.streams, "answers": self.counts,
                "http_requests": last["requests"], "generated": last["generated"],
                "pool_in_use": round(sum(s["pages_in_use"] for s in busy) / max(
                    1, sum(s["pages_total"] for s in busy)), 3),
                "decode_rows_a_step": round(rows[0] / max(1, rows[1]), 2),
                "preemptions": last["preemptions"], "evictions": last["evictions"],
                "files": sorted({s["files"] for s in idle})}
        for name, points in (("anonymous", means(busy, "anonymous_mib")),
                             ("anonymous_idle", means(idle, "anonymous_mib", len(idle))),
                             ("heap_idle", means(idle, "heap_mib", len(idle)))):
            slope, half = fit(points)
            made[name + "_mib_an_hour"] = [round(slope, 4), round(half, 4)]
        made["wrong"] = len(self.wrong)
        return made


def report(soak, summary, path):
    """The file's head, and a line for each time that the server was idle."""
    with open(path, "w", encoding="utf-8") as out:
        out.write("# command: bench/serve_soak.py pkv MODEL %s\n" % " ".join(sys.argv[3:]))
        out.write("# slopes in MiB an hour, [least squares, half of the 95 % interval], over the "
                  "later two thirds\n")
        for name, value in summary.items():
            out.write("%s: %s\n" % (name, json.dumps(value)))
        out.write("\nseconds heap_mib anonymous_mib resident_peak_mib files requests generated "
                  "(each time with nothing running)\n")
        for s in soak.samples:
            if s["idle"]:
                out.write("%7.0f %11.4f %9.2f %9.2f %4d %8d %8d\n" % tuple(s[n] for n in (
                    "seconds", "heap_mib", "anonymous_mib", "resident_peak_mib", "files",
                    "requests", "generated")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pkv")
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--cache", type=int, default=3072, help="tokens: the smaller, the fuller")
    parser.add_argument("--page", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="of the server")
    parser.add_argument("--slope", type=float, default=1.0, help="MiB an hour that are allowed")
    parser.add_argument("--requests", type=int, default=96, help="different ones")
    parser.add_argument("--longest", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--every", type=float, default=5, help="seconds between samples")
    parser.add_argument("--rests", type=int, default=12, help="times that all streams pause")
    parser.add_argument("--csv", help="all samples")
    parser.add_argument("--report", help="the figures, and the samples of an idle server")
    args = parser.parse_args()
    if not os.access(args.model, os.R_OK):
        print("the model is not there")
        return 77
    soak, text = Soak(args), ""
    try:
        text = asyncio.run(soak.run())
    except (OSError, KeyError) as error:  # what was seen until then is written all the same
        soak.wrong.append("the server is gone: %r" % error)
    finally:
        soak.finish()
    if not soak.samples:
        print(soak.wrong, file=sys.stderr)
        return 1
    summary = soak.summary(text)
    slope = summary["anonymous_mib_an_hour"][0]
    if slope > args.slope and args.minutes >= SLOPE_MINUTES:
        soak.wrong.append("memory grows by %.2f MiB an hour" % slope)
        summary["wrong"] += 1
    print(json.dumps(summary))
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as out:
            out.write("# command: bench/serve_soak.py pkv MODEL %s\n# %s\n" % (
                " ".join(sys.argv[3:]), json.dumps(summary)))
            writer = csv.DictWriter(out, soak.samples[0])
            writer.writeheader()
            writer.writerows(soak.samples)
    if args.report:
        report(soak, summary, args.report)
    for line in soak.wrong:
        print(line, file=sys.stderr)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
