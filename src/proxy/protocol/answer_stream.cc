#include "proxy/protocol/answer_stream.h"

#include <fmt/format.h>

#include "proxy/protocol/json_members.h"

namespace moesaic::proxy {
namespace {

// Returns usage of a response or chunk; false if it has none.
bool ReadUsage(const JsonMembers& answer, AnswerUsage* usage) {
  const JsonMember* member = answer.Find("usage");
  if (member == nullptr || member->type != JsonType::kObject) return false;
  const StatusOr<JsonMembers> fields = JsonMembers::Scan(answer.Text(*member));
  if (!fields.ok()) return false;
  usage->prompt_tokens = fields->Integer("prompt_tokens").value_or(usage->prompt_tokens);
  usage->completion_tokens = fields->Integer("completion_tokens").value_or(usage->completion_tokens);
  const JsonMember* details = fields->Find("prompt_tokens_details");
  if (details != nullptr && details->type == JsonType::kObject) {
    if (const auto inner = JsonMembers::Scan(fields->Text(*details)); inner.ok()) {
      usage->cached_tokens = inner->Integer("cached_tokens").value_or(usage->cached_tokens);
    }
  }
  return true;
}

std::string WithCachedTokens(const JsonMembers& answer, int64_t cached) {
  const auto fields = JsonMembers::Scan(answer.Value("usage"));
  if (!fields.ok()) return std::string(answer.text());
  std::string details = fmt::format(R"({{"cached_tokens":{}}})", cached);
  const JsonMember* old = fields->Find("prompt_tokens_details");
  if (old != nullptr && old->type == JsonType::kObject) {
    if (const auto inner = JsonMembers::Scan(fields->Text(*old)); inner.ok()) {
      JsonEdit edit(*inner);
      edit.Set("cached_tokens", std::to_string(cached));
      details = edit.Apply();
    }
  }
  JsonEdit usage(*fields);
  usage.Set("prompt_tokens_details", std::move(details));
  JsonEdit edit(answer);
  edit.Set("usage", usage.Apply());
  return edit.Apply();
}

bool IsBlank(std::string_view value) {
  return value.empty() || value == "null" || value == "\"\"" || value == "[]";
}

// Returns whether a chunk's choice carries text, reasoning, a tool call or token ids.
bool CarriesText(std::string_view choice) {
  const auto fields = JsonMembers::Scan(choice);
  if (!fields.ok()) return false;
  if (!IsBlank(fields->Value("text")) || !IsBlank(fields->Value("token_ids"))) return true;
  const JsonMember* delta = fields->Find("delta");
  if (delta == nullptr || delta->type != JsonType::kObject) return false;
  const auto inner = JsonMembers::Scan(fields->Text(*delta));
  if (!inner.ok()) return false;
  for (const JsonMember& member : inner->all()) {
    if (member.key != "role" && !IsBlank(inner->Text(member))) return true;
  }
  return false;
}

}  // namespace

StatusOr<PrefillAnswer> ReadPrefillAnswer(std::string_view json) {
  const StatusOr<JsonMembers> members = JsonMembers::Scan(json);
  if (!members.ok()) return Annotate(members.status(), "response of the prefill engine");
  PrefillAnswer answer;
  ReadUsage(*members, &answer.usage);
  const JsonMember* params = members->Find("kv_transfer_params");
  if (params != nullptr && params->type == JsonType::kObject) answer.transfer_params = members->Text(*params);
  return answer;
}

// Reads the JSON of an event or answer. `corrected` stays empty if its bytes are unchanged.
void AnswerStream::Correct(std::string_view json, std::string* corrected) {
  const StatusOr<JsonMembers> members = JsonMembers::Scan(json);
  if (!members.ok()) return;
  const bool usage = ReadUsage(*members, &usage_);
  bool any_choice = false;
  const JsonMember* choices = members->Find("choices");
  if (choices != nullptr && choices->type == JsonType::kArray) {
    if (const auto list = JsonMembers::Scan(members->Text(*choices)); list.ok()) {
      any_choice = !list->all().empty();
      bool text = false;
      for (const JsonMember& choice : list->all()) {
        text = CarriesText(list->Text(choice)) || text;
      }
      if (text || (any_choice && !options_.stream)) ++chunks_;
    }
  }
  if (usage && options_.cached_tokens && usage_.cached_tokens != *options_.cached_tokens) {
    usage_.cached_tokens = *options_.cached_tokens;
    *corrected = WithCachedTokens(*members, *options_.cached_tokens);
  }
}

// Passes one line, which ends with '\n' unless it is the last of the body.
void AnswerStream::Line(std::string_view line, std::string* out) {
  std::string_view content = line;
  while (content.ends_with('\n') || content.ends_with('\r')) content.remove_suffix(1);
  in_event_ = !content.empty();
  if (!content.starts_with("data:")) {
    out->append(line);
    return;
  }
  std::string_view json = content.substr(5);
  while (json.starts_with(' ')) json.remove_prefix(1);
  if (json == "[DONE]") {
    saw_end_ = true;
    out->append(line);
    return;
  }
  std::string corrected;
  Correct(json, &corrected);
  if (corrected.empty()) {
    out->append(line);
  } else {
    out->append(content.substr(0, content.size() - json.size()));
    out->append(corrected);
    out->append(line.substr(content.size()));
  }
}

void AnswerStream::Push(std::string_view bytes, std::string* out) {
  if (!options_.stream) {
    // Without a correction the bytes leave at once, and a copy is kept for the token counts.
    if (!options_.cached_tokens || passing_) out->append(bytes);
    if (passing_) return;
    held_.append(bytes);
    if (held_.size() > kMaxInspected) {
      if (options_.cached_tokens) out->append(held_);
      held_ = {};
      passing_ = true;
    }
    return;
  }
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    const std::string_view piece = bytes.substr(0, end == std::string_view::npos ? end : end + 1);
    bytes.remove_prefix(piece.size());
    if (passing_) {
      out->append(piece);
      passing_ = end == std::string_view::npos;
      in_event_ = true;
    } else if (end == std::string_view::npos) {
      held_.append(piece);
      if (held_.size() > kMaxInspected) {
        out->append(held_);
        held_ = {};
        passing_ = true;
      }
    } else if (held_.empty()) {
      Line(piece, out);
    } else {
      held_.append(piece);
      Line(held_, out);
      held_.clear();
    }
  }
}

void AnswerStream::Finish(std::string* out) {
  if (options_.stream) {
    if (!held_.empty()) Line(held_, out);
  } else if (!passing_) {
    std::string corrected;
    Correct(held_, &corrected);
    if (options_.cached_tokens) out->append(corrected.empty() ? held_ : corrected);
    saw_end_ = true;
  }
  held_ = {};
}

void AnswerStream::Abandon(std::string* out) {
  if (options_.stream && passing_) {
    out->append("\n\n");
  } else if (options_.stream && in_event_) {
    out->append("\n");
  }
  held_ = {};
  in_event_ = passing_ = false;
}

std::string ErrorBody(int status, std::string_view type, std::string_view message) {
  return fmt::format(R"({{"error":{{"message":{},"type":{},"param":null,"code":{}}}}})", JsonQuoted(message),
                     JsonQuoted(type), status);
}

std::string ErrorEvent(int status, std::string_view type, std::string_view message) {
  return "data: " + ErrorBody(status, type, message) + "\n\n";
}

}  // namespace moesaic::proxy
