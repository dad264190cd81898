#include "parallel/placement/load_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/test_safetensors.h"
#include "parallel/placement/bounded_input.h"
#include "parallel/placement/damaged_bytes.h"
#include "parallel/placement/numpy_file.h"

namespace moesaic::parallel {
namespace {

using checkpoint::SafetensorsFile;
using Values = std::vector<double>;

// A .npy file with the given header dictionary.
std::string Npy(const std::string& dictionary, const std::string& data, int version = 1) {
  std::string file = "\x93NUMPY";
  file += static_cast<char>(version);
  file += '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i)
    file += static_cast<char>((dictionary.size() >> (8 * i)) & 255);
  return file + dictionary + data;
}

TEST(LoadFile, ReadsNumpyArraysOfAllVersionsTypesAndOrders) {
  const std::string data("\x01\x00\x02\x00\x03\x00\x04\x00\x05\x00\x06\x00", 12);
  for (const int version : {1, 2, 3}) {
    const auto load = ParseLoad(
        Npy("{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }\n", data, version), "a.npy");
    ASSERT_TRUE(load.ok()) << load.status();
    EXPECT_EQ(load->total.layers, 2);
    EXPECT_EQ(load->total.tokens, (Values{1, 2, 3, 4, 5, 6}));
  }
  const auto fortran =
      ParseLoad(Npy("{'shape': (2, 3), 'fortran_order': True, 'descr': '<u2'}", data), "a.npy");
  EXPECT_EQ(fortran->total.tokens, (Values{1, 3, 5, 2, 4, 6}));
  const auto big = ParseLoad(Npy("{'descr': '>u2', 'fortran_order': False, 'shape': (1, 6)}", data), "a.npy");
  EXPECT_EQ(big->total.tokens, (Values{256, 512, 768, 1024, 1280, 1536}));
  const std::string halves("\x00\x3c\x00\x40\x01\x00", 6);  // 1, 2, 2^-24
  const auto half =
      ParseLoad(Npy("{'descr': '<f2', 'fortran_order': False, 'shape': (1, 3)}", halves), "a.npy");
  EXPECT_EQ(half->total.tokens, (Values{1, 2, 0x1p-24}));
}

TEST(LoadFile, SumsWindows) {
  const std::string file = NumpyBytes(Values{1, 2, 3, 4, 10, 20, 30, 40}, std::vector<int64_t>{2, 2, 2});
  const auto load = ParseLoad(file, "a.npy");
  ASSERT_TRUE(load.ok()) << load.status();
  EXPECT_EQ(load->windows.size(), 2U);
  EXPECT_EQ(load->total.tokens, (Values{11, 22, 33, 44}));
  const auto json = ParseLoad(R"({"logical_count": [[[1, 2], [3, 4]], [[10, 20], [30, 40]]]})", "a.json");
  EXPECT_EQ(json->total.tokens, load->total.tokens);
}

TEST(LoadFile, FoldsPhysicalExpertsOfVllm) {
  const auto load =
      ParseLoad(R"({"expert_load_pass": [[5, 6, 7]], "physical_to_logical_map": [[1, 0, 1]]})", "vllm.json");
  ASSERT_TRUE(load.ok()) << load.status();
  EXPECT_EQ(load->total.tokens, (Values{6, 12}));
}

TEST(LoadFile, NamesTheFaultOfBrokenFiles) {
  const auto message = [](std::string_view bytes) {
    return std::string(ParseLoad(bytes, "f").status().message());
  };
  EXPECT_EQ(message(""), "f: a load is a .npy file, or a JSON object with \"logical_count\"");
  EXPECT_EQ(message("{}"),
            "f: needs \"logical_count\" (SGLang), or \"expert_load_window\" or \"expert_load_pass\" (vLLM)");
  EXPECT_EQ(message(R"({"logical_count": [[1, 2], [3]]})"),
            "f: \"logical_count\" must have rows of equal lengths, found 1");
  EXPECT_EQ(message(R"({"logical_count": [[1, "x"]]})"),
            "f: \"logical_count\" must hold numbers, found \"x\"");
  EXPECT_EQ(message(R"({"logical_count": [[1, -2]]})"), "f: loads must be finite and not negative, found -2");
  EXPECT_EQ(message(R"({"logical_count": [[0, 0]]})"), "f: has no tokens: the sum of its loads is 0");
  EXPECT_EQ(message(Npy("{'descr': '<c8', 'fortran_order': False, 'shape': (1, 1)}", "12345678")),
            "f: values must be booleans, integers or floats of 2, 4 or 8 bytes, found dtype \"<c8\"");
  EXPECT_EQ(message(Npy("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2)}", "1234")),
            "f: 2 values of 4 bytes need 8 bytes after the header, found 4");
  EXPECT_EQ(message(Npy("{'descr': '<i4', 'fortran_order': False, 'shape': (33554432, 33554432)}", "")),
            "f: must have at most 33554432 values");
  EXPECT_EQ(message(Npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "")),
            "f: values must be booleans, integers or floats of 2, 4 or 8 bytes, found dtype \"|O\"");
}

TEST(LoadFile, RefusesSizesThatNeedTooMuchMemory) {
  const auto message = [](std::string_view bytes) {
    return std::string(ParseLoad(bytes, "f").status().message());
  };
  EXPECT_EQ(message(Npy("{'descr': '|u1', 'fortran_order': False, 'shape': (70000, 1, 1)}",
                        std::string(70000, '\1'))),
            "f: must have at most 65536 windows, found 70000");
  std::string lists = R"({"logical_count": [)";
  for (int i = 0; i < 5'000'000; ++i) lists += i == 0 ? "[]" : ",[]";
  EXPECT_EQ(message(lists + "]}"), "f: must have at most 4194304 lists, objects and members, found 5000003");
  std::string members = R"({"logical_count": [[1]])";
  for (int i = 0; i < 4'200'000; ++i) members += ",\"\":0";
  EXPECT_EQ(message(members + "}"), "f: must have at most 4194304 lists, objects and members, found 4200004");
}

TEST(LoadFile, RefusesEveryTruncationOfANumpyFile) {
  const std::string file = NumpyBytes(Values{1, 2, 3, 4}, std::vector<int64_t>{2, 2});
  for (size_t bytes = 0; bytes < file.size(); ++bytes)
    EXPECT_FALSE(ParseLoad(file.substr(0, bytes), "f").ok());
}

// Damages valid files at random. A file that is still read has values within the limits.
TEST(LoadFile, DamagedFilesEndInAnErrorOrAValidLoad) {
  const std::vector<std::string> files = {
      NumpyBytes(Values{1, 2, 3, 4, 5, 6, 7, 8}, std::vector<int64_t>{2, 2, 2}),
      R"({"logical_count": [[[1, 2], [3, 4]], [[10, 20], [30, 40]]]})",
      R"({"expert_load_pass": [[5, 6, 7]], "physical_to_logical_map": [[1, 0, 1]]})"};
  int read = 0;
  for (uint64_t seed = 0; seed < 30000; ++seed) {
    Random random(seed);
    const std::string bytes = Damaged(files[seed % files.size()], random);
    const auto load = ParseLoad(bytes, "f");
    if (load.ok()) {
      ++read;
      ASSERT_TRUE(CheckLoad(load->total, "f").ok()) << seed;
    } else {
      ASSERT_EQ(load.status().message().substr(0, 3), "f: ") << seed;
    }
  }
  EXPECT_GT(read, 1000);
}

class Folder : public testing::Test {
 protected:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("moesaic-loads-" + std::to_string(reinterpret_cast<uintptr_t>(this)))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() override { std::filesystem::remove_all(path_); }
  void Write(const std::string& name, const std::string& content) {
    std::ofstream(path_ / name, std::ios::binary) << content;
  }
  std::filesystem::path path_;
};

TEST_F(Folder, OmniPlacementRanksAreColumnsAndStepsAreWindows) {
  Write("activation_counts_recordstep_3_rank_0.txt", "1\t2\t\n3\t4\t\n");
  Write("activation_counts_recordstep_3_rank_1.txt", "5\t6\n7\t8\n");
  Write("activation_counts_recordstep_9_rank_0.txt", "1 1\n1 1\n");
  Write("activation_counts_recordstep_9_rank_1.txt", "0 0\n0 0\n");
  const auto load = ReadLoad(path_.string());
  ASSERT_TRUE(load.ok()) << load.status();
  EXPECT_EQ(load->windows.size(), 2U);
  EXPECT_EQ(load->total.tokens, (Values{2, 3, 5, 6, 4, 5, 7, 8}));
  std::filesystem::remove(path_ / "activation_counts_recordstep_3_rank_0.txt");
  EXPECT_NE(ReadLoad(path_.string()).status().message().find("needs the files of all ranks"),
            std::string::npos);
  Write("activation_counts_recordstep_3_rank_0.txt", "1\tx\n");
  EXPECT_NE(ReadLoad(path_.string()).status().message().find("line 1: must hold counts, found \"x\""),
            std::string::npos);
}

TEST_F(Folder, AStepWithoutLayersIsRefused) {
  Write("activation_counts_recordstep_3_rank_0.txt", "1 2\n");
  Write("activation_counts_recordstep_9_rank_0.txt", "");
  EXPECT_EQ(ReadLoad(path_.string()).status().message(),
            path_.string() + ": step 9: needs a line per layer, found none");
  Write("activation_counts_recordstep_9_rank_0.txt", "1 2\n3 4\n");
  EXPECT_EQ(ReadLoad(path_.string()).status().message(),
            path_.string() + ": step 9: must have 1 layers as step 3, found 2");
}

TEST_F(Folder, TensorRtCountsAreNotNegative) {
  const std::string header = R"({"50_3":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})";
  Write("rank0.safetensors", SafetensorsFile(header, std::string("\x01\x00\x00\x00\xff\xff\xff\xff", 8)));
  EXPECT_EQ(ReadLoad(path_.string()).status().message(),
            (path_ / "rank0.safetensors").string() + ": tensor \"50_3\" must hold counts, found -1");
}

TEST_F(Folder, FilesAreReadWithinBounds) {
  EXPECT_EQ(ReadBoundedFile(path_.string()).status().message(),
            path_.string() + ": must be a file, found a folder");
  EXPECT_EQ(ReadBoundedFile("/dev/zero", 5000).status().message(),
            "/dev/zero: must be at most 5000 bytes, found more");
  EXPECT_EQ(ReadBoundedFile((path_ / "none").string()).status().message(),
            (path_ / "none").string() + ": cannot be opened: No such file or directory");
}

TEST_F(Folder, TensorRtRanksAreSummed) {
  const std::string header = R"({"50_3":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})";
  const std::string file = SafetensorsFile(header, std::string("\x01\x00\x00\x00\x02\x00\x00\x00", 8));
  Write("rank0.safetensors", file);
  Write("rank1.safetensors", file);
  Write("meta_info.json", "{}");
  const auto load = ReadLoad(path_.string());
  ASSERT_TRUE(load.ok()) << load.status();
  EXPECT_EQ(load->total.tokens, (Values{2, 4}));
}

// Layers are matched by their numbers, not by their order.
TEST_F(Folder, TensorRtIterationsHaveTheSameLayers) {
  const std::string header =
      R"({"50_3":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},"50_4":{"dtype":"I32","shape":[1],"data_offsets":[4,8]},)"
      R"("51_3":{"dtype":"I32","shape":[1],"data_offsets":[8,12]},"51_5":{"dtype":"I32","shape":[1],"data_offsets":[12,16]}})";
  Write("rank0.safetensors", SafetensorsFile(header, std::string(16, '\1')));
  EXPECT_EQ(ReadLoad(path_.string()).status().message(),
            path_.string() + ": iteration 51 must have the layers of iteration 50");
}

}  // namespace
}  // namespace moesaic::parallel
