#include "engine/speculative.h"

namespace moesaic::engine {
namespace {

// A chained MTP module loses its way soon; what was said once before may go on for long.
constexpr int kMtpTokens = 4, kNgramTokens = 8;

}  // namespace

StatusOr<SpeculativeOptions> ResolveSpeculative(SpeculativeOptions options, const models::ModelInfo& info) {
  if (options.method == "auto") options.method = info.mtp_layers > 0 ? "mtp" : "ngram";
  if (options.method != "off" && options.method != "mtp" && options.method != "ngram") {
    return InvalidArgument("speculative must be off, auto, mtp or ngram, found \"{}\"", options.method);
  }
  if (options.method == "mtp" && info.mtp_layers == 0) {
    return InvalidArgument("speculative mtp needs a model with an MTP module, which {} lacks here",
                           info.architecture);
  }
  if (options.most_tokens < 0 || options.most_tokens > kMostDrafts) {
    return InvalidArgument("num_speculative_tokens must be in [1, {}], or 0 for the method's own, found {}",
                           kMostDrafts, options.most_tokens);
  }
  if (options.prompt_lookup_min < 1 || options.prompt_lookup_min > options.prompt_lookup_max) {
    return InvalidArgument("prompt_lookup_min must be in [1, prompt_lookup_max = {}], found {}",
                           options.prompt_lookup_max, options.prompt_lookup_min);
  }
  if (options.most_tokens == 0) options.most_tokens = options.method == "mtp" ? kMtpTokens : kNgramTokens;
  return options;
}

}  // namespace moesaic::engine
