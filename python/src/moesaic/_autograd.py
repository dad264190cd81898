"""Gradients of the operators for PyTorch. Imported only when a tensor needs them.

Gradients are computed on detached tensors. A second derivative raises: PyTorch would take it as zero.
"""

# mypy: disable-error-code="misc, no-untyped-call, no-any-return, unused-ignore"
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _core, _ops


def _grad(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous()


class _NoSecondDerivative(torch.autograd.Function):
    """Identity of a gradient. Its sources connect it to the tensors that a second derivative passes through."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Raise."""
        raise RuntimeError("operators of moesaic.graph have first derivatives only, but a second one is needed")


def _first_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the derivative of a gradient an error.

    PyTorch's once_differentiable misses products: the gradient of sum(u * e) by u depends on the saved e, while
    that of the sum is constant.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no create_graph
            return found
        sources = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        if not sources:
            return found
        return tuple(None if x is None else _NoSecondDerivative.apply(x, *sources) for x in found)

    return wrapped


class Segment(torch.autograd.Function):
    """moesaic.graph.segment_reduce."""

    @staticmethod
    def forward(ctx: Any, src: torch.Tensor, plan: _core.Segments, reduce: str) -> Any:
        """Reduce src [E, K]."""
        out, arg = _ops.segment(plan, reduce, src.detach())
        ctx.plan, ctx.reduce, ctx.arg = plan, reduce, arg
        if arg is None:
            arg = torch.empty(0, dtype=torch.int32)
        ctx.mark_non_differentiable(arg)
        return out, arg

    @staticmethod
    @_first_only
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        """Return the gradient of src."""
        return _ops.segment_backward(ctx.plan, ctx.reduce, _grad(grad), ctx.arg), None, None


class Gather(torch.autograd.Function):
    """Repetition of rows for the edges of a segment."""

    @staticmethod
    def forward(ctx: Any, src: torch.Tensor, plan: _core.Segments) -> torch.Tensor:
        """Gather src [N, K]."""
        ctx.plan = plan
        return _ops.gather(plan, src.detach())

    @staticmethod
    @_first_only
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradient of src."""
        return _ops.segment(ctx.plan, "sum", _grad(grad))[0], None


class Softmax(torch.autograd.Function):
    """moesaic.graph.segment_softmax."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: _core.Segments) -> torch.Tensor:
        """Return the softmax of x [E, H]."""
        y = _ops.softmax(plan, x.detach())
        ctx.plan = plan
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @_first_only
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradient of x."""
        (y,) = ctx.saved_tensors
        return _ops.softmax_backward(ctx.plan, y, _grad(grad)), None


class Gspmm(torch.autograd.Function):
    """moesaic.graph.gspmm."""

    @staticmethod
    def forward(
        ctx: Any,
        u: torch.Tensor | None,
        e: torch.Tensor | None,
        graph: _core.Graph,
        message: str,
        reduce: str,
        heads: int,
    ) -> Any:
        """Reduce messages."""
        plain = [None if x is None else x.detach() for x in (u, e)]
        out, arg = _ops.gspmm(graph, message, reduce, plain[0], plain[1], heads)
        ctx.save_for_backward(u, e)
        ctx.graph, ctx.message, ctx.reduce, ctx.arg = graph, message, reduce, arg
        if arg is None:
            arg = torch.empty(0, dtype=torch.int32)
        ctx.mark_non_differentiable(arg)
        return out, arg

    @staticmethod
    @_first_only
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        """Return the gradients of u and e."""
        u, e = (None if x is None else x.detach() for x in ctx.saved_tensors)
        grads = _ops.gspmm_backward(
            ctx.graph, ctx.message, ctx.reduce, u, e, _grad(grad), ctx.arg, ctx.needs_input_grad[:2]
        )
        return *grads, None, None, None, None


class Gsddmm(torch.autograd.Function):
    """moesaic.graph.gsddmm."""

    @staticmethod
    def forward(
        ctx: Any,
        lhs: torch.Tensor,
        rhs: torch.Tensor | None,
        graph: _core.Graph,
        op: str,
        targets: tuple[str, str],
        heads: int,
    ) -> torch.Tensor:
        """Combine the ends of edges."""
        ctx.save_for_backward(lhs, rhs)
        ctx.graph, ctx.op, ctx.targets = graph, op, targets
        return _ops.gsddmm(graph, op, lhs.detach(), None if rhs is None else rhs.detach(), targets, heads)

    @staticmethod
    @_first_only
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradients of lhs and rhs."""
        lhs, rhs = (None if x is None else x.detach() for x in ctx.saved_tensors)
        wanted = ctx.needs_input_grad[:2]
        grads = _ops.gsddmm_backward(ctx.graph, ctx.op, lhs, rhs, ctx.targets, _grad(grad), wanted)
        return *grads, None, None, None, None


class Attention(torch.autograd.Function):
    """moesaic.graph.edge_attention."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        graph: _core.Graph,
        heads: int,
        scale: float,
        targets: tuple[str, str],
    ) -> torch.Tensor:
        """Attend over edges."""
        ctx.save_for_backward(q, k, v, bias)
        ctx.rest = (graph, heads, scale, targets)
        plain = [None if x is None else x.detach() for x in (q, k, v, bias)]
        return _ops.attention(graph, heads, scale, plain[0], plain[1], plain[2], plain[3], targets)

    @staticmethod
    @_first_only
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradients of q, k, v and bias."""
        graph, heads, scale, targets = ctx.rest
        q, k, v, bias = (None if x is None else x.detach() for x in ctx.saved_tensors)
        grads = _ops.attention_backward(
            graph, heads, scale, q, k, v, bias, targets, _grad(grad), ctx.needs_input_grad[:4]
        )
        return *grads, None, None, None, None


class Layer(torch.autograd.Function):
    """A layer of moesaic.layers: inputs, then parameters in the order of their names."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., tuple[Any, ...]],
        run_backward: Callable[..., None],
        names: tuple[str, ...],
        *tensors: torch.Tensor | None,
    ) -> Any:
        """Run the layer on its inputs."""
        ctx.run_backward, ctx.names = run_backward, names
        ctx.save_for_backward(*tensors)
        inputs = tensors[: len(tensors) - len(names)]
        return run(*(None if x is None else x.detach() for x in inputs))

    @staticmethod
    @_first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of inputs and parameters. Hidden values are computed again."""
        tensors, names = ctx.saved_tensors, ctx.names
        found = [
            torch.zeros(x.shape, dtype=torch.float32) if want and x is not None else None
            for x, want in zip(tensors, ctx.needs_input_grad[3:], strict=True)
        ]
        count = len(tensors) - len(names)
        parameters = {name: g for name, g in zip(names, found[count:], strict=True) if g is not None}
        inputs = [None if x is None else x.detach() for x in tensors[:count]]
        ctx.run_backward(inputs, [_grad(g).float() for g in grads], found[:count], parameters)
        typed = [None if g is None else g.to(x.dtype) for g, x in zip(found, tensors, strict=True)]
        return None, None, None, *typed
