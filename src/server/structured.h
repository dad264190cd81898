// Reads the form that an output must have, "response_format" or forced calls, as a grammar.
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
  std::string param;  // field of the request, for errors
};

/// Reads "response_format" and vLLM's "structured_outputs" and "guided_*". Returns nothing when the form is
/// free.
std::optional<GrammarText> ReadStructured(Fields& body);

/// Returns the grammar that forces calls, if `conversation` requires calls.
StatusOr<std::optional<GrammarText>> ForcedCalls(const ServedModel& model, const Conversation& conversation);

/// Reads the schema of an object such as {"name", "schema", "strict"}.
std::optional<GrammarText> ReadSchema(Fields& holder);

/// Compiles the grammar on this thread, without the first mask. A refusal is GrammarRefused.
StatusOr<text::Grammar> CompileGrammar(const ServedModel& model, const GrammarText& grammar);

/// Returns the client's error with the field `param` and the reason `refusal`. Returns errors of the server,
/// such as a full queue, unchanged.
Status GrammarRefused(const std::string& param, const Status& refusal);

}  // namespace moesaic::server
