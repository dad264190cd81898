// Compares every layout of ranks with one rank: logits of prompts, chunks, decodes and the MTP module. Ranks
// are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <mutex>
#include <span>

#include "comm/transport/local_transport.h"
#include "models/rank_work.h"
#include "models/test_session.h"

namespace moesaic::models {
namespace {

using parallel::Degrees;
using parallel::Layout;
using parallel::RankGroups;

struct Checkpoint {
  const char* name;
  const char* path;  // relative to the source directory
  int layouts;       // number of Layouts() that divide the model
  // Difference of logits between layouts, whose sums differ in their last bits.
  float tolerance = 1e-4F;
  const char* dtype = "auto";
  bool mtp = false;
};

constexpr double kTimeLimit = 20;
// FP8 weights are large powers of two, so logits and their rounding errors are larger.
constexpr float kFp8 = 1e-3F;
// Activations are rounded to int8 with one scale per 32 inputs of group-scaled weights, or one that the
// checkpoint states, and no slice begins inside such a group. So shards round the same values with the same
// scales, but the last bit of a sum may move a value to the next step.
constexpr float kInt8Groups = 1e-3F;
// Activations are rounded to int8 with one scale per row, and every shard has another part of the row: the
// scales differ.
constexpr float kInt8Rows = 0.25F;
// A sum of parts may round to the other neighbour in bf16, 1/256 away.
constexpr float kBf16 = 0.05F;

// Layouts() that a model with four layers has.
constexpr int kAll = 23;
// Three layers can't be divided into four stages.
constexpr int kThreeLayers = 21;
// Two layers can't be divided into three stages or more.
constexpr int kTwoLayers = 18;
// Two layers, whose heads can't be divided into three shards or more: two heads stay together in a group of
// 32 inputs.
constexpr int kTwoHeads = 11;

const Checkpoint kCheckpoints[] = {
    {"deepseek_v2_lite", "tests/golden/deepseek-v2-lite", kThreeLayers, 1e-4F, "f32"},
    {"deepseek_v2_groups", "tests/golden/deepseek-v2-groups", kThreeLayers, 1e-4F, "f32"},
    {"deepseek_v3_mtp", "tests/golden/deepseek-v3-mtp", kTwoLayers, 1e-4F, "f32", true},
    {"deepseek_v3_fp8", "tests/golden/deepseek-v3-fp8", kTwoLayers, kFp8, "f32"},
    {"kimi_k2", "tests/golden/kimi-k2", kThreeLayers, 1e-4F, "f32"},
    {"qwen3_moe_tied", "tests/golden/qwen3-moe-norm-tied", kAll, 1e-4F, "f32"},
    {"qwen3_moe_untied", "tests/golden/qwen3-moe-nonorm-untied", kThreeLayers, 1e-4F, "f32"},
    {"qwen3_tied", "tests/golden/qwen3-tied", kThreeLayers, 1e-4F, "f32"},
    {"llama_f16", "tests/golden/llama-untied-f16", kThreeLayers, 1e-4F, "f32"},
    {"llama3_bias", "tests/golden/llama3-rope-bias", kThreeLayers, 1e-4F, "f32"},
    {"glm4_moe", "tests/golden/glm4-moe", kThreeLayers, 1e-4F, "f32"},
    {"pangu_mtp", "tests/golden/pangu-ultra-moe-mtp", kTwoLayers, 1e-4F, "f32", true},
    {"pangu_v11", "tests/golden/pangu-ultra-moe-v11", kThreeLayers, 1e-4F, "f32"},
    {"deepseek_v3_bf16", "tests/golden/deepseek-v3-mtp", kTwoLayers, kBf16, "bf16", true},
    {"qwen3_moe_bf16", "tests/golden/qwen3-moe-norm-tied", kAll, kBf16, "bf16"},
    {"llama_int4_g32", "tests/golden/ct-llama-int4-g32", kTwoHeads, kInt8Groups},
    {"llama_int8_g32", "tests/golden/ct-llama-int8-g32", kTwoHeads, kInt8Groups},
    {"llama_nvfp4", "tests/golden/ct-llama-nvfp4a16", kTwoHeads, kInt8Groups},
    {"qwen3_moe_int4", "tests/golden/ct-qwen3-moe-int4-experts", kTwoLayers, kInt8Groups},
    {"llama_int8_static", "tests/golden/ct-llama-int8-static", kTwoLayers, kInt8Groups},
    {"qwen3_moe_int8", "tests/golden/ct-qwen3-moe-int8-dynamic", kTwoLayers, kInt8Rows},
    {"deepseek_v3_int8", "tests/golden/ct-deepseek-v3-int8-mixed", kTwoLayers, kInt8Rows},
};

void PrintTo(const Checkpoint& checkpoint, std::ostream* out) { *out << checkpoint.name; }

std::vector<Degrees> Layouts() {
  return {{.tensor = 2},
          {.tensor = 3},
          {.tensor = 4},
          {.pipeline = 2},
          {.pipeline = 3},
          {.pipeline = 4},
          {.tensor = 2, .expert = 2},
          {.tensor = 3, .expert = 3},
          {.tensor = 4, .expert = 4},
          {.tensor = 4, .expert = 2},
          {.tensor = 2, .pipeline = 2},
          {.tensor = 2, .pipeline = 2, .expert = 2},
          {.tensor = 3, .pipeline = 2, .expert = 3},
          {.tensor = 2, .pipeline = 3},
          {.tensor = 2, .pipeline = 4},
          {.tensor = 4, .pipeline = 2, .expert = 4},
          {.data = 2, .expert = 2},
          {.data = 3, .expert = 3},
          {.data = 4, .expert = 4},
          {.tensor = 2, .data = 2, .expert = 4},
          {.pipeline = 2, .data = 2, .expert = 2},
          {.tensor = 2, .pipeline = 2, .data = 2, .expert = 4},
          {.pipeline = 3, .data = 2, .expert = 2}};
}

// Experts of each rank in each layer with experts: expert e on the ranks e and e + layer + 1, so that some
// have two replicas.
std::shared_ptr<const parallel::Placement> ScatteredExperts(int layers, int experts, int ranks) {
  auto placement = std::make_shared<parallel::Placement>();
  placement->experts = experts;
  for (int layer = 0; layer < layers; ++layer) {
    parallel::LayerPlacement& by_rank = placement->layers.emplace_back(ranks);
    for (int expert = 0; expert < experts; ++expert) {
      by_rank[expert % ranks].push_back(expert);
      const int other = (expert + layer + 1) % ranks;
      if (expert % 3 == 0 && other != expert % ranks) by_rank[other].push_back(expert);
    }
  }
  return placement;
}

// Results of one prompt: logits of the golden's rows, of a second chunk, of decodes, and of the MTP module.
struct Results {
  int vocab = 0;
  std::vector<float> logits, chunked, decoded, mtp;
};

// The largest logit of each row [rows, vocab] is that of the other layout, wherever the second largest is
// smaller by more than `margin`. Returns the number of these rows.
int ExpectSameChoices(const std::vector<float>& one, const std::vector<float>& many, int vocab,
                      float margin) {
  EXPECT_EQ(one.size(), many.size());
  if (one.size() != many.size()) return 0;
  int compared = 0;
  for (size_t row = 0; row * vocab < one.size(); ++row) {
    const std::span<const float> logits = std::span(one).subspan(row * vocab, vocab);
    const std::span<const float> others = std::span(many).subspan(row * vocab, vocab);
    const int32_t best = ArgMax(logits);
    float second = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < vocab; ++i) {
      if (i != best) second = std::max(second, logits[i]);
    }
    if (logits[best] - second <= margin) continue;
    EXPECT_EQ(ArgMax(others), best) << "row " << row;
    ++compared;
  }
  return compared;
}

// A pipeline computes the rows of a short prompt as one process does, in one part.
bool ComputesAlike(const Degrees& degrees, const GoldenPrompt& prompt) {
  return degrees.tensor == 1 && degrees.data == 1 && prompt.ids.size() < 2 * parallel::kMinPartRows;
}

// Copies the columns that a rank computed, [rows, slice.count], into `whole` [rows, vocab].
void Place(std::span<const float> part, parallel::Range slice, int vocab, std::vector<float>* whole) {
  if (slice.count == 0) return;
  const size_t rows = part.size() / slice.count;
  whole->resize(rows * vocab);
  for (size_t row = 0; row < rows; ++row) {
    std::copy_n(part.begin() + row * slice.count, slice.count, whole->begin() + row * vocab + slice.first);
  }
}

class Rank {
 public:
  // Replicas compute the same prompts; `results` are those of one. Null: another replica.
  Rank(TestModel& model, Results* results, std::mutex* mutex)
      : model_(model), cache_(model->info().kv, 2, 320), results_(results), mutex_(mutex) {}

