#include "comm/transport/rendezvous_messages.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <array>

#include "base/check.h"
#include "comm/transport/rendezvous.h"

namespace moesaic::comm {
namespace {

constexpr uint32_t kMagic = 0x314a4f4d;  // "MOJ1"
constexpr size_t kMaxRefusalBytes = 1024;

void AppendU32(std::string& to, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) to.push_back(static_cast<char>(value >> shift));
}

// Reads a message from its start; every read is checked.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : bytes_(bytes) {}
  bool Read(size_t count, std::string& to) {
    if (bytes_.size() < count) return false;
    to.assign(bytes_.substr(0, count));
    bytes_.remove_prefix(count);
    return true;
  }
  bool ReadU32(uint32_t& to) {
    if (bytes_.size() < 4) return false;
    to = 0;
    for (size_t i = 0; i < 4; ++i) to |= static_cast<uint32_t>(static_cast<uint8_t>(bytes_[i])) << (8 * i);
    bytes_.remove_prefix(4);
    return true;
  }
  std::string_view rest() const { return bytes_; }

 private:
  std::string_view bytes_;
};

std::string Hmac(std::string_view secret, std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> mac{};
  unsigned int length = 0;
  MOESAIC_CHECK(HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                     reinterpret_cast<const unsigned char*>(text.data()), text.size(), mac.data(),
                     &length) != nullptr);
  return {reinterpret_cast<const char*>(mac.data()), length};
}

std::string FrameHead(RendezvousType type, size_t payload_bytes) {
  std::string head;
  AppendU32(head, kMagic);
  AppendU32(head, static_cast<uint32_t>(payload_bytes));
  head.push_back(static_cast<char>(type));
  return head;
}

constexpr std::array kRefusalCodes = {StatusCode::kPermissionDenied, StatusCode::kInvalidArgument,
                                      StatusCode::kDeadlineExceeded, StatusCode::kUnavailable};

}  // namespace

StatusOr<bool> TakeFrame(std::string& buffer, size_t max_payload, Frame* frame) {
  FieldReader reader(buffer);
  uint32_t magic = 0, length = 0;
  if (reader.ReadU32(magic) && magic != kMagic) {
    return DataLoss("rendezvous: the peer does not speak this protocol; its first bytes are {:#x}", magic);
  }
  if (reader.ReadU32(length) && length > max_payload) {
    return DataLoss("rendezvous: message must have at most {} bytes, found {}", max_payload, length);
  }
  if (buffer.size() < kFrameHeaderBytes) return false;
  const auto type = static_cast<uint8_t>(buffer[kFrameHeaderBytes - 1]);
  if (type < 1 || type > 4)
    return DataLoss("rendezvous: type of a message must be 1 to 4, found {}", int{type});
  if (buffer.size() < kFrameHeaderBytes + length) return false;
  frame->type = static_cast<RendezvousType>(type);
  frame->payload = buffer.substr(kFrameHeaderBytes, length);
  buffer.erase(0, kFrameHeaderBytes + length);
  return true;
}

std::string EncodeFrame(RendezvousType type, std::string_view payload) {
  std::string frame = FrameHead(type, payload.size());
  frame += payload;
  return frame;
}

StatusOr<Hello> ParseHello(std::string_view payload) {
  FieldReader reader(payload);
  Hello hello;
  if (!reader.Read(kNonceBytes, hello.nonce) || !reader.Read(kMacBytes, hello.mac) ||
      !reader.ReadU32(hello.rank) || !reader.ReadU32(hello.size)) {
    return DataLoss("rendezvous: hello is truncated: {} bytes", payload.size());
  }
  if (reader.rest().size() > kMaxContactBytes) {
    return DataLoss("rendezvous: contact must have at most {} bytes, found {}", kMaxContactBytes,
                    reader.rest().size());
  }
  hello.contact = reader.rest();
  return hello;
}

std::string EncodeHello(const Hello& hello) {
  std::string payload = hello.nonce + hello.mac;
  AppendU32(payload, hello.rank);
  AppendU32(payload, hello.size);
  return payload + hello.contact;
}

std::string HelloMac(std::string_view secret, std::string_view challenge, const Hello& hello) {
  std::string text = "hello";
  text += challenge;
  text += hello.nonce;
  AppendU32(text, hello.rank);
  AppendU32(text, hello.size);
  return Hmac(secret, text + hello.contact);
}

StatusOr<ContactTable> ParseTable(std::string_view payload, int size) {
  FieldReader reader(payload);
  ContactTable table;
  bool complete = reader.Read(kMacBytes, table.mac);
  for (int rank = 0; complete && rank < size; ++rank) {
    uint32_t length = 0;
    std::string contact;
    complete = reader.ReadU32(length) && length <= kMaxContactBytes && reader.Read(length, contact);
    table.contacts.push_back(std::move(contact));
  }
  if (!complete || !reader.rest().empty()) {
    return DataLoss("rendezvous: table of {} ranks is damaged: {} bytes", size, payload.size());
  }
  return table;
}

std::string EncodeContacts(const std::vector<std::string>& contacts) {
  std::string list;
  for (const std::string& contact : contacts) {
    AppendU32(list, static_cast<uint32_t>(contact.size()));
    list += contact;
  }
  return list;
}

std::string EncodeTableHead(std::string_view mac, size_t contacts_bytes) {
  std::string head = FrameHead(RendezvousType::kTable, mac.size() + contacts_bytes);
  head += mac;
  return head;
}

std::string TableMac(std::string_view secret, std::string_view challenge, std::string_view nonce,
                     std::string_view contacts) {
  std::string text = "table";
  text += challenge;
  text += nonce;
  text += contacts;
  return Hmac(secret, text);
}

std::string EncodeRefusal(const Status& status) {
  char reason = 3;
  for (size_t i = 0; i < kRefusalCodes.size(); ++i) {
    if (kRefusalCodes[i] == status.code()) reason = static_cast<char>(i);
  }
  return reason + Message(status).substr(0, kMaxRefusalBytes);
}

StatusOr<Status> ParseRefusal(std::string_view payload) {
  if (payload.empty() || payload.size() > kMaxRefusalBytes + 1) {
    return DataLoss("rendezvous: refusal is damaged: {} bytes", payload.size());
  }
  const auto reason = static_cast<uint8_t>(payload[0]);
  if (reason >= kRefusalCodes.size())
    return DataLoss("rendezvous: reason of a refusal must be below 4, found {}", reason);
  std::string text;
  for (const char c : payload.substr(1)) text.push_back(c >= ' ' && c < 127 ? c : '?');
  return FormatStatus(kRefusalCodes[reason], "{}", fmt::make_format_args(text));
}

size_t MaxHelloBytes() { return kNonceBytes + kMacBytes + 8 + kMaxContactBytes; }
size_t MaxTableBytes(int size) { return kMacBytes + static_cast<size_t>(size) * (4 + kMaxContactBytes); }

std::string RandomNonce() {
  std::array<unsigned char, kNonceBytes> bytes{};
  MOESAIC_CHECK_EQ(RAND_bytes(bytes.data(), kNonceBytes), 1);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool EqualMacs(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace moesaic::comm
