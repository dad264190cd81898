// Policies of other routers, with the constants that their users get. They see this proxy's exact index and
// in-flight counters, which is more than most of them have; they send at once, because requests wait in the
// engines there.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>

#include "proxy/schedule/policies.h"

namespace moesaic::proxy {
namespace {

using Instances = std::span<const InstanceView>;

// Requests that an instance has: those of an aggregated instance are charged to decode from the beginning.
uint32_t InFlight(const InstanceView& v) {
  return v.role == Role::kBoth ? std::max(v.load.decode_requests, v.load.prefill_requests)
                               : v.load.prefill_requests + v.load.decode_requests;
}
uint64_t TokensOf(const InstanceView& v) { return v.load.prefill_tokens + v.load.decode_tokens; }
double HitShare(const RequestView& r, const InstanceView& v) {
  return r.facts.prompt_tokens == 0 ? 0 : static_cast<double>(v.matched_tokens) / r.facts.prompt_tokens;
}

// The instance with the lowest value; the first of equals after a rotating start, so that ties are spread.
class Argmin {
 public:
  template <typename Value>
  Choice operator()(Instances instances, Value value) {
    const size_t start = next_++;
    const InstanceView* best = nullptr;
    double lowest = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < instances.size(); ++i) {
      const InstanceView& v = instances[(start + i) % instances.size()];
      const double at = static_cast<double>(value(v));
      if (at < lowest) {
        lowest = at;
        best = &v;
      }
    }
    return best == nullptr ? Choice::Hold() : Choice::Place(best->id);
  }

 private:
  size_t next_ = 0;
};

class RandomPolicy final : public Policy {
 public:
  explicit RandomPolicy(uint64_t seed) : random_(seed) {}
  std::string_view name() const override { return "random"; }
  Choice ChoosePrefill(const RequestView&, Instances instances, Nanos) override { return Any(instances); }
  Choice ChooseDecode(const RequestView&, Instances instances, Nanos) override { return Any(instances); }

 private:
  Choice Any(Instances instances) { return Choice::Place(instances[random_() % instances.size()].id); }
  std::mt19937_64 random_;
};

class RoundRobinPolicy final : public Policy {
 public:
  std::string_view name() const override { return "round-robin"; }
  Choice ChoosePrefill(const RequestView&, Instances instances, Nanos) override {
    return Choice::Place(instances[prefill_++ % instances.size()].id);
  }
  Choice ChooseDecode(const RequestView&, Instances instances, Nanos) override {
    return Choice::Place(instances[decode_++ % instances.size()].id);
  }

 private:
  size_t prefill_ = 0, decode_ = 0;
};

class LeastRequestsPolicy : public Policy {
 public:
  std::string_view name() const override { return "least-requests"; }
  Choice ChoosePrefill(const RequestView&, Instances instances, Nanos) override {
    return prefill_(instances, InFlight);
  }
  Choice ChooseDecode(const RequestView&, Instances instances, Nanos) override {
    return decode_(instances, InFlight);
  }

