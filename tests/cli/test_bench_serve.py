# SPDX-License-Identifier: Apache-2.0
"""`pkv bench serve`: what it prints, writes and refuses.

usage: test_bench_serve.py PKV MODEL   (tests that need the model are skipped, and counted)
"""
import csv
import html.parser
import json
import os
import subprocess
import sys
import tempfile
import unittest

PKV, MODEL = sys.argv[1], sys.argv[2]
HAVE_MODEL = os.access(MODEL, os.R_OK)
LIMIT_S = 600
SMALL = ["-r", "6", "-g", "2", "--prefix", "40", "--own", "8", "-n", "5", "--rows", "3"]


def bench(*args):
    done = subprocess.run([PKV, "bench", "serve", *args], capture_output=True, timeout=LIMIT_S,
                          check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Page(html.parser.HTMLParser):
    """Tags that do not close, and anything that would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.seen = [], [], {}

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.fetched += [v for k, v in attrs if k in ("src", "href")]
        if tag in ("svg", "table", "body", "style", "text"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("svg", "table", "body", "style", "text"):
            if self.open.pop() != tag:
                raise AssertionError(tag)


class BenchServe(unittest.TestCase):
    def test_refused(self):
        for schedules in ("", "best", "fcfs/", "fcfs/never", "fcfs,,lpm", ",".join(["fcfs"] * 9)):
            code, _, err = bench("-m", "none.gguf", "--schedules", schedules)
            self.assertEqual(code, 2, err)
            self.assertIn("--schedules is '%s'" % schedules, err)
        code, _, err = bench("-m", "/no/such.gguf")
        self.assertEqual((code, "/no/such.gguf" in err), (1, True), err)

    @unittest.skipUnless(HAVE_MODEL, "the model is not there")
    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            table, page = os.path.join(folder, "a.csv"), os.path.join(folder, "a.html")
            code, out, err = bench("-m", MODEL, *SMALL, "--schedules", "fcfs,tree/marginal",
                                   "--repeats", "2", "--csv", table, "--report", page)
            self.assertEqual((code, err), (0, ""))
            names = [line.split()[0] for line in out.splitlines()[2:]]
            self.assertEqual(names, ["fcfs", "tree/marginal", "tree/marginal", "fcfs"])
            with open(table, encoding="utf-8") as text:
                lines = text.read().splitlines()
            self.assertTrue(lines[1].startswith("# command: pkv bench serve "), lines[1])
            rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
            self.assertEqual([r["schedule"] for r in rows], names)
            for row in rows:
                self.assertNotIn(None, row)
                self.assertLessEqual(float(row["ttft_p50_ms"]), float(row["ttft_p99_ms"]))
                self.assertLessEqual(float(row["ttft_p99_ms"]), 1e3 * float(row["seconds"]) + 1)
            seen = Page()
            with open(page, encoding="utf-8") as text:
                seen.feed(text.read())
            self.assertEqual((seen.open, seen.fetched), ([], []))
            self.assertEqual(seen.seen["svg"], 5)

    @unittest.skipUnless(HAVE_MODEL, "the model is not there")
    def test_json(self):
        code, out, err = bench("-m", MODEL, *SMALL, "--schedules", "lpm", "--rate", "50", "--json",
                               "--slo-ttft", "1000", "--slo-tpot", "1000")
        self.assertEqual((code, err), (0, ""))
        row = json.loads(out)[0]
        self.assertEqual(row["schedule"], "lpm")
        self.assertAlmostEqual(row["goodput_per_s"], 6 / row["seconds"], places=4)
        self.assertAlmostEqual(row["tokens_per_s"], 30 / row["seconds"], places=3)
        self.assertGreater(row["mean_decode_rows"], 0)
        self.assertGreaterEqual(row["kv_mb_per_token_each"], row["kv_mb_per_token"])
        self.assertGreaterEqual(row["ttft_ms"]["p50"], row["queue_ms"]["p50"])
        self.assertGreater(row["prefill_tokens"], 6 * 8)
        alone = json.loads(bench("-m", MODEL, *SMALL, "--prefix", "0", "--schedules", "fcfs",
                                 "--json")[1])[0]
        self.assertEqual(alone["prompt_reused"], 0)
        self.assertEqual(alone["prefill_tokens"], 6 * 8)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[3:]])
