#include "server/http_server.h"

#include <spdlog/spdlog.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "server/catch_exceptions.h"
#include "server/connection.h"
#include "server/stream.h"

namespace moesaic::server {
namespace {

namespace asio = boost::asio;
using Tcp = asio::ip::tcp;
using ErrorCode = boost::system::error_code;

// Maximum number of connections above the limit that are being answered with 503. More are closed at once.
constexpr int64_t kMaxRefusedConnections = 64;
// Maximum number of connections above the limit whose idle predecessors are being closed.
constexpr int64_t kMaxClosingConnections = 64;
// Pause after a failed accept, for example without file descriptors: accepting again at once would spin.
constexpr std::chrono::milliseconds kAcceptPause{50};

class AsioHttpServer final : public HttpServer {
 public:
  explicit AsioHttpServer(const HttpOptions& options)
      : shared_(std::make_shared<HttpShared>(options)),
        acceptor_(asio::make_strand(io_)),
        pause_(acceptor_.get_executor()) {}

  ~AsioHttpServer() override {
    Close();
    work_.reset();
    for (std::thread& thread : threads_) thread.join();
  }

  Status Open() {
    RETURN_IF_ERROR(ReloadTls());
    return Bind();
  }

  Status ReloadTls() override {
    const HttpOptions& options = shared_->options;
    if (options.tls_certificate.empty() && options.tls_key.empty()) return OkStatus();
    if (options.tls_certificate.empty() || options.tls_key.empty()) {
      return InvalidArgument("TLS needs a certificate and its key: give --tls-cert and --tls-key");
    }
    ASSIGN_OR_RETURN(auto loaded, TlsContext::Load(options.tls_certificate, options.tls_key));
    spdlog::info("TLS: {}: {}", options.tls_certificate, loaded->description());
    if (loaded->expired()) spdlog::warn("TLS: {}: the certificate has expired", options.tls_certificate);
    const std::lock_guard lock(mutex_);
    tls_ = std::move(loaded);
    return OkStatus();
  }

  void Start(HttpHooks hooks) override {
    MOESAIC_CHECK(threads_.empty());
    shared_->SetHooks(std::move(hooks));
    Accept();
    for (int i = 0; i < shared_->options.threads; ++i) {
      threads_.emplace_back([this] { Run(); });
    }
  }

  void Switch(HttpHooks hooks) override { shared_->SetHooks(std::move(hooks)); }

  void Close() override {
    asio::post(acceptor_.get_executor(), [this] {
      ErrorCode ignored;
      acceptor_.close(ignored);
      pause_.cancel();
    });
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& weak : open_) {
      if (const auto connection = weak.lock()) connection->Abort();
    }
  }

  int port() const override { return port_; }
  int64_t connections() const override { return shared_->connections; }
  int64_t active_requests() const override { return shared_->active_requests; }

 private:
  Status Bind() {
    ErrorCode error;
    Tcp::resolver resolver(io_);
    const auto& options = shared_->options;
    const auto found = resolver.resolve(options.host, std::to_string(options.port),
                                        Tcp::resolver::passive | Tcp::resolver::numeric_service, error);
    const std::string where = fmt::format("{}:{}", options.host, options.port);
    if (error) return IoError("{}: {}", where, error.message());
    const Tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(Tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) port_ = acceptor_.local_endpoint(error).port();
    if (error) return IoError("{}: {}", where, error.message());
    return OkStatus();
  }

  // A handler that throws has lost its connection. All others continue.
  void Run() {
    const auto serve = [this] {
      io_.run();
      return OkStatus();
    };
    while (!CatchExceptions("HTTP", serve).ok()) {
    }
  }

  void Accept() {
    acceptor_.async_accept(asio::make_strand(io_), [this](ErrorCode error, Tcp::socket socket) {
      if (error == asio::error::operation_aborted || !acceptor_.is_open()) return;
      if (error) {
        LogAcceptError(error);
        pause_.expires_after(kAcceptPause);
        pause_.async_wait([this](ErrorCode stopped) {
          if (!stopped && acceptor_.is_open()) Accept();
        });
        return;
      }
      Take(std::move(socket));
      Accept();
    });
  }

  void Take(Tcp::socket socket) {
    const int64_t above = shared_->connections - shared_->options.max_connections;
    const bool full = above >= 0 && (above >= kMaxClosingConnections || !CloseIdle());
    if (full && shared_->refused_connections >= kMaxRefusedConnections) {
      LogFull();
      return;
    }
    ErrorCode ignored;
    socket.set_option(Tcp::no_delay(true), ignored);
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    spdlog::debug("{} a connection; {} are open", full ? "refusing" : "accepted",
                  shared_->connections.load());
    auto stream = tls_ ? TlsStream(std::move(socket), tls_) : PlainStream(std::move(socket));
    const auto connection = std::make_shared<Connection>(
        std::move(stream), shared_, full ? Connection::Admission::kRefuse : Connection::Admission::kServe);
    std::erase_if(open_, [](const auto& weak) { return weak.expired(); });
    open_.push_back(connection);
    connection->Run();
  }

  // Makes room for a connection: closes the oldest connection that waits for a request. Returns false if none
  // does.
  bool CloseIdle() {
    const std::lock_guard lock(mutex_);
    for (const auto& weak : open_) {
      const auto connection = weak.lock();
      if (connection != nullptr && connection->CloseIdle()) return true;
    }
    return false;
  }

  // Returns true at most once a second, so that a flood of connections does not flood the log.
  bool MayLog() {
    const auto now = std::chrono::steady_clock::now();
    if (now - logged_ < std::chrono::seconds(1)) return false;
    logged_ = now;
    return true;
  }

  void LogAcceptError(const ErrorCode& error) {
    if (MayLog()) spdlog::warn("cannot accept connections: {}; {} are open", error.message(), connections());
  }

  void LogFull() {
    ++closed_;
    if (!MayLog()) return;
    spdlog::warn("closed {} connections without an answer: {} are open and {} are being refused",
                 std::exchange(closed_, 0), shared_->connections.load(), shared_->refused_connections.load());
  }

  const std::shared_ptr<HttpShared> shared_;
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  Tcp::acceptor acceptor_;
  asio::steady_timer pause_;
  int port_ = 0;
  int64_t closed_ = 0;                            // connections closed since the last line about them
  std::chrono::steady_clock::time_point logged_;  // time of the last line
  std::mutex mutex_;
  std::vector<std::weak_ptr<Connection>> open_;
  std::shared_ptr<const TlsContext> tls_;  // guarded by the mutex; null for plain HTTP
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

StatusOr<std::unique_ptr<HttpServer>> HttpServer::Listen(const HttpOptions& options) {
  auto server = std::make_unique<AsioHttpServer>(options);
  RETURN_IF_ERROR(server->Open());
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace moesaic::server
