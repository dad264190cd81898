// IndexWriter: applies one instance's KV events to the index, in sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "proxy/events/kv_event.h"
#include "proxy/events/sequence.h"
#include "proxy/index/block_index.h"
#include "proxy/index/keys.h"
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
/// Loss of events is repaired in three steps. A gap makes the index DEGRADED and asks for a replay from the
/// first missing number. When the replay begins later than that, history was lost: the instance's blocks are
/// cleared, and the index stays DEGRADED until the engine clears its cache or every block was evicted once.
/// Otherwise the index is EXACT again.
class IndexWriter {
 public:
  IndexWriter(State state, BlockIndex index, int instance);

  /// Applies a message: `sequence` is its second frame. Returns a replay request when messages are missing.
  struct Result {
    bool applied = false;
    std::optional<uint64_t> replay_from;  ///< send this number to the replay socket
  };
  Result Apply(uint64_t sequence, const KvBatch& batch);

  /// Replies of the replay socket, in order; the end marker has sequence kReplayEnd.
  Result ApplyReplay(uint64_t sequence, const KvBatch* batch);

  /// The connection was lost, or the replay socket does not answer.
  void OnDisconnect();
  void OnReplayFailed();
  /// The engine was restarted: forget its blocks and start from any number.
  void Reset();

  IndexState state() const;
  const IndexWriterStats& stats() const { return stats_; }

 private:
  void ApplyEvents(const KvBatch& batch);
  void Stored(const KvEvent& event);
  void SetState(IndexState state);

  State state_;
  BlockIndex index_;
  KeyMaker keys_;
  int instance_;
  SequenceTracker tracker_;
  IndexWriterStats stats_;
};

}  // namespace moesaic::proxy
