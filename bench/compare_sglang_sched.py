#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs to choose a batch of 100 out of W waiting requests: ours, SGLang's code, vLLM's.

    compare_sglang_sched.py --sglang WHEEL_OR_FOLDER --out FILE [--waiting 1000,10000]
        [--tokens 1000,10000] [--groups 64] [--repeats 3] [--pkv PROGRAM] [--kinds LIST]
        [--published FOLDER] [--commit SHA]

All that the targets of `tree` are relative to, in one run (at rest in about three minutes):
    compare_sglang_sched.py --sglang WHEEL --out FILE --waiting 10000 --tokens 10000 --pkv pkv
        --published FOLDER
Without --sglang only C and C++ are measured (--in-c names the orders, tree among them).

Run by a Python that has NumPy, torch and vLLM (without vLLM its rows are left out), with
PERSISTENTKV_LIBRARY naming a libpkv. All of a cell is measured in turn in one process:
    ours tree      100 times best and admit, by ctypes; then 100 times finish
    C NAME         with --pkv PROGRAM, `pkv bench sched` on prompts of --kinds (groups, or none, or
                   chain), before and after the other measurements of a cell: tree, cht, the
                   published tree with its faults (cht-published), and a plain radix tree that makes
                   a pass over the queue each time (radix-dfs); `step`: finish, best and admit, and
                   its mean; `fill`: a batch of 100 from none
    C++ published  with --published FOLDER, which holds chunked_hash_tree.cpp and .hpp of vLLM's
                   pull request 42134: its authors' own code, chunk 50 as they have it, compiled
                   with bench/published_tree.cpp and timed by processor time
    ours in vLLM   100 times bool, peek and pop of our waiting queue (tree) on vLLM's requests
    SGLang         one SchedulePolicy.calc_priority of lpm and of dfs-weight over the whole queue,
                   as before each batch; its fall back to fcfs above 128 waiting is off. RadixCache
                   holds every group's prefix (lpm, dfs-weight), or nothing (lpm-cold)
    vLLM           100 times bool, peek and pop of its FCFS and its priority queue, which know
                   nothing of sharing
Prompts: W requests in groups that share nine tenths, drawn in turn. At the end: how many times
what others need is what `tree` needs, in C, in this run.

SGLang's modules under test are the wheel's own: schedule_policy, radix_cache, base_prefix_cache,
cache_init_params, events, utils, evict_policy, common and environ. All its other modules (its
kernels, model runner, allocators, metrics, request class) are empty stand-ins.
"""

import argparse
import array
import csv
import gc
import importlib.machinery
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from datetime import datetime, timezone

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
from persistentkv import Scheduler, digests  # noqa: E402

BATCH, BLOCK = 100, 16
REAL = {
    "sglang.srt.environ",
    "sglang.srt.managers.schedule_policy",
    *(
        f"sglang.srt.mem_cache.{name}"
        for name in (
            "base_prefix_cache",
            "cache_init_params",
            "common",
            "events",
            "evict_policy",
            "radix_cache",
            "utils",
        )
    ),
}
PACKAGES = {"sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.mem_cache"}


# --- SGLang, without what is not under test ----------------------------------------------------


class _Anything(type):
    """A class that stands for whatever a module that is not under test would have held."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __call__(cls, *args, **kwargs):
        return Nothing if cls is Nothing else super().__call__(*args, **kwargs)

    def __bool__(cls):
        return cls is not Nothing

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())

    def __getitem__(cls, key):
        return cls


class Nothing(metaclass=_Anything):
    pass


