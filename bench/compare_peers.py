#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode attention of libpkv beside its peers, in one process on the same tensors.

    bench/compare_peers.py --kit FOLDER --lib libpkv.so --null-read libpkv_null_read.so
        [--shared] [--cells a,b] [--peers a,b] [--dtype f16] [--minutes N] [--out CSV] [--commit ID]

Peers: FlashInfer's decode wrapper on tensor cores, on CUDA cores, with fa3 and with cuDNN, its
persistent BatchAttention, its XQA, and for shared prefixes its cascade; FlashAttention 3 as vLLM
ships it. --kit is what peers_kit.py packed. One layer, one query token a row; 32 query heads, 8 KV
heads of 128, pages of 16, permuted. Layouts NHD and HND are both measured and named.

First every output is checked against double: all rows, then with needles, then with NaN in all
that no row owns. Then each contender is captured in a graph over layers with caches of their own
(1 GiB or more in all, so that L2 is cold); the graphs are replayed in turn, round by round, with
the events behind a kernel that keeps the GPU busy while they are queued. Medians of the rounds.

--out has a row a cell and contender, in the columns of bench/results/README.md: plan_us is the
marginal time in the graph where the plan is made on the device, else the host's; wall_us is plan +
one layer + synchronize from Python; peers stand in our rows as name.layout=us too. A failure is a
row with its reason in `status`. The file grows after each cell. A contender that breaks the CUDA
context is left out and the rest goes on in a new process.
"""

import argparse
import contextlib
import csv
import datetime
import gc
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback

import peer_cells
import peer_kernels
import peer_ours
import torch

COLUMNS = ["commit", "device", "driver", "cell", "route", "gpu_us", "plan_us", "wall_us", "bytes",
           "floor_us", "error", "peers", "null_us", "wait_us", "rows", "gb_s", "setup", "layers",
           "plan_host_us", "needle_error", "poisoned_error", "error_after", "status", "note",
           "versions", "raw"]  # fmt: skip
LIMITS = {"f16": 2e-3, "bf16": 1.5e-2}
WALL_REPEATS, FEWEST_ROUNDS, BUSY_CYCLES = 20, 5, 800_000
ANCHORS = "bench/cells/h200_decode_anchors.json"
NULL_READS = {"null_read4": 4, "null_read16": 16}  # blocks a multiprocessor; the faster counts
FOREIGN = ("hpc_ops", "pat", "persistentkv_artifact")  # in the anchors file, not run here
STICKY = ("illegal memory access", "illegal instruction", "misaligned", "launch failure",
          "device-side assert", "unspecified", "CUDA error: an")  # fmt: skip


class Broken(Exception):
    """The CUDA context is lost; args: the contender's name."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def median(samples):
    return statistics.median(samples) if samples else None


