// Where requests' time went: spans kept for a while, told as a Chrome trace, joined to callers by W3C trace
// context.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::server {

/// https://www.w3.org/TR/trace-context: the caller's trace, and our own span in it.
struct TraceContext {
  std::string trace_id;   // 32 hexadecimal digits
  std::string parent_id;  // 16, or empty when the trace begins here
  std::string span_id;    // 16
  /// "00-<trace>-<span>-01", for the answer.
  std::string Traceparent() const;
};

/// From a traceparent header; a missing or malformed one begins a new trace.
TraceContext ReadTraceparent(std::string_view header);

/// `digits` random hexadecimal digits, not all zero.
std::string RandomHex(int digits);

/// Any thread.
class Tracer {
 public:
  using Clock = std::chrono::steady_clock;
  struct Span {
    std::string name, trace_id, parent_id, span_id;
    uint64_t track = 0;  // spans of one track stand in one row
    Clock::time_point start, end;
    std::string arguments_json;  // an object
  };

  /// Keeps the latest `capacity` spans.
  explicit Tracer(size_t capacity) : capacity_(capacity) {}
  void Add(Span span);
  /// A JSON object for chrome://tracing and Perfetto; times since the tracer began.
  std::string ChromeJson() const;

 private:
  const size_t capacity_;
  const Clock::time_point origin_ = Clock::now();
  mutable std::mutex mutex_;
  std::deque<Span> spans_;
};

}  // namespace moesaic::server
