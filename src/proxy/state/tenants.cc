// Token buckets of tenants. The caller holds the zone's lock.
#include <algorithm>
#include <utility>

#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

// Linear probing over a few entries.
constexpr uint32_t kProbes = 8;

// The tenant's entry, or the one that it takes: a free one, or the one that was used longest ago, as its
// bucket is the fullest.
TenantEntry& EntryFor(const StateView& view, uint64_t tenant) {
  TenantEntry* oldest = nullptr;
  for (uint32_t i = 0; i < kProbes; ++i) {
    TenantEntry& at = view.tenant(static_cast<uint32_t>((tenant + i) % view.options.max_tenants));
    if (at.tenant == tenant) return at;
    if (oldest == nullptr || at.tenant == 0 || (oldest->tenant != 0 && at.updated < oldest->updated))
      oldest = &at;
  }
  return *oldest;
}

// An engine that fails before its first token computed nothing for the client.
bool UsedPrompt(const RequestSlot& slot, Outcome outcome) {
  if (slot.output_tokens > 0) return true;
  if (outcome == Outcome::kFailed || outcome == Outcome::kRejected) return false;
  return slot.entered[static_cast<size_t>(Stage::kPrefillRunning)] != 0 ||
         slot.entered[static_cast<size_t>(Stage::kDecodeRunning)] != 0;
}

}  // namespace

bool ChargeTenant(const StateView& view, RequestSlot& slot, const TenantLimit& limit, Nanos now,
                  Nanos& retry_after) {
  const uint64_t tenant = slot.facts.tenant;
  if (limit.tokens_per_second <= 0 || tenant == 0) return true;
  const uint64_t cost = uint64_t{slot.facts.prompt_tokens} + slot.facts.max_tokens;
  const double burst = std::max(limit.burst_tokens, 1.0);
  TenantEntry& entry = EntryFor(view, tenant);
  if (entry.tenant != tenant) entry = {.tenant = tenant, .tokens = burst, .updated = now};
  entry.tokens = std::min(
      burst, entry.tokens + limit.tokens_per_second * static_cast<double>(now - entry.updated) / kSecond);
  entry.updated = now;
  // A request beyond the burst passes with a full bucket and leaves it in debt.
  const double needed = std::min(static_cast<double>(cost), burst);
  if (entry.tokens < needed) {
    retry_after = static_cast<Nanos>((needed - entry.tokens) / limit.tokens_per_second * kSecond) + 1;
    return false;
  }
  entry.tokens -= static_cast<double>(cost);
  slot.charged_tokens = cost;
  return true;
}

void SettleTenant(const StateView& view, RequestSlot& slot, Outcome outcome) {
  // A process that dies here takes too much from the bucket once, and never gives twice.
  const uint64_t charged = std::exchange(slot.charged_tokens, 0);
  if (charged == 0) return;
  TenantEntry& entry = EntryFor(view, slot.facts.tenant);
  if (entry.tenant != slot.facts.tenant) return;  // another tenant took the entry; this one begins again
  const uint64_t used =
      (UsedPrompt(slot, outcome) ? slot.facts.prompt_tokens : 0) + uint64_t{slot.output_tokens};
  entry.tokens += static_cast<double>(charged) - static_cast<double>(used);
}

}  // namespace moesaic::proxy
