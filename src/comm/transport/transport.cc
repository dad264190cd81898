#include "comm/transport/transport.h"

#include <sched.h>

#include <array>

#include "comm/transport/poll_limit.h"
#include "comm/transport/transfer_errors.h"

namespace moesaic::comm {

void Transport::Idle() { sched_yield(); }

Status Transport::Exchange(int peer, Tag tag, std::span<const std::byte> data, std::span<std::byte> received,
                           double limit_s) {
  const bool sends_first = data.size() <= EagerBytes();
  std::array<TransferId, 2> ids;
  std::array<bool, 2> busy = {};
  const auto cancel = [&] {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (busy[i]) Cancel(ids[i]);
    }
  };
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool is_send = (i == 0) == sends_first;
    const StatusOr<TransferId> id = is_send ? Send(peer, tag, data) : Receive(peer, tag, received);
    if (!id.ok()) {
      cancel();
      return id.status();
    }
    ids[i] = *id;
    busy[i] = true;
  }
  PollLimit limit(*this, limit_s);
  while (true) {
    Progress();
    for (size_t i = 0; i < ids.size(); ++i) {
      Status result;
      if (!busy[i] || !Test(ids[i], &result)) continue;
      busy[i] = false;
      if (result.ok()) continue;
      cancel();
      return result;
    }
    if (!busy[0] && !busy[1]) return OkStatus();
    Idle();
    if (!limit.Passed()) continue;
    cancel();
    return Expired(*this, limit_s);
  }
}

size_t Transport::EagerBytes() const { return 0; }

double Transport::SilentSeconds(int) const { return 0; }

std::string SilentPeers(const Transport& transport) {
  std::string text;
  for (int peer = 0; peer < transport.size(); ++peer) {
    const double seconds = transport.SilentSeconds(peer);
    if (transport.failed(peer) || seconds < kSilentSeconds) continue;
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
