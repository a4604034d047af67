# SPDX-License-Identifier: Apache-2.0
"""libpkv_engine: models and the engine. Loaded when an engine is first asked for.

It is a library of its own beside libpkv, and holds what it needs of that: the attention and
scheduler of this package work without it, and without the libraries that it needs.
"""

from __future__ import annotations

import os
import threading

from ._lib import Library
from .errors import NotSupported

ENVIRONMENT = "PERSISTENTKV_ENGINE_LIBRARY"

_loaded: list[Library] = []
_lock = threading.Lock()


def _path() -> str:
    given = os.environ.get(ENVIRONMENT)
    if given:
        return given
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libpkv_engine.so")
    if not os.path.exists(path):
        raise NotSupported(
            f"{path} is missing: the package was installed where libpcre2-dev, libutf8proc-dev or "
            f"libjansson-dev was not. Install them and the package again (pip install .), or name "
            f"a built library in {ENVIRONMENT}"
        )
    return path


def engine_lib() -> Library:
    """The one loaded libpkv_engine.

    Raises:
        NotSupported: the package was built without it.
        ImportError: it cannot be loaded, or is of another version.
    """
    with _lock:
        if not _loaded:
            _loaded.append(Library(_path(), "pkv_engine_create"))
        return _loaded[0]
