#include "comm/topology/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace moesaic::comm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Two nodes of 1 and 3 devices; the second has a faster card.
constexpr char kUneven[] = R"({
  "name": "uneven", "source": "made up",
  "devices": {"cpu": {"flops": {"f32": 1e12}, "memory_gb_per_s": 100, "memory_gb": 64}},
  "tree": {"level": "cluster", "link": {"latency_us": 20, "gb_per_s": 1},
           "children": [
             {"level": "node", "link": {"latency_us": 1, "gb_per_s": 10}, "children": [{"device": "cpu"}]},
             {"level": "node", "uplink": {"gb_per_s": 2.5},
              "link": {"latency_us": 2, "gb_per_s": 20, "duplex": "half", "shared": true},
              "children": [{"count": 3, "device": "cpu"}]}]}})";

Topology Uneven() { return Topology::Parse(kUneven, "uneven.json").value(); }

std::string Refusal(const std::string& from, const std::string& to) {
  std::string text = kUneven;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const auto parsed = Topology::Parse(text, "f.json");
  EXPECT_EQ(parsed.status().code(), StatusCode::kInvalidArgument) << text;
  return Message(parsed.status());
}

TEST(TopologyTest, ReadsDevicesGroupsAndPorts) {
  const Topology topology = Uneven();
  ASSERT_EQ(topology.ranks(), 4);
  EXPECT_EQ(topology.depth(), 2);
  EXPECT_EQ(topology.groups()[0].level, "cluster");
  EXPECT_THAT(topology.groups()[0].ranks, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(topology.groups()[topology.leaf(3)].name, "cluster/node 1/device 2");
  EXPECT_EQ(topology.device_type(2).flops.at("f32"), 1e12);
  EXPECT_EQ(topology.device_type(2).memory_bytes, 64e9);
}

TEST(TopologyTest, LatencyIsThatOfTheSmallestCommonGroup) {
  const Topology topology = Uneven();
  EXPECT_DOUBLE_EQ(topology.Latency(0, 1), 20e-6);
  EXPECT_DOUBLE_EQ(topology.Latency(2, 3), 2e-6);
  EXPECT_EQ(topology.Latency(2, 2), 0);
}

TEST(TopologyTest, BandwidthIsThatOfTheSlowestPort) {
  const Topology topology = Uneven();
  EXPECT_DOUBLE_EQ(topology.Bandwidth(0, 3), 1e9);
  EXPECT_DOUBLE_EQ(topology.Bandwidth(1, 3), 20e9);
  EXPECT_EQ(topology.Path(0, 3).size(), 4U) << "device, node, node, device";
  EXPECT_THAT(topology.Path(1, 1), ElementsAre());
}

TEST(TopologyTest, HalfDuplexPortsHaveOneChannel) {
  const Topology topology = Uneven();
  EXPECT_EQ(topology.Path(1, 2).front(), topology.Path(2, 1).back());
  EXPECT_NE(topology.Path(0, 1).front(), topology.Path(1, 0).back());
}

TEST(TopologyTest, PortsThatAreNotSharedBelongToDevices) {
  std::string text = kUneven;
  text.replace(text.find("\"gb_per_s\": 1}"), 14, "\"gb_per_s\": 1, \"shared\": false}");
  const Topology topology = Topology::Parse(text, "").value();
  EXPECT_NE(topology.Path(1, 0)[1], topology.Path(2, 0)[1]);
  EXPECT_EQ(Uneven().Path(1, 0)[1], Uneven().Path(2, 0)[1]);
}

TEST(TopologyTest, SelectionReordersRanksAndDropsEmptyGroups) {
  const Topology selected = Uneven().Selected(std::vector<int>{3, 1}).value();
  EXPECT_EQ(selected.ranks(), 2);
  EXPECT_DOUBLE_EQ(selected.Latency(0, 1), 2e-6);
  EXPECT_EQ(selected.groups()[0].children.size(), 1U);
  EXPECT_FALSE(Uneven().Selected(std::vector<int>{1, 1}).ok());
  EXPECT_FALSE(Uneven().Selected(std::vector<int>{4}).ok());
}

TEST(TopologyTest, WrittenFilesReadBackEqual) {
  const std::string text = Uneven().ToJson();
  const Topology again = Topology::Parse(text, "").value();
  EXPECT_EQ(again.ToJson(), text);
  EXPECT_THAT(text, HasSubstr("\"count\": 3"));
  EXPECT_DOUBLE_EQ(again.Bandwidth(1, 0), Uneven().Bandwidth(1, 0));
}

TEST(TopologyTest, MalformedFilesAreRefusedByPath) {
  EXPECT_THAT(
      Refusal("\"count\": 3", "\"count\": 0"),
      HasSubstr("f.json: tree.children[1].children[0].count: must be an integer in [1, 65536], found 0"));
  EXPECT_THAT(Refusal("\"count\": 3", "\"count\": 65536"), HasSubstr("at most 65536 devices"));
  EXPECT_THAT(Refusal("\"count\": 3", "\"cuont\": 3"), HasSubstr("has no member \"cuont\""));
  EXPECT_THAT(Refusal("\"gb_per_s\": 10", "\"gb_per_s\": -1"),
              HasSubstr("tree.children[0].link.gb_per_s: must be a positive number, found -1"));
  EXPECT_THAT(Refusal("\"gb_per_s\": 10", "\"gb_per_s\": \"fast\""), HasSubstr("found \"fast\""));
  EXPECT_THAT(Refusal("\"gb_per_s\": 10", "\"gb_per_s\": 1e999"), HasSubstr("f.json"));
  EXPECT_THAT(Refusal("[{\"device\": \"cpu\"}]", "[]"), HasSubstr("at least one group or device"));
  EXPECT_THAT(Refusal("[{\"device\": \"cpu\"}]", "[{\"device\": \"gpu\"}]"), HasSubstr("found \"gpu\""));
  EXPECT_THAT(Refusal("\"half\"", "\"both\""), HasSubstr("must be \"full\" or \"half\""));
  EXPECT_THAT(Refusal("\"shared\": true", "\"shared\": 1"), HasSubstr("must be true or false"));
  EXPECT_THAT(Refusal("\"latency_us\": 20, ", ""), HasSubstr("needs the member \"latency_us\""));
  EXPECT_THAT(Refusal("\"name\": \"uneven\", ", ""), HasSubstr("needs the member \"name\""));
  EXPECT_THAT(Refusal("\"devices\"", "\"device\""), HasSubstr("has no member \"device\""));
}

TEST(TopologyTest, OnlyLatencyMayBeZero) {
  std::string text = kUneven;
  text.replace(text.find("\"latency_us\": 20"), 16, "\"latency_us\": 0");
  EXPECT_EQ(Topology::Parse(text, "f.json")->Latency(0, 1), 0);
  EXPECT_THAT(Refusal("\"latency_us\": 20", "\"latency_us\": -1"),
              HasSubstr("must be a non-negative number, found -1"));
  EXPECT_THAT(Refusal("\"memory_gb\": 64", "\"memory_gb\": 0"),
              HasSubstr("must be a positive number, found 0"));
  const Topology flat = Topology::Flat(3, {.latency_s = 0, .bytes_per_s = 1e9});
  EXPECT_TRUE(Topology::Parse(flat.ToJson(), "flat").ok());
}

TEST(TopologyTest, DuplicateMembersOfAnObjectAreRefused) {
  EXPECT_THAT(Refusal("\"latency_us\": 20", "\"latency_us\": 20, \"latency_us\": 21"),
              HasSubstr("f.json: an object has the member \"latency_us\" twice"));
}

TEST(TopologyTest, ControlCharactersInNamesAreRefusedAndEscapedInMessages) {
  for (const char* character : {"\\u001b", "\\n", "\\u007f", "\\u009b"}) {
    const std::string name = std::string("\"a") + character + "[2Jb\"";
    for (const auto& [from, path] : {std::pair{"\"uneven\"", "the file.name"},
                                     {"\"made up\"", "the file.source"},
                                     {"\"cluster\"", "tree.level"},
                                     {"\"cpu\"", "devices"}}) {
      const std::string message = Refusal(from, name);
      EXPECT_THAT(message, HasSubstr(std::string("f.json: ") + path));
      EXPECT_THAT(message, HasSubstr(std::string("must have no control characters, found ") + name));
    }
  }
  EXPECT_THAT(Refusal("\"count\"", "\"c\\u001b\""), HasSubstr("has no member \"c\\u001b\""));
  EXPECT_THAT(Refusal("{\"device\": \"cpu\"}", "{\"device\": \"g\\u001bpu\"}"),
              HasSubstr("found \"g\\u001bpu\""));
  EXPECT_THAT(Refusal("\"count\": 3", "\"\\u001b\": 1, \"\\u001b\": 1"), HasSubstr("\"\\u001b\" twice"));
  EXPECT_TRUE(Topology::CheckName("Größe").ok());
  for (const char* name : {"", "a\nb", "\x1b[2J", "\xff"}) {
    EXPECT_EQ(Topology::CheckName(name).code(), StatusCode::kInvalidArgument) << name;
  }
  std::string text = kUneven;
  text.replace(text.find("uneven"), 6, "Größe \u00a0 2×4");
  EXPECT_EQ(Topology::Parse(text, "f.json")->name(), "Größe \u00a0 2×4");
}

TEST(TopologyTest, FilesThatWouldNeedMuchMemoryAreRefused) {
  EXPECT_THAT(Refusal("\"level\": \"cluster\"", "\"level\": \"" + std::string(65, 'x') + "\""),
              HasSubstr("at most 64 bytes"));
  EXPECT_THAT(Refusal("\"gb_per_s\": 10", "\"gb_per_s\": 1e-300"), HasSubstr("must be in"));
  // Each of 65,536 devices is in three groups of its own.
  std::string chain = "{\"device\": \"cpu\"}";
  for (int i = 0; i < 3; ++i) {
    chain = R"({"level": "g", "link": {"latency_us": 1, "gb_per_s": 1}, "children": [)" + chain + "]}";
  }
  chain.insert(1, "\"count\": 65536, ");
  EXPECT_THAT(Refusal("{\"device\": \"cpu\"}", chain), HasSubstr("at most 131072 groups"));
}

TEST(TopologyTest, WrittenNumbersAreThoseOfTheFile) {
  std::string text = kUneven;
  text.replace(text.find("\"latency_us\": 20"), 16, "\"latency_us\": 0.3");
  text.replace(text.find("\"gb_per_s\": 2.5"), 15, "\"gb_per_s\": 12.3");
  const std::string written = Topology::Parse(text, "")->ToJson();
  EXPECT_THAT(written, HasSubstr("\"latency_us\": 0.3,"));
  EXPECT_THAT(written, HasSubstr("\"gb_per_s\": 12.3\n"));
}

TEST(TopologyTest, DeepAndTruncatedFilesAreRefused) {
  const std::string text = kUneven;
  for (size_t size = 0; size < text.size() - 1; ++size) {
    EXPECT_FALSE(Topology::Parse(text.substr(0, size), "f.json").ok()) << size;
  }
  const std::string deep(100000, '[');
  EXPECT_THAT(Message(Topology::Parse(deep, "f.json").status()), HasSubstr("deeper than 16 levels"));
}

// The shipped files are valid, and reading what they are written as gives them again.
TEST(TopologyTest, ShippedFilesAreValid) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(MOESAIC_SOURCE_DIR) + "/topologies")) {
    if (entry.path().filename() == "schema.json" || entry.path().extension() != ".json") continue;
    std::ifstream in(entry.path());
    std::stringstream text;
    text << in.rdbuf();
    const auto topology = Topology::Parse(text.str(), entry.path().filename());
    ASSERT_TRUE(topology.ok()) << topology.status();
    EXPECT_EQ(Topology::Parse(topology->ToJson(), "again")->ToJson(), topology->ToJson());
    ++files;
  }
  EXPECT_GE(files, 6);
}

// aiconfigurator@095f58a5: systems/h100_sxm.yaml, and nccl_perf of NCCL 2.29.2, where an all_gather of 256
// halves on 2 devices takes 0.00531 ms.
TEST(TopologyTest, LinksOfTheH100FileAreThoseOfItsSources) {
  std::ifstream in(std::string(MOESAIC_SOURCE_DIR) + "/topologies/h100-2x8-infiniband.json");
  std::stringstream text;
  text << in.rdbuf();
  const auto topology = Topology::Parse(text.str(), "h100-2x8-infiniband.json");
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_NEAR(topology->Latency(0, 1), 5.31e-6, 0.05e-6);
  EXPECT_DOUBLE_EQ(topology->Bandwidth(0, 1), 450e9);
  EXPECT_DOUBLE_EQ(topology->Latency(0, 8), 10e-6);  // p2p_latency
  EXPECT_DOUBLE_EQ(topology->Bandwidth(0, 8), 50e9);
  EXPECT_THAT(topology->origin(), testing::AllOf(HasSubstr("p2p_latency"), HasSubstr("nccl/2.29.2")));
}

}  // namespace
}  // namespace moesaic::comm
