"""Layers of molecular models on float32 arrays. Weights are state dicts with published names.

Arguments are NumPy arrays or PyTorch tensors; results are of the same kind. All layers and models record gradients of
their inputs, and of parameters where the state dict has tensors that require them (`dict(module.named_parameters())`).
Their hidden values are not kept: the backward pass computes them again. Only Se3Transformer keeps the inputs of its
layers and the harmonics of edges. Masks have no gradients: one that requires them raises ValueError.

Tensors of the state dict may change in place, as an optimizer does; the layer follows. It compares PyTorch's version
counters, which do not count writes through `.data` or a NumPy view, and which tensors made under
torch.inference_mode() do not have: call `refresh()` after such writes. NumPy arrays of a state dict are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _core
from ._arrays import empty, is_torch, needs_grad, plain, tensors
from .graph import Graph

__all__ = [
    "EdgeMlpReduce",
    "EgnnLayer",
    "EvoformerBlock",
    "InvariantPointAttention",
    "MpnnDecoderLayer",
    "MpnnEncoderLayer",
    "MsaAttention",
    "OuterProductMean",
    "ProteinMpnn",
    "Se3AttentionBlock",
    "Se3Conv",
    "Se3Linear",
    "Se3Norm",
    "Se3Transformer",
    "StructureModule",
    "TriangleAttention",
    "TriangleMultiplication",
    "knn_graph",
    "radius_graph",
]


def _floats(x: Any) -> Any:
    """Return x as contiguous float32."""
    x = plain(x)
    if is_torch(x):
        return x.float().contiguous()
    return np.ascontiguousarray(x, np.float32)


def _ints(x: Any, name: str) -> Any:
    """Return integers as contiguous int32. None is rounded or wrapped."""
    a = np.asarray(plain(x).numpy() if is_torch(x) else x)
    if a.size == 0:
        return np.zeros(a.shape, np.int32)
    if a.dtype.kind not in "iu":
        raise TypeError(f"{name} must have integers, not {a.dtype}")
    for value in (int(a.min()), int(a.max())):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{name} must fit int32, but has {value}")
    return np.ascontiguousarray(a, np.int32)


def _flags(x: Any, name: str) -> Any:
    """Return 0 and 1, of any type, as contiguous int32."""
    a = np.asarray(plain(x).numpy() if is_torch(x) else x)
    wrong = a[(a != 0) & (a != 1)]
    if wrong.size > 0:
        raise ValueError(f"{name} must be 0 or 1, but has {wrong[0]}")
    return np.ascontiguousarray(a, np.int32)


def _maybe(x: Any | None) -> Any | None:
    return None if x is None else _floats(x)


def _mask(x: Any | None, name: str = "mask") -> Any | None:
    """Return a mask as contiguous float32. Layers do not compute gradients of masks."""
    if needs_grad(x):
        raise ValueError(f"{name} requires a gradient, but layers compute none of masks: pass {name}.detach()")
    # A copy, for the backward pass: the caller may change its array before it runs.
    return None if x is None else _copy(x)


def _weights(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _floats(value) for name, value in state.items()}


def _version(x: Any) -> tuple[int, int]:
    """Identify the values of a tensor. One that was made under torch.inference_mode() has no version counter.

    Writes that no counter sees need `refresh()`.
    """
    return x.data_ptr(), 0 if x.is_inference() else x._version


class _Differentiable:
    """A layer with a backward pass. Subclasses pack weights with `load`."""

    def __init__(self, state: Mapping[str, Any], load: Callable[[dict[str, Any]], Any]) -> None:
        self._state, self._load = dict(state), load
        self._versions: tuple[Any, ...] = ()
        self._packed: Any = None
        _ = self._layer
        if not any(is_torch(x) for x in self._state.values()):
            self._state = {}  # arrays of NumPy have no version: the packed copy suffices

    @property
    def _layer(self) -> Any:
        """The packed layer. Weights are packed again after a change of the state dict's tensors."""
        versions = tuple(_version(x) for x in self._state.values() if is_torch(x))
        if self._packed is None or versions != self._versions:
            self._packed, self._versions = self._load(_weights(self._state)), versions
        return self._packed

    def refresh(self) -> None:
        """Pack the tensors of the state dict again at the next call. NumPy arrays were copied, and stay."""
        if self._state:
            self._packed = None

    def _apply(
        self,
        run: Callable[..., tuple[Any, ...]],
        backward: Callable[[Sequence[Any], Sequence[Any], Sequence[Any], dict[str, Any]], None],
        inputs: Sequence[Any],
    ) -> tuple[Any, ...]:
        """Run a layer, and record it if PyTorch does.

        backward(inputs, result gradients, input gradients, parameter gradients) adds to the last two.
        """
        parameters = {name: x for name, x in self._state.items() if needs_grad(x)}
        if not parameters and not needs_grad(*inputs):
            return run(*(None if x is None else plain(x) for x in inputs))
        from . import _autograd

        rows = tensors(*inputs)
        result: tuple[Any, ...] = _autograd.Layer.apply(run, backward, tuple(parameters), *rows, *parameters.values())
        return result

    def _update_pairs(self, z: Any, mask: Any | None) -> Any:
        """Run a layer that adds to pair features z [n, n, c]."""
        layer, mask = self._layer, _mask(mask)

        def run(z: Any) -> tuple[Any, ...]:
            out = _copy(z)
            layer.run(out.shape[0], mask, out)
            return (out,)

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            z = _floats(inputs[0])
            layer.backward(z.shape[0], mask, z, grads[0], found[0], parameters)

        return self._apply(run, backward, (z,))[0]


