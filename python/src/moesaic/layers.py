"""Layers of molecular models on float32 arrays, for inference. Weights are state dicts with published names.

Arguments are NumPy arrays or PyTorch tensors; results are of the same kind. Gradients are not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import _core
from ._arrays import empty, is_torch, plain
from .graph import Graph

__all__ = [
    "EgnnLayer",
    "EvoformerBlock",
    "InvariantPointAttention",
    "ProteinMpnn",
    "Se3AttentionBlock",
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


def _ints(x: Any) -> Any:
    return np.ascontiguousarray(plain(x).numpy() if is_torch(x) else x, np.int32)


def _maybe(x: Any | None) -> Any | None:
    return None if x is None else _floats(x)


def _weights(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _floats(value) for name, value in state.items()}


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
    src, dst = _core.nearest_graph(_floats(xyz), k, seq_window, loop, None if sets is None else _ints(sets))
    return _like(xyz, src), _like(xyz, dst)


def radius_graph(
    xyz: Any, r: float, max_num_neighbors: int = 0, loop: bool = False, sets: Any | None = None
) -> tuple[Any, Any]:
    """Connect all points [n, 3] whose distance is at most r: src and dst, int64 [E], in the order of (dst, src).

    With max_num_neighbors, only the nearest of each destination are kept. Time grows with the number of edges.
    """
    boundaries = None if sets is None else _ints(sets)
    src, dst = _core.radius_graph(_floats(xyz), r, max_num_neighbors, loop, boundaries)
    return _like(xyz, src), _like(xyz, dst)


class EgnnLayer:
    """E(n)-equivariant layer (arXiv 2102.09844); parameters edge_mlp.*, node_mlp.*, coord_mlp.*, att_mlp.0."""

    def __init__(
        self,
        state: Mapping[str, Any],
        node_inputs: int,
        edge_inputs: int = 0,
        residual: bool = True,
        mean_coordinates: bool = True,
        normalize: bool = False,
        tanh: bool = False,
    ) -> None:
        """Pack the weights of a state dict."""
        self._layer = _core.EgnnLayer.load(
            _weights(state), node_inputs, edge_inputs, residual, mean_coordinates, normalize, tanh
        )

    def __call__(self, graph: Graph, h: Any, x: Any, edge: Any | None = None) -> tuple[Any, Any]:
        """Update features h [n, F] and coordinates x [n, 3]; edge is [E, edge_inputs]."""
        h, x = _floats(h), _floats(x)
        h_out, x_out = empty(h, (h.shape[0], self._layer.outputs)), empty(x, x.shape)
        self._layer.run(graph._graph, h, x, _maybe(edge), h_out, x_out)
        return h_out, x_out


class TriangleMultiplication:
    """AlphaFold 2's algorithms 11 and 12, with OpenFold's parameter names."""

    def __init__(self, state: Mapping[str, Any], incoming: bool = False) -> None:
        """Pack the weights of a state dict."""
        self._layer = _core.TriangleMultiplication.load(_weights(state), incoming)

    def __call__(self, z: Any, mask: Any | None = None) -> Any:
        """Return z [n, n, c] plus the update; mask is [n, n]."""
        out = _copy(z)
        self._layer.run(out.shape[0], _maybe(mask), out)
        return out


class TriangleAttention:
    """AlphaFold 2's algorithms 13 (starting node) and 14 (ending node), with OpenFold's parameter names."""

    def __init__(self, state: Mapping[str, Any], heads: int, ending: bool = False) -> None:
        """Pack the weights of a state dict."""
        self._layer = _core.TriangleAttention.load(_weights(state), heads, ending)

    def __call__(self, z: Any, mask: Any | None = None) -> Any:
        """Return z [n, n, c] plus the update; mask is [n, n]."""
        out = _copy(z)
        self._layer.run(out.shape[0], _maybe(mask), out)
        return out


class EvoformerBlock:
    """AlphaFold 2's algorithm 6, one block; scopes msa_att_row, msa_att_col, msa_transition, outer_product_mean, ..."""

    def __init__(self, state: Mapping[str, Any], msa_heads: int, pair_heads: int) -> None:
        """Pack the weights of a state dict."""
        self._block = _core.EvoformerBlock.load(_weights(state), msa_heads, pair_heads)

    def __call__(self, m: Any, z: Any, msa_mask: Any | None = None, pair_mask: Any | None = None) -> tuple[Any, Any]:
        """Update m [s, n, c_m] and z [n, n, c_z]; masks are [s, n] and [n, n]."""
        m_out, z_out = _copy(m), _copy(z)
        s, n = m_out.shape[:2]
        self._block.run(s, n, _maybe(msa_mask), _maybe(pair_mask), m_out, z_out)
        return m_out, z_out


