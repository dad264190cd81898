#include "quantizer/quantize.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/round.h"
#include "checkpoint/safetensors_writer.h"
#include "quantizer/format/loader_rules.h"
#include "quantizer/io/journal.h"
#include "quantizer/test_quantize.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Case {
  const char* golden;
  Scheme scheme;
  bool search;
};
void PrintTo(const Case& each, std::ostream* out) {
  *out << each.golden << " as " << SchemeName(each.scheme) << (each.search ? " with search" : "");
}

class EverySource : public QuantizeTest, public ::testing::WithParamInterface<Case> {};

TEST_P(EverySource, OutputEqualsTheSourceQuantizedByItsSettings) {
  options_.output.scheme = GetParam().scheme;
  options_.output.search = GetParam().search;
  const StatusOr<QuantizeReport> report = Run(Golden(GetParam().golden), "out");
  ASSERT_TRUE(report.ok()) << report.status();
  const StatusOr<VerifyReport> verified = Check(Golden(GetParam().golden), "out");
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->rounded, report->rounded);
  EXPECT_GT(verified->rounded, 6U);
  EXPECT_FALSE(fs::exists(folder_.Path("out/quantize.journal")));
}

INSTANTIATE_TEST_SUITE_P(
    , EverySource,
    ::testing::Values(Case{"kimi-k2", Scheme::kW8A8, false},            // bf16, MLA and experts
                      Case{"deepseek-v3-fp8", Scheme::kW8A8, true},     // ragged FP8 blocks
                      Case{"deepseek-v3-fp8", Scheme::kFp8, false},     //
                      Case{"deepseek-v3-mtp", Scheme::kW8A8, false},    // a module beyond the layers
                      Case{"deepseek-v3-noqlora", Scheme::kFp8, true},  // three shards
                      Case{"ct-qwen3-moe-int8-dynamic", Scheme::kFp8, false},
                      Case{"llama3-rope-bias", Scheme::kW8A16, true},
                      Case{"ct-llama-int4-g128", Scheme::kW8A16, false},
                      Case{"ct-llama-int4-actorder", Scheme::kW4A16, false},  // permuted columns
                      Case{"ct-llama-int4-g32-asym", Scheme::kNvfp4, true},   // zero points
                      Case{"ct-llama-nvfp4a16", Scheme::kW4A16, true},        //
                      Case{"llama-untied-f16", Scheme::kNvfp4, false},        // f16
                      Case{"llama3-rope-bias", Scheme::kW4A16, true}),        // biases
    [](const auto& test) {
      std::string name = fmt::format("{}_{}_{}", test.param.golden, SchemeName(test.param.scheme),
                                     test.param.search ? "mse" : "rtn");
      std::ranges::replace(name, '-', '_');
      return name;
    });

// Files made by llama.cpp: f32, Q8_0, permuted rows of queries and keys. Units of a few rows, and shared
// scales of rows outside the unit, give the same bytes as whole ones.
TEST_F(QuantizeTest, QuantizesGgufFiles) {
  const std::vector<std::string> names = {"qwen3_moe-tiny-q8_0", "deepseek_v3-tiny-q8_0",
                                          "llama-tiny-tied-f32"};
  const auto path_of = [](const std::string& name) {
    return models::SourcePath(fmt::format("../shared/data/refs/gguf/{}.gguf", name));
  };
  for (const std::string& name : names) {
    if (!fs::exists(path_of(name))) GTEST_SKIP() << path_of(name) << " does not exist";
  }
  for (const std::string& name : names) {
    const std::string source = path_of(name);
    for (const Scheme scheme : {Scheme::kW8A8, Scheme::kFp8, Scheme::kNvfp4}) {
      // 72 inputs are not a multiple of 16.
      if (scheme == Scheme::kNvfp4 && name.starts_with("llama")) continue;
      options_.output.scheme = scheme;
      options_.sizes = {};
      const std::string out = name + SchemeName(scheme);
      const StatusOr<QuantizeReport> report = Run(source, out);
      ASSERT_TRUE(report.ok()) << report.status();
      const StatusOr<VerifyReport> verified = Check(source, out);
      ASSERT_TRUE(verified.ok()) << verified.status();
      EXPECT_EQ(verified->rounded, report->rounded);
      EXPECT_GT(verified->rounded, 6U);
      options_.sizes = {.unit_bytes = 1};
      const StatusOr<QuantizeReport> cut = Run(source, out + "-cut");
      ASSERT_TRUE(cut.ok()) << cut.status();
      EXPECT_GT(cut->units, report->units);
      EXPECT_EQ(FilesOf(folder_.Path(out + "-cut")), FilesOf(folder_.Path(out))) << out;
    }
  }
}