def _copy(x: Any) -> Any:
    x = plain(x)
    return x.float().clone(memory_format=_contiguous_format(x)) if is_torch(x) else np.array(x, np.float32, order="C")


def _contiguous_format(x: Any) -> Any:
    import torch

    return torch.contiguous_format


def _like(x: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return an int64 array of the kind of x."""
    wide = array.astype(np.int64)
    if is_torch(x):
        import torch

        return torch.from_numpy(wide)
    return wide


def knn_graph(xyz: Any, k: int, seq_window: int = 0, loop: bool = False, sets: Any | None = None) -> tuple[Any, Any]:
    """Connect every point to its k nearest ones, and to those closer than seq_window in the sequence.

    RoseTTAFold's rule: edges i -> j for the k nearest j, and for 0 < |i - j| < seq_window.

    Args:
        xyz: Positions [n, 3].
        k: Neighbours of a point; all others if there are fewer.
        seq_window: Bound of |i - j|; 0 connects no neighbours in the sequence.
        loop: Count a point among its own neighbours.
        sets: Boundaries [sets + 1] of point sets that are not connected with one another.

    Returns:
        src and dst, int64 [E], in the order of (src, dst).

    """
    src, dst = _core.nearest_graph(_floats(xyz), k, seq_window, loop, None if sets is None else _ints(sets, "sets"))
    return _like(xyz, src), _like(xyz, dst)


def radius_graph(
    xyz: Any, r: float, max_num_neighbors: int = 0, loop: bool = False, sets: Any | None = None
) -> tuple[Any, Any]:
    """Connect all points [n, 3] whose distance is at most r: src and dst, int64 [E], in the order of (dst, src).

    With max_num_neighbors, only the nearest of each destination are kept. Time grows with the number of edges.
    """
    boundaries = None if sets is None else _ints(sets, "sets")
    src, dst = _core.radius_graph(_floats(xyz), r, max_num_neighbors, loop, boundaries)
    return _like(xyz, src), _like(xyz, dst)


class EdgeMlpReduce(_Differentiable):
    """Perceptron on [dst features, src features, squared distance, edge features], reduced at destinations.

    Hidden values exist for 128 edges at a time, and the first layer runs per node. The state dict is that of a
    torch.nn.Sequential of linear layers 0, 2, 4, ... with activations between them.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        dst_inputs: int,
        src_inputs: int,
        edge_inputs: int = 0,
        distance: bool = False,
        activation: str = "silu",
        activate_last: bool = True,
        reduce: str = "sum",
        scale: float = 1.0,
        weight_dtype: str = "float32",
    ) -> None:
        """Pack the weights.

        activation is silu, relu, gelu or sigmoid; reduce is sum or mean. weight_dtype is float32, bfloat16 or int8,
        to which weights and their inputs are rounded; gradients are those of the rounded weights.
        """
        self._reduce, self._scale = reduce, scale
        super().__init__(
            state,
            lambda weights: _core.EdgeMlp.load(
                weights, dst_inputs, src_inputs, distance, edge_inputs, activation, activate_last, weight_dtype
            ),
        )

    def __call__(
        self,
        graph: Graph,
        dst: Any,
        src: Any,
        edge: Any | None = None,
        dst_xyz: Any | None = None,
        src_xyz: Any | None = None,
    ) -> Any:
        """Return [num_dst, outputs] for features of destinations, sources and edges, and positions [n, 3]."""
        layer, options = self._layer, (graph._graph, self._reduce, self._scale)

        def run(*inputs: Any) -> tuple[Any, ...]:
            rows = [_maybe(x) for x in inputs]
            out = empty(rows[0], (graph.num_dst, layer.outputs))
            layer.reduce(*options, *rows, out)
            return (out,)

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            layer.reduce_backward(*options, *(_maybe(x) for x in inputs), grads[0], *found, parameters)

        return self._apply(run, backward, (dst, src, edge, dst_xyz, src_xyz))[0]


