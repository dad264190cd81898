#include "server/served_model.h"

#include <algorithm>

#include "server/api_error.h"

namespace moesaic::server {

namespace {

// A tokenizer may normalize text to Unicode's composed form, which has at least a third of the bytes.
constexpr size_t kComposed = 3;

}  // namespace

StatusOr<std::vector<int32_t>> ServedModel::Encode(std::string_view text, bool add_special,
                                                   const std::string& param) const {
  if (text.size() / (longest_token * kComposed) > static_cast<size_t>(max_context)) {
    return FieldError(
        param, "context_length_exceeded",
        fmt::format("This model's maximum context length is {} tokens. However, the text has {} bytes and "
                    "cannot fit. Please shorten it.",
                    max_context, text.size()));
  }
  return tokenizer.Encode(text, add_special);
}

size_t LongestToken(const text::Tokenizer& tokenizer) {
  size_t longest = 1;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    longest = std::max(longest, tokenizer.TokenBytes(id).size());
  }
  return longest;
}

Status ServedModel::CheckName(const std::string& name) const {
  if (name.empty() || std::find(names.begin(), names.end(), name) != names.end()) return OkStatus();
  Status status = NotFound("The model '{}' does not exist; this server has '{}'", name, names.front());
  const Status field = FieldError("model", "model_not_found", "");
  field.ForEachPayload([&status](auto url, const absl::Cord& payload) { status.SetPayload(url, payload); });
  return status;
}

}  // namespace moesaic::server
