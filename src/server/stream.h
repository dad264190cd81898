// The byte stream of one connection, plain or TLS. Only the transport includes it.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/system/error_code.hpp>
#include <memory>
#include <string>

#include "server/tls_context.h"

namespace moesaic::server {

/// Receives the events of a stream, on its strand. A pending operation keeps its receiver alive.
class StreamEvents {
 public:
  using ErrorCode = boost::system::error_code;

  virtual ~StreamEvents() = default;
  virtual void OnOpen(ErrorCode error) = 0;
  /// `eof` when the peer has ended its side of the stream.
  virtual void OnRead(ErrorCode error, size_t bytes) = 0;
  virtual void OnWritten(ErrorCode error) = 0;
  virtual void OnReset() = 0;
  virtual void OnFinished() = 0;
};

/// Call all methods but the constructor on the strand of the socket. At most one Read and one Write may be
/// pending.
class Stream {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  using Events = std::shared_ptr<StreamEvents>;

  virtual ~Stream() = default;

  /// Calls OnOpen when bytes can be read and written. Its error is kPlainHttp when the peer of a TLS stream
  /// sends plain text. TakePlain() then takes the socket over.
  virtual void Open(Events events) = 0;
  virtual void Read(boost::asio::mutable_buffer buffer, Events events) = 0;
  /// Writes all bytes of `buffer`.
  virtual void Write(boost::asio::const_buffer buffer, Events events) = 0;
  /// Ends this side of the stream, discards at most `bytes` that the peer still sends, and calls OnFinished.
  /// Closing at once with unread bytes would reset the connection, and the peer might lose the answer.
  virtual void Finish(size_t bytes, Events events) = 0;
  /// Returns a plain stream on the same socket, after kPlainHttp.
  virtual std::unique_ptr<Stream> TakePlain() = 0;

  boost::asio::any_io_executor executor() { return socket().get_executor(); }
  std::string PeerAddress();
  /// Calls OnReset when the peer rejects bytes, since its socket is closed. Call it once.
  void AwaitReset(Events events);
  /// Closes the socket. Pending operations end with an error.
  void Close();

 protected:
  virtual Socket& socket() = 0;
  void EndSending();
  void Drain(size_t bytes, Events events);
};

enum class StreamError { kPlainHttp = 1 };
boost::system::error_code MakeError(StreamError error);

std::unique_ptr<Stream> PlainStream(Stream::Socket socket);
std::unique_ptr<Stream> TlsStream(Stream::Socket socket, std::shared_ptr<const TlsContext> context);

}  // namespace moesaic::server
