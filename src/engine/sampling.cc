#include "engine/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "engine/philox.h"

namespace moesaic::engine {
namespace {

using Candidate = DrawScratch::Candidate;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Below this the draw is greedy: its inverse would take logits out of f32's range (vLLM has the same bound).
constexpr float kGreedyTemperature = 1e-5f;

bool Heavier(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

double LogSumExp(std::span<const float> logits) {
  const float greatest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - greatest);
  return greatest + std::log(sum);
}

std::vector<TokenLogprob> TopLogits(std::span<const float> logits, int top) {
  const auto better = [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
  };
  std::vector<TokenLogprob> heap;  // the worst of the best on top
  heap.reserve(static_cast<size_t>(top) + 1);
  for (size_t i = 0; i < logits.size() && top > 0; ++i) {
    const TokenLogprob entry = {static_cast<int32_t>(i), logits[i]};
    if (static_cast<int>(heap.size()) == top) {
      if (!better(entry, heap.front())) continue;
      std::pop_heap(heap.begin(), heap.end(), better);
      heap.pop_back();
    }
    heap.push_back(entry);
    std::push_heap(heap.begin(), heap.end(), better);
  }
  std::sort_heap(heap.begin(), heap.end(), better);
  return heap;
}

bool IsSet(std::span<const uint32_t> mask, size_t bit) { return mask[bit / 32] >> (bit % 32) & 1; }

// Applies the grammar's mask. Applies the bans too if they leave an allowed token: at the end of a grammar
// only end-of-text is allowed, which min_tokens may ban.
void ApplyBans(const DrawParams& params, std::vector<float>& logits) {
  for (size_t i = 0; i < logits.size() && !params.mask.empty(); ++i) {
    if (!IsSet(params.mask, i)) logits[i] = kMinusInfinity;
  }
  std::vector<float> kept;
  for (const int32_t token : params.banned) kept.push_back(std::exchange(logits[token], kMinusInfinity));
  if (params.mask.empty()) return;
  const bool some =
      std::any_of(logits.begin(), logits.end(), [](float logit) { return logit > kMinusInfinity; });
  for (size_t i = params.banned.size(); i-- > 0 && !some;) logits[params.banned[i]] = kept[i];
}

void ApplyPenalties(const DrawParams& params, std::vector<float>& logits) {
  const SamplingParams& sampling = *params.sampling;
  if (!HasPenalties(sampling)) return;
  for (const auto& [token, counts] : params.history->counts()) {
    float& logit = logits[token];
    logit = logit > 0 ? logit / sampling.repetition_penalty : logit * sampling.repetition_penalty;
    logit -= sampling.frequency_penalty * static_cast<float>(counts.outputs);
    if (counts.outputs > 0) logit -= sampling.presence_penalty;
  }
}

// The logits that the draw is made from: the model's own, or a changed copy in scratch.
std::span<const float> ChangedLogits(const DrawParams& params, DrawScratch& scratch) {
  const SamplingParams& sampling = *params.sampling;
  if (params.banned.empty() && params.mask.empty() && sampling.logit_bias.empty() &&
      !HasPenalties(sampling)) {
    return params.logits;
  }
  scratch.logits.assign(params.logits.begin(), params.logits.end());
  for (const auto& [token, bias] : sampling.logit_bias) scratch.logits[token] += bias;
  ApplyBans(params, scratch.logits);
  ApplyPenalties(params, scratch.logits);
  return scratch.logits;
}

struct Greatest {
  int32_t token = -1;
  float logit = kMinusInfinity;
  bool has_nan = false;
};

Greatest FindGreatest(std::span<const float> logits) {
  Greatest best;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > best.logit) best = {static_cast<int32_t>(i), logits[i], best.has_nan};
    best.has_nan |= std::isnan(logits[i]);
  }
  return best;
}

// Tokens above the min-p threshold, with their weights, by rising id.
void CollectCandidates(std::span<const float> logits, float greatest, const SamplingParams& sampling,
                       std::vector<Candidate>& candidates) {
  candidates.clear();
  const float inverse = 1.0f / sampling.temperature;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float weight = std::exp((logits[i] - greatest) * inverse);
    if (weight >= sampling.min_p && weight > 0) candidates.push_back({static_cast<int32_t>(i), weight});
  }
}

void CutTopK(int top_k, std::vector<Candidate>& candidates) {
  if (top_k == 0 || candidates.size() <= static_cast<size_t>(top_k)) return;
  std::nth_element(candidates.begin(), candidates.begin() + top_k, candidates.end(), Heavier);
  candidates.resize(top_k);
}

double TotalWeight(const std::vector<Candidate>& candidates) {
  double total = 0;
  for (const Candidate& candidate : candidates) total += candidate.weight;
  return total;
}

// Keeps the smallest set of the most probable candidates whose share is at least top_p.
void CutTopP(float top_p, std::vector<Candidate>& candidates) {
  if (top_p >= 1) return;
  const double total = TotalWeight(candidates);
  // Those below (1 - p) / n of the whole sum to less than 1 - p, so the rest holds the set: far fewer to
  // sort.
  const double floor = (1.0 - top_p) * total / static_cast<double>(candidates.size());
  std::erase_if(candidates, [floor](const Candidate& candidate) { return candidate.weight < floor; });
  std::sort(candidates.begin(), candidates.end(), Heavier);
  double sum = 0;
  size_t kept = 0;
  while (kept < candidates.size() && sum < top_p * total) sum += candidates[kept++].weight;
  candidates.resize(std::max<size_t>(kept, 1));
}

