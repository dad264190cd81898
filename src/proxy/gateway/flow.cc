#include "proxy/gateway/flow.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "proxy/gateway/gateway.h"
#include "proxy/protocol/url_host.h"

namespace moesaic::proxy {
namespace {

constexpr Nanos kQueryTimeout = 5 * kSecond;  // of a bootstrap server
constexpr size_t kSmallBody = 64 << 10;       // read in the event loop, in some 10 microseconds
// A small body of few messages whose text is known is also rendered in the event loop, in 0.05 to 0.3 ms: the
// way through a thread and back costs 0.1 ms of processor time. Templates may loop over pairs of JSON values,
// so that the limits are low, and members that templates loop over besides the messages are left to threads.
constexpr size_t kFewObjects = 128;
constexpr size_t kFewValues = 2048;
constexpr size_t kFewTokens = 4096;
constexpr size_t kFewUnknownBytes = 512;

// Characters that need no escape in a request line and have no meaning for an engine's router.
bool IsPlainPath(std::string_view path) {
  return path.starts_with('/') && std::all_of(path.begin(), path.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                  std::string_view("/-._~:@!$&'()*+,;=").find(c) != std::string_view::npos;
         });
}

// A path that ends with '/' includes all paths below it.
bool IsListed(std::string_view path, std::span<const std::string> list) {
  return std::any_of(list.begin(), list.end(), [path](std::string_view listed) {
    return listed.ends_with('/') ? path.starts_with(listed) : path == listed;
  });
}

Status NoEngine() { return ResourceExhausted("the engine was removed"); }

std::string_view HeaderOf(const ClientRequest& request, std::string_view name) {
  for (const Header& header : request.headers) {
    if (header.name == name) return header.value;
  }
  return {};
}

// Whether the event loop may render the prompt of `body`.
bool IsQuickToRender(const RequestBody& body) {
  for (const char* name : {"tools", "documents", "chat_template_kwargs"}) {
    if (body.members.Given(name)) return false;
  }
  return body.members.num_objects() <= kFewObjects && body.members.num_values() <= kFewValues;
}

// Compares in a time that depends on the lengths only.
bool SameSecret(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |=
        static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i % std::max<size_t>(b.size(), 1)]);
  }
  return difference == 0;
}

// Returns a room of 63 bits for a request to rank `rank` of P. It is congruent to the rank modulo the number
// of ranks: SGLang's P fails a request whose room is not, and D derives the rank from the room.
int64_t RoomOf(uint32_t rank, uint32_t ranks, uint64_t random) {
  const uint64_t rounds = (static_cast<uint64_t>(INT64_MAX) - rank) / ranks + 1;
  return static_cast<int64_t>(random % rounds * ranks + rank);
}

// Hash of a session's or key's name with the secret of the zone, so that clients cannot choose names that
// collide. Not 0.
uint64_t HashName(const KeyMaker& keys, std::string_view name) {
  return keys.Root({.salt = name, .adapter = {}}, /*block_size=*/0) | 1;
}

}  // namespace

