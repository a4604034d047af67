# SPDX-License-Identifier: Apache-2.0
"""Errors, threads, forks and the interpreter's end; what is installed and how it is typed."""

import concurrent.futures
import ctypes
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import persistentkv as pkv
import pytest
from persistentkv import _abi
from py_support import Pages, encode, missing


def simple(rng=None, lengths=(40, 17), executor=None):
    rng = rng or np.random.default_rng(0)
    pages = Pages(rng, lengths, 2, 64, 16, "float16")
    q = encode(rng.standard_normal((len(lengths), 8, 64), np.float32), "float16")
    decoder = pkv.BatchDecode(executor=executor)
    decoder.plan(pages.indptr, pages.indices, pages.last, 8, 2, 64, 16)
    return decoder, q, (pages.k, pages.v)


def python(code, **environment):
    """Runs a program; (status, stdout + stderr)."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    return done.returncode, done.stdout + done.stderr


def test_torch_is_here():
    reason = missing("torch")
    if reason:
        pytest.skip(f"{reason}: no test with CPU tensors ran")


def test_every_status_has_an_exception_that_python_users_catch():
    codes = {v for k, v in vars(_abi).items() if k.startswith("E_")}
    assert len(codes) >= 12
    for code in codes - {_abi.E_IO, _abi.E_INTERNAL}:
        assert code in pkv.errors.CLASSES
    assert issubclass(pkv.InvalidArgument, ValueError)
    assert issubclass(pkv.NotSupported, NotImplementedError)
    assert issubclass(pkv.OutOfMemory, MemoryError)
    assert issubclass(pkv.WrongState, RuntimeError)


def test_errors_carry_the_library_text():
    decoder, q, cache = simple()
    with pytest.raises(pkv.NotSupported, match="head_dim is 512") as e:
        decoder.plan([0, 1], [0], [1], 8, 2, 512, 16)
    assert e.value.status == "E_UNSUPPORTED" and e.value.where.startswith("pkv_")
    with pytest.raises(pkv.WrongState, match="before a plan"):
        decoder.run(q, cache)
    decoder.plan([0, 1, 2], [0, 9999], [16, 16], 8, 2, 64, 16)
    with pytest.raises(pkv.OutOfRange, match="row 1, index 0 holds page 9999"):
        decoder.run(q, cache)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, pkv.NotSupported, "ROPE_LLAMA"),
        ({"q_data_type": "int8"}, pkv.NotSupported, "int8"),
        ({"kv_data_type": "float8_e5m2"}, pkv.NotSupported, "float8_e5m2"),
        ({"num_qo_heads": 7}, pkv.PkvError, "7"),
        ({"num_qo_heads": 66}, pkv.PkvError, "66|33"),
        ({"page_size": 0}, pkv.InvalidArgument, "page_size 0"),
        ({"last_page_len": [17, 1]}, pkv.InvalidArgument, "last_page_len.0. is 17"),
        ({"last_page_len": [1]}, pkv.InvalidArgument, "1 entries for 2 rows"),
        ({"indptr": [0, 2, 1]}, pkv.InvalidArgument, "never decrease"),
        ({"indptr": [0, 1, 5]}, pkv.InvalidArgument, "5, indices has 2"),
        ({"indices": [0.5, 1]}, pkv.InvalidArgument, "integers"),
        ({"indices": None}, pkv.InvalidArgument, "indptr, indices"),
        ({"sm_scale": 0.0}, pkv.InvalidArgument, "sm_scale"),
        ({"fixed_split_size": 3}, pkv.PkvError, "chunk_tokens"),
        ({"use_token_head_sf": True}, pkv.NotSupported, "use_token_head_sf"),
    ],
)
def test_plan_refuses_by_name(change, error, text):
    given = {
        "indptr": [0, 1, 2],
        "indices": [0, 1],
        "last_page_len": [1, 2],
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
    }
    with pytest.raises(error, match=text):
        pkv.BatchDecode().plan(**{**given, **change})


def test_run_refuses_by_name():
    decoder, q, (k, v) = simple()
    readonly = np.zeros_like(q)
    readonly.flags.writeable = False
    wrong = [
        ((q[:, :4], (k, v)), {}, "q has shape"),
        ((q.astype(np.float32), (k, v)), {}, "q holds float32"),
        ((q, (k, v[:, :8])), {}, "must be alike"),
        ((q, (k,)), {}, "1 arrays"),
        ((q, k), {}, "wanted .k, v. or"),
        ((q, (k.astype(np.float32), v.astype(np.float32))), {}, "k cache holds float32"),
        ((q, (k[..., ::-1], v)), {}, "last dimension has stride -1"),
        ((q, (k, v)), {"out": readonly}, "read-only"),
        ((q, (k, v)), {"out": q[:1]}, "out has shape"),
        ((q, (k, v)), {"lse": np.zeros((2, 9), np.float32)}, "lse is"),
        ((q, (k, v)), {"sinks": np.zeros(3)}, "sinks is"),
        ((q, (k, v)), {"window_left": 5}, "window_left is 5"),
        (([[1.0]], (k, v)), {}, "q is a list"),
    ]
    for arguments, options, text in wrong:
        with pytest.raises(pkv.InvalidArgument, match=text):
            decoder.run(*arguments, **options)
    with pytest.raises(pkv.NotSupported, match="skip_softmax"):
        decoder.run(q, (k, v), skip_softmax_threshold_scale_factor=1.0)


def test_append_refuses_slots_beyond_the_cache():
    cache = np.zeros((2, 2, 16, 1, 8), np.float32)
    new = np.ones((1, 1, 8), np.float32)
    with pytest.raises(pkv.OutOfRange, match="slots.0. is 32"):
        pkv.append(new, new, cache, [32])
    assert not cache.any()


def test_executors_name_what_they_are_and_refuse_the_rest():
    executor = pkv.Executor(threads=2, isa="scalar")
    assert (executor.device, executor.isa, executor.threads) == ("cpu", "scalar", 2)
    with pytest.raises(pkv.InvalidArgument, match="tpu"):
        pkv.Executor("tpu")
    with pytest.raises(pkv.InvalidArgument, match="sse2"):
        pkv.Executor(isa="sse2")
    with pytest.raises(pkv.NotSupported):
        pkv.Executor(isa="neon")


def test_results_do_not_depend_on_the_number_of_workers():
    results = []
    for threads in (1, 3):
        decoder, q, cache = simple(
            np.random.default_rng(4), (900, 5), pkv.Executor(threads=threads)
        )
        results.append(decoder.run(q, cache))
    assert np.array_equal(*results)


def test_the_interpreter_lock_is_released_during_calls():
    """A thread counts while another is inside one long call (double precision, slow on purpose)."""
    decoder, q, cache = simple(None, (30000, 1), pkv.Executor(threads=1, isa="reference"))
    decoder.run(q, cache)
    counted, inside = [], threading.Event()
    stop = threading.Event()

    def count():
        while not stop.is_set():
            if inside.is_set():
                counted.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    began = time.perf_counter()
    inside.set()
    decoder.run(q, cache)
    ended = time.perf_counter()
    stop.set()
    thread.join()
    during = [t for t in counted if began < t < ended]
    assert ended - began > 0.01 and len(during) >= 3, (ended - began, len(during))


def test_threads_share_executor_and_objects():
    shared, q, cache = simple(np.random.default_rng(7), (333, 64, 1))
    wanted = shared.run(q, cache)

    def work(seed):
        own, own_q, own_cache = simple(np.random.default_rng(seed), (50 + seed, 3))
        first = own.run(own_q, own_cache)
        for _ in range(20):
            assert np.array_equal(shared.run(q, cache), wanted)
            assert np.array_equal(own.run(own_q, own_cache), first)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for result in [pool.submit(work, seed) for seed in range(12)]:
            result.result()


def _in_child(old, queue):
    decoder, q, cache = old
    try:
        decoder.run(q, cache)
        queue.put("ran")
    except pkv.WrongState as e:
        queue.put(str(e))
    own, q, cache = simple()
    queue.put(own.run(q, cache))
    del decoder, old
    gc.collect()  # must not wait for worker threads that are not in this process


def test_after_a_fork_old_objects_say_so_and_new_ones_work():
    parent = simple()
    wanted = parent[0].run(*parent[1:])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(parent, queue))
    child.start()
    said, computed = queue.get(timeout=30), queue.get(timeout=30)
    child.join(30)
    assert child.exitcode == 0
    assert re.search("before a fork; make a new one", said), said
    assert np.array_equal(computed, wanted)
    assert np.array_equal(parent[0].run(*parent[1:]), wanted)


def test_the_interpreter_ends_while_a_daemon_thread_is_inside_a_call():
    status, text = python(
        """
        import threading, time, sys
        sys.path.insert(0, %r)
        from test_handles import simple
        import persistentkv as pkv
        decoder, q, cache = simple(None, (3000, 1), pkv.Executor(threads=2, isa="reference"))
        def forever():
            while True:
                decoder.run(q, cache)
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.2)
        print("ends")
        """
        % os.path.dirname(os.path.abspath(__file__))
    )
    assert (status, text) == (0, "ends\n")


def test_objects_may_die_in_any_order():
    for _ in range(3):
        executor = pkv.Executor(threads=2)
        decoder, q, cache = simple(executor=executor)
        del executor
        gc.collect()
        decoder.run(q, cache)
        del decoder
        gc.collect()


def test_a_missing_or_foreign_library_is_an_import_error():
    for path, text in (("/nonexistent.so", "could not be loaded"), ("libc.so.6", "is no libpkv")):
        status, said = python("import persistentkv", PERSISTENTKV_LIBRARY=path)
        assert status != 0 and text in said and "ImportError" in said


def test_importing_does_not_import_torch():
    status, said = python("import sys, persistentkv; print('torch' in sys.modules)")
    assert (status, said) == (0, "False\n")


def test_the_module_reports_what_it_runs_on():
    done = subprocess.run(
        [sys.executable, "-m", "persistentkv"], capture_output=True, text=True, check=True
    )
    assert f"libpkv {pkv.__version__}" in done.stdout and "cpu: " in done.stdout


def test_feature_tests_by_name():
    assert pkv.lib.has("pkv_attention_run") and not pkv.lib.has("pkv_no_such_function")


def test_struct_layouts_are_the_headers(tmp_path):
    """A C program prints sizes and offsets of every struct; ctypes must say the same."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    lines, wanted = [], []
    for name, struct in _abi.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        wanted.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            wanted.append(f"{name}.{field} {getattr(struct, field).offset}")
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stdio.h>\n#include <pkv/device.h>\n#include <pkv/sched.h>\n"
        "#include <pkv/engine.h>\n"
        "int main(void) {\n%s\nreturn 0; }\n"
        % "\n".join(lines)
    )
    program = tmp_path / "layout"
    subprocess.run(["cc", f"-I{root}/include", source, "-o", program], check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:-1] == wanted
