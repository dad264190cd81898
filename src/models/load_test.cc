// Checkpoints and packed files that must be rejected, each with its error message, and options of loading.
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint/safetensors_writer.h"
#include "checkpoint/test_files.h"
#include "comm/transport/local_transport.h"
#include "models/numa_nodes.h"
#include "models/test_session.h"
#include "models/weight_image.h"
#include "runtime/test_topology.h"

namespace moesaic::models {
namespace {

using checkpoint::TensorOutput;
using testing::HasSubstr;

/// Loads a golden checkpoint into memory for modification and writes it to its own folder.
class Copy {
 public:
  explicit Copy(const std::string& golden)
      : source_(*checkpoint::Checkpoint::Open(SourcePath("tests/golden/" + golden))),
        config_(source_->config()) {
    for (const checkpoint::TensorEntry& entry : source_->tensors()) {
      Add(entry.name, entry.dtype, entry.shape, {entry.bytes.begin(), entry.bytes.end()});
    }
  }
  nlohmann::json& config() { return config_; }
  void Remove(const std::string& part) {
    std::erase_if(tensors_, [&](const TensorOutput& t) { return t.name.find(part) != std::string::npos; });
  }
  void Add(const std::string& name, tensor::DType dtype, const std::vector<int64_t>& shape,
           const std::vector<std::byte>& bytes) {
    tensors_.push_back(checkpoint::HeldTensor(name, dtype, shape, bytes));
  }
  std::string Write() const {
    std::string folder = folder_.Path("model");
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/config.json") << config_.dump();
    const Status status = checkpoint::WriteSafetensors(folder + "/model.safetensors", tensors_, {});
    EXPECT_TRUE(status.ok()) << Message(status);
    return folder;
  }

