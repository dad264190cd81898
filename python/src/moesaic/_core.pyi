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
