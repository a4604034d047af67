# SPDX-License-Identifier: Apache-2.0
"""Options by name, as `Engine` and `Scheduler` take them, into the fields of a C struct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import InvalidArgument


def set_options(struct: Any, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Sets the fields; a name that is not known and a value that its C type cannot hold raise."""
    for name, value in options.items():
        if name not in known:
            raise InvalidArgument(f"no option is called {name!r}: {', '.join(known)}")
        try:
            setattr(struct, name, value)
        except (TypeError, OverflowError) as e:
            raise InvalidArgument(f"{name} is {value!r}: {e}") from None
        held = getattr(struct, name)
        if held != value and not (isinstance(value, float) and held == np.float32(value)):
            raise InvalidArgument(f"{name} is {value!r}, which its C type cannot hold")


def index_of(value: str, known: Sequence[str], name: str) -> int:
    """The place of an option's value among the known ones."""
    if value not in known:
        raise InvalidArgument(f"{name} is {value!r}, known are {', '.join(known)}")
    return known.index(value)
