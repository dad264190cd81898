#include "server/catch_exceptions.h"

#include <spdlog/spdlog.h>

namespace moesaic::server {

Status Escaped(std::string_view what, std::string_view why) {
  spdlog::error("{}: an exception escaped: {}", what, why);
  return absl::InternalError("the server failed to process this request; its log has the reason");
}

}  // namespace moesaic::server
