"""moesaic.graph on NumPy arrays, against plain NumPy."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import moesaic
from moesaic import graph


def edges(rng, num_src=11, num_dst=9, count=70):
    src = rng.integers(0, num_src, count)
    dst = rng.integers(0, num_dst - 1, count)  # the last node has no edges
    return src, dst, graph.Graph(src, dst, num_src, num_dst)


def reduce_plain(messages, dst, num_dst, kind):
    out = np.zeros((num_dst, *messages.shape[1:]), np.float64)
    for d in range(num_dst):
        rows = messages[dst == d].astype(np.float64)
        if len(rows):
            out[d] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[kind](rows, axis=0)
    return out


OPS = {
    "copy_lhs": lambda u, e: u + 0 * e,
    "copy_rhs": lambda u, e: e + 0 * u,
    "add": lambda u, e: u + e,
    "sub": lambda u, e: u - e,
    "mul": lambda u, e: u * e,
    "div": lambda u, e: u / e,
}


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gspmm_matches_numpy(rng, op, kind, dtype):
    src, dst, g = edges(rng)
    u = rng.uniform(0.5, 2, (11, 3, 10)).astype(dtype)
    for e_shape in [(70, 3, 10), (70, 3), (70, 1, 1), (70,)]:
        e = rng.uniform(0.5, 2, e_shape).astype(dtype)
        if op == "copy_rhs" and e_shape != (70, 3, 10):
            continue
        full = e.reshape(e_shape + (1,) * (3 - len(e_shape)))
        want = reduce_plain(OPS[op](u[src].astype(np.float64), full.astype(np.float64)), dst, 9, kind)
        got = graph.gspmm(g, op, kind, u, e)
        assert got.dtype == dtype and got.shape == (9, 3, 10)
        tolerance = 1e-5 if dtype == np.float32 else 4e-3
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_maximum_returns_its_arguments(rng):
    src, dst, g = edges(rng)
    u = rng.normal(size=(11, 5)).astype(np.float32)
    out, arg = graph.gspmm(g, "copy_lhs", "max", u, None, return_arg=True)
    assert arg.dtype == np.int64
    for d in range(8):
        for c in range(5):
            assert dst[arg[d, c]] == d
            assert u[src[arg[d, c]], c] == out[d, c]
    assert (arg[8] == 70).all() and (out[8] == 0).all()


def test_gsddmm_matches_numpy(rng):
    src, dst, g = edges(rng)
    u = rng.normal(size=(11, 2, 6)).astype(np.float32)
    v = rng.normal(size=(9, 2, 6)).astype(np.float32)
    np.testing.assert_allclose(graph.gsddmm(g, "add", u, v), u[src] + v[dst], rtol=1e-6)
    np.testing.assert_allclose(graph.gsddmm(g, "sub", v, u, "v", "u"), v[dst] - u[src], rtol=1e-6)
    np.testing.assert_allclose(graph.gsddmm(g, "copy_rhs", None, v), v[dst])
    dots = graph.u_dot_v(g, u, v)
    assert dots.shape == (70, 2, 1)
    np.testing.assert_allclose(dots, (u[src] * v[dst]).sum(-1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_edge_attention_matches_numpy(rng):
    src, dst, g = edges(rng)
    q, k = (rng.normal(size=(n, 4, 8)).astype(np.float32) for n in (9, 11))
    v = rng.normal(size=(11, 4, 5)).astype(np.float32)
    bias = rng.normal(size=(70, 4)).astype(np.float32)
    got = graph.edge_attention(g, q, k, v, bias)
    scores = (q[dst] * k[src]).sum(-1) / np.sqrt(8) + bias
    for d in range(8):
        mine = dst == d
        weights = np.exp(scores[mine])
        weights /= weights.sum(0)
        np.testing.assert_allclose(got[d], (weights[..., None] * v[src[mine]]).sum(0), rtol=1e-4, atol=1e-5)
    assert (got[8] == 0).all()
    softmax = graph.edge_softmax(g, scores.astype(np.float32))
    for d in range(8):
        np.testing.assert_allclose(softmax[dst == d].sum(0), 1, rtol=1e-5)


def test_owners_of_keys_and_values_can_be_named(rng):
    src, dst = np.array([2, 0, 1, 0]), np.array([0, 0, 1, 2])
    g = graph.Graph(src, dst, 4, 3)  # as many sources as edges
    q = rng.normal(size=(3, 2, 5)).astype(np.float32)
    k, v = (rng.normal(size=(4, 2, n)).astype(np.float32) for n in (5, 3))
    by_source = graph.edge_attention(g, q, k, v)
    np.testing.assert_array_equal(graph.edge_attention(g, q, k, v, k_target="u", v_target="u"), by_source)
    by_edge = graph.edge_attention(g, q, k, v, k_target="e", v_target="e")
    np.testing.assert_allclose(by_edge[1], v[2], rtol=1e-6)  # its only edge
    np.testing.assert_allclose(by_source[1], v[1], rtol=1e-6)
    np.testing.assert_allclose(graph.edge_attention(g, q, k[src], v[src], None, None, "e", "e"), by_source, rtol=1e-6)
    with pytest.raises(ValueError, match='k_target must be "u" or "e"'):
        graph.edge_attention(g, q, k, v, k_target="v")
    wide = graph.Graph(src, dst, 5, 3)
    with pytest.raises(ValueError, match="k must have 5 rows, but has 4"):
        graph.edge_attention(wide, q, k, v, k_target="u")


def test_heads_of_keys_and_values_are_those_of_queries(rng):
    _, _, g = edges(rng)
    q = np.zeros((9, 4, 4), np.float32)
    for k_shape, v_shape in [((11, 2, 8), (11, 4, 4)), ((11, 4, 4), (11, 2, 8))]:
        with pytest.raises(ValueError, match=r"k and v must be \[rows, 4, 4\]"):
            graph.edge_attention(g, q, np.zeros(k_shape, np.float32), np.zeros(v_shape, np.float32))


def test_edge_softmax_reads_the_plan_of_the_graph(rng):
    src, dst, g = edges(rng)
    x = rng.normal(size=(70, 3)).astype(np.float32)
    np.testing.assert_array_equal(graph.edge_softmax(g, x), graph.segment_softmax(graph.Segments(dst, 9), x))
    backwards = graph.edge_softmax(g.reversed(), x)  # the reversed graph is destroyed before its plan
    np.testing.assert_allclose(backwards, graph.segment_softmax(graph.Segments(src, 11), x), rtol=1e-6)


def test_results_do_not_depend_on_threads(rng):
    before = moesaic.get_num_threads()
    src, dst = rng.integers(0, 500, 60000), np.minimum(rng.integers(0, 3000, 60000), 499)
    g = graph.Graph(src, dst, 500, 500)
    u = rng.normal(size=(500, 48)).astype(np.float32)
    results = []
    for threads in (1, 2, 3):
        moesaic.set_num_threads(threads)
        assert moesaic.get_num_threads() == threads
        results.append(graph.copy_u(g, u).tobytes())
    moesaic.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_kernels_are_named():
    assert moesaic.kernels() in ("avx512", "avx2", "ref")


def test_plan_keeps_its_edges(rng):
    src, dst, g = edges(rng)
    u = rng.normal(size=(11, 4)).astype(np.float32)
    before = graph.copy_u(g, u)
    assert g.matches(src, dst)
    src[0] = (src[0] + 1) % 11
    assert not g.matches(src, dst)
    np.testing.assert_array_equal(before, graph.copy_u(g, u))


def test_csc_lists_edges_by_destination(rng):
    src, dst, g = edges(rng)
    ptr, sources, edge = g.csc()
    np.testing.assert_array_equal(sources, src[edge])
    np.testing.assert_array_equal(np.repeat(np.arange(9), np.diff(ptr)), dst[edge])
    again = graph.Graph.from_csc(ptr, sources, 11)
    assert again.num_edges == 70 and again.reversed().num_dst == 11


def test_graphs_can_be_pickled(rng):
    src, dst, g = edges(rng)
    again = pickle.loads(pickle.dumps(g))
    assert again.matches(src, dst) and (again.num_src, again.num_dst) == (g.num_src, g.num_dst)
    assert copy.deepcopy(g.reversed()).matches(dst, src)
    assert pickle.loads(pickle.dumps(graph.Graph([], [], 2, 3))).num_dst == 3


def test_index_add_accumulates(rng):
    out = np.ones((4, 3), np.float32)
    graph.index_add(out, np.array([1, 1, 3]), np.full((3, 3), 2, np.float32), alpha=0.5)
    np.testing.assert_array_equal(out[:, 0], [1, 3, 1, 2])


def test_arrays_without_contiguous_rows_are_copied(rng):
    _, _, g = edges(rng)
    u = rng.normal(size=(5, 11)).astype(np.float32)
    np.testing.assert_array_equal(graph.copy_u(g, u.T), graph.copy_u(g, np.ascontiguousarray(u.T)))
    wide = rng.normal(size=(11, 20)).astype(np.float32)
    np.testing.assert_array_equal(graph.copy_u(g, wide[:, 3:9]), graph.copy_u(g, wide[:, 3:9].copy()))
    records = np.zeros((11, 4), dtype=[("x", "<f4"), ("type", "<i2")])  # elements are 6 bytes apart
    records["x"] = rng.normal(size=(11, 4))
    np.testing.assert_array_equal(graph.copy_u(g, records["x"]), graph.copy_u(g, records["x"].copy()))


def test_read_only_arrays_are_read(rng):
    src, dst, g = edges(rng)
    u = rng.normal(size=(11, 6)).astype(np.float32)
    weights = np.broadcast_to(np.float32(1), len(src))  # read-only
    for x in (src, dst, u):
        x.flags.writeable = False
    assert graph.Graph(src, dst, 11, 9).num_edges == len(src)
    np.testing.assert_array_equal(graph.u_mul_e_sum(g, u, weights), graph.copy_u(g, u))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: graph.Graph([0, 1], [0, -2]), ValueError, r"dst\[1\] must be in \[0, 2\), but is -2"),
        (lambda: graph.Graph([0, 9], [0, 1], 3, 3), ValueError, r"src\[1\] must be in \[0, 3\), but is 9"),
        (lambda: graph.Graph([0, 1], [0]), ValueError, "one element per edge"),
        (lambda: graph.Graph(np.zeros(3), np.zeros(3)), TypeError, "int32 or int64"),
        (lambda: graph.Graph([0.0, 1.9], [0, 1]), TypeError, "src must have elements of int32 or int64, not float64"),
        (lambda: graph.Graph([True, False], [0, 1]), TypeError, "int32 or int64, not bool"),
        (lambda: graph.Graph(np.zeros((2, 2), np.int64), [0]), ValueError, "must be a vector"),
        (lambda: graph.copy_u(graph.Graph([0], [0]), np.zeros((1, 2))), TypeError, "float32, bfloat16 or float16"),
        (lambda: graph.copy_u(graph.Graph([0], [0]), np.zeros((2, 2), np.float32)), ValueError, "must have 1 rows"),
        (lambda: graph.copy_u(graph.Graph([0], [0]), [1.0]), TypeError, "NumPy array or a PyTorch tensor"),
        (lambda: graph.gspmm(graph.Graph([0], [0]), "pow", "sum", None, None), ValueError, "unknown operator"),
        (
            lambda: graph.copy_u(graph.Graph([0], [0]), np.zeros((1, 2), np.float32), "median"),
            ValueError,
            "unknown reduction",
        ),
        (lambda: graph.Segments.from_ptr([0, 3, 2]), ValueError, r"ptr\[1\] must be at most 2|ptr\[2\]"),
        (lambda: graph.Segments([0, 1], -1), ValueError, "index must have 0 or more nodes or segments, but has -1"),
    ],
)
def test_wrong_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_masked_nodes_and_segments_are_zero(rng):
    src, dst = np.arange(300) % 3, np.arange(300) // 100
    g = graph.Graph(src, dst, 3, 3)
    q, k, v = (rng.normal(size=(3, 2, d)).astype(np.float32) for d in (4, 4, 5))
    bias = np.zeros((300, 2), np.float32)
    bias[:100] = -np.inf
    bias[100:199] = -np.inf
    out = graph.edge_attention(g, q, k, v, bias)
    assert (out[0] == 0).all()
    np.testing.assert_allclose(out[1], v[src[199]], rtol=1e-5)  # one edge is left
    weights = graph.edge_softmax(g, bias)
    assert (weights[:199] == 0).all() and (weights[199] == 1).all()
    np.testing.assert_allclose(weights[200:].sum(0), 1, rtol=1e-5)


READS = """
import importlib.util
import numpy as np
from moesaic import graph

