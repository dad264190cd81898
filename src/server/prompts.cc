#include "server/prompts.h"

#include <utility>

#include "server/api_error.h"

namespace moesaic::server {
namespace {

constexpr size_t kMaxPrompts = 256;

// Reads one prompt of token ids.
StatusOr<std::vector<int32_t>> ReadIds(const Json& ids, const std::string& path) {
  std::vector<int32_t> read;
  for (size_t i = 0; i < ids.size(); ++i) {
    const Json& id = ids[i];
    if (!id.is_number_integer()) return TypeError(fmt::format("{}[{}]", path, i), "an integer", id);
    const int64_t number = id.is_number_unsigned() && id.get<uint64_t>() > INT32_MAX ? -1 : id.get<int64_t>();
    if (number < 0 || number > INT32_MAX) {
      return FieldError(path, "invalid_value",
                        fmt::format("Invalid '{}': token ids, found {}", path, id.dump()));
    }
    read.push_back(static_cast<int32_t>(number));
  }
  return read;
}

}  // namespace

StatusOr<std::vector<std::vector<int32_t>>> ReadPrompts(const ServedModel& model, const Json& prompt,
                                                        const std::string& name, bool special) {
  std::vector<std::vector<int32_t>> prompts;
  const auto add_text = [&](const Json& text) -> Status {
    ASSIGN_OR_RETURN(auto ids, model.Encode(text.get_ref<const std::string&>(), special, name));
    prompts.push_back(std::move(ids));
    return OkStatus();
  };
  if (prompt.is_string()) {
    RETURN_IF_ERROR(add_text(prompt));
  } else if (prompt.is_array() && !prompt.empty() && prompt.front().is_number()) {
    ASSIGN_OR_RETURN(auto ids, ReadIds(prompt, name));
    prompts.push_back(std::move(ids));
  } else if (prompt.is_array()) {
    if (prompt.size() > kMaxPrompts) {
      return FieldError(
          name, "array_above_max_length",
          fmt::format("Invalid '{}': at most {} of them, found {}", name, kMaxPrompts, prompt.size()));
    }
    for (size_t i = 0; i < prompt.size(); ++i) {
      const std::string path = fmt::format("{}[{}]", name, i);
      if (prompt[i].is_string()) {
        RETURN_IF_ERROR(add_text(prompt[i]));
      } else if (prompt[i].is_array()) {
        ASSIGN_OR_RETURN(auto ids, ReadIds(prompt[i], path));
        prompts.push_back(std::move(ids));
      } else {
        return TypeError(path, "a string or an array of integers", prompt[i]);
      }
    }
  } else {
    return TypeError(name, "a string or an array", prompt);
  }
  for (const auto& ids : prompts) {
    if (ids.empty())
      return FieldError(name, "invalid_value", fmt::format("Invalid '{}': it has no tokens", name));
  }
  if (prompts.empty()) return FieldError(name, "empty_array", fmt::format("Invalid '{}': empty array", name));
  return prompts;
}

}  // namespace moesaic::server
