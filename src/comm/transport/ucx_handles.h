// Owners of UCX handles and the words of its errors.
#pragma once

#include <memory>
#include <string>

#include "comm/transport/ucx_library.h"

namespace moesaic::comm {

struct UcxContextEnd {
  void operator()(ucp_context_h context) const { Ucx().cleanup(context); }
};
using UcxContext = std::unique_ptr<std::remove_pointer_t<ucp_context_h>, UcxContextEnd>;

struct UcxWorkerEnd {
  void operator()(ucp_worker_h worker) const { Ucx().worker_destroy(worker); }
};
using UcxWorker = std::unique_ptr<std::remove_pointer_t<ucp_worker_h>, UcxWorkerEnd>;

/// kUnavailable unless `code` is UCS_OK: "WHERE failed; UCX reports: TEXT".
Status UcxStatus(const std::string& where, ucs_status_t code);

/// Creates a context for tagged and active messages that detects dead peers in time.
StatusOr<UcxContext> MakeUcxContext(int ranks);
/// Creates the worker of one thread.
StatusOr<UcxWorker> MakeUcxWorker(ucp_context_h context);
/// Returns the address by which peers connect.
StatusOr<std::string> UcxAddress(ucp_worker_h worker);

}  // namespace moesaic::comm
