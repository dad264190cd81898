#include "app/serve_flags.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

namespace moesaic::app {
namespace {

using testing::HasSubstr;

class ServeFlagsTest : public testing::Test {
 protected:
  // Parses `words` after MODEL and keeps the output of --print-config.
  Status Parse(std::vector<std::string> words) {
    CLI::App app;
    Verb verb(&app);
    flags_ = ServeFlags();
    AddServeFlags(verb, flags_);
    words.insert(words.begin(), MOESAIC_SOURCE_DIR);
    std::reverse(words.begin(), words.end());
    app.parse(words);
    Status status = ReadConfigFile(verb, flags_);
    printed_ = PrintConfig(verb);
    return status;
  }

  std::string Write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  void TearDown() override { std::remove(path_.c_str()); }

  // Test cases may run concurrently.
  const std::string path_ = testing::TempDir() + "moesaic-" +
                            testing::UnitTest::GetInstance()->current_test_info()->name() + ".toml";
  ServeFlags flags_;
  std::string printed_;
};

TEST_F(ServeFlagsTest, PrintedConfigRoundTrips) {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {},
           {"--max-queue", "7", "--no-prefix-cache", "--kv-memory", "1GiB", "--served-model-name", "m"},
           {"--kv-disk", "kv blocks", "--kv-disk-size", "3GiB"},
           {"--served-model-name", "a # b", "\"c\\", "d's", "", "1,2", "--kv-events", "ipc:///tmp/#"}}) {
    ASSERT_TRUE(Parse(words).ok());
    const std::string printed = printed_;
    const ServeFlags flags = flags_;
    const Status status = Parse({"--config", Write(printed)});
    ASSERT_TRUE(status.ok()) << Message(status);
    EXPECT_EQ(printed_, printed);
    EXPECT_EQ(flags_.names, flags.names);
    EXPECT_EQ(flags_.max_queue, flags.max_queue);
    EXPECT_EQ(flags_.prefix_cache, flags.prefix_cache);
    EXPECT_EQ(flags_.kv_bytes, flags.kv_bytes);
    EXPECT_EQ(flags_.disk_folder, flags.disk_folder);
    EXPECT_EQ(flags_.disk_bytes, flags.disk_bytes);
    EXPECT_EQ(flags_.kv_events.endpoint, flags.kv_events.endpoint);
  }
}

TEST_F(ServeFlagsTest, SizesFitInSignedNumbers) {
  ASSERT_TRUE(Parse({"--kv-memory", "8589934591GiB"}).ok());
  EXPECT_EQ(flags_.kv_bytes, int64_t{8589934591} << 30);
  for (const auto& [size, reason] : std::initializer_list<std::pair<const char*, const char*>>{
           {"-1", "must not be negative, found -1"},
           {"-5GiB", "must not be negative, found -5GiB"},
           {"8589934592GiB", "must be below 8 EiB, found 9223372036854775808 bytes"}}) {
    for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
             {"--kv-memory", size}, {"--config", Write(fmt::format("kv-memory = \"{}\"\n", size))}}) {
      try {
        (void)Parse(words);
        FAIL() << size << " is accepted";
      } catch (const std::exception& error) {
        EXPECT_THAT(error.what(), HasSubstr(reason));
      }
    }
  }
}

TEST_F(ServeFlagsTest, CommandLineOverridesAndUnknownSettingsAreNamed) {
  ASSERT_TRUE(Parse({"--config", Write("max-queue = 3\nport = 9\n"), "--port", "10"}).ok());
  EXPECT_EQ(flags_.max_queue, 3);
  EXPECT_EQ(flags_.http.port, 10);
  EXPECT_EQ(Message(Parse({"--config", Write("max-queues = 3\n")})),
            path_ + ": unknown setting \"max-queues\"");
}

TEST_F(ServeFlagsTest, SizesOfALayoutOverrideThatOfTheFile) {
  const std::string text = "layout = \"tp=2,pp=2\"\n";
  ASSERT_TRUE(Parse({"--config", Write(text)}).ok());
  EXPECT_EQ(flags_.model.ranks.layout, "tp=2,pp=2");
  ASSERT_TRUE(Parse({"--config", Write(text), "--tensor-parallel-size", "4"}).ok());
  EXPECT_EQ(flags_.model.ranks.layout, "");
  EXPECT_EQ(flags_.model.ranks.degrees.tensor, 4);
  ASSERT_TRUE(Parse({"--config", Write("tensor-parallel-size = 4\n"), "--layout", "tp=2"}).ok());
  EXPECT_EQ(flags_.model.ranks.layout, "tp=2");
  EXPECT_EQ(flags_.model.ranks.degrees.tensor, 1);
}

