"""The names of torch_scatter on NumPy arrays, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic import scatter as ts


def plain(src, index, dim, size, kind):
    moved = np.moveaxis(src, dim, 0).astype(np.float64)
    full = np.moveaxis(np.broadcast_to(index, src.shape), dim, 0)
    out = np.zeros((size, *moved.shape[1:]))
    arg = np.full(out.shape, src.shape[dim])
    for place in np.ndindex(*moved.shape[1:]):
        for s in range(size):
            at = np.nonzero(full[(slice(None), *place)] == s)[0]
            if len(at):
                values = moved[(at, *place)]
                out[(s, *place)] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "mul": np.prod}[kind](
                    values
                )
                if kind in ("max", "min"):
                    arg[(s, *place)] = at[np.argmax(values) if kind == "max" else np.argmin(values)]
            elif kind == "mul":
                out[(s, *place)] = 1
    return np.moveaxis(out, 0, dim), np.moveaxis(arg, 0, dim)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "mul"])
def test_scatter_matches_numpy(rng, dim, kind):
    src = rng.normal(size=(6, 9, 7)).astype(np.float32)
    length = src.shape[dim]
    vector = rng.integers(0, 4, length)
    shape = [1, 1, 1]
    shape[dim] = length
    own = rng.integers(0, 4, src.shape)
    for index, full in [(vector, vector.reshape(shape)), (vector.reshape(shape), vector.reshape(shape)), (own, own)]:
        want, want_arg = plain(src, full, dim, 5, kind)
        got = ts.scatter(src, index, dim, dim_size=5, reduce=kind)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        if kind in ("max", "min"):
            value, arg = (ts.scatter_max if kind == "max" else ts.scatter_min)(src, index, dim, dim_size=5)
            np.testing.assert_allclose(value, want)
            np.testing.assert_array_equal(arg, want_arg)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "mul"])
def test_an_index_of_fewer_dimensions_fits_the_leading_dimensions(rng, dim, kind):
    src = rng.normal(size=(5, 5, 5)).astype(np.float32)  # equal sizes hide a wrong alignment
    index = rng.integers(0, 4, (5, 5))
    want = plain(src, index[:, :, None], dim, 4, kind)[0]
    got = ts.scatter(src, index, dim, dim_size=4, reduce=kind)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    if dim == 1:
        got = ts.segment_coo(src, index, dim_size=4, reduce=kind)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_batches_have_indices_of_their_own(rng):
    src = rng.normal(size=(2, 8, 3)).astype(np.float32)
    index = np.sort(rng.integers(0, 4, (2, 8)), 1)
    want = plain(src, index[:, :, None], 1, 4, "sum")[0]
    np.testing.assert_allclose(ts.segment_sum_coo(src, index, dim_size=4), want, rtol=1e-5, atol=1e-6)
    assert ts.scatter_sum(src[:, :, :0], index, 1, dim_size=4).shape == (2, 4, 0)
    assert ts.scatter_sum(src[:, :, :0], index[0], 1, dim_size=4).shape == (2, 4, 0)
    with pytest.raises(ValueError, match=r"index \(2, 7\) does not fit src \(2, 8, 3\) along dim 1"):
        ts.scatter_sum(src, index[:, 1:], 1)


def test_values_of_out_are_included(rng):
    src = np.array([[1.0, 2.0, 6.0]], np.float32)
    index = np.array([0, 0, 1])
    np.testing.assert_array_equal(ts.scatter_sum(src, index, out=np.full((1, 3), 10, np.float32)), [[13, 16, 10]])
    np.testing.assert_array_equal(ts.scatter_mean(src, index, out=np.full((1, 3), 1, np.float32)), [[2, 7, 1]])
    value, arg = ts.scatter_max(src, index, out=np.full((1, 3), 3, np.float32))
    np.testing.assert_array_equal(value, [[3, 6, 3]])
    np.testing.assert_array_equal(arg, [[3, 2, 3]])
    out = np.array([[0.5, -np.inf, 3]], np.float32)
    assert ts.scatter_logsumexp(src, index, out=out) is out
    np.testing.assert_allclose(out, [[np.log(np.exp([0.5, 1, 2]).sum()), 6, 3]], rtol=1e-6)
    for dtype in (np.float32, np.float16):
        for unbiased, want in ((True, [1.5, 2, 9]), (False, [0.75, 2, 9])):
            out = np.array([[1, 2, 9]], dtype)  # added to the sums of squares 0.5, 0 and 0
            assert ts.scatter_std(src.astype(dtype), index, out=out, unbiased=unbiased) is out
            np.testing.assert_allclose(out, np.sqrt([want]), rtol=1e-3 if dtype == np.float16 else 1e-5)


def test_composites_match_numpy(rng):
    src = rng.normal(size=(40, 3)).astype(np.float32)
    index = rng.integers(0, 5, 40)
    softmax = ts.scatter_softmax(src, index, 0)
    logs = ts.scatter_log_softmax(src, index, 0)
    sums = ts.scatter_logsumexp(src, index, 0)
    deviation = ts.scatter_std(src, index, 0)
    for s in range(5):
        rows = src[index == s].astype(np.float64)
        total = np.exp(rows).sum(0)
        np.testing.assert_allclose(softmax[index == s], np.exp(rows) / total, rtol=1e-5)
        np.testing.assert_allclose(logs[index == s], rows - np.log(total), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sums[s], np.log(total), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(deviation[s], rows.std(0, ddof=1), rtol=1e-4)


def test_segment_and_gather_match_numpy(rng):
    src = rng.normal(size=(2, 8, 3)).astype(np.float32)
    ptr = np.array([0, 2, 2, 5, 8])
    index = np.repeat(np.arange(4), np.diff(ptr))
    for batch in range(2):
        for kind in ("sum", "mean"):
            want = plain(src[batch], index[:, None], 0, 4, kind)[0]
            np.testing.assert_allclose(ts.segment_csr(src[batch], ptr, reduce=kind), want, rtol=1e-5, atol=1e-6)
            both = ts.segment_csr(src, np.stack([ptr, ptr]), reduce=kind)
            np.testing.assert_allclose(both[batch], want, rtol=1e-5, atol=1e-6)
            coo = ts.segment_coo(src[batch], index, dim_size=4, reduce=kind)
            np.testing.assert_allclose(coo, want, rtol=1e-5, atol=1e-6)
    value, arg = ts.segment_max_csr(src[0], ptr)
    np.testing.assert_array_equal(ts.segment_csr(src[0], ptr, reduce="max"), value)
    assert (arg[1] == 8).all()
    np.testing.assert_array_equal(value[0], src[0, :2].max(0))
    nodes = rng.normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_array_equal(ts.gather_csr(nodes, ptr), nodes[index])
    np.testing.assert_array_equal(ts.gather_coo(nodes, index), nodes[index])
    batched = rng.normal(size=(2, 4, 3)).astype(np.float32)
    both = np.stack([index, index])
    np.testing.assert_array_equal(ts.gather_coo(batched, both), batched[:, index])


def test_index_beyond_dim_size_is_named():
    with pytest.raises(ValueError, match=r"index\[1\] must be in \[0, 2\), but is 5"):
        ts.scatter_sum(np.zeros((2, 1), np.float32), np.array([0, 5]), 0, dim_size=2)


def test_pointers_are_checked():
    src = np.arange(8, dtype=np.float32).reshape(4, 2)
    with pytest.raises(ValueError, match=r"indptr\[0\] must be 0 or more, but is -3"):
        ts.segment_csr(src, np.array([-3, -1]))
    with pytest.raises(ValueError, match="must have 5 rows"):
        ts.segment_csr(src, np.array([0, 5]))
    for kind in ("sum", "mean", "max", "min"):
        assert ts.segment_csr(src, np.zeros(0, np.int64), reduce=kind).shape == (0, 2)
    assert ts.segment_max_csr(src, np.zeros(0, np.int64))[1].shape == (0, 2)
    assert ts.gather_csr(src[:0], np.zeros(0, np.int64)).shape == (0, 2)


def test_pointers_and_indices_of_one_batch_fit_all(rng):
    src = rng.normal(size=(3, 5, 2)).astype(np.float32)
    ptr = np.array([[0, 2, 5]])
    want = np.stack([np.add.reduceat(x, ptr[0, :-1], 0) for x in src])
    np.testing.assert_allclose(ts.segment_csr(src, ptr), want, rtol=1e-6)
    value, arg = ts.segment_max_csr(src, ptr)
    np.testing.assert_array_equal(value, np.stack([np.maximum.reduceat(x, ptr[0, :-1], 0) for x in src]))
    assert arg.shape == value.shape
    index = np.array([[0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(ts.gather_csr(src[:, :2], ptr), src[:, index[0]])
    np.testing.assert_array_equal(ts.gather_coo(src[:, :2], index), src[:, index[0]])
    for function in (ts.segment_csr, ts.gather_csr, ts.gather_coo):
        with pytest.raises(ValueError, match=r"\(2, 3\) does not fit the batches of src \(3, 5, 2\)"):
            function(src, np.concatenate([ptr, ptr]))
    assert ts.segment_csr(src[:0], ptr).shape == (0, 2, 2)
    assert ts.segment_max_csr(src[:0], ptr)[1].shape == (0, 2, 2)


def test_negative_indices_do_not_wrap():
    src = np.ones((2, 3), np.float32)
    for index in (np.array([0, -1, 1]), np.array([0, 3, 1])):
        with pytest.raises(ValueError, match=r"index must be in \[0, 3\), but has"):
            ts.scatter_mul(src, index, dim_size=3)
        with pytest.raises(ValueError, match=r"index must be in \[0, 3\), but has"):
            ts.gather_coo(src, np.stack([index, index]))


def test_mean_counts_by_the_index_alone():
    src = np.array([[np.nan, 2.0, 6.0], [1.0, np.inf, 4.0]], np.float32).T
    out = np.zeros((2, 2), np.float32)
    got = ts.scatter_mean(src, np.array([0, 0, 1]), 0, out=out)
    np.testing.assert_array_equal(got, [[np.nan, np.inf], [6, 4]])
    assert got is out
    empty = np.zeros((2, 0), np.float32)
    assert ts.scatter_mean(src[:, :0], np.array([0, 0, 1]), 0, out=empty) is empty


def test_out_is_written():
    src, index = np.array([2.0, np.nan, 6.0, 1.0], np.float32), np.array([0, 1, 2, 2])
    for function, want, tolerance in (
        (ts.scatter_max, [3, np.nan, 6, 3], 0),
        (ts.scatter_min, [2, np.nan, 1, 3], 0),
        (ts.scatter_mul, [6, np.nan, 18, 3], 0),
        (ts.scatter_sum, [5, np.nan, 10, 3], 0),
        (ts.scatter_logsumexp, [np.logaddexp(3, 2), np.nan, np.log(np.exp([3.0, 6, 1]).sum()), 3], 1e-5),
        (ts.scatter_std, [3**0.5, np.nan, 15.5**0.5, 3**0.5], 1e-5),
    ):
        out = np.full(4, 3, np.float32)
        got = function(src, index, out=out)
        np.testing.assert_allclose(out, want, rtol=tolerance)
        assert (got[0] if isinstance(got, tuple) else got) is out


def test_deviations_and_means_of_float16_do_not_overflow():
    src = np.tile(np.array([-30, 30], np.float16), 50)
    np.testing.assert_allclose(ts.scatter_std(src, np.zeros(100, np.int64)), [30.15], rtol=1e-3)
    halves, out = np.full(70_000, 0.5, np.float16), np.zeros(1, np.float16)
    np.testing.assert_array_equal(ts.scatter_mean(halves, np.zeros(70_000, np.int64), out=out), [0.5])


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_deviations_of_other_types_are_refused(dtype):
    with pytest.raises(TypeError):
        ts.scatter_std(np.array([1, 2, 4], dtype), np.zeros(3, np.int64))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_masked_groups_have_no_weight(dtype):
    low = -np.inf
    src, index = np.array([low, low, 1.0, low], dtype), np.array([0, 0, 1, 1])
    np.testing.assert_array_equal(ts.scatter_softmax(src, index), [0, 0, 1, 0])
    np.testing.assert_array_equal(ts.scatter_log_softmax(src, index), [low, low, 0, low])
    np.testing.assert_array_equal(ts.scatter_logsumexp(src, index, dim_size=3), [0, 1, 0])  # as torch_scatter
