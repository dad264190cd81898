#include "comm/transport/ucx_library.h"

#include <dlfcn.h>
#include <signal.h>

#include <array>

namespace moesaic::comm {
namespace {

constexpr char kFile[] = "libucp.so.0";

// Restores the dispositions of all signals when it is destroyed. UCX handles SIGHUP and fatal signals by
// default, so a program started by nohup would end with its terminal.
class KeptSignals {
 public:
  KeptSignals() {
    for (int signal = 1; signal < NSIG; ++signal)
      known_[signal] = sigaction(signal, nullptr, &kept_[signal]) == 0;
  }
  ~KeptSignals() {
    for (int signal = 1; signal < NSIG; ++signal) {
      if (known_[signal]) sigaction(signal, &kept_[signal], nullptr);
    }
  }
  KeptSignals(const KeptSignals&) = delete;
  KeptSignals& operator=(const KeptSignals&) = delete;

 private:
  std::array<struct sigaction, NSIG> kept_;
  std::array<bool, NSIG> known_{};
};

template <typename Function>
Status Find(void* library, const char* name, Function& function) {
  void* const found = dlsym(library, name);
  if (found == nullptr) return NotFound("{} has no {}: UCX 1.12 or newer is needed", kFile, name);
  function = reinterpret_cast<Function>(found);
  return OkStatus();
}

UcxLibrary& Library() {
  static UcxLibrary library{};
  return library;
}

Status Open() {
  const KeptSignals signals;
  void* const file = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    const char* const why = dlerror();
    return NotFound("{}; install UCX (Debian and Ubuntu: libucx0)", why == nullptr ? kFile : why);
  }
  UcxLibrary& l = Library();
  RETURN_IF_ERROR(Find(file, "ucp_config_read", l.config_read));
  RETURN_IF_ERROR(Find(file, "ucp_config_modify", l.config_modify));
  RETURN_IF_ERROR(Find(file, "ucp_config_release", l.config_release));
  RETURN_IF_ERROR(Find(file, "ucp_init_version", l.init_version));
  RETURN_IF_ERROR(Find(file, "ucp_cleanup", l.cleanup));
  RETURN_IF_ERROR(Find(file, "ucp_worker_create", l.worker_create));
  RETURN_IF_ERROR(Find(file, "ucp_worker_destroy", l.worker_destroy));
  RETURN_IF_ERROR(Find(file, "ucp_worker_get_address", l.worker_get_address));
  RETURN_IF_ERROR(Find(file, "ucp_worker_release_address", l.worker_release_address));
  RETURN_IF_ERROR(Find(file, "ucp_worker_progress", l.worker_progress));
  RETURN_IF_ERROR(Find(file, "ucp_worker_set_am_recv_handler", l.worker_set_am_recv_handler));
  RETURN_IF_ERROR(Find(file, "ucp_ep_create", l.ep_create));
  RETURN_IF_ERROR(Find(file, "ucp_ep_close_nbx", l.ep_close_nbx));
  RETURN_IF_ERROR(Find(file, "ucp_am_send_nbx", l.am_send_nbx));
  RETURN_IF_ERROR(Find(file, "ucp_tag_send_nbx", l.tag_send_nbx));
  RETURN_IF_ERROR(Find(file, "ucp_tag_recv_nbx", l.tag_recv_nbx));
  RETURN_IF_ERROR(Find(file, "ucp_tag_probe_nb", l.tag_probe_nb));
  RETURN_IF_ERROR(Find(file, "ucp_tag_msg_recv_nbx", l.tag_msg_recv_nbx));
  RETURN_IF_ERROR(Find(file, "ucp_request_cancel", l.request_cancel));
  RETURN_IF_ERROR(Find(file, "ucp_request_free", l.request_free));
  return Find(file, "ucs_status_string", l.status_string);
}

}  // namespace

Status OpenUcxLibrary() {
  static const Status opened = Open();
  return opened;
}

const UcxLibrary& Ucx() { return Library(); }

}  // namespace moesaic::comm
