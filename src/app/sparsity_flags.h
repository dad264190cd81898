// The flags of attention over chosen blocks.
#pragma once

#include <string>
#include <vector>

#include "app/flags.h"
#include "app/session.h"
#include "engine/engine.h"

namespace moesaic::app {

/// Declares --kv-sparsity, one of `modes`, --kv-sparsity-budget and what goes with them; --kv-sparsity-audit
/// for verbs that tell of audits. A budget without a mode means the first mode in which rows choose.
void AddSparsityFlags(Verb& verb, SparsityFlags& flags, const std::vector<std::string>& modes,
                      bool audits = true);

/// "decode, 2048 tokens a row, eps 1"; "off"; "dense unless a request asks".
std::string DescribeSparsity(const engine::SparsityOptions& options);

/// "12.5% of 1,024 blocks read, 3 of 96 choices fell back, ..."; what came of it, in a line.
std::string DescribeCounters(const kernels::SparsityCounters& counters);

}  // namespace moesaic::app