class Standins:
    """Finds every module of sglang: the real ones in a folder, the others as stand-ins."""

    def __init__(self, root):
        self.root, self.used = root, []

    def find_spec(self, name, path=None, target=None):
        if name != "sglang" and not name.startswith("sglang."):
            return None
        file = os.path.join(self.root, *name.split("."))
        if name in REAL:
            return importlib.machinery.ModuleSpec(
                name,
                importlib.machinery.SourceFileLoader(name, file + ".py"),
                origin=file + ".py",
            )
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        if spec.name not in PACKAGES:
            self.used.append(spec.name)

            def missing(name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return Nothing

            module.__getattr__ = missing
        if spec.name == "sglang.srt.utils.common":
            module.ceil_align = lambda x, n: (x + n - 1) // n * n
        return module

    def exec_module(self, module):
        pass


def load_sglang(source):
    """(schedule_policy, radix_cache, version, names of the stand-ins)"""
    if source.endswith(".whl"):
        version = re.match(r"sglang-([^-]+)-", os.path.basename(source))[1]
        folder = os.path.join(os.path.dirname(os.path.abspath(source)), f"sglang-{version}-sources")
        with zipfile.ZipFile(source) as wheel:
            for name in REAL:
                wheel.extract(name.replace(".", "/") + ".py", folder)
    else:
        folder = source
        version = os.environ.get("SGLANG_VERSION", "unknown")
    finder = Standins(folder)
    sys.meta_path.insert(0, finder)
    import sglang.srt.managers.schedule_policy as policy
    import sglang.srt.mem_cache.radix_cache as radix

    policy.WAITING_QUEUE_PREFIX_MATCH_MAX = 1 << 30  # the fall back, off
    return policy, radix, version, finder.used


class Req:
    """What schedule_policy and radix_cache touch of SGLang's request."""

    extra_key = cache_salt = last_node = swa_evicted_seqlen = None
    prefix_len = num_matched_prefix_tokens = host_hit_length = 0

    def __init__(self, rid, tokens):
        self.rid = rid
        self.origin_input_ids = array.array("q", tokens.astype(np.int64).tobytes())
        self.output_ids = array.array("q")

    def _compute_max_prefix_len(self, n):
        return n - 1


def sglang_passes(loaded, queue, prompts, groups, name):
    """A function that runs one pass; what it needs is made before."""
    import torch

    policy, radix, _, _ = loaded
    cache = radix.RadixCache.create_simulated()
    if name != "lpm-cold":
        for g in range(groups):
            tokens = array.array("q", prompts[g][: len(prompts[g]) * 9 // 10].astype("q").tobytes())
            value = torch.arange(len(tokens), dtype=torch.int64)
            cache.insert(policy.InsertParams(key=radix.RadixKey(token_ids=tokens), value=value))
    kind = name.removesuffix("-cold")
    scheduler = policy.SchedulePolicy(kind, cache, False, False, False)
    assert scheduler.policy == policy.CacheAwarePolicy(kind), scheduler.policy

    def one():
        line = list(queue)
        start = time.perf_counter_ns()
        scheduler.calc_priority(line)
        spent = time.perf_counter_ns() - start
        if name != "lpm-cold":
            shared = len(prompts[0]) * 9 // 10
            assert line[0].num_matched_prefix_tokens >= shared, line[0].num_matched_prefix_tokens
        return spent

    return one


# --- ours and vLLM's ---------------------------------------------------------------------------


def ours_tree(prompts):
    sched = Scheduler("tree", max_requests=len(prompts) + 1, chunk_tokens=64, bypass_limit=-1)
    for i, tokens in enumerate(prompts):
        sched.insert(i, tokens)

    def one():
        taken = []
        start = time.perf_counter_ns()
        for _ in range(BATCH):
            pick = sched.best()
            sched.admit(pick.id)
            taken.append(pick.id)
        chosen = time.perf_counter_ns() - start
        start = time.perf_counter_ns()
        for i in taken:
            sched.finish(i)
        one.finish = time.perf_counter_ns() - start
        for i in taken:
            sched.insert(i, prompts[i])
        return chosen

    return one


class VllmParts:
    def __init__(self):
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched import request_queue
        from vllm.v1.request import Request, RequestStatus

        self.version, self.queues = vllm.__version__, request_queue
        self.running, self.waits = RequestStatus.RUNNING, RequestStatus.WAITING
        self.parameters, self.request = SamplingParams(max_tokens=16), Request

    def requests(self, prompts, groups):
        """Of block hashes as its prefix cache makes them (32 bytes), with one token for a prompt:
        no queue looks at the tokens."""
        made = []
        shared = [[] for _ in range(groups)]
        for i, tokens in enumerate(prompts):
            r = self.request(str(i), [1], self.parameters, None, arrival_time=float(i))
            r.num_prompt_tokens = len(tokens)
            whole = digests(tokens, BLOCK)[: len(tokens) // BLOCK]
            hashes = [int(h).to_bytes(8, sys.byteorder) + bytes(24) for h in whole]
            common = shared[i % groups]
            if not common:
                common.extend(hashes)
            for at, h in enumerate(hashes):
                if common[at] != h:
                    break
                hashes[at] = common[at]  # one object, to spare memory
            r.block_hashes = hashes
            made.append(r)
        return made

    def queue(self, name, count):
        if name == "ours in vLLM":
            from persistentkv.vllm.waiting_queue import WaitingQueue

            sched = Scheduler("tree", max_requests=count + 1, chunk_tokens=BLOCK, bypass_limit=-1)
            return WaitingQueue(sched, BLOCK, 1 << 20, False)
        kind = self.queues.SchedulingPolicy(name.split()[-1])
        return self.queues.create_request_queue(kind)

    def batch(self, name, requests):
        queue = self.queue(name, len(requests))
        for r in requests:
            queue.add_request(r)

        def one():
            taken = []
            start = time.perf_counter_ns()
            for _ in range(BATCH):
                if queue:
                    queue.peek_request()
                    r = queue.pop_request()
                    r.status = self.running
                    taken.append(r)
            spent = time.perf_counter_ns() - start
            for r in taken:
                if name == "ours in vLLM":
                    queue.ended(r)
                r.status = self.waits
                queue.add_request(r)
            return spent

        return one


# --- cells -------------------------------------------------------------------------------------


def make_prompts(waiting, tokens, groups, seed=7):
    rng = np.random.default_rng(seed)
    prefix = tokens * 9 // 10
    heads = [rng.integers(0, 32000, prefix, np.int32) for _ in range(groups)]
    return [
        np.concatenate([heads[i % groups], rng.integers(0, 32000, tokens - prefix, np.int32)])
        for i in range(waiting)
    ]


IN_C = ("tree", "cht", "cht-published", "radix-dfs")


def in_c(args, waiting, tokens):
    """{(order, kind, what): [microseconds]}"""
    if not args.pkv:
        return {}
    command = [args.pkv, "bench", "sched", "--order", args.in_c, "--waiting", str(waiting)]
    command += ["--tokens", str(tokens), "--groups", args.kinds, "--chunk", "64"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.csv")
        command += ["--steps", "5000", "--seconds", "0.4", "--repeats", "2", "--csv", path]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        with open(path, encoding="utf-8", newline="") as f:
            rows = list(csv.DictReader(x for x in f.readlines() if not x.startswith("#")))
    found = {}
    for r in rows:
        key = (r["order"], r["groups"])
        if r["op"] in ("fill", "step", "insert"):
            found[*key, r["op"]] = [float(r["p50_us"])]
        if r["op"] == "step":
            found[*key, "step mean"] = [float(r["mean_us"])]
            found[*key, "step p99"] = [float(r["p99_us"])]
            found[*key, "step most"] = [float(r["max_us"])]
    return found


PUBLISHED_CHUNK = 50


def build_published(folder, into):
    """The program of bench/published_tree.cpp with the authors' two files."""
    program = os.path.join(into, "published_tree")
    here = os.path.dirname(os.path.abspath(__file__))
    command = ["c++", "-O3", "-march=native", "-std=c++17", "-I", folder]
    command += [os.path.join(here, "published_tree.cpp")]
    command += [os.path.join(folder, "chunked_hash_tree.cpp"), "-lxxhash", "-o", program]
    subprocess.run(command, check=True)
    return program


def published(args, waiting, tokens):
    """The same as in_c of the authors' code."""
    found = {}
    if not args.published:
        return found
    with tempfile.TemporaryDirectory() as folder:
        program = build_published(args.published, folder)
        for kind in args.kinds.split(","):
            command = [program, str(waiting), str(tokens), kind, str(PUBLISHED_CHUNK), "5000", "2"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for what, us in zip(("insert", "fill", "step", "step p99", "step mean"), said.split()):
                found["authors", kind, what] = [float(us)]
    return found


def ratios(c, others, groups):
    """[(kind, what, how many times)] of `c` as in_c gives it, and of what Python timed with
    prompts of so many groups."""
    middle = {key: statistics.median(times) for key, times in c.items()}
    lines = []
    for kind in dict.fromkeys(key[1] for key in c):
        tree = {what: middle["tree", kind, what] for what in ("step", "step mean", "fill")}
        for order in (*IN_C[1:], "authors"):
            if (order, kind, "fill") not in middle:
                continue
            for what in ("step", "step mean", "fill"):
                if (order, kind, what) in middle:
                    times = middle[order, kind, what] / tree[what]
                    lines.append((kind, f"{order} {what}", times))
            both = middle[order, kind, "insert"] + middle[order, kind, "step mean"]
            ours = middle["tree", kind, "insert"] + tree["step mean"]
            lines.append((kind, f"{order} insert + step mean", both / ours))
        for name, times in others.items():
            if name.startswith("SGLang") and kind == str(groups):
                lines.append((kind, f"{name} / fill", statistics.median(times) / tree["fill"]))
    return lines


def c_rows(c):
    rows = []
    for (order, kind, what), found in c.items():
        name = f"C++ published {what}" if order == "authors" else f"C {order} {what}"
        rows.append((name, kind, found))
    return rows


def measure_cell(args, loaded, vllm, waiting, tokens):
    """([(system, kind of groups, [microseconds])], ratios)"""
    c = {**in_c(args, waiting, tokens), **published(args, waiting, tokens)}
    if not args.sglang:
        return c_rows(c), ratios(c, {}, args.groups)
    prompts = make_prompts(waiting, tokens, args.groups)
    runs = [("ours tree", ours_tree(prompts), 20)]
    if vllm:
        requests = vllm.requests(prompts, args.groups)
        for name in ("ours in vLLM", "vLLM fcfs", "vLLM priority"):
            runs.append((name, vllm.batch(name, requests), 20))
    queue = [Req(str(i), prompt) for i, prompt in enumerate(prompts)]
    for name in ("lpm", "dfs-weight", "lpm-cold"):
        one = sglang_passes(loaded, queue, prompts, args.groups, name)
        runs.append((f"SGLang {name}", one, 1))
    times = {name: [] for name, _, _ in runs}
    times["ours tree finish"] = []
    gc.collect()
    gc.disable()
    for _ in range(args.repeats):
        for name, one, often in runs:
            for _ in range(often):
                times[name].append(one() / 1000)
                if name == "ours tree":
                    times["ours tree finish"].append(one.finish / 1000)
    gc.enable()
    for again in (in_c(args, waiting, tokens), published(args, waiting, tokens)):
        for key, found in again.items():
            c[key] += found
    rows = [(name, str(args.groups), found) for name, found in times.items()]
    return rows + c_rows(c), ratios(c, times, args.groups)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sglang")
    parser.add_argument("--out", required=True)
    parser.add_argument("--waiting", default="1000,10000")
    parser.add_argument("--tokens", default="1000,10000")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pkv")
    parser.add_argument("--published", help="folder of the published tree's C++; with --pkv")
    parser.add_argument("--in-c", default=",".join(IN_C), help="orders of pkv bench sched")
    parser.add_argument("--kinds", default="1,8,64,none,chain", help="groups of the rows in C")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    if not args.commit:
        command = ["git", "rev-parse", "--short", "HEAD"]
        said = subprocess.run(command, capture_output=True, text=True)
        args.commit = said.stdout.strip() or "unknown"
    try:
        vllm = VllmParts() if args.sglang else None
    except ImportError as e:
        print(f"without vLLM's rows: {e}", file=sys.stderr)
        vllm = None
    loaded = load_sglang(args.sglang) if args.sglang else (None, None, "absent", [])
    head = "commit,date,device,driver,load,waiting,tokens,groups,system,count,p50_us,min_us,max_us,"
    head += "times_ours"
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        device = re.search(r"model name\s*: (.*)", f.read())[1].strip()
    with open(args.out, "w", encoding="utf-8", newline="") as f:
        f.write(head + "\n")
        shown = [os.path.basename(a) if os.path.isabs(a) else a for a in sys.argv[1:]]
        f.write(f"# command: bench/compare_sglang_sched.py {' '.join(shown)}\n")
        f.write(f"# SGLang {loaded[2]}, vLLM {vllm.version if vllm else 'absent'}, Python ")
        f.write(f"{platform.python_version()}; stand-ins: {' '.join(sorted(loaded[3]))}\n")
        writer = csv.writer(f, lineterminator="\n")
        for waiting in map(int, args.waiting.split(",")):
            for tokens in map(int, args.tokens.split(",")):
                found, times = measure_cell(args, loaded, vllm, waiting, tokens)
                ours = statistics.median(found[0][2])
                for name, kind, spent in found:
                    p50 = statistics.median(spent)
                    row = [args.commit, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")]
                    row += [device, f"Linux {platform.release()}", f"{os.getloadavg()[0]:.2f}"]
                    row += [waiting, tokens, kind, name, len(spent)]
                    row += [f"{t:.3f}" for t in (p50, min(spent), max(spent))]
                    writer.writerow([*row, f"{p50 / ours:.2f}" if args.sglang else ""])
                    print(f"W {waiting} T {tokens}, {kind}: {name} {p50:.1f} us")
                for kind, what, many in times:
                    f.write(f"# ratio W {waiting} T {tokens} {kind}: {what} {many:.1f}\n")
                    print(f"W {waiting} T {tokens}, {kind}: {what}: {many:,.1f} times tree")
                f.flush()


if __name__ == "__main__":
    main()
