# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one class a status of libpkv, each also the builtin that Python users catch.

The message is the library's own text: it names the argument, what was given and what is possible.
"""

from __future__ import annotations

from . import _abi


class PkvError(Exception):
    """A call of libpkv that failed.

    Attributes:
        status: the code's name, as "E_INVALID".
        where: the C function that refused; "" when the refusal is this package's own.
    """

    default_status = "E_INTERNAL"

    def __init__(self, text: str, status: str | None = None, where: str = "") -> None:
        super().__init__(text)
        self.status = status or self.default_status
        self.where = where


class InvalidArgument(PkvError, ValueError):
    """An argument that cannot be meant: a wrong shape, stride, type or pointer."""

    default_status = "E_INVALID"


class OutOfRange(PkvError, ValueError):
    """A length, page id or count beyond what the call was set up for."""

    default_status = "E_RANGE"


class NotSupported(PkvError, NotImplementedError):
    """A wish that this build or this version does not grant. Nothing was computed."""

    default_status = "E_UNSUPPORTED"


class OutOfMemory(PkvError, MemoryError):
    """No host or device memory, or no free pages."""

    default_status = "E_NOMEM"


class WrongState(PkvError, RuntimeError):
    """A call that is not allowed now: run before plan, a handle of another process."""

    default_status = "E_STATE"


class DeviceError(PkvError, RuntimeError):
    """The device or its driver failed."""

    default_status = "E_DEVICE"


CLASSES: dict[int, type[PkvError]] = {
    _abi.E_INVALID: InvalidArgument,
    _abi.E_FORMAT: InvalidArgument,
    _abi.E_RANGE: OutOfRange,
    _abi.E_LIMIT: OutOfRange,
    _abi.E_UNSUPPORTED: NotSupported,
    _abi.E_NOMEM: OutOfMemory,
    _abi.E_NO_PAGES: OutOfMemory,
    _abi.E_TOO_SMALL: InvalidArgument,
    _abi.E_STATE: WrongState,
    _abi.E_DEVICE: DeviceError,
}
