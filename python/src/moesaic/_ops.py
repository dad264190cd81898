"""Operators on matrices: outputs are allocated here; gradients are in _autograd.py."""

from __future__ import annotations

from typing import Any

from . import _core
from ._arrays import empty


def extreme(reduce: str) -> bool:
    """Return whether a reduction chooses an edge."""
    return reduce in ("max", "min")


def segment(plan: _core.Segments, reduce: str, src: Any) -> tuple[Any, Any | None]:
    """Reduce src [E, K] to [N, K]; with max and min also return the chosen edges [N, K]."""
    out = empty(src, (plan.count, src.shape[1]))
    arg = empty(src, out.shape, "int32") if extreme(reduce) else None
    _core.segment(plan, reduce, src, out, arg, 1.0, 0.0)
    return out, arg


def segment_backward(plan: _core.Segments, reduce: str, grad: Any, arg: Any | None) -> Any:
    """Return the gradient [E, K] of segment's input."""
    src_grad = empty(grad, (plan.edges, grad.shape[1]))
    _core.segment_backward(plan, reduce, grad, arg, src_grad)
    return src_grad


def gather(plan: _core.Segments, src: Any) -> Any:
    """Repeat rows of src [N, K] for the edges of every segment: [E, K]."""
    out = empty(src, (plan.edges, src.shape[1]))
    _core.gather(plan, src, out)
    return out


def softmax(plan: _core.Segments, x: Any) -> Any:
    """Return the softmax of x [E, H] within segments."""
    out = empty(x, x.shape)
    _core.segment_softmax(plan, x, out)
    return out


def softmax_backward(plan: _core.Segments, y: Any, grad: Any) -> Any:
    """Return the gradient of softmax's input for its result y."""
    out = empty(y, y.shape)
    _core.segment_softmax_backward(plan, y, grad, out)
    return out


def gspmm(
    graph: _core.Graph, message: str, reduce: str, u: Any | None, e: Any | None, heads: int
) -> tuple[Any, Any | None]:
    """Reduce messages at destinations; see moesaic.graph.gspmm."""
    main = e if message == "copy_e" else u
    assert main is not None
    out = empty(main, (graph.num_dst, heads if message == "u_dot_e" else main.shape[1]))
    arg = empty(main, out.shape, "int32") if extreme(reduce) else None
    _core.gspmm(graph, message, reduce, u, e, out, arg)
    return out, arg


def gspmm_backward(
    graph: _core.Graph,
    message: str,
    reduce: str,
    u: Any | None,
    e: Any | None,
    grad: Any,
    arg: Any | None,
    wanted: tuple[bool, bool],
) -> tuple[Any | None, Any | None]:
    """Return the gradients of u and e, where wanted."""
    u_grad = empty(u, u.shape) if u is not None and wanted[0] else None
    e_grad = empty(e, e.shape) if e is not None and wanted[1] else None
    _core.gspmm_backward(graph, message, reduce, u, e, grad, arg, u_grad, e_grad)
    return u_grad, e_grad


def gsddmm(graph: _core.Graph, op: str, lhs: Any, rhs: Any | None, targets: tuple[str, str], heads: int) -> Any:
    """Combine rows of the ends of every edge; see moesaic.graph.gsddmm."""
    out = empty(lhs, (graph.num_edges, heads if op == "dot" else lhs.shape[1]))
    _core.gsddmm(graph, op, lhs, rhs, targets[0], targets[1], out)
    return out


def gsddmm_backward(
    graph: _core.Graph,
    op: str,
    lhs: Any,
    rhs: Any | None,
    targets: tuple[str, str],
    grad: Any,
    wanted: tuple[bool, bool],
) -> tuple[Any | None, Any | None]:
    """Return the gradients of lhs and rhs, where wanted."""
    lhs_grad = empty(lhs, lhs.shape) if wanted[0] else None
    rhs_grad = empty(rhs, rhs.shape) if rhs is not None and wanted[1] else None
    _core.gsddmm_backward(graph, op, lhs, rhs, targets[0], targets[1], grad, lhs_grad, rhs_grad)
    return lhs_grad, rhs_grad


def attention(
    graph: _core.Graph,
    heads: int,
    scale: float,
    q: Any,
    k: Any,
    v: Any,
    bias: Any | None,
    targets: tuple[str, str],
) -> Any:
    """Attend from destinations to their incoming edges; see moesaic.graph.edge_attention."""
    out = empty(q, (graph.num_dst, v.shape[1]))
    _core.edge_attention(graph, heads, scale, q, k, v, bias, targets[0], targets[1], out)
    return out


def attention_backward(
    graph: _core.Graph,
    heads: int,
    scale: float,
    q: Any,
    k: Any,
    v: Any,
    bias: Any | None,
    targets: tuple[str, str],
    grad: Any,
    wanted: tuple[bool, bool, bool, bool],
) -> list[Any | None]:
    """Return the gradients of q, k, v and bias, where wanted."""
    inputs = (q, k, v, bias)
    grads = [empty(x, x.shape) if want and x is not None else None for x, want in zip(inputs, wanted, strict=True)]
    _core.edge_attention_backward(
        graph, heads, scale, q, k, v, bias, targets[0], targets[1], grad, grads[0], grads[1], grads[2], grads[3]
    )
    return grads
