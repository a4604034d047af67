# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a pkv_engine. Others hand it calls, and take what their requests were sent.

Everything that touches the engine happens between two steps, on that thread: `ask` waits for its
turn, as long as a step takes at most. ctypes releases the interpreter's lock during a step. What
only reads the model happens in the threads that ask for it, each a user of the model (`using`) as
long as it does: the model closes after the last of them.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from . import _abi
from ._lib import Library
from .errors import PkvError, WrongState

T = TypeVar("T")
# So many failed steps in a row, and the engine counts as broken; a device stays broken.
FAILED_STEPS = 3
CLOSED = "this engine was closed"
KEPT_CONSTRAINTS = 32


class Event(NamedTuple):
    """One token of one choice, as pkv_event has it."""

    choice: int
    token: int
    from_prompt: bool
    finish: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    cached_tokens: int
    stop_index: int
    stop_bytes: int


class Live:
    """A request that runs or waits. Its events come in order, an exception last if it failed."""

    def __init__(self, choices: int) -> None:
        self.id = 0
        self.choices = choices
        self.left = choices  # the engine's thread counts down: 0 when an answer was quick
        self.events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()


class _Answer:
    """Of a call that another thread waits for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as e:  # whatever it is, it is the caller's
            self.error = e
        self.done.set()

    def refuse(self) -> None:
        self.error = WrongState(CLOSED)
        self.done.set()


class _Compiled:
    """A constraint that is known before it is made: Ctrl-C may come right behind."""

    def __init__(self) -> None:
        self.cell = ctypes.c_void_p()
        self.users = 1  # who makes it; Ctrl-C may leave one too many: then it stays to the end
        self.key: tuple[str, bytes] | None = None  # while it is kept for the next


class Constraints:
    """Compiled ones, kept for the next that asks the same, and those that somebody uses: none may
    outlive the model, so what is there at its end is destroyed there. Nothing is destroyed in a
    caller's thread: Ctrl-C between that and its record would have it destroyed twice."""

    def __init__(self, lib: Library, model: int) -> None:
        self._lib, self._model = lib, model
        self._kept: OrderedDict[tuple[str, bytes], _Compiled] = OrderedDict()
        self._all: list[_Compiled] = []
        self._lock = threading.Lock()  # of the two above

    def share(self, kind: str, text: bytes) -> int:
        """For a user of the model, who hands it back (`give_back`) or leaves it to the end."""
        with self._lock:
            found = self._kept.get((kind, text))
            if found is not None:
                self._kept.move_to_end((kind, text))
                found.users += 1
                return found.cell.value or 0
            made = _Compiled()
            self._all.append(made)
        arguments = () if kind == "json" else (text, len(text))
        create = f"pkv_constraint_create_{kind}"
        try:
            self._lib.call(create, ctypes.byref(made.cell), self._model, *arguments, None)
            with self._lock:
                self._keep((kind, text), made)
        except BaseException:
            with self._lock:
                made.users = 0
                if not made.cell.value:
                    self._all.remove(made)
            raise
        return made.cell.value or 0

    def give_back(self, share: int) -> None:
        """On the engine's thread. Nothing where it was given back before."""
        with self._lock:
            for one in self._all:
                if one.cell.value == share and one.users > 0:
                    one.users -= 1
                    break
            self._sweep()

    def destroy(self) -> None:
        """All of them, on the engine's thread, when the model has no user any more."""
        with self._lock:
            self._kept.clear()
            for one in self._all:
                one.users, one.key = 0, None
            self._sweep()

    def _keep(self, key: tuple[str, bytes], made: _Compiled) -> None:
        if key in self._kept:  # two threads may have made it at once
            return
        # In this order: what is found there must never be swept, wherever Ctrl-C comes.
        made.key = key
        self._kept[key] = made
        if len(self._kept) > KEPT_CONSTRAINTS:
            self._kept.popitem(last=False)[1].key = None

    def _sweep(self) -> None:
        """Destroys what is neither used nor kept."""
        unused = [one for one in self._all if one.users == 0 and one.key is None]
        for one in unused:
            self._all.remove(one)
            self._lib.function("pkv_constraint_destroy")(one.cell.value)


