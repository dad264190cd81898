// Flags of block-sparse attention.
#pragma once

#include <string>
#include <vector>

#include "app/flags.h"
#include "app/session.h"
#include "engine/engine.h"

namespace moesaic::app {

/// Declares --kv-sparsity, one of `modes`, and the flags of its settings; --kv-sparsity-audit only if the
/// verb reports audits. A budget without a mode selects the first of `modes` in which rows choose.
void AddSparsityFlags(Verb& verb, SparsityFlags& flags, const std::vector<std::string>& modes,
                      bool audits = true);

/// Returns a text such as "decode, 2048 tokens a row, from layer 2 on", "off" or "dense unless a request
/// asks".
std::string DescribeSparsity(const engine::SparsityOptions& options);

/// Returns a line such as "12.5% of the blocks read by 96 choices; 24 took over an earlier choice".
std::string DescribeCounters(const kernels::SparsityCounters& counters);

}  // namespace moesaic::app