 protected:
  Argmin prefill_, decode_;
};

class LeastTokensPolicy final : public LeastRequestsPolicy {
 public:
  std::string_view name() const override { return "least-tokens"; }
  Choice ChoosePrefill(const RequestView&, Instances instances, Nanos) override {
    return prefill_(instances, TokensOf);
  }
  Choice ChooseDecode(const RequestView&, Instances instances, Nanos) override {
    return decode_(instances, TokensOf);
  }
};

// sgl-model-gateway, policies/cache_aware.rs, with the defaults of its command line.
class SglangPolicy final : public LeastRequestsPolicy {
 public:
  std::string_view name() const override { return "sglang-cache-aware"; }
  Choice ChoosePrefill(const RequestView& r, Instances instances, Nanos) override {
    constexpr double kCacheThreshold = 0.3, kRelative = 1.5;
    constexpr uint32_t kAbsolute = 64;
    const auto [least, most] =
        std::minmax_element(instances.begin(), instances.end(),
                            [](const auto& a, const auto& b) { return InFlight(a) < InFlight(b); });
    const uint32_t low = InFlight(*least), high = InFlight(*most);
    if (high - low > kAbsolute && high > kRelative * low) return prefill_(instances, InFlight);
    const auto best = std::max_element(instances.begin(), instances.end(), [](const auto& a, const auto& b) {
      return a.matched_tokens < b.matched_tokens;
    });
    if (HitShare(r, *best) > kCacheThreshold) return Choice::Place(best->id);
    return prefill_(instances, InFlight);
  }
};

// Dynamo, kv-router/src/scheduling/selector.rs: prefill_load_scale 1, overlap credit 1 for device blocks and
// 0.75 for host blocks, temperature 0.
class DynamoPolicy final : public LeastRequestsPolicy {
 public:
  std::string_view name() const override { return "dynamo"; }
  Choice ChoosePrefill(const RequestView& r, Instances instances, Nanos) override {
    return prefill_(instances, [&](const InstanceView& v) {
      const double size = v.block_size;
      const double credit =
          (v.device_matched_tokens + 0.75 * (v.matched_tokens - v.device_matched_tokens)) / size;
      const double prefill =
          static_cast<double>(v.load.prefill_tokens) / size + r.facts.prompt_tokens / size - credit;
      return std::max(prefill, 0.0) + static_cast<double>(v.load.kv_blocks);
    });
  }
  Choice ChooseDecode(const RequestView&, Instances instances, Nanos) override {
    return decode_(instances, [](const InstanceView& v) { return v.load.kv_blocks; });
  }
};

// llm-d router: weighted sum of scorers in [0, 1]: prefix 3, queue 2, KV cache 2.
class LlmdPolicy final : public LeastRequestsPolicy {
 public:
  std::string_view name() const override { return "llm-d"; }
  Choice ChoosePrefill(const RequestView& r, Instances instances, Nanos) override {
    return prefill_(instances, Score(r, instances, 3));
  }
  Choice ChooseDecode(const RequestView& r, Instances instances, Nanos) override {
    return decode_(instances, Score(r, instances, 0));
  }

 private:
  static std::function<double(const InstanceView&)> Score(const RequestView& r, Instances instances,
                                                          double prefix) {
    uint32_t low = ~0U, high = 0;
    for (const InstanceView& v : instances) {
      low = std::min(low, InFlight(v));
      high = std::max(high, InFlight(v));
    }
    return [=, &r](const InstanceView& v) {
      const double queue = high == low ? 1 : static_cast<double>(high - InFlight(v)) / (high - low);
      const double kv = v.caps.kv_blocks == 0
                            ? 1
                            : 1 - std::min(1.0, static_cast<double>(v.load.kv_blocks) / v.caps.kv_blocks);
      return -(prefix * HitShare(r, v) + 2 * queue + 2 * kv);
    };
  }
};

// AIBrix, algorithms/prefix_cache.go: imbalance 16, mean + 2 standard deviations.
class AibrixPolicy final : public LeastRequestsPolicy {
 public:
  std::string_view name() const override { return "aibrix"; }
  Choice ChoosePrefill(const RequestView& r, Instances instances, Nanos) override {
    constexpr uint32_t kImbalance = 16;
    constexpr double kDeviations = 2;
    double sum = 0, squares = 0;
    uint32_t low = ~0U, high = 0;
    for (const InstanceView& v : instances) {
      const uint32_t running = InFlight(v);
      sum += running;
      squares += double{1} * running * running;
      low = std::min(low, running);
      high = std::max(high, running);
    }
    if (high - low > kImbalance) return prefill_(instances, InFlight);
    const double n = static_cast<double>(instances.size()), mean = sum / n;
    const double limit = mean + kDeviations * std::sqrt(std::max(squares / n - mean * mean, 0.0));
    std::vector<const InstanceView*> sorted;
    for (const InstanceView& v : instances) sorted.push_back(&v);
    std::stable_sort(sorted.begin(), sorted.end(), [&](const auto* a, const auto* b) {
      const double share_a = HitShare(r, *a), share_b = HitShare(r, *b);
      return share_a != share_b ? share_a > share_b : InFlight(*a) < InFlight(*b);
    });
    for (const InstanceView* v : sorted) {
      if (HitShare(r, *v) > 0 && InFlight(*v) <= limit) return Choice::Place(v->id);
    }
    return prefill_(instances, InFlight);
  }
};

// Mooncake, FAST'25, Algorithm 1, without the transfer of prefixes between instances: that is a function of
// the engines.
class MooncakePolicy final : public LeastRequestsPolicy {
 public:
  explicit MooncakePolicy(const PolicyOptions& options) : options_(options) {}
  std::string_view name() const override { return "mooncake"; }
  Choice ChoosePrefill(const RequestView& r, Instances instances, Nanos now) override {
    const auto ttft = [&](const InstanceView& v) {
      return v.QueueTime(now) + v.PrefillTime(r.facts.prompt_tokens, v.matched_tokens);
    };
    const Choice best = prefill_(instances, ttft);
    if (options_.rejects && options_.slo_ttft > 0) {
      const auto it = std::find_if(instances.begin(), instances.end(),
                                   [&](const auto& v) { return v.id == best.instance; });
      if (it != instances.end() && now - r.received + ttft(*it) > options_.slo_ttft) return Choice::Reject();
    }
    return best;
  }
  Choice ChooseDecode(const RequestView& r, Instances instances, Nanos) override {
    return decode_(instances, [&](const InstanceView& v) {
      return v.model->StepNanos(v.load.decode_requests + 1,
                                static_cast<double>(v.load.decode_tokens) + r.facts.prompt_tokens) /
             v.weight;
    });
  }