TEST_F(QuantizeTest, BytesDoNotDependOnThreadsMemoryOrIo) {
  options_.output.scheme = Scheme::kNvfp4;
  options_.output.search = true;
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "one", 1).ok());
  const auto expected = FilesOf(folder_.Path("one"));
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "three", 3).ok());
  EXPECT_EQ(FilesOf(folder_.Path("three")), expected);
  options_.backend = runtime::AsyncFiles::Backend::kThreads;
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "pread").ok());
  EXPECT_EQ(FilesOf(folder_.Path("pread")), expected);
  options_.direct = true;
  if (const auto direct = Run(Golden("qwen3-moe-norm-tied"), "direct"); direct.ok()) {
    EXPECT_EQ(FilesOf(folder_.Path("direct")), expected);
  } else {
    EXPECT_THAT(Message(direct.status()), HasSubstr("use --io buffered"));  // a memory file system
  }
}

// Linears of 512 outputs with a shared global scale, in units of 128 outputs.
TEST_F(QuantizeTest, BytesDoNotDependOnUnits) {
  const std::string tiny = models::SourcePath("models/moesaic-tiny");
  for (const Scheme scheme : {Scheme::kNvfp4, Scheme::kW8A8, Scheme::kW4A16, Scheme::kFp8, Scheme::kW8A16}) {
    options_.output.scheme = scheme;
    options_.sizes.unit_bytes = 0;
    const std::string whole = "whole-" + SchemeName(scheme), cut = "cut-" + SchemeName(scheme);
    const StatusOr<QuantizeReport> one = Run(tiny, whole);
    ASSERT_TRUE(one.ok()) << one.status();
    EXPECT_EQ(one->stream.read_bytes, one->source_bytes);
    options_.sizes.unit_bytes = 1;
    const StatusOr<QuantizeReport> many = Run(tiny, cut);
    ASSERT_TRUE(many.ok()) << many.status();
    EXPECT_GT(many->units, 250U);
    EXPECT_EQ(FilesOf(folder_.Path(cut)), FilesOf(folder_.Path(whole))) << SchemeName(scheme);
  }
}

// An output can be a source again: int8 groups reproduce themselves, because their largest code is 127.
TEST_F(QuantizeTest, QuantizingInt8GroupsAgainReproducesThem) {
  options_.output.scheme = Scheme::kW8A16;
  for (const int group : {0, 32}) {
    options_.output.group_size = group;
    const std::string once = fmt::format("once-{}", group), twice = fmt::format("twice-{}", group);
    const std::string source = Golden(group > 0 ? "llama3-rope-bias" : "kimi-k2");
    const StatusOr<QuantizeReport> first = Run(source, once);
    ASSERT_TRUE(first.ok()) << first.status();
    ASSERT_TRUE(Check(source, once).ok()) << Check(source, once).status();
    ASSERT_TRUE(Run(folder_.Path(once), twice).ok());
    const StatusOr<VerifyReport> verified = Check(folder_.Path(once), twice);
    ASSERT_TRUE(verified.ok()) << verified.status();
    EXPECT_GT(verified->rounded, 6U);
    EXPECT_EQ(verified->settings.group_size, group);
    for (const KindError& kind : verified->kinds) EXPECT_EQ(kind.worst, 0) << kind.kind;
  }
}

TEST_F(QuantizeTest, ShardsFollowTheModelsOrderAndTensorsAreAligned) {
  options_.output.scheme = Scheme::kW4A16;
  options_.output.shard_bytes = 40'000;
  const StatusOr<QuantizeReport> report = Run(Golden("qwen3-moe-nonorm-untied"), "out");
  // The 16 inputs of an expert's down_proj are not a multiple of 32.
  EXPECT_THAT(Message(report.status()),
              HasSubstr("model.layers.0.mlp.experts.0.down_proj: 16 inputs are not a multiple "
                        "of the group size 32"));
  EXPECT_FALSE(fs::exists(folder_.Path("out")));
  options_.output.keep = {{tensor::DType::kBF16, "down_proj"}};
  ASSERT_TRUE(Run(Golden("qwen3-moe-nonorm-untied"), "out").ok());
  EXPECT_TRUE(fs::exists(folder_.Path("out/model.safetensors.index.json")));
  const auto opened = Checkpoint::Open(folder_.Path("out"));
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_GT((*opened)->files().size(), 3U);
  for (const checkpoint::TensorEntry& entry : (*opened)->tensors()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(entry.bytes.data()) % tensor::BytesOf(entry.dtype, 1), 0U)
        << entry.name;
  }
  EXPECT_TRUE(Check(Golden("qwen3-moe-nonorm-untied"), "out").ok());
}

