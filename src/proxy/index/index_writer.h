// IndexWriter: applies one instance's KV events to the index, in sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proxy/events/kv_event.h"
#include "proxy/events/sequence.h"
#include "proxy/index/block_index.h"
#include "proxy/index/keys.h"
#include "proxy/state/lease.h"
#include "proxy/state/state.h"

namespace moesaic::proxy {

struct IndexWriterStats {
  uint64_t batches = 0, duplicates = 0, gaps = 0, events = 0, stored = 0, removed = 0, cleared = 0;
  uint64_t unknown_parents = 0;  ///< events whose parent is not known: they are skipped
  uint64_t unknown_removals = 0;
  uint64_t unusable = 0;  ///< events without tokens, of other KV groups or of an unknown medium
};

/// The process that subscribes to an instance owns its writer. The sequence number and the state are stored
/// in shared memory, so that another process may continue after this one has died.
///
/// A process that was stopped may continue after another one has taken its lease. Each call therefore holds
/// the lock of all writers, and changes nothing if the tenure of the lease has ended or the entry of the
/// instance was given to another engine: a successor that has made a call sees no change by the process
/// before it.
///
/// A gap makes the index REPLAYING: live messages are ignored until the missing ones were replayed, and the
/// index is EXACT again at the end of the replay, unless history was lost: if a replay begins too late, or no
/// replay socket exists. The instance's blocks are then cleared, so that the index has no false ones, and the
/// index is DEGRADED, because blocks may be missing, until everything was replayed, or the engine clears its
/// cache or is restarted. A writer that starts in the middle of a stream requests a replay of everything.
class IndexWriter {
 public:
  /// `lease`: tenure in which this process may write; none: it may always. `generation`: that of the entry
  /// for which the writer is made; none: the present one.
  IndexWriter(State state, BlockIndex index, int instance, LeaseToken lease = {},
              std::optional<uint32_t> generation = {});

  struct Result {
    bool applied = false;
    bool fenced = false;  ///< this writer may not write any more
    std::optional<uint64_t> replay_from =
        {};  ///< send this number to the replay socket, or call OnReplayFailed
  };
  /// Returns whether no process is inside a call, which the next call of this writer would wait for. A
  /// process that was stopped may be inside one for long.
  bool Ready() const;
  /// Applies a live message; `sequence` is its second frame.
  Result Apply(uint64_t sequence, const KvBatch& batch);
  /// Applies a reply of the replay socket, in order. The end marker has the number kReplayEnd and no batch.
  Result ApplyReplay(uint64_t sequence, const KvBatch* batch);
  /// Called when a subscription begins and a replay socket exists. Requests the messages after the last one
  /// that was applied.
  Result Begin();
  /// Called when the subscription failed. Begin() follows when a subscription exists again.
  void OnFeedFailed();
  /// Called when the replay socket does not exist or does not answer.
  void OnReplayFailed();
  /// Called when a replay socket that did not answer does so again. Requests everything if the index is
  /// DEGRADED.
  Result Retry();
  /// Called when the engine was restarted. Forgets its blocks and accepts any number.
  void Reset();

  IndexState state() const;
  /// Tokens of the engine's blocks; 0: not known yet.
  uint32_t block_size() const { return block_size_; }
  const IndexWriterStats& stats() const { return stats_; }

 private:
  class Turn;

  bool MayWrite() const;
  void Continue();
  Result StartReplay(uint64_t from);
  Result ApplyNext(uint64_t sequence, const KvBatch& batch);
  void EndReplay();
  void Forget();
  void ForgetSequence();
  void LoseHistory();
  void ApplyEvents(const KvBatch& batch);
  void Stored(const KvEvent& event);
  void Removed(const KvEvent& event);
  bool OfPrimaryGroup(const KvEvent& event);
  Tier TierOf(const std::string& medium);
  void Applied(uint64_t sequence);
  void SetState(IndexState state);
  bool HistoryLost() const;
  void SetHistoryLost(bool lost);

  State state_;
  BlockIndex index_;
  KeyMaker keys_;
  int instance_;
  LeaseToken lease_;
  uint32_t generation_ = 0;  // of the instance
  SequenceTracker tracker_;
  bool continued_ = false;               // the tracker has the number at which the process before stopped
  std::optional<uint64_t> replay_next_;  // number that the replay should have next
  bool replay_empty_ = false;
  bool beginning_ = false;      // a reason other than a gap caused the replay
  bool asked_for_all_ = false;  // a replay from the beginning was requested since the last Reset
  bool unknown_parent_ = false;
  bool device_seen_ = false;  // the engine names device memory, so that "CPU" is another tier
  int64_t primary_group_ = 0;
  uint32_t block_size_ = 0;
  std::vector<uint64_t> block_keys_;  // of the current event
  IndexWriterStats stats_;
};

}  // namespace moesaic::proxy
