// Messages of the rendezvous: arbitrary bytes end with a message or an error, and messages survive a round
// trip.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "comm/transport/rendezvous.h"
#include "comm/transport/rendezvous_messages.h"

using namespace moesaic::comm;  // NOLINT(google-build-using-namespace)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  std::string buffer(reinterpret_cast<const char*>(data), bytes);
  const std::string payload = buffer;
  if (const auto hello = ParseHello(payload); hello.ok()) {
    MOESAIC_CHECK(EncodeHello(*hello) == payload);
    MOESAIC_CHECK_LE(hello->contact.size(), kMaxContactBytes);
  }
  for (const int size : {1, 3}) {
    if (const auto table = ParseTable(payload, size); table.ok())
      MOESAIC_CHECK(table->mac + EncodeContacts(table->contacts) == payload);
  }
  (void)ParseRefusal(payload);
  Frame frame;
  for (;;) {
    const auto taken = TakeFrame(buffer, MaxHelloBytes(), &frame);
    if (!taken.ok() || !*taken) break;
    MOESAIC_CHECK_LE(frame.payload.size(), MaxHelloBytes());
  }
  return 0;
}