TEST_F(QuantizeTest, KeepsLinearsThatMatchKeepRules) {
  options_.output.keep = {{tensor::DType::kF32, "layers\\.0\\.self_attn"},
                          {tensor::DType::kBF16, "gate_proj|up_proj"}};
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "out").ok());
  const auto opened = *Checkpoint::Open(folder_.Path("out"));
  EXPECT_EQ(opened->Find("model.layers.0.self_attn.q_proj.weight")->dtype, tensor::DType::kF32);
  EXPECT_EQ(opened->Find("model.layers.1.self_attn.q_proj.weight")->dtype, tensor::DType::kI8);
  EXPECT_EQ(opened->Find("model.layers.1.mlp.experts.2.up_proj.weight")->dtype, tensor::DType::kBF16);
  EXPECT_EQ(opened->Find("model.layers.1.mlp.experts.2.down_proj.weight")->dtype, tensor::DType::kI8);
  EXPECT_TRUE(Check(Golden("qwen3-moe-norm-tied"), "out").ok());

  options_.output.keep = {{tensor::DType::kBF16, "q_proj"}};
  EXPECT_THAT(Message(Run(Golden("qwen3-moe-norm-tied"), "no").status()),
              HasSubstr("must name all linears that run as one"));
  options_.output.keep = {{tensor::DType::kBF16, "nothing"}};
  EXPECT_THAT(Message(Run(Golden("qwen3-moe-norm-tied"), "no").status()),
              HasSubstr("no linear's name has a match"));
  options_.output.keep = {{tensor::DType::kBF16, "("}};
  EXPECT_THAT(Message(Run(Golden("qwen3-moe-norm-tied"), "no").status()),
              HasSubstr("is not a regular expression"));
}

TEST_F(QuantizeTest, ResumesAfterEveryInterruption) {
  options_.output.scheme = Scheme::kW8A8;
  options_.output.shard_bytes = 60'000;
  ASSERT_TRUE(Run(Golden("kimi-k2"), "whole").ok());
  const auto expected = FilesOf(folder_.Path("whole"));
  options_.sizes.unit_bytes = 100'000;  // a dozen units
  for (int stop = 1;; ++stop) {
    const std::string out = fmt::format("stopped-{}", stop);
    int calls = 0;
    options_.progress = [&](const QuantizeProgress&) { return ++calls != stop; };
    const StatusOr<QuantizeReport> first = Run(Golden("kimi-k2"), out);
    if (first.ok()) {
      EXPECT_GT(stop, 10);
      break;
    }
    EXPECT_EQ(first.status().code(), StatusCode::kCancelled) << first.status();
    EXPECT_FALSE(fs::exists(folder_.Path(out) + "/config.json"));
    options_.progress = nullptr;
    const StatusOr<QuantizeReport> second = Run(Golden("kimi-k2"), out);
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_GT(second->stream.resumed_units, 0U);
    EXPECT_EQ(second->Json(options_.output)["resumed_units"].get<size_t>(), second->stream.resumed_units);
    EXPECT_EQ(second->Json(options_.output)["units"].get<size_t>(), second->units);
    EXPECT_EQ(FilesOf(folder_.Path(out)), expected) << "interrupted after " << stop;
  }
}

class StoppedTest : public QuantizeTest {
 protected:
  // Interrupts a run after its first unit.
  void Stop() {
    options_.output.shard_bytes = 60'000;
    options_.progress = [](const QuantizeProgress&) { return false; };
    ASSERT_EQ(Run(source_, "out").status().code(), StatusCode::kCancelled);
    options_.progress = nullptr;
  }
  std::string source_ = CopyOf("kimi-k2");
};