class Gpu:
    """Graphs and event times on the current device."""

    def synchronize(self):
        torch.cuda.synchronize()

    def record(self, calls):
        """A replayable recording of the calls, replayed once. On failure no capture is left open
        and the current stream is what it was."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            calls[0]()
            torch.cuda.synchronize()
            gc.disable()  # freeing another graph's memory would break the capture
            graph.capture_begin()
            try:
                for call in calls:
                    call()
            except Exception:
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            finally:
                gc.enable()
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def time_us(self, replay):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        replay()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3


class Cpu:
    """The same without a GPU, to try this program out."""

    def synchronize(self):
        pass

    def record(self, calls):
        def replay():
            for call in calls:
                call()

        return replay

    def time_us(self, replay):
        start = time.perf_counter()
        replay()
        return (time.perf_counter() - start) * 1e6


class Entry:
    """One contender in one cell: what is known of it so far."""

    def __init__(self, name, layout):
        self.name, self.layout, self.contender = name, layout, None
        self.replay = self.wait_replay = self.planned_replay = None
        self.samples, self.waits, self.planned, self.walls, self.plans = [], [], [], [], []
        self.errors = {}
        self.status, self.note = "ok", ""

    @property
    def title(self):
        return f"{self.name}.{self.layout}"

    @property
    def is_null(self):
        return self.name in NULL_READS

    @property
    def is_ours(self):
        return self.name.startswith("ours_")

    def fail(self, why):
        self.status = " ".join(str(why).split())[:300] or "failed without a text"
        self.contender = self.replay = self.wait_replay = self.planned_replay = None

    @property
    def gpu_us(self):
        return median(self.samples)

    @property
    def plan_gpu_us(self):
        return median(self.planned) - median(self.waits or self.samples) if self.planned else None


class Comparison:
    def __init__(self, args, cells, anchors):
        self.args, self.cells, self.anchors = args, cells, anchors
        self.cuda = args.device == "cuda"
        self.clock = Gpu() if self.cuda else Cpu()
        self.device = torch.device(args.device)
        elements = max(cell.elements for cell in cells)
        self.store = peer_cells.Store(elements, peer_cells.DTYPES[args.dtype], self.device)
        self.library = self._library()
        self.describe()

    def _library(self):
        if not self.args.lib:
            return None
        try:
            return peer_ours.Library(self.args.lib, self.args.abi, self.args.segment_cost)
        except Exception as e:
            say(f"compare_peers: without libpkv: {e}")
            return None

    def describe(self):
        self.versions = peer_kernels.versions()
        if self.library:
            self.versions["libpkv"] = self.library.version
        self.name, self.driver = "cpu", ""
        if self.cuda:
            self.name = torch.cuda.get_device_name()
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
            try:
                self.driver = subprocess.run(query, capture_output=True, text=True,
                                             check=True).stdout.strip()  # fmt: skip
            except (OSError, subprocess.CalledProcessError):
                self.driver = f"CUDA {torch.version.cuda}"
        say(f"{self.name}, driver {self.driver}, {self.versions}")

    # --- one cell --------------------------------------------------------------------------------

    def guard(self, entry, work):
        """Runs work(); a failure goes to the entry."""
        try:
            result = work()
            self.clock.synchronize()
            return result
        except Exception as e:
            if self.args.debug:
                traceback.print_exc()
            entry.fail(f"{type(e).__name__}: {e}")
            if self.sticky(e):
                raise Broken(entry.title) from e
            return None

    def sticky(self, e):
        return self.cuda and any(word in str(e) for word in STICKY)

    def make(self, entry, batch):
        name, layout = entry.name, entry.layout
        if entry.is_null:
            return peer_ours.NullRead(name, batch, layout, self.library, self.args.null_read,
                                      NULL_READS[name])  # fmt: skip
        if entry.is_ours:
            kind = peer_ours.OursShared if name == "ours_shared" else peer_ours.Ours
            return kind(name, batch, layout, self.library, name.removeprefix("ours_"))
        return peer_kernels.PEERS[name](name, batch, layout)

    def entries(self, cell):
        args = self.args
        names = []
        if self.library and args.null_read:
            names += [(name, layout) for name in NULL_READS for layout in ("hnd", "nhd")]
        if self.library:
            routes = ["balanced", "shared"] if cell.shared else ["balanced"]
            names += [(f"ours_{route}", layout) for route in args.routes or routes
                      for layout in ("hnd", "nhd")]  # fmt: skip
        peers = args.peers or peer_kernels.USUAL + peer_kernels.CASCADES * cell.shared
        names += [(name, layout) for name in peers for layout in ("nhd", "hnd")]
        return [Entry(*name) for name in names if ".".join(name) not in args.without]

    def check(self, entries, batch, answers, key):
        for entry in entries:
            if entry.contender is None or entry.is_null:
                continue
            contender = entry.contender
            contender.out.fill_(float("nan"))
            if self.guard(entry, lambda c=contender: (c.run(0), True)):
                entry.errors[key] = peer_cells.error_of(contender.out, answers[entry.layout])

    def check_all(self, entries, batch):
        layouts = sorted({e.layout for e in entries if e.contender})
        plain = {layout: batch.answer(layout) for layout in layouts}
        self.check(entries, batch, plain, "error")
        for layout in layouts:
            mine = [e for e in entries if e.layout == layout]
            saved = batch.save()
            batch.hide_needles(layout)
            answers = {layout: batch.answer(layout)}
            self.check(mine, batch, answers, "needle_error")
            batch.poison(layout)
            self.check(mine, batch, answers, "poisoned_error")
            batch.restore(saved)
        limit = LIMITS[self.args.dtype]
        for entry in entries:
            if entry.contender and not entry.is_null:
                if entry.errors["error"] > limit or entry.errors["needle_error"] > limit:
                    entry.fail(f"wrong: error {entry.errors['error']:.2g}, with needles "
                               f"{entry.errors['needle_error']:.2g}")  # fmt: skip
                elif entry.is_ours and entry.errors["poisoned_error"] > limit:
                    entry.fail("reads what no row owns")
        return plain

    def capture(self, entry):
        c = entry.contender
        layers = range(c.batch.layers)
        calls = [lambda i=i: c.run(i) for i in layers]
        try:
            entry.replay = self.clock.record(calls)
        except Exception as e:
            if self.sticky(e):
                raise Broken(entry.title) from e
            entry.note = f"eager, no graph: {' '.join(str(e).split())[:120]}"
            entry.replay = lambda: [call() for call in calls]
            return
        if c.plan_in_graph:
            # The plan ahead of each layer: what a step pays beyond its layers.
            planned = [lambda i=i: (c.plan(), c.run(i)) for i in layers]
            if entry.is_ours:
                c.overlap(False)  # a layer behind a planner waits for it: so must the others
                entry.wait_replay = self.guard(entry, lambda: self.clock.record(calls))
            entry.planned_replay = self.guard(entry, lambda: self.clock.record(planned))
            if entry.is_ours:
                c.overlap(True)

    def time_rounds(self, entries, layers):
        for i in range(self.args.reps):
            if self.late() and i >= FEWEST_ROUNDS:
                break
            for entry in entries:
                for replay, samples in ((entry.replay, entry.samples),
                                        (entry.wait_replay, entry.waits),
                                        (entry.planned_replay, entry.planned)):  # fmt: skip
                    if replay is None or entry.contender is None:
                        continue
                    us = self.guard(entry, lambda r=replay: self.clock.time_us(r))
                    if us is not None:
                        samples.append(us / layers)

    def time_walls(self, entry, layers):
        c = entry.contender

        def timed(work):
            start = time.perf_counter()
            work()
            self.clock.synchronize()
            return (time.perf_counter() - start) * 1e6

        def step(i):
            if c.plan:
                c.plan()
            c.run(i % layers)

        for i in range(3):
            step(i)
        self.clock.synchronize()
        entry.walls = [timed(lambda i=i: step(i)) for i in range(WALL_REPEATS)]
        if c.plan:
            entry.plans = [timed(c.plan) for _ in range(WALL_REPEATS)]

    def late(self):
        over = time.monotonic() - self.cell_start > self.args.cell_seconds
        return over or time.time() > self.args.deadline

    def run_cell(self, cell):
        start = self.cell_start = time.monotonic()
        batch = peer_cells.Batch(cell, self.store)
        entries = self.entries(cell)
        for entry in entries:
            if self.late():
                entry.fail("not run: the time was up")
                continue
            entry.contender = self.guard(entry, lambda e=entry: self.make(e, batch))
            if entry.contender and entry.contender.plan:
                self.guard(entry, entry.contender.plan)
        with torch.no_grad():
            answers = self.check_all(entries, batch)
            for entry in entries:
                if entry.contender:
                    self.capture(entry)
            self.time_rounds(entries, batch.layers)
            for entry in entries:
                if entry.contender and not entry.is_null and not self.late():
                    self.guard(entry, lambda e=entry: self.time_walls(e, batch.layers))
            self.check(entries, batch, answers, "error_after")
        for entry in entries:
            if entry.errors.get("error_after", 0) > LIMITS[self.args.dtype]:
                entry.fail(f"wrong after its graph: error {entry.errors['error_after']:.2g}")
        self.write(cell, entries, batch)
        for entry in entries:
            if hasattr(entry.contender, "close"):
                entry.contender.close()
            entry.contender = entry.replay = entry.wait_replay = entry.planned_replay = None
        say(f"{cell.name}: {time.monotonic() - start:.1f} s")

    # --- results ---------------------------------------------------------------------------------

    def write(self, cell, entries, batch):
        """One row a contender; peers stand in our rows too."""
        args, ok = self.args, [e for e in entries if e.status == "ok" and e.samples]
        null = {}
        for e in ok:
            if e.is_null:
                null[e.layout] = min(e.gpu_us, null.get(e.layout, e.gpu_us))
        peers = [f"{e.title}={e.gpu_us:.2f}" for e in ok if not e.is_null and not e.is_ours]
        peers += self.anchors_of(cell.name)
        versions = ";".join(f"{k}={v}" for k, v in self.versions.items()).replace(",", " ")
        rows = []
        for e in entries:
            note = " ".join([getattr(e.contender, "note", ""), e.note]).strip()
            raw = {
                "gpu": e.samples,
                "wait": e.waits,
                "planned": e.planned,
                "plan": e.plans,
                "wall": e.walls,
            }
            plan_us = median(e.plans) if e.plan_gpu_us is None else e.plan_gpu_us
            known = {
                "commit": args.commit, "device": self.name, "driver": self.driver,
                "cell": cell.name, "route": e.name.removeprefix("ours_"),
                "gpu_us": shown(e.gpu_us), "plan_us": shown(plan_us),
                "wall_us": shown(median(e.walls)), "bytes": cell.bytes,
                "floor_us": shown(cell.floor_us), "peers": ";".join(peers) if e.is_ours else "",
                "null_us": shown(null.get(e.layout)), "wait_us": shown(median(e.waits)),
                "rows": cell.rows,
                "gb_s": shown(cell.bytes / e.gpu_us / 1e3 if e.samples else None),
                "setup": f"{args.dtype} 32/8x128 p16 {e.layout}", "layers": batch.layers,
                "plan_host_us": shown(median(e.plans)), "status": e.status, "note": note,
                "versions": versions,
                "raw": ";".join(f"{k}={' '.join(f'{x:.2f}' for x in v)}"
                                for k, v in raw.items() if v),
                **{key: f"{x:.3g}" for key, x in e.errors.items()},
            }  # fmt: skip
            rows.append([known.get(column, "") for column in COLUMNS])
        append(args.out, rows)
        table(cell, entries, null)

    def anchors_of(self, name):
        """Figures of peers that are not run here, from the anchors file."""
        found = self.anchors.get(name, {})
        return [f"anchor:{peer}={x['gpu_us']}" for peer, x in found.items()
                if peer.startswith(FOREIGN) and "gpu_us" in x]  # fmt: skip

    def run(self):
        for i, cell in enumerate(self.cells):
            if time.time() > self.args.deadline:
                say(f"compare_peers: time is up, not run: {[c.name for c in self.cells[i:]]}")
                return 0
            watch = threading.Timer(self.args.hang_seconds, hung, [cell.name])
            watch.daemon = True
            watch.start()
            try:
                self.run_cell(cell)
            except Broken as e:
                self.go_on_without(str(e), self.cells[i:])
            except Exception as e:
                say(f"compare_peers: {cell.name}: {type(e).__name__}: {e}")
                if self.args.debug:
                    traceback.print_exc()
            watch.cancel()
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()
        return 0

    def go_on_without(self, title, cells):
        """In a new process: this one's CUDA context is lost."""
        say(f"compare_peers: {title} broke the CUDA context; going on without it")
        words = [sys.executable, *sys.argv, "--without", ",".join([*self.args.without, title]),
                 "--cells", ",".join(cell.name for cell in cells), "--deadline",
                 str(self.args.deadline)]  # fmt: skip
        name, layout = (title.split(".") + [""])[:2]
        row = {"commit": self.args.commit, "device": self.name, "driver": self.driver,
               "cell": cells[0].name, "route": name, "status": "broke the CUDA context",
               "setup": f"{self.args.dtype} 32/8x128 p16 {layout}"}  # fmt: skip
        append(self.args.out, [[row.get(column, "") for column in COLUMNS]])
        os.execv(sys.executable, words)


