// The policy of this project.
//
// A request goes where it is predicted to finish its prefill first: queue + prefill(length - hit). It waits
// in the proxy's queue until that instance is about to become free, because a decision that is made later
// knows more and can still be changed. The queue is ordered so that as many requests as possible meet their
// TTFT target (Moore and Hodgson, "An n job, one machine sequencing algorithm for minimizing the number of
// late jobs", Management Science 15(1), 1968): by deadline, but when the deadlines cannot all be met, the
// requests that take longest wait.
#include <algorithm>
#include <limits>
#include <queue>

#include "proxy/schedule/policies.h"

namespace moesaic::proxy {
namespace {

// An instance gets its next prefill this long before it is predicted to be free, so that it never idles.
constexpr Nanos kLookAhead = 15 * kMillisecond;
// Computing tokens that another instance has delays everything that waits: its time counts once more for each
// request per instance in the queue, within these bounds.
constexpr double kMinWaste = 0.5, kMaxWaste = 4;
// Decode instances with fewer requests than this make it worth to look for requests without a prefill.
constexpr uint32_t kMinSkipped = 1;
// KV usage beyond which a decode instance is avoided: preemption follows.
constexpr double kFullCache = 0.92;
// Share of a match that counts while the index of the instance is not EXACT: the engine may have evicted
// blocks that the index still has.
constexpr double kDoubtedShare = 0.8;
// Without a target: weights of shortness and of waiting time in the order of the queue.
constexpr double kLengthWeight = 0.8, kWaitWeight = 0.2;

class MoesaicPolicy final : public Policy {
 public:
  explicit MoesaicPolicy(const PolicyOptions& options) : options_(options) {}
  std::string_view name() const override { return "moesaic"; }
  bool HoldsCaps() const override { return true; }
  bool SkipsPrefill() const override { return true; }

  void OrderPrefill(std::vector<RequestView>& queue, int engines, Nanos now) const override {
    waste_ = std::clamp(static_cast<double>(queue.size()) / engines, kMinWaste, kMaxWaste);
    if (options_.slo_ttft > 0) {
      OrderByDeadline(queue, engines, now);
    } else {
      OrderByLengthAndAge(queue);
    }
  }

  Choice ChoosePrefill(const RequestView& r, std::span<const InstanceView> instances, Nanos now) override {
    const uint32_t tokens = r.facts.prompt_tokens;
    double least_work = std::numeric_limits<double>::infinity();
    Nanos least_moving = std::numeric_limits<Nanos>::max();
    for (const InstanceView& v : instances) {
      least_work = std::min(least_work, TokenTime(v, tokens));
      least_moving = std::min(least_moving, options_.transfer.Of(v.moved_tokens));
    }
    const InstanceView* best = nullptr;
    double lowest = std::numeric_limits<double>::infinity();
    for (const InstanceView& v : instances) {
      const double cost = Cost(r, v, least_work, now) +
                          static_cast<double>(options_.transfer.Of(v.moved_tokens) - least_moving);
      // Equal costs: the one that was idle longest, so that cold instances become warm.
      if (cost < lowest || (cost == lowest && v.last_scheduled < best->last_scheduled)) {
        lowest = cost;
        best = &v;
      }
    }
    if (best == nullptr) return Choice::Hold();
    const auto fits = [&](const InstanceView& v) {
      return v.PrefillRoom(tokens - v.matched_tokens) && (v.role != Role::kBoth || v.DecodeRoom(tokens));
    };
    if (!fits(*best)) {  // an idle instance is better than a full one
      const auto idle = std::ranges::find_if(
          instances, [&](const InstanceView& v) { return v.load.prefill_requests == 0 && fits(v); });
      if (idle == instances.end()) return Choice::Hold(best->id);
      best = &*idle;
    }
    const Nanos queue = best->QueueTime(now);
    const uint32_t uncached = tokens - best->matched_tokens;
    if (options_.rejects && options_.slo_ttft > 0 &&
        now - r.received + queue + best->PrefillTime(tokens, best->matched_tokens) +
                options_.transfer.Of(best->moved_tokens) >
            options_.slo_ttft) {
      return Choice::Reject();
    }
    const Batch& batch = BatchOf(*best, now);
    const uint64_t in_batch =
        best->load.prefill_tokens - std::min(best->load.prefill_tokens, batch.tokens_before);
    if (batch.open && best->reserved_work == 0 &&
        (in_batch == 0 || in_batch + uncached <= best->batch_tokens + best->batch_tokens / 4))
      return Choice::Place(best->id);
    return Choice::Hold(best->id, batch.open ? 0 : now + queue - kLookAhead);
  }

