// Collects metrics for Prometheus, under vLLM's names where vLLM has the same metric.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "kernels/kernel_table.h"

namespace moesaic::server {

/// Times and sizes of a choice that has ended. Times are in seconds.
struct ChoiceRecord {
  double queue = 0, prefill = 0, decode = 0, whole = 0;
  bool had_token = false;
  int64_t prompt_tokens = 0, output_tokens = 0, max_tokens = 0;
  std::string finish;  // "stop", "length", "deadline", "abort" or "error"
};

/// Gauges of the HTTP server at the time of reading.
struct HttpGauges {
  int64_t connections = 0, active_requests = 0;
  bool draining = false;
};

/// Counters, gauges and histograms of one server. A *choice* is one generated answer of a request. Any thread
/// may call all methods.
class Metrics {
 public:
  explicit Metrics(const std::string& model_name);
  ~Metrics();

  /// Counts a choice that has ended, and records its times and sizes.
  void Choice(const ChoiceRecord& record);
  /// Records the time from a choice's submission to its first token.
  void FirstToken(double seconds);
  /// Records the time between two tokens of a choice.
  void InterToken(double seconds);
  /// Counts a request that failed for `cause`: "grammar_refused" (before it began), "grammar", "model" or
  /// "engine".
  void Failed(const std::string& cause);
  /// Counts an HTTP answer and records its time.
  void Answered(const std::string& route, int status, double seconds);
  /// Reports the kernel that was selected for each operator, once at the start.
  void Kernels(const std::vector<kernels::KernelChoice>& choices);
  /// Reports the version and the model, once at the start.
  void Build(const std::string& version, const std::string& model_path);

  /// Returns all metrics in Prometheus' text format, version 0.0.4.
  std::string Text(const engine::EngineStats& engine, const HttpGauges& http);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::server
