# SPDX-License-Identifier: Apache-2.0
"""`pkv bench attention --device cuda` on an invented device: every figure, every check, no GPU.

usage: test_cli_device.py PKV_ON_INVENTED_DEVICE PKV   (see tests/host_cuda)
"""
import csv
import json
import os
import subprocess
import sys
import tempfile
import unittest

INVENTED, PKV = sys.argv[1], sys.argv[2]
SHAPE = ["--query-heads", "8", "--kv-heads", "2", "--head-dim", "64", "--memory", "8",
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
            self.assertTrue(11 < row["attend_us"] < 11.1, row)  # the first layer waits
            self.assertAlmostEqual(row["wait_us"], 12, 4)
            self.assertAlmostEqual(row["plan_us"], 3, 4)
            self.assertAlmostEqual(row["step_us"], 3 + 12 + 31 * 11, 3)
            self.assertEqual((row["launches"], row["ctas_sm"]), (1, 2))

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

    def test_without_a_device(self):
        code, out, err = run("--device", "cuda", program=PKV)
        self.assertEqual((code, out), (1, ""))
        self.assertIn("no CUDA device to measure: ", err)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
