// The parts of Scheduler: admission.cc is called by workers, snapshot.cc and placement.cc by the master.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <vector>

#include "proxy/schedule/scheduler.h"
#include "proxy/state/layout.h"

namespace moesaic::proxy {

/// Returns the earlier of two times; 0 means none.
inline Nanos Earlier(Nanos a, Nanos b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

class Scheduler::Impl {
 public:
  Impl(State state, BlockIndex index, std::unique_ptr<Policy> policy, const SchedulerOptions& options)
      : state_(state), index_(index), policy_(std::move(policy)), options_(options) {}

  Admission Submit(RequestId id, Nanos now, const TenantLimit* limit);
  bool PrefillDone(RequestId id, Nanos now);
  bool Requeue(RequestId id, int failed, bool keeps_prefill, Nanos now);
  RunResult Run(LeaseToken lease, Nanos now);
  bool Match(RequestId id, MatchResult& result) const;

  State state_;
  BlockIndex index_;
  std::unique_ptr<Policy> policy_;
  SchedulerOptions options_;

 private:
  struct Waiting {
    RequestView view;
    int worker;
    std::array<int16_t, kMaxExcluded> excluded;
  };
  struct KnownMatch {
    uint32_t generation = 0;
    Nanos time = 0;
    std::vector<InstanceMatch> matches;
  };

  /// Copies the block keys of a request. False: the id is stale.
  bool ReadKeys(RequestId id, std::vector<uint64_t>& keys) const;
  void Snapshot(Nanos now);
  bool AnyStarved(Nanos now);
  void SetPodWaits(Nanos now);
  RequestView ViewOf(const RequestSlot& slot, uint32_t index, Stage stage, Nanos now) const;
  const std::vector<InstanceMatch>& MatchesOf(const Waiting& request, Nanos now);
  /// Sets candidates_ to the instances that may take the request, with the length of its prefix on each.
  void Candidates(const Waiting& request, bool decode, Nanos now);
  void PlacePrefills(Nanos now);
  void PlaceDecodes(Nanos now);
  bool TrySkipPrefill(const Waiting& request, Nanos now);
  int ShortestQueue(const Waiting& request, Nanos now) const;
  void KeepPairs(const Waiting& request);
  bool AnyRoom(const RequestView& view) const;
  void Reserve();
  bool Commit(const Waiting& request, int prefill, int decode, Nanos now);
  void Reject(const Waiting& request);
  static void MoveUrgentForward(std::vector<RequestView>& queue);
  InstanceView* ViewFor(int id) {
    const auto it =
        std::find_if(instances_.begin(), instances_.end(), [&](const auto& v) { return v.id == id; });
    return it == instances_.end() ? nullptr : &*it;
  }
  void Observe(InstanceEntry& entry, const RequestSlot& slot, Nanos now) const;
  Nanos QueueEstimate(Nanos now) const;

  // Of the current run.
  LeaseToken lease_;
  std::vector<InstanceView> instances_;
  std::array<LatencyCoefficients, kModelClasses> models_;
  std::vector<Waiting> prefill_queue_, decode_queue_;
  std::vector<InstanceView> candidates_;
  std::vector<uint32_t> depth_, device_depth_;  // by instance
  std::map<uint32_t, uint32_t> group_matched_;
  RunResult result_;
  size_t reserved_ = 0;  // instances that were kept for starved requests
  // Matches of waiting requests, by slot.
  std::vector<KnownMatch> known_;
  MatchResult match_;
  mutable std::vector<uint64_t> keys_;
};

}  // namespace moesaic::proxy
