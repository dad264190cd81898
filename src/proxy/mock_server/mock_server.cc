#include "proxy/mock_server/mock_server.h"

#include <fmt/format.h>

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "proxy/mock/engine.h"
#include "proxy/mock_server/event_sockets.h"
#include "proxy/mock_server/mock_prompt.h"
#include "proxy/mock_server/steady_now.h"
#include "proxy/mock_server/transfers.h"
#include "proxy/protocol/answer_stream.h"
#include "proxy/protocol/json_members.h"

namespace moesaic::proxy {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using Json = nlohmann::json;

constexpr size_t kMaxBody = 512 << 20;
constexpr size_t kKeptRequests = 200;

std::string_view View(beast::string_view text) { return {text.data(), text.size()}; }

MockEngineOptions WithHash(MockEngineOptions options) {
  options.hash = MockBlockHash;
  return options;
}

}  // namespace

class MockServer::Impl {
 public:
  class Session;

  explicit Impl(const MockServerOptions& options)
      : options_(options),
        engine_(WithHash(options.engine)),
        acceptor_(io_),
        timer_(io_),
        events_(io_, options_, engine_),
        transfers_(io_, options_, engine_) {}
  ~Impl() {
    boost::system::error_code ignored;
    acceptor_.close(ignored);
  }

  Status Open() {
    boost::system::error_code error;
    const auto ip = asio::ip::make_address(options_.host, error);
    if (error) return InvalidArgument("host must be an IP address, found '{}'", options_.host);
    const tcp::endpoint endpoint(ip, static_cast<unsigned short>(options_.port));
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error) return IoError("cannot listen at {}:{}: {}", options_.host, options_.port, error.message());
    transfers_.SetPort(acceptor_.local_endpoint().port());
    Accept();
    return events_.Open();
  }

  void Accept();

  // Performs what is due, passes the results on, and sleeps until the next event.
  void Turn();
  void TurnSoon() {
    if (std::exchange(turning_, true)) return;
    asio::post(io_, [this] {
      turning_ = false;
      Turn();
    });
  }

  std::string StateText() {
    const MockStats s = engine_.stats();
    return Json{{"steps", s.steps},
                {"prefill_tokens", s.prefill_tokens},
                {"decode_tokens", s.decode_tokens},
                {"cached_tokens", s.cached_tokens},
                {"prompt_tokens", s.prompt_tokens},
                {"running", s.running},
                {"waiting", s.waiting},
                {"free_blocks", s.free_blocks},
                {"pinned", transfers_.pinned()},
                {"served", served_},
                {"cancelled", cancelled_},
                {"live", live_.size()},
                {"stale_fetches", transfers_.stale_fetches()},
                {"rooms", transfers_.rooms()},
                {"kv_events", events_.endpoint()},
                {"kv_replay", events_.replay_endpoint()}}
        .dump();
  }

  std::string MetricsText() const {
    const MockStats s = engine_.stats();
    const double used = 1 - static_cast<double>(s.free_blocks) / std::max(1u, options_.engine.num_blocks);
    return fmt::format(
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{model_name=\"{0}\"}} {1}\n"
        "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{model_name=\"{0}\"}} {2}\n"
        "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{model_name=\"{0}\"}} {3}\n"
        "# TYPE vllm:prefix_cache_queries counter\nvllm:prefix_cache_queries_total{{model_name=\"{0}\"}} "
        "{4}\n"
        "# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total{{model_name=\"{0}\"}} {5}\n"
        "# TYPE vllm:cache_config_info "
        "gauge\nvllm:cache_config_info{{block_size=\"{6}\",num_gpu_blocks=\"{7}\"}} 1\n",
        options_.model, s.running, s.waiting, used, s.prompt_tokens, s.cached_tokens,
        options_.engine.block_size, options_.engine.num_blocks);
  }

  const MockServerOptions options_;
  asio::io_context io_{1};
  MockEngine engine_;
  tcp::acceptor acceptor_;
  asio::steady_timer timer_;
  EventSockets events_;
  MockTransfers transfers_;
  uint64_t next_id_ = 1, served_ = 0, cancelled_ = 0;
  bool turning_ = false, unhealthy_ = false;
  std::unordered_map<uint64_t, std::shared_ptr<Session>> live_;
  std::deque<Json> recent_;
};

