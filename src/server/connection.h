// Reads requests from one client's connection and writes their answers. Only the transport includes it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "server/deadline.h"
#include "server/http.h"
#include "server/http_server.h"
#include "server/request_body.h"
#include "server/request_head.h"
#include "server/stream.h"

namespace moesaic::server {

/// Limits the handlers of large requests that run at a time. The other threads serve connections and deliver
/// tokens meanwhile. Any thread.
class LargeRequests {
 public:
  using Task = std::function<void()>;

  explicit LargeRequests(int most) : most_(most) {}

  /// Calls `start` now, or when other handlers have ended. It starts a handler, which calls End().
  void Begin(Task start);
  void End();

 private:
  const int most_;
  std::mutex mutex_;
  int running_ = 0;
  std::deque<Task> waiting_;
};

/// State that all connections of a server share.
struct HttpShared {
  explicit HttpShared(const HttpOptions& given) : options(given), large(std::max(1, given.threads / 2)) {}

  std::shared_ptr<const HttpHooks> Hooks() const {
    const std::lock_guard lock(mutex);
    return hooks;
  }
  void SetHooks(HttpHooks next) {
    auto made = std::make_shared<const HttpHooks>(std::move(next));
    const std::lock_guard lock(mutex);
    hooks = std::move(made);
  }

  const HttpOptions options;
  LargeRequests large;
  std::atomic<int64_t> connections{0};  // without those that are refused
  std::atomic<int64_t> refused_connections{0};
  std::atomic<int64_t> active_requests{0};
  std::atomic<int64_t> body_bytes{0};
  mutable std::mutex mutex;
  std::shared_ptr<const HttpHooks> hooks;  // guarded by `mutex`
};

class Exchange;

/// Its pending operations and its exchange keep it alive. All methods but the constructor, Run() and Abort()
/// run on its strand.
class Connection final : public StreamEvents, public std::enable_shared_from_this<Connection> {
 public:
  enum class Admission { kServe, kRefuse };

  /// The stream's executor is a strand. A refused connection gets one 503 and is closed.
  Connection(std::unique_ptr<Stream> stream, std::shared_ptr<HttpShared> shared, Admission admission);
  ~Connection() override;

  void Run();    // any thread
  void Abort();  // closes at once; any thread
  /// Closes the connection soon if it waits for a request. Returns false if it does not. Any thread.
  bool CloseIdle();
  void OnExpired();  // called by a deadline

 private:
  friend class Exchange;

  enum class Phase {
    kOpening,    // TLS handshake
    kIdle,       // between requests
    kHead,       // the head of a request is incomplete
    kBody,       // the body of a request is incomplete
    kAnswering,  // the hooks answer the request
    kRefusing,   // the transport writes an error of its own
    kFinishing,  // the answer is written, and bytes of the client are discarded
    kClosed,
  };

  // Methods that read, in the order of their calls.
  void OnOpen(ErrorCode error) override;
  void Read();
  void OnRead(ErrorCode error, size_t bytes) override;
  void Advance();
  bool BeginRequest();
  void TakeHead();
  void AdmitHead();
  bool ReserveBody();
  void ReleaseBody();
  void TakeBody();
  void BeginIdle();
  void Dispatch();

  // Notice that a client has closed its socket while no read reports it.
  void ProbeLater();
  void Probe();
  void OnReset() override { ClientLeft(); }

  // Methods that write.
  bool Answers(uint64_t number) const;
  void SendWhole(const HttpResponse& response, bool close);
  void Refuse(const HttpRefusal& refusal);
  void StartPieces(int status, const Headers& headers);
  void WritePiece(std::string piece);
  void EndPieces();
  void Enqueue(std::string bytes);
  void Flush();
  void OnWritten(ErrorCode error) override;
  void ArmPing();
  void EndAnswer();
  void Next();
  void Finish();
  void OnFinished() override { Close(); }
  void ClientLeft();
  void Close();
  const char* Activity() const;  // for the log
  std::string HeadText(int status, const Headers& headers, std::optional<size_t> length) const;

  boost::asio::any_io_executor executor() const { return executor_; }

  std::unique_ptr<Stream> stream_;
  const boost::asio::any_io_executor executor_;
  Deadline read_deadline_, write_deadline_;
  boost::asio::steady_timer ping_, probe_;
  const std::shared_ptr<HttpShared> shared_;
  const Admission admission_;
  std::array<char, 16 << 10> received_;  // buffer of the pending read
  std::string input_;                    // bytes that were read and not parsed yet
  HeadScanner scanner_;
  RequestHead head_;
  RequestBody body_;
  std::weak_ptr<Exchange> exchange_;
  std::string queued_, writing_;
  int64_t reserved_ = 0;
  uint64_t exchange_number_ = 0;  // number of the request; a call with another number is late
  std::chrono::milliseconds probe_after_{0};
  Phase phase_ = Phase::kOpening;
  std::atomic<int64_t> idle_since_{0};  // steady time at which kIdle began; 0: not idle, or CloseIdle() ran
  bool reading_ = false;
  bool at_end_ = false;        // the client has ended its sending side
  bool watching_ = false;      // AwaitReset is pending
  bool head_limited_ = false;  // the deadline of this head is set
  bool ended_ = false;         // the answer is complete
  bool head_sent_ = false;     // the head of the answer is queued
  bool flushing_ = false;
  bool chunked_ = false, events_ = false;
  bool close_ = false;  // the connection closes after this answer
  bool head_only_ = false;
};

}  // namespace moesaic::server
