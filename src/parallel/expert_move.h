// One rank's part of moving the experts of a layer to another placement, while the rank computes with the old
// one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/status.h"
#include "comm/transport/transport.h"
#include "parallel/placement/migration.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Copies experts that the rank keeps, and exchanges the others in rounds, in which it sends at most one
/// expert to one peer and receives at most one from it. Ranks need not be in the same round. Experts travel
/// in pieces of at most 1 MiB, so that a call never keeps a step waiting for long. A checksum follows each
/// expert. One thread.
class ExpertMove {
 public:
  /// Returns the weights of an expert that the rank holds. They must not change before done().
  using OldWeights = std::function<const std::byte*(int expert)>;

  /// `ranks` is the transport of the expert group and `number` that of the move, equal on all ranks. An
  /// expert has `bytes` bytes. `next_weights` has space for the experts of this rank in `next`, in order.
  /// All are borrowed.
  static StatusOr<ExpertMove> Create(comm::Transport& ranks, uint64_t number, const LayerPlacement& current,
                                     const LayerPlacement& next, int64_t bytes, OldWeights old_weights,
                                     std::byte* next_weights);
  ~ExpertMove();  ///< Cancels transfers in flight.
  ExpertMove(ExpertMove&& other) noexcept;
  ExpertMove& operator=(ExpertMove&&) = delete;

  /// Copies a piece of an expert, and starts the next pieces of transfers that have ended; does not wait.
  /// After an error the move is over. DataLoss: an expert does not have the sender's checksum.
  Status Advance();
  bool done() const {
    return copies_.empty() && round_ == rounds_.size() && !send_.open() && !receive_.open();
  }
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  struct Copy {
    int expert = 0, slot = 0;
    int64_t done = 0;  // bytes
  };
  struct OwnRound {
    size_t number = 0;
    std::optional<ExpertTransfer> send, receive;
  };
  // One expert of a round, sent or received piece by piece, and its checksum.
  struct ExpertStream {
    ExpertTransfer transfer = {};
    comm::Tag tag = 0;
    int64_t begun = 0, left = 0;              // bytes of started pieces, and of those to start
    int64_t summed = 0;                       // bytes in `sum`
    base::Xxh3 sum = {};                      // checksum so far
    std::unique_ptr<uint64_t> expected = {};  // the sender's checksum; null: it is not sent yet
    std::optional<comm::TransferId> piece = {};
    bool open() const { return piece.has_value() || left > 0; }
  };
  ExpertMove(comm::Transport& ranks, uint64_t number, int64_t bytes, OldWeights old_weights,
             std::byte* next_weights);
  void StartRound();
  Status AdvanceStream(bool sends, ExpertStream& stream);
  Status StartPiece(bool sends, ExpertStream& stream);
  void CopyPiece();

  comm::Transport* ranks_;
  uint64_t number_;
  int64_t bytes_;
  OldWeights old_weights_;
  std::byte* next_;
  std::vector<Copy> copies_;      // the last one first
  std::vector<OwnRound> rounds_;  // rounds in which this rank takes part
  size_t round_ = 0;              // next one to start
  ExpertStream send_, receive_;
  int64_t sent_bytes_ = 0;
};

}  // namespace moesaic::parallel
