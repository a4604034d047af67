# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays and torch tensors as the library sees them: pointer, shape, strides, element type.

torch is never imported here: a tensor can only come from a torch that is already there.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from . import _abi
from .errors import InvalidArgument, NotSupported

_NAMES = {
    "float32": _abi.DTYPE_F32,
    "float": _abi.DTYPE_F32,
    "f32": _abi.DTYPE_F32,
    "float16": _abi.DTYPE_F16,
    "half": _abi.DTYPE_F16,
    "f16": _abi.DTYPE_F16,
    "bfloat16": _abi.DTYPE_BF16,
    "bf16": _abi.DTYPE_BF16,
    "float8_e4m3fn": _abi.DTYPE_FP8_E4M3,
    "fp8_e4m3": _abi.DTYPE_FP8_E4M3,
    "fp8": _abi.DTYPE_FP8_E4M3,
}
_TITLES = {
    _abi.DTYPE_F32: "float32",
    _abi.DTYPE_F16: "float16",
    _abi.DTYPE_BF16: "bfloat16",
    _abi.DTYPE_FP8_E4M3: "float8_e4m3fn",
}
BYTES = {
    _abi.DTYPE_F32: 4,
    _abi.DTYPE_F16: 2,
    _abi.DTYPE_BF16: 2,
    _abi.DTYPE_FP8_E4M3: 1,
}
# Plain integers stand for a type that NumPy has no name for: the caller says which.
_CARRIERS = {"uint16": (_abi.DTYPE_BF16, _abi.DTYPE_F16), "uint8": (_abi.DTYPE_FP8_E4M3,)}


def dtype_title(code: int) -> str:
    return _TITLES[code]


def dtype_code(spec: Any, name: str) -> int:
    """The library's code of a dtype given as a string, a NumPy or a torch dtype."""
    text = str(spec).removeprefix("torch.") if not isinstance(spec, type) else np.dtype(spec).name
    if text not in _NAMES:
        raise NotSupported(
            f"{name} is {spec}, supported are float32, float16, bfloat16 and float8_e4m3fn"
        )
    return _NAMES[text]


class View(NamedTuple):
    """Borrowed: `owner` keeps the memory alive."""

    owner: Any
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    element: str  # NumPy's name of the element type, as "float16"
    device: str  # "cpu" or "cuda:N"

    @property
    def is_torch(self) -> bool:
        return not isinstance(self.owner, np.ndarray)


def is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def view(x: Any, name: str) -> View:
    """Looks at an array without copying it."""
    if isinstance(x, np.ndarray):
        size = x.itemsize
        if any(stride % size for stride in x.strides):
            raise InvalidArgument(f"{name}: its strides are not whole elements")
        strides = tuple(stride // size for stride in x.strides)
        return View(x, x.ctypes.data, x.shape, strides, x.dtype.name, "cpu")
    if is_tensor(x):
        if x.device.type not in ("cpu", "cuda"):
            raise NotSupported(f"{name} lies on device {x.device}, supported are cpu and cuda")
        device = "cpu" if x.device.type == "cpu" else f"cuda:{x.device.index or 0}"
        element = str(x.dtype).removeprefix("torch.")
        return View(x, x.data_ptr(), tuple(x.shape), tuple(x.stride()), element, device)
    raise InvalidArgument(f"{name} is a {type(x).__name__}, wanted a NumPy array or a torch tensor")


def code_of(v: View, name: str, declared: int | None = None) -> int:
    """The library's code of a view's elements; integers need `declared`."""
    carried = _CARRIERS.get(v.element)
    if carried is not None:
        if declared is None or declared not in carried:
            said = "nothing" if declared is None else dtype_title(declared)
            raise InvalidArgument(
                f"{name} holds {v.element}: as {' or '.join(_TITLES[c] for c in carried)} it must "
                f"be declared in plan() (declared: {said})"
            )
        return declared
    code = dtype_code(v.element, f"{name}.dtype")
    if declared is not None and code != declared:
        raise InvalidArgument(
            f"{name} holds {dtype_title(code)}, declared in plan(): {dtype_title(declared)}"
        )
    return code


def integers(x: Any, name: str, count: int | None = None) -> np.ndarray:
    """A contiguous int32 [count] on the host; a device tensor is waited for."""
    if is_tensor(x):
        x = x.detach().cpu().numpy()
    array = np.asarray(x)
    if array.ndim != 1 or (array.size > 0 and array.dtype.kind not in "iu"):
        raise InvalidArgument(f"{name} must be integers [n], not {array.dtype} {array.shape}")
    if count is not None and array.shape[0] != count:
        raise InvalidArgument(f"{name} has {array.shape[0]} entries, wanted {count}")
    out = np.ascontiguousarray(array, dtype=np.int32)
    if array.dtype.itemsize > 4 and not np.array_equal(out, array):
        raise InvalidArgument(f"{name} holds values beyond int32")
    return out


def empty_like(like: View, shape: tuple[int, ...], element: str) -> Any:
    """An uninitialised array of the same kind on the same device."""
    if like.is_torch:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, element), device=like.owner.device)
    return np.empty(shape, dtype=element if element != "bfloat16" else np.uint16)


def aligned(size: int) -> tuple[np.ndarray, int]:
    """(owner, address) of `size` bytes aligned to 64, uninitialised."""
    owner = np.empty(size + 64, dtype=np.uint8)
    return owner, (owner.ctypes.data + 63) & ~63
