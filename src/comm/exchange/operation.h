// Asynchronous operations of an exchange: dispatch, low-latency dispatch and combine. Internal to the folder.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/exchange/exchange_options.h"
#include "comm/exchange/route.h"
#include "comm/exchange/segment_pipeline.h"
#include "comm/exchange/traffic.h"
#include "runtime/memory.h"

namespace moesaic::comm {

/// State that operations share. Owned by the exchange, which outlives them.
struct ExchangeState {
  ExchangeState(Transport& end, const Topology& layout, std::shared_ptr<const ExpertMap> placement,
                int hidden_size, ExchangeOptions choices)
      : transport(end),
        topology(layout),
        map(std::move(placement)),
        hidden(hidden_size),
        options(std::move(choices)),
        dead(layout.ranks(), false),
        tree(RouteTree::Direct(dead)),
        direct(RouteTree::Direct(dead)),
        chooser(layout, *map, end.rank(), options.replica_choice),
        dispatch_traffic(layout, end.rank()),
        combine_traffic(layout, end.rank()) {}

  int rank() const { return transport.rank(); }

  Transport& transport;
  const Topology& topology;
  std::shared_ptr<const ExpertMap> map;  // map that the chooser borrows; never null
  const int hidden;
  const ExchangeOptions options;
  std::vector<bool> dead;
  RouteTree tree, direct;
  ReplicaChooser chooser;
  uint32_t epoch = 0;     // number of SetDead() calls
  uint32_t sequence = 0;  // of the next operation in this epoch
  TrafficCounter dispatch_traffic, combine_traffic;
};

/// Kind of a message within an operation.
enum class MessageKind : uint8_t { kHeader, kRouting, kRows, kSums };
inline constexpr int kMaxExchangePhases = 16;

/// Tags of one operation. They recur after 64 epochs or 256 operations, when no message of the first is in
/// flight.
struct OperationTags {
  Tag base = 0;
  static OperationTags Next(ExchangeState& state) {
    const Tag epoch = state.epoch & 63U, sequence = state.sequence++ & 255U;
    return {state.options.first_tag | epoch << 14 | sequence << 6};
  }
  Tag At(MessageKind kind, int phase) const {
    return base | static_cast<Tag>(kind) << 4 | static_cast<Tag>(phase);
  }
};

/// A state machine that never blocks.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual Status Advance(bool* progressed) = 0;
  virtual bool done() const = 0;
  /// Ends all transfers early. Destructors call it, too.
  virtual void Cancel() = 0;
  /// Returns a rank that the operation waits for, or -1.
  virtual int WaitsFor() const = 0;
  /// Returns whether the operation reads ExchangeState::map until it ends.
  virtual bool uses_map() const { return false; }
  /// Returns a name for messages.
  virtual const char* name() const = 0;

  /// Advances unless the operation has ended. Its first error ends it.
  void Step(bool* progressed) {
    if (ended()) return;
    if (Status result = Advance(progressed); !result.ok()) Fail(std::move(result));
  }
  void Fail(Status error) {
    failure_ = std::move(error);
    Cancel();
  }
  bool ended() const { return !failure_.ok() || done(); }
  const Status& failure() const { return failure_; }

 private:
  Status failure_;
};

/// Objects that later operations reuse once all holders have released them. One thread.
template <typename T>
class ReusePool {
 public:
  std::shared_ptr<T> Take() {
    for (const std::shared_ptr<T>& item : items_) {
      if (item.use_count() == 1) return item;
    }
    return items_.emplace_back(std::make_shared<T>());
  }

 private:
  std::vector<std::shared_ptr<T>> items_;
};

/// Received rows of local experts.
struct RowMemory {
  runtime::Buffer data;    // [rows, hidden]
  runtime::Buffer scales;  // [rows, ScalesPerRow()], f32
};

/// Memory of one operation while it runs.
struct OperationMemory {
  runtime::Buffer own;  // encoded rows of this rank's tokens
  runtime::Buffer in, out;
};

}  // namespace moesaic::comm
