// Prompts, options and outputs of tests of block-sparse attention in the engine.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace moesaic::engine {

/// Tokens and their log-probabilities.
using SparseOutput = std::map<RequestId, std::vector<std::pair<int32_t, float>>>;

/// Returns prompts of 300, 330, 385 and 70 tokens. The first two begin with the same four blocks.
inline std::vector<std::vector<int32_t>> SparsePrompts(int64_t vocab_size) {
  std::vector<std::vector<int32_t>> prompts;
  std::mt19937 rng(1);
  for (const int length : {300, 330, 385, 70}) {
    for (int32_t& id : prompts.emplace_back(length)) id = static_cast<int32_t>(rng() % vocab_size);
  }
  std::copy_n(prompts[0].begin(), 256, prompts[1].begin());
  return prompts;
}

/// Returns options by which all layers but the first choose, and every choice is audited.
inline SparsityOptions SparseOptions(SparsityMode mode, int budget) {
  return {.key_summaries = true,
          .defaults = {.mode = mode, .budget = budget},
          .dense_layers = 1,
          .audit_every = 1};
}

/// Runs all prompts at once, with 120 greedy tokens each. Repeats a step that fails with "undone".
inline SparseOutput RunSparse(Engine& engine, const std::vector<std::vector<int32_t>>& prompts,
                              std::optional<RequestSparsity> sparsity = std::nullopt) {
  for (const std::vector<int32_t>& prompt : prompts) {
    Request request;
    request.prompt = prompt;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 120;
    request.sampling.logprobs = 0;
    request.sparsity = sparsity;
    const auto id = engine.Add(std::move(request));
    EXPECT_TRUE(id.ok()) << Message(id.status());
  }
  SparseOutput said;
  while (!engine.idle()) {
    std::vector<TokenEvent> events;
    const Status stepped = engine.Step(&events);
    if (!stepped.ok() && Message(stepped) == "undone") continue;
    EXPECT_TRUE(stepped.ok()) << Message(stepped);
    if (!stepped.ok()) break;
    for (const TokenEvent& event : events) {
      if (event.token) said[event.request].emplace_back(*event.token, event.logprobs.logprob);
    }
  }
  return said;
}

/// Expects equal tokens, and log-probabilities that differ by at most `tolerance`.
inline void ExpectSameOutput(const SparseOutput& a, const SparseOutput& b, double tolerance,
                             const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [id, tokens] : a) {
    const auto& others = b.at(id);
    ASSERT_EQ(tokens.size(), others.size()) << what;
    for (size_t i = 0; i < tokens.size(); ++i) {
      ASSERT_EQ(tokens[i].first, others[i].first) << what << ", request " << id << ", token " << i;
      ASSERT_NEAR(tokens[i].second, others[i].second, tolerance)
          << what << ", request " << id << ", token " << i;
    }
  }
}

}  // namespace moesaic::engine