TEST_F(ServeFlagsTest, RejectsTwoNamesOfOneSetting) {
  const std::string text = "draft-max = 3\nport = 9\nnum-speculative-tokens = 4\n";
  const std::string words =
      path_ + ": line 3: \"num-speculative-tokens\" was set as \"draft-max\" in line 1 already";
  EXPECT_EQ(Message(Parse({"--config", Write(text)})), words);
  EXPECT_EQ(Message(Parse({"--config", Write(text), "--draft-max", "5"})), words);
}

TEST_F(ServeFlagsTest, OnlyOffDisablesADraftModel) {
  const std::string model = std::string("speculative-model = '") + MOESAIC_SOURCE_DIR + "'\n";
  ASSERT_TRUE(Parse({}).ok());
  EXPECT_EQ(SpeculativeMethod(flags_.model), "off");
  ASSERT_TRUE(Parse({"--config", Write(model)}).ok());
  EXPECT_EQ(SpeculativeMethod(flags_.model), "draft");
  ASSERT_TRUE(Parse({"--config", Write(model), "--speculative", "off"}).ok());
  EXPECT_EQ(SpeculativeMethod(flags_.model), "off");
  ASSERT_TRUE(Parse({"--config", Write(model + "speculative = auto\n")}).ok());
  EXPECT_EQ(SpeculativeMethod(flags_.model), "auto");
}

TEST_F(ServeFlagsTest, FileValuesAreNotSplit) {
  ASSERT_TRUE(
      Parse({"--config", Write("api-key = \"a#b, c\"\nserved-model-name = 'C:\\models\\#1'  # ours\n")})
          .ok());
  EXPECT_EQ(flags_.keys.api_keys, std::vector<std::string>{"a#b, c"});
  EXPECT_EQ(flags_.names, std::vector<std::string>{"C:\\models\\#1"});
  EXPECT_EQ(Message(Parse({"--config", Write("port = 1\nhost = a b\n")})),
            path_ + ": line 2: a value with spaces, commas or brackets needs quotes: host");
}

TEST_F(ServeFlagsTest, AccessLogAcceptsModesAndFormerNames) {
  for (const auto& [line, mode] :
       std::vector<std::pair<const char*, const char*>>{{"access-log = false\n", "off"},
                                                        {"access-log = true\n", "no-health"},
                                                        {"access-log = all\n", "all"}}) {
    ASSERT_TRUE(Parse({"--config", Write(line)}).ok()) << line;
    EXPECT_EQ(flags_.log.access, mode);
  }
  ASSERT_TRUE(Parse({"--no-access-log"}).ok());
  EXPECT_TRUE(flags_.no_access_log);
}

TEST_F(ServeFlagsTest, AllowedHostMustBeAName) {
  ASSERT_TRUE(Parse({"--allowed-host", "a.example", "--allowed-host", "*"}).ok());
  EXPECT_EQ(flags_.router.browser.allowed_hosts, (std::vector<std::string>{"a.example", "*"}));
  EXPECT_THROW(static_cast<void>(Parse({"--allowed-host", "https://a.example/"})), CLI::ParseError);
}

TEST_F(ServeFlagsTest, RejectsEmptyKeysFromAllSources) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"--api-key", ""},
                                             {"--api-key", "", "--api-key", "real"},
                                             {"--api-key", "real", "--api-key", ""}}) {
    try {
      static_cast<void>(Parse(words));
      ADD_FAILURE() << "taken";
    } catch (const CLI::ParseError& error) {
      EXPECT_STREQ(error.what(), "--api-key: api-key is empty");
    }
  }
  for (const char* line :
       {"api-key = \"\"\n", "api-key =\n", "api-key = [\"\"]\n", "api-key = [\"real\", \"\"]\n"}) {
    EXPECT_EQ(Message(Parse({"--config", Write(line)})), path_ + ": --api-key: api-key is empty") << line;
  }
  ASSERT_EQ(setenv("MOESAIC_API_KEY", "", /*overwrite=*/1), 0);
  EXPECT_EQ(Message(Parse({})), "MOESAIC_API_KEY: api-key is empty");
  EXPECT_EQ(Message(Parse({"--config", Write("api-key = \"real\"\n")})), "MOESAIC_API_KEY: api-key is empty");
  EXPECT_TRUE(Parse({"--api-key", "real"}).ok());  // overrides the environment
  unsetenv("MOESAIC_API_KEY");
  EXPECT_EQ(flags_.keys.api_keys, std::vector<std::string>{"real"});
}

}  // namespace
}  // namespace moesaic::app
