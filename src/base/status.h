// Errors across rooms: absl::Status with messages that name the error, its location and the remedy.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <fmt/format.h>

#include <string>
#include <utility>

namespace moesaic {

using absl::Status;
using absl::StatusCode;
using absl::StatusOr;

inline Status OkStatus() { return absl::OkStatus(); }

/// Returns the message of `status` as a std::string. (absl::string_view is not std::string_view in every
/// distribution's build.)
inline std::string Message(const Status& status) { return std::string(status.message()); }

/// Returns a status whose message is the formatted text. The templates below check the format at compile time
/// and call this function, so that their many callers stay small.
Status FormatStatus(StatusCode code, fmt::string_view format, fmt::format_args args);

/// The user's input is wrong; the message ends with the wrong value.
template <typename... Args>
Status InvalidArgument(fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(StatusCode::kInvalidArgument, format, fmt::make_format_args(args...));
}

/// A requested file, tensor or option does not exist.
template <typename... Args>
Status NotFound(fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(StatusCode::kNotFound, format, fmt::make_format_args(args...));
}

/// The input is well formed but requests a feature that this build does not support.
template <typename... Args>
Status Unimplemented(fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(StatusCode::kUnimplemented, format, fmt::make_format_args(args...));
}

/// A file is damaged or truncated.
template <typename... Args>
Status DataLoss(fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(StatusCode::kDataLoss, format, fmt::make_format_args(args...));
}

/// Memory, blocks or another budget are exhausted.
template <typename... Args>
Status ResourceExhausted(fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(StatusCode::kResourceExhausted, format, fmt::make_format_args(args...));
}

/// The operating system returned an error (I/O error, permission, full disk).
template <typename... Args>
Status IoError(fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(StatusCode::kUnavailable, format, fmt::make_format_args(args...));
}

/// Work was cancelled on request.
template <typename... Args>
Status Cancelled(fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(StatusCode::kCancelled, format, fmt::make_format_args(args...));
}

/// Prefixes a failed status's message with `where`: "where: message".
Status Annotate(const Status& status, const std::string& where);

}  // namespace moesaic

#define MOESAIC_CONCAT_INNER(a, b) a##b
#define MOESAIC_CONCAT(a, b) MOESAIC_CONCAT_INNER(a, b)

/// Returns from the calling function when `expr` is a failed Status.
#define RETURN_IF_ERROR(expr)                                                                      \
  do {                                                                                             \
    if (::moesaic::Status moesaic_status_ = (expr); !moesaic_status_.ok()) return moesaic_status_; \
  } while (false)

/// Assigns the value of a StatusOr to `lhs`, or returns its status.
#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_IMPL(MOESAIC_CONCAT(moesaic_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr)                                          \
  auto tmp = (expr);                  /* NOLINT(bugprone-macro-parentheses): a name */ \
  if (!tmp.ok()) return tmp.status(); /* NOLINT(bugprone-macro-parentheses) */         \
  lhs = *std::move(tmp)               // NOLINT(bugprone-macro-parentheses): may be a declaration
