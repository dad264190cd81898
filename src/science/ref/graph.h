// Plain versions of the micro-kernels of graph operators.
#pragma once

#include "science/micro_kernels.h"

namespace moesaic::graph::ref {

void Reduce(const ReduceTask& task);
void EdgeMap(const EdgeMapTask& task);
void Softmax(const SoftmaxTask& task);
void EdgeAttention(const EdgeAttentionTask& task);

}  // namespace moesaic::graph::ref
