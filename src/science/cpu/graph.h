// Micro-kernels of graph operators for one instruction set each.
#pragma once

#include "science/micro_kernels.h"

namespace moesaic::graph::cpu {

void ReduceAvx2(const ReduceTask& task);
void EdgeMapAvx2(const EdgeMapTask& task);
void SoftmaxAvx2(const SoftmaxTask& task);
void EdgeAttentionAvx2(const EdgeAttentionTask& task);

void ReduceAvx512(const ReduceTask& task);
void EdgeMapAvx512(const EdgeMapTask& task);
void SoftmaxAvx512(const SoftmaxTask& task);
void EdgeAttentionAvx512(const EdgeAttentionTask& task);

}  // namespace moesaic::graph::cpu
