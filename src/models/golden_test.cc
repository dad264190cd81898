// Compares every architecture and option with an independent implementation: logits, greedy continuations,
// chunked prefill, ragged batches, both algorithms of MLA, MTP, packed files.
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <numeric>
#include <set>

#include "checkpoint/safetensors_writer.h"
#include "models/model_info.h"
#include "models/test_session.h"
#include "models/weight_plan.h"
#include "runtime/test_topology.h"

namespace moesaic::models {
namespace {

using runtime::Isa;

struct Case {
  const char* name;
  const char* checkpoint;  // relative to the source directory
  const char* golden;
  float tolerance;                                                       // tolerance of f32 logits
  enum Trait { kMla = 1, kMtp = 2, kInt8Activations = 4, kGroups = 8 };  // kGroups: stored group-scaled
  int traits = 0;
};

// Goldens contain fp32 noise of up to 3e-5; other summation orders add the rest. FP8 weights are large powers
// of two, so logits and their rounding errors are larger.
constexpr float kF32 = 1e-4F;
constexpr float kFp8 = 1e-3F;
// 0.1.

#define MOESAIC_GOLDEN(name, tolerance, traits) \
  { name, "tests/golden/" name, "tests/golden/" name "/golden.safetensors", tolerance, traits }
#define MOESAIC_REF(name, path, tolerance, traits) \
  { path, "../shared/data/refs/" path, "tests/golden/refs/" name ".golden.safetensors", tolerance, traits }

const Case kCases[] = {
    MOESAIC_GOLDEN("deepseek-v2-lite", kF32, Case::kMla),
    MOESAIC_GOLDEN("deepseek-v2-groups", kF32, Case::kMla),
    MOESAIC_GOLDEN("deepseek-v3-noqlora", kF32, Case::kMla),
    MOESAIC_GOLDEN("deepseek-v3-mtp", kF32, Case::kMla | Case::kMtp),
    MOESAIC_GOLDEN("deepseek-v3-fp8", kFp8, Case::kMla | Case::kGroups),
    MOESAIC_GOLDEN("kimi-k2", kF32, Case::kMla),
    MOESAIC_GOLDEN("qwen3-moe-norm-tied", kF32, 0),
    MOESAIC_GOLDEN("qwen3-moe-nonorm-untied", kF32, 0),
    MOESAIC_GOLDEN("qwen3-tied", kF32, 0),
    MOESAIC_GOLDEN("llama-untied-f16", kF32, 0),
    MOESAIC_GOLDEN("llama3-rope-bias", kF32, 0),
    MOESAIC_GOLDEN("glm4-moe", kF32, 0),
    MOESAIC_GOLDEN("glm4-moe-carved", kF32, 0),
    MOESAIC_GOLDEN("pangu-ultra-moe-mtp", kF32, Case::kMla | Case::kMtp),
    MOESAIC_GOLDEN("pangu-ultra-moe-v11", kF32, Case::kMla),
    MOESAIC_GOLDEN("ct-llama-int8-static", kF32, Case::kInt8Activations),
    MOESAIC_GOLDEN("ct-llama-int8-dynamic", kF32, Case::kInt8Activations),
    MOESAIC_GOLDEN("ct-llama-int4-g32", kF32, Case::kGroups),
    MOESAIC_GOLDEN("ct-llama-int4-g128", kF32, Case::kGroups),
    MOESAIC_GOLDEN("ct-llama-int4-g32-asym", kF32, 0),
    MOESAIC_GOLDEN("ct-llama-int4-actorder", kF32, 0),
    MOESAIC_GOLDEN("ct-llama-int4-channel-asym", kF32, 0),
    MOESAIC_GOLDEN("ct-llama-int8-g32", kF32, Case::kGroups),
    MOESAIC_GOLDEN("ct-llama-int8-channel-asym", kF32, 0),
    MOESAIC_GOLDEN("ct-llama-nvfp4a16", kF32, Case::kGroups),
    MOESAIC_GOLDEN("ct-qwen3-moe-int8-dynamic", kF32, Case::kInt8Activations),
    MOESAIC_GOLDEN("ct-qwen3-moe-int4-experts", kF32, 0),
    MOESAIC_GOLDEN("ct-deepseek-v3-int8-mixed", kF32, Case::kMla | Case::kInt8Activations),
    MOESAIC_REF("deepseek_v3-tiny", "deepseek_v3-tiny", kF32, Case::kMla),
    MOESAIC_REF("qwen3_moe-tiny", "qwen3_moe-tiny", kF32, 0),
    MOESAIC_REF("llama-tiny-tied", "llama-tiny-tied", kF32, 0),
    MOESAIC_REF("deepseek_v3-tiny", "gguf/deepseek_v3-tiny-f32.gguf", kF32, Case::kMla),
    MOESAIC_REF("qwen3_moe-tiny", "gguf/qwen3_moe-tiny-f32.gguf", kF32, 0),
    MOESAIC_REF("llama-tiny-tied", "gguf/llama-tiny-tied-f32.gguf", kF32, 0),
    MOESAIC_REF("deepseek_v3-tiny-q8_0", "gguf/deepseek_v3-tiny-q8_0.gguf", kF32, Case::kMla | Case::kGroups),
    MOESAIC_REF("qwen3_moe-tiny-q8_0", "gguf/qwen3_moe-tiny-q8_0.gguf", kF32, Case::kGroups),
    MOESAIC_REF("llama-tiny-tied-q8_0", "gguf/llama-tiny-tied-q8_0.gguf", kF32, Case::kGroups),
};

std::vector<Case> With(Case::Trait trait) {
  std::vector<Case> cases;
  for (const Case& c : kCases) {
    if ((c.traits & trait) != 0) cases.push_back(c);
  }
  return cases;
}

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::string NameOf(const testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

std::vector<int32_t> Range(int count) {
  std::vector<int32_t> rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

std::vector<int32_t> Last(int count) { return {count - 1}; }

class GoldenTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    path_ = SourcePath(GetParam().checkpoint);
    if (!std::filesystem::exists(path_)) GTEST_SKIP() << path_ << " is not there";
    prompts_ = ReadGolden(SourcePath(GetParam().golden));
    ASSERT_GE(prompts_.size(), 4U);
  }
  std::string path_;
  std::vector<GoldenPrompt> prompts_;
};

class Int8GoldenTest : public GoldenTest {};
class GroupsGoldenTest : public GoldenTest {};
class MlaGoldenTest : public GoldenTest {};
class MtpGoldenTest : public GoldenTest {};

constexpr int kRoom = 320;  // longest prompt plus its continuation

// Runs the whole prompt in one step, then decodes token by token.
TEST_P(GoldenTest, MatchesGoldenLogitsAndGreedyTokens) {
  const float tolerance = GetParam().tolerance;
  for (const Isa isa : TestIsas("f32")) {
    TestModel model(path_, isa, {.dtype = "f32"});
    ASSERT_TRUE(model.status().ok()) << Message(model.status());
    float worst = 0;
    for (const GoldenPrompt& prompt : prompts_) {
      const auto length = static_cast<int>(prompt.ids.size());
      const TestCache cache(model->info().kv, 1, kRoom);
      Outputs out = Feed(model, cache, 0, 0, prompt.ids, prompt.rows);
      const float diff = MaxDiff(out.logits, prompt.logits);
      worst = std::max(worst, diff);
      EXPECT_LE(diff, tolerance) << runtime::IsaName(isa) << ", prompt of " << length;
      std::vector<float> logits(out.logits.end() - model->info().vocab_size, out.logits.end());
      for (size_t i = 0; i < prompt.greedy.size() && prompt.margins[i] > 1e-3F; ++i) {
        const int32_t token = ArgMax(logits);
        ASSERT_EQ(token, prompt.greedy[i])
            << runtime::IsaName(isa) << ", prompt of " << length << ", token " << i;
        if (length + static_cast<int>(i) == model->info().context_length) break;
        const int32_t next[] = {token};
        logits = Feed(model, cache, 0, length + static_cast<int>(i), next, Range(1)).logits;
      }
    }
    std::printf("%-36s %-10s max |logit difference| %.2g\n", GetParam().name, runtime::IsaName(isa).c_str(),
                worst);
  }
}

// Returns, for each row of `logits`, the length of its difference from the golden row relative to the golden
// row's length.
std::vector<double> RelativeErrors(std::span<const float> logits, const GoldenPrompt& prompt) {
  const size_t vocab = logits.size() / prompt.rows.size();
  std::vector<double> errors;
  for (size_t first = 0; first < logits.size(); first += vocab) {
    double error = 0, size = 0;
    for (size_t i = first; i < first + vocab; ++i) {
      error += std::pow(logits[i] - prompt.logits[i], 2);
      size += std::pow(prompt.logits[i], 2);
    }
    errors.push_back(std::sqrt(error / size));
  }
  return errors;
}

// bf16 and int8 weights, with activations rounded to the same type, give similar logits on every instruction
// set. A layer has seven products in sequence or in parallel, and each rounds both operands. With random
// weights the errors add up as the root of their number. Rounding has an error of 2^-9 / sqrt(3) of a value
// in bf16. In int8, where the largest value of a row is about three times the rest, it is 3 / 127 / sqrt(12).
// A changed routing choice shifts a row by a whole expert; few rows are affected, so the test checks the
// median.
TEST_P(GoldenTest, LowPrecisionStaysClose) {
  const GoldenPrompt& prompt = prompts_[2];
  constexpr double kMargin = 4;  // weights and activations are not all alike
  for (const auto& [dtype, unit] :
       {std::pair{"bf16", 0x1p-9 / std::sqrt(3.0)}, {"int8", 3 / 127.0 / std::sqrt(12.0)}}) {
    for (const Isa isa : TestIsas(dtype)) {
      TestModel model(path_, isa, {.dtype = dtype});
      ASSERT_TRUE(model.status().ok()) << Message(model.status());
      const TestCache cache(model->info().kv, 1, kRoom);
      std::vector<double> errors =
          RelativeErrors(Feed(model, cache, 0, 0, prompt.ids, prompt.rows).logits, prompt);
      std::nth_element(errors.begin(), errors.begin() + errors.size() / 2, errors.end());
      const double bound = kMargin * unit * std::sqrt(2.0 * 7 * model->info().layers);
      EXPECT_LE(errors[errors.size() / 2], bound) << dtype << " on " << runtime::IsaName(isa);
    }
  }
}

// Returns the group-scaled formats of a model loaded with "auto".
std::set<std::string> GroupFormats(const std::string& path) {
  const auto checkpoint = *checkpoint::Checkpoint::Open(path);
  const DecoderSpec spec = *SpecFromConfig(checkpoint->config(), ConfigFile(*checkpoint));
  const WeightPlan plan = *PlanFromCheckpoint(spec, *checkpoint, WeightDtype());
  std::set<std::string> formats;
  for (const RegionPlan& region : plan.regions) {
    for (const tensor::PackedLayout& layout : region.layouts) {
      const bool grouped =
          tensor::IsGroupScaled(layout.format) || layout.format == tensor::PackedFormat::kF8G128;
      if (grouped) formats.insert(PackedFormatName(layout.format));
    }
  }
  return formats;
}

// Codes and scales are kept as stored, so the remaining error is that of activations. They are rounded to
// int8 per 32 inputs (3 / 127 / sqrt(12) of a value, as above), or to bf16 with FP8 weights, which is less.
// Embedding and MLA's absorbed matrices in bf16 add less than that.
TEST_P(GroupsGoldenTest, KeepsStoredGroups) {
  const GoldenPrompt& prompt = prompts_[2];
  for (const Isa isa : TestIsas("int8_g32")) {
    TestModel model(path_, isa, {});
    ASSERT_TRUE(model.status().ok()) << Message(model.status());
    const std::string_view name = GetParam().name;
    const char* format = name.find("int4") != name.npos    ? "int4_g32"
                         : name.find("nvfp4") != name.npos ? "nvfp4"
                         : name.find("fp8") != name.npos   ? "fp8_g128"
                                                           : "int8_g32";
    EXPECT_THAT(GroupFormats(path_), testing::ElementsAre(format));
    const TestCache cache(model->info().kv, 1, kRoom);
    std::vector<double> errors =
        RelativeErrors(Feed(model, cache, 0, 0, prompt.ids, prompt.rows).logits, prompt);
    std::nth_element(errors.begin(), errors.begin() + errors.size() / 2, errors.end());
    const double bound = 2 * 3 / 127.0 / std::sqrt(12.0) * std::sqrt(7.0 * model->info().layers);
    std::printf("%-36s %-10s median error %.2g, bound %.2g\n", GetParam().name, runtime::IsaName(isa).c_str(),
                errors[errors.size() / 2], bound);
    EXPECT_LE(errors[errors.size() / 2], bound) << runtime::IsaName(isa);
  }
}

// Copies a checkpoint with its bf16 tensors widened to f32: "auto" then keeps f32 for all but int8 layers.
void CopyAsF32(const std::string& from, const std::string& to) {
  const auto source = *checkpoint::Checkpoint::Open(from);
  std::vector<checkpoint::TensorOutput> tensors;
  for (const checkpoint::TensorEntry& entry : source->tensors()) {
    const bool widen = entry.dtype == tensor::DType::kBF16;
    tensors.push_back({.name = entry.name,
                       .dtype = widen ? tensor::DType::kF32 : entry.dtype,
                       .shape = entry.shape,
                       .bytes = [&entry, widen] {
                         if (!widen) return std::vector<std::byte>(entry.bytes.begin(), entry.bytes.end());
                         std::vector<std::byte> bytes(2 * entry.bytes.size());
                         for (size_t i = 0; i < entry.bytes.size(); i += 2) {
                           std::memcpy(bytes.data() + 2 * i + 2, entry.bytes.data() + i, 2);
                         }
                         return bytes;
                       }});
  }
  std::filesystem::create_directories(to);
  std::filesystem::copy_file(from + "/config.json", to + "/config.json",
                             std::filesystem::copy_options::overwrite_existing);
  const Status status = checkpoint::WriteSafetensors(to + "/model.safetensors", tensors, {});
  ASSERT_TRUE(status.ok()) << Message(status);
}

// Int8 activations: "auto" keeps int8 weights and quantizes activations as the checkpoint specifies.
TEST_P(Int8GoldenTest, QuantizesActivationsToInt8) {
  const std::string copy = testing::TempDir() + NameOf({GetParam(), 0}) + "-f32";
  CopyAsF32(path_, copy);
  for (const Isa isa : TestIsas("int8")) {
    TestModel model(copy, isa, {});
    ASSERT_TRUE(model.status().ok()) << Message(model.status());
    for (size_t i = 0; i < prompts_.size(); ++i) {
      const GoldenPrompt& prompt = prompts_[i];
      const TestCache cache(model->info().kv, 1, kRoom);
      const Outputs out = Feed(model, cache, 0, 0, prompt.ids, prompt.rows);
      // No activation of the first two prompts is near a rounding boundary. In the others some integers round
      // the other way, which shifts logits by about w8a8_noise, at most by a few times that.
      const float tolerance = i < 2 ? 1e-3F : 1e-3F + 4 * prompt.w8a8_noise;
      EXPECT_LE(MaxDiff(out.logits, prompt.logits_w8a8), tolerance)
          << runtime::IsaName(isa) << ", prompt " << i;
    }
  }
  std::filesystem::remove_all(copy);
}

TEST_P(GoldenTest, ChunkedPrefillEqualsWholePrefill) {
  TestModel model(path_, BestIsa(), {.dtype = "f32"});
  ASSERT_TRUE(model.status().ok()) << Message(model.status());
  const std::vector<int32_t>& ids = prompts_.back().ids;
  const auto length = static_cast<int>(ids.size());
  const TestCache whole_cache(model->info().kv, 1, kRoom);
  const Outputs whole = Feed(model, whole_cache, 0, 0, ids, Last(length));
  for (const std::vector<int>& sizes : {std::vector<int>{1, 63, 64, 3}, {100}, {7}}) {
    const TestCache cache(model->info().kv, 1, kRoom);
    Outputs last;
    std::vector<float> hidden;
    for (int start = 0, i = 0; start < length; ++i) {
      const int count = std::min(sizes[i % sizes.size()], length - start);
      last = Feed(model, cache, 0, start, std::span(ids).subspan(start, count), Last(count));
      hidden.insert(hidden.end(), last.hidden.begin(), last.hidden.end());
      start += count;
    }
    // MLA may run one chunk absorbed and another expanded; everything else must be bit-identical.
    const float tolerance = model->info().kv.shared ? kF32 : 0;
    EXPECT_LE(MaxDiff(hidden, whole.hidden), tolerance) << "chunks of " << sizes[0];
    EXPECT_LE(MaxDiff(last.logits, whole.logits), tolerance) << "chunks of " << sizes[0];
  }
}

// Sequences of different lengths and phases in one step must give the same bits as each sequence alone.
TEST_P(GoldenTest, RaggedBatchEqualsEachSequenceAlone) {
  for (const char* dtype : {"f32", "bf16", "int8", "fp8_g128", "int8_g32", "int4_g32", "mxfp4", "nvfp4"}) {
    TestModel model(path_, BestIsa(), {.dtype = dtype});
    ASSERT_TRUE(model.status().ok()) << Message(model.status());
    const std::vector<int32_t>& ids = prompts_.back().ids;
    constexpr int kSequences = 8;
    constexpr int kStarts[kSequences] = {0, 5, 64, 0, 63, 100, 17, 0};
    constexpr int kCounts[kSequences] = {1, 1, 1, 70, 2, 40, 1, 9};
    const TestCache alone(model->info().kv, kSequences, kRoom);
    const TestCache together(model->info().kv, kSequences, kRoom);
    std::vector<int32_t> tokens, rows;
    std::vector<kernels::SequenceSlice> slices;
    Outputs expected;
    for (int s = 0; s < kSequences; ++s) {
      const std::span prefix = std::span(ids).first(kStarts[s]);
      const std::span step = std::span(ids).subspan(kStarts[s], kCounts[s]);
      for (const TestCache* cache : {&alone, &together}) {
        if (!prefix.empty()) Feed(model, *cache, s, 0, prefix, {});
      }
      const Outputs one = Feed(model, alone, s, kStarts[s], step, Last(kCounts[s]));
      expected.logits.insert(expected.logits.end(), one.logits.begin(), one.logits.end());
      expected.hidden.insert(expected.hidden.end(), one.hidden.begin(), one.hidden.end());
      slices.push_back({.block_table = together.table(s),
                        .start = kStarts[s],
                        .count = kCounts[s],
                        .row = static_cast<int>(tokens.size())});
      tokens.insert(tokens.end(), step.begin(), step.end());
      rows.push_back(static_cast<int32_t>(tokens.size()) - 1);
    }
    Outputs out;
    out.logits.resize(expected.logits.size());
    out.hidden.resize(expected.hidden.size());
    const Status status =
        model->Forward(model.context(), {.tokens = tokens, .sequences = slices, .logit_rows = rows},
                       together.layers(), {.logits = out.logits, .hidden = out.hidden});
    ASSERT_TRUE(status.ok()) << Message(status);
    EXPECT_EQ(MaxDiff(out.hidden, expected.hidden), 0) << dtype;
    EXPECT_EQ(MaxDiff(out.logits, expected.logits), 0) << dtype;
  }
}

TEST_P(MlaGoldenTest, AbsorbedEqualsExpanded) {
  std::vector<float> results[2];
  for (const layers::MlaPath path : {layers::MlaPath::kAbsorbed, layers::MlaPath::kExpanded}) {
    TestModel model(path_, BestIsa(), {.dtype = "f32", .mla_path = path});
    ASSERT_TRUE(model.status().ok()) << Message(model.status());
    for (const GoldenPrompt& prompt : prompts_) {
      const TestCache cache(model->info().kv, 1, kRoom);
      const auto length = static_cast<int>(prompt.ids.size());
      const Outputs out = Feed(model, cache, 0, 0, prompt.ids, Last(length));
      std::vector<float>& result = results[path == layers::MlaPath::kExpanded];
      result.insert(result.end(), out.hidden.begin(), out.hidden.end());
      result.insert(result.end(), out.logits.begin(), out.logits.end());
      EXPECT_LE(MaxDiff(std::span(result).last(out.logits.size()),
                        std::span(prompt.logits).last(out.logits.size())),
                GetParam().tolerance);
    }
  }
  EXPECT_LE(MaxDiff(results[0], results[1]), GetParam().tolerance);
  EXPECT_GT(MaxDiff(results[0], results[1]), 0) << "the switch must switch";
}

TEST_P(MtpGoldenTest, MatchesGoldenLogits) {
  for (const Isa isa : TestIsas("f32")) {
    TestModel model(path_, isa, {.dtype = "f32"});
    ASSERT_TRUE(model.status().ok()) << Message(model.status());
    for (const GoldenPrompt& prompt : prompts_) {
      const TestCache cache(model->info().kv, 1, kRoom);
      const auto length = static_cast<int>(prompt.ids.size());
      const Outputs main = Feed(model, cache, 0, 0, prompt.ids, {});
      const kernels::SequenceSlice slice{
          .block_table = cache.table(0), .start = 0, .count = length, .row = 0};
      std::vector<float> logits(prompt.mtp_logits.size());
      const ForwardBatch batch{
          .tokens = prompt.mtp_next_ids, .sequences = {&slice, 1}, .logit_rows = prompt.rows};
      const Status status = model->ForwardMtp(model.context(), 0, batch, main.hidden, cache.layers(),
                                              {.logits = logits, .hidden = {}});
      ASSERT_TRUE(status.ok()) << Message(status);
      EXPECT_LE(MaxDiff(logits, prompt.mtp_logits), kF32)
          << runtime::IsaName(isa) << ", prompt of " << length;
    }
  }
}

// A packed file must compute the same bits as its checkpoint, in every format.
TEST_P(GoldenTest, PackedFileComputesLikeCheckpoint) {
  const GoldenPrompt& prompt = prompts_[1];
  const auto length = static_cast<int>(prompt.ids.size());
  const std::string packed = testing::TempDir() + NameOf({GetParam(), 0}) + ".packed.safetensors";
  for (const char* dtype : {"auto", "f32", "bf16", "int8"}) {
    TestModel model(path_, BestIsa(), {.dtype = dtype});
    ASSERT_TRUE(model.status().ok()) << Message(model.status());
    const Status status = Convert(path_, packed, {.dtype = dtype}, model.pool());
    ASSERT_TRUE(status.ok()) << Message(status);
    const TestCache a(model->info().kv, 1, kRoom);
    const std::vector<float> logits = Feed(model, a, 0, 0, prompt.ids, Last(length)).logits;
    for (const MmapPolicy mmap : {MmapPolicy::kMap, MmapPolicy::kCopy}) {
      TestModel opened(packed, BestIsa(), {.mmap = mmap});
      ASSERT_TRUE(opened.status().ok()) << Message(opened.status());
      EXPECT_EQ(opened->info().weights_from,
                mmap == MmapPolicy::kMap ? WeightSource::kMapped : WeightSource::kCopied);
      EXPECT_EQ(opened->info().weight_bytes, model->info().weight_bytes);
      EXPECT_EQ(opened->info().weight_format, model->info().weight_format);
      const TestCache b(model->info().kv, 1, kRoom);
      EXPECT_EQ(MaxDiff(logits, Feed(opened, b, 0, 0, prompt.ids, Last(length)).logits), 0) << dtype;
    }
  }
  std::filesystem::remove(packed);
}

// Weights mirrored or sliced over NUMA nodes must compute the same bits, whether packed or copied there.
TEST_P(GoldenTest, NumaPlacementDoesNotChangeResults) {
  const GoldenPrompt& prompt = prompts_[1];
  const auto length = static_cast<int>(prompt.ids.size());
  const std::string packed = testing::TempDir() + NameOf({GetParam(), 0}) + ".numa.moesaic";
  for (const char* dtype : {"auto", "int8"}) {
    TestModel model(path_, BestIsa(), {.dtype = dtype});
    ASSERT_TRUE(model.status().ok()) << Message(model.status());
    ASSERT_TRUE(Convert(path_, packed, {.dtype = dtype}, model.pool()).ok());
    const TestCache a(model->info().kv, 1, kRoom);
    const std::vector<float> logits = Feed(model, a, 0, 0, prompt.ids, Last(length)).logits;
    for (const NumaPolicy numa : {NumaPolicy::kMirror, NumaPolicy::kSlice}) {
      for (const int nodes : {2, 4}) {
        const runtime::Topology topology = runtime::SimulatedNodes(nodes, 1);
        for (const bool from_packed : {false, true}) {
          TestModel placed(from_packed ? packed : path_, BestIsa(),
                           {.dtype = from_packed ? "auto" : dtype, .numa = numa},
                           {.threads = nodes, .pin = true, .topology = &topology});
          ASSERT_TRUE(placed.status().ok()) << Message(placed.status());
          EXPECT_EQ(placed->info().numa, numa);
          EXPECT_EQ(placed->info().numa_nodes, nodes);
          EXPECT_EQ(placed->info().weight_bytes, model->info().weight_bytes);
          const TestCache b(model->info().kv, 1, kRoom);
          EXPECT_EQ(MaxDiff(logits, Feed(placed, b, 0, 0, prompt.ids, Last(length)).logits), 0)
              << dtype << ", " << nodes << " nodes, policy " << static_cast<int>(numa);
        }
      }
    }
  }
  std::filesystem::remove(packed);
}

// Texts read from a packed file must equal those of its checkpoint.
TEST_P(GoldenTest, PackedFileContainsTexts) {
  const std::string packed = testing::TempDir() + NameOf({GetParam(), 0}) + ".texts.moesaic";
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const Status status = Convert(path_, packed, {}, *pool, {{"tokenizer.model", "another text"}});
  ASSERT_TRUE(status.ok()) << Message(status);
  const auto source = *checkpoint::Checkpoint::Open(path_);
  const auto copy = *checkpoint::Checkpoint::Open(packed);
  EXPECT_EQ(copy->container(), "moesaic");
  EXPECT_EQ(copy->config(), source->config());
  EXPECT_EQ(copy->ReadText("tokenizer.model"), "another text");
  for (const char* text :
       {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}) {
    EXPECT_EQ(copy->ReadText(text), source->ReadText(text)) << text;
  }
  std::filesystem::remove(packed);
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenTest, testing::ValuesIn(kCases), NameOf);
INSTANTIATE_TEST_SUITE_P(Checkpoints, Int8GoldenTest, testing::ValuesIn(With(Case::kInt8Activations)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Checkpoints, GroupsGoldenTest, testing::ValuesIn(With(Case::kGroups)), NameOf);
INSTANTIATE_TEST_SUITE_P(Checkpoints, MlaGoldenTest, testing::ValuesIn(With(Case::kMla)), NameOf);
INSTANTIATE_TEST_SUITE_P(Checkpoints, MtpGoldenTest, testing::ValuesIn(With(Case::kMtp)), NameOf);

}  // namespace
}  // namespace moesaic::models
