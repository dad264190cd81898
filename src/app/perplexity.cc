// `moesaic perplexity MODEL FILE`: how well a model predicts a text, and how far it is from saved
// predictions.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "app/input.h"
#include "app/interrupt.h"
#include "app/model_text.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/session.h"
#include "app/sparsity_flags.h"
#include "app/text_score.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

constexpr int kUsualWindow = 1024;

struct Options {
  ModelFlags model;
  std::string file;
  int window = 0;
  int stride = 0;
  int64_t max_tokens = 0;
  std::string save, base;
  std::string logits_dtype = "f16";
  std::string format = "text";
};

StatusOr<ScoredText> TokensOf(const Options& options) {
  ASSIGN_OR_RETURN(const std::string contents, ReadInput(options.file));
  ASSIGN_OR_RETURN(const ModelText text, OpenModelText(options.model.model));
  RETURN_IF_ERROR(text.tokenizer.status());
  ScoredText scored;
  StatusOr<std::vector<int32_t>> tokens = text.tokenizer->Encode(contents, /*add_special=*/true);
  if (!tokens.ok()) return Annotate(tokens.status(), options.file);
  scored.tokens = *std::move(tokens);
  if (options.max_tokens > 0 && options.max_tokens < static_cast<int64_t>(scored.tokens.size())) {
    scored.tokens.resize(options.max_tokens);
  }
  if (scored.tokens.size() < 2) {
    return InvalidArgument("{}: a text of at least 2 tokens is needed, found {}", options.file,
                           scored.tokens.size());
  }
  return scored;
}

Status CheckComparable(const ScoredText& saved, const ScoredText& now, const std::string& path) {
  if (saved.vocab != now.vocab) {
    return InvalidArgument("{}: saved with a vocabulary of {}, the model has {}", path, saved.vocab,
                           now.vocab);
  }
  if (saved.window != now.window || saved.stride != now.stride) {
    return InvalidArgument("{}: saved with -c {} --stride {}, now {} and {}", path, saved.window,
                           saved.stride, now.window, now.stride);
  }
  if (saved.tokens != now.tokens || saved.rows != now.rows) {
    return InvalidArgument("{}: saved for another text or another number of tokens ({}, now {})", path,
                           saved.tokens.size(), now.tokens.size());
  }
  return OkStatus();
}

