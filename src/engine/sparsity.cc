#include "engine/sparsity.h"

#include <fmt/format.h>

#include <string_view>

#include "kernels/sketch.h"
#include "tensor/kv_layout.h"

namespace moesaic::engine {

StatusOr<SparsityMode> ParseSparsityMode(const std::string& name) {
  for (const SparsityMode mode : {SparsityMode::kDense, SparsityMode::kDecode, SparsityMode::kAll}) {
    if (name == ToString(mode)) return mode;
  }
  return InvalidArgument("the mode must be dense, decode or all, found \"{}\"", name);
}

const char* ToString(SparsityMode mode) {
  switch (mode) {
    case SparsityMode::kDense:
      return "dense";
    case SparsityMode::kDecode:
      return "decode";
    case SparsityMode::kAll:
      return "all";
  }
  return "";
}

Status CheckSparsity(const RequestSparsity& sparsity, const SparsityOptions& options) {
  if (sparsity.budget < kMinSparsityBudget) {
    return InvalidArgument("kv_sparsity: the budget must be at least {} tokens, found {}", kMinSparsityBudget,
                           sparsity.budget);
  }
  if (sparsity.reuse < 1 || sparsity.reuse > tensor::kKvBlockTokens) {
    return InvalidArgument("kv_sparsity: reuse must be in [1, {}], found {}", tensor::kKvBlockTokens,
                           sparsity.reuse);
  }
  if (sparsity.mode != SparsityMode::kDense && !options.key_summaries) {
    return InvalidArgument("kv_sparsity: mode {} needs the key summaries that --kv-sparsity turns on",
                           ToString(sparsity.mode));
  }
  return OkStatus();
}

kernels::SparsitySettings SparsitySettingsOf(const RequestSparsity& sparsity, const SparsityOptions& options,
                                             int prompt) {
  return {.budget_blocks = tensor::KvBlocksFor(sparsity.budget),
          .first_position = sparsity.mode == SparsityMode::kDecode ? prompt : 0,
          .reuse = sparsity.reuse,
          .audit_every = options.audit_every};
}

std::string NamespaceOf(const std::string& name, const RequestSparsity& sparsity) {
  constexpr std::string_view kOurs = "kv_sparsity=";
  if (sparsity.mode == SparsityMode::kAll) {
    std::string chosen = fmt::format("{}{}", kOurs, tensor::KvBlocksFor(sparsity.budget));
    if (sparsity.reuse > 1) chosen += fmt::format(",reuse={}", sparsity.reuse);
    return fmt::format("{};{}", chosen, name);
  }
  return name.starts_with(kOurs) ? fmt::format("{};{}", kOurs, name) : name;
}

StatusOr<KeySummaryKind> ParseKeySummaryKind(const std::string& name) {
  if (name == "box") return KeySummaryKind::kBox;
  if (name == "sketch") return KeySummaryKind::kSketch;
  return InvalidArgument("key summaries must be box or sketch, found \"{}\"", name);
}

int64_t KeySummaryBytesOf(const models::KvSpec& kv, KeySummaryKind kind) {
  return kv.heads * kernels::KeySummaryBytes(kv.key_dim, kv.shared ? kv.value_dim : kv.key_dim,
                                             kind == KeySummaryKind::kSketch);
}

void AddCounters(const kernels::SparsityCounters& part, kernels::SparsityCounters* sum) {
  sum->selections += part.selections;
  sum->reused += part.reused;
  sum->rechosen += part.rechosen;
  sum->blocks_read += part.blocks_read;
  sum->blocks_all += part.blocks_all;
  for (size_t i = 0; i < part.missed.counts.size(); ++i) sum->missed.counts[i] += part.missed.counts[i];
  sum->missed.sum += part.missed.sum;
}

}  // namespace moesaic::engine
