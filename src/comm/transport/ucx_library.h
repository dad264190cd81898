// The functions of UCX, whose library is opened when the first UCX transport is made: a program that uses one
// rank neither loads UCX nor needs it installed.
#pragma once

#include <ucp/api/ucp.h>

#include "base/status.h"

namespace moesaic::comm {

/// The functions of libucp.so.0 and libucs.so.0 that the transport calls, without the prefix ucp_ or ucs_.
struct UcxLibrary {
  decltype(&ucp_config_read) config_read;
  decltype(&ucp_config_modify) config_modify;
  decltype(&ucp_config_release) config_release;
  decltype(&ucp_init_version) init_version;
  decltype(&ucp_cleanup) cleanup;
  decltype(&ucp_worker_create) worker_create;
  decltype(&ucp_worker_destroy) worker_destroy;
  decltype(&ucp_worker_get_address) worker_get_address;
  decltype(&ucp_worker_release_address) worker_release_address;
  decltype(&ucp_worker_progress) worker_progress;
  decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler;
  decltype(&ucp_ep_create) ep_create;
  decltype(&ucp_ep_close_nbx) ep_close_nbx;
  decltype(&ucp_am_send_nbx) am_send_nbx;
  decltype(&ucp_tag_send_nbx) tag_send_nbx;
  decltype(&ucp_tag_recv_nbx) tag_recv_nbx;
  decltype(&ucp_tag_probe_nb) tag_probe_nb;
  decltype(&ucp_tag_msg_recv_nbx) tag_msg_recv_nbx;
  decltype(&ucp_request_cancel) request_cancel;
  decltype(&ucp_request_free) request_free;
  decltype(&ucs_status_string) status_string;
};

/// Opens the library for the rest of the process; further calls return the first call's result. Dispositions
/// of signals stay as they are, although UCX sets its own when it is loaded. kNotFound names the missing
/// library or function and the package that has it.
Status OpenUcxLibrary();

/// The opened library. Needs a successful OpenUcxLibrary().
const UcxLibrary& Ucx();

}  // namespace moesaic::comm
