#include "proxy/mock_server/transfers.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "proxy/mock_server/steady_now.h"

namespace moesaic::proxy {
namespace {

namespace http = boost::beast::http;
using tcp = boost::asio::ip::tcp;
using Json = nlohmann::json;

// One HTTP request to another process. Calls back once: whether the answer was 200.
class PeerCall : public std::enable_shared_from_this<PeerCall> {
 public:
  using Done = std::function<void(bool ok)>;
  PeerCall(boost::asio::io_context& io, Done done) : stream_(io), done_(std::move(done)) {}

  void Start(const std::string& address, http::verb verb, const std::string& target, std::string body) {
    const size_t colon = address.rfind(':');
    std::string host = address.substr(0, colon == std::string::npos ? 0 : colon);
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
    boost::system::error_code error;
    const auto ip = boost::asio::ip::make_address(host, error);
    if (error || colon == std::string::npos) return Finish(false);
    request_ = {verb, target, 11};
    request_.set(http::field::host, address);
    request_.set(http::field::connection, "close");
    request_.body() = std::move(body);
    request_.prepare_payload();
    stream_.expires_never();
    const tcp::endpoint endpoint(ip, static_cast<unsigned short>(std::atoi(address.c_str() + colon + 1)));
    stream_.async_connect(endpoint, [self = shared_from_this()](auto failed) {
      if (failed) return self->Finish(false);
      http::async_write(self->stream_, self->request_, [self](auto bad, size_t) {
        if (bad) return self->Finish(false);
        http::async_read(self->stream_, self->buffer_, self->response_, [self](auto worse, size_t) {
          self->Finish(!worse && self->response_.result_int() == 200);
        });
      });
    });
  }
  void Cancel() {
    done_ = nullptr;
    stream_.close();
  }

 private:
  void Finish(bool ok) {
    if (done_) std::exchange(done_, nullptr)(ok);
  }