TEST_F(StoppedTest, RejectsOtherSettings) {
  Stop();
  options_.output.search = true;
  EXPECT_THAT(Message(Run(source_, "out").status()), HasSubstr("started with another settings"));
}

TEST_F(StoppedTest, RejectsAnotherSource) {
  Stop();
  fs::last_write_time(source_ + "/model.safetensors", fs::file_time_type::clock::now());
  EXPECT_THAT(Message(Run(source_, "out").status()), HasSubstr("started with another source"));
}

TEST_F(StoppedTest, RepeatsUnitsWhoseBytesChanged) {
  Stop();
  std::fstream shard(folder_.Path("out/model-00001-of-00003.safetensors"),
                     std::ios::in | std::ios::out | std::ios::binary);
  ASSERT_TRUE(shard) << "the golden's size changed";
  shard.seekp(-5, std::ios::end);
  const auto byte = static_cast<char>(shard.peek() ^ 1);
  shard.seekp(-5, std::ios::end);
  shard.put(byte);
  shard.close();
  const StatusOr<QuantizeReport> report = Run(source_, "out");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->stream.redone_units, 1U);
  EXPECT_TRUE(Check(source_, "out").ok());
}

TEST_F(StoppedTest, TruncatesAFileThatIsTooLong) {
  Stop();
  const std::string shard = folder_.Path("out/model-00001-of-00003.safetensors");
  fs::resize_file(shard, fs::file_size(shard) + 4096);
  const StatusOr<QuantizeReport> report = Run(source_, "out");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->stream.redone_units, 1U);
  EXPECT_TRUE(Check(source_, "out").ok());
}

TEST_F(StoppedTest, RejectsASecondProcess) {
  Stop();
  const auto journal = Journal::Open(folder_.Path("out"));
  ASSERT_TRUE(journal.ok());
  EXPECT_THAT(Message(Run(source_, "out").status()), HasSubstr("another process is writing to this folder"));
}

TEST_F(StoppedTest, RejectsTooLittleMemoryToResume) {
  Stop();
  options_.memory = int64_t{1} << 20;
  EXPECT_THAT(Message(Run(source_, "out").status()), HasSubstr("--memory 1048576 is too little"));
  options_.memory = int64_t{4} << 30;
  EXPECT_TRUE(Run(source_, "out").ok());
}

TEST_F(QuantizeTest, RejectsANonEmptyFolder) {
  folder_.Write("file", "");
  EXPECT_THAT(Message(Run(Golden("kimi-k2"), "").status()), HasSubstr("the folder is not empty"));
}

TEST_F(QuantizeTest, RejectsAFolderWithAUsersFiles) {
  for (const char* name : {"quantize.analysis.bak", "analysis-of-2024.states.csv"}) {
    const std::string out = folder_.Path(fmt::format("with-{}", name));
    fs::create_directory(out);
    std::ofstream(out + "/" + name) << "a user's";
    EXPECT_THAT(Message(Run(Golden("kimi-k2"), fs::path(out).filename()).status()),
                HasSubstr("the folder is not empty"));
    EXPECT_EQ(FilesOf(out), (std::map<std::string, std::string>{{name, "a user's"}}));
  }
}

TEST_F(QuantizeTest, TooLittleMemoryIsRejectedWithTheNeededSize) {
  options_.memory = int64_t{1} << 20;
  EXPECT_THAT(Message(Run(Golden("kimi-k2"), "out").status()), HasSubstr("--memory 1048576 is too little"));
  EXPECT_FALSE(fs::exists(folder_.Path("out")));
}

// Overwrites 2 bytes of tensor `name` in a golden's copy with `value`.
void Overwrite(const std::string& source, const std::string& name, uint16_t value, int element = 7) {
  const auto opened = *Checkpoint::Open(source);
  const checkpoint::TensorEntry* entry = opened->Find(name);
  ASSERT_NE(entry, nullptr) << name;
  const auto& file = opened->files()[0];
  std::fstream out(file->path(), std::ios::in | std::ios::out | std::ios::binary);
  out.seekp(entry->bytes.data() - file->bytes().data() + 2 * element);
  out.write(reinterpret_cast<const char*>(&value), 2);
}

TEST_F(QuantizeTest, ErrorNamesANonFiniteWeight) {
  const std::string source = CopyOf("kimi-k2");
  Overwrite(source, "model.layers.1.mlp.experts.3.up_proj.weight", 0x7fc0);
  const Status status = Run(source, "out").status();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_THAT(Message(status),
              HasSubstr("model.layers.1.mlp.experts.3.up_proj: the weight of output 0, input 7 must be"
                        " a finite number below 2^96, found nan"));
  EXPECT_TRUE(fs::exists(folder_.Path("out/quantize.journal")));
}

