// Errors as clients of the OpenAI and Anthropic APIs expect them.
#pragma once

#include <string>

#include "base/status.h"
#include "server/http.h"

namespace moesaic::server {

struct ApiError {
  int http_status = 500;
  std::string message;
  std::string type = "server_error";  ///< OpenAI's names
  std::string param = {};             ///< the field that is wrong, e.g. "messages[0].content"; may be empty
  std::string code = {};              ///< e.g. "invalid_type"; may be empty
  int retry_after = 0;                ///< seconds; 0: no such header
};

/// Whose shape an error has.
enum class ApiStyle { kOpenAi, kAnthropic };

/// InvalidArgument that names the field; `code` as OpenAI has it, e.g. "invalid_type", "invalid_value".
Status FieldError(const std::string& param, const std::string& code, const std::string& message);

/// `status` with OpenAI's "code" in the answer.
Status WithCode(Status status, const std::string& code);

/// What a failed status is to a client: InvalidArgument and Unimplemented 400, NotFound 404,
/// ResourceExhausted 429, Unavailable 503, all others 500.
ApiError ErrorOf(const Status& status);

std::string ErrorJson(const ApiError& error, ApiStyle style);
HttpResponse ErrorResponse(const ApiError& error, ApiStyle style);

}  // namespace moesaic::server