class EgnnLayer(_Differentiable):
    """E(n)-equivariant layer (arXiv 2102.09844); parameters edge_mlp.*, node_mlp.*, coord_mlp.*, att_mlp.0.

    The last two are optional. Without att_mlp.0 messages have no gate; without coord_mlp.* coordinates do not move.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        node_inputs: int,
        edge_inputs: int = 0,
        residual: bool = True,
        mean_coordinates: bool = True,
        normalize: bool = False,
        tanh: bool = False,
        weight_dtype: str = "float32",
    ) -> None:
        """Pack the weights of a state dict. weight_dtype is that of EdgeMlpReduce."""
        super().__init__(
            state,
            lambda weights: _core.EgnnLayer.load(
                weights, node_inputs, edge_inputs, residual, mean_coordinates, normalize, tanh, weight_dtype
            ),
        )

    def __call__(self, graph: Graph, h: Any, x: Any, edge: Any | None = None) -> tuple[Any, Any]:
        """Update features h [n, F] and coordinates x [n, 3]; edge is [E, edge_inputs]."""
        layer = self._layer

        def run(h: Any, x: Any, edge: Any | None) -> tuple[Any, ...]:
            h, x = _floats(h), _floats(x)
            h_out, x_out = empty(h, (h.shape[0], layer.outputs)), empty(x, x.shape)
            layer.run(graph._graph, h, x, _maybe(edge), h_out, x_out)
            return h_out, x_out

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            layer.backward(graph._graph, *(_maybe(x) for x in inputs), *grads, *found, parameters)

        h_out, x_out = self._apply(run, backward, (h, x, edge))
        return h_out, x_out


class TriangleMultiplication(_Differentiable):
    """AlphaFold 2's algorithms 11 and 12, with OpenFold's parameter names."""

    def __init__(self, state: Mapping[str, Any], incoming: bool = False) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, lambda weights: _core.TriangleMultiplication.load(weights, incoming))

    def __call__(self, z: Any, mask: Any | None = None) -> Any:
        """Return z [n, n, c] plus the update; mask is [n, n]."""
        return self._update_pairs(z, mask)


class TriangleAttention(_Differentiable):
    """AlphaFold 2's algorithms 13 (starting node) and 14 (ending node), with OpenFold's parameter names."""

    def __init__(self, state: Mapping[str, Any], heads: int, ending: bool = False) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, lambda weights: _core.TriangleAttention.load(weights, heads, ending))

    def __call__(self, z: Any, mask: Any | None = None) -> Any:
        """Return z [n, n, c] plus the update; mask is [n, n]."""
        return self._update_pairs(z, mask)


class MsaAttention(_Differentiable):
    """AlphaFold 2's algorithms 7 and 8, with OpenFold's parameter names.

    Attention runs along the rows of the alignment, biased by z, if the state dict has linear_z, otherwise along its
    columns.
    """

    def __init__(self, state: Mapping[str, Any], heads: int) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, lambda weights: _core.MsaAttention.load(weights, heads))

    def __call__(self, m: Any, z: Any | None = None, mask: Any | None = None) -> Any:
        """Return m [s, n, c_m] plus the update; z is [n, n, c_z], for rows only, and mask is [s, n]."""
        layer, mask = self._layer, _mask(mask)

        def run(m: Any, z: Any | None) -> tuple[Any, ...]:
            out = _copy(m)
            layer.run(*out.shape[:2], mask, _maybe(z), out)
            return (out,)

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            m = _floats(inputs[0])
            layer.backward(*m.shape[:2], mask, _maybe(inputs[1]), m, grads[0], found[1], found[0], parameters)

        return self._apply(run, backward, (m, z))[0]


class OuterProductMean(_Differentiable):
    """AlphaFold 2's algorithm 10, with OpenFold's parameter names."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, _core.OuterProductMean.load)

    def __call__(self, m: Any, z: Any, mask: Any | None = None) -> Any:
        """Return z [n, n, c_z] plus the update by m [s, n, c_m]; mask is [s, n]."""
        layer, mask = self._layer, _mask(mask)

        def run(m: Any, z: Any) -> tuple[Any, ...]:
            m, out = _floats(m), _copy(z)
            layer.run(*m.shape[:2], mask, m, out)
            return (out,)

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            m = _floats(inputs[0])
            layer.backward(*m.shape[:2], mask, m, grads[0], found[0], parameters)
            if found[1] is not None:
                found[1].copy_(grads[0])

        return self._apply(run, backward, (m, z))[0]


