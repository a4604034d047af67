# SPDX-License-Identifier: Apache-2.0
"""What runs the work: a pool of CPU workers, or a CUDA device.

One call at a time: a lock makes threads wait for one another. A handle belongs to the process that
made it: after a fork the child is told so, and makes its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from typing import Any

from . import _abi
from ._lib import lib, sized
from .errors import InvalidArgument, WrongState

_ISAS = {
    "auto": _abi.ISA_AUTO,
    "reference": _abi.ISA_REFERENCE,
    "scalar": _abi.ISA_SCALAR,
    "avx2": _abi.ISA_AVX2,
    "avx512": _abi.ISA_AVX512,
    "neon": _abi.ISA_NEON,
}


def _destroy(pid: int, handle: int) -> None:
    # A forked child has none of the worker threads that this would wait for.
    if os.getpid() == pid:
        lib.function("pkv_executor_destroy")(handle)


class Executor:
    """A worker pool or a device.

    Args:
        device: "cpu", "cuda" (torch's current device) or "cuda:N".
        threads: CPU workers, the calling thread included; 0 = one a core this process may use.
        isa: CPU instruction set: "auto", "reference" (double precision, slow), "scalar", "avx2",
            "avx512". "auto" follows the environment variable PKV_CPU.

    Raises:
        NotSupported: the device or the instruction set is not here; the text says what is.
    """

    def __init__(self, device: str = "cpu", threads: int = 0, isa: str = "auto") -> None:
        kind, _, index = device.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
            raise InvalidArgument(f"device is {device!r}, wanted 'cpu', 'cuda' or 'cuda:N'")
        if isa not in _ISAS:
            raise InvalidArgument(f"isa is {isa!r}, known are {', '.join(_ISAS)}")
        self.kind = kind
        self.index = int(index) if index else (_current_device() if kind == "cuda" else 0)
        options = sized(_abi.ExecutorOptions)
        options.device = _abi.DEVICE_CUDA if kind == "cuda" else _abi.DEVICE_CPU
        options.isa = _ISAS[isa]
        options.threads = threads
        handle = ctypes.c_void_p()
        self._handle, self._pid = 0, os.getpid()
        self.lock = threading.RLock()
        self._error = _abi.Error()
        self._error_at = ctypes.byref(self._error)
        self._current_device: Any = None  # torch's, from when it has been asked once
        with self.calling():
            lib.call("pkv_executor_create", ctypes.byref(handle), ctypes.byref(options))
        self._handle = handle.value or 0
        finalizer = weakref.finalize(self, _destroy, self._pid, self._handle)
        # At exit a daemon thread may still be inside a call; the system takes everything back.
        finalizer.atexit = False

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        return self.kind if self.kind == "cpu" else f"cuda:{self.index}"

    @property
    def isa(self) -> str:
        """The instruction set in use ("auto" on a device)."""
        return lib.function("pkv_isa_name")(lib.function("pkv_executor_isa")(self.handle)).decode()

    @property
    def threads(self) -> int:
        """CPU workers, the calling thread included; 0 on a device."""
        return lib.function("pkv_executor_threads")(self.handle)

    @property
    def handle(self) -> int:
        """The pkv_executor's address, in the process that made it."""
        if os.getpid() != self._pid:
            raise WrongState(
                f"this executor was made in process {self._pid}, before a fork; make a new one, "
                f"and new objects that use it, in process {os.getpid()}"
            )
        return self._handle

    def calling(self) -> _Calling:
        """``with executor.calling() as handle``: lock held, device current, process checked."""
        return _Calling(self)

    def run(self, function: Any, *arguments: Any) -> None:
        """One call of a function of the library, its last parameter a pkv_error, under what
        `calling` holds; raises what it refuses with. What a step does once a layer goes this way:
        nothing is made for a call that succeeds."""
        current = self._current_device
        if (current is None or current() != self.index) and self.kind != "cpu":
            with self.calling():
                self._checked(function, arguments)
            return
        if os.getpid() != self._pid:
            self.handle  # noqa: B018 - it says what is wrong
        with self.lock:
            self._checked(function, arguments)

    def _checked(self, function: Any, arguments: tuple[Any, ...]) -> None:
        status = function(*arguments, self._error_at)
        if status != _abi.OK:
            raise lib.failure(status, self._error)

    def stream(self, stream: Any = None) -> int:
        """The address of a torch stream, of a number, or of torch's current stream."""
        if self.kind == "cpu":
            return 0
        if stream is not None:
            return int(getattr(stream, "cuda_stream", stream))
        return current_stream(self.index)


class _Calling:
    """Holds an executor for one call. CUDA calls go to the current device: ours is made that."""

    __slots__ = ("_executor", "_before")

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._before = -1

    def __enter__(self) -> int:
        executor = self._executor
        handle = executor.handle
        executor.lock.acquire()
        torch = sys.modules.get("torch") if executor.kind == "cuda" else None
        if torch is not None and (torch.cuda.is_initialized() or torch.cuda.is_available()):
            executor._current_device = torch.cuda.current_device
            current = torch.cuda.current_device()
            if current != executor.index:
                self._before = current
                torch.cuda.set_device(executor.index)
        return handle

    def __exit__(self, *_: Any) -> None:
        if self._before >= 0:
            sys.modules["torch"].cuda.set_device(self._before)
        self._executor.lock.release()


def current_stream(index: int) -> int:
    """The address of torch's current stream on a device, 0 without torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without making a Stream of it
    return raw(index) if raw is not None else torch.cuda.current_stream(index).cuda_stream


def _current_device() -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0


_defaults: dict[str, Executor] = {}
_defaults_lock = threading.Lock()


def default_executor(device: str = "cpu") -> Executor:
    """The process's shared executor of a device, made when first asked for."""
    with _defaults_lock:
        found = _defaults.get(device)
        if found is None or found._pid != os.getpid():
            found = _defaults[device] = Executor(device)
        return found


def _after_fork() -> None:
    # Another thread may have held it.
    global _defaults_lock
    _defaults_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
