# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, help, strict options, streaming, JSON, signals.

usage: test_cli.py PKV MODEL   (tests that need the model are skipped, and counted, without it)
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PKV, MODEL = sys.argv[1], sys.argv[2]
HAVE_MODEL = os.access(MODEL, os.R_OK)
LIMIT_S = 300


def pkv(*args, stdin=b"", env=None):
    """(exit code, stdout, stderr) of one run."""
    full = dict(os.environ, **(env or {}))
    done = subprocess.run([PKV, *args], input=stdin, capture_output=True, timeout=LIMIT_S, env=full,
                          check=False)
    return done.returncode, done.stdout, done.stderr.decode()


def commands():
    """Names of all commands, from `pkv --help`."""
    text = pkv("--help")[1].decode()
    block = text.split("Commands:\n")[1].split("\n\n")[0]
    return [re.split(r"\s{2,}", line.strip())[0] for line in block.splitlines()]


class Frame(unittest.TestCase):
    def usage_error(self, args, *texts):
        code, out, err = pkv(*args)
        self.assertEqual(code, 2, (args, out, err))
        self.assertEqual(out, b"", args)
        for text in texts:
            self.assertIn(text, err, args)

    def test_program(self):
        self.assertEqual(pkv("--version")[:2], (0, b"pkv 0.1.0\n"))
        self.assertEqual(pkv()[0], 2)
        for args in (["--help"], ["-h"], ["help"]):
            code, out, err = pkv(*args)
            self.assertEqual((code, err), (0, ""), args)
            self.assertIn(b"Exit status", out)

    def test_help_of_each_command(self):
        names = commands()
        for name in ("run", "demo", "doctor"):
            self.assertIn(name, names)
        for name in names:
            words = name.split()
            code, out, err = pkv(*words, "--help")
            self.assertEqual((code, err), (0, ""), name)
            self.assertTrue(out.decode().startswith("pkv %s - " % name), out[:80])
            for line in out.decode().splitlines():
                self.assertLessEqual(len(line), 100, line)
            self.assertEqual(pkv(*words, "-h")[1], out)
            self.assertEqual(pkv("help", *words)[1], out)

    def test_generated_pages(self):
        manual, page = pkv("--help-man")[1].decode(), pkv("--help-markdown")[1].decode()
        for name in commands():
            self.assertIn(".SS pkv " + name, manual)
            self.assertIn("## pkv " + name, page)
            for option in re.findall(r"--([a-z-]+)", pkv(*name.split(), "--help")[1].decode()
                                     .split("Options:")[1].split("Exit status")[0]):
                if option == "help":
                    continue
                self.assertIn("`--" + option, page, (name, option))
                self.assertIn(r"\-\-" + option.replace("-", r"\-"), manual, (name, option))

    def test_unknown_words(self):
        self.usage_error(["rum"], "unknown command 'rum'", "did you mean 'run'")
        self.usage_error(["xyzzy"], "unknown command 'xyzzy'")
        self.usage_error(["--frobnicate"], "unknown option '--frobnicate'")
        self.usage_error(["run", "--modle", "x"], "unknown option '--modle'", "'--model'")
        self.usage_error(["run", "--qqqqqq"], "unknown option '--qqqqqq'")
        self.usage_error(["run", "-Z"], "unknown option '-Z'")
        self.usage_error(["run", "-m", "x", "-p", "y", "z"], "'z' is one argument too many")
        for name in commands():
            self.usage_error([*name.split(), "--no-such-option"], "--no-such-option")

    def test_strict_values(self):
        for option, value, text in (
                ("--max-tokens", "0", "from 1 to"), ("--max-tokens", "5x", "'5x'"),
                ("--max-tokens", " 5", "' 5'"), ("--max-tokens", "", "''"),
                ("--max-tokens", "99999999999", "from 1 to"), ("--seed", "-1", "from 0"),
                ("--temperature", "nan", "'nan'"), ("--temperature", "-1", "from 0"),
                ("--top-p", "1.01", "from 0 to 1"), ("--top-p", "0,5", "'0,5'"),
                ("--kv-dtype", "f15", "f32, f16, bf16, fp8_e4m3"),
                ("--activations", "", "i8, f32")):
            for args in ([option, value], [option + "=" + value]):
                self.usage_error(["run", "-m", "x", "-p", "y", *args], option, text)
        self.usage_error(["run", "-p", "y"], "--model FILE is missing")
        self.usage_error(["run", "-m", "x"], "--prompt")
        self.usage_error(["run", "-m", "x", "-p", "y", "-f", "z"], "exclude")
        self.usage_error(["run", "-m", "x", "-p", "y", "-s", "z"], "--chat")
        self.usage_error(["run", "-m"], "--model needs a value")
        self.usage_error(["run", "--json=1", "-m", "x", "-p", "y"], "--json takes no value")

    def test_stdout_that_cannot_be_written(self):
        if os.path.exists("/dev/full"):
            with open("/dev/full", "wb") as full:
                done = subprocess.run([PKV, "--help"], stdout=full, stderr=subprocess.PIPE,
                                      check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn(b"cannot write to standard output", done.stderr)
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([PKV, "--help-markdown"], stdout=write, stderr=subprocess.PIPE,
                              check=False)
        os.close(write)
        self.assertEqual((done.returncode, done.stderr), (141, b""))

    def test_doctor(self):
        code, out, _ = pkv("doctor", "--json")
        report = json.loads(out)
        self.assertEqual(code, 0)
        self.assertEqual(report["missing"], 0)
        sections = {check["section"] for check in report["checks"]}
        self.assertEqual(sections, {"program", "cpu", "memory", "libraries", "gpu", "model"})
        code, out, _ = pkv("doctor")
        self.assertEqual(code, 0)
        self.assertIn(b"Nothing that pkv needs is missing", out)
        code, out, _ = pkv("doctor", "-m", "/nonexistent/model.gguf")
        self.assertEqual(code, 1)
        self.assertIn(b"/nonexistent/model.gguf", out)
        self.assertIn(b"missing", out)

    def bench(self, *args):
        """Rows by route of a small `pkv bench attention --json`."""
        code, out, err = pkv("bench", "attention", "-t", "2", "-n", "1", "--memory", "64", "--json",
                             *args)
        self.assertEqual((code, err), (0, ""), args)
        result = json.loads(out)
        self.assertEqual(result["skipped"], 0)
        return {row["route"]: row for row in result["rows"]}

    def test_bench_counts(self):
        rows = self.bench("--lengths", "0,1,37x3,600", "--splits", "4", "--bucket", "512")
        self.assertEqual(set(rows),
                         {"bucket_exact", "bucket_padded", "split", "workqueue", "balanced"})
        token = 2 * 8 * 128 * 2
        for route, row in rows.items():
            self.assertEqual(row["kv_bytes"], (1 + 3 * 37 + 600) * token, route)
            self.assertLess(row["error"], 1e-4)
            self.assertGreater(row["attend_us"], 0)
            self.assertGreater(row["null_us"], 0)
        self.assertEqual([rows[r]["launches"] for r in sorted(rows)], [1, 8, 6, 2, 2])
        self.assertEqual(rows["bucket_padded"]["padded_bytes"], (4 * 512 + 1024 - 712) * token)
        self.assertEqual(rows["split"]["tasks"], 6 * 8 * 4)
        # 256 tasks over 6 rows and 8 heads: 6 splits, rounded up to 8; never more than tiles
        self.assertEqual(rows["workqueue"]["tasks"], (0 + 1 + 3 * 2 + 8) * 8)
        self.assertEqual(rows["split"]["state_bytes"], 6 * 32 * 4 * 520)

    def test_bench_shared(self):
        shape = ["--query-heads", "9", "--kv-heads", "3", "--head-dim", "64"]
        token = 2 * 3 * 64 * 2
        # 2 groups of 9 rows; whole tiles of 64 are shared: of the first 456 tokens 448
        rows = self.bench("--lengths", "256/2x9x200+33,5", "-r", "shared", *shape)
        self.assertEqual(list(rows), ["balanced", "shared"])
        for route, row in rows.items():
            self.assertEqual(row["rows"], 19)
            self.assertEqual(row["total_bytes"], (18 * 489 + 5) * token, route)
            self.assertLess(row["error"], 1e-4)
        self.assertEqual(rows["balanced"]["kv_bytes"], rows["balanced"]["total_bytes"])
        self.assertEqual(rows["balanced"]["nodes"], 0)
        self.assertEqual(rows["shared"]["nodes"], 3)
        self.assertEqual(rows["shared"]["kv_bytes"], (256 + 2 * 192 + 18 * 41 + 5) * token)
        self.assertGreater(rows["shared"]["speedup"], 0)
        self.assertGreater(rows["shared"]["tile_fill"], 0)
        for more in (["--chained"], ["--rows-permuted"], ["--kv-dtype", "fp8_e4m3"]):
            row = self.bench("--lengths", "256/2x9x200+33,5", "-r", "shared", *shape,
                             *more)["shared"]
            self.assertEqual(row["nodes"], 3, more)
            self.assertLess(row["error"], 1e-4)
        rows = self.bench("--lengths", "1x9x600+9", *shape, "--batch-invariant")
        self.assertEqual(set(rows), {"bucket_exact", "bucket_padded", "split", "workqueue",
                                     "balanced", "shared"})
        self.assertEqual(rows["shared"]["kv_bytes"], (512 + 9 * 97) * token)  # whole chunks
        self.assertNotIn("shared", self.bench("--lengths", "100x3", *shape))

    def test_bench_shapes(self):
        for dtype in ("f32", "f16", "bf16", "fp8_e4m3"):
            for layout in ("hnd", "nhd"):
                row = self.bench("--lengths", "5,100", "--kv-dtype", dtype, "--layout", layout,
                                 "--query-heads", "9", "--kv-heads", "3", "--head-dim", "64",
                                 "--page", "7", "--q-len", "3", "--window", "20", "-r", "balanced")
                self.assertLess(row["balanced"]["error"], 1e-4, (dtype, layout))
                size = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1}[dtype]
                self.assertEqual(row["balanced"]["kv_bytes"], (5 + 22) * 2 * 3 * 64 * size)

    def test_bench_files(self):
        with tempfile.TemporaryDirectory() as folder:
            trace, csv = os.path.join(folder, "t.csv"), os.path.join(folder, "r.csv")
            with open(trace, "w", encoding="utf-8") as file:
                file.write("prompt_len,decode_len,arrival\n100,2,0\n40,1,0\n")
            for _ in range(2):
                rows = self.bench("--trace", trace, "-r", "workqueue", "--csv", csv,
                                  "--commit", "abc")
            self.assertEqual(rows["workqueue"]["rows"], 1.5)  # steps of 2 rows and of 1
            with open(csv, encoding="utf-8") as file:
                lines = [line.rstrip("\n").split(",") for line in file]
            self.assertEqual(lines[0][:12], "commit,device,driver,cell,route,gpu_us,plan_us,"
                             "wall_us,bytes,floor_us,error,peers".split(","))
            self.assertEqual(len(lines), 5)
            self.assertEqual(lines[1], lines[3])
            self.assertTrue(lines[1][0].startswith("# command: pkv bench attention --"), lines[1])
            self.assertIn("--trace " + trace, lines[1][0])
            self.assertNotIn("abc", ",".join(lines[1]))
            self.assertTrue(all(len(line) == 26 for line in (lines[0], lines[2], lines[4])))
            row = dict(zip(lines[0], lines[2]))
            self.assertEqual((row["commit"], row["route"]), ("abc", "workqueue"))
            times = [float(us) for part in row["raw"].split(";") if part.startswith("gpu=")
                     for us in part[4:].split()]
            self.assertGreaterEqual(len(times), 2)
            self.assertTrue(min(times) <= float(row["gpu_us"]) <= max(times))
            with open(csv, "w", encoding="utf-8") as file:
                file.write("commit,x\n")
            code, _, err = pkv("bench", "attention", "--lengths", "5", "--csv", csv)
            self.assertEqual(code, 1)
            self.assertIn("has other columns", err)
            with open(trace, "a", encoding="utf-8") as file:
                file.write("7,x,1\n")
            code, _, err = pkv("bench", "attention", "--trace", trace)
            self.assertEqual(code, 1)
            self.assertIn("line 4: decode_len is 'x'", err)
            code, _, err = pkv("bench", "attention", "--trace", folder + "/none", "--memory", "16")
            self.assertEqual(code, 1)

    def test_bench_cells_from_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.cells")

            def write(text):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)

            def cells(*args):
                out = pkv("bench", "attention", "--device", "cpu", "-n", "1", "--memory", "64",
                          "--json", "-r", "balanced", *args)
                self.assertEqual(out[0], 0, out[2])
                return {row["cell"]: row for row in json.loads(out[1])["rows"]}

            write("# two cells\n\none 5 70\ntwo\t100 \n")
            token = 2 * 8 * 128 * 2
            rows = cells("--cells", path)
            self.assertEqual({n: r["kv_bytes"] for n, r in rows.items()},
                             {"one": 75 * token, "two": 100 * token})
            self.assertEqual(list(cells("--cells", path, "--only", "two")), ["two"])
            self.assertEqual(list(cells("--cells", path, "--lengths", "9")),
                             ["one", "two", "lengths"])
            for text, message in (("a 1\na 2\n", "cell a comes twice"),
                                  ("a\n", "line 1: cell a has no lengths"),
                                  ("a 1\nb 1 x\n", "line 2: 'x' is no length"),
                                  ("a,b 1\n", "'a,b' is no name")):
                write(text)
                code, _, err = pkv("bench", "attention", "--cells", path)
                self.assertEqual(code, 1, text)
                self.assertIn(message, err)
            write('{"cells": {"x": {"lens": [3, 40], "p": {"gpu_us": 2.5}, "floor_us": 1.0},'
                  ' "shared": {"pat": {"gpu_us": 1}}}}')
            self.assertEqual(cells("--anchors", path)["x"]["kv_bytes"], 43 * token)
            self.assertEqual(cells("--anchors", path, "--rows-permuted")["x"]["rows"], 2)
            for text, message in (("{", "line 1"), ('{"cells": 1}', 'no object "cells"'),
                                  ('{"cells": {}}', 'no cell has "lens"'),
                                  ('{"cells": {"x": {"lens": [1.5]}}}', "not a whole number"),
                                  ('{"cells": {"x": {"lens": []}}}', "has 0 rows")):
                write(text)
                code, _, err = pkv("bench", "attention", "--anchors", path)
                self.assertEqual(code, 1, text)
                self.assertIn(message, err)

    def test_bench_refuses(self):
        self.usage_error(["bench", "attention", "--only", "x"], "--only 'x' names none")
        self.usage_error(["bench", "attention", "--layout", "interleaved"], "--device cuda")
        self.usage_error(["bench", "attention", "-r", "workqueue_fused"], "--device cuda")
        self.usage_error(["bench", "attention", "--device", "cuda", "--best"], "--best is for the")
        self.usage_error(["bench", "attention", "--device", "cuda", "--kv-dtype", "f32"], "f16")
        self.usage_error(["bench", "attention", "--device", "tpu"], "one of cpu, cuda")
        self.usage_error(["bench", "attention", "--cells", "b8_bimodal,b9"], "'b9' is no cell")
        self.usage_error(["bench", "attention", "--threads", "1,x"], "--threads is '1,x'")
        self.usage_error(["bench", "attention", "--threads", ""], "--threads is ''")
        self.usage_error(["bench", "attention", "--lengths", "1,,2"], "expected at ',2'")
        self.usage_error(["bench", "attention", "--lengths", "5x"], "'5x'")
        self.usage_error(["bench", "attention", "--lengths", "1x4096,1"], "more than 4096 rows")
        for word in ("1x2+3", "1x2x3", "x2x3+4", "1x2x3+", "1x0x3+4", "5/6", "/1x2x3+4",
                     "1x2x3x4+5", "9999999999/1x2x3+4", "1x2x16777216+1", "1x2x3+4/5"):
            self.usage_error(["bench", "attention", "--lengths", word], "'%s' is no length" % word)
        self.usage_error(["bench", "attention", "--lengths", "64x65x1+1"], "more than 4096 rows")
        self.usage_error(["bench"], "there is 'bench attention', 'bench model'")
        self.usage_error(["bench", "x"], "unknown command 'bench x'; there is 'bench attention'")
        for name, value in (("prompt", "1,,2"), ("prompt", "5,0"), ("depth", "1,"), ("depth", "x"),
                            ("parallel", "2000"), ("parallel", "")):
            self.usage_error(["bench", "model", "-m", "m", "--" + name, value],
                             "--%s is '%s'" % (name, value))
        code, _, err = pkv("bench", "attention", "--lengths", "5", "--query-heads", "5")
        self.assertEqual(code, 1)
        self.assertIn("not a multiple of kv_heads 8", err)
        code, out, err = pkv("bench", "attention", "--cells", "1row_64k", "--memory", "16")
        self.assertEqual(code, 0)
        self.assertIn("1row_64k skipped: 4096 pages, the storage has 256", err)
        self.assertIn(b"1 cells skipped", out)

    def test_log_level(self):
        self.assertIn("PKV_LOG is 'loud'", pkv("--version", env={"PKV_LOG": "loud"})[2])
        self.assertEqual(pkv("--version", env={"PKV_LOG": "debug"})[0], 0)

    def test_files_that_are_no_model(self):
        code, out, err = pkv("run", "-m", "/nonexistent/m.gguf", "-p", "x")
        self.assertEqual((code, out), (1, b""))
        self.assertRegex(err, r"^pkv run: .*/nonexistent/m\.gguf.*No such file")
        with tempfile.TemporaryDirectory() as folder:
            for content in (b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"hello\n" * 100):
                path = os.path.join(folder, "bad.gguf")
                with open(path, "wb") as file:
                    file.write(content)
                for command in (["run", "-p", "x", "-m"], ["demo", "-m"],
                                ["tokenize", "-p", "x", "-m"], ["inspect"]):
                    code, out, err = pkv(*command, path)
                    self.assertEqual((code, out), (1, b""), content)
                    self.assertTrue(err.startswith("pkv %s: " % command[0]), err)
                    self.assertIn(path, err)
            self.assertEqual(pkv("run", "-m", folder, "-p", "x")[0], 1)


