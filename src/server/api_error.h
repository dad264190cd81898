// Maps failed statuses to errors of the OpenAI and Anthropic APIs.
#pragma once

#include <string>

#include "base/status.h"
#include "server/http.h"

namespace moesaic::server {

struct ApiError {
  int http_status = 500;
  std::string message;
  std::string type = "server_error";  ///< OpenAI's name of the kind of error
  std::string param = {};             ///< name of the wrong field, e.g. "messages[0].content", or empty
  std::string code = {};              ///< OpenAI's code, e.g. "invalid_type", or empty
  int retry_after = 0;                ///< seconds in the "retry-after" header; 0 omits it
};

/// The API whose form an error has.
enum class ApiStyle { kOpenAi, kAnthropic };

/// Returns InvalidArgument that names the field. `code` is OpenAI's, e.g. "invalid_type", "invalid_value".
Status FieldError(const std::string& param, const std::string& code, const std::string& message);

/// Returns `status` with a value for OpenAI's "code" in the answer.
Status WithCode(Status status, const std::string& code);

/// Maps a failed status to an error: InvalidArgument and Unimplemented to 400, NotFound to 404,
/// ResourceExhausted to 429, Unavailable to 503, all others to 500.
ApiError ErrorOf(const Status& status);

std::string ErrorJson(const ApiError& error, ApiStyle style);
HttpResponse ErrorResponse(const ApiError& error, ApiStyle style);

}  // namespace moesaic::server
