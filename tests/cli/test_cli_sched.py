# SPDX-License-Identifier: Apache-2.0
"""`pkv bench sched`: operation cells and the simulation.

usage: test_cli_sched.py PKV
"""
import csv
import json
import os
import subprocess
import sys
import tempfile
import unittest

PKV = sys.argv[1]


def pkv(*args):
    """(exit code, stdout, stderr) of one run."""
    done = subprocess.run([PKV, "bench", "sched", *args], capture_output=True, timeout=300,
                          check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Sched(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.file = os.path.join(self.folder.name, "rows.csv")

    def tearDown(self):
        self.folder.cleanup()

    def rows(self, *args):
        """Rows of the CSV file of one run."""
        code, _, err = pkv(*args, "--csv", self.file)
        self.assertEqual((code, err), (0, ""), args)
        with open(self.file, encoding="utf-8") as file:
            lines = [line for line in file if not line.startswith("#")]
        os.remove(self.file)
        return list(csv.DictReader(lines))


class Cells(Sched):
    small = ("-w", "40", "--tokens", "300", "-g", "3,none,chain", "--chunk", "16", "--steps", "30",
             "-r", "2")

    def test_rows(self):
        rows = self.rows("--order", "all", *self.small)
        self.assertEqual({r["order"] for r in rows},
                         {"tree", "fcfs", "priority", "cht", "lpm", "dfs-weight", "cht-published",
                          "radix-dfs"})
        self.assertEqual({r["op"] for r in rows},
                         {"insert", "fill", "finish", "best", "admit", "step", "cancel"})
        self.assertEqual(len(rows), 8 * 3 * 7)
        for row in rows:
            counts = {"insert": 140, "fill": 1}
            if row["op"] != "cancel":
                self.assertEqual(int(row["count"]), counts.get(row["op"], 30), row)
            else:
                self.assertLessEqual(int(row["count"]), 40)
            if row["order"] == "radix-dfs" and row["op"] == "cancel":
                continue  # it has none
            low, high, most = (float(row[k]) for k in ("p50_us", "p99_us", "max_us"))
            self.assertTrue(0 < low <= high <= most, row)
            # the least of some times is not above their most
            self.assertLessEqual(most, float(row["raw_max_us"]))
            self.assertTrue(0 < float(row["mean_us"]) <= most + 0.001, row)
            if row["order"] != "radix-dfs":
                self.assertGreater(float(row["used_bytes_request"]), 20)

    def test_memory(self):
        code, out, err = pkv("--order", "tree", "-w", "1000", "--tokens", "2000", "-g", "none",
                             "--steps", "10", "--memory", "1", "-r", "1")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("hashes", out)
        code, out, err = pkv("--order", "tree", "-w", "1000", "--tokens", "200K", "-g", "none",
                             "--steps", "10", "--memory", "1", "-r", "1")
        self.assertEqual(code, 0)
        self.assertIn("skipped", err)

    def test_refused(self):
        for args in (("--order", "best"), ("-w", "0"), ("--tokens", "1k"), ("-g", "1,,2"),
                     ("--chunk", ""), ("-w", ","), ("--order", "tree,")):
            code, out, err = pkv(*args)
            self.assertEqual((code, out), (2, ""), args)
            self.assertIn("takes", err)

    def test_other_columns(self):
        with open(self.file, "w", encoding="utf-8") as file:
            file.write("a,b\n1,2\n")
        code, _, err = pkv(*self.small, "--csv", self.file)
        self.assertEqual(code, 1)
        self.assertIn("other columns", err)
        with open(self.file, encoding="utf-8") as file:
            self.assertEqual(file.read(), "a,b\n1,2\n")


class Simulation(Sched):
    base = ("--simulate", "-n", "120", "-g", "4", "--prefix", "2048", "--decode", "1-40",
            "--max-batch", "30")

    def outcomes(self, *args):
        """Rows by (order, policy, route); what is measured and not simulated is left out."""
        rows = self.rows(*self.base, *args)
        for row in rows:
            del row["sched_us_step"]
        return {(r["order"], r["policy"], r["route"]): r for r in rows}

    def test_every_order_and_policy(self):
        rows = self.outcomes("--order", "all", "--policy", "all")
        self.assertEqual(len(rows), 6 * 6 * 2)
        bytes_of_all = {r["total_gb"] for r in rows.values()}
        for key, row in rows.items():
            self.assertEqual((row["finished"], row["refused"]), ("120", "0"), key)
            self.assertLessEqual(float(row["unique_gb"]), float(row["total_gb"]), key)
            self.assertTrue(0 < float(row["jain"]) <= 1, key)
            self.assertTrue(float(row["ttft_p50_s"]) <= float(row["ttft_p90_s"])
                            <= float(row["ttft_p99_s"]), key)
            self.assertLessEqual(float(row["rows"]), 30, key)
        # whatever the order, the same tokens are read by the rows
        self.assertEqual(len(bytes_of_all), 1)
        for order in ("fcfs", "tree"):
            ordinary, shared = (float(rows[order, "always", route]["tokens_s"])
                                for route in ("ordinary", "shared"))
            self.assertGreater(shared, ordinary)
        self.assertLess(float(rows["tree", "always", "shared"]["unique_gb"]),
                        float(rows["fcfs", "always", "shared"]["unique_gb"]))

    def test_repeatable(self):
        args = ("--order", "tree,cht", "--policy", "ucb,q-learning,marginal", "--rate", "200")
        first = self.outcomes(*args)
        self.assertEqual(first, self.outcomes(*args))
        self.assertNotEqual(first, self.outcomes(*args, "--seed", "2"))

    def test_without_sharing(self):
        rows = self.outcomes("-g", "none", "--order", "fcfs,tree,cht", "--policy", "all",
                             "--rate", "50")
        rest = {tuple(v for k, v in r.items() if k not in ("order", "policy"))
                for r in rows.values() if r["route"] == "shared"}
        self.assertEqual(len(rest), 1, rest)
        # and the route has nothing to share
        for row in rows.values():
            self.assertEqual((row["total_gb"], row["hit_rate"]), (row["unique_gb"], "0.00000"))

    def test_cost_by_hand(self):
        """One request on a made-up device, its time counted here once more."""
        profile = os.path.join(self.folder.name, "profile.json")
        device = {"name": "toy", "read_tb_s": 1, "read_us": 10, "l2_mb": 1, "l2_tb_s": 2,
                  "step_us": 1000, "gemm_tflops": 100, "attention_tflops": 100, "cache_gb": 50}

        def write(**more):
            with open(profile, "w", encoding="utf-8") as file:
                json.dump({**device, **more}, file)

        args = ("--simulate", "--profile", profile, "-n", "1", "-g", "1", "--prefix", "1000",
                "--own", "24", "--decode", "3", "--order", "tree")
        params, token = 7.5e9, 131072
        prefill = 2 * params * 1024 / 1e14 + 4 * 32 * 4096 * 1024 * 512 / 1e14
        steps = [1e-3 + 2 * params / 1e12 + 32 * 10e-6 + n * token / 1e12
                 for n in (1024, 1025, 1026)]
        for more in ({}, {"overlap": 1.3}, {"overlap": 2, "parts": 8, "row_us": 0}):
            write(**more)  # nothing is read again, so that this changes nothing
            row, = self.rows(*args, "--route", "ordinary")
            self.assertAlmostEqual(float(row["seconds"]), prefill + sum(steps), delta=1e-4)
            self.assertAlmostEqual(float(row["ttft_p50_s"]), prefill + steps[0], delta=1e-5)
            self.assertAlmostEqual(float(row["tpot_p50_ms"]), 1e3 * (steps[1] + steps[2]) / 2,
                                   delta=1e-3)
        for field, value in (("l2_mb", None), ("overlap", 0), ("parts", -1), ("row_us", "no")):
            write(**{field: value})
            code, _, err = pkv(*args)
            self.assertEqual(code, 1)
            self.assertIn(field, err)

    def test_reading_again(self):
        """Rows that share: dearer the less of it L2 holds, and the same again in every run."""
        profile = os.path.join(self.folder.name, "profile.json")
        device = {"name": "toy", "read_tb_s": 1, "read_us": 1, "l2_tb_s": 4, "step_us": 10,
                  "gemm_tflops": 1e6, "attention_tflops": 1e6, "cache_gb": 500, "parts": 264,
                  "overlap": 1.3, "spread": 0.03}
        args = ("--simulate", "--profile", profile, "-n", "256", "-g", "8", "--prefix", "2048",
                "--decode", "20", "--order", "fcfs", "--route", "ordinary")
        seconds = []

        def simulate(**more):
            with open(profile, "w", encoding="utf-8") as file:
                json.dump({**device, **more}, file)
            return float(self.rows(*args)[0]["seconds"])

        for l2_mb in (1e-3, 10, 30, 200):
            seconds.append(simulate(l2_mb=l2_mb))
        self.assertEqual(seconds, sorted(seconds, reverse=True))
        self.assertGreater(seconds[0], 1.5 * seconds[-1])
        # Less than one part is none: what L2 holds is estimated.
        self.assertEqual(simulate(l2_mb=10, parts=0.5), simulate(l2_mb=10, parts=0))

    def test_traces(self):
        path = os.path.join(self.folder.name, "trace")

        def run(text, *args):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return self.rows("--simulate", "--trace", path, "-n", "0", "--order", "tree",
                             "--route", "shared", *args)[0]

        line = '{"timestamp": %d, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, %d]}'
        row = run("\n".join(line % (i, i + 2) for i in range(10)) + "\n")
        self.assertEqual((row["finished"], row["requests"]), ("10", "10"))
        # nine of ten find two blocks of 512, the third is not whole
        self.assertAlmostEqual(float(row["hit_rate"]), 9 * 1024 / 12000, delta=1e-4)
        head = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        row = run(head + "2023-11-16 18:15:46.68,374,44\r\n2023-11-16 18:16:46.68,20,1\r\n")
        self.assertEqual((row["finished"], row["hit_rate"]), ("2", "0.00000"))
        self.assertGreater(float(row["seconds"]), 60)
        row = run("prompt_len,decode_len,arrival\n100,10,0\n200,5,3000\n")
        self.assertEqual(row["finished"], "2")
        self.assertTrue(3 < float(row["seconds"]) < 4, row)
        for bad in ('{"timestamp": 0}\n', head + "2023-11-16,1,2\n", "", "a,b\n1,2\n"):
            with open(path, "w", encoding="utf-8") as file:
                file.write(bad)
            code, _, err = pkv("--simulate", "--trace", path)
            self.assertEqual(code, 1, bad)
            self.assertNotEqual(err, "")

    def test_ageing_mixes_groups(self):
        """Admissions of the oldest bring other groups into the batch, which costs bytes."""
        args = ("-n", "400", "-g", "2", "--order", "tree", "--max-batch", "8", "--route", "shared")
        unbounded = self.rows("--simulate", *args, "--bypass-limit", "-1")[0]
        bounded = self.rows("--simulate", *args, "--bypass-limit", "16")[0]
        self.assertLess(float(unbounded["unique_gb"]), float(bounded["unique_gb"]))

    def test_header_says_what_is_fitted(self):
        code, out, err = pkv(*self.base, "--csv", self.file, "--order", "tree")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("attention is fitted", out)
        with open(self.file, encoding="utf-8") as file:
            self.assertIn("attention is fitted", file.read())

    def test_refused(self):
        for args in (("--policy", "never"), ("--route", "fast"), ("--prefix", "9-3"),
                     ("-g", "chain"), ("-n", "0"), ("--chunk", "16,64"), ("--decode", "0")):
            code, out, err = pkv("--simulate", *args)
            self.assertEqual((code, out), (2, ""), args)
            self.assertIn("takes", err)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
