# SPDX-License-Identifier: Apache-2.0
"""`pkv calibrate`, `pkv explain` and `pkv bench policy` on the CPU, with small batches.

usage: test_cli_policy.py PKV
"""
import csv
import glob
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest

PKV = sys.argv[1]
SMALL = ["--query-heads", "8", "--kv-heads", "2", "--head-dim", "64", "--tokens", "2048",
         "--batches", "24", "--repeats", "2", "--memory", "64", "--cpu-time"]  # fmt: skip


def pkv(*args):
    """(exit code, stdout, stderr) of one run."""
    done = subprocess.run([PKV, *args], capture_output=True, timeout=300, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def done_batches(path):
    return read(path).count(" done\n") if os.path.exists(path) else 0


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


class Policy(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.profile = os.path.join(cls.folder.name, "here.profile")
        cls.done = pkv("calibrate", "--out", cls.profile, *SMALL)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_profile(self):
        code, out, err = self.done
        self.assertEqual(code, 0, err)
        self.assertIn("24 of 24 batches", err)
        self.assertIn("flashinfer is not in the profile", out)
        lines = read(self.profile).split("\n")
        self.assertEqual((lines[0], lines[-2]), ("pkv-profile 2", "end"))
        for key in ("device", "driver", "library", "date", "cost balanced", "cost split"):
            self.assertTrue(any(line.startswith(key + " ") for line in lines), key)

    def test_fit_and_judge_are_apart(self):
        """No batch of the fit has as many rows as one that the policies are judged by."""
        judged = {1, 2, 4, 8, 16, 32, 64}
        results = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bench/results")
        found = glob.glob(os.path.join(results, "*", "*-policy.points"))
        self.assertTrue(found)
        for path in [self.profile + ".points", *found]:
            rows = {int(line.split()[2]) for line in read(path).split("\n") if len(line.split()) > 4
                    and not line.startswith("pkv-points ")}  # fmt: skip
            self.assertGreater(len(rows), 5, path)
            self.assertFalse(rows & judged, path)

    def test_goes_on(self):
        """A cut file of points: what is whole is kept, the rest measured again."""
        points = read(self.profile + ".points")
        again = os.path.join(self.folder.name, "again.profile")
        at = points.index("\n9 done\n") + len("\n9 done\n")
        with open(again + ".points", "w", encoding="utf-8") as file:
            file.write(points[: at + 30])
        code, _, err = pkv("calibrate", "--out", again, *SMALL)
        self.assertEqual(code, 0, err)
        self.assertIn("10 batches taken over", err)
        self.assertEqual(read(again + ".points")[:at], points[:at])
        self.assertEqual(read(again + ".points").count(" done\n"), 24)

    def test_interrupted(self):
        """Ended by SIGINT, then by SIGKILL: no finished batch is lost, nor the profile before."""
        out = os.path.join(self.folder.name, "cut.profile")
        points, kept, sums = out + ".points", "", 0
        with open(out, "w", encoding="utf-8") as file:
            file.write("the profile of last week\n")
        for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
            run = subprocess.Popen([PKV, "calibrate", "--out", out, *SMALL],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            end = time.monotonic() + 200
            while done_batches(points) < sums + 3 and run.poll() is None:
                self.assertLess(time.monotonic(), end)
                time.sleep(0.002)
            run.send_signal(number)
            err = run.communicate(timeout=200)[1].decode()
            self.assertEqual(run.returncode, code, err)
            if number == signal.SIGINT:
                self.assertIn("interrupted; the same command goes on from here", err)
            self.assertTrue(read(points).startswith(kept))
            sums = done_batches(points)
            kept = read(points)
            kept = kept[: kept.rindex(" done\n") + len(" done\n")]
            self.assertGreaterEqual(sums, 3)
            self.assertEqual(read(out), "the profile of last week\n")
        code, _, err = pkv("calibrate", "--out", out, *SMALL)
        self.assertEqual(code, 0, err)
        self.assertIn("%d batches taken over" % sums, err)
        self.assertTrue(read(points).startswith(kept))
        self.assertEqual(done_batches(points), 24)
        self.assertTrue(read(out).startswith("pkv-profile "))

    def test_full_disk(self):
        """A write that fails ends the run with its reason; what is whole is taken over."""
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5120, 5120))

        out = os.path.join(self.folder.name, "full.profile")
        run = subprocess.run([PKV, "calibrate", "--out", out, *SMALL], capture_output=True,
                             timeout=300, check=False, preexec_fn=limit)  # fmt: skip
        self.assertEqual(run.returncode, 1)
        self.assertIn("cannot write the points: File too large", run.stderr.decode())
        whole = done_batches(out + ".points")
        code, _, err = pkv("calibrate", "--out", out, *SMALL)
        self.assertEqual(code, 0, err)
        self.assertIn("%d batches taken over" % whole, err)

    def test_only_fits(self):
        """With all points there: the same profile again, but for the date; or a clear error."""
        again = os.path.join(self.folder.name, "fit.profile")
        shutil.copy(self.profile + ".points", again + ".points")
        code, _, err = pkv("calibrate", "--out", again, *SMALL)
        self.assertEqual(code, 0, err)
        both = [[line for line in read(path).split("\n") if not line.startswith("date ")]
                for path in (self.profile, again)]  # fmt: skip
        self.assertEqual(both[0], both[1])
        os.remove(again)
        os.mkdir(again)
        code, _, err = pkv("calibrate", "--out", again, *SMALL)
        self.assertEqual(code, 1)
        self.assertIn("cannot write " + again, err)
        self.assertEqual(read(again + ".points"), read(self.profile + ".points"))
        self.assertFalse(os.path.exists(again + ".new"))

    def test_what_out_is(self):
        """A link stays a link, a file keeps its mode, and what is no file is written as it is."""
        real, link = (os.path.join(self.folder.name, n) for n in ("real.profile", "link.profile"))
        with open(real, "w", encoding="utf-8") as file:
            file.write("the profile of last week\n")
        os.chmod(real, 0o640)
        os.symlink("real.profile", link)
        pipe = os.path.join(self.folder.name, "pipe.profile")
        os.mkfifo(pipe)
        for out in (link, pipe):
            shutil.copy(self.profile + ".points", out + ".points")
        code, _, err = pkv("calibrate", "--out", link, *SMALL)
        self.assertEqual(code, 0, err)
        self.assertTrue(os.path.islink(link))
        self.assertEqual(os.stat(real).st_mode & 0o7777, 0o640)
        self.assertTrue(read(real).startswith("pkv-profile "))
        self.assertFalse(os.path.exists(real + ".new"))
        end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, end)
        code, _, err = pkv("calibrate", "--out", pipe, *SMALL)
        self.assertEqual(code, 0, err)
        self.assertTrue(os.read(end, 65536).startswith(b"pkv-profile "))
        self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))

    def test_other_setup_is_refused(self):
        code, _, err = pkv("calibrate", "--out", self.profile, *SMALL, "--repeats", "3")
        self.assertEqual(code, 1)
        self.assertIn("another device, setup or version", err)

    def test_hostile_points(self):
        bad = os.path.join(self.folder.name, "bad.profile")
        head = read(self.profile + ".points").split("\n")[0]
        for line in ("0 equal 1 balanced nan 1" + " 1" * 12, "0 equal 1 nobody 1 1" + " 1" * 12,
                     "0 equal 1 balanced 1 1", "7 done", "x" * 2000):  # fmt: skip
            with open(bad + ".points", "w", encoding="utf-8") as file:
                file.write(head + "\n" + line + "\n0 done\n")
            code, _, err = pkv("calibrate", "--out", bad, *SMALL)
            self.assertEqual(code, 1, line)
            self.assertIn("line 2", err)

    def test_explain(self):
        code, out, err = pkv("explain", "--lens", "32k,1k,600x14", "-p", self.profile)
        self.assertEqual(code, 0, err)
        self.assertIn("16 rows, 42192 tokens", out)
        for word in ("calibrated: ", "roofline: ", "static: ", "balanced", "not in the profile"):
            self.assertIn(word, out)
        code, out, _ = pkv("explain", "--lens", "64k", "--policy", "static")
        self.assertEqual(code, 0)
        self.assertIn("split", out)
        self.assertIn("flashinfer cannot be run here: ", out)
        self.assertRegex(out, r"\nroofline of the seed's device, us\n +bucket_exact +\d")
        self.assertRegex(out, r"\n +flashinfer +\d+\.\d\n")
        for args in (["--lens", "1x"], ["--lens", ""], ["--lens", "1k,"], ["--lens", ",1k"]):
            self.assertEqual(pkv("explain", *args)[0], 2, args)
        for policy in ("calibrated", "fixed:none", "best"):
            code, _, err = pkv("explain", "--lens", "1k", "--policy", policy)
            self.assertEqual(code, 1, policy)
            self.assertIn("polic", err)

    def test_bench_attention_by_policy(self):
        """The named route is run; one that is missing is replaced, with a reason."""
        small = ["bench", "attention", "--lengths", "700,30x3", "--query-heads", "8",
                 "--kv-heads", "2", "--head-dim", "64", "--memory", "64", "-n", "1"]  # fmt: skip
        for policy, route, reason in (("fixed:split", "split", "fixed"),
                                      ("static", "balanced", "flashinfer is not available"),
                                      ("fixed:flashinfer", "balanced", "not available"),
                                      ("calibrated", "", "calibrated: ")):  # fmt: skip
            code, out, err = pkv(*small, "--policy", policy, "-p", self.profile)
            self.assertEqual(code, 0, err)
            row = next(line for line in out.split("\n") if line.startswith("lengths "))
            self.assertIn(route, row.split()[2], out)
            self.assertIn(reason, out)
            self.assertIn("flashinfer is not here: FlashInfer has no CPU kernels", out)
            self.assertIn("of 1 batches", out)
        code, _, err = pkv(*small, "--policy", "calibrated")
        self.assertEqual(code, 1)
        self.assertIn("--profile", err)
        self.assertEqual(pkv(*small, "--profile", self.profile)[0], 2)
        self.assertEqual(pkv(*small, "--policy", "static", "--json")[0], 2)

    def test_bench_policy(self):
        file = os.path.join(self.folder.name, "rows.csv")
        code, out, err = pkv("bench", "policy", "-p", self.profile, "--steps", "1", "--seeds", "2",
                             "--divide", "256", "--most-rows", "4", "--repeats", "1", "--memory",
                             "64", "--cpu-time", "--csv", file)  # fmt: skip
        self.assertEqual(code, 0, err)
        self.assertIn("among the seed's routes with FlashInfer", out)
        with open(file, encoding="utf-8") as stream:
            rows = list(csv.DictReader(row for row in stream if not row.startswith("#")))
        self.assertEqual(len(rows), 3 * 5 * 2 * 5)  # rows, traces, seeds, routes
        self.assertEqual({r["seed"] for r in rows}, {"20260623", "20260624"})
        for i in range(4):  # each policy names one route of each batch
            self.assertEqual(sum(r["chosen"][i] == "1" for r in rows), 30)

    def test_bench_paper(self):
        file = os.path.join(self.folder.name, "paper.csv")
        code, out, err = pkv("bench", "paper", "persistentkv", "--steps", "1", "--seeds", "1",
                             "--divide", "256", "--repeats", "1", "--cpu-time", "--memory",
                             "256", "--csv", file)  # fmt: skip
        self.assertEqual(code, 0, err)
        with open(file, encoding="utf-8") as stream:
            rows = list(csv.DictReader(row for row in stream if not row.startswith("#")))
        self.assertEqual({r["table"] for r in rows}, {"speedup", "counters", "splits", "groups"})
        self.assertIn("v2 policy", {r["route"] for r in rows})
        for r in rows:
            if r["table"] != "counters":
                self.assertGreater(float(r["wall_us"]), 0)  # another clock than attend_us
        counters = {r["route"]: (r["launches"], r["states_mib"], r["useful_mib"]) for r in rows
                    if r["table"] == "counters"}  # fmt: skip
        self.assertEqual(counters["bucket_exact"], ("16.00", "4.0625", "550.475"))
        self.assertEqual(counters["workqueue"], ("2.00", "2.5391", "550.475"))
        self.assertEqual(counters["balanced"][0], "1.00")
        for word in ("published", "B8 zipf", "launches, work queue", "group"):
            self.assertIn(word, out)
        self.assertEqual(pkv("bench", "paper", "other")[0], 2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
