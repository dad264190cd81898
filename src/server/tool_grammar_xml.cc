#include "server/tool_grammar_xml.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "server/api_error.h"
#include "server/lark_terms.h"

namespace moesaic::server {
namespace {

// Texts that the model's template writes around the parts of a call.
struct XmlFrame {
  const char *section_open, *call_open, *behind_name;
  const char *key_open, *behind_key;
  const char *value_close, *behind_value;  // the mark that ends a value, and the text after it
  const char *call_close, *section_close;
  bool typed_keys = false;  // true if string="true" or "false" follows the key
};

std::optional<XmlFrame> XmlFrameOf(text::ToolFormat format) {
  switch (format) {
    case text::ToolFormat::kQwen3Coder:
      return XmlFrame{"",    "<tool_call>\n?<function=",   ">\n?", "<parameter=", ">\n?", "</parameter>",
                      "\n?", "</function>\n?</tool_call>", ""};
    case text::ToolFormat::kGlm4:
      return XmlFrame{"",    "<tool_call>",  "\n", "<arg_key>", "</arg_key>\n?<arg_value>", "</arg_value>",
                      "\n?", "</tool_call>", ""};
    case text::ToolFormat::kMiniMaxM2:
      return XmlFrame{"<minimax:tool_call>\n?",
                      "<invoke name=\"",
                      "\">\n?",
                      "<parameter name=\"",
                      "\">",
                      "</parameter>",
                      "\n?",
                      "</invoke>\n?",
                      "</minimax:tool_call>"};
    case text::ToolFormat::kDeepSeekV32:
      return XmlFrame{"<｜DSML｜function_calls>\n?",
                      "<｜DSML｜invoke name=\"",
                      "\">\n?",
                      "<｜DSML｜parameter name=\"",
                      "\">",
                      "</｜DSML｜parameter>",
                      "\n?",
                      "</｜DSML｜invoke>\n?",
                      "</｜DSML｜function_calls>",
                      /*typed_keys=*/true};
    default:
      return std::nullopt;
  }
}

// Points the references of `schema` to a copy of its document under "#/$defs/document". Returns true if it
// has any.
bool RebaseRefs(Json* schema) {
  bool has_refs = false;
  if (schema->is_array()) {
    for (Json& each : *schema) has_refs = RebaseRefs(&each) || has_refs;
  }
  if (!schema->is_object()) return has_refs;
  for (auto& [name, value] : schema->items()) {
    if (name == "$ref" && value.is_string()) {
      const auto& target = value.get_ref<const std::string&>();
      if (target != "#" && !target.starts_with("#/")) continue;
      value = "#/$defs/document" + target.substr(1);
      has_refs = true;
    } else if (name != "const" && name != "enum") {
      has_refs = RebaseRefs(&value) || has_refs;
    }
  }
  return has_refs;
}

bool IsString(const Json& schema) {
  return schema.is_object() && schema.contains("type") && schema["type"] == "string";
}

class XmlGrammar {
 public:
  XmlGrammar(const XmlFrame& frame, const LarkTerms& terms, size_t most_bytes)
      : frame_(frame), terms_(terms), most_bytes_(most_bytes) {}

  Status AddTool(const Json& function) {
    const auto& name = function["name"].get_ref<const std::string&>();
    const Json schema = ParametersOf(function);
    std::string body;
    const auto properties = schema.find("properties");
    if (properties != schema.end() && properties->is_object()) {
      for (const auto& [key, value] : properties->items()) {
        // The parser finds the end of a key by these characters.
        if (key.empty() || key.find_first_of("<>\"\r\n") != std::string::npos) {
          return FieldError(
              "tools", "invalid_value",
              fmt::format("Invalid 'tools': a call of '{}' cannot be forced, as the model's format "
                          "cannot hold the name of its parameter {}",
                          name, Dump(Json(key))));
        }
        body += fmt::format(" {}{}", AddParameter(key, value, schema), Required(schema, key) ? "" : "?");
        if (rules_.size() > most_bytes_) {
          return FieldError("tools", "invalid_value",
                            fmt::format("Invalid 'tools': the grammar of the tools' schemas has more than {} "
                                        "bytes, which is the most allowed",
                                        most_bytes_));
        }
      }
    }
    calls_ += fmt::format("{}call_{}", tools_ == 0 ? "" : " | ", tools_);
    rules_ += fmt::format("call_{}:{}{}{}{}\n", tools_, terms_.Of(frame_.call_open + name),
                          terms_.Of(frame_.behind_name), body, terms_.Of(frame_.call_close));
    ++tools_;
    return OkStatus();
  }

