#include "proxy/state/stage.h"

#include <array>

#include "proxy/state/records.h"

namespace moesaic::proxy {
namespace {

constexpr std::array<std::string_view, kNumStages> kStageNames = {
    "received",        "tokenized",      "prefix_matched",   "prefill_waiting", "prefill_scheduled",
    "prefill_running", "decode_waiting", "decode_scheduled", "decode_running",  "done"};
constexpr std::array<std::string_view, kNumOutcomes> kOutcomeNames = {"completed", "failed", "aborted",
                                                                      "rejected", "lost"};
constexpr std::array<std::string_view, 3> kRoleNames = {"both", "prefill", "decode"};
constexpr std::array<std::string_view, 5> kInstanceStateNames = {"unused", "enabled", "draining", "disabled",
                                                                 "abandoned"};
constexpr std::array<std::string_view, 4> kIndexStateNames = {"none", "exact", "degraded", "replaying"};

template <size_t N, typename Enum>
std::string_view NameIn(const std::array<std::string_view, N>& names, Enum value) {
  const auto i = static_cast<size_t>(value);
  return i < N ? names[i] : "invalid";
}

}  // namespace

std::string_view StageName(Stage stage) { return NameIn(kStageNames, stage); }
std::string_view OutcomeName(Outcome outcome) { return NameIn(kOutcomeNames, outcome); }
std::string_view RoleName(Role role) { return NameIn(kRoleNames, role); }
std::string_view InstanceStateName(InstanceState state) { return NameIn(kInstanceStateNames, state); }
std::string_view IndexStateName(IndexState state) { return NameIn(kIndexStateNames, state); }

}  // namespace moesaic::proxy