  void Run(const GoldenPrompt& prompt, bool mtp) {
    const auto length = static_cast<int>(prompt.ids.size());
    const std::vector<float> hidden = Feed(0, 0, prompt.ids, prompt.rows, &Results::logits);
    const int half = length / 2;
    const std::vector<int32_t> last = {length - half - 1};
    if (half > 0) {
      Feed(1, 0, std::span(prompt.ids).first(half), {}, nullptr);
      Feed(1, half, std::span(prompt.ids).subspan(half), last, &Results::chunked);
    }
    const std::vector<int32_t> only = {0};
    for (size_t i = 0; i + 1 < std::min<size_t>(prompt.greedy.size(), 4); ++i) {
      Feed(0, length + static_cast<int>(i), std::span(prompt.greedy).subspan(i, 1), only, &Results::decoded);
    }
    if (mtp && model_->info().own_mtp_layers > 0) Draft(prompt, hidden);
  }

 private:
  std::vector<float> Feed(int sequence, int start, std::span<const int32_t> tokens,
                          std::span<const int32_t> rows, std::vector<float> Results::*to) {
    const ModelInfo& info = model_->info();
    const kernels::SequenceSlice slice{.block_table = cache_.table(sequence),
                                       .start = start,
                                       .count = static_cast<int>(tokens.size()),
                                       .row = 0};
    std::vector<float> logits(rows.size() * info.own_vocab.count);
    std::vector<float> hidden(info.own_vocab.count > 0 ? tokens.size() * info.hidden_size : 0);
    const Status status =
        model_->Forward(model_.context(), {.tokens = tokens, .sequences = {&slice, 1}, .logit_rows = rows},
                        cache_.layers(), {.logits = logits, .hidden = hidden});
    EXPECT_TRUE(status.ok()) << Message(status);
    if (to != nullptr) Keep(logits, to);
    return hidden;
  }

