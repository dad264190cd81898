#include "app/sparsity_flags.h"

#include <fmt/format.h>

#include <algorithm>

#include "tensor/kv_layout.h"

namespace moesaic::app {

void AddSparsityFlags(Verb& verb, SparsityFlags& flags, const std::vector<std::string>& modes, bool audits) {
  const char* group = "Block-sparse attention";
  flags.with_budget = *std::find_if(modes.begin(), modes.end(),
                                    [](const auto& mode) { return mode != "off" && mode != "dense"; });
  std::string help = "Rows that read only chosen KV blocks: off";
  for (const std::string& mode : modes) {
    if (mode == "dense") help += ", dense (none, but requests may enable it by kv_sparsity)";
    if (mode == "decode") help += ", decode (rows of output tokens)";
    if (mode == "all") help += ", all (rows of prompts, too)";
  }
  verb.AddOption(
          "--kv-sparsity", flags.mode,
          fmt::format("{}. Default: {} with --kv-sparsity-budget, otherwise off", help, flags.with_budget))
      .OneOf(modes)
      .Group(group);
  verb.AddOption("--kv-sparsity-budget", flags.budget,
                 "Maximum tokens that a row reads, rounded up to blocks of 64; 0: 2048")
      .Range(0, 1 << 24)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--kv-sparsity-reuse", flags.options.defaults.reuse,
                 "Number of adjacent tokens that share the choice of the first one; 1: each row chooses")
      .Range(1, tensor::kKvBlockTokens)
      .ShowDefault()
      .Group(group);
  verb.AddOption(
          "--kv-sparsity-summary", flags.summary,
          "Kind of key summary that scores a block: box (bounds of its keys) or sketch (also signs of every "
          "key: finds single tokens, but takes 3 to 20 times as long to choose and 5 to 8 times the memory)")
      .OneOf({"box", "sketch"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--kv-sparsity-dense-layers", flags.options.dense_layers,
                 "Number of first layers that read all blocks")
      .Range(0, 1 << 16)
      .ShowDefault()
      .Group(group);
  if (!audits) {
    flags.options.audit_every = 0;
    return;
  }
  verb.AddOption("--kv-sparsity-audit", flags.options.audit_every,
                 "One of this many choices is compared with dense attention for the metrics; 0: none")
      .Range(0, 1 << 30)
      .ShowDefault()
      .Group(group);
}

std::string DescribeSparsity(const engine::SparsityOptions& options) {
  if (!options.key_summaries) return "off";
  const engine::RequestSparsity& defaults = options.defaults;
  if (defaults.mode == engine::SparsityMode::kDense) return "dense unless a request asks";
  std::string text = fmt::format("{}, {} tokens a row, from layer {} on", ToString(defaults.mode),
                                 defaults.budget, options.dense_layers);
  if (defaults.reuse > 1) text += fmt::format(", chosen for {} tokens", defaults.reuse);
  return text;
}

std::string DescribeCounters(const kernels::SparsityCounters& counters) {
  if (counters.selections == 0) return "nothing was left out";
  std::string text = fmt::format(
      "{:.1f}% of the blocks read by {} choices",
      100.0 * static_cast<double>(counters.blocks_read) / static_cast<double>(counters.blocks_all),
      counters.selections);
  if (counters.reused > 0) {
    text += fmt::format("; {} took over an earlier choice", counters.reused);
  }
  if (const int64_t audited = counters.missed.count(); audited > 0) {
    text += fmt::format(
        "; {} audited heads missed {:.2f}% of their attention in the mean, half at most {:g}%, "
        "95% at most {:g}%",
        audited, 100 * counters.missed.sum / static_cast<double>(audited),
        100 * counters.missed.Quantile(0.5), 100 * counters.missed.Quantile(0.95));
  }
  return text;
}

}  // namespace moesaic::app
