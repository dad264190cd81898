#include "server/api_error.h"

#include <absl/strings/cord.h>

#include <nlohmann/json.hpp>

namespace moesaic::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kParam = "moesaic/param";
constexpr const char* kCode = "moesaic/code";
constexpr int kRetrySeconds = 1;

std::string Payload(const Status& status, const char* url) {
  const auto cord = status.GetPayload(url);
  return cord ? std::string(*cord) : "";
}

const char* AnthropicType(int http_status) {
  switch (http_status) {
    case 400:
      return "invalid_request_error";
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return http_status < 500 ? "invalid_request_error" : "api_error";
  }
}

}  // namespace

Status FieldError(const std::string& param, const std::string& code, const std::string& message) {
  Status status = InvalidArgument("{}", message);
  status.SetPayload(kParam, absl::Cord(param));
  status.SetPayload(kCode, absl::Cord(code));
  return status;
}

Status WithCode(Status status, const std::string& code) {
  status.SetPayload(kCode, absl::Cord(code));
  return status;
}

ApiError ErrorOf(const Status& status) {
  ApiError error;
  error.message = Message(status);
  error.param = Payload(status, kParam);
  error.code = Payload(status, kCode);
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kUnimplemented:
      error.http_status = 400;
      error.type = "invalid_request_error";
      break;
    case StatusCode::kNotFound:
      error.http_status = 404;
      error.type = "invalid_request_error";
      break;
    case StatusCode::kResourceExhausted:
      error.http_status = 429;
      error.type = "rate_limit_error";
      error.retry_after = kRetrySeconds;
      break;
    case StatusCode::kUnavailable:
      error.http_status = 503;
      error.type = "service_unavailable_error";
      error.retry_after = kRetrySeconds;
      break;
    default:
      break;
  }
  return error;
}

std::string ErrorJson(const ApiError& error, ApiStyle style) {
  Json json;
  if (style == ApiStyle::kAnthropic) {
    std::string message = error.message;
    if (!error.param.empty() && message.find(error.param) == std::string::npos) {
      message = error.param + ": " + message;
    }
    json = {{"type", "error"}, {"error", {{"type", AnthropicType(error.http_status)}, {"message", message}}}};
  } else {
    Json body = {{"message", error.message}, {"type", error.type}};
    body["param"] = error.param.empty() ? Json(nullptr) : Json(error.param);
    body["code"] = error.code.empty() ? Json(nullptr) : Json(error.code);
    json = {{"error", std::move(body)}};
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

HttpResponse ErrorResponse(const ApiError& error, ApiStyle style) {
  HttpResponse response{.status = error.http_status,
                        .headers = {{"content-type", "application/json"}},
                        .body = ErrorJson(error, style)};
  if (error.retry_after > 0) response.headers.emplace_back("retry-after", std::to_string(error.retry_after));
  if (error.http_status == 401) response.headers.emplace_back("www-authenticate", "Bearer");
  return response;
}

}  // namespace moesaic::server