class Core:
    """Owns model and engine from `start` to `stop`."""

    def __init__(self, lib: Library, model: int, engine: int, capacity: int) -> None:
        self.lib, self.model, self.engine = lib, model, engine
        self.constraints = Constraints(lib, model)
        self.pid = os.getpid()
        self._users: dict[object, int] = {}  # of the model: threads, by a key of each use
        self._events = (_abi.Event * capacity)()
        self._live: dict[int, Live] = {}
        self._next = 1
        self._calls: deque[_Answer] = deque()
        self._work = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="persistentkv", daemon=True)
        self._thread.start()

    # --- other threads -------------------------------------------------------------------------

    def check(self) -> None:
        if os.getpid() != self.pid:
            raise WrongState(
                f"this engine was made in process {self.pid}, before a fork; make a new one in "
                f"process {os.getpid()}"
            )
        if self._closing:
            raise WrongState(CLOSED)

    @contextmanager
    def using(self) -> Iterator[int]:
        """The model, which stays until this thread leaves. Refused once the engine is closed."""
        self.check()
        use = object()
        try:
            with self._work:
                self.check()
                self._users[use] = threading.get_ident()
            yield self.model
        finally:
            with self._work:
                self._users.pop(use, None)
                self._work.notify()

    def ask(self, call: Callable[[], T]) -> T:
        """The value of a call between two steps, or what it raises."""
        answer = _Answer(call)
        self._put(answer)
        answer.done.wait()
        if answer.error is not None:
            raise answer.error
        return answer.value

    def tell(self, call: Callable[[], Any]) -> None:
        """A call that nobody waits for; none once the engine is closed."""
        if not self._closing and os.getpid() == self.pid:
            try:
                self._put(_Answer(call))
            except WrongState:
                pass

    def _put(self, answer: _Answer) -> None:
        self.check()
        with self._work:
            self.check()
            self._calls.append(answer)
            self._work.notify()

    def stop(self) -> None:
        """Ends everything; requests that run end with WrongState. Once more is no error."""
        if os.getpid() != self.pid:
            return  # a forked child has no such thread
        with self._work:
            self._closing = True
            self._work.notify()
            # A signal's handler that closes in the midst of a use: the end comes after that use.
            using = threading.get_ident() in self._users.values()
        if not using and threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the engine's thread -------------------------------------------------------------------

    def submit(self, live: Live, request: Any) -> None:
        """On the engine's thread (`ask`): queues a request, whose events go to `live`."""
        if self._failure is not None:
            raise self._failure
        identity = ctypes.c_int64()
        request.user = self._next
        self.lib.call(
            "pkv_engine_submit", ctypes.byref(identity), self.engine, ctypes.byref(request)
        )
        live.id = identity.value
        self._live[self._next] = live
        self._next += 1

    def cancel(self, live: Live) -> None:
        if live.id:
            self.lib.function("pkv_engine_cancel")(self.engine, live.id)

    def _run(self) -> None:
        failures = 0
        try:
            while self._take_calls():
                if self._live:
                    failures = self._step(failures)
        finally:
            self._end()

    def _take_calls(self) -> bool:
        with self._work:
            while not self._calls and not self._live and not self._closing:
                self._work.wait()
            calls, self._calls = self._calls, deque()
            going = not self._closing
        for answer in calls:
            if going:
                answer.run()
            else:
                answer.refuse()
        return going

    def _step(self, failures: int) -> int:
        count = ctypes.c_size_t()
        failed: PkvError | None = None
        try:
            self.lib.call(
                "pkv_engine_step",
                self._events,
                len(self._events),
                ctypes.byref(count),
                self.engine,
            )
        except PkvError as e:
            failed = e
        for i in range(count.value):
            self._pass_on(self._events[i])
        failures = failures + 1 if failed is not None else 0
        if failed is not None and (failures == FAILED_STEPS or failed.status == "E_DEVICE"):
            self._failure = failed
            self._fail_all(failed)
        return failures

    def _pass_on(self, e: Any) -> None:
        live = self._live.get(e.user)
        if live is None:
            return
        top = tuple((e.top[k].token, e.top[k].logprob) for k in range(e.top_count))
        live.events.put(
            Event(
                e.choice,
                e.token,
                bool(e.from_prompt),
                e.finish,
                e.logprob,
                top,
                e.cached_tokens,
                e.stop_index,
                e.stop_bytes,
            )
        )
        if e.finish:
            live.left -= 1
            if live.left == 0:
                del self._live[e.user]

    def _fail_all(self, error: BaseException) -> None:
        for live in self._live.values():
            self.cancel(live)
            live.events.put(error)
        self._live.clear()

    def _end(self) -> None:
        with self._work:
            self._closing = True
            calls, self._calls = self._calls, deque()
        for answer in calls:
            answer.refuse()
        self._fail_all(WrongState(CLOSED))
        self.lib.function("pkv_engine_destroy")(self.engine)
        with self._work:
            while self._users:
                self._work.wait()
        self.constraints.destroy()
        self.lib.function("pkv_model_close")(self.model)
