# SPDX-License-Identifier: Apache-2.0
"""`pkv bench sched`: operation cells and the simulation.

usage: test_cli_sched.py PKV
"""
import csv
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
                         {"tree", "fcfs", "priority", "cht", "lpm", "dfs-weight"})
        self.assertEqual({r["op"] for r in rows},
                         {"insert", "fill", "finish", "best", "admit", "step", "cancel"})
        self.assertEqual(len(rows), 6 * 3 * 7)
        for row in rows:
            counts = {"insert": 140, "fill": 1}
            if row["op"] != "cancel":
                self.assertEqual(int(row["count"]), counts.get(row["op"], 30), row)
            else:
                self.assertLessEqual(int(row["count"]), 40)
            low, high, most = (float(row[k]) for k in ("p50_us", "p99_us", "max_us"))
            self.assertTrue(0 < low <= high <= most, row)
            # the least of some times is not above their most
            self.assertLessEqual(most, float(row["raw_max_us"]))
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


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