  void Draft(const GoldenPrompt& prompt, std::span<const float> hidden) {
    const auto rows = static_cast<int>(prompt.mtp_next_ids.size());
    const kernels::SequenceSlice slice{.block_table = cache_.table(0), .start = 0, .count = rows, .row = 0};
    std::vector<int32_t> wanted(rows);
    for (int i = 0; i < rows; ++i) wanted[i] = i;
    std::vector<float> logits(static_cast<size_t>(rows) * model_->info().own_vocab.count);
    const Status status = model_->ForwardMtp(
        model_.context(), 0, {.tokens = prompt.mtp_next_ids, .sequences = {&slice, 1}, .logit_rows = wanted},
        hidden.first(static_cast<size_t>(rows) * model_->info().hidden_size), cache_.layers(),
        {.logits = logits, .hidden = {}});
    EXPECT_TRUE(status.ok()) << Message(status);
    Keep(logits, &Results::mtp);
  }

  void Keep(std::span<const float> logits, std::vector<float> Results::*to) {
    if (results_ == nullptr) return;
    const std::lock_guard<std::mutex> lock(*mutex_);
    std::vector<float> whole;
    std::swap(whole, results_->*to);
    results_->vocab = model_->info().vocab_size;
    Place(logits, model_->info().own_vocab, results_->vocab, &whole);
    std::swap(whole, results_->*to);
  }

