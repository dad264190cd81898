#include "app/chat_request.h"

#include "server/chat_prompt.h"

namespace moesaic::app {

StatusOr<std::string> RenderRequest(const server::PromptTemplate& chat, const server::Json& request,
                                    bool add_generation_prompt) {
  server::Fields body(request, "");
  server::Conversation conversation = server::ReadConversation(body);
  RETURN_IF_ERROR(body.status());
  conversation.add_generation_prompt = conversation.add_generation_prompt && add_generation_prompt;
  return server::RenderText(chat, conversation);
}

}  // namespace moesaic::app
