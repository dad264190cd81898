#include "server/tls_context.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/ssl/context.hpp>
#include <string_view>

#include "text/file.h"

namespace moesaic::server {
namespace {

namespace ssl = boost::asio::ssl;

// Ciphers of TLS 1.2. TLS 1.3 has suites of its own, all of which are accepted.
constexpr const char* kCiphers12 = "ECDHE+AESGCM:ECDHE+CHACHA20";

constexpr std::string_view kProtocol = "http/1.1";

int SelectProtocol(SSL*, const unsigned char** out, unsigned char* out_length, const unsigned char* in,
                   unsigned int in_length, void*) {
  // `in` is a list of names, each preceded by a byte with its length.
  for (unsigned int at = 0; at < in_length; at += in[at] + 1U) {
    if (at + 1 + in[at] > in_length) break;
    const std::string_view name(reinterpret_cast<const char*>(in + at + 1), in[at]);
    if (name != kProtocol) continue;
    *out = in + at + 1;
    *out_length = in[at];
    return SSL_TLSEXT_ERR_OK;
  }
  return SSL_TLSEXT_ERR_ALERT_FATAL;  // RFC 7301, section 3.2
}

// Refuses a passphrase, since OpenSSL would otherwise ask for it on the terminal.
int NoPassphrase(char*, int, int, void*) { return 0; }

std::string OpenSslReason() {
  const unsigned long code = ERR_peek_last_error();
  const char* reason = code != 0 ? ERR_reason_error_string(code) : nullptr;
  ERR_clear_error();
  return reason != nullptr ? reason : "unknown error";
}

Status UseCertificate(ssl::context& context, const std::string& file) {
  ASSIGN_OR_RETURN(const std::string pem, text::ReadFile(file));
  if (pem.find("-----BEGIN CERTIFICATE-----") == std::string::npos) {
    return InvalidArgument("{}: there is no PEM certificate (-----BEGIN CERTIFICATE-----)", file);
  }
  boost::system::error_code error;
  ERR_clear_error();
  context.use_certificate_chain(boost::asio::buffer(pem), error);
  if (error) return InvalidArgument("{}: the certificate can't be used: {}", file, error.message());
  return OkStatus();
}

Status UseKey(ssl::context& context, const std::string& certificate, const std::string& file) {
  ASSIGN_OR_RETURN(const std::string pem, text::ReadFile(file));
  if (pem.find("PRIVATE KEY-----") == std::string::npos) {
    return InvalidArgument("{}: there is no PEM private key (-----BEGIN PRIVATE KEY-----)", file);
  }
  if (pem.find("ENCRYPTED") != std::string::npos) {
    return InvalidArgument(
        "{}: the key is encrypted; store it without a passphrase, readable by the server's user only", file);
  }
  SSL_CTX_set_default_passwd_cb(context.native_handle(), NoPassphrase);
  boost::system::error_code error;
  ERR_clear_error();
  context.use_private_key(boost::asio::buffer(pem), ssl::context::pem, error);
  if (error || SSL_CTX_check_private_key(context.native_handle()) != 1) {
    const std::string reason = error ? error.message() : OpenSslReason();
    return InvalidArgument("{}: the key can't be used with the certificate {}: {}", file, certificate,
                           reason);
  }
  return OkStatus();
}

std::string TextOf(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

std::string Describe(const X509* certificate) {
  std::array<char, 256> name{};
  X509_NAME_get_text_by_NID(X509_get_subject_name(certificate), NID_commonName, name.data(),
                            static_cast<int>(name.size()));
  BIO* until = BIO_new(BIO_s_mem());
  ASN1_TIME_print(until, X509_get0_notAfter(certificate));
  const std::string subject = name[0] != '\0' ? name.data() : "certificate without a common name";
  return subject + ", valid until " + TextOf(until);
}

}  // namespace

StatusOr<std::shared_ptr<const TlsContext>> TlsContext::Load(const std::string& certificate,
                                                             const std::string& key) {
  std::shared_ptr<TlsContext> made(new TlsContext);
  made->context_ = std::make_shared<ssl::context>(ssl::context::tls_server);
  ssl::context& context = *made->context_;
  SSL_CTX* native = context.native_handle();
  SSL_CTX_set_min_proto_version(native, TLS1_2_VERSION);
  SSL_CTX_set_options(native, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION |
                                  SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA);
  if (SSL_CTX_set_cipher_list(native, kCiphers12) != 1) {
    return absl::InternalError("TLS: no cipher is available: " + OpenSslReason());
  }
  SSL_CTX_set_alpn_select_cb(native, SelectProtocol, nullptr);
  SSL_CTX_set_mode(native, SSL_MODE_RELEASE_BUFFERS);
  RETURN_IF_ERROR(UseCertificate(context, certificate));
  RETURN_IF_ERROR(UseKey(context, certificate, key));
  const X509* own = SSL_CTX_get0_certificate(native);
  made->description_ = Describe(own);
  made->expired_ = X509_cmp_current_time(X509_get0_notAfter(own)) < 0;
  return std::shared_ptr<const TlsContext>(std::move(made));
}

}  // namespace moesaic::server
