"""Differences between NumPy arrays and PyTorch tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]" | torch.Tensor

#: A NumPy array or a PyTorch tensor on the CPU; results are of the same kind as the arguments.
ArrayT = TypeVar("ArrayT")


def is_torch(x: object) -> bool:
    """Return whether x is a PyTorch tensor, without importing PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def needs_grad(*arrays: object) -> bool:
    """Return whether PyTorch records an operator on these arrays."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in arrays)


def tensors(*arrays: Any) -> tuple[Any, ...]:
    """Return NumPy arrays as tensors, for operators that PyTorch records."""
    import torch

    # Copies, for the backward pass: PyTorch does not notice if the caller changes an array before it runs.
    copies = (x.copy() if isinstance(x, np.ndarray) else x for x in arrays)
    return tuple(x if x is None else torch.as_tensor(x) for x in copies)


def empty(like: Any, shape: Sequence[int], dtype: str | None = None) -> Any:
    """Return uninitialized memory of the kind, and by default of the type, of `like`."""
    if is_torch(like):
        import torch

        return torch.empty(tuple(shape), dtype=like.dtype if dtype is None else getattr(torch, dtype))
    return np.empty(tuple(shape), dtype=like.dtype if dtype is None else dtype)


def plain(x: Any) -> Any:
    """Return x as an object that the extension reads: a tensor without its gradient."""
    if is_torch(x):
        if x.device.type != "cpu":
            raise ValueError(f"tensors must be on the CPU, but one is on {x.device}")
        return x.detach()
    return x


def recorded_matrix(x: Any) -> Any:
    """View a tensor [rows, ...] as a contiguous matrix that keeps its gradient."""
    plain(x)  # refuses other devices
    return x.contiguous().reshape(x.shape[0], math.prod(x.shape[1:]))


def contiguous(x: Any) -> Any:
    """Return x, or a contiguous copy if it is not contiguous."""
    return x.contiguous() if is_torch(x) else np.ascontiguousarray(x)


def as_matrix(x: Any, name: str, leading: int = 1) -> Any:
    """View x [rows, ...] as a matrix [rows, columns] with contiguous rows; copies only if it must."""
    if not hasattr(x, "shape"):
        raise TypeError(f"{name} must be a NumPy array or a PyTorch tensor, not {type(x).__name__}")
    shape = tuple(x.shape)
    if len(shape) < leading:
        raise ValueError(f"{name} must have {leading} or more dimensions, but has the shape {shape}")
    rows, columns = math.prod(shape[:leading]), math.prod(shape[leading:])
    x = plain(x)
    if len(shape) == 2 and leading == 1 and _rows_are_contiguous(x):
        return x
    return contiguous(x).reshape(rows, columns)


def _rows_are_contiguous(x: Any) -> bool:
    # A field of records may be apart by a part of its size.
    step = x.stride(1) if is_torch(x) else x.strides[1] / x.itemsize
    apart = x.stride(0) if is_torch(x) else x.strides[0] / x.itemsize
    return bool(step == 1 and (x.shape[0] <= 1 or (apart >= x.shape[1] and float(apart).is_integer())))


def as_index(x: Any, name: str) -> np.ndarray[Any, Any]:
    """Check that x is a vector of int32 or int64, and return it as a contiguous NumPy array."""
    if is_torch(x):
        _check_index(str(x.dtype)[6:] in ("int32", "int64"), x, name)
        # The extension reads a NumPy array in a fraction of the time that it takes for a tensor.
        return np.ascontiguousarray(plain(x).numpy())
    if not hasattr(x, "shape"):
        x = np.asarray(x)
        x = x if x.size > 0 else x.astype(np.int64)
    _check_index(x.dtype == np.int64 or x.dtype == np.int32, x, name)
    return np.ascontiguousarray(x)


def _check_index(is_integer: bool, x: Any, name: str) -> None:
    if not is_integer:
        raise TypeError(f"{name} must have elements of int32 or int64, not {x.dtype}")
    if x.ndim != 1:
        raise ValueError(f"{name} must be a vector, but has the shape {tuple(x.shape)}")


def widen(x: Any) -> Any:
    """Return int32 x as int64, PyTorch's type of indices."""
    return x.long() if is_torch(x) else x.astype(np.int64)
