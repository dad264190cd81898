// `moesaic perplexity MODEL FILE` measures how well a model predicts a text, and its distance to another
// model or to saved predictions.
#include <fmt/format.h>

#include "app/interrupt.h"
#include "app/model_score.h"
#include "app/output.h"
#include "app/sparsity_flags.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

struct PerplexityFlags {
  ScoreOptions score;
  std::string format = "text";
};

// Formats shares by layer, eight per line.
std::string FormatFlips(const nlohmann::json& flips) {
  constexpr size_t kInLine = 8;
  std::string text = fmt::format("{:.3f} % of tokens and layers have other experts; by layer",
                                 100 * flips["share"].get<double>());
  for (size_t i = 0; i < flips["layers"].size(); ++i) {
    const nlohmann::json& layer = flips["layers"][i];
    text += fmt::format("{}{}: {:.2f} %", i % kInLine == 0 ? "\n              " : ", ",
                        layer["layer"].get<int>(), 100 * layer["share"].get<double>());
  }
  return text;
}

void PrintScore(const nlohmann::json& report, const std::string& format) {
  if (format == "json") {
    Print("{}\n", report.dump());
    return;
  }
  const auto number = [&](const char* key) { return report[key].get<double>(); };
  const auto error = [&](const char* key, int digits, double scale = 1) {
    return report[key].is_null() ? "n/a" : fmt::format("{:.{}f}", scale * number(key), digits);
  };
  Print("tokens      {} scored of {} (window {}, stride {})\n", report["scored"].get<int64_t>(),
        report["tokens"].get<int64_t>(), report["window"].get<int>(), report["stride"].get<int>());
  Print("nll         {:.5f} ± {} nats a token\n", number("nll"), error("nll_error", 5));
  Print("perplexity  {:.4f} ± {}\n", number("perplexity"), error("perplexity_error", 4));
  if (!report.contains("kl")) return;
  Print("base        perplexity {:.4f}, ratio {:.5f} (95 %: {} to {}, {} windows)\n",
        number("base_perplexity"), number("ratio"), error("ratio_low", 5), error("ratio_high", 5),
        report["windows"].get<int64_t>());
  Print("KL          {:.6f} ± {} nats; median {:.6f}, p99 {:.6f}, max {:.6f}\n", number("kl"),
        error("kl_error", 6), number("kl_median"), number("kl_p99"), number("kl_max"));
  Print("same top-1  {:.3f} ± {} %\n", 100 * number("same_top"), error("same_top_error", 3, 100));
  if (report.contains("router_flips")) Print("router      {}\n", FormatFlips(report["router_flips"]));
}

Status RunPerplexity(const PerplexityFlags& options) {
  InterruptGuard guard;
  ASSIGN_OR_RETURN(const ModelScore score, ScoreModel(options.score));
  PrintScore(ScoreJson(score), options.format);
  if (score.sparsity) Tell("block-sparse attention: {}\n", DescribeCounters(*score.sparsity));
  return OkStatus();
}

}  // namespace

void AddPerplexity(Verb& root, VerbRun& run) {
  auto options = std::make_shared<PerplexityFlags>();
  ScoreOptions& score = options->score;
  Verb verb = root.AddVerb("perplexity", "Score a model on a text");
  AddModelFlags(verb, score.model, /*answers=*/false);
  verb.AddOption("FILE,--text", score.file, "Text file (UTF-8)").Required().ExistingFile();
  verb.AddOption("-c,--ctx-size", score.window,
                 "Window size in tokens; 0: 1024, or the model's context if that is less")
      .Range(0, 1 << 24)
      .ShowDefault();
  verb.AddOption("--stride", score.stride, "Distance between windows in tokens; 0: the window size")
      .Range(0, 1 << 24)
      .ShowDefault();
  verb.AddOption("--max-tokens", score.max_tokens, "Use only the first tokens of the text; 0: all")
      .Range(int64_t{0}, int64_t{1} << 31)
      .ShowDefault();
  AddKvDtypeFlag(verb, score.model.kv_dtype);
  AddSparsityFlags(verb, score.model.sparsity, {"off", "all"});
  verb.AddOption("--save-logits", score.save,
                 "File to write all log-probabilities to (docs/logprob-file.md)");
  verb.AddOption("--logits-dtype", score.logits_dtype, "Dtype of --save-logits: f16 or f32")
      .OneOf({"f16", "f32"})
      .ShowDefault();
  Flag base =
      verb.AddOption("--kl-base", score.base, "Compare with a file of --save-logits: KL(saved || this)")
          .ExistingFile();
  Flag reference = verb.AddOption("--reference", score.reference,
                                  "Compare with this model: KL(reference || this), and the routers' choices")
                       .Transform(ResolveModelPath)
                       .Excludes(base);
  verb.AddOption("--reference-dtype", score.reference_dtype,
                 "Weight format of --reference in memory, as for --dtype")
      .ShowDefault()
      .Needs(reference);
  verb.AddFlag("--one-at-a-time", score.one_at_a_time,
               "Run the reference first and keep its predictions in a temporary file. This is automatic "
               "if memory does not hold both models")
      .Needs(reference);
  verb.AddOption("--format", options->format, "Output format: text or json")
      .OneOf({"text", "json"})
      .ShowDefault();
  verb.Footer(
      "The text is tokenized once and cut into windows. A token is scored once, given the preceding\n"
      "tokens of its window. Errors are standard errors of the mean: those of nll and perplexity assume\n"
      "independent tokens, those of comparisons independent windows.\n\n"
      "Examples:\n"
      "  moesaic perplexity model.gguf wiki.txt -c 512 --stride 256\n"
      "  moesaic perplexity model/ wiki.txt --max-tokens 20000 --save-logits base.safetensors\n"
      "  moesaic perplexity model/ wiki.txt --max-tokens 20000 --dtype int8 --kl-base base.safetensors\n"
      "  moesaic perplexity tiny-w4a16 --text wiki.txt --reference models/moesaic-tiny");
  verb.OnParsed([options, &run] {
    const ScoreOptions& score = options->score;
    if (score.window == 1) FailUsage("--ctx-size must be 0 or at least 2, found 1");
    if (score.window > 0 && score.stride > score.window) {
      FailUsage(fmt::format("--stride {} is above the window of {} tokens", score.stride, score.window));
    }
    if (options->score.model.ranks.several() && !options->score.reference.empty()) {
      FailUsage("--reference",
                "goes with one rank; save the reference's predictions by --save-logits, and give "
                "--kl-base");
    }
    run = [options] {
      return RunOnRanks(options->score.model, [options] { return RunPerplexity(*options); });
    };
  });
}

}  // namespace moesaic::app
