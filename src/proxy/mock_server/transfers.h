// KV transfers of the mock engine between processes: the fields of each protocol, and the messages between P
// and D.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/mock/engine.h"
#include "proxy/mock_server/mock_prompt.h"
#include "proxy/mock_server/mock_server.h"

namespace moesaic::proxy {

/// A request that waits for blocks, or another engine's question that waits for its answer.
class TransferWaiter {
 public:
  virtual ~TransferWaiter() = default;
  /// `fault`: empty if the blocks have arrived.
  virtual void OnTransfer(std::string_view fault) = 0;
};

/// Used by the thread that runs `io`. `io`, `options` and `engine` outlive it.
///
/// P serves, for D: GET /mock/pinned/ID (does it hold the blocks of this request?), GET /mock/room/KEY
/// (answered when the prompt was computed) and POST /mock/release/KEY (D has read the blocks). D serves, for
/// P: POST /mock/pushed/KEY.
class MockTransfers {
 public:
  MockTransfers(boost::asio::io_context& io, const MockServerOptions& options, MockEngine& engine);

  /// Port at which other engines reach this one.
  void SetPort(int port) { port_ = port; }
  const std::string& engine_id() const { return engine_id_; }
  size_t pinned() const { return pinned_.size(); }
  uint64_t stale_fetches() const { return stale_fetches_; }
  size_t rooms();

  /// Serves the request of another engine. Returns the status of the answer; 0: the answer is sent when
  /// `waiter` is called; nullopt: the path is none of these.
  std::optional<int> Serve(std::string_view path, const std::shared_ptr<TransferWaiter>& waiter);

  /// D waits until P has the blocks. `request_id`: that of the proxy. Returns a function that ends the wait.
  std::function<void()> Await(const MockTransfer& transfer, const std::string& request_id,
                              const std::shared_ptr<TransferWaiter>& waiter);
  /// D has read the blocks, or does not need them any more: P may drop them.
  void Fetched(const MockTransfer& transfer);

  /// P computes the prompt of request `id`, and will hold its blocks.
  void Began(const MockTransfer& transfer, uint64_t id);
  /// P has computed it.
  void Computed(const MockTransfer& transfer, uint64_t id);
  /// Adds the fields for D to P's answer, or sends the blocks to D, as the protocol wants.
  void Finish(const MockTransfer& transfer, uint64_t id, nlohmann::json& answer);
  /// P has cancelled or failed the request. D is not notified: it waits until it is cancelled, too.
  void Drop(const MockTransfer& transfer, uint64_t id);
  /// The engine was restarted.
  void Forget();

 private:
  struct Room {
    bool ready = false;
    uint64_t id = 0;  ///< request at P; 0: it has not arrived, or the room is D's
    std::vector<std::weak_ptr<TransferWaiter>> waiters;
  };

  void Release(const std::string& key);
  static void Wake(const std::vector<std::weak_ptr<TransferWaiter>>& waiters);

  boost::asio::io_context& io_;
  const MockServerOptions& options_;
  MockEngine& engine_;
  int port_ = 0;
  std::string engine_id_;
  uint64_t next_key_ = 1;
  uint64_t stale_fetches_ = 0;         // requests whose blocks P had given away
  std::set<uint64_t> pinned_;          // requests of P whose blocks wait for another engine
  std::set<uint64_t> released_;        // requests that D gave up before P had computed them
  std::map<std::string, Room> rooms_;  // parallel transfers by key
};

}  // namespace moesaic::proxy
