# SPDX-License-Identifier: Apache-2.0
"""Which waiting request joins the batch next, and when to stop: the scheduler of pkv/sched.h.

    sched = Scheduler(order="tree", policy="marginal", chunk_tokens=16)
    sched.insert(7, tokens=prompt)
    while (pick := sched.best()).verdict == "add":
        sched.admit(pick.id)
    sched.finish(7)

A scheduler is used by one thread at a time. Times are nanoseconds of the machine's monotonic clock
(time.monotonic_ns) unless a clock is given.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import _abi
from ._lib import lib, sized
from ._options import index_of, set_options
from .errors import InvalidArgument, WrongState

ORDERS = ("tree", "fcfs", "priority", "cht", "lpm", "dfs-weight")
POLICIES = ("always", "static", "static-chain", "ucb", "q-learning", "marginal")
AGEINGS = ("each", "oldest")
VERDICTS = ("add", "stop", "blocked", "empty")
REASONS = ("order", "age", "bypasses", "wait", "deadline")
STATES = ("unknown", "waiting", "active", "preempted")
HASHES = ("bulk", "tokenwise")

_COST = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.POINTER(_abi.SchedBatch))
_CLOCK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
# Set by name from Scheduler's keyword arguments; the others of the struct have their own.
OPTIONS = tuple(
    name
    for name, _ in _abi.SchedOptions._fields_
    if name
    not in (
        *("struct_size", "order", "policy", "ageing", "hash", "allocator"),
        *("cost", "cost_ctx", "clock", "clock_ctx", "hash_fn", "hash_ctx"),
    )
)


class Batch(NamedTuple):
    """A batch as the cost function sees it; tokens of prompts only.

    Attributes:
        chain_tokens: common to all rows.
        unique_tokens: a prefix that several rows share counted once.
        common_tokens: of those, what two rows or more have.
    """

    rows: int
    chain_tokens: int
    total_tokens: int
    unique_tokens: int
    common_tokens: int


class Pick(NamedTuple):
    """What `best` says.

    Attributes:
        verdict: "add", "stop" (there is one, the policy would not add it), "blocked" (nothing that
            may be picked fits the page budget; `id` is the first choice) or "empty".
        reason: "order", "age" (no request shares), "bypasses", "wait" or "deadline".
        forced: the policy had no choice.
        shared_tokens, new_tokens: of the prompt, covered by the batch and not.
        new_pages: pages that it needs beyond what it shares.
        chain_before, chain_after: the batch's common prefix in chunks, without and with it.
        waiting_sharers: other waiting requests that have the whole chain_after.
        bypasses: how often it was passed over; -1 where that is not counted.
        waiting_peers: other waiting requests that have its first new chunk too.
    """

    verdict: str
    reason: str
    forced: bool
    id: int
    prompt_tokens: int
    shared_tokens: int
    new_tokens: int
    new_pages: int
    chain_before: int
    chain_after: int
    waiting_sharers: int
    bypasses: int
    waited_ns: int
    waiting_peers: int


class Entry(NamedTuple):
    """A request that is held, as `snapshot` lists it."""

    id: int
    state: str
    priority: int
    prompt_tokens: int
    shared_tokens: int
    waiting_since_ns: int


def _destroy(pid: int, handle: int) -> None:
    if os.getpid() == pid:
        lib.function("pkv_sched_destroy")(handle)


def _array(values: Any, dtype: Any, name: str) -> np.ndarray:
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.ndim != 1:
        raise InvalidArgument(f"{name} has shape {array.shape}, wanted one dimension")
    return array


class Scheduler:
    """Holds requests from insert to finish or cancel, and says who is next.

    Args:
        order: "tree", "fcfs", "priority", "cht", "lpm" or "dfs-weight".
        policy: "always", "static", "static-chain", "ucb", "q-learning" or "marginal".
        ageing: what bypass_limit bounds: "each" request's bypasses, or the "oldest" one's in a row.
        hash: how "cht" digests tokens: "bulk" or "tokenwise".
        cost: seconds that a decode step of a `Batch` takes; without one, cost_base_us +
            cost_row_us * rows + cost_token_us * unique_tokens.
        clock: nanoseconds from any fixed point.
        **options: any other field of pkv_sched_options by its name (`OPTIONS` lists them), as
            chunk_tokens, max_requests, bypass_limit; 0 means the default everywhere.

    An exception that `cost` or `clock` raises comes out of the call that needed it, after the call
    was carried out with 0 in its place.

    Raises:
        InvalidArgument: an option that is not known, or a value that is not possible.
    """

    def __init__(
        self,
        order: str = "tree",
        policy: str = "always",
        *,
        ageing: str = "each",
        hash: str = "bulk",
        cost: Callable[[Batch], float] | None = None,
        clock: Callable[[], int] | None = None,
        **options: float,
    ) -> None:
        given = sized(_abi.SchedOptions)
        given.order = index_of(order, ORDERS, "order")
        given.policy = index_of(policy, POLICIES, "policy")
        given.ageing = index_of(ageing, AGEINGS, "ageing")
        given.hash = index_of(hash, HASHES, "hash")
        set_options(given, options, OPTIONS)
        self._raised: BaseException | None = None
        self._callbacks: list[Any] = []
        if cost is not None:
            given.cost = self._callback(_COST, lambda _, batch: float(cost(_batch(batch[0]))))
        if clock is not None:
            given.clock = self._callback(_CLOCK, lambda _: int(clock()))
        self.order, self.policy = order, policy
        self._pid = os.getpid()
        self._handle = 0
        self._data: dict[int, np.ndarray] = {}  # borrowed by the C side until the request leaves
        self._pick, self._request = sized(_abi.SchedPick), sized(_abi.SchedRequest)
        handle = ctypes.c_void_p()
        lib.call("pkv_sched_create", ctypes.byref(handle), ctypes.byref(given))
        self._handle = handle.value or 0
        self._finalizer = weakref.finalize(self, _destroy, self._pid, self._handle)

    def _callback(self, kind: Any, function: Callable[..., Any]) -> int:
        """Its address. ctypes would print an exception and go on; here it is kept for `_check`."""
        me = weakref.ref(self)

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException as e:
                scheduler = me()
                if scheduler is not None and scheduler._raised is None:
                    scheduler._raised = e
                return 0

        made = kind(call)
        self._callbacks.append(made)
        return ctypes.cast(made, ctypes.c_void_p).value or 0

    def _check(self) -> None:
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised

    def _call(self, name: str, *arguments: Any) -> None:
        lib.call(name, self.handle, *arguments)
        if self._raised is not None:
            self._check()

    @property
    def handle(self) -> int:
        """The pkv_sched's address, in the process that made it."""
        if not self._handle:
            raise WrongState("this scheduler is closed")
        if os.getpid() != self._pid:
            raise WrongState(
                f"this scheduler was made in process {self._pid}, before a fork; make a new one in "
                f"process {os.getpid()}"
            )
        return self._handle

    def close(self) -> None:
        """Gives the memory back; calls after it raise WrongState. May be called again."""
        self._finalizer()
        self._handle = 0
        self._data.clear()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __len__(self) -> int:
        """Requests held: waiting, active and preempted."""
        return len(self._data)

    def __contains__(self, id: int) -> bool:
        return id in self._data

    def insert(
        self,
        id: int,
        tokens: Any = None,
        *,
        hashes: Any = None,
        prompt_tokens: int | None = None,
        priority: int = 0,
        arrival_ns: int = 0,
        deadline_ns: int = 0,
        output_tokens: int = 0,
        pages: int = 0,
        before: int | None = None,
    ) -> None:
        """A request has come.

        Args:
            id: 0 .. 2^64 - 1, of no request that is held.
            tokens: int32 [prompt_tokens]; an array of that type is not copied, and must stay as it
                is until the request has left.
            hashes: instead of tokens: uint64, the i-th stands for all tokens up to the end of block
                i of chunk_tokens; then prompt_tokens is needed. Tokens beyond the last are shared
                with nobody.
            priority: lower is more urgent.
            arrival_ns: when it came; 0 = now.
            deadline_ns: when it should be admitted at the latest; 0 = none.
            output_tokens: known or guessed.
            pages: for prompt and output, were nothing shared; 0 = from the lengths.
            before: the id of a request of the same priority that this one is older than, by one
                place; None = it is the youngest.

        Raises:
            WrongState: the id is held already, or `before` is not.
            InvalidArgument: `before` has another priority.
            OutOfRange: too many requests or priorities, too long a prompt, too many pages.
        """
        if (tokens is None) == (hashes is None):
            raise InvalidArgument("tokens or hashes must be given, and not both")
        request = self._request
        if hashes is None:
            data = _array(tokens, np.int32, "tokens")
            if prompt_tokens is not None and prompt_tokens != len(data):
                raise InvalidArgument(f"prompt_tokens is {prompt_tokens}, tokens has {len(data)}")
            prompt_tokens = len(data)
            request.tokens, request.hashes, request.hash_count = _address(data), None, 0
        else:
            if prompt_tokens is None:
                raise InvalidArgument("hashes need prompt_tokens")
            data = _array(hashes, np.uint64, "hashes")
            request.tokens, request.hashes = None, _address(data)
            request.hash_count = len(data)
        if not 0 <= id < 1 << 64:
            raise InvalidArgument(f"id is {id}, possible: 0 to 2^64 - 1")
        request.id, request.prompt_tokens, request.priority = id, prompt_tokens, priority
        request.arrival_ns, request.deadline_ns = arrival_ns, deadline_ns
        request.output_tokens, request.pages = output_tokens, pages
        if before is None:
            self._call("pkv_sched_insert", ctypes.byref(request))
        else:
            self._call("pkv_sched_insert_before", ctypes.byref(request), before)
        self._data[id] = data

    def best(self, page_budget: int = -1) -> Pick:
        """Who would be next within page_budget new pages (-1 = no limit). Changes nothing."""
        p = self._pick
        lib.call("pkv_sched_best", ctypes.byref(p), self.handle, page_budget)
        if self._raised is not None:
            self._check()
        return Pick(
            VERDICTS[p.verdict],
            REASONS[p.reason],
            bool(p.forced),
            p.id,
            p.prompt_tokens,
            p.shared_tokens,
            p.new_tokens,
            p.new_pages,
            p.chain_before,
            p.chain_after,
            p.waiting_sharers,
            p.bypasses,
            p.waited_ns,
            p.waiting_peers,
        )

    def choice(self, page_budget: int = -1) -> tuple[str, int]:
        """Verdict and id of what `best` would say, without its other fields."""
        lib.call("pkv_sched_best", ctypes.byref(self._pick), self.handle, page_budget)
        if self._raised is not None:
            self._check()
        return VERDICTS[self._pick.verdict], self._pick.id

    def admit(self, id: int) -> None:
        """Any waiting request becomes active. WrongState: it does not wait."""
        self._call("pkv_sched_admit", id)

    def finish(self, id: int) -> None:
        """An active request leaves for good."""
        self._call("pkv_sched_finish", id)
        del self._data[id]

    def preempt(self, id: int) -> None:
        """An active request leaves the batch, keeps its age, and is not picked until it resumes."""
        self._call("pkv_sched_preempt", id)

    def resume(self, id: int) -> None:
        """A preempted request waits again, in its old place."""
        self._call("pkv_sched_return", id)

    def cancel(self, id: int) -> None:
        """Whatever the request is doing, it leaves. WrongState: there is no such request."""
        self._call("pkv_sched_cancel", id)
        del self._data[id]

    def reward(self, rows: int, seconds: float) -> None:
        """`rows` requests took `seconds`: what "ucb" and "q-learning" learn from."""
        self._call("pkv_sched_reward", rows, seconds)

    def state(self, id: int) -> str:
        """ "waiting", "active", "preempted"; "unknown" when no such request is held."""
        return STATES[lib.function("pkv_sched_get_state")(self.handle, id)]

    def stats(self) -> dict[str, Any]:
        """The fields of pkv_sched_stats; by_reason as {reason: admissions}."""
        out = sized(_abi.SchedStats)
        lib.function("pkv_sched_get_stats")(ctypes.byref(out), self.handle)
        found = {name: getattr(out, name) for name, _ in _abi.SchedStats._fields_[1:]}
        found["by_reason"] = dict(zip(REASONS, out.by_reason, strict=True))
        return found

    def snapshot(self) -> list[Entry]:
        """The requests held, the most urgent priority first, then by age."""
        entries = (_abi.SchedEntry * max(1, len(self._data)))()
        take = lib.function("pkv_sched_snapshot")
        count = take(ctypes.byref(entries), len(self._data), self.handle)
        return [
            Entry(
                e.id,
                STATES[e.state],
                e.priority,
                e.prompt_tokens,
                e.shared_tokens,
                e.waiting_since_ns,
            )
            for e in entries[:count]
        ]

    def save_learner(self, path: str | os.PathLike[str]) -> None:
        """Writes the learner's table. NotSupported: this policy does not learn."""
        self._call("pkv_sched_save_learner", os.fsencode(path))

    def load_learner(self, path: str | os.PathLike[str]) -> None:
        """Reads a learner's table. InvalidArgument: it is damaged or not this policy's, and what
        was there stays."""
        self._call("pkv_sched_load_learner", os.fsencode(path))


def _address(data: np.ndarray) -> int:
    # An empty array may have no address, and NULL would mean that nothing was given.
    return data.ctypes.data or ctypes.addressof(_NOTHING)


_NOTHING = ctypes.c_uint64()


def _batch(batch: Any) -> Batch:
    return Batch(*(getattr(batch, name) for name in Batch._fields))


def digests(tokens: Any, chunk: int, hash: str = "bulk") -> np.ndarray:
    """Cumulative digests of tokens in chunks, uint64, fit for ``insert(hashes=...)``.

    They are not kept stable between versions: never store them.
    """
    data = _array(tokens, np.int32, "tokens")
    if chunk < 1:
        raise InvalidArgument(f"chunk is {chunk}, possible: 1 and more")
    out = np.empty(-(-len(data) // chunk), np.uint64)
    kind = index_of(hash, HASHES, "hash")
    written = lib.function("pkv_sched_digests")(
        out.ctypes.data, data.ctypes.data, len(data), chunk, kind
    )
    return out[:written]
