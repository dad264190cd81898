// The structure module against a PyTorch transcription, on every instruction set.
#include <gtest/gtest.h>

#include "science/structure_module.h"
#include "science/test_goldens.h"

namespace moesaic::science {
namespace {

constexpr InvariantPointOptions kPoints = {.heads = 3, .dim = 5, .query_points = 4, .value_points = 6};
constexpr int kBlocks = 3;

class StructureTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::unique_ptr<graph::Workspace> workspace_ = graph::MakeWorkspace(GetParam(), 2);
  graph::Context ctx_ = workspace_->context();
  Goldens goldens_{"structure"};
  WeightMap weights_ = goldens_.Weights("weights.");
  std::vector<float> single_ = goldens_.Floats("single"), pair_ = goldens_.Floats("pair"),
                     mask_ = goldens_.Floats("mask");
  std::vector<int32_t> types_ = goldens_.Ints("types");
  int64_t n_ = static_cast<int64_t>(types_.size());

  StructureModule Load() const { return *StructureModule::Load(WeightScope(weights_), kPoints, kBlocks); }
};
INSTANTIATE_TEST_SUITE_P(Isa, StructureTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

// The last residue is padding, whose row is undefined in the published program.
std::vector<float> WithoutPadding(const std::vector<float>& x, int64_t blocks, int64_t residues) {
  const int64_t width = static_cast<int64_t>(x.size()) / (blocks * residues);
  std::vector<float> kept;
  for (int64_t b = 0; b < blocks; ++b) {
    const auto begin = x.begin() + b * residues * width;
    kept.insert(kept.end(), begin, begin + (residues - 1) * width);
  }
  return kept;
}

TEST_P(StructureTest, MatchesPyTorch) {
  const StructureModule module = Load();
  std::vector<float> frames(kBlocks * n_ * 7), angles(kBlocks * n_ * 14), unnormalized(kBlocks * n_ * 14),
      groups(kBlocks * n_ * 128), positions(kBlocks * n_ * 42), single(single_.size());
  ASSERT_TRUE(module
                  .Run(ctx_, n_, single_.data(), pair_.data(), types_.data(), mask_.data(),
                       {frames.data(), angles.data(), unnormalized.data(), groups.data(), positions.data(),
                        single.data()})
                  .ok());
  auto expect = [&](const char* name, const std::vector<float>& got, int64_t blocks) {
    // Three iterations of six layers each, with the error of one layer.
    constexpr float kTolerance = 18 * 1e-5F;
    ExpectClose(WithoutPadding(got, blocks, n_),
                WithoutPadding(goldens_.Floats(std::string("out.") + name), blocks, n_), kTolerance, name);
  };
  expect("frames", frames, kBlocks);
  expect("angles", angles, kBlocks);
  expect("unnormalized", unnormalized, kBlocks);
  expect("groups", groups, kBlocks);
  expect("positions", positions, kBlocks);
  expect("single", single, 1);
}

TEST_P(StructureTest, DoesNotDependOnThreads) {
  const StructureModule module = Load();
  std::vector<float> first;
  for (const int threads : {1, 3}) {
    const auto workspace = graph::MakeWorkspace(GetParam(), threads);
    std::vector<float> frames(kBlocks * n_ * 7), angles(kBlocks * n_ * 14), unnormalized(kBlocks * n_ * 14),
        groups(kBlocks * n_ * 128), positions(kBlocks * n_ * 42), single(single_.size());
    ASSERT_TRUE(module
                    .Run(workspace->context(), n_, single_.data(), pair_.data(), types_.data(), mask_.data(),
                         {frames.data(), angles.data(), unnormalized.data(), groups.data(), positions.data(),
                          single.data()})
                    .ok());
    for (const auto* part : {&angles, &unnormalized, &groups, &positions, &single})
      frames.insert(frames.end(), part->begin(), part->end());
    if (threads == 1) first = frames;
    EXPECT_EQ(frames, first);
  }
}

// One residue attends to itself alone, as does the first of two of which the second is padding.
TEST_P(StructureTest, RunsOnOneResidueAndOnNone) {
  const StructureModule module = Load();
  const std::vector<float> pair = FirstTwo(pair_, n_, module.c_z());
  const float mask[] = {1, 0};
  std::vector<float> frames[2], angles[2], positions[2];
  for (const int64_t n : {1, 2}) {
    frames[n - 1].resize(kBlocks * n * 7);
    angles[n - 1].resize(kBlocks * n * 14);
    positions[n - 1].resize(kBlocks * n * 42);
    ASSERT_TRUE(module
                    .Run(ctx_, n, single_.data(), n == 1 ? pair_.data() : pair.data(), types_.data(),
                         n == 1 ? nullptr : mask,
                         {.frames = frames[n - 1].data(),
                          .angles = angles[n - 1].data(),
                          .positions = positions[n - 1].data()})
                    .ok());
  }
  // Each side has the error of three iterations of six layers.
  constexpr float kTolerance = 2 * 18 * 1e-5F;
  ExpectClose(frames[0], WithoutPadding(frames[1], kBlocks, 2), kTolerance, "frames");
  ExpectClose(angles[0], WithoutPadding(angles[1], kBlocks, 2), kTolerance, "angles");
  ExpectClose(positions[0], WithoutPadding(positions[1], kBlocks, 2), kTolerance, "positions");
  EXPECT_TRUE(module.Run(ctx_, 0, nullptr, nullptr, nullptr, nullptr, {}).ok());
}

TEST_P(StructureTest, AtomsNeedGeometryAndTypes) {
  std::vector<float> positions(kBlocks * n_ * 42), frames(kBlocks * n_ * 7);
  auto run = [&](const StructureModule& module, const int32_t* types, const StructureOutputs& out) {
    return moesaic::Message(module.Run(ctx_, n_, single_.data(), pair_.data(), types, mask_.data(), out));
  };
  const StructureModule module = Load();
  const StructureOutputs atoms{.positions = positions.data()};
  EXPECT_EQ(run(module, nullptr, atoms), "atoms need the types of the residues");
  types_[5] = 21;
  EXPECT_EQ(run(module, types_.data(), atoms), "types[5] must be in [0, 21), but is 21");
  weights_.erase("default_frames");
  const StructureModule frames_only = Load();
  EXPECT_EQ(
      run(frames_only, types_.data(), atoms),
      "atoms need the tensors default_frames, group_idx, atom_mask and lit_positions among the weights");
  EXPECT_TRUE(
      frames_only.Run(ctx_, n_, single_.data(), pair_.data(), nullptr, nullptr, {.frames = frames.data()})
          .ok());
}

TEST_P(StructureTest, GroupsOfAtomsAreChecked) {
  weights_["group_idx"].values[15] = 8;
  EXPECT_EQ(moesaic::Message(StructureModule::Load(WeightScope(weights_), kPoints).status()),
            "group_idx[1, 1] must be a rigid group in [0, 8), but is 8");
}

}  // namespace
}  // namespace moesaic::science
