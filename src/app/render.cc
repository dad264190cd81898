// `moesaic render MODEL` prints the prompt that the model receives for a chat request.
#include "app/chat_request.h"
#include "app/input.h"
#include "app/model_text.h"
#include "app/output.h"
#include "app/session.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

struct RenderFlags {
  std::string model;
  std::string request = kStandardInput;
  bool no_generation_prompt = false;
};

Status RunRender(const RenderFlags& options) {
  ASSIGN_OR_RETURN(const std::string text, ReadInput(options.request));
  const StatusOr<server::Json> request = server::ParseJson(text);
  if (!request.ok() || !request->is_object() || !request->contains("messages") ||
      !(*request)["messages"].is_array()) {
    return InvalidArgument("{}: the request must be a JSON object with \"messages\": [...]",
                           InputName(options.request));
  }
  ASSIGN_OR_RETURN(const ModelText model, OpenModelText(options.model));
  RETURN_IF_ERROR(model.chat.status());
  const server::PromptTemplate chat(*model.chat);
  ASSIGN_OR_RETURN(const std::string prompt, RenderRequest(chat, *request, !options.no_generation_prompt));
  WriteOutput(prompt);
  return OkStatus();
}

}  // namespace

void AddRender(Verb& root, VerbRun& run) {
  auto options = std::make_shared<RenderFlags>();
  Verb verb = root.AddVerb("render", "Print the rendered prompt of a chat request");
  AddModelPath(verb, options->model);
  verb.AddOption("REQUEST", options->request, "File with an OpenAI chat request; -: standard input")
      .Check(CheckExistingInput)
      .ShowDefault();
  verb.AddFlag("--no-generation-prompt", options->no_generation_prompt, "End after the last message");
  verb.Footer(
      "The prompt is identical to that of `moesaic serve` for the request. It uses the request's messages,\n"
      "tools, tool_choice, documents, reasoning_effort, chat_template_kwargs, add_generation_prompt and\n"
      "continue_final_message.\n\n"
      "Example:\n"
      "  echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}' | moesaic render "
      "models/moesaic-tiny");
  verb.OnParsed([options, &run] { run = [options] { return RunRender(*options); }; });
}

}  // namespace moesaic::app