  boost::beast::tcp_stream stream_;
  http::request<http::string_body> request_;
  http::response<http::string_body> response_;
  boost::beast::flat_buffer buffer_;
  Done done_;
};

void Post(boost::asio::io_context& io, const std::string& peer, const std::string& target) {
  std::make_shared<PeerCall>(io, [](bool) {})->Start(peer, http::verb::post, target, "");
}

}  // namespace

MockTransfers::MockTransfers(boost::asio::io_context& io, const MockServerOptions& options,
                             MockEngine& engine)
    : io_(io),
      options_(options),
      engine_(engine),
      engine_id_(
          fmt::format("mock-{:x}", SteadyNow() ^ static_cast<Nanos>(reinterpret_cast<uintptr_t>(this)))) {}

size_t MockTransfers::rooms() {
  std::erase_if(rooms_, [](const auto& item) {  // rooms whose requests have ended before P had the prompt
    return item.second.id == 0 && std::all_of(item.second.waiters.begin(), item.second.waiters.end(),
                                              [](const auto& waiter) { return waiter.expired(); });
  });
  return rooms_.size();
}

std::optional<int> MockTransfers::Serve(std::string_view path,
                                        const std::shared_ptr<TransferWaiter>& waiter) {
  const auto key_after = [path](std::string_view start) {
    return path.starts_with(start) ? std::optional<std::string>(path.substr(start.size())) : std::nullopt;
  };
  if (const auto key = key_after("/mock/pinned/"))
    return pinned_.contains(std::strtoull(key->c_str(), nullptr, 10)) ? 200 : 404;
  if (const auto key = key_after("/mock/release/")) {
    Release(*key);
    return 200;
  }
  if (const auto key = key_after("/mock/room/")) {
    Room& room = rooms_[*key];
    if (room.ready) return 200;
    room.waiters.push_back(waiter);
    return 0;
  }
  if (const auto key = key_after("/mock/pushed/")) {
    if (auto room = rooms_.extract(*key)) Wake(room.mapped().waiters);
    return 200;
  }
  return std::nullopt;
}

std::function<void()> MockTransfers::Await(const MockTransfer& transfer, const std::string& request_id,
                                           const std::shared_ptr<TransferWaiter>& waiter) {
  const bool push = options_.transfer == Transfer::kAscend;
  auto call = std::make_shared<PeerCall>(
      io_, [this, push, prefilled = transfer.prefilled, weak = std::weak_ptr(waiter)](bool ok) {
        const auto asking = weak.lock();
        if (asking == nullptr) return;
        if (push) {
          if (!ok) asking->OnTransfer("the metaserver does not know the request");
        } else if (prefilled) {
          // A real engine would read the KV of another request, and answer from it.
          if (!ok) ++stale_fetches_;
          asking->OnTransfer(ok ? "" : "the prefill engine does not hold the blocks any more");
        } else {
          asking->OnTransfer(ok ? "" : "the prefill engine does not answer");
        }
      });
  if (push) {
    const std::string key = fmt::format("{}-{}", engine_id_, next_key_++);
    rooms_[key].waiters.push_back(waiter);
    std::string url = transfer.metaserver;
    if (url.starts_with("http://")) url.erase(0, 7);
    const size_t slash = std::min(url.find('/'), url.size());
    const Json body = {{"request_id", "chatcmpl-" + request_id},
                       {"do_remote_decode", true},
                       {"do_remote_prefill", false},
                       {"remote_request_id", key},
                       {"remote_host", options_.host},
                       {"remote_port", port_}};
    call->Start(url.substr(0, slash), http::verb::post, url.substr(slash), body.dump());
  } else {
    const char* const question = transfer.prefilled ? "/mock/pinned/" : "/mock/room/";
    call->Start(transfer.peer, http::verb::get, question + transfer.key, "");
  }
  return [call] { call->Cancel(); };
}

void MockTransfers::Fetched(const MockTransfer& transfer) {
  if (transfer.peer.empty() || options_.transfer == Transfer::kAscend) return;
  Post(io_, transfer.peer, "/mock/release/" + transfer.key);
}

void MockTransfers::Began(const MockTransfer& transfer, uint64_t id) {
  pinned_.insert(id);
  if (options_.transfer != Transfer::kVllmNixl) rooms_[transfer.key].id = id;
}

void MockTransfers::Computed(const MockTransfer& transfer, uint64_t id) {
  if (released_.erase(id) > 0) engine_.ReleaseRemote(id, SteadyNow());
  const auto found = rooms_.find(transfer.key);
  if (found == rooms_.end()) return;
  found->second.ready = true;
  Wake(std::exchange(found->second.waiters, {}));
}

void MockTransfers::Finish(const MockTransfer& transfer, uint64_t id, Json& answer) {
  if (options_.transfer == Transfer::kVllmNixl) {
    answer["kv_transfer_params"] = {{"do_remote_prefill", true},
                                    {"do_remote_decode", false},
                                    {"remote_block_ids", Json::array({Json::array({1, 2, 3})})},
                                    {"remote_engine_id", engine_id_},
                                    {"remote_request_id", std::to_string(id)},
                                    {"remote_host", options_.host},
                                    {"remote_port", port_},
                                    {"tp_size", 1}};
  } else if (options_.transfer == Transfer::kAscend) {
    engine_.ReleaseRemote(id, SteadyNow());
    pinned_.erase(id);
    rooms_.erase(transfer.key);
    Post(io_, transfer.peer, "/mock/pushed/" + transfer.key);
  }
}

void MockTransfers::Drop(const MockTransfer& transfer, uint64_t id) {
  released_.erase(id);
  if (pinned_.erase(id) > 0) rooms_.erase(transfer.key);
}

void MockTransfers::Forget() {
  pinned_.clear();
  released_.clear();
  rooms_.clear();
}

void MockTransfers::Release(const std::string& key) {
  uint64_t id = std::strtoull(key.c_str(), nullptr, 10);
  if (const auto room = rooms_.extract(key)) id = room.mapped().id;
  if (pinned_.erase(id) > 0 && !engine_.ReleaseRemote(id, SteadyNow())) released_.insert(id);
}

void MockTransfers::Wake(const std::vector<std::weak_ptr<TransferWaiter>>& waiters) {
  for (const auto& waiter : waiters) {
    if (const auto waiting = waiter.lock()) waiting->OnTransfer("");
  }
}

}  // namespace moesaic::proxy
