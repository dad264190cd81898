#include "app/model_score.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "app/input.h"
#include "app/interrupt.h"
#include "app/model_text.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/reference_rows.h"
#include "models/model_info.h"
#include "runtime/topology.h"

namespace moesaic::app {
namespace {

namespace fs = std::filesystem;

StatusOr<std::vector<int32_t>> Tokenize(const std::string& model, const std::string& contents,
                                        const std::string& file) {
  ASSIGN_OR_RETURN(const ModelText text, OpenModelText(model));
  RETURN_IF_ERROR(text.tokenizer.status());
  StatusOr<std::vector<int32_t>> tokens = text.tokenizer->Encode(contents, /*add_special=*/true);
  return tokens.ok() ? std::move(tokens) : Annotate(tokens.status(), file);
}

// Facts about a model before it is loaded.
struct Outline {
  int context = 0, vocab = 0;
  int64_t file_bytes = 0;
};

StatusOr<Outline> OutlineOf(const std::string& model) {
  ASSIGN_OR_RETURN(const auto source, checkpoint::Checkpoint::Open(model));
  ASSIGN_OR_RETURN(const models::DecoderSpec spec,
                   models::SpecFromConfig(source->config(), models::ConfigFile(*source)));
  Outline outline{.context = spec.context, .vocab = spec.vocab};
  for (const auto& file : source->files()) outline.file_bytes += std::ssize(file->bytes());
  return outline;
}

StatusOr<ScoredText> TextOf(const ScoreOptions& options, const Outline& model,
                            const std::optional<Outline>& reference) {
  ASSIGN_OR_RETURN(const std::string contents, ReadInput(options.file));
  ScoredText text;
  ASSIGN_OR_RETURN(text.tokens, Tokenize(options.model.model, contents, options.file));
  text.vocab = model.vocab;
  int context = model.context;
  if (reference) {
    if (reference->vocab != model.vocab) {
      return InvalidArgument("{} has a vocabulary of {}, {} one of {}", options.reference, reference->vocab,
                             options.model.model, model.vocab);
    }
    ASSIGN_OR_RETURN(const auto tokens, Tokenize(options.reference, contents, options.file));
    if (tokens != text.tokens) {
      return InvalidArgument("{} and {} cut {} into different tokens", options.reference, options.model.model,
                             options.file);
    }
    context = std::min(context, reference->context);
  }
  if (options.max_tokens > 0 && options.max_tokens < std::ssize(text.tokens)) {
    text.tokens.resize(options.max_tokens);
  }
  if (text.tokens.size() < 2) {
    return InvalidArgument("{}: the text must have at least 2 tokens, found {}", options.file,
                           text.tokens.size());
  }
  text.window = options.window > 0 ? options.window : std::min(kUsualWindow, context);
  if (text.window > context) {
    return InvalidArgument("the model's context has {} tokens, fewer than --ctx-size {}", context,
                           text.window);
  }
  if (options.stride > text.window) {
    return InvalidArgument("--stride {} is above the window of {} tokens", options.stride, text.window);
  }
  text.stride = options.stride > 0 ? options.stride : text.window;
  for (const Window& window : WindowsOf(std::ssize(text.tokens), text.window, text.stride)) {
    text.rows += window.end - window.first_scored;
  }
  return text;
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

StatusOr<std::unique_ptr<Session>> StartSession(const ModelFlags& flags, const ScoredText& text) {
  ASSIGN_OR_RETURN(std::unique_ptr<Session> session, OpenSession(flags));
  ModelFlags engine_flags = flags;
  engine_flags.context = text.window;
  RETURN_IF_ERROR(StartEngine(*session, engine_flags, {.max_sequences = 1}));
  return session;
}

ModelFlags ReferenceFlags(const ScoreOptions& options) {
  ModelFlags flags = options.model;
  flags.model = options.reference;
  flags.dtype = options.reference_dtype;
  flags.experts_per_token = 0;
  flags.sparsity = {};
  return flags;
}

StatusOr<TextScore> Score(Session& session, const ScoredText& text, const ScoreSinks& sinks,
                          const char* what) {
  Progress bar(what);
  double sum = 0;
  size_t counted = 0;
  return ScoreText(*session.engine, *session.threads, text, sinks, [&](const TextScore& so_far) {
    for (; counted < so_far.nll.size(); ++counted) sum += so_far.nll[counted];
    bar.Show(static_cast<int64_t>(counted), text.rows,
             fmt::format("ppl {:.3f}", std::exp(sum / std::max<double>(1, static_cast<double>(counted)))));
    return Interrupted() ? Cancelled("interrupted") : OkStatus();
  });
}

// Runs the reference and keeps its predictions in an unlinked file.
StatusOr<std::unique_ptr<ReferenceRows>> SaveReference(const ScoreOptions& options, const ScoredText& text) {
  std::error_code error;
  const fs::path folder = fs::temp_directory_path(error);
  const int64_t bytes = text.rows * text.vocab * int64_t{sizeof(float)};
  const fs::space_info space = fs::space(folder, error);
  if (!error && static_cast<int64_t>(space.available) < bytes) {
    return ResourceExhausted(
        "memory does not hold both models, and the reference's predictions need {} bytes, but {} has {} "
        "free; use a smaller --max-tokens, or set TMPDIR to another folder",
        bytes, folder.string(), space.available);
  }
  const std::string path = (folder / fmt::format("moesaic-reference-{}.safetensors", getpid())).string();
  ASSIGN_OR_RETURN(LogprobWriter writer, LogprobWriter::Create(path, text, tensor::DType::kF32));
  RouteRecord routes;
  {
    ASSIGN_OR_RETURN(const auto session, StartSession(ReferenceFlags(options), text));
    RETURN_IF_ERROR(
        Score(*session, text, {.save = &writer, .save_routes = &routes}, "scoring the reference").status());
  }
  RETURN_IF_ERROR(writer.Commit());
  StatusOr<LogprobFile> file = LogprobFile::Open(path);
  fs::remove(path, error);
  RETURN_IF_ERROR(file.status());
  return std::make_unique<SavedRows>(*std::move(file), std::move(routes));
}

double Quantile(std::vector<double> values, double share) {
  const auto at = values.begin() + static_cast<int64_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

nlohmann::json NumberOrNull(double value) { return std::isfinite(value) ? nlohmann::json(value) : nullptr; }

void AddComparison(const TextScore& score, nlohmann::json* report) {
  nlohmann::json& to = *report;
  const Average base = Average::OfRuns(score.base_nll, score.windows),
                kl = Average::OfRuns(score.kl, score.windows),
                same = Average::OfRuns(score.same_top, score.windows);
  std::vector<double> differences(score.nll.size());
  for (size_t i = 0; i < differences.size(); ++i) differences[i] = score.nll[i] - score.base_nll[i];
  const Average difference = Average::OfRuns(differences, score.windows);
  const auto windows = std::ssize(score.windows);
  const double half = windows > 1 ? StudentT975(windows - 1) * difference.error : std::nan("");
  to["windows"] = windows;
  to["base_perplexity"] = std::exp(base.mean);
  to["ratio"] = std::exp(difference.mean);
  to["ratio_low"] = NumberOrNull(std::exp(difference.mean - half));
  to["ratio_high"] = NumberOrNull(std::exp(difference.mean + half));
  to["kl"] = kl.mean;
  to["kl_error"] = NumberOrNull(kl.error);
  to["kl_median"] = Quantile(score.kl, 0.5);
  to["kl_p99"] = Quantile(score.kl, 0.99);
  to["kl_max"] = *std::max_element(score.kl.begin(), score.kl.end());
  to["same_top"] = same.mean;
  to["same_top_error"] = NumberOrNull(same.error);
  if (score.flips.layers().empty()) return;
  nlohmann::json layers = nlohmann::json::array();
  for (const RouterFlips::Layer& layer : score.flips.layers()) {
    layers.push_back({{"layer", layer.layer},
                      {"share", static_cast<double>(layer.flipped) /
                                    static_cast<double>(std::max<int64_t>(layer.tokens, 1))}});
  }
  to["router_flips"] = {{"share", score.flips.share()}, {"layers", layers}};
}

}  // namespace

StatusOr<ModelScore> ScoreModel(const ScoreOptions& options) {
  ASSIGN_OR_RETURN(const Outline model, OutlineOf(options.model.model));
  std::optional<Outline> reference;
  if (!options.reference.empty()) {
    ASSIGN_OR_RETURN(reference, OutlineOf(options.reference));
  }
  ModelScore result;
  ASSIGN_OR_RETURN(result.text, TextOf(options, model, reference));
  const ScoredText& text = result.text;

  std::unique_ptr<Session> reference_session;  // destroyed after its borrowers
  std::unique_ptr<ReferenceRows> base;
  if (reference) {
    // Memory of both models with a quarter more for computing.
    const int64_t both = (model.file_bytes + reference->file_bytes) / 4 * 5 +
                         int64_t{text.window} * text.vocab * int64_t{sizeof(float)};
    if (options.one_at_a_time || both > runtime::AvailableMemory()) {
      ASSIGN_OR_RETURN(base, SaveReference(options, text));
    } else {
      ASSIGN_OR_RETURN(reference_session, StartSession(ReferenceFlags(options), text));
      base = std::make_unique<LockstepRows>(*reference_session->engine, *reference_session->threads, text);
    }
  } else if (!options.base.empty()) {
    ASSIGN_OR_RETURN(LogprobFile file, LogprobFile::Open(options.base));
    RETURN_IF_ERROR(CheckComparable(file.text(), text, options.base));
    base = std::make_unique<SavedRows>(std::move(file), RouteRecord());
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, StartSession(options.model, text));
  std::optional<LogprobWriter> save;
  if (!options.save.empty()) {
    const auto dtype = options.logits_dtype == "f32" ? tensor::DType::kF32 : tensor::DType::kF16;
    ASSIGN_OR_RETURN(save, LogprobWriter::Create(options.save, text, dtype));
  }
  ASSIGN_OR_RETURN(result.score,
                   Score(*session, text, {.save = save ? &*save : nullptr, .base = base.get()}, "scoring"));
  if (save) RETURN_IF_ERROR(save->Commit());
  if (session->engine->sparsity().key_summaries) result.sparsity = session->engine->stats().sparsity;
  return result;
}

nlohmann::json ScoreJson(const ModelScore& scored) {
  const TextScore& score = scored.score;
  const Average nll = Average::Of(score.nll);
  nlohmann::json report = {{"tokens", scored.text.tokens.size()},
                           {"scored", score.nll.size()},
                           {"window", scored.text.window},
                           {"stride", scored.text.stride},
                           {"nll", nll.mean},
                           {"nll_error", nll.error},
                           {"perplexity", std::exp(nll.mean)},
                           {"perplexity_error", std::exp(nll.mean) * nll.error}};
  // Undefined for one token.
  if (score.nll.size() < 2) report["nll_error"] = report["perplexity_error"] = nullptr;
  if (!score.kl.empty()) AddComparison(score, &report);
  return report;
}

}  // namespace moesaic::app
