// Every token's score, as choosing tokens without a trained indexer needs it.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace moesaic::bench {

constexpr int kScoreRows = 16;

/// Products of 64 keys [key_dim], `stride` bytes apart, with up to kScoreRows queries: scores
/// [64][kScoreRows], of idle rows 0. By tiles where the processor has them and keys are whole ones, queries
/// rounded to bfloat16; else plainly.
struct TokenScores {
  const std::byte* keys;
  int64_t stride;
  tensor::DType dtype;  // kBF16, or kI8 whose scale is 1 here
  int key_dim;
  const float* q;  // [rows][key_dim], scaled
  int rows;
  std::byte* packed;  // [key_dim * 32] bytes, 64-byte aligned: the queries as PackTokenQueries leaves them
  float* scores;
};
void PackTokenQueries(const TokenScores& task);
void ScoreTokens(const TokenScores& task);

}  // namespace moesaic::bench
