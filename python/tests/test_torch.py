"""PyTorch tensors: gradients by gradcheck, bfloat16, views; torch_scatter and pyg-lib where they are installed."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from moesaic import graph
from moesaic import scatter as ts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def plan(count=40, num_src=7, num_dst=6):
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(0, num_src, (count,), generator=generator)
    dst = torch.randint(0, num_dst - 1, (count,), generator=generator)
    return graph.Graph(src, dst, num_src, num_dst), src, dst


def uniform(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def leaf(*shape):
    return (uniform(*shape) + 0.5).requires_grad_()


def check(function, *inputs):
    """gradcheck in float32: differences over 2e-2 are exact to some 1e-4 for these smooth functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about float32
        assert torch.autograd.gradcheck(function, inputs, eps=1e-2, atol=2e-2, rtol=1e-2, nondet_tol=0.0)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("op", ["copy_lhs", "copy_rhs", "add", "sub", "mul", "div"])
def test_gspmm_gradients_match_differences(op, reduce):
    g, src, dst = plan()
    u, e = leaf(7, 2, 3), leaf(40, 2, 3) if op == "copy_rhs" else leaf(40, 2)
    if reduce in ("max", "min"):  # differences must not change the order: compare with PyTorch instead
        full = e if e.dim() == 3 else e.unsqueeze(-1)
        message = {
            "copy_lhs": u[src],
            "copy_rhs": full,
            "add": u[src] + full,
            "sub": u[src] - full,
            "mul": u[src] * full,
            "div": u[src] / full,
        }[op].expand(40, 2, 3)
        index = dst.view(-1, 1, 1).expand(40, 2, 3)
        want = torch.zeros(6, 2, 3).scatter_reduce(
            0, index, message, "amax" if reduce == "max" else "amin", include_self=False
        )
        got = graph.gspmm(g, op, reduce, u, e)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        weights = uniform(6, 2, 3)
        inputs = [x for x in (u, e) if x is not None]
        grads = [
            torch.autograd.grad((x * weights).sum(), inputs, allow_unused=True, retain_graph=True) for x in (got, want)
        ]
        for mine, theirs in zip(*grads, strict=True):
            if theirs is None:
                assert mine is None
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        return
    if op == "copy_lhs":
        check(lambda a: graph.gspmm(g, op, reduce, a, None), u)
    elif op == "copy_rhs":
        check(lambda a: graph.gspmm(g, op, reduce, None, a), e)
    else:
        check(lambda a, b: graph.gspmm(g, op, reduce, a, b), u, e)


def test_gradients_of_other_operators_match_differences():
    g, _, dst = plan()
    check(lambda a, b: graph.gspmm(g, "dot", "sum", a, b), leaf(7, 2, 3), leaf(40, 2, 3))
    for op in ("add", "sub", "mul", "div", "dot"):
        check(lambda a, b, op=op: graph.gsddmm(g, op, a, b), leaf(7, 2, 3), leaf(6, 2, 3))
    check(lambda a: graph.edge_softmax(g, a), leaf(40, 3))
    check(
        lambda a, b, c, d: graph.edge_attention(g, a, b, c, d), leaf(6, 2, 4), leaf(7, 2, 4), leaf(7, 2, 3), leaf(40, 2)
    )
    check(lambda a, b, c: graph.edge_attention(g, a, b, c), leaf(6, 2, 4), leaf(40, 2, 4), leaf(40, 2, 3))
    check(lambda a: ts.scatter_sum(a, dst, 0), leaf(40, 3))
    check(lambda a: ts.scatter_mean(a, dst, 0), leaf(40, 3))
    check(lambda a: ts.scatter_softmax(a, dst, 0), leaf(40, 3))
    check(lambda a: ts.scatter_logsumexp(a, dst, 0, dim_size=5), leaf(40, 3))
    check(lambda a: ts.gather_csr(a, torch.tensor([0, 2, 2, 5])), leaf(3, 2))


