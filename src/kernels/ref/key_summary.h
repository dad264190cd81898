// Reference implementations of the micro-kernels of key summaries.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::ref {

void KeySummary(const KeySummaryTask& task);
void KeySummaryEstimates(const kernels::KeySummaryEstimates& estimates);
void BlockShares(float* scores, int rows, int blocks, float* shares);
void SketchScores(const kernels::SketchScores& scores);

}  // namespace moesaic::kernels::ref