  bool MayPlace(std::span<const InstanceView> instances, Nanos now, Nanos& next) override {
    bool any = false;
    for (const InstanceView& v : instances) {
      if (v.role == Role::kDecode) {
        any |= v.DecodeRoom(0) && v.load.decode_requests < kMinSkipped;  // for requests without a prefill
        continue;
      }
      const Batch& batch = BatchOf(v, now);
      const uint64_t in_batch = v.load.prefill_tokens - std::min(v.load.prefill_tokens, batch.tokens_before);
      any |= batch.open && in_batch < v.batch_tokens - v.batch_tokens / 4;
      if (batch.open) continue;
      const Nanos opens = now + v.QueueTime(now) - kLookAhead;
      next = next == 0 ? opens : std::min(next, opens);
    }
    return any;
  }

  Choice ChooseDecode(const RequestView& r, std::span<const InstanceView> instances, Nanos) override {
    const uint32_t tokens = r.facts.prompt_tokens + r.output_tokens;
    const InstanceView* best = nullptr;
    double lowest = std::numeric_limits<double>::infinity();
    for (const InstanceView& v : instances) {
      if (!v.DecodeRoom(tokens)) continue;
      const double cost = DecodeCost(v, tokens);
      if (cost < lowest) {
        lowest = cost;
        best = &v;
      }
    }
    return best == nullptr ? Choice::Hold() : Choice::Place(best->id);
  }

 private:
  // The batch that an instance gets next: requests that it will compute in one step. It is open from shortly
  // before the instance becomes free until the answers of the batch before it.
  struct Batch {
    Nanos last_done = -1;
    bool open = false;
    uint64_t tokens_before = 0;  // of requests that were sent before it opened
  };

  const Batch& BatchOf(const InstanceView& v, Nanos now) {
    if (static_cast<size_t>(v.id) >= batches_.size()) batches_.resize(v.id + 1);
    Batch& batch = batches_[v.id];
    if (v.load.prefill_requests == 0 && v.pod_wait <= kLookAhead) {
      batch = {.last_done = v.last_prefill_done, .open = true, .tokens_before = 0};
    } else if (v.load.prefill_requests == 0 || batch.last_done != v.last_prefill_done) {
      batch = {.last_done = v.last_prefill_done, .open = false, .tokens_before = 0};
    }
    if (!batch.open && v.QueueTime(now) - v.reserved_work <= kLookAhead)
      batch = {.last_done = v.last_prefill_done, .open = true, .tokens_before = v.load.prefill_tokens};
    return batch;
  }

  // Tokens of the prompt that the instance is expected to have.
  static uint32_t Expected(const InstanceView& v) {
    if (v.index_state == IndexState::kExact) return v.matched_tokens;
    return static_cast<uint32_t>(kDoubtedShare * v.matched_tokens);
  }

  // Predicted time of the tokens that the instance must compute, without the fixed cost of a step: a step
  // more on an idle instance delays no other request.
  static double TokenTime(const InstanceView& v, uint32_t tokens) {
    return static_cast<double>(v.PrefillTime(tokens, Expected(v))) - v.model->base / v.weight;
  }

  double Cost(const RequestView& r, const InstanceView& v, double least_work, Nanos now) const {
    const uint32_t tokens = r.facts.prompt_tokens;
    double cost = static_cast<double>(v.QueueTime(now) + v.AddedTime(tokens, Expected(v))) +
                  waste_ * (TokenTime(v, tokens) - least_work);
    if (v.role == Role::kBoth) {
      // Running requests share every step of the prefill, and each of them is slowed down by it.
      const double step =
          v.model->StepNanos(v.load.decode_requests, static_cast<double>(v.load.decode_tokens)) / v.weight;
      const double steps = 1 + static_cast<double>(tokens - v.matched_tokens) / v.batch_tokens;
      cost += step * steps;
      if (options_.slo_tpot > 0 && step > 0.8 * static_cast<double>(options_.slo_tpot)) cost *= 2;
      if (v.kv_blocks > 0) {
        const double usage =
            (static_cast<double>(v.load.kv_blocks) + tokens / std::max<double>(v.block_size, 1)) /
            static_cast<double>(v.kv_blocks);
        if (usage > kFullCache) cost *= 4;
      }
    }
    // An index that may be incomplete: the session's last instance probably has more than is known.
    if (v.id == r.session_instance) cost *= v.index_state == IndexState::kExact ? 0.98 : 0.7;
    return cost;
  }

