#include "engine/sparsity.h"

#include <fmt/format.h>

#include <string_view>

#include "cache/kv_pool.h"

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
  if (sparsity.budget < kLeastSparsityBudget) {
    return InvalidArgument("kv_sparsity: the budget must be at least {} tokens, found {}",
                           kLeastSparsityBudget, sparsity.budget);
  }
  if (!(sparsity.eps >= 0 && sparsity.eps <= 1)) {
    return InvalidArgument("kv_sparsity: eps must be in [0, 1], found {}", sparsity.eps);
  }
  if (sparsity.mode != SparsityMode::kDense && !options.digests) {
    return InvalidArgument("kv_sparsity: mode {} needs the digests that --kv-sparsity turns on",
                           ToString(sparsity.mode));
  }
  return OkStatus();
}

kernels::BlockSparsity BlockSparsityOf(const RequestSparsity& sparsity, const SparsityOptions& options,
                                       int prompt, kernels::SparsityCounters* counters) {
  return {.budget_blocks = cache::BlocksFor(sparsity.budget),
          .first_position = sparsity.mode == SparsityMode::kDecode ? prompt : 0,
          .eps = sparsity.eps,
          .audit_every = options.audit_every,
          .counters = counters};
}

std::string NamespaceOf(const std::string& name, const RequestSparsity& sparsity) {
  constexpr std::string_view kOurs = "kv_sparsity=";
  if (sparsity.mode == SparsityMode::kAll) {
    return fmt::format("{}{},{};{}", kOurs, cache::BlocksFor(sparsity.budget), sparsity.eps, name);
  }
  return name.starts_with(kOurs) ? fmt::format("{};{}", kOurs, name) : name;
}

int64_t DigestBytesOf(const models::KvSpec& kv) { return kv.heads * kernels::DigestBytes(kv.key_dim); }

}  // namespace moesaic::engine