class EvoformerBlock(_Differentiable):
    """AlphaFold 2's algorithm 6, one block; scopes msa_att_row, msa_att_col, msa_transition, outer_product_mean, ..."""

    def __init__(self, state: Mapping[str, Any], msa_heads: int, pair_heads: int) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, lambda weights: _core.EvoformerBlock.load(weights, msa_heads, pair_heads))

    def __call__(self, m: Any, z: Any, msa_mask: Any | None = None, pair_mask: Any | None = None) -> tuple[Any, Any]:
        """Update m [s, n, c_m] and z [n, n, c_z]; masks are [s, n] and [n, n]."""
        block, masks = self._layer, (_mask(msa_mask, "msa_mask"), _mask(pair_mask, "pair_mask"))

        def run(m: Any, z: Any) -> tuple[Any, ...]:
            m, z = _copy(m), _copy(z)
            block.run(*m.shape[:2], *masks, m, z)
            return m, z

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            m, z = (_floats(x) for x in inputs)
            block.backward(*m.shape[:2], *masks, m, z, *grads, *found, parameters)

        m, z = self._apply(run, backward, (m, z))
        return m, z


class InvariantPointAttention(_Differentiable):
    """AlphaFold 2's algorithm 22, with OpenFold's parameter names."""

    def __init__(
        self, state: Mapping[str, Any], heads: int = 12, dim: int = 16, query_points: int = 4, value_points: int = 8
    ) -> None:
        """Pack the weights of a state dict."""
        super().__init__(
            state,
            lambda weights: _core.InvariantPointAttention.load(weights, heads, dim, query_points, value_points),
        )

    def __call__(self, s: Any, z: Any, rotation: Any, translation: Any, mask: Any | None = None) -> Any:
        """Return the update [n, c_s] of s for z [n, n, c_z], frames [n, 3, 3] and [n, 3]; mask is [n]."""
        layer, mask = self._layer, _mask(mask)

        def run(*inputs: Any) -> tuple[Any, ...]:
            s, z, rotation, translation = (_floats(x) for x in inputs)
            out = empty(s, s.shape)
            layer.run(s.shape[0], s, z, rotation, translation, mask, out)
            return (out,)

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            rows = [_floats(x) for x in inputs]
            layer.backward(rows[0].shape[0], *rows, mask, grads[0], *found, parameters)

        return self._apply(run, backward, (s, z, rotation, translation))[0]


