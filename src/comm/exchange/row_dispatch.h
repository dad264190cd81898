// Operations that send the rows of a rank's tokens to the ranks of their experts.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/exchange/operation.h"
#include "comm/exchange/routing_exchange.h"

namespace moesaic::comm {

/// Returns InvalidArgument, which names `name`, unless `rows` has the bytes and scales of `count` rows of
/// `hidden` elements.
Status CheckRows(const PayloadRows& rows, int64_t count, int hidden, const char* name);

/// Rows of this rank's tokens in the dispatch payload. If the caller's rows already have that payload,
/// Encode() borrows them; otherwise it encodes a copy.
class OwnRows {
 public:
  Status Encode(const ExchangeState& state, const PayloadRows& x, const Route& route,
                runtime::Buffer* memory);
  const std::byte* row(int32_t token) const { return data_ + token * bytes_; }

 private:
  const std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// Allocates the memory for the route's expert rows.
Status ReserveRows(const ExchangeState& state, const Route& route, RowMemory* memory);
/// Copies a row that this rank holds (Route::held) to each of its expert rows. `wire` is the row as received.
void ExpandRow(const ExchangeState& state, const Route& route, int32_t row, const std::byte* wire,
               RowMemory* memory);

/// Throughput mode: sends rows in segments along a route. The route is either known, or exchanged first.
class RowDispatch final : public Operation, private PipelineSteps {
 public:
  /// `tokens` is null if the route is known. All references and the rows must live until done() or Cancel().
  RowDispatch(ExchangeState& state, const PayloadRows& x, const TokenRoutes* tokens,
              std::shared_ptr<Route> route, std::shared_ptr<RowMemory> rows,
              std::shared_ptr<OperationMemory> memory);

  Status Advance(bool* progressed) override;
  bool done() const override { return started_rows_ && pipeline_.done(); }
  int WaitsFor() const override { return started_rows_ ? pipeline_.WaitsFor() : routing_->WaitsFor(); }
  void Cancel() override;
  bool uses_map() const override { return true; }
  const char* name() const override { return "dispatch"; }

 private:
  Status StartRows();
  void Pack(int out_index, int segment) override;
  void Arrived(int in_index, int segment) override;
  void Settled(int) override {}
  const std::byte* RowData(int32_t row) const;

  ExchangeState& state_;
  const PayloadRows x_;
  const std::shared_ptr<Route> route_;
  const std::shared_ptr<RowMemory> rows_;
  const std::shared_ptr<OperationMemory> memory_;
  const OperationTags tags_;
  const int64_t row_bytes_;
  OwnRows own_;
  std::optional<RouteBuilder> builder_;
  std::optional<RoutingExchange> routing_;
  bool started_rows_ = false;
  SegmentPipeline pipeline_;
};

/// Buffers of fixed size for one low-latency dispatch in flight: one per source rank.
struct FixedBuffers {
  runtime::Buffer memory;  // [ranks, bytes_per_rank]
  int64_t bytes_per_rank = 0;
};

/// Low-latency mode: each rank sends its rows, preceded by their routing, directly to every rank that needs
/// them. No rank waits for another before it sends.
class LowLatencyDispatch final : public Operation {
 public:
  LowLatencyDispatch(ExchangeState& state, const PayloadRows& x, const TokenRoutes& tokens,
                     std::shared_ptr<Route> route, std::shared_ptr<RowMemory> rows,
                     std::shared_ptr<OperationMemory> memory, std::shared_ptr<FixedBuffers> buffers);
  ~LowLatencyDispatch() override { CancelTransfers(); }

  /// Posts all sends and the receives of headers.
  Status Start();
  Status Advance(bool* progressed) override;
  bool done() const override { return done_; }
  int WaitsFor() const override;
  void Cancel() override { CancelTransfers(); }
  bool uses_map() const override { return true; }
  const char* name() const override { return "low-latency dispatch"; }

 private:
  struct Peer {
    RoutingHeader sent, received;
    RoutingTransfer send_header, send_body, receive_header, receive_body;
    bool has_header = false;
  };

  RoutingHeader Expected() const;
  Status SendTo(int peer, const RouteSend* send, std::byte* body);
  Status AdvancePeer(int peer, bool* progressed);
  Status FinishRoute();
  void CancelTransfers();
  std::byte* BufferOf(int peer) const { return buffers_->memory.data() + peer * buffers_->bytes_per_rank; }

  ExchangeState& state_;
  const PayloadRows x_;
  const std::shared_ptr<Route> route_;
  const std::shared_ptr<RowMemory> rows_;
  const std::shared_ptr<OperationMemory> memory_;
  const std::shared_ptr<FixedBuffers> buffers_;
  const OperationTags tags_;
  const int64_t row_bytes_;
  RouteBuilder builder_;
  OwnRows own_;
  std::vector<int> live_peers_;
  std::vector<Peer> peers_;         // [ranks]
  std::vector<std::byte> routing_;  // scratch
  bool done_ = false;
};

}  // namespace moesaic::comm
