// Writes the first inputs of this folder's fuzzers: a file of each format that is read.
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/test_seeds.h"
#include "checkpoint/test_safetensors.h"
#include "parallel/placement/numpy_file.h"
#include "parallel/placement/placement_file.h"

namespace {

using namespace moesaic::parallel;

// Counts of two iterations and two layers, as TensorRT-LLM writes them.
std::string TensorRtLoad() {
  const std::string header =
      R"({"50_3":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"50_4":{"dtype":"I32","shape":[2],"data_offsets":[8,16]},)"
      R"("51_3":{"dtype":"I64","shape":[2],"data_offsets":[16,32]},"51_4":{"dtype":"I64","shape":[2],"data_offsets":[32,48]}})";
  std::string data;
  for (int i = 0; i < 48; ++i) data += static_cast<char>(i % 4 == 0 ? i + 1 : 0);
  return moesaic::checkpoint::SafetensorsFile(header, data);
}

void WriteLoads(const moesaic::base::SeedCorpus& corpus) {
  const std::array<int64_t, 8> whole = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::array<int32_t, 4> narrow = {1, 2, 3, 4};
  const std::array<double, 4> real = {0.5, 1, 1.5, 2};
  const auto write = [&corpus](std::string_view name, std::string_view content) {
    corpus.Write("load_file_fuzzer", name, content);
  };
  write("windows.npy", NumpyBytes(std::span<const int64_t>(whole), std::vector<int64_t>{2, 2, 2}));
  write("i4.npy", NumpyBytes(std::span<const int32_t>(narrow), std::vector<int64_t>{2, 2}));
  write("f8.npy", NumpyBytes(std::span<const double>(real), std::vector<int64_t>{1, 4}));
  write("sglang.json", R"({"logical_count": [[[1, 2], [3, 4]], [[10, 20], [30, 40]]]})");
  write("vllm.json",
        R"({"expert_load_window": [[[5, 6, 7]], [[1, 2, 3]]], "physical_to_logical_map": [[1, 0, 1]]})");
  write("tensorrt.safetensors", TensorRtLoad());
  write("omni.txt", "1\t2\t\n3\t4\t\n");
  write("cost.json",
        R"({"batch_tokens": 512, "top_k": 8, "groups": 8, "top_groups": 4, "tile_rows": 64, "tile_s": 4e-6,
            "read_s": 1e-5, "token_bytes": 14336, "levels": [{"groups": 4, "bytes_per_s": 5e10}],
            "expert_bytes": 4.4e7, "move_bytes_per_s": 2.5e10, "interval_batches": 10000})");
}

void WritePlacements(const moesaic::base::SeedCorpus& corpus) {
  const Placement placement{4, {{{0, 1}, {2, 3}, {0, 3}, {1, 2}}, {{3, 2}, {1, 0}, {3, 1}, {0, 2}}}};
  const std::pair<const char*, PlacementFormat> formats[] = {{"moesaic.json", PlacementFormat::kMoesaic},
                                                             {"eplb.npz", PlacementFormat::kEplb},
                                                             {"sglang.json", PlacementFormat::kSglang},
                                                             {"omni.npy", PlacementFormat::kOmni},
                                                             {"tensorrt.yaml", PlacementFormat::kTensorRt}};
  for (const auto& [name, format] : formats) {
    const auto bytes = PlacementBytes(placement, format);
    if (!bytes.ok()) moesaic::base::SeedCorpus::Fail(name, std::string(bytes.status().message()));
    corpus.Write("placement_file_fuzzer", name, *bytes);
  }
  constexpr std::array<int64_t, 4> kPhysical = {0, 1, 1, 0};
  corpus.Write("placement_file_fuzzer", "phy2log.npy",
               NumpyBytes(std::span<const int64_t>(kPhysical), std::vector<int64_t>{1, 4}));
  corpus.Write("placement_file_fuzzer", "block.yaml",
               "initial_global_assignments:\n  3:\n  - 0\n  - 1\n  - 1\n  - 0\nlayer_updates_per_iter: 2\n"
               "num_slots: 4\n");
}

}  // namespace

int main(int argc, char** argv) {
  const moesaic::base::SeedCorpus corpus(argc, argv);
  WriteLoads(corpus);
  WritePlacements(corpus);
  return 0;
}