// One connection of a client.
class MockServer::Impl::Session : public TransferWaiter, public std::enable_shared_from_this<Session> {
 public:
  Session(Impl& server, tcp::socket socket)
      : server_(server), stream_(std::move(socket)), delay_(server.io_) {
    boost::system::error_code ignored;
    stream_.socket().set_option(tcp::no_delay(true), ignored);
  }

  void Read() {
    parser_.emplace();
    parser_->body_limit(kMaxBody);
    http::async_read(stream_, buffer_, *parser_, [self = shared_from_this()](auto error, size_t) {
      if (error) return self->Close();
      self->Handle();
    });
  }

  void OnOutput(const MockOutput& output) {
    if (output.kind == MockOutput::Kind::kTransferred) return BlocksFetched();
    cached_ = output.cached_tokens;
    if (output.kind == MockOutput::Kind::kFailed) {
      if (IsPrefill()) server_.transfers_.Drop(prompt_->transfer, id_);
      id_ = 0;
      return Fail("the mock engine failed the request");
    }
    const bool finished = output.kind == MockOutput::Kind::kFinished;
    if (finished && IsPrefill()) server_.transfers_.Computed(prompt_->transfer, id_);
    const uint32_t before = tokens_;
    tokens_ = std::max(tokens_, output.tokens);
    if (drop_after_ > 0 && tokens_ >= drop_after_) {
      server_.live_.erase(id_);
      if (!finished) server_.engine_.Cancel(id_, SteadyNow());
      id_ = 0;
      return Close();
    }
    if (prompt_->body.stream) {
      for (uint32_t i = before; i < tokens_; ++i) Chunk(i, finished && i + 1 == tokens_);
      if (finished) EndStream();
    } else if (finished) {
      SendAnswer();
    }
    if (finished) {
      id_ = 0;
      ++server_.served_;
    }
  }

  void OnTransfer(std::string_view fault) override {
    if (closed_ || !std::exchange(waits_, false)) return;
    if (!prompt_) return Send(200, "{}");  // another engine has asked
    if (fault.empty()) return Submit();
    Fail(fault);
  }

 private:
  bool IsPrefill() const { return prompt_->transfer.side == MockTransfer::Side::kPrefill; }

  void Handle() {
    const auto& request = parser_->get();
    const std::string_view target = View(request.target());
    const std::string_view path = target.substr(0, target.find('?'));
    Watch();
    if (path == "/health") return Send(server_.unhealthy_ ? 503 : 200, "");
    if (path == "/metrics") return Send(200, server_.MetricsText(), "text/plain");
    if (path == "/v1/models") {
      return Send(
          200,
          Json{{"object", "list"}, {"data", {{{"id", server_.options_.model}, {"object", "model"}}}}}.dump());
    }
    if (path == "/query")
      return Send(200, Json{{"0", {{"engine_id", server_.transfers_.engine_id()}}}}.dump());
    if (path == "/mock/state") return Send(200, server_.StateText());
    if (path == "/mock/requests") return Send(200, Json(server_.recent_).dump());
    if (path == "/mock/faults") return SetFaults();
    if (path == "/mock/reset") return Reset();
    if (const std::optional<int> status = server_.transfers_.Serve(path, shared_from_this())) {
      waits_ = *status == 0;
      if (!waits_) Send(*status, "{}");
      return server_.TurnSoon();
    }
    const Endpoint endpoint = EndpointOf(path);
    if (endpoint == Endpoint::kOther || request.method() != http::verb::post) {
      return Send(404, ErrorBody(404, "invalid_request_error", "no such endpoint"));
    }
    Generate(endpoint);
  }

  int HeaderNumber(const char* name) {
    const auto& request = parser_->get();
    const auto found = request.find(name);
    return found == request.end() ? 0 : std::atoi(std::string(View(found->value())).c_str());
  }

