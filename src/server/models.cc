#include "server/models.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <utility>

#include "base/percent.h"
#include "server/query.h"

namespace moesaic::server {
namespace {

constexpr std::string_view kPath = "/v1/models/";

bool IsAnthropic(const Call& call) { return !call.request.Header("anthropic-version").empty(); }

Json OpenAiModel(const ServedModel& model, const std::string& root, const std::string& name) {
  return {{"id", name},   {"object", "model"}, {"created", model.created},          {"owned_by", "moesaic"},
          {"root", root}, {"parent", nullptr}, {"max_model_len", model.max_context}};
}

Json AnthropicModel(const ServedModel& model, const std::string& name) {
  return {
      {"id", name},
      {"type", "model"},
      {"display_name", name},
      {"created_at", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(static_cast<time_t>(model.created)))},
      {"lifecycle", "active"},
      {"max_input_tokens", model.max_context},
      {"max_tokens", model.max_context}};
}

// Returns a page of at most "limit" names, after "after_id" or before "before_id".
StatusOr<Json> AnthropicList(const ServedModel& model, const std::string& query) {
  ASSIGN_OR_RETURN(const int limit, QueryInt(query, "limit", 1, 1000, 20));
  const std::string after = QueryValue(query, "after_id"), before = QueryValue(query, "before_id");
  auto first = model.names.begin(), last = model.names.end();
  if (!after.empty()) {
    first = std::find(first, last, after);
    if (first != last) ++first;
  }
  if (!before.empty()) last = std::find(first, last, before);
  const bool has_more = last - first > limit;
  if (has_more && before.empty()) last = first + limit;
  if (has_more && !before.empty()) first = last - limit;
  Json data = Json::array();
  for (auto name = first; name != last; ++name) data.push_back(AnthropicModel(model, *name));
  const Json first_id = first == last ? Json() : Json(*first);
  const Json last_id = first == last ? Json() : Json(*(last - 1));
  return Json{
      {"data", std::move(data)}, {"has_more", has_more}, {"first_id", first_id}, {"last_id", last_id}};
}

}  // namespace

Status ListModels(const ServedModel& model, const std::string& root, Call& call) {
  if (IsAnthropic(call)) {
    call.style = ApiStyle::kAnthropic;
    ASSIGN_OR_RETURN(const Json list, AnthropicList(model, call.request.query));
    SendJson(*call.writer, list);
    return OkStatus();
  }
  Json data = Json::array();
  for (const std::string& name : model.names) data.push_back(OpenAiModel(model, root, name));
  SendJson(*call.writer, {{"object", "list"}, {"data", std::move(data)}});
  return OkStatus();
}

Status GetModel(const ServedModel& model, const std::string& root, Call& call) {
  const std::string name = base::PercentDecoded(std::string_view(call.request.path).substr(kPath.size()));
  if (IsAnthropic(call)) call.style = ApiStyle::kAnthropic;
  RETURN_IF_ERROR(model.CheckName(name));
  SendJson(*call.writer, IsAnthropic(call) ? AnthropicModel(model, name) : OpenAiModel(model, root, name));
  return OkStatus();
}

}  // namespace moesaic::server
