// Loads the certificate and key of the server, and sets its TLS versions and ciphers.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"

namespace boost::asio::ssl {
class context;
}

namespace moesaic::server {

/// Accepts TLS 1.2 and 1.3 with forward secrecy and authenticated encryption only, and ALPN "http/1.1". It is
/// immutable, and any thread may begin a session with it.
class TlsContext {
 public:
  /// Reads PEM files: the server's certificate, followed by those of intermediate authorities, and its key.
  /// Errors name the file.
  static StatusOr<std::shared_ptr<const TlsContext>> Load(const std::string& certificate,
                                                          const std::string& key);

  boost::asio::ssl::context& native() const { return *context_; }
  /// Returns e.g. "models.example, valid until Nov 24 09:42:27 2027 GMT".
  const std::string& description() const { return description_; }
  bool expired() const { return expired_; }

 private:
  TlsContext() = default;

  std::shared_ptr<boost::asio::ssl::context> context_;
  std::string description_;
  bool expired_ = false;
};

}  // namespace moesaic::server
