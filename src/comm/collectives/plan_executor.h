// Runs one rank's part of a plan over a transport.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/collectives/plan.h"
#include "comm/collectives/reduce_kernels.h"
#include "comm/transport/transport.h"
#include "tensor/dtype.h"

namespace moesaic::comm {

/// Maximum number of streams of a plan. Each has its own tag.
inline constexpr int kMaxStreams = 8;

/// Returns the number of elements per piece in which a message of `count` elements travels.
int64_t PieceElements(int64_t count, int64_t element_bytes);

/// One rank's part of a plan. It can be run any number of times, one run after the other, and allocates
/// memory in the first run only. Large messages travel in pieces, so that a reduction works on one piece
/// while the next is in flight. Used by the thread that uses the transport.
class PlanExecutor {
 public:
  /// `kernel` may be null where the plan has no reductions. Unimplemented for lossy encodings of other types
  /// than F32 or other operations than sums, and for more than kMaxStreams streams.
  static StatusOr<std::unique_ptr<PlanExecutor>> Create(std::shared_ptr<const Plan> plan,
                                                        Transport& transport, tensor::DType dtype,
                                                        ReduceKernel kernel);
  /// Cancels a run that has not ended.
  ~PlanExecutor();
  PlanExecutor(const PlanExecutor&) = delete;
  PlanExecutor& operator=(const PlanExecutor&) = delete;

  const Plan& plan() const { return *plan_; }
  /// Returns the bytes of scratch and staging, which stay allocated between runs.
  int64_t memory_bytes() const { return std::ssize(scratch_) + std::ssize(staging_) * staging_bytes_; }

  /// Starts a run. Streams use the tags tag, tag + 1, ... Both buffers have the sizes of InputCount() and
  /// OutputCount(), and are borrowed until the run ends.
  void Start(const std::byte* input, std::byte* output, Tag tag);
  /// Advances the run by the transfers that have ended; does not call Progress(). Returns true when the run
  /// has ended; result() is then its status. After an error no transfer is in flight.
  bool Advance();
  const Status& result() const { return result_; }
  /// Ends the run with an error, after which buffers are not touched.
  void Cancel(const Status& reason);
  /// Returns the peers with transfers in flight, for messages: "rank 2 (receive), rank 3 (send)".
  std::string Waiting() const;

 private:
  static constexpr int kWindow = 4;  // pieces of a message in flight

  struct Piece {
    TransferId id;
    bool busy = false;
    int64_t offset = 0, count = 0;  // elements of the message
    std::byte* staging = nullptr;   // buffer in which the message is encoded or reduced
  };
  struct Transfer {
    const Message* message = nullptr;
    bool is_send = false;
    int before = -1;  // transfer of the round that has the same peer and direction, and is posted first
    int64_t posted = 0, ended = 0;  // elements
    bool is_posted = false;         // all pieces, also of an empty message
    bool is_done = false;
    int64_t piece = 0;  // elements per piece
    std::array<Piece, kWindow> pieces;
  };
  struct StreamState {
    size_t round = 0;
    bool started = false;  // the round
    size_t count = 0;      // transfers of the round
    size_t left = 0;       // transfers that are not done
    std::vector<Transfer> transfers;
  };

  PlanExecutor(std::shared_ptr<const Plan> plan, Transport& transport, tensor::DType dtype,
               ReduceKernel kernel);

  std::byte* At(const Slice& slice);
  void RunLocal(const LocalStep& step);
  void StartRound(int stream);
  bool AdvanceStream(int stream);  // true when it made progress
  bool AdvanceTransfer(StreamState& state, Transfer& transfer, Tag tag);
  bool Post(Transfer& transfer, Tag tag, Piece& piece);
  void Finish(const Transfer& transfer, const Piece& piece);
  void DecodeAndReduce(WireFormat wire, const Piece& piece, std::byte* to);
  std::byte* TakeStaging();
  void CancelTransfers();

  const std::shared_ptr<const Plan> plan_;
  Transport& transport_;
  const tensor::DType dtype_;
  const int64_t element_bytes_;
  const ReduceKernel kernel_;
  const RankPlan& own_;
  std::vector<std::byte> scratch_;
  std::vector<StreamState> streams_;
  std::vector<std::unique_ptr<std::byte[]>> staging_;
  std::vector<std::byte*> free_staging_;
  int64_t staging_bytes_ = 0;

  const std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  Tag tag_ = 0;
  size_t streams_left_ = 0;
  bool running_ = false;
  Status result_;
};

}  // namespace moesaic::comm
