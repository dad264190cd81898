// Tests that a walk whose visitor rounds nothing computes what the model computes.
#include "quantizer/calibrate/layer_walk.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <array>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "models/test_session.h"
#include "models/weight_decl.h"
#include "models/weight_plan.h"
#include "quantizer/format/model_items.h"
#include "quantizer/format/runtime_matrix.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::Checkpoint;

// Keeps every linear in bf16 and records its inputs.
class Keeper : public LayerVisitor {
 public:
  Keeper(const Checkpoint& source, const kernels::ExecContext& ctx, std::vector<ModelItem> items)
      : source_(source), ctx_(ctx), items_(std::move(items)) {}

  StatusOr<std::vector<OwnedMatrix>> Visit(const LinearGroup& group) override {
    std::vector<OwnedMatrix> matrices;
    int64_t tokens = 0;
    EXPECT_LE(static_cast<int64_t>(ctx_.scratch->peak_bytes()), scratch_bytes) << group.modules.front();
    group.inputs.visit([&](const TokenRows& rows) {
      tokens += rows.count;
      EXPECT_EQ(rows.stride, group.inputs.k);
    });
    EXPECT_EQ(tokens, group.inputs.tokens) << group.modules.front();
    if (own_bytes > 0) {
      const size_t mark = ctx_.scratch->Mark();
      const void* first = ctx_.scratch->TakeBytes(1);  // location of the inputs
      ctx_.scratch->Rewind(mark);
      EXPECT_EQ(ctx_.scratch->TakeBytes(static_cast<size_t>(own_bytes)), first) << group.modules.front();
      ctx_.scratch->Rewind(mark);
    }
    for (const std::string& module : group.modules) {
      const auto item = std::ranges::find(items_, module, &ModelItem::name);
      EXPECT_NE(item, items_.end()) << module;
      EXPECT_EQ(item->shape[1], group.inputs.k) << module;
      EXPECT_GE(item - items_.begin(), last_) << module << " is visited out of order";
      last_ = item - items_.begin();
      ++visited;
      ASSIGN_OR_RETURN(RuntimeMatrix kept,
                       RuntimeMatrix::OfKept(tensor::DType::kBF16, static_cast<int>(item->shape[0]),
                                             static_cast<int>(item->shape[1])));
      RETURN_IF_ERROR(kept.ReadKept(*ctx_.pool, source_, module));
      matrices.push_back(kept.Take());
    }
    return matrices;
  }
  int64_t ScratchBytes(int) const override { return own_bytes; }
  Status OnRouting(int, std::span<const int64_t> tokens_of_expert) override {
    for (const int64_t tokens : tokens_of_expert) routed += tokens;
    return OkStatus();
  }

  size_t visited = 0;
  int64_t routed = 0, scratch_bytes = 0;
  int64_t own_bytes = 0;  // memory that each visit takes

 private:
  const Checkpoint& source_;
  const kernels::ExecContext& ctx_;
  std::vector<ModelItem> items_;
  int64_t last_ = 0;
};

// Tolerance relative to the root mean square: activations are rounded to bf16 on both sides, and sums have
// another order.
void ExpectNear(std::span<const float> got, std::span<const float> expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(double{got[i]} - expected[i], 2);
    size += std::pow(double{expected[i]}, 2);
  }
  EXPECT_LE(std::sqrt(error / size), 4e-3) << what;
}

class LayerWalkTest : public ::testing::TestWithParam<const char*> {};