  // Cost of a decode instance for a request of `tokens`: its predicted next step, weighted by the fill of the
  // pool, and a share of the time of the transfer.
  double DecodeCost(const InstanceView& v, uint32_t tokens) const {
    double cost =
        v.model->StepNanos(v.load.decode_requests + 1.0, static_cast<double>(v.load.decode_tokens) + tokens) /
        v.weight;
    if (v.kv_blocks > 0) {
      const double usage =
          (static_cast<double>(v.load.kv_blocks) + tokens / std::max<double>(v.block_size, 1)) /
          static_cast<double>(v.kv_blocks);
      // A fuller pool has less room for the outputs of all its requests.
      cost *= 1 + usage;
      if (usage > kFullCache) cost *= 4;
    }
    // The time to move tokens that D is not expected to have, spread over the tokens of an answer.
    constexpr double kAnswerTokens = 100;
    return cost +
           options_.transfer.nanos_per_token * (tokens - std::min(tokens, Expected(v))) / kAnswerTokens;
  }

  static void OrderByLengthAndAge(std::vector<RequestView>& queue) {
    double longest = 1, oldest = 50 * kMillisecond;
    for (const RequestView& r : queue) {
      longest = std::max(longest, static_cast<double>(r.work));
      oldest = std::max(oldest, static_cast<double>(r.waiting));
    }
    const auto weight = [&](const RequestView& r) {
      return kLengthWeight * (longest - static_cast<double>(r.work)) / longest +
             kWaitWeight * static_cast<double>(r.waiting) / oldest;
    };
    std::stable_sort(queue.begin(), queue.end(),
                     [&](const auto& a, const auto& b) { return weight(a) > weight(b); });
  }

  void OrderByDeadline(std::vector<RequestView>& queue, int engines, Nanos now) const {
    std::stable_sort(queue.begin(), queue.end(),
                     [](const auto& a, const auto& b) { return a.received < b.received; });
    // Requests on time in order of deadline; the longest of them leaves when the work until a deadline is too
    // much.
    const auto longer = [&](size_t a, size_t b) { return queue[a].work < queue[b].work; };
    std::priority_queue<size_t, std::vector<size_t>, decltype(longer)> on_time(longer);
    std::vector<bool> late(queue.size());
    double total = 0;
    for (size_t i = 0; i < queue.size(); ++i) {
      const double left = static_cast<double>(queue[i].received + options_.slo_ttft - now);
      if (static_cast<double>(queue[i].work) > left) {  // on its own it cannot be on time any more
        late[i] = true;
        continue;
      }
      on_time.push(i);
      total += static_cast<double>(queue[i].work) / engines;
      while (total > left && !on_time.empty()) {
        const size_t longest = on_time.top();
        on_time.pop();
        late[longest] = true;
        total -= static_cast<double>(queue[longest].work) / engines;
      }
    }
    std::vector<RequestView> ordered;
    ordered.reserve(queue.size());
    for (size_t i = 0; i < queue.size(); ++i) {
      if (!late[i]) ordered.push_back(queue[i]);
    }
    const size_t first_late = ordered.size();
    for (size_t i = 0; i < queue.size(); ++i) {
      if (late[i]) ordered.push_back(queue[i]);
    }
    // Late ones shortest first: the mean waiting time is least.
    std::stable_sort(ordered.begin() + static_cast<ptrdiff_t>(first_late), ordered.end(),
                     [](const auto& a, const auto& b) { return a.work < b.work; });
    queue = std::move(ordered);
  }

  const PolicyOptions options_;
  std::vector<Batch> batches_;  // by instance
  mutable double waste_ = kMinWaste;
};

}  // namespace

std::unique_ptr<Policy> MakeMoesaicPolicy(const PolicyOptions& options) {
  return std::make_unique<MoesaicPolicy>(options);
}

}  // namespace moesaic::proxy
