#include "app/conversation.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace moesaic::app {
namespace {

std::string Told(const Conversation& conversation) {
  std::string told;
  for (const auto& message : conversation.messages()) told += message.role[0] + message.content + " ";
  return told;
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
  EXPECT_EQ(Told(conversation), "u1 aone u2 ");
  EXPECT_TRUE(conversation.DropOldest());
  EXPECT_EQ(Told(conversation), "u2 ");
  EXPECT_FALSE(conversation.DropOldest());
  conversation.DropQuestion();
  EXPECT_EQ(Told(conversation), "");
}

TEST(ConversationTest, SavesAndLoads) {
  const std::string path = testing::TempDir() + "conversation.json";
  ASSERT_TRUE(Sample().Save(path).ok());
  Conversation loaded("");
  ASSERT_TRUE(loaded.Load(path).ok());
  EXPECT_EQ(Told(loaded), Told(Sample()));
  EXPECT_EQ(loaded.system(), "be brief");
  std::filesystem::remove(path);
}

TEST(ConversationTest, LoadingAFaultyFileChangesNothing) {
  const std::string path = testing::TempDir() + "faulty.json";
  for (const char* text : {"", "[]", "{\"messages\": 3}", "{\"messages\": [{\"role\": \"user\"}]}"}) {
    std::ofstream(path) << text;
    Conversation conversation = Sample();
    EXPECT_FALSE(conversation.Load(path).ok()) << text;
    EXPECT_EQ(Told(conversation), Told(Sample()));
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