  std::string Text(bool several) const {
    // Templates write up to two line breaks before the first call.
    std::string text = "start: \"\\n\"? \"\\n\"?" + terms_.Of(frame_.section_open) + " call";
    if (several) text += " (\"\\n\"? call)*";
    return text + terms_.Of(frame_.section_close) + "\ncall: " + calls_ + "\n" + rules_;
  }

 private:
  static bool Required(const Json& schema, const std::string& key) {
    const auto required = schema.find("required");
    return required != schema.end() && required->is_array() &&
           std::find(required->begin(), required->end(), Json(key)) != required->end();
  }

  // Adds the rule of one argument and returns its name.
  std::string AddParameter(const std::string& key, const Json& schema, const Json& root) {
    const bool is_string = IsString(schema);
    std::string open = frame_.key_open + key;
    if (frame_.typed_keys) open += fmt::format("\" string=\"{}", is_string ? "true" : "false");
    std::string name = fmt::format("argument_{}", arguments_++);
    const std::string value = is_string ? AddText(name, schema) : AddJson(name, schema, root);
    rules_ += fmt::format("{}:{}{} {}{}\n", name, terms_.Of(open), terms_.Of(frame_.behind_key), value,
                          terms_.Of(frame_.behind_value));
    return name;
  }

  std::string AddJson(const std::string& name, const Json& schema, const Json& root) {
    Json whole = schema;
    if (RebaseRefs(&whole)) {
      Json document = root;
      RebaseRefs(&document);
      whole["$defs"] = {{"document", std::move(document)}};
    }
    rules_ += fmt::format("{}_value: %json {}\n", name, Dump(whole));
    return fmt::format("{}_value \"\\n\"?{}", name, terms_.Of(frame_.value_close));
  }

  std::string AddText(const std::string& name, const Json& schema) {
    if (const auto choices = schema.find("enum"); choices != schema.end() && choices->is_array()) {
      std::string literals;
      for (const Json& choice : *choices) {
        if (choice.is_string()) literals += (literals.empty() ? "" : " | ") + Dump(choice);
      }
      if (!literals.empty()) return fmt::format("({}) \"\\n\"?{}", literals, terms_.Of(frame_.value_close));
    }
    // The text ends before the closing mark: at a special token, or at the first letters of the mark.
    const auto [letters, rest] = terms_.SplitAtMark(frame_.value_close);
    const std::string suffix =
        letters.empty() ? "" : fmt::format("[suffix={}]", Dump(Json(std::string(letters))));
    rules_ += fmt::format("{}_text{}: /(?s:{})\\n?/\n", name, suffix, Letters(schema));
    return fmt::format("{}_text{}", name, terms_.Of(rest));
  }

  static std::string Letters(const Json& schema) {
    const auto bound = [&schema](const char* key) -> std::string {
      const auto found = schema.find(key);
      return found != schema.end() && found->is_number_unsigned() ? found->dump() : "";
    };
    const std::string least = bound("minLength"), most = bound("maxLength");
    if (least.empty() && most.empty()) return ".*";
    return fmt::format(".{{{},{}}}", least.empty() ? "0" : least, most);
  }

  const XmlFrame frame_;
  const LarkTerms& terms_;
  const size_t most_bytes_;
  std::string calls_, rules_;
  int tools_ = 0, arguments_ = 0;
};

}  // namespace

StatusOr<std::string> XmlToolGrammar(text::ToolFormat format, const text::Tokenizer& tokenizer,
                                     const Conversation& conversation, size_t most_bytes) {
  const std::optional<XmlFrame> frame = XmlFrameOf(format);
  if (!frame) {
    return Unimplemented("'tool_choice': a call cannot be forced with tool format '{}'", text::Name(format));
  }
  const LarkTerms terms(tokenizer, format);
  XmlGrammar grammar(*frame, terms, most_bytes);
  for (const Json& tool : conversation.tools) {
    const Json& function = tool["function"];
    if (!MayCall(conversation, function["name"].get_ref<const std::string&>())) continue;
    RETURN_IF_ERROR(grammar.AddTool(function));
  }
  return grammar.Text(MayCallSeveral(conversation));
}

}  // namespace moesaic::server
