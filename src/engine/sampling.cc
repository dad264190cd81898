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

Status NoGreatest() { return absl::InternalError("the logits hold no finite greatest value"); }

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

void Penalize(const SamplingParams& sampling, const TokenHistory::Counts& counts, float& logit) {
  logit = logit > 0 ? logit / sampling.repetition_penalty : logit * sampling.repetition_penalty;
  logit -= sampling.frequency_penalty * static_cast<float>(counts.outputs);
  if (counts.outputs > 0) logit -= sampling.presence_penalty;
}

void ApplyPenalties(const DrawParams& params, std::vector<float>& logits) {
  const SamplingParams& sampling = *params.sampling;
  if (!HasPenalties(sampling)) return;
  for (const auto& [token, counts] : params.history->counts()) {
    Penalize(sampling, counts, logits[token]);
  }
}

bool IsChanged(const DrawParams& params) {
  return !params.banned.empty() || !params.mask.empty() || !params.sampling->logit_bias.empty() ||
         HasPenalties(*params.sampling);
}

// The logits that the draw is made from: the model's own, or a changed copy in scratch.
std::span<const float> ChangedLogits(const DrawParams& params, DrawScratch& scratch) {
  const SamplingParams& sampling = *params.sampling;
  if (!IsChanged(params)) return params.logits;
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

void SortById(std::vector<Candidate>& candidates) {
  const auto by_id = [](const Candidate& a, const Candidate& b) { return a.token < b.token; };
  if (std::is_sorted(candidates.begin(), candidates.end(), by_id)) return;  // the whole vocabulary is
  std::sort(candidates.begin(), candidates.end(), by_id);
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
  SortById(candidates);  // sums do not depend on the order that nth_element leaves
}

double TotalWeight(const std::vector<Candidate>& candidates) {
  double total = 0;
  for (const Candidate& candidate : candidates) total += candidate.weight;
  return total;
}

// Keeps the smallest set of the most probable candidates whose share of `total`, the weight of all of `vocab`
// tokens that were not cut, is at least top_p. False: tokens of weights up to `limit`, which are not among
// the candidates, may belong to the set.
bool CutTopP(float top_p, double total, int vocab, float limit, std::vector<Candidate>& candidates) {
  if (top_p >= 1) return limit == 0;
  // Those below (1 - p) / n of the whole sum to less than 1 - p, so the rest holds the set: far fewer to
  // sort.
  const double floor = (1.0 - top_p) * total / vocab;
  std::erase_if(candidates, [floor](const Candidate& candidate) { return candidate.weight < floor; });
  std::sort(candidates.begin(), candidates.end(), Heavier);
  double sum = 0;
  size_t kept = 0;
  while (kept < candidates.size() && sum < top_p * total) sum += candidates[kept++].weight;
  const bool reached = sum >= top_p * total && kept > 0 && candidates[kept - 1].weight > limit;
  if (limit > 0 && !reached) return false;
  candidates.resize(std::max<size_t>(kept, 1));
  return true;
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
  SortById(candidates);
  const double target = uniform * TotalWeight(candidates);
  double sum = 0;
  for (const Candidate& candidate : candidates) {
    sum += candidate.weight;
    if (target < sum) return candidate.token;
  }
  return candidates.back().token;  // rounding
}

// The same in descending order of weights: with no cut, few candidates have most of the weight `total`.
// -1: tokens of weights up to `limit`, which are not among the candidates, may be selected.
int32_t PickHeaviest(std::vector<Candidate>& candidates, double uniform, double total, float limit) {
  constexpr float kHeavy = 1e-3F;  // of the greatest weight; sorting the others is seldom necessary
  const double target = uniform * total;
  double sum = 0;
  const auto heavy = std::partition(candidates.begin(), candidates.end(),
                                    [](const Candidate& candidate) { return candidate.weight >= kHeavy; });
  auto begin = candidates.begin();
  for (const auto end : {heavy, candidates.end()}) {
    std::sort(begin, end, Heavier);
    for (; begin != end; ++begin) {
      if (begin->weight <= limit) return -1;
      sum += begin->weight;
      if (target < sum) return begin->token;
    }
  }
  return limit > 0 ? -1 : candidates.back().token;  // rounding
}

// Whether every token can be drawn.
bool IsUncut(const SamplingParams& sampling) {
  return sampling.top_k == 0 && sampling.top_p >= 1 && sampling.min_p == 0 && sampling.typical_p >= 1;
}

// The weight of all tokens that a row's summary states; 0: it is that of the candidates.
double StatedWeight(const DrawParams& params, bool changed) {
  const SamplingParams& sampling = *params.sampling;
  if (params.summary == nullptr || changed || sampling.top_k > 0 || sampling.min_p > 0) return 0;
  return params.summary->WeightSum(sampling.temperature);
}

// Draws one of scratch.candidates, which are in the order of ids. Others have weights up to `limit`; 0: there
// are none. -1: they may be selected.
int32_t DrawAmong(const DrawParams& params, int vocab, double total, float limit, DrawScratch& scratch) {
  const SamplingParams& sampling = *params.sampling;
  std::vector<Candidate>& candidates = scratch.candidates;
  const double uniform = UniformAt(params.seed, params.position);
  if (limit > 0 && total == 0) {
    if (sampling.top_k == 0 || candidates.size() < static_cast<size_t>(sampling.top_k)) return -1;
    CutTopK(sampling.top_k, candidates);
    for (const Candidate& candidate : candidates) {
      if (candidate.weight <= limit) return -1;  // a tie, which the lower id wins
    }
    limit = 0;
  }
  if (IsUncut(sampling)) {
    return PickHeaviest(candidates, uniform, total > 0 ? total : TotalWeight(candidates), limit);
  }
  CutTopK(sampling.top_k, candidates);
  if (!CutTopP(sampling.top_p, total > 0 ? total : TotalWeight(candidates), vocab, limit, candidates)) {
    return -1;
  }
  CutTypical(sampling.typical_p, candidates);
  return Pick(candidates, uniform);
}

// Lowers and raises the candidates of a summary like ChangedLogits. False: tokens that are not among them may
// pass them.
bool ChangeBest(const DrawParams& params, std::vector<TokenLogit>& best) {
  const SamplingParams& sampling = *params.sampling;
  const auto find = [&](int32_t token) { return std::ranges::find(best, token, &TokenLogit::token); };
  for (const auto& [token, bias] : sampling.logit_bias) {
    const auto found = find(token);
    if (found != best.end()) {
      found->logit += bias;
    } else if (bias > 0) {
      return false;
    }
  }
  bool some = false;
  for (TokenLogit& entry : best) {
    const bool banned = std::ranges::find(params.banned, entry.token) != params.banned.end();
    const bool allowed = params.mask.empty() || IsSet(params.mask, entry.token);
    if (banned || !allowed) entry.logit = kMinusInfinity;
    some |= entry.logit > kMinusInfinity;
  }
  if (!some) return false;
  if (!HasPenalties(sampling)) return true;
  for (TokenLogit& entry : best) {
    const auto found = params.history->counts().find(entry.token);
    if (found != params.history->counts().end()) Penalize(sampling, found->second, entry.logit);
  }
  return sampling.repetition_penalty >= 1 && sampling.frequency_penalty >= 0 &&
         sampling.presence_penalty >= 0;
}

// Fills scratch.candidates from scratch.best, and returns the greatest weight of other tokens, whose logits
// are at most `last`.
float CandidatesOfBest(const SamplingParams& sampling, float greatest, float last, DrawScratch& scratch) {
  const float inverse = 1.0f / sampling.temperature;
  scratch.candidates.clear();
  for (const TokenLogit& entry : scratch.best) {
    const float weight = std::exp((entry.logit - greatest) * inverse);
    if (weight >= sampling.min_p && weight > 0) scratch.candidates.push_back({entry.token, weight});
  }
  SortById(scratch.candidates);
  const float limit = std::exp((last - greatest) * inverse);
  return limit >= sampling.min_p ? limit : 0;
}

// Log-probabilities from a summary; false: it lacks some of them.
bool LogprobsFromBest(const RowSummary& row, int32_t token, int top, LogprobEntry* entry) {
  const auto found = std::ranges::find(row.best, token, &TokenLogit::token);
  const double normalizer = row.LogNormalizer();
  if (found == row.best.end() || top > std::ssize(row.best) || std::isnan(normalizer)) return false;
  entry->logprob = static_cast<float>(found->logit - normalizer);
  for (const TokenLogit& other : std::span(row.best).first(top)) {
    entry->top.push_back({other.token, static_cast<float>(other.logit - normalizer)});
  }
  return true;
}

StatusOr<Drawn> DrawFromSummary(const DrawParams& params, DrawScratch& scratch) {
  const SamplingParams& sampling = *params.sampling;
  const RowSummary& row = *params.summary;
  Drawn undecided;
  undecided.needs_logits = true;
  const bool changed = IsChanged(params);
  if (row.has_nan() || !std::isfinite(row.greatest())) {
    if (changed) return undecided;
    return NoGreatest();
  }
  scratch.best = row.best;
  if (changed && !ChangeBest(params, scratch.best)) return undecided;
  const TokenLogit first = *std::min_element(scratch.best.begin(), scratch.best.end(), ComesBefore);
  const float last = row.is_whole() ? kMinusInfinity : row.best.back().logit;
  if (changed && !(first.logit > last && std::isfinite(first.logit))) return undecided;
  Drawn drawn;
  drawn.token = first.token;
  if (sampling.temperature >= kGreedyTemperature) {
    const float limit = CandidatesOfBest(sampling, first.logit, last, scratch);
    drawn.token = DrawAmong(params, row.vocab_size, StatedWeight(params, changed), limit, scratch);
    if (drawn.token < 0) return undecided;
  }
  const bool reported =
      sampling.logprobs < 0 || LogprobsFromBest(row, drawn.token, sampling.logprobs, &drawn.logprobs);
  return reported ? drawn : undecided;
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

RowNeeds NeedsOf(const SamplingParams& sampling) {
  return {.temperature = sampling.temperature >= kGreedyTemperature ? sampling.temperature : 0,
          .normalizer = sampling.logprobs >= 0};
}

LogprobEntry LogprobsOf(std::span<const float> logits, int32_t token, int top, const RowSummary* summary) {
  double normalizer = summary != nullptr ? summary->LogNormalizer() : std::nan("");
  if (std::isnan(normalizer)) normalizer = LogSumExp(logits);
  LogprobEntry entry;
  entry.logprob = static_cast<float>(logits[token] - normalizer);
  entry.top = TopLogits(logits, top);
  for (TokenLogprob& other : entry.top) other.logprob = static_cast<float>(other.logprob - normalizer);
  return entry;
}

StatusOr<Drawn> Draw(const DrawParams& params, DrawScratch& scratch) {
  if (params.logits.empty() && params.summary != nullptr) return DrawFromSummary(params, scratch);
  const SamplingParams& sampling = *params.sampling;
  const std::span<const float> logits = ChangedLogits(params, scratch);
  const Greatest greatest = FindGreatest(logits);
  if (greatest.has_nan || !std::isfinite(greatest.logit)) return NoGreatest();
  Drawn drawn;
  drawn.token = greatest.token;
  if (sampling.temperature >= kGreedyTemperature) {
    CollectCandidates(logits, greatest.logit, sampling, scratch.candidates);
    drawn.token = DrawAmong(params, static_cast<int>(logits.size()), StatedWeight(params, IsChanged(params)),
                            /*limit=*/0, scratch);
  }
  if (sampling.logprobs >= 0) {
    drawn.logprobs = LogprobsOf(params.logits, drawn.token, sampling.logprobs, params.summary);
  }
  return drawn;
}

int32_t LikeliestToken(std::span<const float> logits) {
  const Greatest best = FindGreatest(logits);
  return best.has_nan ? -1 : std::max(best.token, 0);  // 0: all are -inf
}

}  // namespace moesaic::engine