def test_gradients_of_scatter_and_segments_match_differences():
    _, _, dst = plan()
    for unbiased in (True, False):
        check(lambda a, unbiased=unbiased: ts.scatter_std(a, dst, 0, unbiased=unbiased), leaf(40, 3))
    check(lambda a: ts.scatter_log_softmax(a, dst, 0), leaf(40, 3))
    check(lambda a: ts.scatter_mul(a, dst, 0), leaf(40, 3))
    check(lambda a: ts.scatter_std(a, dst, 0, out=torch.full((6, 3), 0.5)), leaf(40, 3))
    check(lambda a: ts.scatter_logsumexp(a, dst, 0, out=torch.full((6, 3), 0.5)), leaf(40, 3))
    check(lambda a: ts.gather_coo(a, dst), leaf(6, 3))
    # Values that are 0.1 apart keep their order when one changes by 0.01.
    order = torch.randperm(120, generator=torch.Generator().manual_seed(2))
    apart = (order.reshape(40, 3) * 0.1).requires_grad_()
    check(lambda a: ts.scatter_max(a, dst, 0)[0], apart)
    check(lambda a: ts.scatter_min(a, dst, 0)[0], apart)
    ptr = torch.tensor([0, 7, 7, 40])
    for reduce in ("sum", "mean", "max", "min"):
        check(lambda a, reduce=reduce: ts.segment_csr(a, ptr, reduce=reduce), apart)
        check(lambda a, reduce=reduce: ts.segment_coo(a, dst.sort()[0], reduce=reduce), apart)