def hung(name):
    say(f"compare_peers: {name} does not come back; ending")
    os._exit(3)


def shown(x):
    return "" if x is None else f"{x:.3f}"


def append(path, rows):
    """A new file gets the head, and the rows of each process the command that made them."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    fresh = not os.path.exists(path) or os.path.getsize(path) == 0
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if fresh:
            writer.writerow(COLUMNS)
        if path not in _announced:
            file.write(f"# command: {' '.join(sys.argv)}\n")
            _announced.add(path)
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())


_announced = set()


def table(cell, entries, null):
    print(f"{cell.name}: {cell.rows} rows, {cell.bytes / 1e6:.1f} MB, floor {cell.floor_us:.1f} us"
          + "".join(f", null read {k} {x:.2f} us" for k, x in null.items()))  # fmt: skip
    for e in sorted(entries, key=lambda e: (e.gpu_us is None, e.gpu_us)):
        if e.status != "ok":
            print(f"  {e.title:20s} {e.status[:100]}")
        elif e.samples:
            text = f"  {e.title:20s} {e.gpu_us:9.2f} us  /floor {e.gpu_us / cell.floor_us:6.3f}"
            if e.layout in null:
                text += f"  /null {e.gpu_us / null[e.layout]:6.3f}"
            text += f"  ({e.note})" if e.note else ""
            for label, x in (("plan", e.plan_gpu_us), ("plan+sync", median(e.plans)),
                             ("wall", median(e.walls))):  # fmt: skip
                text += f"  {label} {x:.1f}" if x is not None else ""
            for key, x in e.errors.items():
                text += f"  {key.replace('_error', '')} {x:.1e}" if key != "error_after" else ""
            print(text)
    sys.stdout.flush()


def commit_here():
    command = ["git", "-C", peer_ours.ROOT, "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "?"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    listed = lambda text: [word for word in text.split(",") if word]  # noqa: E731
    today = datetime.date.today().isoformat()
    parser.add_argument("--kit", help="folder that peers_kit.py unpack made")
    parser.add_argument("--lib", help="libpkv.so with CUDA; without it only peers are measured")
    parser.add_argument("--abi", help="another python/persistentkv/_abi.py")
    parser.add_argument("--null-read", help="libpkv_null_read.so of the build")
    parser.add_argument("--anchors", help="JSON with cells.NAME.lens: exact lengths",
                        default=os.path.join(peer_ours.ROOT, ANCHORS))  # fmt: skip
    parser.add_argument("--cells", type=listed, default=[])
    parser.add_argument("--shared", action="store_true", help="the cells with shared prefixes")
    parser.add_argument("--peers", type=listed, default=[], help=", ".join(peer_kernels.PEERS))
    parser.add_argument("--routes", type=listed, default=[], help="of ours")
    parser.add_argument("--without", type=listed, default=[], help="name.layout to leave out")
    parser.add_argument("--dtype", choices=sorted(peer_cells.DTYPES), default="f16")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--segment-cost", type=int, default=0, help="of our plans; 0 = default")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--deadline", type=float, help="the same as seconds since 1970")
    parser.add_argument("--cell-seconds", type=float, default=30)
    parser.add_argument("--hang-seconds", type=float, default=120)
    parser.add_argument("--out", default=f"bench/results/h200/{today}-peers.csv")
    parser.add_argument("--commit", default=commit_here())
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--debug", action="store_true", help="tracebacks of failures")
    args = parser.parse_args()
    args.deadline = args.deadline or time.time() + args.minutes * 60
    return args


def main():
    args = parse()
    if args.device == "cpu":
        peer_cells.MIN_LAYERS = peer_cells.MAX_LAYERS = 2
    anchors = peer_cells.read_anchors(args.anchors)
    cells = peer_cells.select(args.cells, args.shared, anchors)
    if args.kit:
        peer_kernels.use_kit(args.kit)
    return Comparison(args, cells, anchors).run()


if __name__ == "__main__":
    sys.exit(main())
