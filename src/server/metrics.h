// What Prometheus reads: vLLM's names where they mean the same, and our own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "kernels/kernel_table.h"

namespace moesaic::server {

/// One choice's times and sizes at its end. Times in seconds.
struct ChoiceRecord {
  double queue = 0, prefill = 0, decode = 0, whole = 0;
  bool had_token = false;
  int64_t prompt_tokens = 0, output_tokens = 0, max_tokens = 0;
  std::string finish;  // "stop", "length", "deadline", "abort" or "error"
};

/// The HTTP side at the time of reading.
struct HttpGauges {
  int64_t connections = 0, active_requests = 0;
  bool draining = false;
};

/// Any thread.
class Metrics {
 public:
  explicit Metrics(const std::string& model_name);
  ~Metrics();

  void Choice(const ChoiceRecord& record);
  /// A choice's first token came so long after it was asked for.
  void FirstToken(double seconds);
  void InterToken(double seconds);
  /// A request failed for `cause`: "grammar_refused" (before it began), "grammar", "model" or "engine".
  void Failed(const std::string& cause);
  void Answered(const std::string& route, int status, double seconds);
  void Kernels(const std::vector<kernels::KernelChoice>& choices);
  void Build(const std::string& version, const std::string& model_path);

  /// The text format, version 0.0.4.
  std::string Text(const engine::EngineStats& engine, const HttpGauges& http);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::server
