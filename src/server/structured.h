// What form an output must have: response_format and its like, and forced calls, as a grammar.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "server/chat_prompt.h"
#include "server/json_fields.h"
#include "server/served_model.h"
#include "text/grammar.h"

namespace moesaic::server {

struct GrammarText {
  text::GrammarKind kind = text::GrammarKind::kJsonSchema;
  std::string source;
  std::string param;  // the field it came from, for errors
};

/// Reads "response_format" and vLLM's "structured_outputs" and "guided_*"; none when the form is free.
std::optional<GrammarText> ReadStructured(Fields& body);

/// The grammar that forces calls, when `conversation` asks for that.
StatusOr<std::optional<GrammarText>> ForcedCalls(const ServedModel& model, const Conversation& conversation);

/// A schema as {"name", "schema", "strict"} or its like holds it.
std::optional<GrammarText> ReadSchema(Fields& holder);

/// Compiles it here and now, without the first mask. A refusal is GrammarRefused.
StatusOr<text::Grammar> CompileGrammar(const ServedModel& model, const GrammarText& grammar);

/// The client's error that names the field `param` and the reason `refusal`. Errors of the server, such as a
/// full queue, are returned as they are.
Status GrammarRefused(const std::string& param, const Status& refusal);

}  // namespace moesaic::server