 private:
  checkpoint::TestFolder folder_;
  std::unique_ptr<checkpoint::Checkpoint> source_;
  nlohmann::json config_;
  std::vector<TensorOutput> tensors_;
};

std::string LoadError(const std::string& path, const LoadOptions& options = {}) {
  const TestModel model(path, BestIsa(), options);
  return Message(model.status());
}

TEST(LoadTest, RejectsMissingTensor) {
  Copy copy("qwen3-moe-norm-tied");
  copy.Remove("model.layers.1.mlp.experts.5.down_proj");
  EXPECT_THAT(LoadError(copy.Write()), HasSubstr("model.layers.1.mlp.experts.5.down_proj.weight"));
}

TEST(LoadTest, RejectsWrongShape) {
  Copy copy("qwen3-tied");
  copy.Remove("model.norm.weight");
  copy.Add("model.norm.weight", tensor::DType::kF32, {63}, std::vector<std::byte>(63 * 4));
  const std::string error = LoadError(copy.Write());
  EXPECT_THAT(error, HasSubstr("model.norm.weight"));
  EXPECT_THAT(error, HasSubstr("[64]"));
  EXPECT_THAT(error, HasSubstr("[63]"));
}

TEST(LoadTest, RejectsUnusedTensor) {
  Copy copy("llama-untied-f16");
  copy.Add("model.layers.0.self_attn.q_proj.bias", tensor::DType::kF32, {64}, std::vector<std::byte>(64 * 4));
  EXPECT_EQ(LoadError(copy.Write()),
            "model.safetensors: tensor model.layers.0.self_attn.q_proj.bias is not part of LlamaForCausalLM "
            "with this "
            "config.json");
}

// Only the fields that are read or checked may be stored next to a weight.
TEST(LoadTest, RejectsUnknownFieldOfQuantizedLinear) {
  for (const char* field : {"weight_scale_2", "weight_offset", "input_amax"}) {
    Copy copy("ct-llama-int4-g32");
    const std::string name = std::string("model.layers.0.self_attn.q_proj.") + field;
    copy.Add(name, tensor::DType::kF32, {1}, std::vector<std::byte>(4));
    EXPECT_THAT(LoadError(copy.Write()), HasSubstr("tensor " + name + " is not part of LlamaForCausalLM"));
  }
}

TEST(LoadTest, RejectsZeroPointsThatTheConfigDoesNotDeclare) {
  Copy copy("ct-llama-int4-g32");
  const std::string name = "model.layers.0.self_attn.q_proj.weight_zero_point";
  copy.Add(name, tensor::DType::kI32, {8, 2}, std::vector<std::byte>(64, std::byte{0x77}));
  EXPECT_THAT(LoadError(copy.Write()), HasSubstr("tensor " + name + " must be 0"));
}

// The input of gate and up is rounded once, with one scale.
TEST(LoadTest, RejectsSharedExpertsWithTwoInputScales) {
  Copy copy("ct-deepseek-v3-int8-mixed");
  const std::string up = "model.layers.1.mlp.shared_experts.up_proj.input_scale";
  copy.Remove(up);
  const float scale[] = {0.5F};
  const auto bytes = std::as_bytes(std::span(scale));
  copy.Add(up, tensor::DType::kF32, {1}, {bytes.begin(), bytes.end()});
  EXPECT_THAT(
      LoadError(copy.Write()),
      HasSubstr("model.layers.1.mlp.shared_experts.gate_proj.input_scale and " + up +
                " must be equal, since an expert's input is rounded once; found 0.025354503 and 0.5"));
}

TEST(LoadTest, IgnoresTensorsWithoutEffect) {
  Copy copy("qwen3-tied");
  copy.Add("lm_head.weight", tensor::DType::kBF16, {160, 64}, std::vector<std::byte>(160 * 64 * 2));  // tied
  copy.Add("model.layers.0.self_attn.rotary_emb.inv_freq", tensor::DType::kF32, {16},
           std::vector<std::byte>(64));
  EXPECT_EQ(LoadError(copy.Write()), "");
}

TEST(LoadTest, RejectsNonFiniteWeights) {
  Copy copy("llama-untied-f16");
  copy.Remove("model.layers.2.mlp.up_proj");
  std::vector<std::byte> bytes(96 * 64 * 2);
  bytes[2 * 100 + 1] = std::byte{0x7e};  // an f16 NaN
  copy.Add("model.layers.2.mlp.up_proj.weight", tensor::DType::kF16, {96, 64}, bytes);
  const std::string folder = copy.Write();
  EXPECT_EQ(LoadError(folder),
            folder + ": the weight of model.layers.2.mlp.up_proj must be finite, found nan");
}

TEST(LoadTest, LoadsWithoutAbsentMtpModule) {
  Copy copy("deepseek-v3-mtp");
  copy.Remove("model.layers.2.");
  TestModel model(copy.Write(), BestIsa(), {});
  ASSERT_TRUE(model.status().ok()) << Message(model.status());
  EXPECT_EQ(model->info().mtp_layers, 0);
  EXPECT_EQ(model->info().kv.layers, 2);
}

TEST(LoadTest, RejectsIncompleteMtpModule) {
  Copy copy("deepseek-v3-mtp");
  copy.Remove("model.layers.2.eh_proj");
  EXPECT_THAT(LoadError(copy.Write()), HasSubstr("model.layers.2.eh_proj.weight"));
}

TEST(LoadTest, RejectsExcessLayers) {
  for (const auto& [golden, layers] :
       {std::pair("qwen3-moe-norm-tied", 3), {"glm4-moe", 2}, {"deepseek-v3-mtp", 1}}) {
    Copy copy(golden);
    ASSERT_GT(copy.config()["num_hidden_layers"], layers) << golden;
    copy.config()["num_hidden_layers"] = layers;
    if (copy.config().contains("layer_types")) copy.config().erase("layer_types");
    const std::string folder = copy.Write();
    EXPECT_THAT(
        LoadError(folder, {.load_mtp = false}),
        HasSubstr(fmt::format("{}: layer {} lies beyond \"num_hidden_layers\", which is {}, and is not a "
                              "complete MTP module: {}: tensor model.layers.{}.enorm.weight",
                              folder, layers, layers, folder, layers)))
        << golden;
  }
}

TEST(LoadTest, AcceptsCompleteMtpModuleWithoutLoadingIt) {
  Copy copy("deepseek-v3-mtp");
  for (const int declared : {1, 0}) {
    copy.config()["num_nextn_predict_layers"] = declared;
    EXPECT_EQ(LoadError(copy.Write(), {.load_mtp = false}), "");
  }
  copy.Remove("model.layers.2.self_attn.o_proj");
  EXPECT_THAT(LoadError(copy.Write(), {.load_mtp = false}), HasSubstr("model.layers.2.self_attn.o_proj"));
}

TEST(LoadTest, RejectsTensorOfImpossibleLayer) {
  for (const char* name : {"model.layers.99999999999.x.weight", "model.layers.2000000000.x.weight"}) {
    Copy copy("qwen3-tied");
    copy.Add(name, tensor::DType::kF32, {1}, std::vector<std::byte>(4));
    EXPECT_THAT(LoadError(copy.Write()),
                testing::AnyOf(HasSubstr("is not part of"), HasSubstr("lies beyond")));
  }
}

TEST(LoadTest, RejectsPackedFileWithExcessLayers) {
  const std::string packed = testing::TempDir() + "beyond.moesaic";
  const auto pool = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  ASSERT_TRUE(Convert(SourcePath("tests/golden/deepseek-v3-mtp"), packed, {}, *pool).ok());
  EXPECT_EQ(LoadError(packed, {.load_mtp = false}), "");
  std::stringstream bytes;
  bytes << std::ifstream(packed, std::ios::binary).rdbuf();
  std::string text = bytes.str();
  const std::string field = R"(\"num_hidden_layers\":)";
  const size_t at = text.find(field);
  ASSERT_NE(at, std::string::npos);
  char& layers = text[text.find('2', at + field.size())];
  layers = '1';
  std::ofstream(packed, std::ios::binary) << text;
  EXPECT_THAT(
      LoadError(packed, {.load_mtp = false}),
      HasSubstr("layer 1 lies beyond \"num_hidden_layers\", which is 1, and is not a complete MTP module: "
                "packed region model.layers.1.enorm.weight is missing"));
  std::filesystem::remove(packed);
}

TEST(LoadTest, SharesEqualCopiesOfTheEmbedding) {
  TestModel copies(SourcePath("tests/golden/deepseek-v3-mtp"), BestIsa(), {.dtype = "f32"});
  Copy changed("deepseek-v3-mtp");
  changed.Remove("model.layers.2.shared_head.head");
  changed.Add("model.layers.2.shared_head.head.weight", tensor::DType::kBF16, {160, 48},
              std::vector<std::byte>(160 * 48 * 2));
  TestModel own(changed.Write(), BestIsa(), {.dtype = "f32"});
  ASSERT_TRUE(own.status().ok()) << Message(own.status());
  const int64_t head_bytes = tensor::PackedLayout::Of(tensor::PackedFormat::kF32, 160, 48).total_bytes;
  EXPECT_EQ(own->info().mtp_weight_bytes - copies->info().mtp_weight_bytes, head_bytes);
}

// The slices of the two heads differ only in the last one: the module must keep its own head.
TEST(LoadTest, SlicedHeadsThatDifferInLastRowAreNotShared) {
  const auto golden = *checkpoint::Checkpoint::Open(SourcePath("tests/golden/deepseek-v3-mtp"));
  const checkpoint::TensorEntry* head = golden->Find("lm_head.weight");
  ASSERT_NE(head, nullptr);
  std::vector<std::byte> bytes(head->bytes.begin(), head->bytes.end());
  std::fill(bytes.end() - std::ssize(bytes) / 160, bytes.end(), std::byte{0x3f});  // 0.746 in bf16
  Copy changed("deepseek-v3-mtp");
  changed.Remove("model.layers.2.shared_head.head");
  changed.Add("model.layers.2.shared_head.head.weight", head->dtype, head->shape, bytes);
  const std::string folder = changed.Write();
  const runtime::Topology topology = runtime::SimulatedNodes(2, 1);
  const auto last_logit = [&](NumaPolicy numa) {
    TestModel model(folder, BestIsa(), {.dtype = "f32", .numa = numa},
                    {.threads = 2, .pin = true, .topology = &topology});
    EXPECT_TRUE(model.status().ok()) << Message(model.status());
    EXPECT_EQ(model->info().numa_nodes, numa == NumaPolicy::kLocal ? 1 : 2);
    const TestCache cache(model->info().kv, 1, 64);
    const int32_t token[] = {3}, row[] = {0};
    const Outputs main = Feed(model, cache, 0, 0, token, row);
    const kernels::SequenceSlice slice{.block_table = cache.table(0), .start = 0, .count = 1, .row = 0};
    std::vector<float> logits(160);
    const Status status =
        model->ForwardMtp(model.context(), 0, {.tokens = token, .sequences = {&slice, 1}, .logit_rows = row},
                          main.hidden, cache.layers(), {.logits = logits, .hidden = {}});
    EXPECT_TRUE(status.ok()) << Message(status);
    return logits.back();
  };
  const float expected = last_logit(NumaPolicy::kLocal);
  EXPECT_EQ(last_logit(NumaPolicy::kSlice), expected);
  EXPECT_EQ(last_logit(NumaPolicy::kMirror), expected);
}

TEST(LoadTest, StopsOnCancel) {
  int calls = 0;
  const auto stop = [&](int64_t done, int64_t total) {
    EXPECT_LE(done, total);
    return ++calls < 3;
  };
  TestModel model(SourcePath("tests/golden/qwen3-tied"), BestIsa(), {.progress = stop});
  EXPECT_EQ(model.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(calls, 3);
}

TEST(LoadTest, ProgressEndsAtTheTotal) {
  int64_t last = 0, total = 0;
  const auto note = [&](int64_t done, int64_t all) {
    EXPECT_GT(done, last);
    last = done;
    total = all;
    return true;
  };
  const std::string path = SourcePath("tests/golden/deepseek-v3-mtp");
  TestModel model(path, BestIsa(), {.progress = note});
  ASSERT_TRUE(model.status().ok()) << Message(model.status());
  EXPECT_EQ(last, total);
  last = 0;
  const std::string packed = testing::TempDir() + "progress.moesaic";
  ASSERT_TRUE(Convert(path, packed, {.dtype = "int8", .progress = note}, model.pool()).ok());
  EXPECT_EQ(last, total);
  const runtime::Topology two = runtime::SimulatedNodes(2, 1);
  for (const NumaPolicy numa : {NumaPolicy::kLocal, NumaPolicy::kMirror, NumaPolicy::kSlice}) {
    for (const std::string& from : {path, packed}) {
      const MmapPolicy mmap = from == packed ? MmapPolicy::kCopy : MmapPolicy::kAuto;
      last = -1;
      TestModel placed(from, BestIsa(), {.progress = note, .mmap = mmap, .numa = numa},
                       {.threads = 2, .pin = true, .topology = &two});
      ASSERT_TRUE(placed.status().ok()) << Message(placed.status());
      EXPECT_EQ(last, total);
    }
  }
  std::filesystem::remove(packed);
}

// Cancels while pages are touched, and while the first image is copied.
TEST(LoadTest, MirroringStopsOnCancel) {
  const runtime::Topology two = runtime::SimulatedNodes(2, 1);
  const auto load = [&](const std::function<bool(int64_t, int64_t)>& progress) {
    const TestModel model(SourcePath("tests/golden/qwen3-tied"), BestIsa(),
                          {.progress = progress, .numa = NumaPolicy::kMirror},
                          {.threads = 2, .pin = true, .topology = &two});
    return model.status().code();
  };
  EXPECT_EQ(load([](int64_t done, int64_t) { return done > 0; }), absl::StatusCode::kCancelled);
  EXPECT_EQ(load([](int64_t done, int64_t total) { return done < total; }), absl::StatusCode::kCancelled);
  EXPECT_EQ(load([](int64_t done, int64_t total) { return done <= total; }), absl::StatusCode::kOk);
}

TEST(LoadTest, OverridesExpertsPerToken) {
  const std::string path = SourcePath("tests/golden/glm4-moe-carved");
  TestModel all(path, BestIsa(), {.experts_per_token = 8});
  ASSERT_TRUE(all.status().ok()) << Message(all.status());
  EXPECT_EQ(all->info().experts_per_token, 8);
  TestModel three(path, BestIsa(), {});
  EXPECT_EQ(three->info().experts_per_token, 3);
  EXPECT_GT(all->info().active_parameters, three->info().active_parameters);
  EXPECT_EQ(LoadError(path, {.experts_per_token = 9}), "experts per token must be in [1, 8], found 9");
}

// Node 4000 exceeds the node count of any kernel, so binding to it fails.
TEST(NodesToInterleaveTest, AutoFallsBackIfSystemRefuses) {
  EXPECT_THAT(NodesToInterleave({0, 4000}, NumaPolicy::kAuto), testing::IsEmpty());
  EXPECT_THAT(NodesToInterleave({0, 4000}, NumaPolicy::kInterleave), testing::ElementsAre(0, 4000));
  EXPECT_THAT(NodesToInterleave({0, 0}, NumaPolicy::kAuto), testing::ElementsAre(0, 0));
  EXPECT_THAT(NodesToInterleave({0, 1}, NumaPolicy::kLocal), testing::IsEmpty());
  EXPECT_THAT(NodesToInterleave({0}, NumaPolicy::kAuto), testing::IsEmpty());
}

TEST(CheckNodeMemoryTest, ErrorNamesNeededAndAvailableMemory) {
  constexpr int64_t kGb = 1'000'000'000;
  const std::vector<runtime::NumaNode> nodes = {{.index = 0, .memory_bytes = 64 * kGb, .cpus = {}},
                                                {.index = 2, .memory_bytes = 32 * kGb, .cpus = {}}};
  const NumaPlacement mirror{.policy = NumaPolicy::kMirror, .nodes = {0, 2}};
  const NumaPlacement slice{.policy = NumaPolicy::kSlice, .nodes = {0, 2}};
  EXPECT_EQ(Message(CheckNodeMemory(mirror, 30 * kGb, 80 * kGb, nodes)), "");
  EXPECT_EQ(Message(CheckNodeMemory(mirror, 45 * kGb, 80 * kGb, nodes)),
            "weights mirrored on 2 NUMA nodes take 90.0 GB, and 80.0 GB of memory are free; --numa slice or "
            "interleave keeps one copy");
  EXPECT_EQ(
      Message(CheckNodeMemory(mirror, 40 * kGb, 80 * kGb, nodes)),
      "weights mirrored on 2 NUMA nodes take 40.0 GB of each, and node 2 has 32.0 GB; --numa interleave "
      "needs no equal parts");
  EXPECT_EQ(Message(CheckNodeMemory(slice, 30 * kGb, 80 * kGb, nodes)), "");
  EXPECT_EQ(
      Message(CheckNodeMemory(slice, 45 * kGb, 80 * kGb, nodes)),
      "weights sliced on 2 NUMA nodes take 90.0 GB, and 80.0 GB of memory are free; --mmap on with --numa "
      "auto reads them from the file");
  EXPECT_EQ(Message(CheckNodeMemory(mirror, 20 * kGb, /*available: unknown*/ 0, nodes)), "");
}

TEST(PlaceWeightsTest, UsesNodesOfTheThreads) {
  const runtime::Topology four = runtime::SimulatedNodes(4, 1);
  const auto place = [&](int threads, bool pin, NumaPolicy policy) {
    const auto pool = *runtime::ThreadPool::Create({.threads = threads, .pin = pin, .topology = &four});
    return *PlaceWeights(policy, {}, *pool);
  };
  EXPECT_THAT(place(4, true, NumaPolicy::kMirror).nodes, testing::ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(place(4, true, NumaPolicy::kMirror).images(), 4);
  EXPECT_EQ(place(2, true, NumaPolicy::kSlice).images(), 2);
  for (const auto& one : {place(1, true, NumaPolicy::kMirror), place(4, false, NumaPolicy::kMirror),
                          place(4, true, NumaPolicy::kLocal)}) {
    EXPECT_EQ(one.policy, NumaPolicy::kLocal);
    EXPECT_EQ(one.images(), 1);
  }
}

// A matrix of one panel is stored whole in the first slice, and the other slices reserve the same space.
TEST(PlaceWeightsTest, CountsMemoryOfSlicesOnEveryNode) {
  const int k = 1 << 20;
  WeightPlan plan;
  RegionPlan& region = plan.regions.emplace_back();
  region.layouts = {tensor::PackedLayout::Of(tensor::PackedFormat::kBF16, tensor::kPanelRows, k)};
  region.offsets = {0};
  region.stride = region.layouts[0].total_bytes;
  // The count fills half of the free memory, so that three nodes need more than there is.
  region.decl.count = static_cast<int>(runtime::AvailableMemory() / 2 / region.stride);
  plan.bytes = region.bytes = region.stride * region.decl.count;
  EXPECT_EQ(SlicePlan(plan, 3).bytes, plan.bytes);
  const runtime::Topology three = runtime::SimulatedNodes(3, 1);
  const auto pool = *runtime::ThreadPool::Create({.threads = 3, .pin = true, .topology = &three});
  EXPECT_THAT(Message(PlaceWeights(NumaPolicy::kSlice, plan, *pool).status()),
              HasSubstr("weights sliced on 3 NUMA nodes take "));
}

TEST(LoadTest, RejectsMirroringOrSlicingMappedFile) {
  const std::string packed = testing::TempDir() + "mapped.moesaic";
  const runtime::Topology two = runtime::SimulatedNodes(2, 1);
  const auto pool = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  ASSERT_TRUE(Convert(SourcePath("tests/golden/qwen3-tied"), packed, {}, *pool).ok());
  const auto error = [&](NumaPolicy numa) {
    const TestModel model(packed, BestIsa(), {.mmap = MmapPolicy::kMap, .numa = numa},
                          {.threads = 2, .pin = true, .topology = &two});
    return Message(model.status());
  };
  EXPECT_EQ(error(NumaPolicy::kMirror),
            packed +
                ": the pages of a mapped file can't be mirrored; --mmap off copies its weights, and --numa "
                "auto leaves them where they are");
  EXPECT_THAT(error(NumaPolicy::kSlice), HasSubstr("can't be sliced"));
  std::filesystem::remove(packed);
}

// There is nothing to mirror or slice, so MmapPolicy decides.
TEST(LoadTest, SingleNodeDoesNotCopyMappedFileForMirrorOrSlice) {
  const std::string packed = testing::TempDir() + "mapped_by_one_node.moesaic";
  const auto pool = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  ASSERT_TRUE(Convert(SourcePath("tests/golden/qwen3-tied"), packed, {}, *pool).ok());
  const runtime::Topology one = runtime::SimulatedNodes(1, 2);
  for (const NumaPolicy numa : {NumaPolicy::kMirror, NumaPolicy::kSlice}) {
    for (const bool pin : {false, true}) {
      const auto source = [&](MmapPolicy mmap, NumaPolicy policy) {
        TestModel model(packed, BestIsa(), {.mmap = mmap, .numa = policy},
                        {.threads = 2, .pin = pin, .topology = &one});
        EXPECT_TRUE(model.status().ok()) << Message(model.status());
        EXPECT_EQ(model->info().numa_nodes, 1);
        return model->info().weights_from;
      };
      EXPECT_EQ(source(MmapPolicy::kMap, numa), WeightSource::kMapped);
      EXPECT_EQ(source(MmapPolicy::kCopy, numa), WeightSource::kCopied);
      EXPECT_EQ(source(MmapPolicy::kAuto, numa), source(MmapPolicy::kAuto, NumaPolicy::kLocal));
    }
  }
  std::filesystem::remove(packed);
}

TEST(LoadTest, RejectsUnknownDtype) {
  EXPECT_EQ(LoadError(SourcePath("tests/golden/qwen3-tied"), {.dtype = "fp4"}),
            "weights can be auto, f32, bf16, int8, fp8_g128, int8_g32, int4_g32, mxfp4, nvfp4, not \"fp4\"");
  EXPECT_THAT(LoadError(SourcePath("tests/golden/qwen3-tied"), {.dtype = "q4_k"}),
              HasSubstr("can't be chosen"));
}

// The error of rank 0 of two replicas that divide the experts and let them move.
std::string MovingExpertsError(const std::string& path, NumaPolicy numa,
                               const runtime::ThreadPool::Options& threads) {
  parallel::Layout layout = *parallel::Layout::Create({.data = 2, .expert = 2});
  layout.LetExpertsMove();
  comm::LocalJob job(2);
  const comm::Topology topology = comm::Topology::Flat(2, {.latency_s = 1e-6, .bytes_per_s = 1e10});
  const std::shared_ptr<parallel::RankGroups> groups =
      *parallel::RankGroups::Create(job.end(0), topology, layout);
  const TestModel model(path, BestIsa(), {.numa = numa, .groups = groups}, threads);
  return Message(model.status());
}

TEST(LoadTest, RejectsLayoutsThatMoveExpertsWithStaticScales) {
  const std::string golden = "ct-qwen3-moe-int8-dynamic";
  Copy copy(golden);
  for (auto& [name, group] : copy.config()["quantization_config"]["config_groups"].items()) {
    group["input_activations"]["dynamic"] = false;
    group["input_activations"]["strategy"] = "tensor";
  }
  const auto source = *checkpoint::Checkpoint::Open(SourcePath("tests/golden/" + golden));
  const std::vector<std::byte> scale = {std::byte{0}, std::byte{0}, std::byte{0x80},
                                        std::byte{0x3d}};  // 1/16
  for (const checkpoint::TensorEntry& entry : source->tensors()) {
    const std::string suffix = "weight_scale";
    if (!entry.name.ends_with(suffix)) continue;
    const std::string module = entry.name.substr(0, entry.name.size() - suffix.size());
    copy.Add(module + "input_scale", tensor::DType::kF32, {1}, scale);
  }
  const std::string folder = copy.Write();
  EXPECT_EQ(LoadError(folder), "");
  EXPECT_EQ(MovingExpertsError(folder, NumaPolicy::kAuto, {.threads = 1, .pin = false}),
            folder +
                ": experts of layer 0 have static activation scales and can't move to other ranks; leave out "
                "--rebalance-experts");
}

TEST(LoadTest, RejectsLayoutsThatMoveExpertsOfSeveralNumaNodes) {
  const runtime::Topology two = runtime::SimulatedNodes(2, 1);
  const std::string path = SourcePath("tests/golden/qwen3-moe-norm-tied");
  EXPECT_EQ(MovingExpertsError(path, NumaPolicy::kMirror, {.threads = 2, .pin = true, .topology = &two}),
            path +
                ": experts with weights that are mirrored can't move to other ranks; leave out "
                "--rebalance-experts, or use --numa auto");
}

// A packed file with one wrong number in its header.
TEST(LoadTest, RejectsPackedFileThatContradictsConfig) {
  const std::string packed = testing::TempDir() + "damaged.moesaic";
  const auto pool = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  ASSERT_TRUE(Convert(SourcePath("tests/golden/qwen3-moe-norm-tied"), packed, {}, *pool).ok());
  std::ifstream in(packed, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const std::string from = R"(\"num_experts\":8,)";
  const size_t at = bytes.find(from);
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, from.size(), R"(\"num_experts\":7,)");
  std::ofstream(packed, std::ios::binary) << bytes;
  const std::string error = LoadError(packed);
  EXPECT_THAT(error, HasSubstr("packed region model.layers.1.mlp.gate must be"));
  EXPECT_THAT(LoadError(packed, {.dtype = "f32"}), HasSubstr("keeps the format it was written in"));
  std::filesystem::remove(packed);
}

// The inverse of a static scale is computed when a file is opened and must be finite.
TEST(LoadTest, RejectsPackedFileWithScaleWithoutInverse) {
  const std::string packed = testing::TempDir() + "scale.moesaic";
  const auto pool = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  ASSERT_TRUE(Convert(SourcePath("tests/golden/ct-llama-int8-static"), packed, {}, *pool).ok());
  std::ifstream in(packed, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const std::string key = R"(\"input_scales\":[)";
  const size_t found = bytes.find(key);
  ASSERT_NE(found, std::string::npos);
  const size_t at = found + key.size();
  const size_t end = bytes.find_first_of(",]", at);
  for (const std::string wrong : {"-0.5", "1e-39", "1e39"}) {
    std::string damaged = bytes;
    damaged.replace(at, end - at, wrong + std::string(end - at - wrong.size(), ' '));
    std::ofstream(packed, std::ios::binary) << damaged;
    EXPECT_THAT(LoadError(packed), HasSubstr("\"input_scales\" of 0, or finite in f32 and at least 2^-126"))
        << wrong;
  }
  std::filesystem::remove(packed);
}

// Writes a copy of a packed file in which all parts of region `name` have `format`. The description and the
// size of the region are right.
void CopyWithFormat(const std::string& from, const std::string& to, const std::string& name,
                    tensor::PackedFormat format) {
  const auto file = *checkpoint::PackedFile::Open(from);
  const std::string config = *file->Metadata("config.json");
  const DecoderSpec spec = *SpecFromConfig(nlohmann::json::parse(config), "config.json");
  std::vector<checkpoint::PackedRegion> regions = file->regions();
  const auto region = std::ranges::find(regions, name, &checkpoint::PackedRegion::name);
  ASSERT_NE(region, regions.end());
  for (const RegionDecl& decl : DeclareWeights(spec, false)) {
    if (decl.name != name) continue;
    *region = Describe(*LayOut(decl, std::vector<tensor::PackedFormat>(decl.parts.size(), format)));
  }
  const auto writer = *checkpoint::PackedWriter::Create(
      to, regions, {{"config.json", config}, {"source", *file->Metadata("source")}});
  for (size_t i = 0; i < regions.size(); ++i) {
    ASSERT_TRUE(writer->Append(i, std::vector<std::byte>(regions[i].bytes)).ok());
  }
  const Status status = writer->Finish();
  ASSERT_TRUE(status.ok()) << Message(status);
}

// Kernels read these matrices in f32 or bf16 only.
TEST(LoadTest, RejectsPackedFileWithFormatThatItsRegionMustNotHave) {
  const std::string packed = testing::TempDir() + "formats.moesaic", changed = packed + ".changed";
  const auto pool = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  ASSERT_TRUE(Convert(SourcePath("tests/golden/deepseek-v3-noqlora"), packed, {}, *pool).ok());
  const std::pair<const char*, const char*> precise[] = {
      {"model.layers.0.self_attn.kv_b_proj", "f32 or bf16"},
      {"model.embed_tokens", "f32 or bf16"},
      {"model.layers.1.mlp.gate", "f32"}};
  for (const auto& [name, formats] : precise) {
    for (const auto format :
         {tensor::PackedFormat::kI8, tensor::PackedFormat::kI8G32, tensor::PackedFormat::kBF16}) {
      if (format == tensor::PackedFormat::kBF16 && std::string(formats) != "f32") continue;
      CopyWithFormat(packed, changed, name, format);
      const TestModel model(changed, BestIsa(), {});
      EXPECT_EQ(model.status().code(), absl::StatusCode::kDataLoss);
      EXPECT_EQ(Message(model.status()), fmt::format("{}: packed region {} must be {}, found {}", changed,
                                                     name, formats, tensor::PackedFormatName(format)));
    }
  }
  CopyWithFormat(packed, changed, "model.layers.0.self_attn.kv_b_proj", tensor::PackedFormat::kF32);
  EXPECT_EQ(LoadError(changed), "");
  std::filesystem::remove(packed);
  std::filesystem::remove(changed);
}

// A region whose description lacks its matrices.
TEST(LoadTest, RejectsPackedFileWithoutParts) {
  const std::string packed = testing::TempDir() + "partless.moesaic";
  const auto pool = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  ASSERT_TRUE(Convert(SourcePath("tests/golden/qwen3-tied"), packed, {}, *pool).ok());
  std::ifstream in(packed, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const size_t at = bytes.find(R"(\"parts\":[)");
  ASSERT_NE(at, std::string::npos);
  bytes[at + 6] = 'z';
  std::ofstream(packed, std::ios::binary) << bytes;
  EXPECT_THAT(LoadError(packed), HasSubstr("must be described by 1 \"parts\""));
  std::filesystem::remove(packed);
}

TEST(ForwardTest, RejectsInvalidBatches) {
  TestModel model(SourcePath("tests/golden/qwen3-tied"), BestIsa(), {});
  const TestCache cache(model->info().kv, 1, 64);
  std::vector<float> logits(160);
  const int32_t tokens[] = {3, 160};
  const int32_t row[] = {1};
  auto run = [&](kernels::SequenceSlice slice) {
    slice.block_table = cache.table(0);
    return Message(model->Forward(model.context(),
                                  {.tokens = tokens, .sequences = {&slice, 1}, .logit_rows = row},
                                  cache.layers(), {.logits = logits, .hidden = {}}));
  };
  EXPECT_EQ(run({.block_table = nullptr, .count = 2}), "tokens must be in [0, 160), found 160");
  const int32_t good[] = {3, 4};
  auto run_good = [&](kernels::SequenceSlice slice, std::span<const kernels::KvLayer> kv) {
    slice.block_table = cache.table(0);
    return Message(model->Forward(model.context(),
                                  {.tokens = good, .sequences = {&slice, 1}, .logit_rows = row}, kv,
                                  {.logits = logits, .hidden = {}}));
  };
  EXPECT_EQ(run_good({.block_table = nullptr, .count = 1}, cache.layers()),
            "sequences must cover 2 rows, found 1");
  EXPECT_EQ(run_good({.block_table = nullptr, .start = 511, .count = 2}, cache.layers()),
            "positions must be in [0, 512), found 2 from 511");
  EXPECT_EQ(run_good({.block_table = nullptr, .count = 2}, cache.layers().first(2)),
            "the cache must have 3 layers, found 2");
  EXPECT_EQ(run_good({.block_table = nullptr, .count = 2}, cache.layers()), "");
}

}  // namespace
}  // namespace moesaic::models
