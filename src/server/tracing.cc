#include "server/tracing.h"

#include <fmt/format.h>

#include <random>

#include "server/json_fields.h"

namespace moesaic::server {
namespace {

bool IsHex(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}
bool IsZero(std::string_view text) { return text.find_first_not_of('0') == std::string_view::npos; }

}  // namespace

std::string RandomHex(int digits) {
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  std::string text;
  while (static_cast<int>(text.size()) < digits) text += fmt::format("{:016x}", random());
  text.resize(digits);
  if (IsZero(text)) text.back() = '1';
  return text;
}

std::string TraceContext::Traceparent() const { return fmt::format("00-{}-{}-01", trace_id, span_id); }

TraceContext ReadTraceparent(std::string_view header) {
  TraceContext context;
  context.span_id = RandomHex(16);
  // The form is version "-" trace-id "-" parent-id "-" flags. Later versions may append members.
  const bool shaped = header.size() >= 55 && header[2] == '-' && header[35] == '-' && header[52] == '-';
  if (shaped) {
    const std::string_view version = header.substr(0, 2), trace = header.substr(3, 32),
                           parent = header.substr(36, 16);
    const bool longer_ok = header.size() == 55 || (version != "00" && header[55] == '-');
    if (IsHex(version) && version != "ff" && IsHex(trace) && !IsZero(trace) && IsHex(parent) &&
        !IsZero(parent) && IsHex(header.substr(53, 2)) && longer_ok) {
      context.trace_id = trace;
      context.parent_id = parent;
      return context;
    }
  }
  context.trace_id = RandomHex(32);
  return context;
}

void Tracer::Add(Span span) {
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
  if (spans_.size() > capacity_) spans_.pop_front();
}

std::string Tracer::ChromeJson() const {
  Json events = Json::array();
  const auto micros = [this](Clock::time_point time) {
    return std::chrono::duration<double, std::micro>(time - origin_).count();
  };
  const std::lock_guard lock(mutex_);
  for (const Span& span : spans_) {
    Json arguments = Json::parse(span.arguments_json, nullptr, /*allow_exceptions=*/false);
    if (!arguments.is_object()) arguments = Json::object();
    arguments["trace_id"] = span.trace_id;
    arguments["span_id"] = span.span_id;
    if (!span.parent_id.empty()) arguments["parent_id"] = span.parent_id;
    events.push_back({{"name", span.name},
                      {"ph", "X"},
                      {"ts", micros(span.start)},
                      {"dur", std::chrono::duration<double, std::micro>(span.end - span.start).count()},
                      {"pid", 1},
                      {"tid", span.track},
                      {"args", std::move(arguments)}});
  }
  return Dump({{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}});
}

}  // namespace moesaic::server