bool IsHopHeader(std::string_view name) {
  constexpr std::string_view kNames[] = {"connection",
                                         "keep-alive",
                                         "proxy-authenticate",
                                         "proxy-connection",
                                         "te",
                                         "trailer",
                                         "transfer-encoding",
                                         "upgrade",
                                         "host",
                                         "content-length",
                                         "expect",
                                         "accept-encoding",
                                         "x-request-id",
                                         "x-data-parallel-rank"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

Flow::Flow(Gateway& gateway, Client& client)
    : gateway_(gateway), client_(&client), timer_(gateway.timers()), estimate_(gateway.timers()) {}

Flow::~Flow() {
  if (id_) {
    gateway_.Unregister(id_);
    gateway_.state().Finish(id_, Outcome::kAborted, gateway_.now());
  }
  if (passing_) gateway_.ReturnPass();
}

bool Flow::KeyAccepted() {
  const auto& keys = gateway_.settings().keys;
  if (keys.empty()) return true;
  std::string_view given = HeaderOf(request_, "authorization");
  if (given.starts_with("Bearer ")) {
    given.remove_prefix(7);
  } else {
    given = HeaderOf(request_, "x-api-key");
  }
  bool accepted = false;
  for (const ApiKey& key : keys) {
    if (!SameSecret(given, key.key)) continue;
    accepted = true;
    key_ = &key;
    key_name_ = key.name;
    tenant_ = HashName(gateway_.keys(), key.key);
  }
  return accepted;
}

void Flow::Start(ClientRequest request) {
  request_ = std::move(request);
  if (!KeyAccepted()) return Reply(401, "invalid_request_error", "the API key is missing or not known");
  if (request_.body->size() > gateway_.settings().max_body_bytes) {
    return Reply(413, "invalid_request_error",
                 fmt::format("the body has {} bytes, more than {}", request_.body->size(),
                             gateway_.settings().max_body_bytes));
  }
  hold_ = gateway_.TakeBody(request_.body->size());
  if (hold_ == nullptr) {
    return Reply(503, "overloaded_error", "the proxy holds too many bytes of requests", kSecond);
  }
  // The engine gets the path as it was read here: it may decode other spellings to paths that are limited.
  const size_t query = std::min(request_.target.find('?'), request_.target.size());
  const bool plain = IsPlainPath(request_.path);
  request_.target.replace(0, query, request_.path);
  const Endpoint endpoint = plain ? EndpointOf(request_.path) : Endpoint::kOther;
  if (!plain || (endpoint == Endpoint::kOther && !IsListed(request_.path, gateway_.settings().passed))) {
    return Reply(404, "invalid_request_error", "there is no such path");
  }
  if (endpoint == Endpoint::kOther || request_.method != "POST") return PassUnscheduled(endpoint);

  endpoint_ = endpoint;
  const bool small = request_.body->size() <= kSmallBody;
  if (small) {
    ReadBody();
    if (!read_status_.ok()) return RefuseBody();
  }
  const StatusOr<RequestId> id = gateway_.state().Begin(gateway_.worker(), gateway_.now());
  if (!id.ok()) {
    return Reply(503, "overloaded_error", "the proxy has no room for another request", kSecond);
  }
  id_ = *id;
  gateway_.Register(*this);
  peers_.transfer = gateway_.settings().transfer;
  request_id_ = HeaderOf(request_, "x-request-id");
  if (request_id_.empty() || gateway_.settings().transfer == Transfer::kAscend) {
    request_id_ = fmt::format("moesaic-{}-{}-{}-{:016x}-{:016x}", gateway_.worker(), id_.slot, id_.generation,
                              gateway_.wake(), gateway_.random()());
  }
  phase_ = Phase::kPreparing;
  const bool renders = tokens_.empty() && gateway_.renderer() != nullptr;
  if (small && (!renders || IsQuickToRender(*body_)) && tokens_.size() <= kFewTokens &&
      PrepareWithin(kFewUnknownBytes)) {
    return OnPrepared();
  }
  timer_.At(gateway_.now() + gateway_.settings().queue_timeout, [this] {
    Reply(503, "overloaded_error", "no thread was free to read the request in time", kSecond);
  });
  preparing_ = true;
  if (client_->StartPrepare(*this)) return;
  preparing_ = false;
  Reply(503, "overloaded_error", "no thread is free to read the request", kSecond);
}

void Flow::ReadBody() {
  StatusOr<RequestBody> body = ReadRequestBody(endpoint_, *request_.body);
  read_status_ = body.status();
  if (!body.ok()) return;
  body_ = *std::move(body);
  if (gateway_.settings().client_transfer) body_->has_kv_transfer = false;
  tokens_ = PromptIds(*body_).value_or(std::vector<int32_t>());
}

void Flow::RefuseBody() {
  const StatusCode code = read_status_.code();
  const int status = code == StatusCode::kUnimplemented ? 501 : code == StatusCode::kInternal ? 500 : 400;
  Reply(status, status == 500 ? "server_error" : "invalid_request_error", Message(read_status_));
}

void Flow::Prepare() { PrepareWithin(SIZE_MAX); }

bool Flow::PrepareWithin(size_t max_unknown) {
  if (!body_) ReadBody();
  if (!read_status_.ok()) return true;
  const PoolSettings& settings = gateway_.settings();
  if (tokens_.empty()) {
    render_status_ = Render(max_unknown);
    if (!render_status_.ok()) return render_status_.code() != StatusCode::kResourceExhausted;
  }
  const bool adapter =
      std::find(settings.adapters.begin(), settings.adapters.end(), body_->model) != settings.adapters.end();
  gateway_.keys().Append(tokens_,
                         {.salt = body_->cache_salt, .adapter = adapter ? body_->model : std::string_view()},
                         settings.block_size, keys_);
  if (settings.forward_tokens && tokens_exact_ &&
      (CanForwardTokens(*body_, settings.dialect, /*decode=*/false) ||
       CanForwardTokens(*body_, settings.dialect, /*decode=*/settings.transfer != Transfer::kAggregated))) {
    id_list_ = IdList(tokens_);
  }
  return true;
}

Status Flow::Render(size_t max_unknown) {
  PromptRenderer* renderer = gateway_.renderer();
  if (renderer == nullptr) return Unimplemented("no tokenizer");
  if (prompt_ == nullptr) {
    ASSIGN_OR_RETURN(prompt_, renderer->Render(*body_));
  }
  if (const Status status = renderer->Tokenize(prompt_.get(), max_unknown); !status.ok()) {
    if (status.code() != StatusCode::kResourceExhausted) prompt_.reset();  // no call continues it
    return status;
  }
  tokens_ = std::move(prompt_->progress.ids);
  tokens_exact_ = prompt_->exact;
  prompt_.reset();
  return OkStatus();
}

void Flow::OnPrepared() {
  preparing_ = false;
  if (phase_ != Phase::kPreparing) {  // the client left meanwhile
    gateway_.Reap(*this);
    return;
  }
  timer_.Cancel();
  if (!read_status_.ok()) return RefuseBody();
  SubmitPrompt();
}

void Flow::SubmitPrompt() {
  State& state = gateway_.state();
  const PoolSettings& settings = gateway_.settings();
  if (gateway_.renderer() != nullptr) {
    auto& counter = render_status_.ok() ? gateway_.board().rendered : gateway_.board().unrendered;
    counter.fetch_add(1, std::memory_order_relaxed);
  }
  PromptFacts facts;
  const std::string_view input =
      body_->members.Value(body_->endpoint == Endpoint::kChat ? "messages" : "prompt");
  facts.prompt_tokens =
      tokens_.empty() ? static_cast<uint32_t>(input.size() / 4 + 1) : static_cast<uint32_t>(tokens_.size());
  const int64_t choices = std::clamp<int64_t>(body_->choices, 1, 1024);
  facts.max_tokens =
      static_cast<uint32_t>(std::min<int64_t>(body_->max_tokens, UINT32_MAX / choices) * choices);
  // vLLM: a smaller number is served earlier.
  const int64_t range = settings.client_priority;
  facts.priority = static_cast<int32_t>((key_ == nullptr ? 0 : key_->priority) -
                                        std::clamp<int64_t>(body_->priority, -range, range));
  facts.tenant = tenant_;
  const std::string_view session = HeaderOf(request_, "x-session-id");
  facts.session = session.empty() ? 0 : HashName(gateway_.keys(), session);
  facts.mode = ModeOf(settings.transfer);
  if (!tokens_.empty()) facts.block_size = settings.block_size;
  log_.prompt_tokens = facts.prompt_tokens;
  state.SetPrompt(id_, facts, keys_);
  keys_ = {};
  state.Enter(id_, Stage::kTokenized, gateway_.now());
  state.Enter(id_, Stage::kPrefixMatched, gateway_.now());
  const Admission admission = gateway_.scheduler().Submit(
      id_, gateway_.now(), key_ != nullptr && key_->limit ? &*key_->limit : nullptr);
  std::string_view refused;
  switch (admission.verdict) {
    case Admission::Verdict::kQueued:
      return Enqueue();
    case Admission::Verdict::kStale:
      return Reply(500, "server_error", "the request's slot was lost");
    case Admission::Verdict::kQueueFull:
      refused = "the queue of the proxy is full";
      break;
    case Admission::Verdict::kTooSlow:
      refused = "the predicted waiting time exceeds the limit";
      break;
    case Admission::Verdict::kRateLimited:
      refused = "the key's token rate is used up";
      break;
  }
  Reply(429, "rate_limit_error", std::string(refused), admission.retry_after);
}

void Flow::Enqueue() {
  phase_ = Phase::kQueued;
  queued_ = gateway_.now();
  // A retry continues the wait of the attempt before it.
  const Nanos left = gateway_.settings().queue_timeout - waited_[prefill_done_ ? 1 : 0];
  timer_.At(queued_ + std::max<Nanos>(left, 0),
            [this] { Reply(503, "overloaded_error", "no engine was free in time", kSecond); });
  gateway_.ScheduleSoon();
}

void Flow::OnScheduled(const RequestRecord& record) {
  if (phase_ != Phase::kQueued) return;
  timer_.Cancel();
  waited_[prefill_done_ ? 1 : 0] += gateway_.now() - queued_;
  prefill_instance_ = record.prefill_instance;
  decode_instance_ = record.decode_instance;
  log_.prefill_skipped = record.prefill_skipped;
  log_.matched_tokens = record.cached_tokens;
  if (record.stage == Stage::kPrefillWaiting || record.stage == Stage::kDecodeWaiting) {
    return Reply(429, "rate_limit_error", "no engine can meet the latency target", kSecond);
  }
  phase_ = Phase::kRunning;
  const Mode mode = record.facts.mode;
  aggregated_ = mode == Mode::kAggregated || record.prefill_skipped;
  if (record.stage == Stage::kPrefillScheduled) {
    gateway_.state().Enter(id_, Stage::kPrefillRunning, gateway_.now());
    if (mode == Mode::kSequential) return StartPrefill();
    if (mode == Mode::kParallel) return StartPair();
    if (!body_->stream) {
      // The end of the prefill is not visible: assume the predicted time.
      const EngineSettings* engine = gateway_.Engine(prefill_instance_);
      const uint32_t model_class = engine == nullptr ? 0 : engine->instance.model_class;
      const uint32_t cached = std::min(record.cached_tokens, record.facts.prompt_tokens);
      const double time =
          gateway_.scheduler().Model(model_class).PrefillNanos(record.facts.prompt_tokens - cached, cached);
      estimate_.At(gateway_.now() + static_cast<Nanos>(time), [this] { MarkPrefillDone(); });
    }
  } else {
    gateway_.state().Enter(id_, Stage::kDecodeRunning, gateway_.now());
  }
  StartAnswer();
}

// The headers of the request without those of the connection and without keys of the proxy.
std::vector<Header> Flow::HeadersForEngines() const {
  std::vector<Header> headers;
  for (const Header& header : request_.headers) {
    if (IsHopHeader(header.name)) continue;
    if ((header.name == "authorization" || header.name == "x-api-key") && !gateway_.settings().keys.empty())
      continue;
    headers.push_back(header);
  }
  if (!request_id_.empty()) headers.push_back({"X-Request-Id", request_id_});
  return headers;
}

std::unique_ptr<Exchange> Flow::Open(int instance, std::string_view method, std::string_view target,
                                     SharedBody body, bool once) {
  const EngineSettings* engine = gateway_.Engine(instance);
  if (engine == nullptr) return nullptr;  // removed by a reload since it was chosen
  std::vector<Header> headers = HeadersForEngines();
  if (engine->instance.ranked())
    headers.push_back({"X-data-parallel-rank", std::to_string(engine->instance.dp_rank)});
  auto exchange = std::make_unique<Exchange>(gateway_.transport(), gateway_.timers(), *this);
  std::string head = gateway_.HttpHead(*engine, method, target, headers, body->size());
  exchange->Start(engine->address, std::move(head), gateway_.timeouts(), std::move(body), once);
  return exchange;
}

SharedBody Flow::BodyFor(bool prefill) const {
  const Dialect dialect = gateway_.settings().dialect;
  ForwardedIds ids{.dialect = dialect, .list = {}};
  if (!id_list_.empty() && CanForwardTokens(*body_, dialect, /*decode=*/!aggregated_ && !prefill))
    ids.list = id_list_;
  if (aggregated_ && ids.list.empty() && !body_->has_kv_transfer) return request_.body;
  return std::make_shared<const std::string>(aggregated_ ? AggregatedBody(*body_, ids)
                                             : prefill   ? PrefillBody(*body_, peers_, params_, ids)
                                                         : DecodeBody(*body_, peers_, params_, ids));
}

void Flow::StartPrefill() {
  prefill_body_.clear();
  params_.clear();
  prefill_ = Open(prefill_instance_, "POST", request_.target, BodyFor(/*prefill=*/true));
  if (prefill_ == nullptr) PrefillFailed(NoEngine());
}

void Flow::StartAnswer() {
  const int instance = AnsweringInstance();
  const bool fetches = gateway_.settings().transfer == Transfer::kVllmNixl && !params_.empty();
  answer_ = Open(instance, "POST", request_.target, BodyFor(/*prefill=*/false), /*once=*/fetches);
  if (answer_ == nullptr) AnswerFailed(NoEngine());
}

// Both engines were chosen at once.
void Flow::StartPair() {
  const PoolSettings& settings = gateway_.settings();
  const EngineSettings* engine = gateway_.Engine(prefill_instance_);
  if (engine == nullptr) return PrefillFailed(NoEngine());
  peers_.prefill_host = engine->host_name;
  peers_.bootstrap_port = engine->instance.bootstrap_port;
  const InstanceConfig& instance = engine->instance;
  peers_.room = RoomOf(instance.dp_rank, instance.dp_ranks, gateway_.random()());
  peers_.prefill_rank = instance.ranked() ? std::optional(instance.dp_rank) : std::nullopt;
  peers_.transfer_id = fmt::format("xfer-{:016x}{:016x}", gateway_.random()(), gateway_.random()());
  peers_.bootstrap_address =
      fmt::format("http://{}:{}", UrlHost(engine->host_name), engine->instance.bootstrap_port);
  peers_.metaserver = settings.metaserver;
  prefill_body_.clear();
  params_.clear();
  if (settings.transfer == Transfer::kVllmMooncake) {
    peers_.engine_id = gateway_.BootstrapId(prefill_instance_);
    if (peers_.engine_id.empty()) return AskBootstrap();
  }
  // With kAscend P is sent when D has posted its blocks.
  if (settings.transfer != Transfer::kAscend) {
    prefill_ = Open(prefill_instance_, "POST", request_.target, BodyFor(/*prefill=*/true));
  }
  StartAnswer();
}

void Flow::AskBootstrap() {
  const EngineSettings* engine = gateway_.Engine(prefill_instance_);
  EngineSettings bootstrap = *engine;
  bootstrap.path.clear();
  bootstrap.address.host = fmt::format("{}:{}", UrlHost(engine->host_name), engine->instance.bootstrap_port);
  std::string& address = bootstrap.address.sockaddr;  // IPv4 and IPv6 have the port at the same place
  address[2] = static_cast<char>(engine->instance.bootstrap_port >> 8);
  address[3] = static_cast<char>(engine->instance.bootstrap_port & 255);
  query_body_.clear();
  query_ = std::make_unique<Exchange>(gateway_.transport(), gateway_.timers(), *this);
  query_->Start(
      bootstrap.address, gateway_.HttpHead(bootstrap, "GET", "/query", {}, 0),
      {.connect = gateway_.settings().connect_timeout, .first_byte = kQueryTimeout, .idle = kQueryTimeout});
}

bool Flow::OnBlocks(const std::string& id, const std::string& text) {
  if (!SameSecret(id, request_id_)) return false;
  if (phase_ != Phase::kRunning || gateway_.settings().transfer != Transfer::kAscend || prefill_ != nullptr)
    return true;
  params_ = text;
  prefill_ = Open(prefill_instance_, "POST", request_.target, BodyFor(/*prefill=*/true));
  if (prefill_ == nullptr) PrefillFailed(NoEngine());
  return true;
}

void Flow::PassUnscheduled(Endpoint endpoint) {
  if (endpoint != Endpoint::kOther && !request_.body->empty()) {
    return Reply(405, "invalid_request_error", "bodies for this path are sent with POST");
  }
  if (!(passing_ = gateway_.TakePass())) {
    return Reply(503, "overloaded_error", "too many requests pass without scheduling", kSecond);
  }
  const int instance = gateway_.AnyEngine();
  if (instance < 0) return Reply(503, "overloaded_error", "no engine is available", kSecond);
  phase_ = Phase::kPassing;
  decode_instance_ = instance;
  request_id_ = HeaderOf(request_, "x-request-id");
  answer_ = Open(instance, request_.method, request_.target, request_.body);
  if (answer_ == nullptr) AnswerFailed(NoEngine());
}

}  // namespace moesaic::proxy
