"""Graph operators and layers of molecular models, computed by C++ kernels on the CPU."""

from . import graph, layers, scatter
from ._core import get_num_threads, kernels, set_num_threads

__all__ = ["get_num_threads", "graph", "kernels", "layers", "scatter", "set_num_threads"]
__version__ = "0.1.0"
