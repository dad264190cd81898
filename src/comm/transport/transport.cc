#include "comm/transport/transport.h"

#include <sched.h>

#include "comm/transport/transfer_errors.h"

namespace moesaic::comm {

void Transport::Idle() { sched_yield(); }

size_t Transport::EagerBytes() const { return 0; }

double Transport::SilentSeconds(int) const { return 0; }

std::string SilentPeers(const Transport& transport) {
  std::string text;
  for (int peer = 0; peer < transport.size(); ++peer) {
    const double seconds = transport.SilentSeconds(peer);
    if (seconds < kSilentSeconds) continue;
    text += fmt::format("{}rank {} ({:.1f} s)", text.empty() ? "; silent: " : ", ", peer, seconds);
  }
  return text;
}

Status Wait(Transport& transport, TransferId id, double limit_s) {
  Status result;
  transport.Progress();
  if (transport.Test(id, &result)) return result;
  const double end = transport.Now() + limit_s;
  for (;;) {
    transport.Idle();
    transport.Progress();
    if (transport.Test(id, &result)) return result;
    if (transport.Now() < end) continue;
    result = Expired(transport, limit_s);
    transport.Cancel(id);
    return result;
  }
}

}  // namespace moesaic::comm
