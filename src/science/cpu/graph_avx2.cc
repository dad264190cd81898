#include "science/cpu/graph.h"
#include "science/cpu/lanes_avx2-inl.h"
// Requires the lanes included above:
#include "science/cpu/elements-inl.h"
// Requires the elements included above:
#include "science/cpu/edge_map-inl.h"
#include "science/cpu/reduce-inl.h"
#include "science/cpu/softmax-inl.h"

namespace moesaic::graph::cpu {

void ReduceAvx2(const ReduceTask& task) { RunReduce(task); }
void EdgeMapAvx2(const EdgeMapTask& task) { RunEdgeMap(task); }
void SoftmaxAvx2(const SoftmaxTask& task) { RunSoftmax(task); }
void EdgeAttentionAvx2(const EdgeAttentionTask& task) { RunEdgeAttention(task); }

}  // namespace moesaic::graph::cpu
