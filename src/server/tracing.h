// Records spans of requests and prints them as a Chrome trace. W3C trace context connects them to the
// caller's trace.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::server {

/// The caller's trace and the server's span in it: https://www.w3.org/TR/trace-context.
struct TraceContext {
  std::string trace_id;   // 32 hexadecimal digits
  std::string parent_id;  // 16 hexadecimal digits, or empty when the trace begins here
  std::string span_id;    // 16 hexadecimal digits
  /// Returns the answer's header "00-<trace>-<span>-01".
  std::string Traceparent() const;
};

/// Reads a traceparent header. A missing or malformed one begins a new trace.
TraceContext ReadTraceparent(std::string_view header);

/// Returns `digits` random hexadecimal digits, not all zero.
std::string RandomHex(int digits);

/// Any thread may call all methods.
class Tracer {
 public:
  using Clock = std::chrono::steady_clock;
  struct Span {
    std::string name, trace_id, parent_id, span_id;
    uint64_t track = 0;  // row of the trace
    Clock::time_point start, end;
    std::string arguments_json;  // text of a JSON object
  };

  /// Stores the latest `capacity` spans.
  explicit Tracer(size_t capacity) : capacity_(capacity) {}
  void Add(Span span);
  /// Returns a JSON object for chrome://tracing and Perfetto. Times count from the construction of the
  /// tracer.
  std::string ChromeJson() const;

 private:
  const size_t capacity_;
  const Clock::time_point origin_ = Clock::now();
  mutable std::mutex mutex_;
  std::deque<Span> spans_;
};

}  // namespace moesaic::server
