// Micro-kernels of key summaries of each instruction set; micro_kernels.h documents them.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void KeySummaryAvx2(const KeySummaryTask& task);
void KeySummaryAvx512(const KeySummaryTask& task);
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

}  // namespace moesaic::kernels::cpu
