#include "server/structured.h"

#include "server/api_error.h"
#include "server/schema_keywords.h"
#include "server/tool_grammar.h"

namespace moesaic::server {
namespace {

using text::GrammarKind;

constexpr const char* kAnyObject = R"({"type":"object"})";

// Reads a schema: an object, a boolean, or a string of JSON, which vLLM accepts.
std::optional<GrammarText> SchemaFrom(Fields& fields, const char* name) {
  const Json* schema = fields.Any(name);
  if (schema == nullptr) return std::nullopt;
  if (!schema->is_object() && !schema->is_string() && !schema->is_boolean()) {
    fields.FailType(name, "an object", *schema);
    return std::nullopt;
  }
  const std::string path = fields.Path(name);
  if (!schema->is_string()) {
    return GrammarText{GrammarKind::kJsonSchema, Dump(EnforceableSchema(*schema, path)), path};
  }
  const auto& text = schema->get_ref<const std::string&>();
  const StatusOr<Json> parsed = ParseJson(text);
  return GrammarText{GrammarKind::kJsonSchema, parsed.ok() ? Dump(EnforceableSchema(*parsed, path)) : text,
                     path};
}

std::optional<GrammarText> TextFrom(Fields& fields, const char* name, GrammarKind kind) {
  if (!fields.Has(name)) return std::nullopt;
  GrammarText grammar{kind, "", fields.Path(name)};
  fields.String(name, &grammar.source);
  return grammar;
}

std::optional<GrammarText> ChoiceFrom(Fields& fields, const char* name) {
  if (!fields.Has(name)) return std::nullopt;
  std::vector<std::string> choices;
  fields.Strings(name, 1000, &choices);
  if (fields.ok() && choices.empty())
    fields.Fail(name, "invalid_value", fmt::format("'{}' is empty", fields.Path(name)));
  std::string source = "start: ";
  for (size_t i = 0; i < choices.size(); ++i) source += (i == 0 ? "" : " | ") + Dump(Json(choices[i]));
  return GrammarText{GrammarKind::kLark, source, fields.Path(name)};
}

std::optional<GrammarText> AnyObjectFrom(Fields& fields, const char* name) {
  bool wanted = false;
  fields.Bool(name, &wanted);
  if (!wanted) return std::nullopt;
  return GrammarText{GrammarKind::kJsonSchema, kAnyObject, fields.Path(name)};
}

template <typename Found>
void Keep(std::optional<GrammarText>* kept, Found found, Fields& body) {
  if (!found) return;
  if (*kept && body.ok()) {
    return body.Merge(
        FieldError(found->param, "invalid_value",
                   fmt::format("'{}' and '{}' exclude each other", (*kept)->param, found->param)));
  }
  *kept = std::move(found);
}

std::optional<GrammarText> ReadResponseFormat(Fields& body) {
  const Json* object = body.Object("response_format");
  if (object == nullptr) return std::nullopt;
  Fields format(*object, "response_format");
  std::string type;
  format.String("type", &type);
  std::optional<GrammarText> grammar;
  if (type == "json_object") {
    grammar = GrammarText{GrammarKind::kJsonSchema, kAnyObject, "response_format"};
  } else if (type == "json_schema") {
    const Json* holder = format.Object("json_schema");
    if (format.ok() && holder == nullptr) {
      format.Fail("json_schema", "missing_required_parameter",
                  "Missing required parameter: 'response_format.json_schema'.");
    } else if (format.ok()) {
      Fields fields(*holder, "response_format.json_schema");
      grammar = ReadSchema(fields);
      format.Merge(fields.status());
    }
  } else if (type != "text" && format.ok()) {
    format.Fail(
        "type", "invalid_value",
        fmt::format("Invalid 'response_format.type': 'text', 'json_object' or 'json_schema', found '{}'",
                    type));
  }
  body.Merge(format.status());
  return grammar;
}

}  // namespace

std::optional<GrammarText> ReadSchema(Fields& holder) {
  auto schema = SchemaFrom(holder, "schema");
  if (!schema) return GrammarText{GrammarKind::kJsonSchema, kAnyObject, holder.Path("schema")};
  return schema;
}

std::optional<GrammarText> ReadStructured(Fields& body) {
  std::optional<GrammarText> grammar = ReadResponseFormat(body);
  Keep(&grammar, SchemaFrom(body, "guided_json"), body);
  Keep(&grammar, TextFrom(body, "guided_regex", GrammarKind::kRegex), body);
  Keep(&grammar, ChoiceFrom(body, "guided_choice"), body);
  Keep(&grammar, TextFrom(body, "guided_grammar", GrammarKind::kLark), body);
  if (const Json* object = body.Object("structured_outputs")) {
    Fields fields(*object, "structured_outputs");
    Keep(&grammar, SchemaFrom(fields, "json"), body);
    Keep(&grammar, TextFrom(fields, "regex", GrammarKind::kRegex), body);
    Keep(&grammar, ChoiceFrom(fields, "choice"), body);
    Keep(&grammar, TextFrom(fields, "grammar", GrammarKind::kLark), body);
    Keep(&grammar, AnyObjectFrom(fields, "json_object"), body);
    if (fields.Has("structural_tag")) {
      fields.Fail("structural_tag", "invalid_value", "'structured_outputs.structural_tag' is not supported");
    }
    body.Merge(fields.status());
  }
  return grammar;
}

StatusOr<std::optional<GrammarText>> ForcedCalls(const ServedModel& model, const Conversation& conversation) {
  if (conversation.tool_use != ToolUse::kRequired && conversation.tool_use != ToolUse::kNamed) {
    return std::optional<GrammarText>();
  }
  ASSIGN_OR_RETURN(std::string source, ToolGrammar(model.tools, model.tokenizer, conversation,
                                                   model.grammars.limits().schema_bytes));
  return std::optional<GrammarText>({GrammarKind::kToolCalls, std::move(source), "tools"});
}

StatusOr<text::Grammar> CompileGrammar(const ServedModel& model, const GrammarText& grammar) {
  StatusOr<text::Grammar> compiled = model.grammars.Compile(grammar.kind, grammar.source);
  if (!compiled.ok()) return GrammarRefused(grammar.param, compiled.status());
  return compiled;
}

Status GrammarRefused(const std::string& param, const Status& refusal) {
  if (refusal.code() != StatusCode::kInvalidArgument) return refusal;
  return FieldError(param, "invalid_value", fmt::format("Invalid '{}': {}", param, Message(refusal)));
}

}  // namespace moesaic::server
