// Stages of a request, roles and states of instances.
#pragma once

#include <cstdint>
#include <string_view>

namespace moesaic::proxy {

/// Nanoseconds of CLOCK_MONOTONIC, which all processes of a host share. The library never reads a clock.
using Nanos = int64_t;
inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;

/// A request passes the stages in this order and may skip some of them. Every stage is stamped and counted.
enum class Stage : uint8_t {
  kReceived,          ///< the head of the request was read
  kTokenized,         ///< token ids, or an estimate of their number, are known
  kPrefixMatched,     ///< the prefix index was searched
  kPrefillWaiting,    ///< in the queue for a prefill (or aggregated) instance
  kPrefillScheduled,  ///< an instance is chosen and charged
  kPrefillRunning,    ///< the request was sent to it
  kDecodeWaiting,     ///< prefill has finished; in the queue for a decode instance
  kDecodeScheduled,   ///< a decode instance is chosen and charged
  kDecodeRunning,     ///< the decode instance has the request
  kDone,              ///< answered, failed or aborted
};
inline constexpr int kNumStages = 10;

/// Returns a name for metrics and logs, such as "prefill_waiting".
std::string_view StageName(Stage stage);

/// The end of a request.
enum class Outcome : uint8_t { kCompleted, kFailed, kAborted, kRejected, kLost };
inline constexpr int kNumOutcomes = 5;
std::string_view OutcomeName(Outcome outcome);

enum class Role : uint8_t { kBoth, kPrefill, kDecode };
std::string_view RoleName(Role role);

enum class InstanceState : uint8_t {
  kUnused,
  kEnabled,
  kDraining,   ///< keeps its requests, gets no new ones
  kDisabled,   ///< an operator or a health check disabled it, and may enable it again
  kAbandoned,  ///< no longer configured; the entry is freed with its last reference
};
std::string_view InstanceStateName(InstanceState state);

/// Division of a request between prefill and decode instances.
enum class Mode : uint8_t {
  kAggregated,  ///< one instance does both
  kSequential,  ///< prefill first; the decode instance is chosen when it has finished
  kParallel,    ///< both instances are chosen and charged at once
};

}  // namespace moesaic::proxy