double Quantile(std::vector<double> values, double share) {
  const auto at = values.begin() + static_cast<int64_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

nlohmann::json Report(const ScoredText& text, const TextScore& score) {
  const Average nll = Average::Of(score.nll);
  nlohmann::json report = {{"tokens", text.tokens.size()},
                           {"scored", score.nll.size()},
                           {"window", text.window},
                           {"stride", text.stride},
                           {"nll", nll.mean},
                           {"nll_error", nll.error},
                           {"perplexity", std::exp(nll.mean)},
                           {"perplexity_error", std::exp(nll.mean) * nll.error}};
  if (score.nll.size() < 2) report["nll_error"] = report["perplexity_error"] = nullptr;  // one tells none
  if (score.kl.empty()) return report;
  const Average kl = Average::Of(score.kl), base = Average::Of(score.base_nll),
                same = Average::Of(score.same_top);
  report["base_perplexity"] = std::exp(base.mean);
  report["kl"] = kl.mean;
  report["kl_error"] = kl.error;
  report["kl_median"] = Quantile(score.kl, 0.5);
  report["kl_p99"] = Quantile(score.kl, 0.99);
  report["kl_max"] = *std::max_element(score.kl.begin(), score.kl.end());
  report["same_top"] = same.mean;
  report["same_top_error"] = same.error;
  if (score.kl.size() < 2) report["kl_error"] = report["same_top_error"] = nullptr;
  return report;
}

void PrintReport(const nlohmann::json& report, const std::string& format) {
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
  Print("base        perplexity {:.4f}, ratio {:.5f}\n", number("base_perplexity"),
        number("perplexity") / number("base_perplexity"));
  Print("KL          {:.6f} ± {} nats; median {:.6f}, p99 {:.6f}, max {:.6f}\n", number("kl"),
        error("kl_error", 6), number("kl_median"), number("kl_p99"), number("kl_max"));
  Print("same top-1  {:.3f} ± {} %\n", 100 * number("same_top"), error("same_top_error", 3, 100));
}

Status RunPerplexity(const Options& options) {
  InterruptGuard guard;
  ASSIGN_OR_RETURN(ScoredText text, TokensOf(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, OpenSession(options.model));
  const models::ModelInfo& info = session->model->info();
  text.vocab = info.vocab_size;
  text.window = options.window > 0 ? options.window : std::min(kUsualWindow, info.context_length);
  if (text.window > info.context_length) {
    return InvalidArgument("the model's context is {} tokens, fewer than --ctx-size {}", info.context_length,
                           text.window);
  }
  if (options.stride > text.window) {
    return InvalidArgument("--stride {} is above the window of {} tokens", options.stride, text.window);
  }
  text.stride = options.stride > 0 ? options.stride : text.window;
  for (const Window& window : WindowsOf(static_cast<int64_t>(text.tokens.size()), text.window, text.stride)) {
    text.rows += window.end - window.first_scored;
  }
  ModelFlags flags = options.model;
  flags.context = text.window;
  RETURN_IF_ERROR(StartEngine(*session, flags, {.max_sequences = 1}));

  std::optional<LogprobFile> base;
  std::optional<LogprobWriter> save;
  if (!options.base.empty()) {
    ASSIGN_OR_RETURN(base, LogprobFile::Open(options.base));
    RETURN_IF_ERROR(CheckComparable(base->text(), text, options.base));
  }
  if (!options.save.empty()) {
    const auto dtype = options.logits_dtype == "f32" ? tensor::DType::kF32 : tensor::DType::kF16;
    ASSIGN_OR_RETURN(save, LogprobWriter::Create(options.save, text, dtype));
  }
  StatusOr<TextScore> score = TextScore{};
  {
    Progress bar("scoring");
    double sum = 0;
    size_t counted = 0;
    score = ScoreText(*session->engine, *session->threads, text,
                      {.save = save ? &*save : nullptr, .base = base ? &*base : nullptr},
                      [&](const TextScore& so_far) {
                        for (; counted < so_far.nll.size(); ++counted) sum += so_far.nll[counted];
                        bar.Show(static_cast<int64_t>(counted), text.rows,
                                 fmt::format("ppl {:.3f}", std::exp(sum / std::max<double>(1, counted))));
                        return Interrupted() ? Cancelled("interrupted") : OkStatus();
                      });
  }
  RETURN_IF_ERROR(score.status());
  if (save) RETURN_IF_ERROR(save->Commit());
  PrintReport(Report(text, *score), options.format);
  if (session->engine->sparsity().digests) {
    Tell("block-sparse attention: {}\n", DescribeCounters(session->engine->stats().sparsity));
  }
  return OkStatus();
}

}  // namespace

void AddPerplexity(CLI::App& root, VerbRun& run) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = root.add_subcommand("perplexity", "Score a model on a text");
  AddModelFlags(*verb, options->model);
  verb->add_option("FILE", options->file, "Text file (UTF-8)")->required()->check(CLI::ExistingFile);
  verb->add_option("-c,--ctx-size", options->window,
                   "Window in tokens; 0: 1024, or the model's context if that is less")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  verb->add_option("--stride", options->stride, "Tokens from one window to the next; 0: a whole window")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  verb->add_option("--max-tokens", options->max_tokens, "Use only the first tokens of the text; 0: all")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 31))
      ->capture_default_str();
  AddKvDtypeFlag(*verb, options->model.kv_dtype);
  AddSparsityFlags(*verb, options->model.sparsity, {"off", "all"});
  verb->add_option("--save-logits", options->save, "Write all log-probabilities here (docs/logprob-file.md)");
  verb->add_option("--logits-dtype", options->logits_dtype, "How they are stored: f16 or f32")
      ->check(CLI::IsMember({"f16", "f32"}))
      ->capture_default_str();
  verb->add_option("--kl-base", options->base, "Compare with a file of --save-logits: KL(saved || this)")
      ->check(CLI::ExistingFile);
  verb->add_option("--format", options->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  verb->footer(
      "The text is tokenized once and cut into windows; a token is scored once, with what precedes it in "
      "its\n"
      "window. Errors are standard errors of the mean, tokens taken as independent.\n\n"
      "Examples:\n"
      "  moesaic perplexity model.gguf wiki.txt -c 512 --stride 256\n"
      "  moesaic perplexity model/ wiki.txt --max-tokens 20000 --save-logits base.safetensors\n"
      "  moesaic perplexity model/ wiki.txt --max-tokens 20000 --dtype int8 --kl-base base.safetensors");
  verb->callback([options, &run] {
    if (options->window == 1) throw CLI::ValidationError("--ctx-size must be 0 or at least 2, found 1");
    if (options->window > 0 && options->stride > options->window) {
      throw CLI::ValidationError(
          fmt::format("--stride {} is above the window of {} tokens", options->stride, options->window));
    }
    run = [options] { return RunPerplexity(*options); };
  });
}

}  // namespace moesaic::app
