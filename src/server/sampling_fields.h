// Reads the generation fields that the endpoints have in common.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

inline constexpr double kMaxReturnSeconds = 1e9;  ///< maximum of "returns_in" of a session

struct GenerationFields {
  engine::SamplingParams sampling;  // max_tokens is set by the endpoint
  std::optional<int> max_tokens;
  int n = 1;
  int best_of = 1;  // >= n
  std::vector<std::string> stop;
  bool include_stop = false;
  bool skip_special = true;
  bool return_token_ids = false;
  bool stream = false;
  bool stream_usage = false;             // true: the last event has the usage
  bool stream_usage_continuous = false;  // true: every event has the usage so far
  std::string cache_salt;
  engine::SessionNote session;
  int priority = 0;
  std::optional<engine::RequestSparsity> sparsity;  // the engine's default if absent
};

constexpr int kMaxLogprobs = 20;
constexpr int kMaxChoices = 128;

/// Reads the fields that /v1/chat/completions, /v1/completions and /v1/responses have under the same names,
/// beginning with "model". The endpoints read logprobs, other names of "max_tokens" and "response_format".
GenerationFields ReadGeneration(Fields& body, const ServedModel& model);

/// Reads a field of stop strings, whose number and length are limited.
void ReadStops(Fields& body, const char* name, std::vector<std::string>* stops);

/// Returns the maximum tokens of the output: `asked`, or `otherwise` where the request sets none, limited to
/// the context after the prompt. Refuses a prompt that fills the context, and an `asked` beyond it.
StatusOr<int> OutputBudget(const ServedModel& model, size_t prompt, std::optional<int> asked, int otherwise,
                           const char* param);

}  // namespace moesaic::server
