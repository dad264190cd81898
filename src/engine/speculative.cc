#include "engine/speculative.h"

namespace moesaic::engine {
namespace {

// Default lengths: a repeated text often continues for many tokens.
constexpr int kNgramTokens = 8, kModelTokens = 6;

int TokensOf(const std::string& method) {
  if (method == "mtp") return kMtpTokens;
  return method == "draft" ? kModelTokens : kNgramTokens;
}

Status CheckDraftModel(const models::Model* draft, const models::ModelInfo& info) {
  if (draft == nullptr) return InvalidArgument("speculative draft needs a draft model");
  if (draft->info().vocab_size != info.vocab_size) {
    return InvalidArgument("a draft model needs the model's vocabulary of {} tokens, found {}",
                           info.vocab_size, draft->info().vocab_size);
  }
  return OkStatus();
}

}  // namespace

StatusOr<SpeculativeOptions> ResolveSpeculative(SpeculativeOptions options, const models::ModelInfo& info) {
  if (options.method == "auto") {
    options.method = options.draft_model != nullptr ? "draft" : info.mtp_layers > 0 ? "mtp+ngram" : "ngram";
  }
  const bool has_mtp = UsesMtp(options.method);
  if (options.method != "off" && !has_mtp && options.method != "ngram" && options.method != "draft") {
    return InvalidArgument("speculative must be off, auto, mtp, ngram, mtp+ngram or draft, found \"{}\"",
                           options.method);
  }
  if (options.method == "draft") RETURN_IF_ERROR(CheckDraftModel(options.draft_model, info));
  if (has_mtp && info.mtp_layers == 0) {
    return InvalidArgument("speculative {} needs a model with an MTP module, which {} lacks here",
                           options.method, info.architecture);
  }
  if (options.most_tokens < 0 || options.most_tokens > kMaxDrafts) {
    return InvalidArgument("num_speculative_tokens must be in [1, {}], or 0 for the method's own, found {}",
                           kMaxDrafts, options.most_tokens);
  }
  if (options.prompt_lookup_min < 1 || options.prompt_lookup_min > options.prompt_lookup_max) {
    return InvalidArgument("prompt_lookup_min must be in [1, prompt_lookup_max = {}], found {}",
                           options.prompt_lookup_max, options.prompt_lookup_min);
  }
  if (options.most_tokens == 0) options.most_tokens = TokensOf(options.method);
  return options;
}

}  // namespace moesaic::engine