class InvariantPointAttention:
    """AlphaFold 2's algorithm 22, with OpenFold's parameter names."""

    def __init__(
        self, state: Mapping[str, Any], heads: int = 12, dim: int = 16, query_points: int = 4, value_points: int = 8
    ) -> None:
        """Pack the weights of a state dict."""
        self._layer = _core.InvariantPointAttention.load(_weights(state), heads, dim, query_points, value_points)

    def __call__(self, s: Any, z: Any, rotation: Any, translation: Any, mask: Any | None = None) -> Any:
        """Return the update [n, c_s] of s for z [n, n, c_z], frames [n, 3, 3] and [n, 3]; mask is [n]."""
        s, z = _floats(s), _floats(z)
        out = empty(s, s.shape)
        self._layer.run(s.shape[0], s, z, _floats(rotation), _floats(translation), _maybe(mask), out)
        return out


class Se3AttentionBlock:
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
        self._fiber_out = dict(fiber_out)
        self._max_degree = max([*fiber_in, *fiber_out])
        self._block = _core.Se3AttentionBlock.load(
            _weights(state), dict(fiber_in), self._fiber_out, edge_inputs, heads, channels_div
        )

    def __call__(self, graph: Graph, xyz: Any, features: Mapping[int, Any], edge: Any | None = None) -> dict[int, Any]:
        """Return features by degree [n, channels, 2 d + 1] for positions xyz [n, 3]; edge is [E, edge_inputs]."""
        geometry = _core.Se3Graph.create(graph._graph, _floats(xyz), self._max_degree)
        nodes = {degree: _floats(x) for degree, x in features.items()}
        like = next(iter(nodes.values()))
        out = {d: empty(like, (graph.num_dst, c, 2 * d + 1)) for d, c in self._fiber_out.items()}
        self._block.run(geometry, nodes, _maybe(edge), out)
        return out


class ProteinMpnn:
    """ProteinMPNN (Dauparas et al., 2022): letters of "ACDEFGHIKLMNPQRSTVWYX" for a backbone."""

    def __init__(self, state: Mapping[str, Any], neighbors: int = 48) -> None:
        """Pack a checkpoint's "model_state_dict"; neighbors is its "num_edges"."""
        self._model = _core.ProteinMpnn.load(_weights(state), neighbors)

    def log_probabilities(
        self, xyz: Any, known: Any, index: Any, chain: Any, sequence: Any, order: Any
    ) -> np.ndarray[Any, Any]:
        """Return log-probabilities [n, 21] of letters given those that precede in order [n].

        xyz is [n, 4, 3] (N, CA, C, O), known [n], index and chain [n], sequence [n] in [0, 21).
        """
        out = np.empty((len(known), 21), np.float32)
        self._model.log_probabilities(
            _floats(xyz), _ints(known), _ints(index), _ints(chain), _ints(sequence), _ints(order), out
        )
        return out

    def sample(
        self, xyz: Any, known: Any, index: Any, chain: Any, sequence: Any, temperature: float = 0.1, seed: int = 0
    ) -> tuple[np.ndarray[Any, Any], float, float]:
        """Design a sequence: letters [n], the mean of -log p, and the share equal to `sequence`."""
        return self._model.sample(
            _floats(xyz), _ints(known), _ints(index), _ints(chain), _ints(sequence), temperature, seed
        )
