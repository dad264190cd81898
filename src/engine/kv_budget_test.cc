#include "engine/kv_budget.h"

#include <gtest/gtest.h>

#include "runtime/topology.h"

namespace moesaic::engine {
namespace {

// 3 layers of 16 experts of 1,000 bytes.
models::ModelInfo ModelOfExperts() {
  models::ModelInfo info;
  info.experts = 16;
  info.moe_layers = 3;
  info.expert_bytes = 1000;
  info.weights_from = models::WeightSource::kPacked;
  return info;
}

EngineOptions OptionsOf(const parallel::Degrees& degrees, int redundant) {
  EngineOptions options;
  options.layout = *parallel::Layout::Create(degrees);
  options.layout.LetExpertsMove();
  options.balance.redundant = redundant;
  return options;
}

TEST(MoveBytes, HoldTheSecondBufferAndTheReplicasOfEveryLayer) {
  const models::ModelInfo info = ModelOfExperts();
  const EngineOptions plain = OptionsOf({.data = 4, .expert = 4}, 0);
  EXPECT_EQ(MoveBytes(info, plain), 4 * 1000) << "the buffer of a layer of 4 experts";
  const EngineOptions replicas = OptionsOf({.data = 4, .expert = 4}, 2);
  EXPECT_EQ(MoveBytes(info, replicas), (5 + 3 * 1) * 1000) << "18 slots on 4 ranks: 5 slots, 1 of them new";
  const EngineOptions stages = OptionsOf({.pipeline = 2, .data = 4, .expert = 4}, 2);
  EXPECT_EQ(MoveBytes(info, stages), (5 + 2 * 1) * 1000) << "a stage has at most 2 of the layers";
  const EngineOptions shards = OptionsOf({.tensor = 2, .data = 2, .expert = 4}, 2);
  EXPECT_EQ(MoveBytes(info, shards), MoveBytes(info, replicas)) << "4 ranks of a stage as well";
}

TEST(MoveBytes, HoldCopiesOfLayersWhoseFileStaysMapped) {
  const EngineOptions options = OptionsOf({.data = 4, .expert = 4}, 2);
  models::ModelInfo info = ModelOfExperts();
  for (const models::WeightSource source : {models::WeightSource::kMapped, models::WeightSource::kCopied}) {
    info.weights_from = source;
    EXPECT_EQ(MoveBytes(info, options), (5 + 3 * 5) * 1000) << models::ToString(source);
  }
}

TEST(MoveBytes, HoldTheBuffersOfExpertsThatAreSentForOneBatch) {
  const models::ModelInfo info = ModelOfExperts();
  EngineOptions options = OptionsOf({.data = 4, .expert = 4}, 2);
  const int64_t moves = MoveBytes(info, options);
  constexpr int64_t kBuffers = int64_t{parallel::kSpillBuffers} * parallel::kSpillSlots;
  options.layout.SetBatchSplit({.spill_bytes = 64 << 20});
  EXPECT_EQ(MoveBytes(info, options), moves + kBuffers * 1000);
  options.layout.SetBatchSplit({.exact = false, .spill_bytes = 64 << 20});
  EXPECT_EQ(MoveBytes(info, options), moves) << "fixed shares send no experts";
}

TEST(MoveBytes, AreZeroWhereExpertsStay) {
  EngineOptions options;
  options.layout = *parallel::Layout::Create({.data = 4, .expert = 4});
  options.balance.redundant = 2;
  EXPECT_EQ(MoveBytes(ModelOfExperts(), options), 0);
  EXPECT_EQ(MoveBytes({}, OptionsOf({.data = 4, .expert = 4}, 2)), 0) << "a dense model";
}

TEST(KvBudget, LeavesTheMemoryOfMovesFree) {
  if (runtime::AvailableMemory() <= 0) GTEST_SKIP() << "the free memory of this machine is unknown";
  const tensor::KvLayout layout =
      LayoutFor({.layers = 2, .heads = 2, .key_dim = 64, .value_dim = 64}, tensor::DType::kF32, false);
  EngineOptions options;
  options.max_sequences = 4;
  EXPECT_GT(KvBudget(layout, options, 4096, 0), 0);
  EXPECT_EQ(KvBudget(layout, options, 4096, int64_t{1} << 60), 0) << "moves take all memory";
  options.kv_bytes = 1 << 20;
  EXPECT_EQ(KvBudget(layout, options, 4096, int64_t{1} << 60), 1 << 20) << "a given size is kept";
}

}  // namespace
}  // namespace moesaic::engine