class StructureModule(_Differentiable):
    """AlphaFold 2's algorithm 20, with OpenFold's parameter names and results.

    Atoms need OpenFold's buffers default_frames, group_idx, atom_mask and lit_positions in the state dict:
    `{**dict(module.named_parameters()), **dict(module.named_buffers())}`.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        heads: int = 12,
        dim: int = 16,
        query_points: int = 4,
        value_points: int = 8,
        blocks: int = 8,
        stop_rotations: bool = True,
    ) -> None:
        """Pack the weights of a state dict; blocks is the number of iterations, which share weights.

        With stop_rotations, gradients do not pass through the rotations that an iteration gets from the one before, as
        in algorithm 20; without, they are the derivatives of the results.
        """
        self._stop_rotations = stop_rotations
        super().__init__(
            state,
            lambda weights: _core.StructureModule.load(weights, heads, dim, query_points, value_points, blocks),
        )

    def __call__(self, single: Any, pair: Any, types: Any | None = None, mask: Any | None = None) -> dict[str, Any]:
        """Fold single [n, c_s] and pair [n, n, c_z] features; types [n] are residue types, mask is [n].

        Returns, for every iteration: frames [blocks, n, 7] (quaternion, translation), angles and
        unnormalized_angles [blocks, n, 7, 2], and with types sidechain_frames [blocks, n, 8, 4, 4] and positions
        [blocks, n, 14, 3] in angstroms. single [n, c_s] is that of the last iteration.
        """
        module, mask, stop = self._layer, _mask(mask), self._stop_rotations
        types = None if types is None else np.array(_ints(types, "types"))
        shapes = {"frames": (7,), "angles": (7, 2), "unnormalized_angles": (7, 2)}
        if types is not None:
            shapes |= {"sidechain_frames": (8, 4, 4), "positions": (14, 3)}

        def ordered(results: Sequence[Any]) -> list[Any]:
            """Insert None for atoms that are not wanted."""
            return list(results) if types is not None else [*results[:3], None, None, results[3]]

        def run(single: Any, pair: Any) -> tuple[Any, ...]:
            single, pair = _floats(single), _floats(pair)
            n = single.shape[0]
            out = [empty(single, (module.blocks, n, *shape)) for shape in shapes.values()]
            out.append(empty(single, single.shape))
            module.run(n, single, pair, types, mask, *ordered(out))
            return tuple(out)

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            single, pair = (_floats(x) for x in inputs)
            module.backward(single.shape[0], single, pair, types, mask, stop, *ordered(grads), *found, parameters)

        return dict(zip([*shapes, "single"], self._apply(run, backward, (single, pair)), strict=True))


def _degrees(features: Mapping[int, Any]) -> tuple[int, ...]:
    if not features:
        raise ValueError("features must have one degree or more")
    return tuple(features)


class _FiberLayer(_Differentiable):
    """A layer on features by degree. Subclasses set its output's channels by degree, in ascending order."""

    _fiber_out: dict[int, int]

    def __call__(self, features: Mapping[int, Any]) -> dict[int, Any]:
        """Return features by degree [n, channels, 2 d + 1]."""
        layer, degrees, fiber = self._layer, _degrees(features), self._fiber_out

        def prepare(values: Sequence[Any]) -> dict[int, Any]:
            return {d: _floats(x) for d, x in zip(degrees, values, strict=True)}

        def run(*values: Any) -> tuple[Any, ...]:
            x = prepare(values)
            like = x[degrees[0]]
            out = {d: empty(like, (len(like), c, 2 * d + 1)) for d, c in fiber.items()}
            layer.run(len(like), x, out)
            return tuple(out.values())

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            x = prepare(inputs)
            x_grads = {d: g for d, g in zip(degrees, found, strict=True) if g is not None}
            layer.backward(len(x[degrees[0]]), x, dict(zip(fiber, grads, strict=True)), x_grads, parameters)

        return dict(zip(fiber, self._apply(run, backward, tuple(features.values())), strict=True))


class Se3Linear(_FiberLayer):
    """Products of a matrix per degree with the channels, as NVIDIA's LinearSE3: parameters weights.D.

    Fibers map degrees to channels: {0: 32, 1: 3}. Input degrees that the output does not have are not read.
    """

    def __init__(self, state: Mapping[str, Any], fiber_in: Mapping[int, int], fiber_out: Mapping[int, int]) -> None:
        """Pack the weights of a state dict."""
        fibers = dict(fiber_in), dict(sorted(fiber_out.items()))
        self._fiber_out = fibers[1]
        super().__init__(state, lambda weights: _core.Se3Linear.load(weights, *fibers))


class Se3Norm(_FiberLayer):
    """Scales features by relu(LayerNorm(lengths)) / lengths, as NVIDIA's NormSE3.

    LayerNorm runs over the channels of a degree. Parameters are layer_norms.D, or group_norm with the channels of all
    degrees, if these are as many for each.
    """

    def __init__(self, state: Mapping[str, Any], fiber: Mapping[int, int]) -> None:
        """Pack the weights of a state dict; fiber maps degrees to channels."""
        self._fiber_out = out = dict(sorted(fiber.items()))
        super().__init__(state, lambda weights: _core.Se3Norm.load(weights, out))


class _Se3EdgeLayer(_Differentiable):
    """A layer on features by degree of nodes, and on edges."""

    def __init__(
        self,
        state: Mapping[str, Any],
        load: Callable[..., Any],
        fiber_in: Mapping[int, int],
        fiber_out: Mapping[int, int],
        *options: int,
    ) -> None:
        fibers = dict(fiber_in), dict(sorted(fiber_out.items()))
        self._fiber_out = fibers[1]
        self._max_degree = max([0, *fiber_in, *fiber_out])
        super().__init__(state, lambda weights: load(weights, *fibers, *options))

    def __call__(self, graph: Graph, xyz: Any, features: Mapping[int, Any], edge: Any | None = None) -> dict[int, Any]:
        """Return features by degree [n, channels, 2 d + 1] for positions xyz [n, 3]; edge is [E, edge_inputs]."""
        return self._run(
            graph,
            lambda points: _core.Se3Graph.create(graph._graph, _floats(points), self._max_degree),
            xyz,
            features,
            edge,
        )

    def _run(
        self,
        graph: Graph,
        geometry_of: Callable[[Any], _core.Se3Graph],
        xyz: Any,
        features: Mapping[int, Any],
        edge: Any | None,
    ) -> dict[int, Any]:
        """Run the layer with the geometry that a function returns for the positions."""
        layer, degrees, fiber = self._layer, _degrees(features), self._fiber_out

        def prepare(xyz: Any, edge: Any | None, *features: Any) -> tuple[Any, dict[int, Any], Any | None]:
            return geometry_of(xyz), {d: _floats(x) for d, x in zip(degrees, features, strict=True)}, _maybe(edge)

        def run(*inputs: Any) -> tuple[Any, ...]:
            geometry, nodes, rows = prepare(*inputs)
            like = nodes[degrees[0]]
            out = {d: empty(like, (graph.num_dst, c, 2 * d + 1)) for d, c in fiber.items()}
            layer.run(geometry, nodes, rows, out)
            return tuple(out.values())

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            geometry, nodes, rows = prepare(*inputs)
            node_grads = {d: g for d, g in zip(degrees, found[2:], strict=True) if g is not None}
            out_grad = dict(zip(fiber, grads, strict=True))
            layer.backward(geometry, nodes, rows, out_grad, node_grads, found[1], found[0], parameters)

        results = self._apply(run, backward, (xyz, edge, *features.values()))
        return dict(zip(fiber, results, strict=True))


