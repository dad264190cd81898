#include "app/speculative_flags.h"

#include <fmt/format.h>

#include <algorithm>

namespace moesaic::app {

void AddSpeculativeFlags(Verb& verb, ModelFlags& flags) {
  engine::SpeculativeOptions& options = flags.speculative;
  options.method.clear();  // unsaid, so that "off" can be said where a file or the environment has a model
  const char* group = "Speculative decoding";
  verb.AddOption(
          "--speculative", options.method,
          "Draft tokens and verify them together, which says the same in fewer steps: off, mtp (the "
          "model's own module), ngram (what followed the last tokens before), mtp+ngram (whichever promises "
          "more), draft (a second model), or auto (draft with --speculative-model, else mtp+ngram where the "
          "model has a module, else ngram). Unsaid: draft with --speculative-model, else off")
      .OneOf({"off", "auto", "mtp", "ngram", "mtp+ngram", "draft"})
      .Group(group);
  verb.AddOption("--num-speculative-tokens,--draft-max", options.most_tokens,
                 "Tokens drafted for a sequence and step at most; 0: 4 for mtp, 8 for ngram, 6 for "
                 "draft; mtp+ngram: these too, at most 4 with the module")
      .Range(0, engine::kMaxDrafts)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--speculative-model,--model-draft", flags.draft_model,
                 "A smaller model of the same vocabulary that drafts, unless --speculative says off")
      .Transform(ResolveModelPath)
      .Group(group);
  verb.AddFlag("--adaptive-drafts,!--no-adaptive-drafts", options.adaptive,
               "Draft as many as pay by what was measured; without, always the most")
      .DefaultText("true")
      .Group(group);
  verb.AddOption("--prompt-lookup-min", options.prompt_lookup_min,
                 "ngram, mtp+ngram: fewest last tokens that must have stood before")
      .Range(1, 1024)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--prompt-lookup-max", options.prompt_lookup_max,
                 "ngram, mtp+ngram: most that are looked for")
      .Range(1, 1024)
      .ShowDefault()
      .Group(group);
}

std::string DescribeSpeculation(const engine::Engine& engine) {
  const engine::SpeculativeOptions& options = engine.speculative();
  if (options.method == "off") return "off";
  const engine::SpeculationStats stats = engine.stats().speculation;
  const bool has_both = options.method == "mtp+ngram";
  std::string text =
      fmt::format("{}, {} {} tokens a step", options.method, options.adaptive ? "up to" : "always",
                  has_both ? std::min(options.most_tokens, engine::kMtpTokens) : options.most_tokens);
  if (has_both) text += fmt::format(" from the module, or up to {} looked up", options.most_tokens);
  if (stats.draft_tokens > 0) {
    text += fmt::format(", {} of {} drafted tokens accepted", stats.accepted_tokens, stats.draft_tokens);
  }
  return text;
}

}  // namespace moesaic::app
