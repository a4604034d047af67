# SPDX-License-Identifier: Apache-2.0
"""The scheduler class for vLLM whose waiting queue is libpkv's.

    vllm serve MODEL --scheduler-cls persistentkv.vllm.scheduler.PersistentKVScheduler \\
        --additional-config '{"persistentkv_sched": {"policy": "marginal", "ageing": "oldest"}}'

What is scheduled each step, chunked prefill, preemption and memory stay vLLM's: this class says
which waiting request vLLM looks at next, and when it should look at no more. Sharing is read off
the block hashes of vLLM's prefix cache. See docs/vllm.md.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.request import Request

from .. import sched as binding
from ..errors import PkvError
from .waiting_queue import WaitingQueue

logger = logging.getLogger("vllm.persistentkv")

ENVIRONMENT = "PERSISTENTKV_VLLM_SCHED"
CONFIG_KEY = "persistentkv_sched"
LEARNERS = ("ucb", "q-learning")
# Said by vLLM's own configuration, not by ours.
_VLLMS = ("chunk_tokens", "page_tokens", "pool_pages", "max_prompt_tokens", "max_rows")
_NUMBERS = tuple(name for name in binding.OPTIONS if name not in _VLLMS)
_REREAD = ("reread_us", "reread_l2_us", "l2_tokens")
SETTINGS = ("order", "policy", "ageing", "learner", *_REREAD, *_NUMBERS)
_DEFAULTS = {"order": "tree", "policy": "always", "max_requests": 1 << 16}
_MAX_PROMPT = 1 << 24


def _value(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def settings(additional: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    """Defaults, the environment's ``name=value,name=value`` over them, the configuration's over it.

    Raises:
        ValueError: a name that no setting has.
    """
    found = dict(_DEFAULTS)
    for part in filter(None, (p.strip() for p in environment.get(ENVIRONMENT, "").split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{ENVIRONMENT}: {part!r} is not name=value")
        found[name.strip()] = _value(value.strip())
    given = additional.get(CONFIG_KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f"additional_config[{CONFIG_KEY!r}] is {given!r}, wanted names and values")
    found.update(given)
    unknown = [name for name in found if name not in SETTINGS]
    if unknown:
        raise ValueError(f"no scheduler setting is called {unknown[0]!r}: {', '.join(SETTINGS)}")
    return found


def step_cost(chosen: Mapping[str, Any]) -> Callable[[binding.Batch], float] | None:
    """Seconds of a step whose kernels read a shared token once a row; None when `chosen` names no
    such cost, and every token counts once.

    The first reading costs cost_token_us, every further one reread_us, or reread_l2_us as far as
    the shared tokens of a layer fit in the cache (l2_tokens).
    """
    if not any(name in chosen for name in _REREAD):
        return None
    base, row, token = (
        float(chosen.get(f"cost_{name}_us", 0.0) or default)
        for name, default in (("base", 5000.0), ("row", 8.0), ("token", 0.03))
    )
    memory = float(chosen.get("reread_us", token))
    cached = float(chosen.get("reread_l2_us", memory))
    fits = float(chosen.get("l2_tokens", 0))

    def cost(batch: binding.Batch) -> float:
        hit = min(1.0, fits / batch.common_tokens) if batch.common_tokens else 1.0
        again = (batch.total_tokens - batch.unique_tokens) * (hit * cached + (1 - hit) * memory)
        return (base + row * batch.rows + token * batch.unique_tokens + again) * 1e-6

    return cost


class _PersistentKV:
    """Over one of vLLM's schedulers."""

    waiting: WaitingQueue
    _learns = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Older releases keep no hash_block_size of their own.
        self._block = getattr(self, "hash_block_size", None) or _hash_block(
            args, kwargs, self.block_size
        )
        self.use(settings(self.vllm_config.additional_config, os.environ))

    def use(self, chosen: Mapping[str, Any]) -> None:
        """Waits by these settings from now on. RuntimeError: there are requests."""
        if self.requests:
            raise RuntimeError(f"{len(self.requests)} requests are held; change the order before")
        by_priority = self.policy == SchedulingPolicy.PRIORITY
        chosen = {**_DEFAULTS, **chosen}
        if by_priority and chosen["order"] == "fcfs":
            raise ValueError("order 'fcfs' ignores priorities, but vLLM's policy is 'priority'")
        if not by_priority and chosen["order"] == "priority":
            raise ValueError("order 'priority' needs vLLM's --scheduling-policy priority")
        self._learner = chosen.pop("learner", None)
        self._learns = chosen["policy"] in LEARNERS
        self._last_output = 0
        longest = min(self.max_model_len, _MAX_PROMPT)
        sched = binding.Scheduler(
            **{name: value for name, value in chosen.items() if name not in _REREAD},
            cost=step_cost(chosen),
            chunk_tokens=self._block,
            page_tokens=self._block,
            max_prompt_tokens=longest,
            max_rows=self.max_num_running_reqs,
        )
        if self._learner and self._learns and os.path.exists(self._learner):
            try:
                sched.load_learner(self._learner)
            except PkvError as e:
                logger.warning("persistentkv: %s is not used: %s", self._learner, e)
        self.waiting = WaitingQueue(sched, self._block, longest, by_priority)
        logger.info("persistentkv: waiting requests by %s", chosen)
        cached = self.cache_config.enable_prefix_caching
        if not cached and chosen["order"] not in ("fcfs", "priority"):
            logger.warning(
                "persistentkv: prefix caching is off, so no request shares with another: the order "
                "is by age"
            )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.waiting.begin_step(self.running)
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._learns:
            self._reward(len(scheduler_output.num_scheduled_tokens))
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _reward(self, rows: int) -> None:
        """A step's time is that between its result and the last one's, idle times left out."""
        now = time.monotonic_ns()
        last, self._last_output = self._last_output, now if rows else 0
        if rows and last:
            self.waiting.sched.reward(rows, max(1, now - last) * 1e-9)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.waiting.ended(request)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        if self._learner and self._learns:
            try:
                self.waiting.sched.save_learner(self._learner)
            except PkvError as e:
                logger.warning("persistentkv: %s was not written: %s", self._learner, e)
        super().shutdown()


def _hash_block(args: tuple[Any, ...], kwargs: Mapping[str, Any], block: int) -> int:
    given = kwargs.get("hash_block_size", args[4] if len(args) > 4 else None)
    return given or block


class PersistentKVScheduler(_PersistentKV, AsyncScheduler):
    """vLLM's AsyncScheduler on our waiting queue."""


class PersistentKVSyncScheduler(_PersistentKV, StockScheduler):
    """vLLM's Scheduler on our waiting queue, for engines without asynchronous scheduling."""
