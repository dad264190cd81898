#include "quantizer/io/journal.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "checkpoint/test_files.h"
#include "quantizer/io/state_store.h"

namespace moesaic::quantizer {
namespace {

using ::testing::HasSubstr;

const nlohmann::ordered_json kHeader = {{"moesaic_quantize", 1}, {"settings", {{"scheme", "w8a8"}}}};

std::string Text(const checkpoint::TestFolder& folder) {
  std::ifstream in(folder.Path(kJournalFile), std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(JournalTest, NextRunReadsTheFinishedUnits) {
  const checkpoint::TestFolder folder;
  {
    const auto journal = *Journal::Open(folder.Path());
    EXPECT_TRUE(journal->header().is_null());
    ASSERT_TRUE(journal->Begin(kHeader).ok());
    ASSERT_TRUE(journal->Append({3, 0xfeedULL}, {{"file", "model.safetensors"}, {"offset", 8}}).ok());
    ASSERT_TRUE(journal->Append({1, ~uint64_t{0}}, nlohmann::ordered_json::object()).ok());
  }
  EXPECT_THAT(Text(folder),
              HasSubstr(R"({"unit":3,"file":"model.safetensors","offset":8,"xxh3":"000000000000feed"})"));
  const auto journal = *Journal::Open(folder.Path());
  EXPECT_EQ(journal->header(), kHeader);
  ASSERT_EQ(journal->entries().size(), 2U);
  EXPECT_EQ(journal->entries()[0].unit, 3U);
  EXPECT_EQ(journal->entries()[0].checksum, 0xfeedU);
  EXPECT_EQ(journal->entries()[1].checksum, ~uint64_t{0});
  ASSERT_TRUE(journal->Remove().ok());
  EXPECT_EQ(Text(folder), "");
}

// A killed writer may leave any part of its last line.
TEST(JournalTest, UnfinishedLastLineIsRemoved) {
  const std::string whole = kHeader.dump() + "\n{\"unit\":0,\"xxh3\":\"0000000000000001\"}\n";
  const std::string last = "{\"unit\":1,\"xxh3\":\"0000000000000002\"}\n";
  for (size_t cut = 0; cut < last.size(); ++cut) {
    const checkpoint::TestFolder folder;
    folder.Write(kJournalFile, whole + last.substr(0, cut));
    const auto journal = Journal::Open(folder.Path());
    ASSERT_TRUE(journal.ok()) << journal.status();
    EXPECT_EQ((*journal)->entries().size(), 1U);
    ASSERT_TRUE((*journal)->Append({1, 2}, nlohmann::ordered_json::object()).ok());
    EXPECT_EQ(Text(folder), whole + last);
  }
  const checkpoint::TestFolder folder;
  folder.Write(kJournalFile, kHeader.dump());
  EXPECT_TRUE((*Journal::Open(folder.Path()))->header().is_null());
}

// Why units have a journal and no state: a line costs the same for each unit and keeps the lines before it.
TEST(JournalTest, AUnitCostsOneLineWhereAStateIsRewritten) {
  constexpr size_t kUnits = 200;
  const checkpoint::TestFolder folder;
  const auto journal = *Journal::Open(folder.Path());
  ASSERT_TRUE(journal->Begin(kHeader).ok());
  StateStore store(folder.Path(), "units.state", kHeader, /*share=*/1);
  StateStore::Files files;
  nlohmann::ordered_json units = nlohmann::ordered_json::array();
  size_t lines = 0, states = 0;
  for (size_t unit = 0; unit < kUnits; ++unit) {
    const size_t before = Text(folder).size();
    ASSERT_TRUE(journal->Append({unit, unit}, nlohmann::ordered_json::object()).ok());
    const size_t added = Text(folder).size() - before;
    EXPECT_LE(added, 64U);
    lines += added;
    units.push_back({{"unit", unit}, {"xxh3", "0000000000000001"}});
    ASSERT_TRUE(store.Save({{"units", units}}, {}, {}, &files).ok());
    states += std::filesystem::file_size(folder.Path("units.state"));
  }
  EXPECT_GT(states, kUnits / 4 * lines);
  // A cut anywhere leaves the journal the lines before it, and a state nothing.
  const std::string text = Text(folder);
  std::filesystem::resize_file(folder.Path("units.state"), states / kUnits);
  EXPECT_FALSE(store.Load());
  const checkpoint::TestFolder cut;
  cut.Write(kJournalFile, text.substr(0, text.size() - 10));
  EXPECT_EQ((*Journal::Open(cut.Path()))->entries().size(), kUnits - 1);
}

TEST(JournalTest, RejectsFilesThatAreNotJournals) {
  for (const char* text :
       {"no json\n", "[1]\n", "{}\n{\"unit\":1}\n", "{}\n{\"unit\":-1,\"xxh3\":\"0000000000000002\"}\n",
        "{}\n{\"unit\":1,\"xxh3\":\"000000000000000g\"}\n"}) {
    const checkpoint::TestFolder folder;
    folder.Write(kJournalFile, text);
    EXPECT_EQ(Journal::Open(folder.Path()).status().code(), StatusCode::kDataLoss) << text;
  }
}

TEST(JournalTest, ErrorStatesTheNumberOfABadLine) {
  const std::string good = "{}\n{\"unit\":0,\"xxh3\":\"0000000000000001\"}\n";
  for (const auto& [line, expected] :
       {std::pair("{\"unit\":1}\n", "line 3 must hold \"unit\" and \"xxh3\", found {\"unit\":1}"),
        std::pair("no json\n", "line 3 is not a JSON object"),
        std::pair("[[[[[[\n", "line 3 is not a JSON")}) {
    const checkpoint::TestFolder folder;
    folder.Write(kJournalFile, good + line);
    EXPECT_THAT(Message(Journal::Open(folder.Path()).status()), HasSubstr(expected));
  }
  const checkpoint::TestFolder folder;
  folder.Write(kJournalFile, "[]\n");
  EXPECT_THAT(Message(Journal::Open(folder.Path()).status()), HasSubstr("line 1 is not a JSON object"));
}

TEST(JournalTest, ErrorNamesTheFirstDifferenceOfAnotherRun) {
  const checkpoint::TestFolder folder;
  const auto journal = *Journal::Open(folder.Path());
  ASSERT_TRUE(journal->Begin(kHeader).ok());
  EXPECT_TRUE(CheckSameRun(*journal, kHeader).ok());
  nlohmann::ordered_json other = kHeader;
  other["settings"]["scheme"] = "fp8";
  EXPECT_THAT(Message(CheckSameRun(*journal, other)),
              HasSubstr("started with another settings: {\"scheme\":\"w8a8\"} then, "
                        "{\"scheme\":\"fp8\"} now"));
  other = kHeader;
  other["source"] = "01";
  EXPECT_THAT(Message(CheckSameRun(*journal, other)), HasSubstr("another source: none then, \"01\" now"));
}

}  // namespace
}  // namespace moesaic::quantizer
