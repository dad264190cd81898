// Fuzzes everything that reads bytes of clients and engines: bodies, answers and HTTP responses.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "proxy/protocol/answer_stream.h"
#include "proxy/protocol/request_body.h"
#include "proxy/protocol/response_reader.h"

namespace {

using namespace moesaic::proxy;  // NOLINT(google-build-using-namespace)

void Expect(bool condition) {
  if (!condition) std::abort();
}

// A value of a checked text has the same members whether it is checked again or not.
void CheckedValues(const JsonMembers& members) {
  for (const JsonMember& member : members.all()) {
    if (member.type != JsonType::kArray && member.type != JsonType::kObject) continue;
    const auto full = JsonMembers::Scan(members.Text(member)),
               quick = JsonMembers::Scan(members.Text(member), {.checked = true});
    Expect(full.ok() == quick.ok());
    if (!full.ok()) continue;  // too many members
    Expect(full->all().size() == quick->all().size());
    for (size_t i = 0; i < full->all().size(); ++i) {
      const JsonMember &a = full->all()[i], &b = quick->all()[i];
      Expect(a.key == b.key && a.type == b.type && a.value_begin == b.value_begin &&
             a.value_end == b.value_end);
    }
  }
}

// An edited body must be JSON again, with the value that was set and the values that were not.
void Bodies(std::string_view text) {
  for (const Endpoint endpoint : {Endpoint::kChat, Endpoint::kCompletions}) {
    const auto body = ReadRequestBody(endpoint, text);
    if (!body.ok()) continue;
    CheckedValues(body->members);
    PromptIds(*body);
    for (const Transfer transfer :
         {Transfer::kVllmNixl, Transfer::kVllmMooncake, Transfer::kSglang, Transfer::kAscend}) {
      const TransferPeers peers{.transfer = transfer, .transfer_id = "x"};
      for (const std::string& edited :
           {PrefillBody(*body, peers, "{}"), DecodeBody(*body, peers, "{\"a\":1}")}) {
        const auto again = JsonMembers::Scan(edited);
        Expect(again.ok());
        for (const JsonMember& member : body->members.all()) {
          if (member.key == "messages" || member.key == "temperature")
            Expect(again->Value(member.key) == body->members.Value(member.key));
        }
      }
    }
    const int32_t ids[] = {1, 2};
    if (CanForwardTokens(*body, Dialect::kSglang, true)) {
      const std::string list = IdList(ids);
      for (const Dialect dialect : {Dialect::kSglang, Dialect::kVllm})
        Expect(JsonMembers::Scan(AggregatedBody(*body, {dialect, list})).ok());
    }
  }
}

// Without a correction an answer passes unchanged, however it is cut.
void Answers(std::string_view text, size_t step) {
  AnswerStream stream({.stream = (step & 1) != 0});
  std::string out;
  for (size_t at = 0; at < text.size(); at += step) stream.Push(text.substr(at, step), &out);
  stream.Finish(&out);
  Expect(out == text);
  AnswerStream corrected({.stream = true, .cached_tokens = 1});
  out.clear();
  corrected.Push(text, &out);
  corrected.Finish(&out);
}

// The result does not depend on the cuts.
void Responses(std::string_view text, size_t step) {
  ResponseReader whole, pieces;
  std::string whole_body, pieces_body;
  const bool whole_ok = whole.Consume(text, &whole_body).ok();
  bool pieces_ok = true;
  for (size_t at = 0; pieces_ok && at < text.size(); at += step)
    pieces_ok = pieces.Consume(text.substr(at, step), &pieces_body).ok();
  Expect(whole_ok == pieces_ok);
  if (whole_ok)
    Expect(whole_body == pieces_body && whole.done() == pieces.done() && whole.status() == pieces.status());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t step = 1 + data[0] % 13;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  Bodies(text);
  Answers(text, step);
  Responses(text, step);
  (void)ReadPrefillAnswer(text).ok();
  return 0;
}