TEST_F(QuantizeTest, ErrorNamesANonFiniteCopiedTensor) {
  const std::string source = CopyOf("kimi-k2");
  Overwrite(source, "model.embed_tokens.weight", 0xff80);
  EXPECT_THAT(Message(Run(source, "out").status()),
              HasSubstr("model.embed_tokens has a value that is not finite"));
}

// A bit that the source's disk loses changes no modification time, so no reader can detect it. A comparison
// with the intact source does.
TEST_F(StoppedTest, VerifyFindsABitThatTheSourceLost) {
  Stop();
  const std::string shard = source_ + "/model.safetensors", name = "model.layers.1.self_attn.o_proj.weight";
  const fs::file_time_type written = fs::last_write_time(shard);
  Overwrite(source_, name, 0x4000);
  EXPECT_THAT(Message(Run(source_, "out").status()), HasSubstr("started with another source"));
  fs::last_write_time(shard, written);
  ASSERT_TRUE(Run(source_, "out").ok());
  EXPECT_TRUE(Check(source_, "out").ok());
  EXPECT_THAT(Message(Check(Golden("kimi-k2"), "out").status()), HasSubstr("of tensor " + name));
}

// The checkpoint is opened intact and truncated afterwards, as by another process.
TEST_F(QuantizeTest, ErrorNamesATruncatedShard) {
  const std::string path = CopyOf("kimi-k2");
  const auto source = *Checkpoint::Open(path);
  fs::resize_file(path + "/model.safetensors", fs::file_size(path + "/model.safetensors") / 2);
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const Status status = Quantize(*source, options_, kernels_, *pool, folder_.Path("out")).status();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), HasSubstr("model.safetensors: the file ends at byte"));
  EXPECT_TRUE(fs::exists(folder_.Path("out/quantize.journal")));
}

TEST_F(QuantizeTest, FullDiskIsReported) {
  ASSERT_NE(std::signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit old = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  rlimit small = old;
  small.rlim_cur = 20'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = Run(Golden("kimi-k2"), "out").status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_THAT(Message(status), HasSubstr("model.safetensors:"));
  EXPECT_THAT(Message(status), HasSubstr("File too large"));
  EXPECT_TRUE(Run(Golden("kimi-k2"), "out").ok());  // resumes with free space
}

// All values of a group of 32 have its largest magnitude, which int4 clips. The scale is rounded down by
// 0.3%, nearly the maximum for bf16.
TEST_F(QuantizeTest, ClippedGroupIsWithinItsErrorBound) {
  const std::string source = CopyOf("qwen3-tied");
  const uint16_t value = 0x3f8e;  // 1.109375
  for (int i = 0; i < 32; ++i) Overwrite(source, "model.layers.0.self_attn.o_proj.weight", value, i);
  // Values below the smallest scale become zero.
  for (int i = 32; i < 64; ++i) Overwrite(source, "model.layers.0.self_attn.o_proj.weight", 0x0040, i);
  for (const Scheme scheme : {Scheme::kW4A16, Scheme::kNvfp4, Scheme::kFp8, Scheme::kW8A8, Scheme::kW8A16}) {
    options_.output.scheme = scheme;
    ASSERT_TRUE(Run(source, SchemeName(scheme)).ok());
    const StatusOr<VerifyReport> report = Check(source, SchemeName(scheme));
    EXPECT_TRUE(report.ok()) << SchemeName(scheme) << report.status();
  }
}

// Returns the number of resident pages of the source's maps.
int64_t ResidentPages(const Checkpoint& source) {
  const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  int64_t pages = 0;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const auto& file : source.files()) {
    const auto first = reinterpret_cast<uintptr_t>(file->bytes().data()) / page;
    std::vector<uint64_t> entries((file->bytes().size() + page - 1) / page);
    const auto bytes = static_cast<ssize_t>(entries.size() * sizeof(uint64_t));
    if (pread(fd, entries.data(), static_cast<size_t>(bytes), static_cast<off_t>(first * 8)) != bytes) {
      pages = -1;
      break;
    }
    for (const uint64_t entry : entries) pages += static_cast<int64_t>(entry >> 63);
  }
  close(fd);
  return pages;
}