  TestModel& model_;
  TestCache cache_;
  Results* results_;
  std::mutex* mutex_;
};

// Runs the prompts on all ranks of a layout; InvalidArgument if the model cannot be divided so. `packed`:
// path of a packed file to load instead.
StatusOr<std::vector<Results>> RunLayout(const Checkpoint& checkpoint, const Layout& layout,
                                         const std::vector<GoldenPrompt>& prompts,
                                         const std::string& packed = {},
                                         MmapPolicy mmap = MmapPolicy::kAuto) {
  const comm::Topology topology =
      comm::Topology::Flat(layout.ranks(), {.latency_s = 1e-6, .bytes_per_s = 1e10});
  std::vector<Results> results(prompts.size());
  std::vector<Status> loaded(layout.ranks());
  std::mutex mutex;
  comm::RunRanks(layout.ranks(), [&](comm::Transport& end) {
    const std::shared_ptr<RankGroups> groups = *RankGroups::Create(end, topology, layout, kTimeLimit);
    TestModel model(packed.empty() ? SourcePath(checkpoint.path) : packed, BestIsa(),
                    {.dtype = packed.empty() ? checkpoint.dtype : "auto",
                     .mmap = packed.empty() ? MmapPolicy::kAuto : mmap,
                     .groups = groups},
                    {.threads = 1, .pin = false});
    loaded[end.rank()] = model.status();
    if (!model.status().ok()) return;  // all ranks fail for the same reason
    for (size_t i = 0; i < prompts.size(); ++i) {
      Results* const kept = groups->at().replica == 0 ? &results[i] : nullptr;
      Rank(model, kept, &mutex).Run(prompts[i], checkpoint.mtp);
    }
    EXPECT_TRUE(groups->Finish().ok());
  });
  for (const Status& status : loaded) RETURN_IF_ERROR(status);
  return results;
}

StatusOr<std::vector<Results>> RunLayout(const Checkpoint& checkpoint, const Degrees& degrees,
                                         const std::vector<GoldenPrompt>& prompts) {
  ASSIGN_OR_RETURN(const Layout layout, Layout::Create(degrees));
  return RunLayout(checkpoint, layout, prompts);
}

StatusOr<std::vector<Results>> RunPlaced(const Checkpoint& checkpoint, const Degrees& degrees,
                                         const std::vector<GoldenPrompt>& prompts,
                                         std::shared_ptr<const parallel::Placement> experts) {
  ASSIGN_OR_RETURN(Layout layout, Layout::Create(degrees));
  RETURN_IF_ERROR(layout.PlaceExperts(std::move(experts)));
  return RunLayout(checkpoint, layout, prompts);
}

// Whether the file's model can be divided so, before any rank loads it.
Status CheckFile(const std::string& packed, const Layout& layout) {
  ASSIGN_OR_RETURN(const auto file, checkpoint::Checkpoint::Open(packed));
  return CheckDivisible(*file, "auto", layout);
}

class LayoutGoldenTest : public testing::TestWithParam<Checkpoint> {};

TEST_P(LayoutGoldenTest, EveryLayoutComputesTheLogitsOfOneRank) {
  const std::string path = SourcePath(GetParam().path);
  std::vector<GoldenPrompt> prompts = ReadGolden(path + "/golden.safetensors");
  ASSERT_GE(prompts.size(), 3U);
  prompts.resize(3);
  const StatusOr<std::vector<Results>> alone = RunLayout(GetParam(), Degrees{}, prompts);
  ASSERT_TRUE(alone.ok()) << Message(alone.status());
  int ran = 0;
  for (const Degrees& degrees : Layouts()) {
    const StatusOr<std::vector<Results>> parts = RunLayout(GetParam(), degrees, prompts);
    if (!parts.ok()) {
      // A tiny model has fewer heads, layers or experts than some layouts have ranks.
      EXPECT_THAT(Message(parts.status()), testing::HasSubstr("can't be divided among")) << Name(degrees);
      continue;
    }
    ++ran;
    int compared = 0;
    for (size_t i = 0; i < prompts.size(); ++i) {
      const std::string where = Name(degrees) + ", prompt " + std::to_string(i);
      const Results &one = (*alone)[i], &many = (*parts)[i];
      EXPECT_LE(MaxDiff(one.logits, many.logits), GetParam().tolerance) << where;
      EXPECT_LE(MaxDiff(one.chunked, many.chunked), GetParam().tolerance) << where;
      EXPECT_LE(MaxDiff(one.decoded, many.decoded), GetParam().tolerance) << where;
      EXPECT_LE(MaxDiff(one.mtp, many.mtp), GetParam().tolerance) << where;
      SCOPED_TRACE(where);
      // Each of two logits may differ by the tolerance.
      const float margin = std::max(1e-3F, 2 * GetParam().tolerance);
      for (const auto rows : {&Results::logits, &Results::chunked, &Results::decoded, &Results::mtp}) {
        compared += ExpectSameChoices(one.*rows, many.*rows, one.vocab, margin);
        if (ComputesAlike(degrees, prompts[i])) {
          EXPECT_EQ(one.*rows, many.*rows);
        }
      }
    }
    EXPECT_GT(compared, 0) << Name(degrees);
  }
  EXPECT_EQ(ran, GetParam().layouts);
}

TEST_P(LayoutGoldenTest, RepeatedRunsAreBitwiseEqual) {
  std::vector<GoldenPrompt> prompts = ReadGolden(SourcePath(GetParam().path) + "/golden.safetensors");
  ASSERT_GE(prompts.size(), 4U);
  prompts = {prompts[3]};  // long enough for several parts of a pipeline
  ASSERT_GE(prompts[0].ids.size(), 128U);
  for (const Degrees& degrees :
       {Degrees{.tensor = 2, .pipeline = 2}, Degrees{.tensor = 2, .data = 2, .expert = 4}}) {
    const StatusOr<std::vector<Results>> first = RunLayout(GetParam(), degrees, prompts);
    const StatusOr<std::vector<Results>> second = RunLayout(GetParam(), degrees, prompts);
    ASSERT_TRUE(first.ok()) << Message(first.status());
    EXPECT_EQ(first->front().logits, second->front().logits) << Name(degrees);
    EXPECT_EQ(first->front().decoded, second->front().decoded) << Name(degrees);
  }
}

// Outputs of experts are summed in the order of the router's choices if an expert has several replicas. So
// two placements with replicas give equal bits.
TEST_P(LayoutGoldenTest, PlacementsOfExpertsGiveTheSameResults) {
  TestModel model(SourcePath(GetParam().path), BestIsa(), {.dtype = GetParam().dtype},
                  {.threads = 1, .pin = false});
  const int layers = model->info().moe_layers, experts = model->info().experts;
  if (layers == 0) GTEST_SKIP() << "a dense model";
  std::vector<GoldenPrompt> prompts = ReadGolden(SourcePath(GetParam().path) + "/golden.safetensors");
  prompts = {prompts[2]};
  const StatusOr<std::vector<Results>> alone = RunLayout(GetParam(), Degrees{}, prompts);
  ASSERT_TRUE(alone.ok()) << Message(alone.status());
  std::vector<Results> placed;
  for (const Degrees& degrees :
       {Degrees{.data = 2, .expert = 2}, Degrees{.tensor = 2, .data = 2, .expert = 4},
        Degrees{.pipeline = 2, .data = 2, .expert = 2}}) {
    const auto scattered = ScatteredExperts(layers, experts, degrees.tensor * degrees.data);
    const StatusOr<std::vector<Results>> parts = RunPlaced(GetParam(), degrees, prompts, scattered);
    ASSERT_TRUE(parts.ok()) << Message(parts.status());
    EXPECT_LE(MaxDiff(alone->front().logits, parts->front().logits), GetParam().tolerance) << Name(degrees);
    EXPECT_LE(MaxDiff(alone->front().decoded, parts->front().decoded), GetParam().tolerance) << Name(degrees);
    placed.push_back(parts->front());
  }
  const auto all = std::make_shared<parallel::Placement>(*ScatteredExperts(layers, experts, 2));
  for (parallel::LayerPlacement& layer : all->layers) {
    for (std::vector<int>& own : layer) {
      own.clear();
      for (int expert = 0; expert < experts; ++expert) own.push_back(expert);
    }
  }
  const StatusOr<std::vector<Results>> everywhere =
      RunPlaced(GetParam(), {.data = 2, .expert = 2}, prompts, all);
  ASSERT_TRUE(everywhere.ok()) << Message(everywhere.status());
  EXPECT_EQ(everywhere->front().logits, placed.front().logits);
  EXPECT_EQ(everywhere->front().decoded, placed.front().decoded);
}

// Ranks of a packed file have the bits that they have when they load its checkpoint. The matrices of some
// tiny models are divided inside panels, which is refused.
TEST_P(LayoutGoldenTest, PackedFilesGiveTheResultsOfTheirCheckpoint) {
  std::vector<GoldenPrompt> prompts = ReadGolden(SourcePath(GetParam().path) + "/golden.safetensors");
  prompts = {prompts[2]};
  const std::string packed = testing::TempDir() + "/layout_" + GetParam().name + ".moesaic";
  const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  const Status converted =
      Convert(SourcePath(GetParam().path), packed, {.dtype = GetParam().dtype}, *threads);
  ASSERT_TRUE(converted.ok()) << Message(converted);
  int ran = 0;
  for (const Degrees& degrees :
       {Degrees{.tensor = 2}, Degrees{.pipeline = 2}, Degrees{.data = 2, .expert = 2},
        Degrees{.tensor = 2, .expert = 2}, Degrees{.tensor = 2, .pipeline = 2}}) {
    const Layout layout = *Layout::Create(degrees);
    if (const Status fits = CheckFile(packed, layout); !fits.ok()) {
      EXPECT_THAT(Message(fits), testing::AnyOf(testing::HasSubstr("is divided at multiples of"),
                                                testing::HasSubstr("can't be divided among")))
          << Name(degrees);
      continue;
    }
    const StatusOr<std::vector<Results>> parts = RunLayout(GetParam(), layout, prompts, packed);
    ASSERT_TRUE(parts.ok()) << Message(parts.status());
    ++ran;
    const StatusOr<std::vector<Results>> whole = RunLayout(GetParam(), degrees, prompts);
    ASSERT_TRUE(whole.ok()) << Message(whole.status());
    EXPECT_EQ(parts->front().logits, whole->front().logits) << Name(degrees);
    EXPECT_EQ(parts->front().decoded, whole->front().decoded) << Name(degrees);
    EXPECT_EQ(parts->front().mtp, whole->front().mtp) << Name(degrees);
  }
  EXPECT_GE(ran, 1);
  std::remove(packed.c_str());
}

// A file with the parts of the ranks is mapped, and gives the bits that ranks have when they load its
// checkpoint, also where a tile is divided. Other layouts are refused.
TEST_P(LayoutGoldenTest, FilesWithPartsGiveTheResultsOfTheirCheckpoint) {
  std::vector<GoldenPrompt> prompts = ReadGolden(SourcePath(GetParam().path) + "/golden.safetensors");
  prompts = {prompts[2]};
  const std::string packed = testing::TempDir() + "/parts_" + GetParam().name + ".moesaic";
  const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  int ran = 0;
  for (const Degrees& degrees :
       {Degrees{.tensor = 2}, Degrees{.tensor = 2, .expert = 2}, Degrees{.tensor = 2, .pipeline = 2},
        Degrees{.pipeline = 2, .data = 2, .expert = 2}}) {
    const Layout layout = *Layout::Create(degrees);
    const StatusOr<std::vector<Results>> whole = RunLayout(GetParam(), layout, prompts);
    const Status converted = Convert(SourcePath(GetParam().path), packed, {.dtype = GetParam().dtype},
                                     *threads, /*texts=*/{}, layout);
    ASSERT_EQ(converted.ok(), whole.ok()) << Message(converted);
    if (!whole.ok()) continue;
    ++ran;
    // Layouts are mapped and copied in turn, those with replicas in both ways.
    std::vector<MmapPolicy> policies = {ran % 2 == 0 ? MmapPolicy::kCopy : MmapPolicy::kMap};
    if (layout.exchanges_tokens()) policies = {MmapPolicy::kMap, MmapPolicy::kCopy};
    for (const MmapPolicy policy : policies) {
      const StatusOr<std::vector<Results>> parts = RunLayout(GetParam(), layout, prompts, packed, policy);
      ASSERT_TRUE(parts.ok()) << Message(parts.status());
      EXPECT_EQ(parts->front().logits, whole->front().logits) << Name(degrees);
      EXPECT_EQ(parts->front().decoded, whole->front().decoded) << Name(degrees);
      EXPECT_EQ(parts->front().mtp, whole->front().mtp) << Name(degrees);
    }
    EXPECT_THAT(
        Message(CheckFile(packed, *Layout::Create({.tensor = 3}))),
        testing::HasSubstr("has the parts of the layout " + layout.PartsText() + ", but this is tp=3"));
    EXPECT_TRUE(CheckFile(packed, layout).ok());
    if (layout.exchanges_tokens()) {
      Layout placed = layout;
      ASSERT_TRUE(placed.PlaceExperts(ScatteredExperts(1, 4, 2)).ok());
      EXPECT_THAT(Message(CheckFile(packed, placed)), testing::HasSubstr("an expert placement needs"));
    }
    const auto alone = Model::Load(packed, {}, *threads);
    EXPECT_THAT(Message(alone.status()), testing::HasSubstr("but this is tp=1"));
  }
  EXPECT_GE(ran, 1);
  std::remove(packed.c_str());
}

// Ranks may have unequal numbers of layers and of experts.
TEST_P(LayoutGoldenTest, UnevenPartsComputeTheLogitsOfOneRank) {
  const std::string path = SourcePath(GetParam().path);
  std::vector<GoldenPrompt> prompts = ReadGolden(path + "/golden.safetensors");
  prompts = {prompts[1]};
  const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  const auto model = Model::Load(path, {.dtype = GetParam().dtype, .progress = nullptr}, *threads);
  ASSERT_TRUE(model.ok()) << Message(model.status());
  const ModelInfo& info = (*model)->info();
  const auto split = [](int total) { return std::vector<int>{1, total - 1}; };
  std::vector<StatusOr<Layout>> layouts = {
      Layout::Create({.pipeline = 2}, {.layers = split(info.layers), .experts = {}})};
  if (info.experts > 0) {
    layouts.push_back(
        Layout::Create({.tensor = 2, .expert = 2}, {.layers = {}, .experts = split(info.experts)}));
    layouts.push_back(Layout::Create({.tensor = 2, .pipeline = 2, .expert = 2},
                                     {.layers = split(info.layers), .experts = split(info.experts)}));
  }
  const StatusOr<std::vector<Results>> alone = RunLayout(GetParam(), Degrees{}, prompts);
  ASSERT_TRUE(alone.ok()) << Message(alone.status());
  for (const StatusOr<Layout>& layout : layouts) {
    ASSERT_TRUE(layout.ok()) << Message(layout.status());
    const StatusOr<std::vector<Results>> parts = RunLayout(GetParam(), *layout, prompts);
    ASSERT_TRUE(parts.ok()) << Message(parts.status());
    EXPECT_LE(MaxDiff(alone->front().logits, parts->front().logits), GetParam().tolerance) << layout->Name();
    EXPECT_LE(MaxDiff(alone->front().decoded, parts->front().decoded), GetParam().tolerance)
        << layout->Name();
  }
  const Layout wrong = *Layout::Create({.pipeline = 2}, {.layers = {1, info.layers}, .experts = {}});
  EXPECT_THAT(Message(RunLayout(GetParam(), wrong, prompts).status()),
              testing::HasSubstr(
                  fmt::format("has {} layers, but the layout divides {}", info.layers, info.layers + 1)));
}

// The root of the mean squared difference of logits.
double RmsDifference(const std::vector<Results>& exact, const std::vector<Results>& rounded) {
  double sum = 0;
  int64_t count = 0;
  EXPECT_EQ(exact.size(), rounded.size());
  for (size_t i = 0; i < std::min(exact.size(), rounded.size()); ++i) {
    for (const auto rows : {&Results::logits, &Results::decoded}) {
      const std::vector<float>&expected = exact[i].*rows, &found = rounded[i].*rows;
      EXPECT_EQ(expected.size(), found.size());
      for (size_t j = 0; j < std::min(expected.size(), found.size()); ++j, ++count) {
        sum += std::pow(double{found[j]} - expected[j], 2);
      }
    }
  }
  return std::sqrt(sum / static_cast<double>(std::max<int64_t>(count, 1)));
}

// The error of rounding to int8 has a variance of scale^2 / 12. The scale of a shard's part of a row is at
// most that of the row, so that the error of the logits against exact activations is not larger in the mean.
TEST(Int8RowsTest, ScalesOfShardsRoundNoWorseThanThoseOfRows) {
  // The errors of 28 rows in 64 directions give their mean square with a deviation of 3.3%, its root with
  // 1.7%, and the ratio of two roots with 2.4%. The bound is ten of these above 1, because errors of rows are
  // not independent.
  constexpr double kRatio = 1.25;
  Checkpoint checkpoint = {"int8", "tests/golden/ct-qwen3-moe-int8-dynamic", kTwoLayers, kInt8Rows};
  const std::vector<GoldenPrompt> prompts = ReadGolden(SourcePath(checkpoint.path) + "/golden.safetensors");
  ASSERT_EQ(prompts.size(), 4U);
  const StatusOr<std::vector<Results>> alone = RunLayout(checkpoint, Degrees{}, prompts);
  ASSERT_TRUE(alone.ok()) << Message(alone.status());
  Checkpoint widened = checkpoint;
  widened.dtype = "f32";  // the same weights, with activations that are not rounded
  const StatusOr<std::vector<Results>> exact = RunLayout(widened, Degrees{}, prompts);
  ASSERT_TRUE(exact.ok()) << Message(exact.status());
  const double error = RmsDifference(*exact, *alone);
  EXPECT_GT(error, 1e-3) << "activations must be rounded";
  for (const Degrees& degrees :
       {Degrees{.tensor = 2}, Degrees{.tensor = 3}, Degrees{.tensor = 4}, Degrees{.tensor = 2, .expert = 2},
        Degrees{.tensor = 2, .data = 2, .expert = 4}}) {
    const StatusOr<std::vector<Results>> parts = RunLayout(checkpoint, degrees, prompts);
    ASSERT_TRUE(parts.ok()) << Message(parts.status());
    const double divided = RmsDifference(*exact, *parts);
    std::printf("%s: RMS error of logits %.4f, of one rank %.4f\n", Name(degrees).c_str(), divided, error);
    EXPECT_LE(divided, kRatio * error) << Name(degrees);
  }
}

INSTANTIATE_TEST_SUITE_P(All, LayoutGoldenTest, testing::ValuesIn(kCheckpoints),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moesaic::models
