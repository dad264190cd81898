// The fields of a request that say how to generate, whichever endpoint it came to.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

inline constexpr double kMostReturnSeconds = 1e9;  ///< of a session

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
  bool stream_usage = false;             // one last event with the usage
  bool stream_usage_continuous = false;  // and the usage so far in every event
  std::string cache_salt;
  engine::SessionNote session;
  int priority = 0;
  std::optional<engine::RequestSparsity> sparsity;  // absent: the engine's default
};

constexpr int kMaxLogprobs = 20;
constexpr int kMaxChoices = 128;

/// Reads what /v1/chat/completions, /v1/completions and the others share under the same names, beginning with
/// "model". Logprobs, max_tokens' other names and response_format are the endpoints' own.
GenerationFields ReadGeneration(Fields& body, const ServedModel& model);

/// How long the output may be: `asked`, or `otherwise`, and no more than the context has behind the prompt.
/// Refuses a prompt that fills the context.
StatusOr<int> OutputBudget(const ServedModel& model, size_t prompt, std::optional<int> asked, int otherwise,
                           const char* param);

}  // namespace moesaic::server
