from typing import Any

from typing_extensions import Self

def set_num_threads(threads: int) -> None:
    """Set the number of threads of all operators; 0 uses one per core."""

def get_num_threads() -> int:
    """Return the number of threads of all operators."""

def kernels() -> str:
    """Return the instruction set of the selected kernels: "avx512", "avx2" or "ref"."""

class Segments:
    @staticmethod
    def from_index(index: Any, count: int) -> Segments: ...
    @staticmethod
    def from_ptr(ptr: Any, edges: int) -> Segments: ...
    @property
    def count(self) -> int: ...
    @property
    def edges(self) -> int: ...

class Graph:
    @staticmethod
    def from_coo(src: Any, dst: Any, num_src: int, num_dst: int) -> Graph: ...
    @staticmethod
    def from_csc(ptr: Any, src: Any, num_src: int) -> Graph: ...
    @property
    def num_src(self) -> int: ...
    @property
    def num_dst(self) -> int: ...
    @property
    def num_edges(self) -> int: ...
    @property
    def destinations(self) -> Segments: ...
    def reversed(self) -> Self: ...
    def matches(self, src: Any, dst: Any) -> bool: ...
    def copy_csc(self, ptr: Any, src: Any, edge: Any) -> None: ...

def segment(
    segments: Segments, reduce: str, src: Any, out: Any, arg: Any | None, alpha: float, beta: float
) -> None: ...
def segment_backward(segments: Segments, reduce: str, out_grad: Any, arg: Any | None, src_grad: Any) -> None: ...
def gather(segments: Segments, src: Any, out: Any) -> None: ...
def segment_softmax(segments: Segments, x: Any, out: Any) -> None: ...
def segment_softmax_backward(segments: Segments, y: Any, y_grad: Any, x_grad: Any) -> None: ...
def gspmm(graph: Graph, message: str, reduce: str, u: Any | None, e: Any | None, out: Any, arg: Any | None) -> None: ...
def gspmm_backward(
    graph: Graph,
    message: str,
    reduce: str,
    u: Any | None,
    e: Any | None,
    out_grad: Any,
    arg: Any | None,
    u_grad: Any | None,
    e_grad: Any | None,
) -> None: ...
def gsddmm(graph: Graph, op: str, lhs: Any, rhs: Any | None, lhs_target: str, rhs_target: str, out: Any) -> None: ...
def gsddmm_backward(
    graph: Graph,
    op: str,
    lhs: Any,
    rhs: Any | None,
    lhs_target: str,
    rhs_target: str,
    out_grad: Any,
    lhs_grad: Any | None,
    rhs_grad: Any | None,
) -> None: ...
def edge_attention(
    graph: Graph,
    heads: int,
    scale: float,
    q: Any,
    k: Any,
    v: Any,
    bias: Any | None,
    k_target: str,
    v_target: str,
    out: Any,
) -> None: ...
def edge_attention_backward(
    graph: Graph,
    heads: int,
    scale: float,
    q: Any,
    k: Any,
    v: Any,
    bias: Any | None,
    k_target: str,
    v_target: str,
    out_grad: Any,
    q_grad: Any | None,
    k_grad: Any | None,
    v_grad: Any | None,
    bias_grad: Any | None,
) -> None: ...
def nearest_graph(xyz: Any, k: int, window: int, self: bool, sets: Any | None) -> tuple[Any, Any]: ...
def radius_graph(xyz: Any, radius: float, max_neighbors: int, self: bool, sets: Any | None) -> tuple[Any, Any]: ...

