// Messages of the rendezvous. All integers are little endian. A frame is {u32 magic, u32 length, u8 type,
// payload}, where `length` is that of the payload:
//   challenge  rank 0 -> rank   nonce[32]
//   hello      rank -> rank 0   nonce[32], mac[32], u32 rank, u32 size, contact
//   table      rank 0 -> rank   mac[32], then for each rank u32 length, contact
//   refusal    rank 0 -> rank   u8 reason, text
// The mac of a hello is HMAC-SHA256 by the secret over "hello", both nonces, rank, size and contact; that of
// a table is over "table", both nonces and the contacts with their lengths.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::comm {

inline constexpr size_t kNonceBytes = 32, kMacBytes = 32;
inline constexpr size_t kFrameHeaderBytes = 9;

enum class RendezvousType : uint8_t { kChallenge = 1, kHello = 2, kTable = 3, kRefusal = 4 };

struct Frame {
  RendezvousType type = RendezvousType::kChallenge;
  std::string payload;
};
/// Takes the first frame from `buffer`. False: more bytes must be read. DataLoss: the bytes are no frame, or
/// its payload is longer than `max_payload`.
StatusOr<bool> TakeFrame(std::string& buffer, size_t max_payload, Frame* frame);
std::string EncodeFrame(RendezvousType type, std::string_view payload);

struct Hello {
  std::string nonce, mac;
  uint32_t rank = 0, size = 0;
  std::string contact;
};
StatusOr<Hello> ParseHello(std::string_view payload);
std::string EncodeHello(const Hello& hello);
std::string HelloMac(std::string_view secret, std::string_view challenge, const Hello& hello);

struct ContactTable {
  std::string mac;
  std::vector<std::string> contacts;
};
/// `size` is the number of contacts that the table must have.
StatusOr<ContactTable> ParseTable(std::string_view payload, int size);
/// The payload of a table is its mac, followed by EncodeContacts(). EncodeTableHead() returns the frame up to
/// the contacts.
std::string EncodeContacts(const std::vector<std::string>& contacts);
std::string EncodeTableHead(std::string_view mac, size_t contacts_bytes);
/// `contacts` is the result of EncodeContacts().
std::string TableMac(std::string_view secret, std::string_view challenge, std::string_view nonce,
                     std::string_view contacts);

/// The status travels as one of the codes that Rendezvous() returns.
std::string EncodeRefusal(const Status& status);
StatusOr<Status> ParseRefusal(std::string_view payload);

/// Returns the maximum payload bytes of each direction.
size_t MaxHelloBytes();
size_t MaxTableBytes(int size);

std::string RandomNonce();
/// Compares in a time that does not depend on the position of the first difference.
bool EqualMacs(std::string_view a, std::string_view b);

}  // namespace moesaic::comm