// Examining an int4 linear reads its "weight_shape" through the map.
TEST_F(QuantizeTest, ReleasesAllPagesOfTheSourcesMaps) {
  const auto source = *Checkpoint::Open(Golden("ct-llama-int4-g32-asym"));
  const auto items = *ListItems(*source);
  ASSERT_TRUE(FormsOf(*source, items).ok());
  const int64_t touched = ResidentPages(*source);
  if (touched < 0) GTEST_SKIP() << "/proc/self/pagemap cannot be read here";
  EXPECT_GT(touched, 0);
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  ASSERT_TRUE(Quantize(*source, options_, kernels_, *pool, folder_.Path("out")).ok());
  EXPECT_EQ(ResidentPages(*source), 0);
}

// A golden in FP8 blocks with new scales, all ones, for blocks of these many rows.
TEST_F(QuantizeTest, RejectsBlocksThatPiecesWouldSplit) {
  const auto golden = *Checkpoint::Open(Golden("deepseek-v3-fp8"));
  nlohmann::json config = golden->config();
  for (const int64_t rows : {int64_t{48}, int64_t{64}}) {
    config["quantization_config"]["weight_block_size"] = {rows, 128};
    const auto blocks = [](int64_t size, int64_t block) { return base::CeilDiv(size, block); };
    std::vector<checkpoint::TensorOutput> tensors;
    for (const checkpoint::TensorEntry& entry : golden->tensors()) {
      std::vector<int64_t> shape = entry.shape;
      std::vector<std::byte> bytes(entry.bytes.begin(), entry.bytes.end());
      if (entry.name.ends_with("_scale_inv")) {
        const auto* weight = golden->Find(entry.name.substr(0, entry.name.size() - 10));
        shape = {blocks(weight->shape[0], rows), blocks(weight->shape[1], 128)};
        const std::vector<float> ones(static_cast<size_t>(shape[0] * shape[1]), 1);
        bytes.assign(std::as_bytes(std::span(ones)).begin(), std::as_bytes(std::span(ones)).end());
      }
      tensors.push_back(checkpoint::HeldTensor(entry.name, entry.dtype, shape, bytes));
    }
    const std::string name = fmt::format("source-{}", rows);
    fs::create_directory(folder_.Path(name));
    folder_.Write(name + "/config.json", config.dump());
    ASSERT_TRUE(checkpoint::WriteSafetensors(folder_.Path(name) + "/model.safetensors", tensors, {}).ok());
    const Status status = Run(folder_.Path(name), "out-" + name).status();
    if (rows == 64) {
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(Check(folder_.Path(name), "out-" + name).ok());
    } else {
      EXPECT_THAT(Message(status), HasSubstr("scale blocks of 48 rows cannot be quantized again"));
    }
  }
}

TEST_F(QuantizeTest, ReadsTheCompleteGroupIndexOfAnActOrder) {
  const auto source = *Checkpoint::Open(Golden("ct-llama-int4-actorder"));
  const auto items = *ListItems(*source);
  const auto forms = *FormsOf(*source, items);
  size_t indexed = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (forms[i].whole_bytes == 0) continue;
    ++indexed;
    EXPECT_EQ(forms[i].whole_bytes, 4 * items[i].shape[1]) << items[i].name;
  }
  EXPECT_GT(indexed, 6U);
}

TEST_F(QuantizeTest, VerifyFindsAFlippedBit) {
  options_.output.scheme = Scheme::kFp8;
  ASSERT_TRUE(Run(Golden("kimi-k2"), "out").ok());
  Overwrite(folder_.Path("out"), "model.layers.1.self_attn.o_proj.weight", 0x1234);
  EXPECT_THAT(Message(Check(Golden("kimi-k2"), "out").status()),
              HasSubstr("of tensor model.layers.1.self_attn.o_proj.weight,"));
}

TEST_F(QuantizeTest, VerifyRejectsAnotherSource) {
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "out").ok());
  EXPECT_THAT(Message(Check(Golden("qwen3-moe-nonorm-untied"), "out").status()),
              HasSubstr("its header differs from the one"));
}

