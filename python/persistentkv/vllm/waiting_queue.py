# SPDX-License-Identifier: Apache-2.0
"""vLLM's waiting queue, kept by libpkv's scheduler.

vLLM's scheduling pass peeks at the head of this queue, pops it, and puts back what it could not
use. A popped request counts as part of the batch at once, so that the next peek weighs sharing with
it; when it turns out that vLLM put it aside instead, it is taken out of the batch again.

Where a request can be (`_Entry.place`):
    WAITING   the library holds it and may pick it
    FRONT     vLLM put it back at the head; it goes before all that the library would pick
    OVERFLOW  the library has no room for it yet; first come, first served, after all others
    BATCH     it runs
    ASIDE     it was popped and does not run: another queue of vLLM's has it

With priorities vLLM ranks equals by arrival time, the library by the order of its insertions. A
request with an earlier arrival time than others of its priority is inserted ahead of the next one.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from ..errors import OutOfMemory, OutOfRange
from ..sched import Scheduler

WAITING, FRONT, OVERFLOW, BATCH, ASIDE, GONE = range(6)
_MAX_PRIORITY = 1_000_000


class _Entry:
    """Of one request. `hashes` and `prompt` are what the library is told, kept for when it has room
    for the request."""

    __slots__ = (
        "request",
        "number",
        "place",
        "arrival",
        "priority",
        "hashes",
        "prompt",
    )

    def __init__(
        self,
        request: Request,
        number: int,
        priority: int,
        hashes: np.ndarray,
        prompt: int,
    ) -> None:
        self.request, self.number, self.place = request, number, GONE
        self.arrival = (request.arrival_time, request.request_id)
        self.priority, self.hashes, self.prompt = priority, hashes, prompt


class WaitingQueue(RequestQueue):
    """The queue of one vLLM scheduler.

    len() counts every waiting request; bool() is whether one should be admitted now, which a stop
    policy may deny although requests wait.

    Args:
        sched: of chunks of vLLM's hash block; nobody else uses it.
        chunk_tokens: the hash block.
        max_prompt_tokens: longer prompts count as if they ended there.
        by_priority: vLLM's policy is "priority": urgent ones first, then by arrival time, and what
            is put back takes its old place. Otherwise it goes to the head.
    """

    def __init__(
        self,
        sched: Scheduler,
        chunk_tokens: int,
        max_prompt_tokens: int,
        by_priority: bool,
    ) -> None:
        self.sched = sched
        self._chunk, self._longest = chunk_tokens, max_prompt_tokens
        self._by_priority = by_priority
        self._entries: dict[str, _Entry] = {}
        self._numbers: dict[int, _Entry] = {}
        self._batch: dict[str, _Entry] = {}
        self._front: deque[_Entry] = deque()
        self._overflow: deque[_Entry] = deque()
        # by_priority only: what the library holds, of each priority
        self._arrivals: dict[int, list[tuple[float, str]]] = {}
        self._popped: _Entry | None = None  # not known yet whether it runs
        self._pick: tuple[str, int] | None = None  # verdict, number
        self._next_number = 0
        self._waiting = 0  # in WAITING, FRONT and OVERFLOW

    # ---- what vLLM calls ----

    def add_request(self, request: Request) -> None:
        """A new request, or one that comes back with another prompt (a streaming session)."""
        self._forget(request)
        self._enter(request)

    def pop_request(self) -> Request:
        """The request that `peek_request` shows; it is part of the batch from now on."""
        self._settle()
        entry = self._head()
        if entry is None:
            raise IndexError("pop from an empty queue")
        if entry.place == FRONT:
            self._front.popleft()
            self.sched.resume(entry.number)
        if entry.place == OVERFLOW:
            self._forget(entry.request)
        else:
            self.sched.admit(entry.number)
            self._put(entry, BATCH)
            self._popped = entry
        self._pick = None
        return entry.request

    def peek_request(self) -> Request:
        """Who is next. The same request until something changes."""
        entry = self._head()
        if entry is None:
            raise IndexError("peek from an empty queue")
        return entry.request

    def prepend_request(self, request: Request) -> None:
        """Preempted, or skipped: to the head, or with priorities to its old place."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.request is not request or entry.place not in (BATCH, ASIDE):
            self._forget(request)
            entry = self._enter(request)
            if entry.place != WAITING or self._by_priority:
                return
            self.sched.admit(entry.number)
            self._put(entry, BATCH)
        if entry.place == BATCH:
            self.sched.preempt(entry.number)
        if self._by_priority:
            self.sched.resume(entry.number)
            self._put(entry, WAITING)
        else:
            self._put(entry, FRONT)
            self._front.appendleft(entry)
        self._changed(entry)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """One by one, so they end up in reverse, as vLLM's own queue has it."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """ValueError: it does not wait here."""
        if request not in self:
            raise ValueError(f"request {request.request_id} is not in the waiting queue")
        self._forget(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Those of them that wait here."""
        for request in requests:
            if request in self:
                self._forget(request)

    def __bool__(self) -> bool:
        if self._front:
            return True
        if self._waiting == 0:
            return False
        entry = self._head()
        return entry is not None and (
            entry.place == OVERFLOW or (self._pick is not None and self._pick[0] == "add")
        )

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Request]:
        """What was put back, then by priority and age, then what found no room."""
        self._fill()
        places = [entry.request for entry in self._front]
        for held in self.sched.snapshot():
            entry = self._numbers[held.id]
            if entry.place == WAITING:
                places.append(entry.request)
        places += [entry.request for entry in self._overflow]
        return iter(places)

    def __contains__(self, request: object) -> bool:
        entry = self._entries.get(getattr(request, "request_id", ""))
        return entry is not None and entry.request is request and entry.place < BATCH

    def __getitem__(self, index: int) -> Request:
        return list(self)[index]

    # ---- what our scheduler class calls ----

    def begin_step(self, running: list[Request]) -> None:
        """Makes the batch what vLLM runs: it moves some requests without asking this queue."""
        self._settle()
        self._pick = None
        batch = self._batch
        if len(batch) == len(running) and all(r.request_id in batch for r in running):
            return
        runs = {r.request_id for r in running}
        for entry in [e for name, e in batch.items() if name not in runs]:
            self._forget(entry.request)
        for request in running:
            entry = self._entries.get(request.request_id)
            if entry is None:
                entry = self._enter(request)
            elif entry.place == ASIDE:
                self.sched.resume(entry.number)
            if entry.place in (WAITING, ASIDE):
                self.sched.admit(entry.number)
                self._put(entry, BATCH)
            elif entry.place == OVERFLOW:  # no room: it runs unseen
                self._forget(request)

    def ended(self, request: Request) -> None:
        """It has finished or was aborted."""
        entry = self._entries.get(request.request_id)
        if entry is not None and entry.place == BATCH:
            self.sched.finish(entry.number)
            self._leave(entry)
        else:
            self._forget(request)

    # ---- inside ----

    def _settle(self) -> None:
        entry, self._popped = self._popped, None
        if entry is None or entry.place != BATCH:
            return
        if entry.request.status != RequestStatus.RUNNING:
            self.sched.preempt(entry.number)
            self._put(entry, ASIDE)
            self._pick = None

    def _head(self) -> _Entry | None:
        if self._front:
            return self._front[0]
        if self._popped is not None:
            self._settle()
        if self._pick is None:
            self._fill()
            self._pick = self.sched.choice()
        verdict, number = self._pick
        if verdict != "empty":
            return self._numbers[number]
        return self._overflow[0] if self._overflow else None

    def _fill(self) -> None:
        """Gives the library from OVERFLOW what there is room for now."""
        while self._overflow and self._hold(self._overflow[0]):
            self._overflow.popleft()

    def _enter(self, request: Request) -> _Entry:
        prompt = min(request.num_prompt_tokens, self._longest)
        whole = request.block_hashes[: prompt // self._chunk]
        hashes = np.frombuffer(b"".join([h[:8] for h in whole]), np.uint64)
        priority = 0
        if self._by_priority:
            priority = max(-_MAX_PRIORITY, min(_MAX_PRIORITY, request.priority))
        entry = _Entry(request, self._next_number, priority, hashes, prompt)
        self._next_number += 1
        self._entries[request.request_id] = entry
        self._numbers[entry.number] = entry
        self._pick = None
        if self._overflow or not self._hold(entry):
            self._put(entry, OVERFLOW)
            self._overflow.append(entry)
        return entry

    def _hold(self, entry: _Entry) -> bool:
        """Gives it to the library, by arrival among those of its priority; False: no room."""
        held: list[tuple[float, str]] = []
        if self._by_priority:
            held = self._arrivals.get(entry.priority, [])
        at = bisect.bisect(held, entry.arrival)
        try:
            self.sched.insert(
                entry.number,
                hashes=entry.hashes,
                prompt_tokens=entry.prompt,
                priority=entry.priority,
                output_tokens=entry.request.max_tokens,
                before=self._entries[held[at][1]].number if at < len(held) else None,
            )
        except (OutOfRange, OutOfMemory):
            return False
        if self._by_priority:
            held.insert(at, entry.arrival)
            self._arrivals[entry.priority] = held
        self._put(entry, WAITING)
        return True

    def _put(self, entry: _Entry, place: int) -> None:
        self._waiting += (place < BATCH) - (entry.place < BATCH)
        if entry.place == BATCH:
            del self._batch[entry.request.request_id]
        if place == BATCH:
            self._batch[entry.request.request_id] = entry
        entry.place = place

    def _changed(self, entry: _Entry) -> None:
        self._pick = None
        if self._popped is entry:
            self._popped = None

    def _forget(self, request: Request) -> None:
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        if entry.place == OVERFLOW:
            self._overflow.remove(entry)
        else:
            if entry.place == FRONT:
                self._front.remove(entry)
            self.sched.cancel(entry.number)
        self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        if self._by_priority and entry.place != OVERFLOW:
            held = self._arrivals[entry.priority]
            del held[bisect.bisect_left(held, entry.arrival)]
            if not held:
                del self._arrivals[entry.priority]
        self._put(entry, GONE)
        del self._entries[entry.request.request_id], self._numbers[entry.number]
        self._changed(entry)
