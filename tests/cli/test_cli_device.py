# SPDX-License-Identifier: Apache-2.0
"""`pkv bench attention --device cuda` on an invented device: every figure, every check, no GPU.

usage: test_cli_device.py PKV_ON_INVENTED_DEVICE PKV INVENTED_FLASHINFER   (see tests/host_cuda)
"""
import csv
import json
import os
import subprocess
import sys
import tempfile
import unittest

INVENTED, PKV, FLASHINFER = sys.argv[1:4]
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SHAPE = ["--query-heads", "8", "--kv-heads", "2", "--head-dim", "64", "--memory", "4",
         "--repeats", "3", "--needles", "5"]
ROUTES = ["bucket_exact", "bucket_padded", "split", "workqueue", "workqueue_fused", "balanced"]


def run(*args, program=INVENTED, fault=None):
    env = dict(os.environ)
    env.pop("HOST_DEVICE_FAULT", None)
    if fault:
        env["HOST_DEVICE_FAULT"] = fault
    done = subprocess.run([program, "bench", "attention", *args], capture_output=True, timeout=300,
                          env=env, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def device(*args, fault=None):
    return run("--device", "cuda", *SHAPE, *args, fault=fault)


def pkv(*args):
    """(exit code, stdout, stderr) of one run on the invented device."""
    done = subprocess.run([INVENTED, *args], capture_output=True, timeout=500, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Device(unittest.TestCase):
    def rows(self, *args):
        code, out, err = device("--json", *args)
        self.assertEqual(code, 0, err)
        return json.loads(out)

    def test_figures(self):
        """The invented device takes 10 us for a null read, 20 for a route of the seed, 16 with
        fused merges, 12 for balanced, 11 where it overlaps the layer before, 3 for a plan."""
        for graphs in ("one", "each"):
            result = self.rows("--lengths", "100,33,1,600", "--graphs", graphs)
            self.assertEqual(result["device"], "Host 0  invented")
            rows = {row["route"]: row for row in result["rows"]}
            self.assertEqual(list(rows), ROUTES)
            for name, row in rows.items():
                self.assertAlmostEqual(row["null_us"], 10, 4)
                self.assertLess(row["error"], 1e-3)
                self.assertGreater(row["wall_us"], 0)
                self.assertEqual(row["kv_bytes"], 734 * 2 * 2 * 64 * 2, name)
                self.assertIsNone(row["floor_us"])  # that line is an H200's
                if name not in ("balanced", "workqueue_fused"):
                    self.assertAlmostEqual(row["attend_us"], 20, 4)
                    self.assertAlmostEqual(row["event_us"], 20, 4)
                    self.assertIsNone(row["wait_us"])
                    self.assertIsNone(row["launch_us"])
            row = rows["balanced"]
            self.assertAlmostEqual(rows["workqueue_fused"]["attend_us"], 16, 4)
            self.assertTrue(11 < row["attend_us"] < 11.2, row)  # the first layer waits
            self.assertAlmostEqual(row["wait_us"], 12, 4)
            self.assertAlmostEqual(row["plan_us"], 3, 4)
            self.assertAlmostEqual(row["step_us"], 3 + 12 + 31 * 11, 3)
            self.assertEqual((row["launches"], row["ctas_sm"]), (1, 2))

    def test_shared(self):
        """9 us a layer here, two plans; pages that rows share count once."""
        token = 2 * 2 * 64 * 2
        cell = "1024/2x9x400+33,90"  # whole tiles of 64: of the first 1424 tokens 1408
        result = self.rows("--lengths", cell, "-r", "shared")
        rows = {row["route"]: row for row in result["rows"]}
        self.assertEqual(list(rows), ["balanced", "shared"])
        shared, balanced = rows["shared"], rows["balanced"]
        self.assertAlmostEqual(shared["attend_us"], 9, 4)
        self.assertAlmostEqual(shared["plan_us"], 6, 4)
        self.assertAlmostEqual(shared["step_us"], 6 + 32 * 9, 3)
        self.assertAlmostEqual(shared["speedup"], balanced["attend_us"] / 9, 3)
        self.assertEqual(balanced["kv_bytes"], (18 * 1457 + 90) * token)
        self.assertEqual(shared["total_bytes"], (18 * 1457 + 90) * token)
        self.assertEqual(shared["kv_bytes"], (1024 + 2 * 384 + 18 * 49 + 90) * token)
        self.assertEqual(shared["nodes"], 3)
        for row in rows.values():
            self.assertLess(row["error"], 1e-3)
            self.assertIsNone(row["limit_us"])  # an H200's, as the floor
        costs = self.rows("--lengths", cell, "-r", "shared", "--shared-costs", "8,8,64,0,99999")
        self.assertEqual(costs["rows"][1]["nodes"], 0)
        self.assertIn("it takes five", device("--lengths", cell, "--shared-costs", "1,2,3,4")[2])
        code, out, err = device("--lengths", cell)
        self.assertEqual(code, 0, err)
        self.assertIn("3.0 shared prefixes, read once: ", out)
        self.assertNotIn("shared", device("--lengths", "100,33")[1])
        for lengths, *more in ((cell, "--rows-permuted"), (cell, "--window", "100"),
                               ("1x9x256+0,1x4x300+1,0,5", "--chained", "--q-len", "3"),
                               ("1x2x64+400,1x2x400+64", "--kv-dtype", "bf16")):
            result = self.rows("--lengths", lengths, "-r", "shared", "--needles", "40", *more)
            self.assertEqual(len(result["rows"]), 2, more)

    def test_mooncake(self):
        """Requests 1 and 3 have two whole blocks in common, all have the first."""
        requests = [(1100, 20, [0, 1, 2]), (1500, 100, [0, 4, 5]), (1024, 9, [0, 4]), (1600, 2,
                    [0, 4, 7, 8])]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "some trace.jsonl")
            with open(path, "w", encoding="utf-8") as file:
                for at, (prompt, output, ids) in enumerate(requests):
                    print(json.dumps({"timestamp": at, "input_length": prompt,
                                      "output_length": output, "hash_ids": ids}), file=file)
            rows = self.rows("--mooncake", path, "--active", "4", "--steps", "1", "-r", "shared",
                             "--memory", "64", "--needles", "3")["rows"]
            self.assertEqual([row["cell"] for row in rows], ["some_4"] * 2)
            self.assertEqual(rows[0]["rows"], 4)
            total = sum(prompt + output // 2 for prompt, output, _ in requests)
            self.assertEqual(rows[1]["total_bytes"], total * 2 * 2 * 64 * 2)
            self.assertEqual(rows[1]["kv_bytes"], (total - 3 * 512 - 2 * 512) * 2 * 2 * 64 * 2)
            rows = self.rows("--mooncake", path, "--active", "2", "--steps", "3", "-r", "balanced",
                             "--memory", "64", "--lengths", "7")["rows"]
            self.assertEqual([row["cell"] for row in rows], ["lengths", "some_2"])
            _, _, err = device("--mooncake", path, "--active", "5")
            self.assertIn("has 4 requests, 5 were asked for", err)
            _, _, err = device("--mooncake", path, "--active", "2", "--page", "48")
            self.assertIn("pages of 48 tokens do not fill a block of 512", err)

    def test_shapes(self):
        for args in (["--kv-dtype", "bf16", "--page", "1"], ["--layout", "interleaved"],
                     ["--kv-dtype", "fp8_e4m3", "--layout", "nhd", "--page", "19"],
                     ["--q-len", "3", "--window", "40"], ["--head-dim", "24", "--page", "64"],
                     ["--rows-permuted", "--batch-invariant"]):
            result = self.rows("--lengths", "100,33,0,1,300", "-r", "balanced", *args)
            self.assertEqual(len(result["rows"]), 1, args)
            self.assertLess(result["rows"][0]["error"], 8e-3, args)

    def test_traces_are_means_over_steps(self):
        rows = self.rows("--cells", "b1_bucketed", "--steps", "2", "-r", "balanced", "--memory",
                         "128", "--repeats", "1", "--check", "0")["rows"]
        self.assertAlmostEqual(rows[0]["null_us"], 10, 4)
        self.assertEqual(rows[0]["rows"], 1)

    def test_faults_are_found(self):
        for fault, wrong, what in (("tail", "balanced", "error"), ("page", "balanced", "error"),
                                   ("nan", "workqueue", "error"),
                                   ("needle", "balanced", "needle missed by")):
            # row 0 has seven pages: each has its needle in 38 rounds
            code, out, err = device("--lengths", "100,33,1,600", "--needles", "38", fault=fault)
            self.assertEqual(code, 1, fault)
            self.assertIn("%s on lengths is wrong: %s" % (wrong, what), err)
            self.assertNotIn("\nlengths          %s " % wrong, out)  # not timed
            self.assertIn("\nlengths          split ", out)
        code, out, err = device("--lengths", "100,600", fault="alloc")
        self.assertEqual(code, 0)
        self.assertIn("lengths skipped:", err)
        self.assertIn("1 cells skipped", out)

    def test_csv(self):
        anchors = {"cells": {"small": {"lens": [70, 5], "fa3": {"gpu_us": 9.5, "plan_us": 1},
                                       "xqa": {"gpu_us": 8, "err": 0.1}, "floor_us": 6.1}}}
        with tempfile.TemporaryDirectory() as folder:
            path, out = os.path.join(folder, "a.json"), os.path.join(folder, "o.csv")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(anchors, file)
            code, _, err = device("--anchors", path, "--csv", out, "--commit", "abc")
            self.assertEqual(code, 0, err)
            with open(out, encoding="utf-8") as file:
                lines = file.read().splitlines()
            self.assertTrue(lines[1].startswith("# command: pkv bench attention --device cuda "))
            rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
        self.assertEqual([row["route"] for row in rows], ROUTES)
        row = rows[-1]
        self.assertEqual((row["commit"], row["cell"], row["floor_us"]), ("abc", "small", ""))
        self.assertEqual(row["peers"], "anchor:fa3=9.50;anchor:xqa=8.00")
        raw = dict(part.split("=") for part in row["raw"].split(";"))
        self.assertEqual(sorted(raw), ["event", "gpu", "launch", "null", "planned", "step", "wait",
                                       "wall"])
        self.assertTrue(all(len(values.split()) == 3 for values in raw.values()))

    def verify(self, *args, program=INVENTED):
        done = subprocess.run([sys.executable, os.path.join(ROOT, "bench/verify_results.py"),
                               "--pkv", program, *args], capture_output=True, text=True,
                              check=False, timeout=300)
        return done.returncode, done.stdout, done.stderr

    def test_verify(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "o.csv")
            for lengths in ("100,33", "600"):
                code, _, err = device("--lengths", lengths, "-r", "balanced", "--csv", out)
                self.assertEqual(code, 0, err)
            code, text, err = self.verify(out)
            self.assertEqual((code, err), (0, ""), text)
            self.assertIn("2 rows, 0 differ", text)
            code, text, _ = self.verify(out, "2")
            self.assertEqual(code, 0, text)
            self.assertIn("agrees: line 5, lengths, balanced: gpu_us 11.", text)
            self.assertIn("over the null read 1.1", text)
            self.assertIn("no row 3", self.verify(out, "3")[2])
            code, _, err = self.verify(out, program=PKV)
            self.assertEqual(code, 2)
            self.assertIn("no CUDA device to measure", err)

            with open(out, encoding="utf-8") as file:
                lines = file.read().splitlines()
            fields = lines[4].split(",")
            for column, value, message in ((5, "9.9", "gpu_us is 11."), (8, "1", "bytes is"),
                                           (10, "1e-9", "error is"), (12, "8", "null read is")):
                changed = os.path.join(folder, "changed.csv")
                with open(changed, "w", encoding="utf-8") as file:
                    file.write("\n".join([*lines[:4], ",".join(
                        [*fields[:column], value, *fields[column + 1:]])]) + "\n")
                code, text, _ = self.verify(changed, "2")
                self.assertEqual(code, 1, text)
                self.assertIn(message, text)
            with open(changed, "w", encoding="utf-8") as file:
                file.write("\n".join(lines[:1] + lines[2:3]) + "\n")
            code, _, err = self.verify(changed)
            self.assertEqual(code, 2)
            self.assertIn("does not say what made its rows", err)

    def test_verify_on_the_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "o.csv")
            code, _, err = run("--lengths", "1000x4", "-r", "balanced", "-t", "1", "--csv", out,
                               program=PKV)
            self.assertEqual(code, 0, err)
            code, text, err = self.verify("--tolerance", "400", out, "1", program=PKV)
            self.assertEqual(code, 0, text + err)
            self.assertIn("over the null read", text)

    def test_plot(self):
        with tempfile.TemporaryDirectory() as folder:
            cells, out = os.path.join(folder, "c.json"), os.path.join(folder, "o.csv")
            plot, peers = os.path.join(folder, "p.svg"), os.path.join(folder, "p.csv")
            with open(cells, "w", encoding="utf-8") as file:
                json.dump({"cells": {"a": {"lens": [70], "fa3": {"gpu_us": 12}},
                                     "b": {"lens": [9], "fa3": {"gpu_us": 12}}}}, file)
            self.assertEqual(device("--anchors", cells, "--csv", out)[0], 0)
            with open(peers, "w", encoding="utf-8") as file:  # of this run: it goes first
                file.write("commit,device,driver,cell,route,gpu_us,plan_us,wall_us,bytes,floor_us,"
                           "error,peers\nx,d,v,b,ours.hnd,11,1,1,1,1,1,null_read=3;fa3.nhd=10;"
                           "xqa.hnd=10.5\n")
            done = subprocess.run([sys.executable, os.path.join(ROOT, "bench/plot_decode.py"), out,
                                   peers, "-o", plot], capture_output=True, text=True, check=False)
            if "No module named 'matplotlib'" in done.stderr:
                self.skipTest("no matplotlib")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("2 cells, 2 with peers, ahead of the best in 1", done.stdout)
            with open(plot, encoding="utf-8") as file:
                self.assertIn("<svg", file.read())

    def flashinfer(self, *args):
        return device("--head-dim", "128", "--flashinfer", FLASHINFER, *args)

    def test_flashinfer_is_a_route(self):
        """The invented one takes 14 us a layer."""
        for route, launches in (("flashinfer", 1), ("flashinfer_cores", 2)):
            code, out, err = self.flashinfer("--lengths", "100,33,1,600", "-r", route, "--json")
            self.assertEqual(code, 0, err)
            rows = json.loads(out)["rows"]
            self.assertEqual([row["route"] for row in rows], [route])
            self.assertAlmostEqual(rows[0]["attend_us"], 14, 4)
            self.assertEqual(rows[0]["launches"], launches)
            self.assertLess(rows[0]["error"], 1e-3)
            self.assertEqual(rows[0]["kv_bytes"], 734 * 2 * 2 * 128 * 2)
        code, out, err = self.flashinfer("--lengths", "100,33", "--policy", "fixed:flashinfer")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"lengths +2 +flashinfer +14\.0")

    def test_flashinfer_refuses_by_name(self):
        code, _, err = device("--lengths", "100", "-r", "flashinfer")
        self.assertEqual(code, 1)
        self.assertIn("FlashInfer's kernels are not here", err)
        _, _, err = self.flashinfer("--lengths", "100,0", "-r", "flashinfer")
        self.assertIn("flashinfer on lengths skipped: row 1 is empty", err)
        _, _, err = device("--flashinfer", FLASHINFER, "--lengths", "100", "-r", "flashinfer")
        self.assertIn("its kernels are built for f16 and head_dim 128", err)
        code, _, err = run("-r", "flashinfer", program=PKV)
        self.assertEqual(code, 2)
        self.assertIn("--route flashinfer needs --device cuda", err)
        code, out, _ = device("--lengths", "100,33", "--policy", "fixed:flashinfer", "--head-dim",
                              "128")
        self.assertEqual(code, 0)
        self.assertIn("flashinfer is not here: FlashInfer's kernels are not here", out)
        self.assertIn("flashinfer is not available: balanced", out)

    def test_policy_commands(self):
        """calibrate, bench policy and bench paper with FlashInfer as one of the routes."""
        with tempfile.TemporaryDirectory() as folder:
            profile, out_csv = os.path.join(folder, "p"), os.path.join(folder, "o.csv")
            common = ["--device", "cuda", "--flashinfer", FLASHINFER, "--memory"]
            code, out, err = pkv("calibrate", "--out", profile, "--query-heads", "4", "--kv-heads",
                                 "1", "--tokens", "512", "--batches", "18", "--repeats", "1",
                                 *common, "8")
            self.assertEqual(code, 0, err)
            for route in ("flashinfer", "flashinfer_cores", "workqueue_fused", "balanced"):
                self.assertRegex(out, r"\n%s +1[34] +0\.0%%" % route)
            code, out, err = pkv("explain", "--lens", "300,20", "--profile", profile,
                                 "--query-heads", "4", "--kv-heads", "1", "--flashinfer",
                                 FLASHINFER)
            self.assertEqual(code, 0, err)
            self.assertIn("calibrated: balanced 1", out)
            self.assertIn("flashinfer invented's kernels are here", out)
            common = [*common, "16", "--profile", profile, "--divide", "1024", "--seeds", "1",
                      "--csv", out_csv]
            code, out, err = pkv("bench", "policy", "--steps", "1", "--most-rows", "2",
                                 "--repeats", "1", *common)
            self.assertEqual(code, 0, err)
            self.assertRegex(out, r"calibrated +0\.\d\d% ")
            rows = self.policy_rows(out_csv)
            self.assertEqual({row["route"] for row in rows if row["active"] == "2"},
                             {*ROUTES, "flashinfer", "flashinfer_cores"})
            code, out, err = pkv("bench", "policy", "--whole", "2,3", "--layers", "2", "--trace",
                                 "bimodal", *common)
            self.assertEqual(code, 0, err)
            self.assertEqual(len([row for row in out.split("\n") if " calibrated " in row]), 2)
            rows = self.policy_rows(out_csv)
            self.assertEqual({row["trace"] for row in rows}, {"bimodal"})
            self.assertEqual(len(rows), 2 * 5)  # numbers of rows, contenders
            for row in rows:
                self.assertGreater(int(row["tokens"]), int(row["steps"]))  # 2 rows, 1 at the end
                self.assertLess(float(row["error"]), 1e-3)
            before = self.policy_rows(out_csv)
            for whole in ("2,x", "2,", "", "0", "65", "1,1,1,1,1,1,1,1"):
                code, out, err = pkv("bench", "policy", "--whole", whole, *common)
                self.assertEqual((code, out), (2, ""), whole)  # before anything runs
                self.assertIn("--whole '%s': " % whole, err)
            self.assertEqual(self.policy_rows(out_csv), before)
            code, out, err = pkv("bench", "paper", "persistentkv", "--steps", "1", "--repeats", "1",
                                 "--device", "cuda", "--flashinfer", FLASHINFER, "--memory", "8",
                                 "--divide", "1024", "--seeds", "1", "--csv", out_csv)
            self.assertEqual(code, 0, err)
            self.assertIn("speed-up over FlashInfer invented, the better of its two", out)
            self.assertRegex(out, r"\n +balanced +1\.2")
            with open(out_csv, encoding="utf-8") as file:
                self.assertIn(" persistentkv\n# flashinfer invented\n", file.read())
            groups = [r for r in self.policy_rows(out_csv) if r["table"] == "groups"]
            self.assertEqual({row["group"] for row in groups}, {"1", "4", "8"})

    def policy_rows(self, path):
        with open(path, encoding="utf-8") as file:
            return list(csv.DictReader(line for line in file if not line.startswith("#")))

    def test_without_a_device(self):
        code, out, err = run("--device", "cuda", program=PKV)
        self.assertEqual((code, out), (1, ""))
        self.assertIn("no CUDA device to measure: ", err)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