@unittest.skipUnless(HAVE_MODEL, "no model at " + MODEL)
class Run(unittest.TestCase):
    def run_ok(self, *args, stdin=b""):
        code, out, err = pkv("run", "-m", MODEL, *args, stdin=stdin)
        self.assertEqual(code, 0, err)
        return out

    def test_streaming_equals_json(self):
        for args in (["-p", "The capital of France is", "-n", "12"],
                     ["-p", "Say hello in Chinese and Japanese.", "--chat", "-n", "24"],
                     ["-p", "x", "-n", "40", "-t", "3", "--seed", "5"]):
            streamed = self.run_ok(*args)
            result = json.loads(self.run_ok(*args, "--json"))
            text = result["text"]
            self.assertEqual(streamed.decode(), text if text.endswith("\n") else text + "\n")
            self.assertEqual(len(result["tokens"]), result["generated_tokens"])
            self.assertIn(result["finish"], ("stop", "length"))
            for key in ("load_s", "first_token_s", "total_s"):
                self.assertGreater(result["timings"][key], 0.0)

    def test_never_half_a_character(self):
        """Each piece that arrives is well-formed, with tokens drawn almost at random."""
        child = subprocess.Popen([PKV, "run", "-m", MODEL, "-p", "x", "-n", "150", "-t", "50",
                                  "--seed", "3", "--ignore-end"], stdout=subprocess.PIPE)
        pieces = 0
        while True:
            piece = os.read(child.stdout.fileno(), 65536)
            if not piece:
                break
            piece.decode()  # raises when it is cut
            pieces += 1
        child.stdout.close()
        self.assertEqual(child.wait(), 0)
        self.assertGreater(pieces, 10)

    def test_where_the_prompt_comes_from(self):
        text = "Once upon a time\nthere was"
        expected = self.run_ok("-p", text, "-n", "6")
        self.assertEqual(self.run_ok("-f", "-", "-n", "6", stdin=text.encode()), expected)
        with tempfile.NamedTemporaryFile() as file:
            file.write(text.encode())
            file.flush()
            self.assertEqual(self.run_ok("-f", file.name, "-n", "6"), expected)
        self.assertEqual(self.run_ok("-e", "-p", r"Once upon a time\nthere w\x61s", "-n", "6"),
                         expected)
        plain = json.loads(self.run_ok("-p", r"a\n\n\n\nb", "-n", "1", "--json"))
        escaped = json.loads(self.run_ok("-e", "-p", r"a\n\n\n\nb", "-n", "1", "--json"))
        self.assertNotEqual(plain["prompt_tokens"], escaped["prompt_tokens"])

    def test_prompts_that_are_refused(self):
        for args, stdin, text in (
                (["-p", ""], b"", "empty"), (["-f", "-"], b"", "empty"),
                (["-f", "/nonexistent"], b"", "/nonexistent"),
                (["-e", "-p", r"a\q"], b"", r"\q"),
                (["-f", "-", "--chat"], b"a\0b", "zero byte"),
                (["-p", "a b c d e f g h", "--ctx", "5"], b"", "8 tokens")):
            code, out, err = pkv("run", "-m", MODEL, *args, stdin=stdin)
            self.assertEqual((code, out), (1, b""), (args, err))
            self.assertIn(text, err)

    def test_limits_and_ends(self):
        result = json.loads(self.run_ok("-p", "a b c d e f", "-n", "50", "--ctx", "9", "--json"))
        self.assertEqual((result["finish"], result["prompt_tokens"]), ("length", 6))
        self.assertEqual(result["generated_tokens"], 3)
        result = json.loads(self.run_ok("-p", "Say OK.", "--chat", "-n", "100", "--json"))
        self.assertEqual(result["finish"], "stop")
        self.assertNotIn("<|im_end|>", result["text"])
        result = json.loads(self.run_ok("-p", "Hi", "-n", "2", "--json", "--logprobs", "3"))
        for token in result["tokens"]:
            self.assertEqual(len(token["top"]), 3)
            self.assertEqual(token["top"][0]["id"], token["id"])  # greedy
            self.assertAlmostEqual(token["top"][0]["logprob"], token["logprob"])

    def test_repeatable(self):
        args = ["-p", "My favourite colour", "-n", "12", "-t", "1", "--top-k", "50", "--top-p",
                "0.95"]
        first = self.run_ok(*args, "--seed", "1", "--threads", "1")
        self.assertEqual(self.run_ok(*args, "--seed", "1", "--threads", "2", "--chunk", "1"), first)
        self.assertNotEqual(self.run_ok(*args, "--seed", "2"), first)
        self.assertEqual(self.run_ok(*args[:4], "-t", "1e-8"), self.run_ok(*args[:4]))

    def test_bench_model(self):
        with tempfile.TemporaryDirectory() as folder:
            csv = os.path.join(folder, "r.csv")
            args = ["bench", "model", "-m", MODEL, "-r", "3", "-t", "1", "-p", "20", "-n", "3",
                    "-d", "0,40", "--npp", "33", "--ntg", "2", "--parallel", "2,3", "--csv", csv]
            code, out, err = pkv(*args, "--json", "--commit", "abc")
            self.assertEqual((code, err), (0, ""))
            result = json.loads(out)
            cells = ["start", "memory", "pp20", "tg3", "tg3@d40", "pp33x2", "tg2x2", "pp33x3",
                     "tg2x3"]
            self.assertEqual([row["cell"] for row in result["rows"]], cells)
            self.assertEqual((result["threads"], result["commit"]), (1, "abc"))
            self.assertGreater(result["peak_memory_mb"], 50)
            for row in result["rows"]:
                self.assertEqual(len(row["samples"]), 3)
                low, middle, high = sorted(row["samples"])
                self.assertEqual((row["min"], row["median"], row["max"]), (low, middle, high))
                self.assertGreater(low, 0)
            # A shared prompt, and a depth behind the model's context.
            code, out, err = pkv(*args, "--shared-prompt", "--no-start", "-d", "999999")
            self.assertEqual(code, 0)
            self.assertIn("--depth 999999 skipped", err)
            self.assertIn(b"tg2x3s", out)
            code, out, err = pkv(*args, "--shared-prompt", "--groups", "2")
            self.assertEqual(code, 2)
            self.assertIn("--groups", err)
            code, out, err = pkv("bench", "model", "-m", MODEL, "-p", "0", "-n", "0", "--no-start",
                                 "--parallel", "3", "--npp", "33", "--ntg", "2", "--groups", "2",
                                 "--suffix", "3", "-r", "1", "--json")
            self.assertEqual(code, 0)
            self.assertEqual([row["cell"] for row in json.loads(out)["rows"]],
                             ["pp33+3x3g2", "tg2x3g2"])
            with open(csv, encoding="utf-8") as file:
                lines = [line.rstrip("\n").split(",") for line in file]
            self.assertEqual(lines[0][:2] + lines[0][-2:], ["commit", "date", "max", "samples"])
            self.assertEqual([line[7] for line in lines[1:]],
                             cells + ["pp20", "pp33x2s", "tg2x2s", "pp33x3s", "tg2x3s"])
            self.assertTrue(all(len(line) == 17 and len(line[-1].split()) == 3
                                for line in lines[1:]))
        self.bench_model_tables()
        code, out, err = pkv("bench", "model", "-m", "/nonexistent")
        self.assertEqual((code, out), (1, b""))
        self.assertIn("/nonexistent", err)

    def bench_model_tables(self):
        """The forms of llama-bench and llama-batched-bench, for what parses those."""
        args = ["bench", "model", "-m", MODEL, "-r", "2", "-t", "1", "-p", "20", "-n", "3", "-d",
                "0,40", "--npp", "33", "--ntg", "2", "--parallel", "2"]
        code, out, err = pkv(*args, "--llama-tables", "--shared-prompt")
        self.assertEqual((code, err), (0, ""))
        rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                for line in out.decode().splitlines() if line]
        self.assertEqual([len(row) for row in rows], [7] * 5 + [10] * 3)
        self.assertEqual([row[5] for row in rows[2:5]], ["pp20", "tg3", "tg3 @ d40"])
        self.assertRegex(rows[2][6], r"^\d+\.\d\d ± \d+\.\d\d$")
        pp, tg, sequences, kept, t_pp, s_pp, t_tg, s_tg, t_all, s_all = map(float, rows[-1])
        self.assertEqual((pp, tg, sequences, kept), (33, 2, 2, 33 + 2 * 2))
        self.assertAlmostEqual(t_pp, 33 / s_pp, delta=0.002)
        self.assertAlmostEqual(t_tg, 4 / s_tg, delta=0.002)
        self.assertAlmostEqual(t_all, t_pp + t_tg, delta=0.002)
        self.assertAlmostEqual(s_all, kept / t_all, delta=0.05 * s_all)
        code, out, err = pkv(*args, "--llama-tables", "--json")
        self.assertEqual(code, 2)
        self.assertIn("--llama-tables", err)

    def test_interrupt(self):
        child = subprocess.Popen([PKV, "run", "-m", MODEL, "-p", "Count to a thousand: one, two,",
                                  "-n", "4000", "--ignore-end"], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE)
        self.assertTrue(os.read(child.stdout.fileno(), 1))
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        self.assertEqual((child.returncode, err), (130, b""))
        out.decode()
        self.assertTrue(out.endswith(b"\n"))

    def test_reader_goes_away(self):
        child = subprocess.Popen([PKV, "run", "-m", MODEL, "-p", "Count: one, two,", "-n", "4000",
                                  "--ignore-end"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertTrue(os.read(child.stdout.fileno(), 1))
        child.stdout.close()
        begin = time.monotonic()
        self.assertEqual(child.wait(timeout=60), 141)
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(child.stderr.read(), b"")
        child.stderr.close()

    def test_demo(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        report = os.path.join(folder.name, "demo.html")
        args = ["demo", "-m", MODEL, "-r", "6", "-g", "2", "-n", "6", "--prefix", "560",
                "--report", report]
        code, out, err = pkv(*args, "--json")
        self.assertEqual(code, 0, err)
        result = json.loads(out)
        # The server answered all of it, in both orders.
        self.assertEqual([s["schedule"] for s in result["schedules"]],
                         ["fcfs", "tree/marginal"])
        for s in result["schedules"]:
            self.assertGreater(s["seconds"], s["first_token_ms_p90"] * 1e-3)
            self.assertLess(s["prefill_tokens"], result["prompt_tokens"])
            self.assertGreater(s["prompt_reused"], 0.3)
        with open(report, encoding="utf-8") as page:
            text = page.read()
        for words in ("tree/marginal", "<svg", "<code>pkv demo", "Tokens a second"):
            self.assertIn(words, text)
        self.assertNotIn("http://", text.replace("http://www.w3.org", ""))
        # What cannot be written is told before anything is measured.
        code, out, err = pkv(*args[:-1], os.path.join(folder.name, "none", "demo.html"))
        self.assertEqual((code, out), (1, b""))
        self.assertIn("No such file", err)
        if os.path.exists("/dev/full"):  # and a run that is over is shown
            code, out, err = pkv(*args[:-1], "/dev/full", "--json")
            self.assertEqual((code, len(json.loads(out)["schedules"])), (1, 2))
            self.assertIn("cannot write /dev/full", err)
        args = args[:-2] + ["--schedules", "", "--report", ""]
        self.assertEqual(pkv(*args[:-3], "best", "--json")[0], 2)
        self.assertEqual(len(result["answers"]), 6)
        self.assertEqual(result["pages_in_use"], 0)
        self.assertEqual(result["prefill_tokens"] + result["prompt_tokens_reused"],
                         result["prompt_tokens"])
        self.assertGreaterEqual(result["prefix_pages_reused"], 4 * (560 // 16 - 2))
        self.assertEqual(sum(a["generated_tokens"] for a in result["answers"]),
                         result["generated_tokens"])
        routes = result["kv_bytes_per_token"]
        self.assertEqual(set(routes),
                         {"bucket_exact", "bucket_padded", "split", "workqueue", "balanced",
                          "shared"})
        self.assertGreater(routes["bucket_padded"], routes["balanced"])
        # a chunk of 512 is read twice instead of six times
        self.assertLess(routes["shared"], 0.6 * routes["balanced"])
        self.assertGreater(result["shared_steps"], 2)
        self.assertLess(result["shared_steps"], result["steps"])
        code, out, err = pkv(*args, "--show", "2")
        self.assertEqual(code, 0, err)
        text = out.decode()
        self.assertNotIn("\033", text)  # not a terminal
        self.assertIn("prefix pages reused", text)
        self.assertIn("this run: what requests share is read once", text)
        for answer in result["answers"][:2]:
            shown = " ".join(answer["text"].split())
            self.assertIn(shown, " ".join(text.split()))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
