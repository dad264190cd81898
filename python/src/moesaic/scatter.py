"""The functions of torch_scatter, with its names and arguments, for PyTorch tensors and NumPy arrays.

    from moesaic.scatter import scatter_sum, segment_csr

Differences from torch_scatter: features are float32, float16 or bfloat16; NaN wins in max and min; scatter_logsumexp
of NaN is NaN, where torch_scatter returns 0 or the value of `out`, and keeps values of `out` whose index does not
occur, where torch_scatter writes 0; elements of a group that is -inf everywhere (masked) have the softmax 0 and its
logarithm -inf, not NaN; results are the same for any number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import graph
from ._arrays import is_torch
from .graph import Segments, segment_reduce

__all__ = [
    "gather_coo",
    "gather_csr",
    "scatter",
    "scatter_add",
    "scatter_log_softmax",
    "scatter_logsumexp",
    "scatter_max",
    "scatter_mean",
    "scatter_min",
    "scatter_mul",
    "scatter_softmax",
    "scatter_std",
    "scatter_sum",
    "segment_add_coo",
    "segment_add_csr",
    "segment_coo",
    "segment_csr",
    "segment_max_coo",
    "segment_max_csr",
    "segment_mean_coo",
    "segment_mean_csr",
    "segment_min_coo",
    "segment_min_csr",
    "segment_sum_coo",
    "segment_sum_csr",
]


def _where(condition: Any, a: Any, b: Any) -> Any:
    if is_torch(condition):
        import torch

        return torch.where(condition, a, b)
    return np.where(condition, a, b)


def _move(x: Any, source: int, target: int) -> Any:
    return x.movedim(source, target) if is_torch(x) else np.moveaxis(x, source, target)


def _is_nan(x: Any) -> Any:
    return x.isnan() if is_torch(x) else np.isnan(x)


def _zeros_like(x: Any) -> Any:
    return x.new_zeros(x.shape) if is_torch(x) else np.zeros_like(x)


def _check_range(index: Any, size: int) -> None:
    """Check every element of an index: NumPy and PyTorch wrap negative ones."""
    if math.prod(index.shape) > 0 and (int(index.min()) < 0 or int(index.max()) >= size):
        raise ValueError(f"index must be in [0, {size}), but has {int(index.min())} to {int(index.max())}")


def _arange_like(x: Any, count: int) -> Any:
    if is_torch(x):
        import torch

        return torch.arange(count)
    return np.arange(count)


def _axis(x: Any, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"dim must be in [{-x.ndim}, {x.ndim}), but is {dim}")
    return dim % int(x.ndim)


def _broadcast(src: Any, index: Any, dim: int) -> Any:
    """Broadcast index to src as torch_scatter does: a vector along `dim`, more dimensions from the first one on."""
    if index.ndim > src.ndim:
        raise ValueError(f"index has {index.ndim} dimensions, more than the {src.ndim} of src")
    before = dim if index.ndim == 1 else 0
    shape = (1,) * before + tuple(index.shape) + (1,) * (src.ndim - before - index.ndim)
    if any(n not in (1, size) for n, size in zip(shape, src.shape, strict=True)):
        raise ValueError(f"index {tuple(index.shape)} does not fit src {tuple(src.shape)} along dim {dim}")
    index = index.reshape(shape)
    return index.expand(src.shape) if is_torch(index) else np.broadcast_to(index, src.shape)


def _shared_index(index: Any, dim: int) -> Any | None:
    """Return the vector along `dim` if all other positions share it, otherwise None."""
    steps = tuple(index.stride()) if is_torch(index) else index.strides
    shared = all(i == dim or n == 1 or (n > 0 and steps[i] == 0) for i, n in enumerate(index.shape))
    if not shared:
        return None
    return index[tuple(slice(None) if i == dim else 0 for i in range(index.ndim))]


class _Plan:
    """A scatter along one dimension as segments of a matrix."""

    def __init__(self, src: Any, index: Any, dim: int, dim_size: int | None) -> None:
        self.dim = _axis(src, dim)
        if dim_size is None:
            dim_size = int(index.max()) + 1 if math.prod(index.shape) > 0 else 0
        self.size = dim_size
        moved = tuple(src.shape[i] for i in range(src.ndim) if i != self.dim)
        self.rest, self.length = moved, int(src.shape[self.dim])
        if index.ndim == 1 and index.shape[0] != self.length:
            raise ValueError(f"index must have {self.length} elements along dim, but has {index.shape[0]}")
        full = _broadcast(src, index, self.dim)
        shared = index if index.ndim == 1 else _shared_index(full, self.dim)
        self.flat = shared is None
        if shared is None:
            # Every element has an index of its own: segments of single elements.
            width = math.prod(moved)
            lines = _move(full, self.dim, 0).reshape(self.length, width)
            columns = _arange_like(index, width)
            _check_range(lines, dim_size)
            self.segments = Segments((lines * width + columns).reshape(-1), dim_size * width)
        else:
            self.segments = Segments(shared, dim_size)

    def enter(self, src: Any) -> Any:
        """Return src as [edges, ...] of the plan."""
        moved = _move(src, self.dim, 0)
        return moved.reshape(-1, 1) if self.flat else moved

    def leave(self, out: Any) -> Any:
        """Return a result of the plan in the shape of scatter's result."""
        return _move(out.reshape(self.size, *self.rest), 0, self.dim)

    def enter_result(self, x: Any) -> Any:
        """Return an array in the shape of scatter's result as [segments, ...]."""
        moved = _move(x, self.dim, 0)
        return moved.reshape(-1, 1) if self.flat else moved

    def leave_edges(self, x: Any) -> Any:
        """Return [edges, ...] in the shape of src."""
        return _move(x.reshape(self.length, *self.rest), 0, self.dim)

    def positions(self, arg: Any) -> Any:
        """Return chosen edges as positions along dim; the length of dim where there is none."""
        if not self.flat:
            return self.leave(arg)
        return self.leave(arg // max(1, math.prod(self.rest)))


def _sized(out: Any | None, dim: int, dim_size: int | None, src: Any) -> int | None:
    return dim_size if out is None else int(out.shape[_axis(src, dim)])


def _into(out: Any | None, value: Any) -> Any:
    if out is None:
        return value
    out += value
    return out


def scatter_sum(src: Any, index: Any, dim: int = -1, out: Any | None = None, dim_size: int | None = None) -> Any:
    """Add src along `dim` into positions index (a vector, or the first dimensions of src); adds to `out` if given.

    src is [..., L, ...] with L along dim; the result has dim_size (by default the largest index plus 1) there.
    """
    plan = _Plan(src, index, dim, _sized(out, dim, dim_size, src))
    return _into(out, plan.leave(segment_reduce(plan.segments, plan.enter(src), "sum")))


scatter_add = scatter_sum


def scatter_mean(src: Any, index: Any, dim: int = -1, out: Any | None = None, dim_size: int | None = None) -> Any:
    """Average src along `dim` by index. With `out`, its values are added before the division."""
    plan = _Plan(src, index, dim, _sized(out, dim, dim_size, src))
    if out is None:
        return plan.leave(segment_reduce(plan.segments, plan.enter(src), "mean"))
    count = segment_reduce(plan.segments, np.ones((plan.segments.edges, 1), np.float32), "sum").clip(1)
    if is_torch(out):
        import torch

        count = torch.from_numpy(count)
    out += plan.leave(segment_reduce(plan.segments, plan.enter(src), "sum"))
    shape = (plan.size, *plan.rest) if plan.flat else (plan.size, *(1,) * len(plan.rest))
    count = _move(count.reshape(shape), 0, plan.dim)
    if is_torch(out):
        out /= count
    else:
        np.divide(out, count, out=out, casting="same_kind")  # the count may exceed float16
    return out


def _extreme(kind: str, src: Any, index: Any, dim: int, out: Any | None, dim_size: int | None) -> tuple[Any, Any]:
    plan = _Plan(src, index, dim, _sized(out, dim, dim_size, src))
    value, arg = segment_reduce(plan.segments, plan.enter(src), kind, return_arg=True)
    value, arg = plan.leave(value), plan.positions(arg)
    if out is None:
        return value, arg
    better = ((value > out if kind == "max" else value < out) | (_is_nan(value) & ~_is_nan(out))) & (arg < plan.length)
    out[...] = _where(better, value, out)
    return out, _where(better, arg, arg * 0 + plan.length)


def scatter_max(
    src: Any, index: Any, dim: int = -1, out: Any | None = None, dim_size: int | None = None
) -> tuple[Any, Any]:
    """Return the maximum by index and its position along `dim` (the length of dim where there is none).

    Values of `out` take part, and the result is written into it; they have no position.
    """
    return _extreme("max", src, index, dim, out, dim_size)


def scatter_min(
    src: Any, index: Any, dim: int = -1, out: Any | None = None, dim_size: int | None = None
) -> tuple[Any, Any]:
    """Return the minimum by index and its position along `dim` (the length of dim where there is none).

    Values of `out` take part, and the result is written into it; they have no position.
    """
    return _extreme("min", src, index, dim, out, dim_size)


def scatter_mul(src: Any, index: Any, dim: int = -1, out: Any | None = None, dim_size: int | None = None) -> Any:
    """Multiply src along `dim` by index, and `out` if given; positions without elements get 1.

    Uses the array library's own scatter.
    """
    axis = _axis(src, dim)
    size = _sized(out, dim, dim_size, src)
    if size is None:
        size = int(index.max()) + 1 if math.prod(index.shape) > 0 else 0
    shape = tuple(size if i == axis else n for i, n in enumerate(src.shape))
    full = _broadcast(src, index, axis)
    _check_range(full, size)
    if is_torch(src):
        start = src.new_ones(shape) if out is None else out
        return _store(out, start.scatter_reduce(axis, full.long(), src, "prod"))
    result = np.ones(shape, src.dtype) if out is None else out
    places = list(np.ogrid[tuple(slice(n) for n in src.shape)])
    places[axis] = full
    np.multiply.at(result, tuple(places), src)
    return result


def scatter(
    src: Any, index: Any, dim: int = -1, out: Any | None = None, dim_size: int | None = None, reduce: str = "sum"
) -> Any:
    """Reduce src along `dim` by index: "sum" ("add"), "mean", "mul", "max" or "min" (without positions)."""
    if reduce in ("max", "min"):
        return _extreme(reduce, src, index, dim, out, dim_size)[0]
    functions = {"sum": scatter_sum, "add": scatter_sum, "mean": scatter_mean, "mul": scatter_mul}
    if reduce not in functions:
        raise ValueError(f'unknown reduction "{reduce}"; it is one of sum, add, mean, mul, max, min')
    return functions[reduce](src, index, dim, out, dim_size)


def scatter_softmax(src: Any, index: Any, dim: int = -1, dim_size: int | None = None) -> Any:
    """Softmax over the elements along `dim` that share an index, in the shape of src."""
    plan = _Plan(src, index, dim, dim_size)
    return plan.leave_edges(graph.segment_softmax(plan.segments, plan.enter(src)))


def _shifted(plan: _Plan, src: Any) -> tuple[Any, Any, Any]:
    """Return src minus its segment's maximum, the maximum, and the sum of exponentials, in the plan's shapes."""
    x = plan.enter(src)
    top = segment_reduce(plan.segments, x.detach() if is_torch(x) else x, "max")
    top = _where(top == -math.inf, _zeros_like(top), top)  # -inf minus itself is NaN
    shifted = x - graph.gather(plan.segments, top)
    exponent = shifted.exp() if is_torch(shifted) else np.exp(shifted)
    return shifted, top, segment_reduce(plan.segments, exponent, "sum")


def _log(total: Any, eps: float) -> Any:
    """Return the logarithm of total + eps; 0 where the total is 0, as eps is in float16."""
    ones = _zeros_like(total) + 1
    if is_torch(total):
        return _where(total == 0, ones, total + eps).log()
    return np.log(_where(total == 0, ones, total + np.asarray(eps, total.dtype)))


def scatter_log_softmax(src: Any, index: Any, dim: int = -1, eps: float = 1e-12, dim_size: int | None = None) -> Any:
    """Logarithm of scatter_softmax, in the shape of src."""
    plan = _Plan(src, index, dim, dim_size)
    shifted, _, total = _shifted(plan, src)
    return plan.leave_edges(shifted - graph.gather(plan.segments, _log(total, eps)))


def scatter_logsumexp(
    src: Any, index: Any, dim: int = -1, out: Any | None = None, dim_size: int | None = None, eps: float = 1e-12
) -> Any:
    """Logarithm of the sum of exponentials by index; 0 where all elements are -inf or there is none.

    Values of `out` take part, and the result is written into it; they remain where it would be 0 otherwise.
    """
    plan = _Plan(src, index, dim, _sized(out, dim, dim_size, src))
    _, top, total = _shifted(plan, src)
    value = plan.leave(_where(total > 0, _log(total, eps) + top, top * 0))
    if out is None:
        return value
    # A sum that is NaN is not 0.
    return _store(out, _where(plan.leave(total != 0), _log_add_exp(out, value), out))


def _log_add_exp(a: Any, b: Any) -> Any:
    """Return log(exp(a) + exp(b)) in float32; a may be written to afterwards."""
    if is_torch(a):
        import torch

        return torch.logaddexp(a.to(torch.float32, copy=True), b.float()).to(a.dtype)
    with np.errstate(invalid="ignore"):  # NaN remains NaN
        return np.logaddexp(a, b, dtype=np.float32)


def scatter_std(
    src: Any,
    index: Any,
    dim: int = -1,
    out: Any | None = None,
    dim_size: int | None = None,
    unbiased: bool = True,
) -> Any:
    """Standard deviation by index, divided by count - 1 (at least 1) if unbiased, else by count.

    With `out`, its values are added to the sums of squares before the division, and the result is written into it.
    """
    plan = _Plan(src, index, dim, _sized(out, dim, dim_size, src))
    x = plan.enter(src)
    if str(x.dtype).removeprefix("torch.") in ("float16", "bfloat16"):  # squares and counts may exceed float16
        x = x.float() if is_torch(x) else x.astype(np.float32)
    difference = x - graph.gather(plan.segments, segment_reduce(plan.segments, x, "mean"))
    squares = segment_reduce(plan.segments, difference * difference, "sum")
    if out is not None:
        squares = squares + plan.enter_result(out)
    ones = x * 0 + 1
    count = segment_reduce(plan.segments, ones.detach() if is_torch(ones) else ones, "sum")
    if unbiased:
        count = count - 1
    count = count.clamp(min=1) if is_torch(count) else np.maximum(count, 1)
    ratio = squares / (count + 1e-6)
    deviation = ratio.sqrt().to(src.dtype) if is_torch(ratio) else np.sqrt(ratio).astype(src.dtype)
    return _store(out, plan.leave(deviation))


def segment_coo(src: Any, index: Any, out: Any | None = None, dim_size: int | None = None, reduce: str = "sum") -> Any:
    """Reduce src along the last dimension of index, whose elements are sorted."""
    return scatter(src, index, index.ndim - 1, out, dim_size, reduce)


def segment_sum_coo(src: Any, index: Any, out: Any | None = None, dim_size: int | None = None) -> Any:
    """Sum src along the last dimension of index."""
    return segment_coo(src, index, out, dim_size, "sum")


segment_add_coo = segment_sum_coo


def segment_mean_coo(src: Any, index: Any, out: Any | None = None, dim_size: int | None = None) -> Any:
    """Average src along the last dimension of index."""
    return segment_coo(src, index, out, dim_size, "mean")


def segment_max_coo(src: Any, index: Any, out: Any | None = None, dim_size: int | None = None) -> tuple[Any, Any]:
    """Return maxima along the last dimension of index, and their positions."""
    return _extreme("max", src, index, index.ndim - 1, out, dim_size)


def segment_min_coo(src: Any, index: Any, out: Any | None = None, dim_size: int | None = None) -> tuple[Any, Any]:
    """Return minima along the last dimension of index, and their positions."""
    return _extreme("min", src, index, index.ndim - 1, out, dim_size)


def gather_coo(src: Any, index: Any, out: Any | None = None) -> Any:
    """Return src[index] along the last dimension of index."""
    dim = index.ndim - 1
    if dim == 0:
        return _store(out, graph.gather(Segments(index, src.shape[0]), src))
    index = _over_batches(index, src, "index")
    _check_range(index, src.shape[dim])
    full = index.reshape(tuple(index.shape) + (1,) * (src.ndim - index.ndim))
    if is_torch(src):
        shape = tuple(index.shape) + tuple(src.shape[index.ndim :])
        return _store(out, src.gather(dim, full.expand(shape).long()))
    return _store(out, np.take_along_axis(src, full, dim))


def _over_batches(x: Any, src: Any, name: str) -> Any:
    """Expand all dimensions of an index or of pointers but the last to those of src, as torch_scatter does."""
    if x.ndim > src.ndim:
        raise ValueError(f"{name} has {x.ndim} dimensions, more than the {src.ndim} of src")
    batches = tuple(src.shape[: x.ndim - 1])
    if any(n not in (1, size) for n, size in zip(x.shape, batches, strict=False)):
        raise ValueError(f"{name} {tuple(x.shape)} does not fit the batches of src {tuple(src.shape)}")
    shape = (*batches, x.shape[-1])
    return x.expand(shape) if is_torch(x) else np.broadcast_to(x, shape)


def _batched(function: Any, src: Any, indptr: Any, length: int) -> Any:
    """Apply a function of (src, vector) to every batch of a matrix of pointers.

    Without batches, results have this length along the dimension of the segments.
    """
    indptr = _over_batches(indptr, src, "indptr")
    if math.prod(indptr.shape[:-1]) == 0:
        return src.reshape(-1)[:0].reshape(*indptr.shape[:-1], length, *src.shape[indptr.ndim :])
    parts = [function(src[i], indptr[i]) for i in range(indptr.shape[0])]
    if isinstance(parts[0], tuple):
        return tuple(_stack([part[i] for part in parts]) for i in range(len(parts[0])))
    return _stack(parts)


def _stack(parts: list[Any]) -> Any:
    if is_torch(parts[0]):
        import torch

        return torch.stack(parts)
    return np.stack(parts)


def _positions_like(x: Any) -> Any:
    return x.long() if is_torch(x) else x.astype(np.int64)


def _segment_csr(src: Any, indptr: Any, reduce: str) -> Any:
    """Reduce as segment_csr does; max and min return positions too."""
    if indptr.ndim > 1:
        found = _batched(lambda x, ptr: _segment_csr(x, ptr, reduce), src, indptr, max(0, indptr.shape[-1] - 1))
        return found if isinstance(found, tuple) or reduce not in ("max", "min") else (found, _positions_like(found))
    if indptr.shape[0] == 0:
        indptr = _arange_like(indptr, 1)  # no segments
    first, last = int(indptr[0]), int(indptr[-1])
    if first < 0:
        raise ValueError(f"indptr[0] must be 0 or more, but is {first}")
    segments = Segments.from_ptr(indptr - first, last - first)
    if reduce not in ("max", "min"):
        return segment_reduce(segments, src[first:last], "sum" if reduce == "add" else reduce)
    value, arg = segment_reduce(segments, src[first:last], reduce, return_arg=True)
    return value, _where(arg == last - first, arg * 0 + src.shape[indptr.ndim - 1], arg + first)


def _store(out: Any | None, value: Any) -> Any:
    if out is None:
        return value
    out[...] = value
    return out


def segment_csr(src: Any, indptr: Any, out: Any | None = None, reduce: str = "sum") -> Any:
    """Reduce src[..., indptr[i]:indptr[i + 1], ...] along the last dimension of indptr.

    Elements outside of all segments are ignored.
    """
    value = _segment_csr(src, indptr, reduce)
    return _store(out, value[0] if reduce in ("max", "min") else value)


def segment_sum_csr(src: Any, indptr: Any, out: Any | None = None) -> Any:
    """Sum segments of src."""
    return segment_csr(src, indptr, out, "sum")


segment_add_csr = segment_sum_csr


def segment_mean_csr(src: Any, indptr: Any, out: Any | None = None) -> Any:
    """Average segments of src."""
    return segment_csr(src, indptr, out, "mean")


def segment_max_csr(src: Any, indptr: Any, out: Any | None = None) -> tuple[Any, Any]:
    """Return maxima of segments of src, and their positions."""
    value, arg = _segment_csr(src, indptr, "max")
    return _store(out, value), arg


def segment_min_csr(src: Any, indptr: Any, out: Any | None = None) -> tuple[Any, Any]:
    """Return minima of segments of src, and their positions."""
    value, arg = _segment_csr(src, indptr, "min")
    return _store(out, value), arg


def gather_csr(src: Any, indptr: Any, out: Any | None = None) -> Any:
    """Repeat src[..., i, ...] indptr[i + 1] - indptr[i] times along the last dimension of indptr."""
    if indptr.ndim > 1:
        picked = _batched(gather_csr, src, indptr, 0)
    else:
        if indptr.shape[0] == 0:
            indptr = _arange_like(indptr, 1)  # no segments
        picked = graph.gather(Segments.from_ptr(indptr), src)
    return _store(out, picked)
