"""Message passing on graphs: plans, reductions over segments, gspmm, gsddmm and attention over edges.

Features are NumPy arrays or PyTorch tensors on the CPU, of float32, float16 or bfloat16 (PyTorch). Sums are
accumulated in float32. Results are bitwise identical for any number of threads, and of the kind of the
arguments. PyTorch computes gradients through every operator. Arrays are read without copies unless rows are
not contiguous.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import _core, _ops
from ._arrays import ArrayT, as_index, as_matrix, is_torch, needs_grad, plain, recorded_matrix, tensors, widen

__all__ = [
    "Graph",
    "Segments",
    "copy_e",
    "copy_u",
    "edge_attention",
    "edge_softmax",
    "gather",
    "gsddmm",
    "gspmm",
    "index_add",
    "segment_reduce",
    "segment_softmax",
    "u_dot_v",
    "u_mul_e_sum",
]


class Segments:
    """Edges grouped by an index: the plan of reductions, built once and used many times."""

    def __init__(self, index: Any, count: int | None = None) -> None:
        """Group edges by index [E] in [0, count). The default of count is the largest index plus 1."""
        index = as_index(index, "index")
        if count is None:
            count = int(index.max()) + 1 if len(index) > 0 else 0
        self._plan = _core.Segments.from_index(index, count)

    @classmethod
    def from_ptr(cls, ptr: Any, edges: int | None = None) -> Segments:
        """Take edges [ptr[s], ptr[s + 1]) as segment s; ptr is [segments + 1]."""
        ptr = as_index(ptr, "ptr")
        self = cls.__new__(cls)
        self._plan = _core.Segments.from_ptr(ptr, int(ptr[-1]) if edges is None else edges)
        return self

    @property
    def count(self) -> int:
        """Number of segments."""
        return self._plan.count

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self._plan.edges


class Graph:
    """A directed graph with edges src[e] -> dst[e], sorted once by destination and once by source.

    The plan holds a copy of the edges: later changes of src and dst have no effect on it; `matches` detects
    them. Building it costs about 1.7 us per 1000 edges where caches hold its arrays, and 3.0 to 5.1
    where they exceed the caches.
    """

    def __init__(self, src: Any, dst: Any, num_src: int | None = None, num_dst: int | None = None) -> None:
        """Sort edges src [E] -> dst [E], of int32 or int64.

        Both node counts default to the largest index of either array plus 1. No thread may write to the arrays
        during the call.
        """
        src, dst = as_index(src, "src"), as_index(dst, "dst")
        if num_src is None or num_dst is None:
            largest = max((int(x.max()) for x in (src, dst) if len(x) > 0), default=-1) + 1
            num_src, num_dst = (largest if count is None else count for count in (num_src, num_dst))
        self._graph = _core.Graph.from_coo(src, dst, num_src, num_dst)

    @classmethod
    def from_csc(cls, ptr: Any, src: Any, num_src: int) -> Graph:
        """Take edges that are grouped by destination: src[ptr[d]:ptr[d + 1]] are the sources of d."""
        return cls._wrap(_core.Graph.from_csc(as_index(ptr, "ptr"), as_index(src, "src"), num_src))

    @classmethod
    def _wrap(cls, graph: _core.Graph) -> Graph:
        self = cls.__new__(cls)
        self._graph = graph
        return self

    def __reduce__(self) -> Any:
        """Pickle the edges in the caller's order: workers of a data loader return graphs."""
        ptr, sources, edge = self.csc()
        src, dst = np.empty_like(sources), np.empty_like(sources)
        src[edge], dst[edge] = sources, np.repeat(np.arange(self.num_dst, dtype=np.int32), np.diff(ptr))
        return Graph, (src, dst, self.num_src, self.num_dst)

    @property
    def num_src(self) -> int:
        """Number of source nodes."""
        return self._graph.num_src

    @property
    def num_dst(self) -> int:
        """Number of destination nodes."""
        return self._graph.num_dst

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self._graph.num_edges

    def reversed(self) -> Graph:
        """Return the graph with every edge reversed; it shares this plan."""
        return Graph._wrap(self._graph.reversed())

    def matches(self, src: Any, dst: Any) -> bool:
        """Return whether the plan was built from these edges in this order."""
        return self._graph.matches(as_index(src, "src"), as_index(dst, "dst"))

    def csc(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return copies of ptr [num_dst + 1], src [E] and edge [E], the caller's number of each edge."""
        ptr = np.empty(self.num_dst + 1, np.int32)
        src, edge = np.empty(self.num_edges, np.int32), np.empty(self.num_edges, np.int32)
        self._graph.copy_csc(ptr, src, edge)
        return ptr, src, edge


def segment_reduce(segments: Segments, src: ArrayT, reduce: str = "sum", return_arg: bool = False) -> Any:
    """Reduce the rows of every segment.

    Args:
        segments: The plan.
        src: Features [E, ...].
        reduce: "sum", "mean", "max" or "min". Empty segments give 0.
        return_arg: With max and min, also return the edge of every element (int64, like the result). Elements of
            empty segments get E.

    Returns:
        [segments, ...], or a pair with the edges.

    """
    x: Any = src
    rest = tuple(x.shape[1:])
    if needs_grad(x):
        from ._autograd import Segment

        out, arg = Segment.apply(recorded_matrix(x), segments._plan, reduce)
    else:
        out, arg = _ops.segment(segments._plan, reduce, as_matrix(x, "src"))
    out = out.reshape(segments.count, *rest)
    if not return_arg:
        return out
    if not _ops.extreme(reduce):
        raise ValueError(f'"{reduce}" chooses no edges: return_arg needs "max" or "min"')
    return out, widen(arg).reshape(segments.count, *rest)


def gather(segments: Segments, src: ArrayT) -> ArrayT:
    """Repeat row s of src [segments, ...] for every edge of segment s: [E, ...]."""
    x: Any = src
    rest = tuple(x.shape[1:])
    if needs_grad(x):
        from ._autograd import Gather

        out = Gather.apply(recorded_matrix(x), segments._plan)
    else:
        out = _ops.gather(segments._plan, as_matrix(x, "src"))
    result: ArrayT = out.reshape(segments.edges, *rest)
    return result


def segment_softmax(segments: Segments | Graph, x: ArrayT) -> ArrayT:
    """Softmax of x [E, ...] over the edges of each segment, for every column on its own.

    With a graph the segments are the incoming edges of its destinations, as in DGL's edge_softmax.
    """
    a: Any = x
    plan = segments._graph.destinations if isinstance(segments, Graph) else segments._plan
    shape = tuple(a.shape)
    if needs_grad(a):
        from ._autograd import Softmax

        out = Softmax.apply(recorded_matrix(a), plan)
    else:
        out = _ops.softmax(plan, as_matrix(a, "x"))
    result: ArrayT = out.reshape(shape)
    return result


def edge_softmax(graph: Graph, x: ArrayT) -> ArrayT:
    """Softmax of x [E, ...] over the incoming edges of each destination (DGL's name)."""
    return segment_softmax(graph, x)


def index_add(out: ArrayT, index: Any, src: ArrayT, alpha: float = 1.0) -> ArrayT:
    """Add alpha * src[e] to out[index[e]] in place for every e, and return out. Gradients are not recorded.

    out is [N, ...] with contiguous rows, index [E], src [E, ...]. src must not share memory with out.
    """
    o: Any = out
    if needs_grad(o, src):
        raise ValueError("index_add changes its argument: use segment_reduce where gradients are needed")
    plan = _core.Segments.from_index(as_index(index, "index"), o.shape[0])
    view = o.reshape(o.shape[0], math.prod(o.shape[1:])) if o.ndim != 2 else o
    if not is_torch(o) and o.size > 0 and not np.shares_memory(view, o):
        raise ValueError("out must be contiguous")
    if is_torch(o) and view.data_ptr() != o.data_ptr():
        raise ValueError("out must be contiguous")
    _core.segment(plan, "sum", as_matrix(src, "src"), plain(view), None, alpha, 1.0)
    if is_torch(o) and not o.is_inference():
        o[:0].zero_()  # counts the write, which PyTorch does not see: a view shares the version counter
    return out


_MESSAGES = {
    "copy_lhs": "copy_u",
    "copy_u": "copy_u",
    "copy_rhs": "copy_e",
    "copy_e": "copy_e",
    "add": "u_add_e",
    "sub": "u_sub_e",
    "mul": "u_mul_e",
    "div": "u_div_e",
    "dot": "u_dot_e",
}


def _shape(x: Any) -> tuple[int, ...]:
    if not hasattr(x, "shape"):
        raise TypeError(f"features must be a NumPy array or a PyTorch tensor, not {type(x).__name__}")
    return tuple(int(n) for n in x.shape)


def _trailing(x: Any) -> tuple[int, ...]:
    return _shape(x)[1:]


def _edge_columns(u_rest: tuple[int, ...], e_rest: tuple[int, ...]) -> int:
    """Return the columns of e, whose shape equals the first dimensions of u's (then 1s), or fail."""
    kept = e_rest
    while kept and kept[-1] == 1 and (len(kept) > len(u_rest) or u_rest[len(kept) - 1] != 1):
        kept = kept[:-1]
    if kept != u_rest[: len(kept)]:
        raise ValueError(
            f"edge features [E, {', '.join(map(str, e_rest))}] do not fit node features "
            f"[N, {', '.join(map(str, u_rest))}]: they must have the same leading dimensions"
        )
    return math.prod(kept)


def gspmm(
    graph: Graph, op: str, reduce_op: str, lhs_data: ArrayT | None, rhs_data: ArrayT | None, return_arg: bool = False
) -> Any:
    """Gather, combine and reduce in one pass, without storing the messages (DGL's name and arguments).

    Args:
        graph: The plan.
        op: "copy_lhs", "copy_rhs", "add", "sub", "mul", "div" or "dot" (over the last dimension).
        reduce_op: "sum", "mean", "max" or "min". Nodes without edges get 0.
        lhs_data: Source features u [num_src, ...]; None for copy_rhs.
        rhs_data: Edge features e [E, ...]; None for copy_lhs. Their shape may stop early or continue with 1s:
            [E], [E, 1] and [E, heads] weight u [num_src, heads, dim].
        return_arg: With max and min, also return the edge of every element; E where there is none.

    Returns:
        [num_dst, ...] in the shape of u; for "dot" without the last dimension's elements: [num_dst, ..., 1].

    """
    if op not in _MESSAGES:
        raise ValueError(f'unknown operator "{op}"; it is one of {", ".join(_MESSAGES)}')
    message = _MESSAGES[op]
    u: Any = None if message == "copy_e" else lhs_data
    e: Any = None if message == "copy_u" else rhs_data
    if (u is None and message != "copy_e") or (e is None and message != "copy_u"):
        raise ValueError(f'"{op}" needs {"lhs_data" if u is None else "rhs_data"}')
    main = e if message == "copy_e" else u
    rest = _trailing(main)
    heads = 1
    if message == "u_dot_e":
        if _trailing(e) != rest or not rest:
            raise ValueError(f"dot needs equal shapes, but has {tuple(u.shape)} and {tuple(e.shape)}")
        heads = math.prod(rest[:-1])
        out_rest: tuple[int, ...] = (*rest[:-1], 1)
    else:
        out_rest = rest
    columns = math.prod(rest) if e is None or message in ("copy_e", "u_dot_e") else _edge_columns(rest, _trailing(e))
    u2 = None if u is None else _matrix(u, "lhs_data", math.prod(_trailing(u)))
    e2 = None if e is None else _matrix(e, "rhs_data", columns)
    if needs_grad(u, e):
        from ._autograd import Gspmm

        out, arg = Gspmm.apply(*tensors(u2, e2), graph._graph, message, reduce_op, heads)
    else:
        out, arg = _ops.gspmm(graph._graph, message, reduce_op, u2, e2, heads)
    out = out.reshape(graph.num_dst, *out_rest)
    if not return_arg:
        return out
    if not _ops.extreme(reduce_op):
        raise ValueError(f'"{reduce_op}" chooses no edges: return_arg needs "max" or "min"')
    return out, widen(arg).reshape(graph.num_dst, *out_rest)


def _matrix(x: Any, name: str, columns: int) -> Any:
    """View x as [rows, columns]; keeps the gradient of tensors that need it."""
    if needs_grad(x):
        return recorded_matrix(x).reshape(x.shape[0], columns)
    return as_matrix(x, name)


def copy_u(graph: Graph, u: ArrayT, reduce_op: str = "sum") -> Any:
    """Reduce the features u [num_src, ...] of every destination's sources: [num_dst, ...]."""
    return gspmm(graph, "copy_lhs", reduce_op, u, None)


def copy_e(graph: Graph, e: ArrayT, reduce_op: str = "sum") -> Any:
    """Reduce the features e [E, ...] of every destination's incoming edges: [num_dst, ...]."""
    return gspmm(graph, "copy_rhs", reduce_op, None, e)


def u_mul_e_sum(graph: Graph, u: ArrayT, e: ArrayT) -> Any:
    """Sum u [num_src, ...] weighted by e [E] or [E, heads] at destinations: [num_dst, ...]."""
    return gspmm(graph, "mul", "sum", u, e)


_EDGE_OPS = {
    "copy_lhs": "copy",
    "copy_rhs": "copy",
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "dot": "dot",
}


def gsddmm(
    graph: Graph,
    op: str,
    lhs_data: ArrayT | None,
    rhs_data: ArrayT | None,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> Any:
    """Combine features of the ends of every edge (DGL's name and arguments).

    Args:
        graph: The plan.
        op: "copy_lhs", "copy_rhs", "add", "sub", "mul", "div" or "dot" (over the last dimension).
        lhs_data: Features [owners, ...] of the left target.
        rhs_data: Features [owners, ...] of the right target, in the shape of lhs_data, or with fewer leading
            dimensions, which are broadcast over the others.
        lhs_target: Owner of lhs_data: "u" (source), "v" (destination) or "e" (edge).
        rhs_target: Owner of rhs_data.

    Returns:
        [E, ...]; for "dot" [E, ..., 1].

    """
    if op not in _EDGE_OPS:
        raise ValueError(f'unknown operator "{op}"; it is one of {", ".join(_EDGE_OPS)}')
    if op == "copy_rhs":
        lhs_data, lhs_target = rhs_data, rhs_target
    lhs: Any = lhs_data
    rhs: Any = None if op in ("copy_lhs", "copy_rhs") else rhs_data
    if lhs is None or (rhs is None and not op.startswith("copy")):
        raise ValueError(f'"{op}" needs {"lhs_data" if lhs is None else "rhs_data"}')
    rest = _trailing(lhs)
    heads, out_rest = 1, rest
    if op == "dot":
        if _trailing(rhs) != rest or not rest:
            raise ValueError(f"dot needs equal shapes, but has {tuple(lhs.shape)} and {tuple(rhs.shape)}")
        heads, out_rest = math.prod(rest[:-1]), (*rest[:-1], 1)
    columns = math.prod(rest) if rhs is None or op == "dot" else _edge_columns(rest, _trailing(rhs))
    lhs2 = _matrix(lhs, "lhs_data", math.prod(rest))
    rhs2 = None if rhs is None else _matrix(rhs, "rhs_data", columns)
    targets = (lhs_target, rhs_target)
    if needs_grad(lhs, rhs):
        from ._autograd import Gsddmm

        out = Gsddmm.apply(*tensors(lhs2, rhs2), graph._graph, _EDGE_OPS[op], targets, heads)
    else:
        out = _ops.gsddmm(graph._graph, _EDGE_OPS[op], lhs2, rhs2, targets, heads)
    return out.reshape(graph.num_edges, *out_rest)


def u_dot_v(graph: Graph, u: ArrayT, v: ArrayT) -> Any:
    """Return the dot products of u [num_src, ..., D] and v [num_dst, ..., D] of every edge: [E, ..., 1]."""
    return gsddmm(graph, "dot", u, v, "u", "v")


def edge_attention(
    graph: Graph,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    bias: ArrayT | None = None,
    scale: float | None = None,
    k_target: str | None = None,
    v_target: str | None = None,
) -> ArrayT:
    """Attend from every destination to its incoming edges in one pass, with a running softmax.

    Args:
        graph: The plan.
        q: Queries [num_dst, heads, dim].
        k: Keys [num_src, heads, dim] or [E, heads, dim].
        v: Values [num_src, heads, v_dim] or [E, heads, v_dim].
        bias: Added to the scores, [E, heads].
        scale: Multiplies the dot products; 1 / sqrt(dim) by default.
        k_target: Owner of the keys: "u" (source) or "e" (edge). By default the number of rows decides: sources
            own num_src rows, also where num_src equals E.
        v_target: Owner of the values.

    Returns:
        [num_dst, heads, v_dim]; zeros for nodes without edges.

    """
    if any(getattr(x, "ndim", None) != 3 for x in (q, k, v)):
        raise ValueError("q, k and v must be [rows, heads, dim]")
    (_, heads, dim), k_shape, v_shape = _shape(q), _shape(k), _shape(v)
    if k_shape[1:] != (heads, dim) or v_shape[1] != heads:
        raise ValueError(
            f"k and v must be [rows, {heads}, {dim}] and [rows, {heads}, v_dim] as q is, "
            f"but are {k_shape} and {v_shape}"
        )
    targets = (_key_target(graph, k, "k", k_target), _key_target(graph, v, "v", v_target))
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    inputs = [
        None if x is None else _matrix(x, n, math.prod(_trailing(x)))
        for x, n in ((q, "q"), (k, "k"), (v, "v"), (bias, "bias"))
    ]
    if needs_grad(q, k, v, bias):
        from ._autograd import Attention

        out = Attention.apply(*tensors(*inputs), graph._graph, heads, factor, targets)
    else:
        out = _ops.attention(graph._graph, heads, factor, inputs[0], inputs[1], inputs[2], inputs[3], targets)
    result: ArrayT = out.reshape(graph.num_dst, heads, v_shape[2])
    return result


def _key_target(graph: Graph, x: Any, name: str, target: str | None) -> str:
    if target is not None:
        if target not in ("u", "e"):
            raise ValueError(f'{name}_target must be "u" or "e", but is "{target}"')
        return target
    if x.shape[0] == graph.num_src:
        return "u"
    if x.shape[0] == graph.num_edges:
        return "e"
    raise ValueError(
        f"{name} must have {graph.num_src} (sources) or {graph.num_edges} (edges) rows, but has {x.shape[0]}"
    )
