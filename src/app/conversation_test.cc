#include "app/conversation.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace moesaic::app {
namespace {

std::string Transcript(const Conversation& conversation) {
  std::string transcript;
  for (const auto& message : conversation.messages()) transcript += message.role[0] + message.content + " ";
  return transcript;
}

Conversation Sample() {
  Conversation conversation("be brief");
  conversation.Add("user", "1");
  conversation.Add("assistant", "one");
  conversation.Add("user", "2");
  conversation.Add("assistant", "two");
  return conversation;
}

TEST(ConversationTest, DropsTurnsFromEitherEnd) {
  Conversation conversation = Sample();
  EXPECT_TRUE(conversation.DropAnswer());
  EXPECT_FALSE(conversation.DropAnswer());
  EXPECT_EQ(Transcript(conversation), "u1 aone u2 ");
  EXPECT_TRUE(conversation.DropOldest());
  EXPECT_EQ(Transcript(conversation), "u2 ");
  EXPECT_FALSE(conversation.DropOldest());
  conversation.DropQuestion();
  EXPECT_EQ(Transcript(conversation), "");
}

TEST(ConversationTest, SavesAndLoads) {
  const std::string path = testing::TempDir() + "conversation.json";
  ASSERT_TRUE(Sample().Save(path).ok());
  Conversation loaded("");
  ASSERT_TRUE(loaded.Load(path).ok());
  EXPECT_EQ(Transcript(loaded), Transcript(Sample()));
  EXPECT_EQ(loaded.system(), "be brief");
  std::filesystem::remove(path);
}

TEST(ConversationTest, LoadingAFaultyFileChangesNothing) {
  const std::string path = testing::TempDir() + "faulty.json";
  for (const char* text : {"", "[]", "{\"messages\": 3}", "{\"messages\": [{\"role\": \"user\"}]}"}) {
    std::ofstream(path) << text;
    Conversation conversation = Sample();
    EXPECT_FALSE(conversation.Load(path).ok()) << text;
    EXPECT_EQ(Transcript(conversation), Transcript(Sample()));
  }
  std::filesystem::remove(path);
}

TEST(ConversationTest, RendersThroughTheTemplate) {
  const auto chat = text::ChatTemplate::FromSource(
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt "
      "%}<assistant>{% "
      "endif %}");
  ASSERT_TRUE(chat.ok()) << chat.status();
  Conversation conversation("be brief");
  conversation.Add("user", "2+2?");
  EXPECT_EQ(*conversation.Render(*chat), "<system>be brief<user>2+2?<assistant>");
}

}  // namespace
}  // namespace moesaic::app