def test_second_derivatives_raise():
    g, _, dst = plan()
    u, v, e = leaf(7, 2, 3), leaf(6, 2, 3), leaf(40, 2)
    segments = graph.Segments(dst, 6)
    cases = [
        (lambda: graph.u_mul_e_sum(g, u, e), u),
        (lambda: graph.copy_u(g, u, "max"), u),
        (lambda: graph.gsddmm(g, "mul", u, v), v),
        (lambda: graph.edge_softmax(g, e), e),
        (lambda: graph.edge_attention(g, v, u, u, e), u),
        (lambda: graph.segment_reduce(segments, e, "mean"), e),
        (lambda: graph.gather(segments, v), v),
    ]
    for function, x in cases:
        (first,) = torch.autograd.grad(function().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(first.square().sum(), x)
    # The sum's own gradient is constant, but the gradient by u is e.
    (by_u,) = torch.autograd.grad(graph.u_mul_e_sum(g, u, e).sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(by_u.sum(), e)


def test_bfloat16_sums_in_float32():
    g, src, dst = plan(2000)
    u = uniform(7, 33).bfloat16()
    want = torch.zeros(6, 33).index_add_(0, dst, u.float()[src])
    got = graph.copy_u(g, u)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want.bfloat16(), rtol=2**-8, atol=0)


def test_views_share_memory_and_gradients_flow_through_them():
    g, src, dst = plan()
    base = uniform(7, 12).requires_grad_()
    view = base[:, 2:8]
    out = graph.copy_u(g, view)
    torch.testing.assert_close(out, torch.zeros(6, 6).index_add_(0, dst, view.detach()[src]))
    out.sum().backward()
    assert base.grad[:, :2].abs().max() == 0 and base.grad[:, 2:8].sum() == 40 * 6
    target = torch.zeros(6, 6)
    graph.index_add(target, dst, torch.ones(40, 6))
    assert target.sum() == 240


def test_equals_pytorch_at_size():
    rng = np.random.default_rng(0)
    src, dst = (torch.from_numpy(rng.integers(0, 512, 32768)) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    u, w = torch.randn(512, 64, generator=generator), torch.randn(32768, generator=generator)
    got = graph.u_mul_e_sum(graph.Graph(src, dst, 512, 512), u, w)
    want = torch.zeros(512, 64, dtype=torch.float64).index_add_(0, dst, u.double()[src] * w.double()[:, None])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("package", ["torch_scatter", "pyg_lib"])
def test_equals_torch_scatter(package):
    module = pytest.importorskip(package)
    peer = module.ops if package == "pyg_lib" else module
    if not hasattr(peer, "scatter_sum"):
        pytest.skip("versions of pyg_lib before 0.7 do not have the functions of torch_scatter")
    generator = torch.Generator().manual_seed(3)
    for shape, dim in [((50, 4), 0), ((3, 20, 5), 1), ((4, 30), -1)]:
        src = torch.randn(*shape, generator=generator)
        for index in (
            torch.randint(0, 6, (shape[dim],), generator=generator),
            torch.randint(0, 6, shape, generator=generator),
        ):
            lines = [-1 if i == dim % src.dim() else 1 for i in range(src.dim())]
            full = index if index.dim() == src.dim() else index.view(lines).expand_as(src)
            for name in (
                "scatter_sum",
                "scatter_mean",
                "scatter_softmax",
                "scatter_log_softmax",
                "scatter_std",
                "scatter_logsumexp",
                "scatter_mul",
            ):
                mine, theirs = (getattr(m, name)(src, i, dim) for m, i in ((ts, index), (peer, full)))
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            for name in ("scatter_max", "scatter_min"):
                mine, theirs = (getattr(m, name)(src, i, dim, dim_size=8) for m, i in ((ts, index), (peer, full)))
                torch.testing.assert_close(mine[0], theirs[0])
                assert torch.equal(mine[1], theirs[1])
            size = [8 if i == dim % src.dim() else length for i, length in enumerate(shape)]
            for name in (
                "scatter_sum",
                "scatter_mean",
                "scatter_mul",
                "scatter_std",
                "scatter_logsumexp",
                "scatter_max",
                "scatter_min",
            ):
                mine, theirs = (
                    getattr(m, name)(src, i, dim, out=torch.full(size, 0.5)) for m, i in ((ts, index), (peer, full))
                )
                if name in ("scatter_max", "scatter_min"):
                    assert torch.equal(mine[1], theirs[1])
                    mine, theirs = mine[0], theirs[0]
                if name == "scatter_logsumexp":  # torch_scatter writes 0 over `out` where an index does not occur
                    occurs = ts.scatter_sum(torch.ones_like(src), index, dim, dim_size=8) > 0
                    assert torch.all(mine[~occurs] == 0.5)
                    mine, theirs = mine[occurs], theirs[occurs]
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    src, ptr = torch.randn(10, 3, generator=generator), torch.tensor([0, 3, 3, 10])
    for kind in ("sum", "mean"):
        mine, theirs = (getattr(m, f"segment_{kind}_csr")(src, ptr) for m in (ts, peer))
        torch.testing.assert_close(mine, theirs)
    for kind in ("min", "max"):
        mine, theirs = (getattr(m, f"segment_{kind}_csr")(src, ptr) for m in (ts, peer))
        torch.testing.assert_close(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    torch.testing.assert_close(ts.gather_csr(src[:3], ptr), peer.gather_csr(src[:3], ptr))


def test_out_is_written_and_index_checked():
    src, index = torch.tensor([2.0, float("nan"), 6.0, 1.0]), torch.tensor([0, 1, 2, 2])
    for name, want in (
        ("scatter_max", [3, float("nan"), 6, 3]),
        ("scatter_min", [2, float("nan"), 1, 3]),
        ("scatter_mul", [6, float("nan"), 18, 3]),
        ("scatter_sum", [5, float("nan"), 10, 3]),
        ("scatter_mean", [5, float("nan"), 5, 3]),
        (
            "scatter_logsumexp",
            [3 + math.log1p(math.exp(-1)), float("nan"), 6 + math.log1p(math.exp(-3) + math.exp(-5)), 3],
        ),
        ("scatter_std", [3**0.5, float("nan"), 15.5**0.5, 3**0.5]),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.full((4,), 3.0, dtype=dtype)
            got = getattr(ts, name)(src.to(dtype), index, out=out)
            torch.testing.assert_close(out, torch.tensor(want, dtype=dtype), equal_nan=True)
            assert (got[0] if isinstance(got, tuple) else got) is out
    with pytest.raises(ValueError, match="index must be in"):
        ts.scatter_mul(src, torch.tensor([0, -1, 1, 1]), dim_size=4)
    rows = torch.arange(12.0).reshape(3, 2, 2)
    one = torch.tensor([[0, 1, 2]])
    torch.testing.assert_close(ts.segment_csr(rows, one), rows)
    torch.testing.assert_close(ts.gather_csr(rows, one), rows)
    torch.testing.assert_close(ts.gather_coo(rows, torch.tensor([[1, 0]])), rows[:, [1, 0]])
    assert ts.segment_csr(rows[0], torch.zeros(0, dtype=torch.long)).shape == (0, 2)
    low = float("-inf")
    masked = torch.tensor([low, low, 1.0, low], requires_grad=True)
    for name, want in (("scatter_softmax", [0.0, 0, 1, 0]), ("scatter_logsumexp", [0.0, 1])):
        got = getattr(ts, name)(masked, torch.tensor([0, 0, 1, 1]))
        torch.testing.assert_close(got, torch.tensor(want))
    ts.scatter_softmax(masked, torch.tensor([0, 0, 1, 1])).sum().backward()
    torch.testing.assert_close(masked.grad, torch.zeros(4))


def test_arrays_of_numpy_mix_with_tensors_that_need_gradients():
    g, _, _ = plan()
    u, q, w = leaf(7, 2, 3), leaf(6, 2, 3), uniform(40, 2)
    read_only = np.broadcast_to(np.float32(2), (40, 2))
    cases = [
        (lambda x: graph.u_mul_e_sum(g, u, x), w),
        (lambda x: graph.gsddmm(g, "mul", u, x, "u", "e"), w),
        (lambda x: graph.edge_attention(g, q, u, u.detach(), x), w),
        (lambda x: graph.edge_attention(g, q, x, x), uniform(7, 2, 3)),
        (lambda x: graph.u_mul_e_sum(g, u, x), torch.from_numpy(read_only.copy())),
    ]
    for function, x in cases:
        array = read_only if x is cases[-1][1] else x.numpy()
        for mine, theirs in zip(
            *(torch.autograd.grad(function(a).square().sum(), (u, q), allow_unused=True) for a in (array, x)),
            strict=True,
        ):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_dot_products_with_max_have_gradients():
    g, src, dst = plan()
    u, e = leaf(7, 2, 3), leaf(40, 2, 3)
    weights = uniform(6, 2)
    message = (u[src] * e).sum(-1)
    want = torch.zeros(6, 2).scatter_reduce(0, dst.view(-1, 1).expand(40, 2), message, "amax", include_self=False)
    got = graph.gspmm(g, "dot", "max", u, e).reshape(6, 2)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad((x * weights).sum(), (u, e), retain_graph=True) for x in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_arrays_of_numpy_may_change_before_the_backward_pass() -> None:
    g, _, _ = plan()
    u, w = leaf(7, 2, 3), uniform(40, 2).numpy()
    out = graph.u_mul_e_sum(g, u, w.copy()).sum()
    (want,) = torch.autograd.grad(out, u)
    out = graph.u_mul_e_sum(g, u, w).sum()
    w[:] = 0
    torch.testing.assert_close(torch.autograd.grad(out, u)[0], want, rtol=0, atol=0)


def test_index_add_counts_as_a_change():
    w, out = torch.ones(2, 1, requires_grad=True), torch.zeros(2, 1)
    product = (w * out).sum()
    graph.index_add(out, np.array([0]), torch.ones(1, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    parameter = torch.nn.Parameter(torch.zeros(2, 1))
    with torch.no_grad():
        graph.index_add(parameter, np.array([1]), torch.ones(1, 1))
    assert parameter.tolist() == [[0], [1]]


def test_other_devices_are_refused_by_name():
    g, _, _ = plan()
    nodes = torch.zeros(7, 2, device="meta", requires_grad=True)
    edges = torch.zeros(40, 2, device="meta", requires_grad=True)
    segments = graph.Segments(np.zeros(7, np.int64))
    for call in (
        lambda: graph.copy_u(g, nodes),
        lambda: graph.edge_softmax(g, edges),
        lambda: graph.segment_reduce(segments, nodes, "sum"),
        lambda: graph.gather(segments, nodes[:1]),
    ):
        with pytest.raises(ValueError, match="must be on the CPU, but one is on meta"):
            call()
