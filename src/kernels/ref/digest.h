// Reference implementations of the micro-kernels of key summaries.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::ref {

void Digest(const DigestTask& task);
void DigestScores(const kernels::DigestScores& scores);
void DigestEstimates(const kernels::DigestEstimates& estimates);
void BlockShares(float* scores, int rows, int blocks, float* shares);
void SketchScores(const kernels::SketchScores& scores);
float ExpSum(const float* x, const float* y, float spread, float shift, int n, float* out);

}  // namespace moesaic::kernels::ref