class EdgeMlp:
    @staticmethod
    def load(
        weights: dict[str, Any],
        dst_inputs: int,
        src_inputs: int,
        distance: bool,
        edge_inputs: int,
        activation: str,
        activate_last: bool,
        weight_dtype: str,
    ) -> EdgeMlp: ...
    @property
    def outputs(self) -> int: ...
    def reduce(
        self,
        graph: Graph,
        reduce: str,
        scale: float,
        dst: Any,
        src: Any,
        edge: Any | None,
        dst_xyz: Any | None,
        src_xyz: Any | None,
        out: Any,
    ) -> None: ...
    def reduce_backward(
        self,
        graph: Graph,
        reduce: str,
        scale: float,
        dst: Any,
        src: Any,
        edge: Any | None,
        dst_xyz: Any | None,
        src_xyz: Any | None,
        out_grad: Any,
        dst_grad: Any | None,
        src_grad: Any | None,
        edge_grad: Any | None,
        dst_xyz_grad: Any | None,
        src_xyz_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class EgnnLayer:
    @staticmethod
    def load(
        weights: dict[str, Any],
        node_inputs: int,
        edge_inputs: int,
        residual: bool,
        mean: bool,
        normalize: bool,
        tanh: bool,
        weight_dtype: str,
    ) -> EgnnLayer: ...
    @property
    def outputs(self) -> int: ...
    def run(self, graph: Graph, h: Any, x: Any, edge: Any | None, h_out: Any, x_out: Any) -> None: ...
    def backward(
        self,
        graph: Graph,
        h: Any,
        x: Any,
        edge: Any | None,
        h_grad: Any,
        x_grad: Any,
        h_in_grad: Any | None,
        x_in_grad: Any | None,
        edge_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class TriangleMultiplication:
    @staticmethod
    def load(weights: dict[str, Any], incoming: bool) -> TriangleMultiplication: ...
    def run(self, n: int, mask: Any | None, z: Any) -> None: ...
    def backward(
        self, n: int, mask: Any | None, z: Any, out_grad: Any, z_grad: Any | None, parameters: dict[str, Any]
    ) -> None: ...

class TriangleAttention:
    @staticmethod
    def load(weights: dict[str, Any], heads: int, ending: bool) -> TriangleAttention: ...
    def run(self, n: int, mask: Any | None, z: Any) -> None: ...
    def backward(
        self, n: int, mask: Any | None, z: Any, out_grad: Any, z_grad: Any | None, parameters: dict[str, Any]
    ) -> None: ...

class MsaAttention:
    @staticmethod
    def load(weights: dict[str, Any], heads: int) -> MsaAttention: ...
    def run(self, s: int, n: int, mask: Any | None, z: Any | None, m: Any) -> None: ...
    def backward(
        self,
        s: int,
        n: int,
        mask: Any | None,
        z: Any | None,
        m: Any,
        out_grad: Any,
        z_grad: Any | None,
        m_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class OuterProductMean:
    @staticmethod
    def load(weights: dict[str, Any]) -> OuterProductMean: ...
    def run(self, s: int, n: int, mask: Any | None, m: Any, z: Any) -> None: ...
    def backward(
        self,
        s: int,
        n: int,
        mask: Any | None,
        m: Any,
        out_grad: Any,
        m_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class EvoformerBlock:
    @staticmethod
    def load(weights: dict[str, Any], msa_heads: int, pair_heads: int) -> EvoformerBlock: ...
    def run(self, s: int, n: int, msa_mask: Any | None, pair_mask: Any | None, m: Any, z: Any) -> None: ...
    def backward(
        self,
        s: int,
        n: int,
        msa_mask: Any | None,
        pair_mask: Any | None,
        m: Any,
        z: Any,
        m_out_grad: Any,
        z_out_grad: Any,
        m_grad: Any | None,
        z_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class InvariantPointAttention:
    @staticmethod
    def load(
        weights: dict[str, Any], heads: int, dim: int, query_points: int, value_points: int
    ) -> InvariantPointAttention: ...
    def run(
        self,
        n: int,
        s: Any,
        z: Any,
        rotation: Any,
        translation: Any,
        mask: Any | None,
        out: Any,
    ) -> None: ...
    def backward(
        self,
        n: int,
        s: Any,
        z: Any,
        rotation: Any,
        translation: Any,
        mask: Any | None,
        out_grad: Any,
        s_grad: Any | None,
        z_grad: Any | None,
        rotation_grad: Any | None,
        translation_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class StructureModule:
    @staticmethod
    def load(
        weights: dict[str, Any], heads: int, dim: int, query_points: int, value_points: int, blocks: int
    ) -> StructureModule: ...
    @property
    def blocks(self) -> int: ...
    @property
    def has_geometry(self) -> bool: ...
    def run(
        self,
        n: int,
        single: Any,
        pair: Any,
        types: Any | None,
        mask: Any | None,
        frames: Any,
        angles: Any,
        unnormalized: Any,
        groups: Any | None,
        positions: Any | None,
        single_out: Any,
    ) -> None: ...
    def backward(
        self,
        n: int,
        single: Any,
        pair: Any,
        types: Any | None,
        mask: Any | None,
        stop_rotations: bool,
        frames: Any,
        angles: Any,
        unnormalized: Any,
        groups: Any | None,
        positions: Any | None,
        single_out: Any,
        single_grad: Any | None,
        pair_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class Se3Graph:
    @staticmethod
    def create(graph: Graph, xyz: Any, max_degree: int) -> Se3Graph: ...

class Se3Linear:
    @staticmethod
    def load(weights: dict[str, Any], fiber_in: dict[int, int], fiber_out: dict[int, int]) -> Se3Linear: ...
    def run(self, rows: int, x: dict[int, Any], out: dict[int, Any]) -> None: ...
    def backward(
        self,
        rows: int,
        x: dict[int, Any],
        out_grad: dict[int, Any],
        x_grads: dict[int, Any],
        parameters: dict[str, Any],
    ) -> None: ...

class Se3Norm:
    @staticmethod
    def load(weights: dict[str, Any], fiber: dict[int, int]) -> Se3Norm: ...
    def run(self, rows: int, x: dict[int, Any], out: dict[int, Any]) -> None: ...
    def backward(
        self,
        rows: int,
        x: dict[int, Any],
        out_grad: dict[int, Any],
        x_grads: dict[int, Any],
        parameters: dict[str, Any],
    ) -> None: ...

class Se3Conv:
    @staticmethod
    def load(
        weights: dict[str, Any], fiber_in: dict[int, int], fiber_out: dict[int, int], edge_inputs: int
    ) -> Se3Conv: ...
    def run(self, graph: Se3Graph, nodes: dict[int, Any], edge: Any | None, out: dict[int, Any]) -> None: ...
    def backward(
        self,
        graph: Se3Graph,
        nodes: dict[int, Any],
        edge: Any | None,
        out_grad: dict[int, Any],
        node_grads: dict[int, Any],
        edge_grad: Any | None,
        xyz_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class Se3AttentionBlock:
    @staticmethod
    def load(
        weights: dict[str, Any],
        fiber_in: dict[int, int],
        fiber_out: dict[int, int],
        edge_inputs: int,
        heads: int,
        channels_div: int,
    ) -> Se3AttentionBlock: ...
    def run(self, graph: Se3Graph, nodes: dict[int, Any], edge: Any | None, out: dict[int, Any]) -> None: ...
    def backward(
        self,
        graph: Se3Graph,
        nodes: dict[int, Any],
        edge: Any | None,
        out_grad: dict[int, Any],
        node_grads: dict[int, Any],
        edge_grad: Any | None,
        xyz_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class MpnnLayer:
    @staticmethod
    def load(weights: dict[str, Any]) -> MpnnLayer: ...
    @property
    def encoder(self) -> bool: ...
    def run(
        self,
        graph: Graph,
        nodes: Any,
        src: Any | None,
        edge: Any,
        node_mask: Any | None,
        edge_mask: Any | None,
        nodes_out: Any,
        edge_out: Any | None,
    ) -> None: ...
    def backward(
        self,
        graph: Graph,
        nodes: Any,
        src: Any | None,
        edge: Any,
        node_mask: Any | None,
        edge_mask: Any | None,
        nodes_out_grad: Any,
        edge_out_grad: Any | None,
        nodes_grad: Any | None,
        src_grad: Any | None,
        edge_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...

class ProteinMpnn:
    @staticmethod
    def load(weights: dict[str, Any], neighbors: int) -> ProteinMpnn: ...
    def log_probabilities(
        self, xyz: Any, known: Any, index: Any, chain: Any, sequence: Any, order: Any, out: Any
    ) -> None: ...
    def backward(
        self,
        xyz: Any,
        known: Any,
        index: Any,
        chain: Any,
        sequence: Any,
        order: Any,
        out_grad: Any,
        xyz_grad: Any | None,
        parameters: dict[str, Any],
    ) -> None: ...
    def sample(
        self, xyz: Any, known: Any, index: Any, chain: Any, sequence: Any, temperature: float, seed: int
    ) -> tuple[Any, float, float]: ...