/// Returns the config.json of a mixture of experts whose linears are whole blocks of 128 outputs.
nlohmann::json MoeConfig() {
  const std::string file = models::SourcePath("tests/golden/qwen3-moe-norm-tied/config.json");
  nlohmann::json config = nlohmann::json::parse(std::ifstream(file));
  config["decoder_sparse_step"] = 1;
  config["hidden_size"] = 256;
  config["head_dim"] = 64;
  config["num_attention_heads"] = 4;
  config["num_key_value_heads"] = 2;
  config["moe_intermediate_size"] = 128;
  return config;
}

TEST(JudgeVllmTest, ReportsTheSchemesThatLoad) {
  nlohmann::json config = MoeConfig();
  config["quantization_config"] = nlohmann::json(QuantizationConfig(Scheme::kW8A8, 0, {"lm_head"}));
  auto verdicts = JudgeVllm(config, "config.json");
  ASSERT_TRUE(verdicts.ok()) << verdicts.status();
  EXPECT_EQ(verdicts->at(0).scheme, "int8 by channel, int8 activations by token");
  EXPECT_THAT(verdicts->at(0).experts, HasSubstr("yes"));
  auto& activations = config["quantization_config"]["config_groups"]["group_0"]["input_activations"];
  activations["strategy"] = "tensor";
  activations["dynamic"] = false;
  verdicts = JudgeVllm(config, "config.json");
  EXPECT_THAT(verdicts->at(0).dense, HasSubstr("yes"));
  EXPECT_THAT(verdicts->at(0).experts, HasSubstr("no: fused experts take only int8 by channel"));
  for (const int group : {0, 32, 128}) {
    config["quantization_config"] = nlohmann::json(QuantizationConfig(Scheme::kW8A16, group, {"lm_head"}));
    verdicts = JudgeVllm(config, "config.json");
    ASSERT_TRUE(verdicts.ok()) << verdicts.status();
    EXPECT_EQ(verdicts->at(0).scheme,
              fmt::format("int8 {}, 16-bit activations",
                          group > 0 ? fmt::format("in groups of {}", group) : "by channel"));
    EXPECT_THAT(verdicts->at(0).dense, HasSubstr("yes"));
    EXPECT_THAT(verdicts->at(0).experts, HasSubstr("yes"));
  }
}

TEST(JudgeVllmTest, Fp8BlocksMustNotSpanJoinedLinears) {
  nlohmann::json config = MoeConfig();
  config["quantization_config"] = nlohmann::json(QuantizationConfig(Scheme::kFp8, 0, {"lm_head"}));
  auto verdicts = JudgeVllm(config, "config.json");
  ASSERT_TRUE(verdicts.ok()) << verdicts.status();
  EXPECT_THAT(verdicts->at(0).dense, HasSubstr("yes"));
  EXPECT_THAT(verdicts->at(0).experts, HasSubstr("yes"));
  config["num_key_value_heads"] = 1;
  config["moe_intermediate_size"] = 192;
  verdicts = JudgeVllm(config, "config.json");
  EXPECT_EQ(verdicts->at(0).dense,
            "no: model.layers.0.self_attn.k_proj has 64 outputs, not a multiple of 128 (ValueError)");
  EXPECT_EQ(verdicts->at(0).experts,
            "no: model.layers.0.mlp.experts.0.gate_proj has 192 outputs, not a multiple of 128 "
            "(ValueError)");
}

TEST(JudgeVllmTest, ProjectionsOfExpertsMustShareOneScheme) {
  nlohmann::json config = MoeConfig();
  config["quantization_config"] = nlohmann::json(QuantizationConfig(Scheme::kW8A8, 0, {"lm_head"}));
  auto& groups = config["quantization_config"]["config_groups"];
  groups["group_1"] = groups["group_0"];
  groups["group_1"]["targets"] = {"model.layers.0.mlp.experts.0.down_proj"};
  const auto verdicts = JudgeVllm(config, "config.json");
  ASSERT_TRUE(verdicts.ok()) << verdicts.status();
  for (const LoaderVerdict& verdict : *verdicts) {
    EXPECT_THAT(verdict.dense, HasSubstr("yes"));
    EXPECT_EQ(verdict.experts,
              "no: gate, up and down of model.layers.0.mlp.experts.0 do not share one scheme (ValueError)");
  }
}

