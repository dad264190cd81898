// `moesaic render MODEL`: a chat request in, the prompt that the model would see out.
#include <nlohmann/json.hpp>

#include "app/input.h"
#include "app/model_text.h"
#include "app/output.h"
#include "app/session.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

using nlohmann::json;

struct Options {
  std::string model;
  std::string request = kStandardInput;
  bool no_generation_prompt = false;
};

Status RunRender(const Options& options) {
  ASSIGN_OR_RETURN(const std::string text, ReadInput(options.request));
  const json request = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!request.is_object() || !request.contains("messages") || !request["messages"].is_array()) {
    return InvalidArgument("{}: the request must be a JSON object with \"messages\": [...]",
                           InputName(options.request));
  }
  text::ChatInput input;
  input.messages_json = request["messages"].dump();
  if (request.contains("tools")) input.tools_json = request["tools"].dump();
  if (request.contains("documents")) input.documents_json = request["documents"].dump();
  if (request.contains("chat_template_kwargs")) input.variables_json = request["chat_template_kwargs"].dump();
  input.add_generation_prompt = !options.no_generation_prompt && request.value("add_generation_prompt", true);
  ASSIGN_OR_RETURN(const ModelText model, OpenModelText(options.model));
  RETURN_IF_ERROR(model.chat.status());
  ASSIGN_OR_RETURN(const std::string prompt, model.chat->Render(input));
  WriteOutput(prompt);
  return OkStatus();
}

}  // namespace

void AddRender(Verb& root, VerbRun& run) {
  auto options = std::make_shared<Options>();
  Verb verb = root.AddVerb("render", "Print the prompt that a chat request becomes");
  AddModelPath(verb, options->model);
  verb.AddOption("REQUEST", options->request, "File with an OpenAI chat request; -: standard input")
      .Check(CheckExistingInput)
      .ShowDefault();
  verb.AddFlag("--no-generation-prompt", options->no_generation_prompt, "End after the last message");
  verb.Footer(
      "The request's messages, tools, documents, chat_template_kwargs and add_generation_prompt are used.\n\n"
      "Example:\n"
      "  echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}' | moesaic render "
      "models/moesaic-tiny");
  verb.OnParsed([options, &run] { run = [options] { return RunRender(*options); }; });
}

}  // namespace moesaic::app
