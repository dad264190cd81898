#include "app/sparsity_flags.h"

#include <fmt/format.h>

#include <algorithm>

namespace moesaic::app {

void AddSparsityFlags(Verb& verb, SparsityFlags& flags, const std::vector<std::string>& modes, bool audits) {
  const char* group = "Block-sparse attention";
  flags.with_budget = *std::find_if(modes.begin(), modes.end(),
                                    [](const auto& mode) { return mode != "off" && mode != "dense"; });
  std::string help = "Which rows read chosen KV blocks only: off";
  for (const std::string& mode : modes) {
    if (mode == "dense") help += ", dense (none, unless a request's kv_sparsity asks)";
    if (mode == "decode") help += ", decode (those of output tokens)";
    if (mode == "all") help += ", all (those of prompts too)";
  }
  verb.AddOption("--kv-sparsity", flags.mode,
                 fmt::format("{}. Unsaid: {} with --kv-sparsity-budget, else off", help, flags.with_budget))
      .OneOf(modes)
      .Group(group);
  verb.AddOption("--kv-sparsity-budget", flags.budget,
                 "Tokens that a row reads at most, in blocks of 64; 0: 2048 where rows choose")
      .Range(0, 1 << 24)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--kv-sparsity-reuse", flags.options.defaults.reuse,
                 "So many tokens in a row read the blocks that the first of them chose; 1: each chooses")
      .Range(1, 64)
      .ShowDefault()
      .Group(group);
  verb.AddOption(
          "--kv-sparsity-digest", flags.digest,
          "What blocks are chosen by: box (bounds of their keys) or sketch (signs of every key: finds single "
          "tokens, takes 3 to 20 times the time to choose and five to eight times the memory)")
      .OneOf({"box", "sketch"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--kv-sparsity-dense-layers", flags.options.dense_layers,
                 "First layers that read all blocks")
      .Range(0, 1 << 16)
      .ShowDefault()
      .Group(group);
  if (!audits) {
    flags.options.audit_every = 0;
    return;
  }
  verb.AddOption("--kv-sparsity-audit", flags.options.audit_every,
                 "One of so many choices is held against dense attention, for the metrics; 0: none")
      .Range(0, 1 << 30)
      .ShowDefault()
      .Group(group);
}

std::string DescribeSparsity(const engine::SparsityOptions& options) {
  if (!options.digests) return "off";
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
