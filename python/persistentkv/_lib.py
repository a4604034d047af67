# SPDX-License-Identifier: Apache-2.0
"""The one loaded libpkv: found, its version checked, its functions typed.

ctypes releases the interpreter's lock during every call.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from . import _abi
from .errors import CLASSES, PkvError

ENVIRONMENT = "PERSISTENTKV_LIBRARY"


class Library:
    """Calls by name: ``lib.call("pkv_plan_size", ...)`` raises what the call refuses with."""

    def __init__(self, path: str, needs: str = "pkv_version_number") -> None:
        self.path = path
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as e:
            raise ImportError(f"libpkv could not be loaded from {path}: {e}") from e
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _abi.FUNCTIONS.items():
            try:
                function = getattr(self._dll, name)
            except AttributeError:
                continue
            function.restype = result
            function.argtypes = arguments
            self._functions[name] = function
        if needs not in self._functions:
            raise ImportError(f"{path} is no libpkv: it has no {needs}")
        self._check_version()

    def _check_version(self) -> None:
        number = self._functions["pkv_version_number"]()
        have = (number // 1000000, number // 1000 % 1000)
        want = (_abi.VERSION_MAJOR, _abi.VERSION_MINOR)
        if have != want:
            raise ImportError(
                f"{self.path} is libpkv {have[0]}.{have[1]}, this package was made for "
                f"{want[0]}.{want[1]}"
            )

    @property
    def version(self) -> str:
        return self._functions["pkv_version"]().decode()

    def has(self, name: str) -> bool:
        """Whether the library that is loaded exports `name` and this package knows its types."""
        return name in self._functions

    def function(self, name: str) -> Any:
        """The bare ctypes function, for calls that cannot fail."""
        return self._functions[name]

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function whose last parameter is a pkv_error; raises when it fails."""
        error = _abi.Error()
        status = self._functions[name](*arguments, ctypes.byref(error))
        if status != _abi.OK:
            raise self.failure(status, error)

    def failure(self, status: int, error: _abi.Error) -> PkvError:
        text = error.text.decode("utf-8", "replace")
        name = self._functions["pkv_status_name"](status).decode()
        where = ctypes.string_at(error.where).decode() if error.where else ""
        return CLASSES.get(status, PkvError)(text or name, name, where)


def sized(struct: type[ctypes.Structure]) -> Any:
    """A zeroed struct (0 means the default everywhere) that knows its size."""
    value = struct()
    value.struct_size = ctypes.sizeof(struct)
    return value


def _find() -> str:
    given = os.environ.get(ENVIRONMENT)
    if given:
        return given
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libpkv.so")
    if not os.path.exists(path):
        raise ImportError(
            f"{path} is missing: install the package (pip install .), or name a built library in "
            f"{ENVIRONMENT}"
        )
    return path


lib = Library(_find())