class Se3Conv(_Se3EdgeLayer):
    """Tensor field convolution, summed over incoming edges, as NVIDIA's ConvSE3 without fused degrees.

    Per edge, a perceptron on [edge features, distance] weights the products of the source's features with spherical
    harmonics of the direction. Parameters are conv.IN,OUT.radial_func.net.* and, for self-interaction,
    to_kernel_self.D. Fibers map degrees to channels.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        fiber_in: Mapping[int, int],
        fiber_out: Mapping[int, int],
        edge_inputs: int = 0,
    ) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, _core.Se3Conv.load, fiber_in, fiber_out, edge_inputs)


class Se3AttentionBlock(_Se3EdgeLayer):
    """Attention of the SE(3)-Transformer (arXiv 2006.10503), with the parameter names of NVIDIA's program.

    Fibers map degrees to channels: {0: 32, 1: 3}.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        fiber_in: Mapping[int, int],
        fiber_out: Mapping[int, int],
        edge_inputs: int = 0,
        heads: int = 4,
        channels_div: int = 2,
    ) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, _core.Se3AttentionBlock.load, fiber_in, fiber_out, edge_inputs, heads, channels_div)


def _initial_conv(
    rng: np.random.Generator,
    fiber_in: Mapping[int, int],
    fiber_out: Mapping[int, int],
    edge_inputs: int,
    use_layer_norm: bool,
    self_interaction: bool,
) -> dict[str, Any]:
    """Draw the parameters of Se3Conv."""
    hidden = 32

    def linear(inputs: int, *shape: int) -> Any:
        return rng.uniform(-(inputs**-0.5), inputs**-0.5, shape)

    state: dict[str, Any] = {}
    for d_out, c_out in fiber_out.items():
        for d_in, c_in in fiber_in.items():
            net, at = f"conv.{d_in},{d_out}.radial_func.net", 0
            for inputs in (edge_inputs + 1, hidden):
                state |= {
                    f"{net}.{at}.weight": linear(inputs, hidden, inputs),
                    f"{net}.{at}.bias": linear(inputs, hidden),
                }
                at += 1
                if use_layer_norm:
                    state |= {f"{net}.{at}.weight": np.ones(hidden), f"{net}.{at}.bias": np.zeros(hidden)}
                    at += 1
                at += 1  # a ReLU
            state[f"{net}.{at}.weight"] = linear(hidden, (2 * min(d_in, d_out) + 1) * c_in * c_out, hidden)
        if self_interaction and d_out in fiber_in:
            state[f"to_kernel_self.{d_out}"] = rng.normal(size=(c_out, fiber_in[d_out])) * fiber_in[d_out] ** -0.5
    return state


def _initial_linear(rng: np.random.Generator, fiber_in: Mapping[int, int], fiber_out: Mapping[int, int]) -> Any:
    """Draw the parameters of Se3Linear."""
    return {f"weights.{d}": rng.normal(size=(c, fiber_in[d])) * fiber_in[d] ** -0.5 for d, c in fiber_out.items()}