  void Generate(Endpoint endpoint) {
    const auto& request = parser_->get();
    Json headers = Json::object();
    for (const auto& field : request)
      headers[std::string(View(field.name_string()))] = std::string(View(field.value()));
    const std::string& body = request.body();
    server_.recent_.push_back({{"path", std::string(View(request.target()))},
                               {"headers", headers},
                               {"body", body.size() > 20'000 ? body.substr(0, 20'000) : body}});
    if (server_.recent_.size() > kKeptRequests) server_.recent_.pop_front();
    drop_after_ = static_cast<uint32_t>(HeaderNumber("x-mock-drop-after"));
    if (const int delay = HeaderNumber("x-mock-delay-ms"); delay > 0) {
      delay_.expires_after(std::chrono::milliseconds(delay));
      delay_.async_wait([self = shared_from_this(), endpoint](auto error) {
        if (!error && !self->closed_) self->Begin(endpoint);
      });
      return;
    }
    Begin(endpoint);
  }

  void Begin(Endpoint endpoint) {
    if (const int status = HeaderNumber("x-mock-status"); status > 0) {
      return Send(status, ErrorBody(status, "server_error", "fault injected by x-mock-status"));
    }
    StatusOr<MockPrompt> prompt =
        ReadMockPrompt(endpoint, parser_->get().body(), server_.options_.transfer,
                       server_.options_.engine.block_size, server_.options_.engine.seed);
    if (!prompt.ok()) return Send(400, ErrorBody(400, "invalid_request_error", Message(prompt.status())));
    prompt_ = *std::move(prompt);
    MockTransfer& transfer = prompt_->transfer;
    const Role role = server_.options_.engine.role;
    if (server_.options_.transfer == Transfer::kSglang) {
      transfer.side = role == Role::kDecode ? MockTransfer::Side::kDecode : MockTransfer::Side::kPrefill;
    }
    if (prompt_->body.stream && transfer.side != MockTransfer::Side::kPrefill) StreamHead();
    if (transfer.side != MockTransfer::Side::kDecode) return Submit();
    const auto found = parser_->get().find("X-Request-Id");
    const std::string id = found == parser_->get().end() ? "" : std::string(View(found->value()));
    waits_ = true;
    end_wait_ = server_.transfers_.Await(transfer, id, shared_from_this());
  }

  void Submit() {
    const MockTransfer& transfer = prompt_->transfer;
    MockRequest request;
    request.id = id_ = server_.next_id_++;
    request.prompt_tokens = static_cast<uint32_t>(prompt_->ids.size());
    request.output_tokens = std::max(1u, prompt_->output_tokens);
    request.keys = prompt_->keys;
    request.tokens = prompt_->ids;
    request.output_seed = seed_ = id_ * 0x9e3779b97f4a7c15u + server_.options_.engine.seed;
    if (transfer.side == MockTransfer::Side::kPrefill) {
      request.prefill_only = true;
      request.output_tokens = 1;
    } else if (transfer.side == MockTransfer::Side::kDecode) {
      request.remote_prefill = true;
      request.remote_ready = SteadyNow();
    }
    const bool prefill_only = request.prefill_only;
    const Status status = server_.engine_.Submit(std::move(request), SteadyNow());
    if (!status.ok()) {
      id_ = 0;
      if (head_sent_) return Close();
      return Send(status.code() == StatusCode::kResourceExhausted ? 503 : 400,
                  ErrorBody(400, "invalid_request_error", Message(status)));
    }
    if (prefill_only) server_.transfers_.Began(transfer, id_);
    server_.live_[id_] = shared_from_this();
    server_.TurnSoon();
  }

  // D has read the blocks, or does not need them any more.
  void BlocksFetched() {
    if (prompt_->transfer.side != MockTransfer::Side::kDecode || std::exchange(notified_, true)) return;
    server_.transfers_.Fetched(prompt_->transfer);
  }

  void SetFaults() {
    const Json faults = Json::parse(parser_->get().body(), nullptr, false);
    if (!faults.is_object()) return Send(400, "{}");
    MockFaults set = server_.options_.engine.faults;
    set.fail_request = faults.value("fail_request", set.fail_request);
    set.drop_message = faults.value("drop_message", set.drop_message);
    set.duplicate_message = faults.value("duplicate_message", set.duplicate_message);
    set.swap_messages = faults.value("swap_messages", set.swap_messages);
    set.truncate_message = faults.value("truncate_message", set.truncate_message);
    set.slowdown = faults.value("slowdown", set.slowdown);
    if (!(set.slowdown > 0)) return Send(400, "{}");
    if (const int64_t stall = faults.value("stall_ms", int64_t{0}); stall > 0)
      set.stall_until = SteadyNow() + stall * kMillisecond;
    server_.unhealthy_ = faults.value("unhealthy", false);
    server_.engine_.SetFaults(set, SteadyNow());
    server_.TurnSoon();
    Send(200, "{}");
  }

  void Reset() {
    const Json body = Json::parse(parser_->get().body(), nullptr, false);
    if (body.is_object() && body.value("restart", false)) {
      server_.engine_.Restart(SteadyNow());
      server_.transfers_.Forget();
    } else {
      server_.engine_.ResetCache(SteadyNow());
    }
    server_.TurnSoon();
    Send(200, "{}");
  }

  // --- Answers ---

  std::string AnswerId() const {
    return fmt::format("{}-{}", prompt_->body.endpoint == Endpoint::kChat ? "chatcmpl" : "cmpl", id_);
  }
  std::string TokenText(uint32_t index) const { return fmt::format(" t{}", MockOutputToken(seed_, index)); }

  Json Usage() const {
    return {{"prompt_tokens", prompt_->ids.size()},
            {"completion_tokens", tokens_},
            {"total_tokens", prompt_->ids.size() + tokens_},
            {"prompt_tokens_details", {{"cached_tokens", cached_}}}};
  }

  // Engines send the head of a stream when they have read the request, and compute the prompt then.
  void StreamHead() {
    head_sent_ = true;
    out_ +=
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: "
        "chunked\r\n\r\n";
    Flush();
  }

  void Fail(std::string_view message) {
    if (head_sent_) return Close();
    Send(500, ErrorBody(500, "server_error", message));
  }

  void Chunk(uint32_t index, bool last) {
    if (!head_sent_) StreamHead();
    const bool chat = prompt_->body.endpoint == Endpoint::kChat;
    Json choice = {{"index", 0}, {"finish_reason", last ? Json("length") : Json()}};
    if (chat) {
      choice["delta"] = {{"content", TokenText(index)}};
      if (index == 0) choice["delta"]["role"] = "assistant";
    } else {
      choice["text"] = TokenText(index);
    }
    Json event = {{"id", AnswerId()},
                  {"object", chat ? "chat.completion.chunk" : "text_completion"},
                  {"created", 0},
                  {"model", prompt_->body.model},
                  {"choices", Json::array({choice})}};
    if (index == 0 && prompt_->return_ids) event["prompt_token_ids"] = prompt_->ids;
    Event(event.dump());
  }

  void Event(const std::string& json) {
    out_ += fmt::format("{:x}\r\ndata: {}\n\n\r\n", json.size() + 8, json);
    Flush();
  }

  void EndStream() {
    if (prompt_->body.include_usage) {
      Event(Json{{"id", AnswerId()},
                 {"object", "chunk"},
                 {"created", 0},
                 {"model", prompt_->body.model},
                 {"choices", Json::array()},
                 {"usage", Usage()}}
                .dump());
    }
    Event("[DONE]");
    out_ += "0\r\n\r\n";
    finished_ = true;
    Flush();
  }

  void SendAnswer() {
    const bool chat = prompt_->body.endpoint == Endpoint::kChat;
    std::string text;
    for (uint32_t i = 0; i < tokens_; ++i) text += TokenText(i);
    Json choice = {{"index", 0}, {"finish_reason", "length"}, {"logprobs", nullptr}};
    if (chat) {
      choice["message"] = {{"role", "assistant"}, {"content", text}};
    } else {
      choice["text"] = text;
    }
    Json answer = {{"id", AnswerId()},
                   {"object", chat ? "chat.completion" : "text_completion"},
                   {"created", 0},
                   {"model", prompt_->body.model},
                   {"choices", Json::array({choice})},
                   {"usage", Usage()}};
    if (prompt_->return_ids) answer["prompt_token_ids"] = prompt_->ids;
    if (IsPrefill()) server_.transfers_.Finish(prompt_->transfer, id_, answer);
    Send(200, answer.dump());
  }

  void Send(int status, const std::string& body, const char* type = "application/json") {
    if (closed_) return;
    head_sent_ = finished_ = true;
    out_ +=
        fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n{}", status,
                    View(http::obsolete_reason(static_cast<http::status>(status))), type, body.size(), body);
    Flush();
  }

  void Flush() {
    if (writing_ || closed_) return;
    if (out_.empty()) {
      if (finished_) Next();
      return;
    }
    writing_ = true;
    sending_ = std::exchange(out_, {});
    asio::async_write(stream_, asio::buffer(sending_), [self = shared_from_this()](auto error, size_t) {
      self->writing_ = false;
      if (error) return self->Close();
      self->Flush();
    });
  }

  // The answer was sent: the next request may come.
  void Next() {
    const bool keep = parser_->get().keep_alive();
    finished_ = head_sent_ = false;
    waits_ = notified_ = false;
    tokens_ = cached_ = drop_after_ = 0;
    prompt_.reset();
    end_wait_ = nullptr;
    if (!keep) return Close();
    if (watching_) {  // the pending read finds the next request
      idle_ = true;
      return;
    }
    Read();
  }

  // Notices a client that leaves while its request runs.
  void Watch() {
    if (std::exchange(watching_, true)) return;
    stream_.async_read_some(buffer_.prepare(4096), [self = shared_from_this()](auto error, size_t bytes) {
      self->watching_ = false;
      if (error) return self->Close();
      self->buffer_.commit(bytes);
      if (std::exchange(self->idle_, false)) self->Read();
    });
  }

  void Close() {
    if (std::exchange(closed_, true)) return;
    delay_.cancel();
    if (end_wait_) std::exchange(end_wait_, nullptr)();
    // The connectors of vLLM tell P about a request that is cancelled before its blocks were read.
    const Transfer protocol = server_.options_.transfer;
    if (prompt_ && (protocol == Transfer::kVllmNixl || protocol == Transfer::kVllmMooncake) &&
        (waits_ || id_ != 0)) {
      BlocksFetched();
    }
    if (id_ != 0) {
      ++server_.cancelled_;
      server_.engine_.Cancel(id_, SteadyNow());
      if (IsPrefill()) server_.transfers_.Drop(prompt_->transfer, id_);
      server_.live_.erase(id_);
      id_ = 0;
      server_.TurnSoon();
    }
    boost::system::error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
    stream_.socket().close(ignored);
  }

  Impl& server_;
  beast::tcp_stream stream_;
  asio::steady_timer delay_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::optional<MockPrompt> prompt_;
  std::function<void()> end_wait_;  // of blocks of P
  std::string out_, sending_;
  uint64_t id_ = 0, seed_ = 0;
  uint32_t tokens_ = 0, cached_ = 0, drop_after_ = 0;
  bool head_sent_ = false, finished_ = false, writing_ = false, watching_ = false, idle_ = false,
       closed_ = false, waits_ = false, notified_ = false;
};

