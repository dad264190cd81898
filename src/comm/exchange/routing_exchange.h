// Exchange of routing before the rows of a throughput dispatch: phase by phase, each rank learns the rows
// that it will receive.
#pragma once

#include <memory>
#include <vector>

#include "comm/exchange/operation.h"
#include "comm/exchange/routing_messages.h"

namespace moesaic::comm {

class RoutingExchange {
 public:
  /// Borrows all arguments. The route already has the tokens of this rank.
  RoutingExchange(ExchangeState& state, const RouteTree& tree, RouteBuilder& builder, Route& route,
                  OperationTags tags);
  ~RoutingExchange();
  RoutingExchange(const RoutingExchange&) = delete;
  RoutingExchange& operator=(const RoutingExchange&) = delete;

  Status Advance(bool* progressed);
  bool done() const { return phase_ == tree_.phases(); }
  int WaitsFor() const;

 private:
  struct Incoming {
    int peer = 0;
    RoutingHeader header;
    RoutingTransfer header_transfer, body_transfer;
    bool header_done = false;
    std::vector<std::byte> body;
  };
  struct Outgoing {
    int peer = 0;
    RoutingHeader header;
    RoutingTransfer header_transfer, body_transfer;
    std::vector<std::byte> body;
  };

  Status Begin();
  Status AdvanceIncoming(Incoming& from, bool* progressed);
  RoutingHeader Expected() const;

  ExchangeState& state_;
  const RouteTree& tree_;
  RouteBuilder& builder_;
  Route& route_;
  const OperationTags tags_;
  int phase_ = 0;
  bool begun_ = false;
  // Each has a stable address while its transfers run.
  std::vector<std::unique_ptr<Incoming>> incoming_;
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
};

}  // namespace moesaic::comm