TEST(JudgeVllmTest, EveryExpertMustHaveTheSchemeOfTheFirst) {
  for (const auto& [kept, named] :
       {std::pair(R"(re:.*\.layers\.1\..*experts\.5\.)", "experts.5.gate_proj"),
        std::pair(R"(re:.*\.layers\.1\..*experts\.5\.down)", "experts.5.down_proj"),
        std::pair(R"(re:.*\.layers\.1\..*experts\.0\.)", "experts.1.gate_proj")}) {
    nlohmann::json config = MoeConfig();
    for (const Scheme scheme : {Scheme::kW8A8, Scheme::kW4A16}) {
      config["quantization_config"] = nlohmann::json(QuantizationConfig(scheme, 32, {"lm_head", kept}));
      const auto verdicts = JudgeVllm(config, "config.json");
      ASSERT_TRUE(verdicts.ok()) << verdicts.status();
      EXPECT_THAT(verdicts->at(0).dense, HasSubstr("yes"));
      EXPECT_THAT(verdicts->at(0).experts,
                  StartsWith(fmt::format("no: model.layers.1.mlp.{} does not", named)));
    }
  }
}

TEST(JudgeVllmTest, JudgesLayersOfMultiTokenPrediction) {
  const std::string file = models::SourcePath("models/moesaic-tiny/config.json");
  nlohmann::json config = nlohmann::json::parse(std::ifstream(file));
  const auto judge = [&config](const char* kept) {
    config["quantization_config"] = nlohmann::json(QuantizationConfig(Scheme::kW8A8, 0, {"lm_head", kept}));
    return JudgeVllm(config, "config.json")->at(0).experts;
  };
  EXPECT_THAT(judge(R"(re:.*\.mlp\.gate$)"), StartsWith("yes"));
  EXPECT_EQ(judge(R"(re:.*\.layers\.4\.mlp\.experts\..*down_proj)"),
            "no: gate, up and down of model.layers.4.mlp.experts.0 do not share one scheme (ValueError)");
  EXPECT_THAT(judge(R"(re:.*\.layers\.4\.mlp\.experts\.5\.)"),
              StartsWith("no: model.layers.4.mlp.experts.5.gate_proj does not have the scheme of experts.0"));
}

TEST(JudgeVllmTest, MarlinNeedsExpertInputsInMultiplesOf128) {
  nlohmann::json config = MoeConfig();
  const auto judge = [&config](Scheme scheme, int group) {
    config["quantization_config"] = nlohmann::json(QuantizationConfig(scheme, group, {"lm_head"}));
    return JudgeVllm(config, "config.json")->at(0).experts;
  };
  config["hidden_size"] = 192;
  EXPECT_THAT(judge(Scheme::kW4A16, 32), StartsWith("yes (Triton"));
  EXPECT_THAT(judge(Scheme::kW8A16, 64), StartsWith("yes (Triton"));
  EXPECT_EQ(judge(Scheme::kW8A16, 0),
            "no: only Marlin runs channel scales, and 192 inputs are not a multiple of 128 (AssertionError)");
  EXPECT_EQ(judge(Scheme::kW4A16, 128), "no: 192 inputs are not a multiple of 128 (ValueError)");
  config["hidden_size"] = 256;
  config["moe_intermediate_size"] = 96;
  EXPECT_THAT(judge(Scheme::kW8A16, 0), StartsWith("yes (Marlin"));
  EXPECT_THAT(judge(Scheme::kW8A16, 32), StartsWith("yes (Marlin"));
  EXPECT_EQ(judge(Scheme::kW8A16, 64), "no: 96 inputs are not a multiple of 64 (ValueError)");
}

TEST(JudgeVllmTest, UnknownArchitecturesAreNotJudged) {
  nlohmann::json config = MoeConfig();
  config["architectures"] = {"ArcticForCausalLM"};
  config["quantization_config"] = nlohmann::json(QuantizationConfig(Scheme::kW8A8, 0, {"lm_head"}));
  auto verdicts = JudgeVllm(config, "config.json");
  ASSERT_TRUE(verdicts.ok()) << verdicts.status();
  for (const std::string& said : {verdicts->at(0).dense, verdicts->at(0).experts}) {
    EXPECT_EQ(said,
              "not judged: the scheme loads, but Moesaic does not know the linears of ArcticForCausalLM");
  }
  config["quantization_config"]["config_groups"]["group_0"].erase("input_activations");
  verdicts = JudgeVllm(config, "config.json");
  EXPECT_EQ(verdicts->at(0).dense, "no: int8 weights need int8 activations");
}

}  // namespace
}  // namespace moesaic::quantizer
