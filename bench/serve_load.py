#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load on OpenAI-compatible servers through the openai client: time to first token, time per
output token, gaps between tokens, tokens/s, goodput; several servers in turn in one run.

usage: serve_load.py --server NAME=URL [--server NAME=URL ...] [--case CASE ...] [--rounds N]
                     [--csv FILE] [--note TEXT] [--tag TEXT]
cases: one (one stream), shared-cold and shared-warm (8 clients, one long system prompt, different
questions; cold: a prompt nobody sent before), apart (8 prompts of that length that share nothing),
many (64 short streams). Servers take turns in every round; only ratios within a run mean much.
Prompts are new in every run unless --tag names them: with the tag of an earlier run shared-warm
asks what its shared-cold did. The CSV has each row as soon as it is measured.
"""
import argparse
import asyncio
import csv
import random
import re
import statistics
import time
import urllib.request

import openai

WORDS = ("amber basin cedar delta ember fjord grove harbor island jungle kernel ladder meadow "
         "nickel orchid pebble quartz river saddle timber valley walnut yonder zephyr").split()
CASES = {"one": (1, 0, 64), "shared-cold": (8, 1, 24), "shared-warm": (8, 1, 24),
         "apart": (8, 2, 16), "many": (64, 0, 24)}


def filler(seed, count):
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(count))


def prompts(case, tag, words):
    """(system, user) of every client."""
    count, kind, _ = CASES[case]
    if kind == 0:
        return [(None, "Client %d: write about the %s." % (i, WORDS[i % len(WORDS)]))
                for i in range(count)]
    systems = [filler("%s-%d" % (tag, i if kind == 2 else 0), words) for i in range(count)]
    return [(systems[i], "Question %d: what is a %s?" % (i, WORDS[i])) for i in range(count)]


async def ask(client, model, system, user, tokens):
    """(start, times of text chunks, completion tokens, prompt tokens)"""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    start, times, usage = time.perf_counter(), [], None
    stream = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=tokens, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True})
    async for chunk in stream:
        if chunk.usage:
            usage = chunk.usage
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
    return start, times, usage.completion_tokens, usage.prompt_tokens


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def measure(results, limits):
    begin, end = min(r[0] for r in results), max(r[1][-1] for r in results)
    first = [r[1][0] - r[0] for r in results]
    each = [(r[1][-1] - r[1][0]) / max(1, r[2] - 1) for r in results]
    gaps = [b - a for r in results for a, b in zip(r[1], r[1][1:])]
    good = sum(f <= limits[0] and e <= limits[1] for f, e in zip(first, each))
    row = {"clients": len(results), "prompt_tokens": max(r[3] for r in results),
           "tokens_per_s": sum(r[2] for r in results) / (end - begin),
           "goodput_per_s": good / (end - begin)}
    for name, values in (("ttft", first), ("tpot", each), ("itl", gaps)):
        for share in (50, 90, 99):
            row["%s_p%d_ms" % (name, share)] = 1e3 * quantile(values, share / 100)
    return row


def decode_rows(url):
    """(decoding rows, steps that had any) so far, where the server counts them."""
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    found = [re.search(r"^pkv_decode_rows_per_step_%s (\S+)$" % n, text, re.M)
             for n in ("sum", "count")]
    return [float(m[1]) for m in found] if all(found) else None


def run_case(url, case, tag, words, limits):
    before = decode_rows(url)
    row = asyncio.run(ask_all(url, case, tag, words, limits))
    after = decode_rows(url)
    row["decode_rows_a_step"] = ((after[0] - before[0]) / max(1.0, after[1] - before[1])
                                 if before and after else "")
    return row


async def ask_all(url, case, tag, words, limits):
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=600, max_retries=0)
    async with client:
        model = (await client.models.list()).data[0].id
        return measure(await asyncio.gather(*(
            ask(client, model, s, u, CASES[case][2]) for s, u in prompts(case, tag, words))),
            limits)


def write_row(out, rows):
    """The last row; before the first one the names."""
    if not out:
        return
    writer = csv.DictWriter(out, rows[0])
    if len(rows) == 1:
        writer.writeheader()
    writer.writerow({k: "%.3f" % v if isinstance(v, float) else v for k, v in rows[-1].items()})
    out.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--words", type=int, default=500, help="of the long prompt")
    parser.add_argument("--slo", type=float, nargs=2, default=(2.0, 0.2), metavar=("TTFT", "TPOT"))
    parser.add_argument("--csv")
    parser.add_argument("--note", default="")
    parser.add_argument("--tag")
    args = parser.parse_args()
    servers = [text.split("=", 1) for text in args.server]
    rows, stamp = [], args.tag or "%d" % time.time()
    out = open(args.csv, "w", newline="", encoding="utf-8") if args.csv else None
    if out and args.note:
        out.write("# %s\n" % args.note)
    for round_ in range(args.rounds):
        for case in args.case or list(CASES):
            for name, url in servers[::1 if round_ % 2 == 0 else -1]:
                # Warm asks again what the round's cold case asked; anything else is new.
                what = "shared" if case.startswith("shared") else case
                tag = "%s-%d-%s" % (stamp, round_, what)
                row = run_case(url, case, tag, args.words, args.slo)
                rows.append(dict(server=name, case=case, round=round_, **row))
                write_row(out, rows)
                print("%-6s %-12s round %d  %8.1f tok/s  ttft %8.0f ms  tpot %7.1f ms" % (
                    name, case, round_, row["tokens_per_s"], row["ttft_p50_ms"],
                    row["tpot_p50_ms"]), flush=True)
    for case in args.case or list(CASES):
        got = {n: [r for r in rows if (r["server"], r["case"]) == (n, case)] for n, _ in servers}
        base = got[servers[-1][0]]
        for name, _ in servers[:-1]:
            rate = statistics.median(a["tokens_per_s"] / b["tokens_per_s"]
                                     for a, b in zip(got[name], base))
            wait = statistics.median(b["ttft_p50_ms"] / a["ttft_p50_ms"]
                                     for a, b in zip(got[name], base))
            print("%s against %s, %s: %.2f x its tokens/s, first token %.2f x as soon" % (
                name, servers[-1][0], case, rate, wait))
    if out:
        out.close()


if __name__ == "__main__":
    main()
