// Every token's score, as choosing tokens without a trained indexer needs it.
#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/micro_kernels.h"
#include "tensor/dtype.h"

namespace moesaic::bench {

/// Products of 64 keys [key_dim], of bfloat16 and `stride` bytes apart, with up to kScoreGroup queries,
/// rounded to bfloat16: scores [64][kScoreGroup], of idle rows 0.
struct TokenScores {
  const std::byte* keys;
  int64_t stride;
  int key_dim;
  const float* q;  // [rows][key_dim]
  float scale;     // multiplies q
  int rows;
  std::byte* packed;  // [key_dim * 32] bytes, 64-byte aligned: the queries as PackTokenQueries leaves them
  float* scores;
};

/// Whether the processor has products of bfloat16, as tiles or in registers, and keys are whole steps.
bool CanScoreTokens(tensor::DType dtype, int key_dim);
void PackTokenQueries(const TokenScores& task);
void ScoreTokens(const TokenScores& task);

}  // namespace moesaic::bench