// Keeps the smallest set of candidates with information nearest to the entropy whose share is at least
// typical_p (Meister et al., "Locally typical sampling", TACL 2023).
void CutTypical(float typical_p, std::vector<Candidate>& candidates) {
  if (typical_p >= 1) return;
  const double total = TotalWeight(candidates);
  double entropy = 0;
  for (const Candidate& candidate : candidates) {
    const double share = candidate.weight / total;
    entropy -= share * std::log(share);
  }
  const auto distance = [&](const Candidate& candidate) {
    return std::abs(-std::log(candidate.weight / total) - entropy);
  };
  std::sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    const double da = distance(a), db = distance(b);
    return da != db ? da < db : a.token < b.token;
  });
  double sum = 0;
  size_t kept = 0;
  while (kept < candidates.size() && sum < typical_p * total) sum += candidates[kept++].weight;
  candidates.resize(std::max<size_t>(kept, 1));
}

// Returns the candidate that `uniform` selects from the cumulative weights in ascending order of ids.
int32_t Pick(std::vector<Candidate>& candidates, double uniform) {
  const auto by_id = [](const Candidate& a, const Candidate& b) { return a.token < b.token; };
  if (!std::is_sorted(candidates.begin(), candidates.end(), by_id)) {  // the whole vocabulary is
    std::sort(candidates.begin(), candidates.end(), by_id);
  }
  const double target = uniform * TotalWeight(candidates);
  double sum = 0;
  for (const Candidate& candidate : candidates) {
    sum += candidate.weight;
    if (target < sum) return candidate.token;
  }
  return candidates.back().token;  // rounding
}

}  // namespace

void TokenHistory::AddPrompt(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) counts_[token].in_prompt = true;
}

bool HasPenalties(const SamplingParams& sampling) {
  return sampling.repetition_penalty != 1 || sampling.presence_penalty != 0 ||
         sampling.frequency_penalty != 0;
}

Status CheckSampling(const SamplingParams& sampling, int vocab_size) {
  // Written so that NaN is refused too.
  const auto inside = [](const char* name, float value, float low, float high) {
    return value >= low && value <= high
               ? OkStatus()
               : InvalidArgument("{} must be in [{}, {}], found {}", name, low, high, value);
  };
  RETURN_IF_ERROR(inside("temperature", sampling.temperature, 0, 100));
  RETURN_IF_ERROR(inside("min_p", sampling.min_p, 0, 1));
  RETURN_IF_ERROR(inside("repetition_penalty", sampling.repetition_penalty, 0.01f, 100));
  RETURN_IF_ERROR(inside("presence_penalty", sampling.presence_penalty, -100, 100));
  RETURN_IF_ERROR(inside("frequency_penalty", sampling.frequency_penalty, -100, 100));
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    return InvalidArgument("top_p must be in (0, 1], found {}", sampling.top_p);
  }
  if (!(sampling.typical_p > 0 && sampling.typical_p <= 1)) {
    return InvalidArgument("typical_p must be in (0, 1], found {}", sampling.typical_p);
  }
  for (const auto& [token, bias] : sampling.logit_bias) {
    if (token < 0 || token >= vocab_size) {
      return InvalidArgument("logit_bias names a token outside [0, {}): {}", vocab_size, token);
    }
    RETURN_IF_ERROR(inside("logit_bias", bias, -100, 100));
  }
  if (sampling.top_k < 0) return InvalidArgument("top_k must be 0 (off) or more, found {}", sampling.top_k);
  if (sampling.max_tokens < 0)
    return InvalidArgument("max_tokens must be 0 or more, found {}", sampling.max_tokens);
  if (sampling.min_tokens < 0 || sampling.min_tokens > sampling.max_tokens) {
    return InvalidArgument("min_tokens must be in [0, max_tokens = {}], found {}", sampling.max_tokens,
                           sampling.min_tokens);
  }
  if (sampling.logprobs < -1 || sampling.logprobs > vocab_size) {
    return InvalidArgument("logprobs must be -1 (none) or in [0, {}], found {}", vocab_size,
                           sampling.logprobs);
  }
  for (const int32_t id : sampling.stop_ids) {
    if (id < 0 || id >= vocab_size) return InvalidArgument("stop id outside [0, {}): {}", vocab_size, id);
  }
  return OkStatus();
}

LogprobEntry LogprobsOf(std::span<const float> logits, int32_t token, int top) {
  const double normalizer = LogSumExp(logits);
  LogprobEntry entry;
  entry.logprob = static_cast<float>(logits[token] - normalizer);
  entry.top = TopLogits(logits, top);
  for (TokenLogprob& other : entry.top) other.logprob = static_cast<float>(other.logprob - normalizer);
  return entry;
}

StatusOr<Drawn> Draw(const DrawParams& params, DrawScratch& scratch) {
  const SamplingParams& sampling = *params.sampling;
  const std::span<const float> logits = ChangedLogits(params, scratch);
  const Greatest greatest = FindGreatest(logits);
  if (greatest.has_nan || !std::isfinite(greatest.logit)) {
    return absl::InternalError("the logits hold no finite greatest value");
  }
  Drawn drawn;
  drawn.token = greatest.token;
  if (sampling.temperature >= kGreedyTemperature) {
    CollectCandidates(logits, greatest.logit, sampling, scratch.candidates);
    CutTopK(sampling.top_k, scratch.candidates);
    CutTopP(sampling.top_p, scratch.candidates);
    CutTypical(sampling.typical_p, scratch.candidates);
    drawn.token = Pick(scratch.candidates, UniformAt(params.seed, params.position));
  }
  if (sampling.logprobs >= 0) drawn.logprobs = LogprobsOf(params.logits, drawn.token, sampling.logprobs);
  return drawn;
}

int32_t LikeliestToken(std::span<const float> logits) {
  const Greatest best = FindGreatest(logits);
  return best.has_nan ? -1 : std::max(best.token, 0);  // 0: all are -inf
}

}  // namespace moesaic::engine