void MockServer::Impl::Accept() {
  acceptor_.async_accept([this](auto error, tcp::socket socket) {
    if (error) return;
    std::make_shared<Session>(*this, std::move(socket))->Read();
    Accept();
  });
}

void MockServer::Impl::Turn() {
  const Nanos now = SteadyNow();
  engine_.Advance(now);
  std::vector<MockOutput> outputs;
  engine_.TakeOutputs(outputs);
  std::vector<MockMessage> messages;
  engine_.TakeMessages(messages);
  events_.Publish(messages);
  for (const MockOutput& output : outputs) {
    const auto found = live_.find(output.id);
    if (found == live_.end()) continue;
    const std::shared_ptr<Session> session = found->second;
    const bool ended = output.kind == MockOutput::Kind::kFinished || output.kind == MockOutput::Kind::kFailed;
    if (ended) live_.erase(found);
    session->OnOutput(output);
  }
  const Nanos next = engine_.NextEvent();
  if (next == kNever) return;
  timer_.expires_after(std::chrono::nanoseconds(std::max<Nanos>(next - SteadyNow(), 0)));
  timer_.async_wait([this](auto error) {
    if (!error) Turn();
  });
}

MockServer::MockServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MockServer::~MockServer() = default;

StatusOr<std::unique_ptr<MockServer>> MockServer::Create(const MockServerOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  RETURN_IF_ERROR(impl->Open());
  return std::unique_ptr<MockServer>(new MockServer(std::move(impl)));
}

int MockServer::port() const { return impl_->acceptor_.local_endpoint().port(); }
void MockServer::Run() { impl_->io_.run(); }
void MockServer::Stop() { impl_->io_.stop(); }

}  // namespace moesaic::proxy
