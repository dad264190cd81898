#include "server/stream.h"

#include <array>
#include <boost/asio/error.hpp>
#include <boost/asio/ssl/error.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/write.hpp>
#include <utility>
#include <vector>

namespace moesaic::server {
namespace {

namespace asio = boost::asio;
using ErrorCode = boost::system::error_code;
using Tcp = asio::ip::tcp;

constexpr size_t kDrainBytes = 64 << 10;

class StreamErrors final : public boost::system::error_category {
 public:
  const char* name() const noexcept override { return "stream"; }
  std::string message(int) const override { return "the peer speaks plain HTTP"; }
};

class PlainSocket final : public Stream {
 public:
  explicit PlainSocket(Socket socket) : socket_(std::move(socket)) {}

  void Open(Events events) override { events->OnOpen({}); }

  void Read(asio::mutable_buffer buffer, Events events) override {
    socket_.async_read_some(buffer, [events = std::move(events)](ErrorCode error, size_t bytes) {
      events->OnRead(error, bytes);
    });
  }

  void Write(asio::const_buffer buffer, Events events) override {
    asio::async_write(socket_, buffer,
                      [events = std::move(events)](ErrorCode error, size_t) { events->OnWritten(error); });
  }

  void Finish(size_t bytes, Events events) override {
    EndSending();
    Drain(bytes, std::move(events));
  }

  std::unique_ptr<Stream> TakePlain() override { return PlainStream(std::move(socket_)); }

 private:
  Socket& socket() override { return socket_; }

  Socket socket_;
};

class TlsSocket final : public Stream {
 public:
  TlsSocket(Socket socket, std::shared_ptr<const TlsContext> context)
      : context_(std::move(context)), stream_(std::move(socket), context_->native()) {}

  void Open(Events events) override {
    socket().async_wait(Tcp::socket::wait_read, [this, events = std::move(events)](ErrorCode error) mutable {
      if (error) return events->OnOpen(error);
      if (IsPlain()) return events->OnOpen(MakeError(StreamError::kPlainHttp));
      stream_.async_handshake(asio::ssl::stream_base::server,
                              [events = std::move(events)](ErrorCode failed) { events->OnOpen(failed); });
    });
  }

  void Read(asio::mutable_buffer buffer, Events events) override {
    stream_.async_read_some(buffer, [events = std::move(events)](ErrorCode error, size_t bytes) {
      // The peer ended TCP without ending TLS. That is safe: bodies have a length, so that a body that was
      // cut off is not taken as complete.
      const bool cut = error == asio::ssl::error::stream_truncated;
      events->OnRead(cut ? asio::error::eof : error, bytes);
    });
  }

  void Write(asio::const_buffer buffer, Events events) override {
    asio::async_write(stream_, buffer,
                      [events = std::move(events)](ErrorCode error, size_t) { events->OnWritten(error); });
  }

  // close_notify has been sent after the answer even if the shutdown ends with an error, for example because
  // the peer sends further bytes.
  void Finish(size_t bytes, Events events) override {
    stream_.async_shutdown([this, bytes, events = std::move(events)](ErrorCode) mutable {
      EndSending();
      Drain(bytes, std::move(events));
    });
  }

  std::unique_ptr<Stream> TakePlain() override { return PlainStream(std::move(stream_.next_layer())); }

 private:
  Socket& socket() override { return stream_.next_layer(); }

  // A TLS record of a handshake begins with 22, and the oldest form of a hello with a byte above 127.
  bool IsPlain() {
    char first = 0;
    ErrorCode error;
    const size_t got = socket().receive(asio::buffer(&first, 1), Tcp::socket::message_peek, error);
    return !error && got == 1 && ((first >= 'A' && first <= 'Z') || first == '\r' || first == '\n');
  }

  const std::shared_ptr<const TlsContext> context_;
  asio::ssl::stream<Socket> stream_;
};

}  // namespace

boost::system::error_code MakeError(StreamError error) {
  static const StreamErrors kCategory;
  return {static_cast<int>(error), kCategory};
}

std::string Stream::PeerAddress() {
  ErrorCode ignored;
  return socket().remote_endpoint(ignored).address().to_string();
}

void Stream::AwaitReset(Events events) {
  socket().async_wait(Socket::wait_error, [events = std::move(events)](ErrorCode error) {
    if (!error) events->OnReset();
  });
}

void Stream::EndSending() {
  ErrorCode ignored;
  socket().shutdown(Socket::shutdown_send, ignored);
}

void Stream::Drain(size_t bytes, Events events) {
  auto scratch = std::make_unique<std::array<char, kDrainBytes>>();
  const auto buffer = asio::buffer(*scratch);
  socket().async_read_some(buffer, [this, bytes, scratch = std::move(scratch), events = std::move(events)](
                                       ErrorCode error, size_t got) mutable {
    if (error || got >= bytes) return events->OnFinished();
    Drain(bytes - got, std::move(events));
  });
}

void Stream::Close() {
  ErrorCode ignored;
  socket().shutdown(Socket::shutdown_both, ignored);
  socket().close(ignored);
}

std::unique_ptr<Stream> PlainStream(Stream::Socket socket) {
  return std::make_unique<PlainSocket>(std::move(socket));
}

std::unique_ptr<Stream> TlsStream(Stream::Socket socket, std::shared_ptr<const TlsContext> context) {
  return std::make_unique<TlsSocket>(std::move(socket), std::move(context));
}

}  // namespace moesaic::server