 private:
  PolicyOptions options_;
};

// Omni Proxy, omni_scheduler.c, schedule_algo default.
class OmniPolicy : public Policy {
 public:
  explicit OmniPolicy(uint64_t seed) : random_(seed) {}
  std::string_view name() const override { return "omni"; }

  void OrderPrefill(std::vector<RequestView>& queue, int, Nanos) const override {
    double longest = 1, oldest = 50 * kMillisecond;
    for (const RequestView& r : queue) {
      longest = std::max<double>(longest, r.facts.prompt_tokens);
      oldest = std::max<double>(oldest, static_cast<double>(r.waiting));
    }
    const auto weight = [&](const RequestView& r) {
      return 0.8 * (longest - r.facts.prompt_tokens) / longest +
             0.2 * static_cast<double>(r.waiting) / oldest;
    };
    std::stable_sort(queue.begin(), queue.end(),
                     [&](const auto& a, const auto& b) { return weight(a) > weight(b); });
  }
  void OrderDecode(std::vector<RequestView>& queue, Nanos) const override {  // longest first
    std::stable_sort(queue.begin(), queue.end(), [](const auto& a, const auto& b) {
      return a.facts.prompt_tokens > b.facts.prompt_tokens;
    });
  }

  Choice ChoosePrefill(const RequestView&, Instances instances, Nanos) override {
    constexpr uint64_t kMaxBatchTokens = 32'000;
    constexpr uint32_t kMaxRequests = 32;
    const InstanceView* best = nullptr;
    for (const InstanceView& v : instances) {
      if (v.load.prefill_tokens > kMaxBatchTokens || v.load.prefill_requests > kMaxRequests) continue;
      if (best == nullptr || v.matched_tokens > best->matched_tokens ||
          (v.matched_tokens == best->matched_tokens &&
           (v.load.prefill_tokens < best->load.prefill_tokens ||
            (v.load.prefill_tokens == best->load.prefill_tokens &&
             v.load.prefill_requests < best->load.prefill_requests)))) {
        best = &v;
      }
    }
    if (best != nullptr && best->matched_tokens > 0) return Choice::Place(best->id);
    // No hit, or every matching instance is over its caps: the least tokens of all, caps ignored.
    return least_(instances, [](const InstanceView& v) { return v.load.prefill_tokens; });
  }
  Choice ChooseDecode(const RequestView&, Instances instances, Nanos) override {
    constexpr uint32_t kMaxRequests = 32;
    const size_t start = next_++;
    const InstanceView* best = nullptr;
    for (size_t i = 0; i < instances.size(); ++i) {
      const InstanceView& v = instances[(start + i) % instances.size()];
      if (v.load.decode_requests >= kMaxRequests) continue;
      if (best == nullptr || v.load.decode_tokens < best->load.decode_tokens) best = &v;
    }
    if (best != nullptr) return Choice::Place(best->id);
    return Choice::Place(instances[random_() % instances.size()].id);
  }

