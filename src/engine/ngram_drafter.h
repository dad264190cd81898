// Drafts the tokens that followed an earlier occurrence of the last tokens: prompt lookup (Saxena, "Prompt
// lookup decoding", 2023), with vLLM's rules.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/drafter.h"

namespace moesaic::engine {

/// Finds the earliest other occurrence of the last n tokens, for the greatest n in [shortest, longest] that
/// has one, and returns up to `most` tokens after it; empty if there is none. O(tokens x longest) at worst,
/// usually one pass over the tokens.
std::span<const int32_t> LookUp(std::span<const int32_t> tokens, int shortest, int longest, int most);

class NgramDrafter : public Drafter {
 public:
  /// Limits with the meaning of vLLM's prompt_lookup_min and prompt_lookup_max; 1 <= shortest <= longest.
  NgramDrafter(int shortest, int longest) : shortest_(shortest), longest_(longest) {}
  void Keep(const std::vector<std::unique_ptr<Sequence>>& running) override;
  int Limit(const Sequence& sequence, int most) override;
  int PendingRows(const Sequence&) const override { return 0; }
  std::span<const int32_t> Found(const Sequence& sequence) const override;
  bool is_free() const override { return true; }
  Status Draft(std::span<const DraftJob> jobs) override;

 private:
  const int shortest_, longest_;
  std::unordered_map<const Sequence*, std::span<const int32_t>> found_;  // set by Limit in this step
};

}  // namespace moesaic::engine
