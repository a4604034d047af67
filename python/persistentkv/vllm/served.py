# SPDX-License-Identifier: Apache-2.0
"""Counts what was served: a claim about speed without this count proves nothing.

A decode row of a step counts once for each layer, under "served" or under "fallback". Captured
graphs replay what their build counted, so that the count is by step, not by launch.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import Counter
from typing import Any

ENVIRONMENT = "PERSISTENTKV_VLLM_COUNTERS"  # a path; each process writes PATH.<pid>.json
INTERVAL_S = 5.0  # worker processes may be killed: what is known then has been written before


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written = 0.0
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self.steps = 0
            self.decode_rows = 0
            self.prefill_rows = 0
            self.served = 0  # decode rows * layers
            self.fallback = 0
            self.shared_steps = 0  # steps whose plan was a tree of shared prefixes
            self.reasons: Counter[str] = Counter()  # of fallbacks, in rows * layers

    def step(
        self,
        decode_rows: int,
        prefill_rows: int,
        served_layers: int,
        fallbacks: dict[str, int],
        shared: bool = False,
    ) -> None:
        """One build: fallbacks is {reason: layers}."""
        with self._lock:
            self.steps += 1
            self.decode_rows += decode_rows
            self.prefill_rows += prefill_rows
            self.served += decode_rows * served_layers
            self.shared_steps += int(shared)
            for reason, layers in fallbacks.items():
                self.fallback += decode_rows * layers
                self.reasons[reason] += decode_rows * layers
        path = os.environ.get(ENVIRONMENT)
        if path and time.monotonic() - self._written > INTERVAL_S:
            self.write(path)

    def share(self) -> float:
        """Of all decode rows * layers, the part that libpkv served; 0 when there were none."""
        total = self.served + self.fallback
        return self.served / total if total else 0.0

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {
                "pid": os.getpid(),
                "steps": self.steps,
                "decode_rows": self.decode_rows,
                "prefill_rows": self.prefill_rows,
                "served_row_layers": self.served,
                "fallback_row_layers": self.fallback,
                "served_share": self.share(),
                "shared_steps": self.shared_steps,
                "fallback_reasons": dict(self.reasons),
            }

    def write(self, path: str) -> str:
        """Writes PATH.<pid>.json, whole or not at all; returns its name."""
        self._written = time.monotonic()
        name = f"{path}.{os.getpid()}.json"
        with open(f"{name}.part", "w", encoding="utf-8") as f:
            json.dump(self.snapshot(), f, indent=1)
        os.replace(f"{name}.part", name)
        return name


COUNTERS = Counters()


@atexit.register
def _at_exit() -> None:
    path = os.environ.get(ENVIRONMENT)
    if path and COUNTERS.steps:
        COUNTERS.write(path)
