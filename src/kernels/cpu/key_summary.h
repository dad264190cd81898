// Micro-kernels of key summaries of each instruction set; micro_kernels.h documents them.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void KeySummaryAvx2(const KeySummaryTask& task);
void KeySummaryAvx512(const KeySummaryTask& task);
void KeySummaryScoresAvx2(const KeySummaryScores& scores);
void KeySummaryScoresAvx512(const KeySummaryScores& scores);
// dimensions of whole tiles; falls back to AVX-512 otherwise
void KeySummaryScoresAmx(const KeySummaryScores& scores);
void KeySummaryEstimatesAvx2(const KeySummaryEstimates& estimates);
void KeySummaryEstimatesAvx512(const KeySummaryEstimates& estimates);
void KeySummaryEstimatesAvx512Vnni(const KeySummaryEstimates& estimates);  // bit-identical to Amx
void KeySummaryEstimatesAmx(const KeySummaryEstimates& estimates);
void BlockSharesAvx2(float* scores, int rows, int blocks, float* shares);
void BlockSharesAvx512(float* scores, int rows, int blocks, float* shares);
void SketchScoresAvx2(const SketchScores& scores);
void SketchScoresAvx512(const SketchScores& scores);
void SketchScoresAvx512Vnni(const SketchScores& scores);
void SketchScoresAmx(const SketchScores& scores);
float ExpSumAvx2(const float* x, const float* y, float spread, float shift, int n, float* out);
float ExpSumAvx512(const float* x, const float* y, float spread, float shift, int n, float* out);

}  // namespace moesaic::kernels::cpu
