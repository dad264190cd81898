// Micro-kernels of key summaries of each instruction set; micro_kernels.h documents them.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void DigestAvx2(const DigestTask& task);
void DigestAvx512(const DigestTask& task);
void DigestScoresAvx2(const DigestScores& scores);
void DigestScoresAvx512(const DigestScores& scores);
// dimensions of whole tiles; falls back to AVX-512 otherwise
void DigestScoresAmx(const DigestScores& scores);
void DigestEstimatesAvx2(const DigestEstimates& estimates);
void DigestEstimatesAvx512(const DigestEstimates& estimates);
void DigestEstimatesAvx512Vnni(const DigestEstimates& estimates);  // bit-identical to Amx
void DigestEstimatesAmx(const DigestEstimates& estimates);
void BlockSharesAvx2(float* scores, int rows, int blocks, float* shares);
void BlockSharesAvx512(float* scores, int rows, int blocks, float* shares);
void SketchScoresAvx2(const SketchScores& scores);
void SketchScoresAvx512(const SketchScores& scores);
void SketchScoresAvx512Vnni(const SketchScores& scores);
void SketchScoresAmx(const SketchScores& scores);
float ExpSumAvx2(const float* x, const float* y, float spread, float shift, int n, float* out);
float ExpSumAvx512(const float* x, const float* y, float spread, float shift, int n, float* out);

}  // namespace moesaic::kernels::cpu