def peak():  # KiB
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

x = np.zeros((1 << 16, 1024), np.float32)  # pages take memory when they are written
arrays = [x]
if importlib.util.find_spec("torch"):
    import torch
    arrays.append(torch.from_numpy(x))
g = graph.Graph(np.array([0, 9000, 65535]), np.array([0, 1, 1]), 1 << 16, 2)
before = peak()
for u in arrays:
    graph.copy_u(g, u)
    graph.copy_u(g, u[:, 8:1000], "max")
    graph.u_dot_v(g, u, u[:2])
    graph.edge_attention(g, u[:2].reshape(2, 4, 256), u.reshape(-1, 4, 256), u.reshape(-1, 4, 256))
print((peak() - before) // 1024)
"""


def test_arrays_with_contiguous_rows_are_read_in_place():
    result = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, check=True, timeout=600)
    assert int(result.stdout) < 64  # MiB; a copy would take 248 or more


CHILDREN = """
import os, signal, threading
import numpy as np
from moesaic import graph

segments = graph.Segments(np.arange(200000) % 7, 7)
rows = np.ones((200000, 16), np.float32)
running, stop = threading.Event(), threading.Event()

def work():
    while not stop.is_set():
        graph.segment_reduce(segments, rows, "max")
        running.set()

thread = threading.Thread(target=work)
thread.start()
running.wait()
failed = children = 0
while not failed and children < 20:
    children += 1
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for a lock of its parent
        os._exit(0 if graph.segment_reduce(segments, rows)[0, 0] > 0 else 1)
    failed += os.waitpid(child, 0)[1] != 0
stop.set()
thread.join()
print(failed, "children failed")
"""


def test_children_run_operators_while_a_thread_of_their_parent_does():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILDREN], capture_output=True, text=True, check=True, timeout=1800
    )
    assert result.stdout == "0 children failed\n"


def test_empty_graphs_give_zeros():
    none = np.zeros(0, np.int64)
    g = graph.Graph(none, none, 0, 3)
    assert (graph.copy_u(g, np.zeros((0, 4), np.float32)) == 0).all()
    assert graph.Graph(none, none).num_dst == 0
    no_nodes = graph.Graph(none, none, 3, 0)
    q, k, v = (np.zeros((n, 2, d), np.float32) for n, d in ((0, 4), (3, 4), (3, 5)))
    assert graph.edge_attention(no_nodes, q, k, v).shape == (0, 2, 5)
    assert graph.index_add(np.zeros((0, 2, 3), np.float32), none, np.zeros((0, 2, 3), np.float32)).shape == (0, 2, 3)
