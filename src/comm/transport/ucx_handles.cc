#include "comm/transport/ucx_handles.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

namespace moesaic::comm {
namespace {

// Settings for which a variable of the environment is not set. UCX checks every second whether peers that use
// shared memory exist; TCP probes a silent connection after 2 s and gives up 2 s later.
// UCX warns of settings of transports that UCX_TLS excludes.
struct UcxSetting {
  std::vector<std::string_view>
      transports;  // any of them, or one of their groups, must be selected; empty: no condition
  const char* name;
  const char* variable;
  const char* value;
};

const std::vector<UcxSetting>& UcxSettings() {
  static const std::vector<UcxSetting> settings = {
      {{}, "KEEPALIVE_INTERVAL", "UCX_KEEPALIVE_INTERVAL", "1s"},
      // Of SendAhead. Larger messages would take more memory of the receiver than they are worth.
      {{}, "RNDV_SEND_NBR_THRESH", "UCX_RNDV_SEND_NBR_THRESH", "16m"},
      {{"posix", "sysv", "sm", "shm", "all"}, "MM_ERROR_HANDLING", "UCX_MM_ERROR_HANDLING", "y"},
      // A rank takes 8 MB of messages while it computes: the hidden states of a chunk of a prompt.
      {{"posix", "sysv", "sm", "shm", "all"}, "MM_FIFO_SIZE", "UCX_MM_FIFO_SIZE", "1024"},
      {{"tcp", "all"}, "KEEPIDLE", "UCX_TCP_KEEPIDLE", "2s"},
      {{"tcp", "all"}, "KEEPINTVL", "UCX_TCP_KEEPINTVL", "1s"},
      {{"tcp", "all"}, "KEEPCNT", "UCX_TCP_KEEPCNT", "2"},
  };
  return settings;
}

bool IsSelected(const std::vector<std::string_view>& transports) {
  const char* const variable = std::getenv("UCX_TLS");
  const std::string_view list = variable == nullptr ? "all" : variable;
  return transports.empty() || list.starts_with('^') ||
         std::ranges::any_of(transports, [&](std::string_view each) { return list.find(each) != list.npos; });
}

void ApplySettings(ucp_config_t* config) {
  for (const UcxSetting& setting : UcxSettings()) {
    if (std::getenv(setting.variable) != nullptr || !IsSelected(setting.transports)) continue;
    (void)Ucx().config_modify(config, setting.name, setting.value);
  }
}

struct ConfigEnd {
  void operator()(ucp_config_t* config) const { Ucx().config_release(config); }
};

}  // namespace

Status UcxStatus(const std::string& where, ucs_status_t code) {
  if (code == UCS_OK) return OkStatus();
  const std::string text = Ucx().status_string(code);
  return FormatStatus(StatusCode::kUnavailable, "{} failed; UCX reports: {}",
                      fmt::make_format_args(where, text));
}

StatusOr<UcxContext> MakeUcxContext(int ranks) {
  RETURN_IF_ERROR(OpenUcxLibrary());
  ucp_config_t* read = nullptr;
  RETURN_IF_ERROR(UcxStatus("reading the UCX_* variables", Ucx().config_read(nullptr, nullptr, &read)));
  const std::unique_ptr<ucp_config_t, ConfigEnd> config(read);
  ApplySettings(config.get());
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_AM;
  params.estimated_num_eps = static_cast<size_t>(ranks);
  params.name = "moesaic";
  ucp_context_h context = nullptr;
  RETURN_IF_ERROR(
      UcxStatus("starting UCX (check UCX_TLS and UCX_NET_DEVICES)",
                Ucx().init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config.get(), &context)));
  return UcxContext(context);
}

StatusOr<UcxWorker> MakeUcxWorker(ucp_context_h context) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucp_worker_h worker = nullptr;
  RETURN_IF_ERROR(UcxStatus("starting a UCX worker", Ucx().worker_create(context, &params, &worker)));
  return UcxWorker(worker);
}

StatusOr<std::string> UcxAddress(ucp_worker_h worker) {
  ucp_address_t* address = nullptr;
  size_t length = 0;
  RETURN_IF_ERROR(
      UcxStatus("reading the address of a UCX worker", Ucx().worker_get_address(worker, &address, &length)));
  std::string copy(reinterpret_cast<const char*>(address), length);
  Ucx().worker_release_address(worker, address);
  return copy;
}

}  // namespace moesaic::comm
