#include "app/chat_completion.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "app/sampling_flags.h"
#include "app/utf8.h"

namespace moesaic::app {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(ChatCompletion, CompletesCommandsAndParameters) {
  EXPECT_THAT(CompleteChat("/s").candidates, ElementsAre("/save", "/set", "/stats", "/system"));
  EXPECT_THAT(CompleteChat("/reg").candidates, ElementsAre("/regenerate"));
  const Completion set = CompleteChat("/set  top");
  EXPECT_EQ(set.begin, 6U);
  EXPECT_THAT(set.candidates, ElementsAre("top_k", "top_p"));
  for (const char* line : {"", "hello", "hello /s", "/nothing", "/set top_k 4", "/system s", "/help "}) {
    EXPECT_THAT(CompleteChat(line).candidates, IsEmpty()) << line;
  }
}

TEST(ChatCompletion, EveryParameterCanBeSet) {
  for (const std::string& name : CompleteChat("/set ").candidates) {
    engine::SamplingParams sampling;
    EXPECT_TRUE(SetSampling(name, "1", &sampling).ok()) << name;
  }
}

TEST(ChatCompletion, CompletesFilesAndFolders) {
  std::string folder = testing::TempDir() + "completion_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::filesystem::create_directory(folder + "/talks");
  std::ofstream(folder + "/talk one.json") << "{}";
  std::ofstream(folder + "/.hidden") << "";
  const Completion found = CompleteChat("/load " + folder + "/ta");
  EXPECT_EQ(found.begin, 6U);
  EXPECT_THAT(found.candidates, ElementsAre(folder + "/talk one.json", folder + "/talks/"));
  EXPECT_THAT(CompleteChat("/save " + folder + "/").candidates,
              ElementsAre(folder + "/talk one.json", folder + "/talks/"));
  EXPECT_THAT(CompleteChat("/load " + folder + "/none/x").candidates, IsEmpty());
  std::filesystem::remove_all(folder);
}

TEST(Utf8, RoundTripsThroughWideCharacters) {
  const std::string text = "a\u00e4\u20ac\U0001F600\n";
  const std::wstring wide = FromUtf8(text);
  EXPECT_EQ(wide.size(), 5U);
  EXPECT_EQ(ToUtf8(wide), text);
  EXPECT_EQ(ToUtf8(FromUtf8("a\x80 \xc0\xaf \xed\xa0\x80 \xff")), "a\uFFFD \uFFFD\uFFFD \uFFFD \uFFFD");
  EXPECT_EQ(ToUtf8(FromUtf8("\xe2\x82"
                            "a")),
            "a");  // incomplete, then another character
}

}  // namespace
}  // namespace moesaic::app
