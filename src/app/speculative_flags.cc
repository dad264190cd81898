#include "app/speculative_flags.h"

#include <fmt/format.h>

#include <algorithm>

namespace moesaic::app {

void AddSpeculativeFlags(Verb& verb, ModelFlags& flags) {
  engine::SpeculativeOptions& options = flags.speculative;
  // "off" must differ from no value, because a file or the environment may set a draft model.
  options.method.clear();
  const char* group = "Speculative decoding";
  verb.AddOption(
          "--speculative", options.method,
          "Speculative decoding drafts tokens and verifies them together, with the same output in fewer "
          "steps: off, mtp (the model's own module), ngram (tokens that followed the last ones earlier), "
          "mtp+ngram (the more promising of both), draft (a second model), or auto (draft with "
          "--speculative-model, else mtp+ngram if the model has a module, else ngram). Default: draft with "
          "--speculative-model, else off")
      .OneOf({"off", "auto", "mtp", "ngram", "mtp+ngram", "draft"})
      .Group(group);
  verb.AddOption("--num-speculative-tokens,--draft-max", options.most_tokens,
                 "Maximum number of tokens drafted per sequence and step; 0: 4 for mtp, 8 for ngram, 6 for "
                 "draft; mtp+ngram: the same, at most 4 from the module")
      .Range(0, engine::kMaxDrafts)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--speculative-model,--model-draft", flags.draft_model,
                 "Smaller model with the same vocabulary for drafting, unless --speculative is off")
      .Transform(ResolveModelPath)
      .Group(group);
  verb.AddFlag("--adaptive-drafts,!--no-adaptive-drafts", options.adaptive,
               "Adapt the number of drafted tokens to measured gains; without: always the maximum")
      .DefaultText("true")
      .Group(group);
  verb.AddOption("--prompt-lookup-min", options.prompt_lookup_min,
                 "ngram, mtp+ngram: minimum number of last tokens that must have occurred before")
      .Range(1, 1024)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--prompt-lookup-max", options.prompt_lookup_max,
                 "ngram, mtp+ngram: maximum number of last tokens to look up")
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
