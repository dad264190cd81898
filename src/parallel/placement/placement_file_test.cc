#include "parallel/placement/placement_file.h"

#include <gtest/gtest.h>

#include "parallel/placement/damaged_bytes.h"
#include "parallel/placement/numpy_file.h"

namespace moesaic::parallel {
namespace {

const Placement kPlacement{4, {{{0, 1, 2}, {3, 0, 1}}, {{3, 2, 1}, {0, 1, 2}}}};

TEST(PlacementFile, EveryFormatIsReadBack) {
  for (const PlacementFormat format : {PlacementFormat::kMoesaic, PlacementFormat::kEplb,
                                       PlacementFormat::kSglang, PlacementFormat::kTensorRt}) {
    const auto bytes = PlacementBytes(kPlacement, format);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const auto again = ParsePlacement(*bytes, "file", 2);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->layers, kPlacement.layers);
  }
  const auto omni = ParsePlacement(*PlacementBytes(kPlacement, PlacementFormat::kOmni), "file", 0);
  ASSERT_TRUE(omni.ok()) << omni.status();  // has no order of slots
  EXPECT_EQ(omni->layers, (std::vector<LayerPlacement>{{{0, 1, 2}, {0, 1, 3}}, {{1, 2, 3}, {0, 1, 2}}}));
}

TEST(PlacementFile, TensorRtNamesLayersFromTheFirstMoeLayer) {
  EXPECT_EQ(*PlacementBytes(kPlacement, PlacementFormat::kTensorRt, 3),
            "num_slots: 6\ninitial_global_assignments:\n  3: [0, 1, 2, 3, 0, 1]\n  4: [3, 2, 1, 0, 1, 2]\n"
            "layer_updates_per_iter: 0\n");
}

// Rows of SGLang are decoder layers, so that the dense ones need rows, too.
TEST(PlacementFile, SglangCountsDenseLayers) {
  EXPECT_EQ(*PlacementBytes(kPlacement, PlacementFormat::kSglang),
            "{\"physical_to_logical_map\": [\n[0, 1, 2, 3, 0, 1],\n[3, 2, 1, 0, 1, 2]\n]}\n");
  EXPECT_EQ(*PlacementBytes(kPlacement, PlacementFormat::kSglang, 2),
            "{\"physical_to_logical_map\": [\n[0, 1, 2, 3, 0, 1],\n[0, 1, 2, 3, 0, 1],\n[0, 1, 2, 3, 0, 1],\n"
            "[3, 2, 1, 0, 1, 2]\n]}\n");
  for (const PlacementFormat format :
       {PlacementFormat::kMoesaic, PlacementFormat::kEplb, PlacementFormat::kOmni})
    EXPECT_EQ(PlacementBytes(kPlacement, format, 3).status().message(),
              "this format counts MoE layers only, so the first one is 0, found 3");
}

// A small file of ours, whose other forms would take 17 GB and more.
TEST(PlacementFile, RefusesFormsThatNeedTooMuchMemory) {
  constexpr int kExperts = 8192, kRanks = 8192;
  LayerPlacement layer(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) layer[rank] = {rank, rank == 0 ? 1 : 0};
  const Placement placement{kExperts, {layer}};
  EXPECT_EQ(
      PlacementBytes(placement, PlacementFormat::kOmni).status().message(),
      "OmniPlacement's format: ranks times layers times experts must be at most 33554432, found 8192 x 1 x "
      "8192");
  EXPECT_EQ(
      PlacementBytes(placement, PlacementFormat::kEplb).status().message(),
      "log2phy of 1 layers, 8192 experts and 8192 copies of an expert must have at most 33554432 values");
  for (const PlacementFormat format :
       {PlacementFormat::kMoesaic, PlacementFormat::kSglang, PlacementFormat::kTensorRt})
    EXPECT_TRUE(PlacementBytes(placement, format).ok());
}

// As zip programs do: another value of phy2log is not another placement.
TEST(PlacementFile, ChangedBytesOfANpzFileAreDetected) {
  std::string zip = *PlacementBytes(kPlacement, PlacementFormat::kEplb);
  const size_t data = zip.find("}", zip.find("NUMPY"));
  const size_t value = zip.find('\n', data) + 1;
  ASSERT_EQ(zip[value], 0);
  zip[value] = 3;
  EXPECT_EQ(ParsePlacement(zip, "f", 2).status().message(),
            "f: \"phy2log\" is damaged: its CRC-32 is not that of the directory");
}

// PyYAML 6.0 writes these three for {"num_slots": 4, "initial_global_assignments": {3: [0, 1, 1, 0], 4: [1,
// 0, 1, 0]}, "layer_updates_per_iter": 2}, with default_flow_style None, False, and None with width 8.
TEST(PlacementFile, ReadsTheYamlOfTensorRtTools) {
  for (const std::string text :
       {"initial_global_assignments:\n  3: [0, 1, 1, 0]\n  4: [1, 0, 1, 0]\nlayer_updates_per_iter: 2\n"
        "num_slots: 4\n",
        "initial_global_assignments:\n  3:\n  - 0\n  - 1\n  - 1\n  - 0\n  4:\n  - 1\n  - 0\n  - 1\n  - 0\n"
        "layer_updates_per_iter: 2\nnum_slots: 4\n",
        "initial_global_assignments:\n  3: [0, 1,\n    1, 0]\n  4: [1, 0,\n    1, "
        "0]\nlayer_updates_per_iter: 2\n"
        "num_slots: 4\n"}) {
    const auto placement = ParsePlacement(text, "f", 2);
    ASSERT_TRUE(placement.ok()) << placement.status();
    EXPECT_EQ(placement->layers, (std::vector<LayerPlacement>{{{0, 1}, {1, 0}}, {{1, 0}, {1, 0}}}));
  }
  const auto message = [](const std::string& text) {
    return std::string(ParsePlacement("initial_global_assignments:\n" + text, "f", 2).status().message());
  };
  EXPECT_EQ(message(""), "f: line 1: needs a layer under \"initial_global_assignments\"");
  EXPECT_EQ(message("  3: [0, 1\n"), "f: line 2: list without end");
  EXPECT_EQ(message("  3: [0, x]\n"), "f: line 2: expected an expert");
  EXPECT_EQ(message("  3: [0, 1]\n  3: [0, 1]\n"), "f: line 3: layer numbers must ascend");
  EXPECT_EQ(message("  3: [0, 1]\nnum_slots: 4\n"), "f: layer 3 must have 4 slots as \"num_slots\", found 2");
  EXPECT_EQ(message("  - 3\n"), "f: line 2: expected an expert");
  EXPECT_EQ(message("  layers\n"), "f: line 2: expected \"LAYER: [EXPERTS]\"");
}

TEST(PlacementFile, FormatsOfEqualSlotsRefuseUnequalOnes) {
  const Placement uneven{2, {{{0, 1}, {0}}}};
  EXPECT_EQ(PlacementBytes(uneven, PlacementFormat::kSglang).status().message(),
            "layer 0: this format needs 2 slots on every rank, found 1");
  EXPECT_TRUE(PlacementBytes(uneven, PlacementFormat::kMoesaic).ok());
  EXPECT_TRUE(PlacementBytes(uneven, PlacementFormat::kOmni).ok());
}

TEST(PlacementFile, DamagedFilesEndInAnErrorOrAValidPlacement) {
  std::vector<std::string> files;
  for (const PlacementFormat format :
       {PlacementFormat::kMoesaic, PlacementFormat::kEplb, PlacementFormat::kSglang, PlacementFormat::kOmni,
        PlacementFormat::kTensorRt})
    files.push_back(*PlacementBytes(kPlacement, format));
  int read = 0;
  for (uint64_t seed = 0; seed < 30000; ++seed) {
    Random random(seed);
    const std::string bytes = Damaged(files[seed % files.size()], random);
    const auto placement = ParsePlacement(bytes, "f", 2);
    if (placement.ok()) {
      ++read;
      ASSERT_EQ(placement->ranks(), 2) << seed;
      ASSERT_TRUE(CheckPlacement(*placement, "f", /*distinct=*/false).ok()) << seed;
      for (const PlacementFormat format : {PlacementFormat::kMoesaic, PlacementFormat::kEplb,
                                           PlacementFormat::kSglang, PlacementFormat::kTensorRt}) {
        const auto written = PlacementBytes(*placement, format);
        if (!written.ok()) continue;  // unequal slots
        ASSERT_EQ(ParsePlacement(*written, "again", 2)->layers, placement->layers) << seed;
      }
    } else {
      ASSERT_EQ(placement.status().message().substr(0, 2), "f:") << seed << placement.status();
    }
  }
  EXPECT_GT(read, 1000);
}

TEST(PlacementFile, NamesTheFaultOfBrokenFiles) {
  const auto message = [](const std::string& text) {
    return std::string(ParsePlacement(text, "f", 2).status().message());
  };
  EXPECT_EQ(message(R"({"physical_to_logical_map": [[0, 1, 2]]})"),
            "f: slots must be a multiple of the 2 ranks, found 3");
  EXPECT_EQ(message(R"({"physical_to_logical_map": [[0, 2]]})"),
            "f: layer 0: every expert needs a replica, found none of expert 1");
  EXPECT_EQ(message(R"({"format": "moesaic-placement", "version": 1, "experts": 1, "layers": [[[0], [5]]]})"),
            "f: layer 0: experts must be from 0 to 0, found 5");
  EXPECT_EQ(message(R"({"format": "moesaic-placement", "version": 1, "experts": 1, "layers": [[[0]]]})"),
            "f: must have the 2 ranks that were given, found 1");
  EXPECT_EQ(
      message(R"({"format": "moesaic-placement", "version": 1, "experts": 1, "layers": [[[0], [0.5]]]})"),
      "f: layer 0: experts must be from 0 to 0, found 0.5");
  EXPECT_EQ(message(R"({"format": "moesaic-placement", "version": 1, "experts": 1, "layers": [3]})"),
            "f: layer 0: must be a list of 1 to 65536 ranks, found 3");
  EXPECT_EQ(ParsePlacement(R"({"physical_to_logical_map": [[0]]})", "f", 0).status().message(),
            "f: files of this format do not tell the number of ranks; give it (--ranks)");
  EXPECT_EQ(message("PK"), "f: a placement is a .npz, .npy or YAML file, or a JSON object");
  const std::string zip = *PlacementBytes(kPlacement, PlacementFormat::kEplb);
  for (size_t bytes = 0; bytes < zip.size(); ++bytes)
    EXPECT_FALSE(ParsePlacement(zip.substr(0, bytes), "f", 2).ok());
}

}  // namespace
}  // namespace moesaic::parallel