 private:
  Argmin least_;
  size_t next_ = 0;
  std::mt19937_64 random_;
};

// Omni Proxy, schedule_algo earliest_batch: a table of batch times by number of requests. It knows no
// prefixes.
class OmniEarliestBatchPolicy final : public OmniPolicy {
 public:
  using OmniPolicy::OmniPolicy;
  std::string_view name() const override { return "omni-earliest-batch"; }

  Choice ChoosePrefill(const RequestView&, Instances instances, Nanos now) override {
    constexpr Nanos kInFlight = 30 * kMillisecond;
    return earliest_(instances, [&](const InstanceView& v) {
      const Engine& engine = engines_[v.id];
      const Nanos next = BatchTime(engine.queued + 1), current = BatchTime(engine.queued);
      Nanos executing = BatchTime(engine.executing);
      const Nanos elapsed = now - engine.started;
      if (executing > elapsed) executing -= elapsed;  // an overdue batch is charged in full again
      return std::max<Nanos>(0, next - current) * engine.queued * engine.queued + next +
             std::max<Nanos>(executing - kInFlight, 0);
    });
  }
  void Placed(const RequestView&, const InstanceView& v, Nanos now) override {
    Engine& engine = engines_[v.id];
    if (engine.executing == 0) {
      engine.executing = 1;
      engine.started = now;
    } else {
      ++engine.queued;
    }
  }
  void PrefillDone(int instance, uint32_t, Nanos, Nanos now) override {
    Engine& engine = engines_[instance];
    constexpr Nanos kGap = 20 * kMillisecond;  // answers closer than this belong to one batch
    if (now - engine.last_done < kGap) {
      if (engine.queued > 0) --engine.queued;
      return;
    }
    if (engine.executing > 0) {
      Sample& sample = samples_[std::min<uint32_t>(engine.executing, kMaxBatch)];
      constexpr double kWindow = 128;
      sample.count = std::min(sample.count + 1, kWindow);
      sample.mean += (static_cast<double>(now - engine.started) - sample.mean) / sample.count;
    }
    engine.last_done = now;
    engine.executing = engine.queued;
    engine.queued = 0;
    engine.started = now;
  }

 private:
  static constexpr uint32_t kMaxBatch = 64;
  struct Engine {
    uint32_t queued = 0, executing = 0;
    Nanos started = 0, last_done = 0;
  };
  struct Sample {
    double mean = 0, count = 0;
  };
  Nanos BatchTime(uint32_t batch) const {
    if (batch == 0) return 0;
    const Sample& sample = samples_[std::min(batch, kMaxBatch)];
    if (sample.count > 0) return static_cast<Nanos>(sample.mean);
    constexpr std::array<Nanos, 5> kStatic = {0, 220, 280, 330, 380};
    return kStatic[std::min<size_t>(batch, kStatic.size() - 1)] * kMillisecond;
  }

  Argmin earliest_;
  std::map<int, Engine> engines_;
  std::array<Sample, kMaxBatch + 1> samples_{};
};

}  // namespace

std::unique_ptr<Policy> MakeBaseline(std::string_view name, const PolicyOptions& options) {
  if (name == "random") return std::make_unique<RandomPolicy>(options.seed);
  if (name == "round-robin") return std::make_unique<RoundRobinPolicy>();
  if (name == "least-requests") return std::make_unique<LeastRequestsPolicy>();
  if (name == "least-tokens") return std::make_unique<LeastTokensPolicy>();
  if (name == "sglang-cache-aware") return std::make_unique<SglangPolicy>();
  if (name == "dynamo") return std::make_unique<DynamoPolicy>();
  if (name == "llm-d") return std::make_unique<LlmdPolicy>();
  if (name == "aibrix") return std::make_unique<AibrixPolicy>();
  if (name == "mooncake") return std::make_unique<MooncakePolicy>(options);
  if (name == "omni") return std::make_unique<OmniPolicy>(options.seed);
  if (name == "omni-earliest-batch") return std::make_unique<OmniEarliestBatchPolicy>(options.seed);
  return nullptr;
}

}  // namespace moesaic::proxy
