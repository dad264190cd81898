#include "comm/transport/transport.h"

#include <sched.h>

#include "comm/transport/transfer_errors.h"

namespace moesaic::comm {

void Transport::Idle() { sched_yield(); }

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
    transport.Cancel(id);
    return Expired(transport.rank(), limit_s);
  }
}

}  // namespace moesaic::comm
