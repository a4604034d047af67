# SPDX-License-Identifier: Apache-2.0
"""The plug-in that puts libpkv's decode attention into vLLM.

Installed with the package (entry point ``vllm.general_plugins``), it adds an attention backend:

    vllm serve MODEL --attention-backend CUSTOM            # vLLM 0.24
    vllm serve MODEL --attention-backend PERSISTENTKV      # vLLM 0.33

Decode rows go through libpkv, prefill rows through vLLM's own FlashAttention backend. What libpkv
cannot serve goes to that backend too, by layer, with a logged reason. See docs/vllm.md.
"""

from __future__ import annotations

import logging

from .served import COUNTERS, Counters

logger = logging.getLogger("vllm.persistentkv")

# vLLM's (major, minor) -> the backend's name there. 0.24 registers overrides of known names only.
NAMES = {(0, 24): "CUSTOM", (0, 33): "PERSISTENTKV"}
CLASS = "persistentkv.vllm.paged_backend.PersistentKVBackend"

__all__ = ["CLASS", "COUNTERS", "NAMES", "Counters", "backend_name", "register", "refusal"]


def _release(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not parts[0].isdigit() or not parts[1].isdigit():
        return None
    return int(parts[0]), int(parts[1])


def refusal(version: str) -> str:
    """Why this plug-in does not register with a vLLM of that version; "" when it does."""
    if _release(version) in NAMES:
        return ""
    known = ", ".join(f"{a}.{b}" for a, b in NAMES)
    return (
        f"persistentkv's attention backend was made for vLLM {known}; this is {version}: it is not "
        f"registered, and vLLM runs without it"
    )


def backend_name(version: str | None = None) -> str:
    """What to give to --attention-backend."""
    if version is None:
        import vllm

        version = vllm.__version__
    release = _release(version)
    if release not in NAMES:
        raise RuntimeError(refusal(version))
    return NAMES[release]


def register() -> None:
    """The entry point; may be called any number of times, in every process of vLLM."""
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    why_not = refusal(vllm.__version__)
    if why_not:
        logger.warning(why_not)
        return
    name = backend_name(vllm.__version__)
    member = AttentionBackendEnum.__members__.get(name)
    if member is None:
        register_backend(name, CLASS)
        return
    try:
        taken = member.get_path()
    except ValueError:
        taken = CLASS  # reserved, and nobody's yet
    if taken != CLASS:
        logger.warning("attention backend %s is %s already: persistentkv leaves it", name, taken)
        return
    register_backend(member, CLASS)
