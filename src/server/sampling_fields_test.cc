// Tests the fields that announce later turns of a conversation.
#include "server/sampling_fields.h"

#include <gtest/gtest.h>

#include <limits>
#include <string_view>

#include "server/api_error.h"
#include "server/test_model.h"

namespace moesaic::server {
namespace {

using cache::Session;

constexpr int64_t kAllTokens = std::numeric_limits<int64_t>::max();

class SessionFields : public testing::Test {
 protected:
  // Returns the session note of a request with these members.
  engine::SessionNote NoteOf(std::string_view members) const {
    const Json body = *ParseJson(members);
    Fields fields(body, "");
    const GenerationFields read = ReadGeneration(fields, model_);
    EXPECT_TRUE(fields.ok()) << members << ": " << Message(fields.status());
    return read.session;
  }

  // Returns the name of the wrong field of a request with these members.
  std::string FaultOf(std::string_view members) const {
    const Json body = *ParseJson(members);
    Fields fields(body, "");
    ReadGeneration(fields, model_);
    EXPECT_FALSE(fields.ok()) << members;
    return ErrorOf(fields.status()).param;
  }

  void ExpectNote(std::string_view members, Session state, int64_t tokens, double returns_in) const {
    const engine::SessionNote note = NoteOf(members);
    EXPECT_EQ(note.state, state) << members;
    EXPECT_EQ(note.tokens, tokens) << members;
    EXPECT_EQ(note.returns_in, returns_in) << members;
  }

  const ServedModel model_ = TinyModel();
};

// Each choice has a copy of the strings.
TEST_F(SessionFields, LimitTheLengthOfStopStrings) {
  const auto stops = [](size_t bytes) {
    return Dump({{"stop", Json::array({"short", std::string(bytes, 'x')})}});
  };
  NoteOf(stops(1024));
  EXPECT_EQ(FaultOf(stops(1025)), "stop");
}

TEST_F(SessionFields, AreUnknownByDefault) {
  for (const char* members : {R"({})", R"({"session": null})", R"({"session": ""})",
                              R"({"prompt_cache_key": "", "prompt_cache_retention": "in_memory"})"}) {
    ExpectNote(members, Session::kNone, kAllTokens, 0);
  }
}

TEST_F(SessionFields, AcceptAString) {
  ExpectNote(R"({"session": "continues"})", Session::kContinues, kAllTokens, 0);
  ExpectNote(R"({"session": "ends"})", Session::kEnds, kAllTokens, 0);
}

TEST_F(SessionFields, AcceptAnObject) {
  ExpectNote(R"({"session": {"tokens": 5, "returns_in": 2}})", Session::kContinues, 5, 2);
  ExpectNote(R"({"session": {"state": "continues", "tokens": 0}})", Session::kContinues, 0, 0);
  ExpectNote(R"({"session": {"returns_in": 0.25}})", Session::kContinues, kAllTokens, 0.25);
  ExpectNote(R"({"session": {"state": "ends"}})", Session::kEnds, kAllTokens, 0);
}

TEST_F(SessionFields, TreatAnEmptyObjectAsAContinuedSession) {
  ExpectNote(R"({"session": {}})", Session::kContinues, kAllTokens, 0);
  ExpectNote(R"({"session": {"state": null, "tokens": null, "returns_in": null}})", Session::kContinues,
             kAllTokens, 0);
}

TEST_F(SessionFields, TreatPromptCacheFieldsOfOpenAiAsAContinuedSession) {
  ExpectNote(R"({"prompt_cache_key": "user-7"})", Session::kContinues, kAllTokens, 0);
  ExpectNote(R"({"prompt_cache_retention": "24h"})", Session::kContinues, kAllTokens, 0);
}

// "session" overrides OpenAI's fields.
TEST_F(SessionFields, OverridePromptCacheFieldsOfOpenAi) {
  ExpectNote(R"({"prompt_cache_key": "user-7", "session": {"tokens": 5, "returns_in": 2}})",
             Session::kContinues, 5, 2);
  ExpectNote(R"({"prompt_cache_key": "user-7", "session": {"state": "ends"}})", Session::kEnds, kAllTokens,
             0);
  ExpectNote(R"({"prompt_cache_key": "user-7", "session": {}})", Session::kContinues, kAllTokens, 0);
  ExpectNote(R"({"prompt_cache_retention": "24h", "session": "ends"})", Session::kEnds, kAllTokens, 0);
}

TEST_F(SessionFields, ErrorsNameTheField) {
  EXPECT_EQ(FaultOf(R"({"session": "over"})"), "session");
  EXPECT_EQ(FaultOf(R"({"session": ["ends"]})"), "session");
  EXPECT_EQ(FaultOf(R"({"session": {"state": "over"}})"), "session.state");
  EXPECT_EQ(FaultOf(R"({"session": {"state": 1}})"), "session.state");
  EXPECT_EQ(FaultOf(R"({"session": {"tokens": -1}})"), "session.tokens");
  EXPECT_EQ(FaultOf(R"({"session": {"tokens": 18446744073709551615}})"), "session.tokens");
  EXPECT_EQ(FaultOf(R"({"session": {"returns_in": -1}})"), "session.returns_in");
  EXPECT_EQ(FaultOf(R"({"session": {"returns_in": 1e10}})"), "session.returns_in");
  EXPECT_EQ(FaultOf(R"({"session": {"state": "ends", "tokens": 5}})"), "session.tokens");
  EXPECT_EQ(FaultOf(R"({"session": {"state": "ends", "returns_in": 2}})"), "session.returns_in");
  EXPECT_EQ(FaultOf(R"({"prompt_cache_key": 7})"), "prompt_cache_key");
}

}  // namespace
}  // namespace moesaic::server
