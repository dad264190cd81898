#include "proxy/schedule/policy.h"

#include <algorithm>
#include <array>

#include "proxy/schedule/policies.h"

namespace moesaic::proxy {
namespace {

constexpr std::array<std::string_view, 12> kPolicyNames = {
    "moesaic", "random", "round-robin", "least-requests", "least-tokens", "sglang-cache-aware",
    "dynamo",  "llm-d",  "aibrix",      "mooncake",       "omni",         "omni-earliest-batch"};

bool Below(uint64_t cap, uint64_t value) { return cap == 0 || value <= cap; }

}  // namespace

// A request beyond the cap on its own is let in by an idle instance: it would wait forever otherwise.
bool InstanceView::PrefillRoom(uint32_t uncached_tokens) const {
  if (!Below(caps.prefill_requests, uint64_t{load.prefill_requests} + 1)) return false;
  return load.prefill_requests == 0 || Below(caps.prefill_tokens, load.prefill_tokens + uncached_tokens);
}

bool InstanceView::DecodeRoom(uint32_t tokens) const {
  if (!Below(caps.decode_requests, uint64_t{load.decode_requests} + 1)) return false;
  if (load.decode_requests == 0) return true;
  const uint64_t blocks = tokens / std::max<uint32_t>(block_size, 1) + 1;
  return Below(caps.decode_tokens, load.decode_tokens + tokens) &&
         Below(caps.kv_blocks, load.kv_blocks + blocks);
}

Nanos InstanceView::QueueTime(Nanos now) const {
  if (load.prefill_requests == 0) return std::max(reserved_work, pod_wait);
  // The prefill that runs has used the time since it began, but no more than an average one needs: when it
  // takes longer than predicted, the others have not begun.
  const Nanos used = std::min(now - busy_since, load.prefill_work / load.prefill_requests);
  return std::max(load.prefill_work - std::max<Nanos>(used, 0) + reserved_work, pod_wait);
}

Nanos InstanceView::PrefillTime(uint32_t prompt_tokens, uint32_t cached_tokens) const {
  const uint32_t cached = std::min(cached_tokens, prompt_tokens);
  return static_cast<Nanos>(model->PrefillNanos(prompt_tokens - cached, cached) / weight);
}

Nanos InstanceView::AddedTime(uint32_t prompt_tokens, uint32_t cached_tokens) const {
  const uint32_t cached = std::min(cached_tokens, prompt_tokens), fresh = prompt_tokens - cached;
  const Nanos alone = PrefillTime(prompt_tokens, cached);
  if (load.prefill_requests == 0 && reserved_work == 0) return alone;
  const double share = std::min(1.0, static_cast<double>(fresh) / batch_tokens);
  return alone - static_cast<Nanos>(model->base * (1 - share) / weight);
}

bool Policy::MayPlace(std::span<const InstanceView>, Nanos, Nanos&) { return true; }

void Policy::OrderPrefill(std::vector<RequestView>& queue, int, Nanos) const {
  std::stable_sort(queue.begin(), queue.end(),
                   [](const auto& a, const auto& b) { return a.waiting > b.waiting; });
}

void Policy::OrderDecode(std::vector<RequestView>& queue, Nanos) const {
  std::stable_sort(queue.begin(), queue.end(),
                   [](const auto& a, const auto& b) { return a.waiting > b.waiting; });
}

void Policy::Placed(const RequestView&, const InstanceView&, Nanos) {}
void Policy::PrefillDone(int, uint32_t, Nanos, Nanos) {}

std::span<const std::string_view> PolicyNames() { return kPolicyNames; }

StatusOr<std::unique_ptr<Policy>> MakePolicy(std::string_view name, const PolicyOptions& options) {
  if (name == "moesaic") return MakeMoesaicPolicy(options);
  if (auto policy = MakeBaseline(name, options)) return policy;
  std::string names;
  for (const std::string_view known : kPolicyNames) names.append(names.empty() ? "" : ", ").append(known);
  return NotFound("there is no policy of this name; known are {}: {}", names, name);
}

}  // namespace moesaic::proxy
