#include "base/status.h"

namespace moesaic {

Status FormatStatus(StatusCode code, fmt::string_view format, fmt::format_args args) {
  return Status(code, fmt::vformat(format, args));
}

Status Annotate(const Status& status, const std::string& where) {
  if (status.ok()) return status;
  return Status(status.code(), where + ": " + Message(status));
}

}  // namespace moesaic