def _under(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": x for key, x in state.items()}


class Se3Transformer:
    """SE(3)-Transformer (arXiv 2006.10503): attention blocks, a norm after each, and a convolution.

    The state dict is that of NVIDIA's SE3Transformer with low_memory=True, whose convolutions have weights for each
    pair of degrees: graph_modules.0, 2, ... are blocks, 1, 3, ... norms, and the last one is the convolution. Fibers
    map degrees to channels: {0: 32, 1: 3}. The layers share one computation of the harmonics.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        num_layers: int,
        fiber_in: Mapping[int, int],
        fiber_hidden: Mapping[int, int],
        fiber_out: Mapping[int, int],
        edge_inputs: int = 0,
        heads: int = 4,
        channels_div: int = 2,
        norm: bool = True,
    ) -> None:
        """Pack the weights of a state dict. num_layers is the number of attention blocks."""
        self._max_degree = max([0, *fiber_in, *fiber_hidden, *fiber_out])
        self._modules: list[_FiberLayer | _Se3EdgeLayer] = []

        def add(layer: Callable[..., _FiberLayer | _Se3EdgeLayer], *options: Any) -> None:
            name = f"graph_modules.{len(self._modules)}"
            own = {key[len(name) + 1 :]: x for key, x in state.items() if key.startswith(f"{name}.")}
            try:
                self._modules.append(layer(own, *options))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

        fiber = fiber_in
        for _ in range(num_layers):
            add(Se3AttentionBlock, fiber, fiber_hidden, edge_inputs, heads, channels_div)
            if norm:
                add(Se3Norm, fiber_hidden)
            fiber = fiber_hidden
        add(Se3Conv, fiber, fiber_out, edge_inputs)
        extra = f"graph_modules.{len(self._modules)}."
        if any(key.startswith(extra) for key in state):
            raise ValueError(f"the state dict has {extra}*, but {num_layers} layers make {len(self._modules)} modules")

    def __call__(self, graph: Graph, xyz: Any, features: Mapping[int, Any], edge: Any | None = None) -> dict[int, Any]:
        """Return features by degree [n, channels, 2 d + 1] for positions xyz [n, 3]; edge is [E, edge_inputs]."""
        geometry = _core.Se3Graph.create(graph._graph, _floats(xyz), self._max_degree)
        x = dict(features)
        for module in self._modules:
            if isinstance(module, _FiberLayer):
                x = module(x)
            else:
                x = module._run(graph, lambda _: geometry, xyz, x, edge)
        return x

    def refresh(self) -> None:
        """Pack the tensors of the state dict again at the next call. NumPy arrays were copied, and stay."""
        for module in self._modules:
            module.refresh()

    @staticmethod
    def initial_state(
        num_layers: int,
        fiber_in: Mapping[int, int],
        fiber_hidden: Mapping[int, int],
        fiber_out: Mapping[int, int],
        edge_inputs: int = 0,
        channels_div: int = 2,
        norm: bool = True,
        use_layer_norm: bool = True,
        seed: int = 0,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Draw weights to train from, with the distributions of NVIDIA's program.

        use_layer_norm adds norms to the perceptrons of edges, as that program's argument does.
        """
        rng, fiber = np.random.default_rng(seed), fiber_in
        modules: list[dict[str, Any]] = []
        for _ in range(num_layers):
            value = {d: c // channels_div for d, c in fiber_hidden.items()}
            key = {d: c for d, c in value.items() if d in fiber}
            both = {d: c + key.get(d, 0) for d, c in value.items()}
            joined = {d: c + fiber.get(d, 0) for d, c in value.items()}
            modules.append(
                _under("to_key_value", _initial_conv(rng, fiber, both, edge_inputs, use_layer_norm, False))
                | _under("to_query", _initial_linear(rng, fiber, key))
                | _under("project", _initial_linear(rng, joined, fiber_hidden))
            )
            if norm:
                widths = {f"layer_norms.{d}": c for d, c in fiber_hidden.items()}
                if len(set(fiber_hidden.values())) == 1:
                    widths = {"group_norm": sum(fiber_hidden.values())}
                modules.append({f"{name}.weight": np.ones(c) for name, c in widths.items()})
                modules[-1] |= {f"{name}.bias": np.zeros(c) for name, c in widths.items()}
            fiber = fiber_hidden
        modules.append(_initial_conv(rng, fiber, fiber_out, edge_inputs, use_layer_norm, True))
        state: dict[str, Any] = {}
        for i, module in enumerate(modules):
            state |= _under(f"graph_modules.{i}", module)
        return {key: np.asarray(x, np.float32) for key, x in state.items()}


class MpnnEncoderLayer(_Differentiable):
    """Encoder layer of ProteinMPNN: parameters W1 to W3, W11 to W13, norm1 to norm3, dense.W_in, dense.W_out.

    Edges point from a neighbour to the residue that attends to it.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, _core.MpnnLayer.load)
        if not self._layer.encoder:
            raise ValueError("an encoder layer needs W11, W12, W13 and norm3")

    def __call__(
        self, graph: Graph, nodes: Any, edge: Any, node_mask: Any | None = None, edge_mask: Any | None = None
    ) -> tuple[Any, Any]:
        """Update nodes [n, H] and edges [E, H]; node_mask [n] multiplies nodes, edge_mask [E] messages."""
        layer, masks = self._layer, (_mask(node_mask, "node_mask"), _mask(edge_mask, "edge_mask"))

        def run(*inputs: Any) -> tuple[Any, ...]:
            nodes, edge = (_floats(x) for x in inputs)
            out = empty(nodes, nodes.shape), empty(edge, edge.shape)
            layer.run(graph._graph, nodes, None, edge, *masks, *out)
            return out

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            nodes, edge = (_floats(x) for x in inputs)
            layer.backward(graph._graph, nodes, None, edge, *masks, *grads, found[0], None, found[1], parameters)

        nodes, edge = self._apply(run, backward, (nodes, edge))
        return nodes, edge


class MpnnDecoderLayer(_Differentiable):
    """Decoder layer of ProteinMPNN: parameters W1 to W3, norm1, norm2, dense.W_in, dense.W_out.

    Sources are rows [letter, node] of neighbours. A model that decodes in an order has two per residue: one for those
    that come before, and one, with letter 0 and the encoder's node, for those after.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Pack the weights of a state dict."""
        super().__init__(state, _core.MpnnLayer.load)
        if self._layer.encoder:
            raise ValueError("the state dict is that of an encoder layer: it has W11")

    def __call__(
        self,
        graph: Graph,
        nodes: Any,
        src: Any,
        edge: Any,
        node_mask: Any | None = None,
        edge_mask: Any | None = None,
    ) -> Any:
        """Update nodes [n, H] for sources [num_src, S] and edges [E, H]; masks are [n] and [E]."""
        layer, masks = self._layer, (_mask(node_mask, "node_mask"), _mask(edge_mask, "edge_mask"))

        def run(*inputs: Any) -> tuple[Any, ...]:
            nodes, src, edge = (_floats(x) for x in inputs)
            out = empty(nodes, nodes.shape)
            layer.run(graph._graph, nodes, src, edge, *masks, out, None)
            return (out,)

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            rows = (_floats(x) for x in inputs)
            layer.backward(graph._graph, *rows, *masks, grads[0], None, *found, parameters)

        return self._apply(run, backward, (nodes, src, edge))[0]


class ProteinMpnn(_Differentiable):
    """ProteinMPNN (Dauparas et al., 2022): letters of "ACDEFGHIKLMNPQRSTVWYX" for a backbone."""

    def __init__(self, state: Mapping[str, Any], neighbors: int = 48) -> None:
        """Pack a checkpoint's "model_state_dict"; neighbors is its "num_edges"."""
        super().__init__(state, lambda weights: _core.ProteinMpnn.load(weights, neighbors))

    def log_probabilities(self, xyz: Any, known: Any, index: Any, chain: Any, sequence: Any, order: Any) -> Any:
        """Return log-probabilities [n, 21] of letters given those that precede in order [n].

        xyz is [n, 4, 3] (N, CA, C, O), known [n], index and chain [n], sequence [n] in [0, 21). Gradients of xyz take
        the neighbours of each residue as constant.
        """
        named = {"index": index, "chain": chain, "sequence": sequence, "order": order}
        # Copies, for the backward pass: the caller may change its arrays before it runs.
        rest = (np.array(_flags(known, "known")), *(np.array(_ints(x, name)) for name, x in named.items()))
        model = self._layer

        def run(xyz: Any) -> tuple[Any, ...]:
            xyz = _floats(xyz)
            out = empty(xyz, (len(rest[0]), 21))
            model.log_probabilities(xyz, *rest, out)
            return (out,)

        def backward(inputs: Sequence[Any], grads: Sequence[Any], found: Sequence[Any], parameters: Any) -> None:
            model.backward(_floats(inputs[0]), *rest, grads[0], found[0], parameters)

        return self._apply(run, backward, (xyz,))[0]

    def sample(
        self, xyz: Any, known: Any, index: Any, chain: Any, sequence: Any, temperature: float = 0.1, seed: int = 0
    ) -> tuple[np.ndarray[Any, Any], float, float]:
        """Design a sequence: letters [n], the mean of -log p, and the share equal to `sequence`."""
        designed: tuple[np.ndarray[Any, Any], float, float] = self._layer.sample(
            _floats(xyz),
            _flags(known, "known"),
            _ints(index, "index"),
            _ints(chain, "chain"),
            _ints(sequence, "sequence"),
            temperature,
            seed,
        )
        return designed