TEST_P(LayerWalkTest, HiddenStatesEqualThoseOfTheModel) {
  const std::string path = models::SourcePath(std::string("tests/golden/") + GetParam());
  models::TestModel model(path, models::BestIsa(), {});
  ASSERT_TRUE(model.status().ok()) << model.status();
  const auto source = *Checkpoint::Open(path);
  models::DecoderSpec spec = *models::SpecFromConfig(source->config(), "config.json");
  models::DropAbsentMtp(*source, spec);
  const kernels::ExecContext ctx = model.context();

  std::vector<std::vector<int32_t>> sequences(3);
  int32_t id = 1;
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequences[i].resize(std::array{65, 7, 20}[i]);
    for (int32_t& token : sequences[i]) token = id = (id * 31 + 7) % spec.vocab;
  }
  CalibrationStream stream = *CalibrationStream::Create(*source, spec, sequences, ctx);
  const std::vector<ModelItem> items = *ListItems(*source);
  Keeper keeper(*source, ctx, items);
  const WalkScratch scratch = WalkScratchOf(spec, stream.tokens(), stream.longest(), stream.part_rows());
  keeper.scratch_bytes = std::max(scratch.attention, scratch.ffn);
  const auto walk = [&](int layer) {
    const Status status = WalkLayer(ctx, *source, spec, layer, nullptr, stream, keeper);
    ASSERT_TRUE(status.ok()) << status;
  };
  for (int layer = 0; layer < spec.layers; ++layer) walk(layer);

  const auto hidden = [&](const std::string& norm, int64_t row, int64_t rows) {
    const std::vector<float> weight = *source->ReadF32(norm, std::array<int64_t, 1>{spec.hidden});
    std::vector<float> out(static_cast<size_t>(rows * spec.hidden));
    kernels::RmsNorm(ctx, {.x = stream.hidden() + row * spec.hidden,
                           .x_stride = spec.hidden,
                           .weight = weight.data(),
                           .y = out.data(),
                           .y_stride = spec.hidden,
                           .rows = static_cast<int>(rows),
                           .n = spec.hidden,
                           .eps = spec.norm_eps});
    return out;
  };
  const models::TestCache cache(model->info().kv, 3, 128);
  std::vector<models::Outputs> outputs;
  int64_t row = 0;
  for (int i = 0; i < 3; ++i) {
    outputs.push_back(models::Feed(model, cache, i, 0, sequences[i], {}));
    ExpectNear(hidden(models::kFinalNorm, row, std::ssize(sequences[i])), outputs.back().hidden,
               fmt::format("sequence {}", i));
    row += std::ssize(sequences[i]);
  }

  for (int depth = 0; depth < spec.mtp_layers; ++depth) {
    ASSERT_TRUE(stream.EnterMtp(ctx, *source, depth).ok());
    walk(spec.layers + depth);
    row = 0;
    for (int i = 0; i < 3; ++i) {
      std::vector<int32_t> next(sequences[i].begin() + 1, sequences[i].end());
      next.push_back(sequences[i].back());
      const kernels::SequenceSlice slice{
          .block_table = cache.table(i), .start = 0, .count = static_cast<int>(next.size()), .row = 0};
      std::vector<float> out(next.size() * spec.hidden);
      const Status status =
          model->ForwardMtp(ctx, depth, {.tokens = next, .sequences = {&slice, 1}, .logit_rows = {}},
                            outputs[i].hidden, cache.layers(), {.logits = {}, .hidden = out});
      ASSERT_TRUE(status.ok()) << status;
      const std::string norm = models::LayerPrefix(spec.layers + depth) + "shared_head.norm.weight";
      ExpectNear(hidden(norm, row, std::ssize(next)), out, fmt::format("module {}, sequence {}", depth, i));
      outputs[i].hidden = std::move(out);
      row += std::ssize(next);
    }
  }
  const auto roundable = std::ranges::count_if(items, [](const ModelItem& item) { return item.roundable; });
  EXPECT_EQ(static_cast<int64_t>(keeper.visited), roundable) << "every linear that can be rounded is visited";
}

// A visitor takes its memory from the chunk of the inputs. With many threads and small parts GPTQ takes a
// multiple of it, and a chunk of its own would be added.
TEST(LayerWalkScratchTest, VisitorReusesTheMemoryOfInputs) {
  const std::string path = models::SourcePath("tests/golden/kimi-k2");
  const auto source = *Checkpoint::Open(path);
  const models::DecoderSpec spec = *models::SpecFromConfig(source->config(), "config.json");
  const kernels::KernelTable kernels = kernels::SelectKernels(runtime::DetectCpu());
  const auto pool = *runtime::ThreadPool::Create({.threads = 16, .pin = false});
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = pool.get(), .scratch = &scratch};
  const std::vector<int32_t> sequence(500, 3);
  CalibrationStream stream = *CalibrationStream::Create(*source, spec, {sequence}, ctx);
  stream.set_part_rows(512);
  Keeper keeper(*source, ctx, *ListItems(*source));
  keeper.own_bytes = int64_t{64} << 20;
  keeper.scratch_bytes = keeper.own_bytes;
  for (int layer = 0; layer < spec.layers; ++layer) {
    const Status status = WalkLayer(ctx, *source, spec, layer, nullptr, stream, keeper);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_GT(keeper.visited, 0U);
}

INSTANTIATE_TEST_SUITE_P(, LayerWalkTest,
                         ::testing::Values("qwen3-moe-norm-tied", "qwen3-moe-nonorm-untied", "qwen3-tied",
                                           "kimi-k2", "deepseek-v3-mtp", "deepseek-v3-noqlora",
                                           "deepseek-v2-lite", "deepseek-v2-groups", "glm4-moe",
                                           "pangu-ultra-moe-mtp", "llama3-rope-bias"),
                         [](const auto& test) { return models::TestName(test.param); });

}  // namespace
}  // namespace moesaic::quantizer
