#include "app/hub_cache.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace moesaic::app {
namespace {

namespace fs = std::filesystem;

class HubCacheTest : public testing::Test {
 protected:
  HubCacheTest() {
    std::string pattern = testing::TempDir() + "hub_XXXXXX";
    cache_ = mkdtemp(pattern.data());
    repository_ = cache_ / "models--Org--Name-1.5B";
    snapshot_ = repository_ / "snapshots" / "abc123";
    fs::create_directories(snapshot_);
    fs::create_directories(repository_ / "refs");
    fs::create_directories(repository_ / "blobs");
    std::ofstream(repository_ / "refs" / "main") << "abc123";
    setenv("HF_HUB_CACHE", cache_.c_str(), /*overwrite=*/1);
  }
  ~HubCacheTest() override {
    unsetenv("HF_HUB_CACHE");
    fs::remove_all(cache_);
  }
  void Add(const std::string& name) {
    const fs::path blob = repository_ / "blobs" / fs::path(name).filename();
    std::ofstream(blob) << "{}";
    fs::create_directories((snapshot_ / name).parent_path());
    fs::create_symlink(blob, snapshot_ / name);
  }
  std::string Fault(const std::string& id) { return Message(FindModel(id).status()); }

  fs::path cache_, repository_, snapshot_;
};

TEST_F(HubCacheTest, ResolvesAnIdToItsSnapshotOfMain) {
  Add("config.json");
  EXPECT_EQ(*FindModel("Org/Name-1.5B"), snapshot_.string());
  EXPECT_EQ(*FindModel(cache_.string()), cache_.string());
  EXPECT_EQ(HubIdOf(snapshot_.string()), "Org/Name-1.5B");
  EXPECT_EQ(HubIdOf((snapshot_ / "x.gguf").string()), "Org/Name-1.5B");
  EXPECT_EQ(HubIdOf("models/moesaic-tiny"), "");
}

TEST_F(HubCacheTest, ErrorForAnAbsentModelExplainsHowToDownloadIt) {
  EXPECT_EQ(Fault("Qwen/Qwen3-30B-A3B"),
            "path does not exist: Qwen/Qwen3-30B-A3B; the Hugging Face cache " + cache_.string() +
                " has no such model either; to download it: hf download Qwen/Qwen3-30B-A3B");
  for (const char* path :
       {"/no/where", "nowhere", "./no/where", "../x/y", "a/b/c", "a/", "/a", ".a/b", "a b/c"}) {
    EXPECT_EQ(Fault(path), std::string("path does not exist: ") + path);
  }
  fs::remove(repository_ / "refs" / "main");
  EXPECT_NE(Fault("Org/Name-1.5B").find("has no refs/main"), std::string::npos);
}

TEST_F(HubCacheTest, ADownloadThatWasCutShortIsNamed) {
  Add("config.json");
  Add("model.safetensors");
  fs::remove(repository_ / "blobs" / "model.safetensors");
  EXPECT_NE(
      Fault("Org/Name-1.5B").find("incomplete, model.safetensors is missing; to finish it: hf download"),
      std::string::npos)
      << Fault("Org/Name-1.5B");
}

TEST_F(HubCacheTest, AQuantSelectsAGgufFile) {
  Add("m-Q4_K_M-00001-of-00002.gguf");
  Add("m-Q4_K_M-00002-of-00002.gguf");
  EXPECT_EQ(*FindModel("Org/Name-1.5B"), (snapshot_ / "m-Q4_K_M-00001-of-00002.gguf").string());
  Add("m-Q8_0.gguf");
  EXPECT_EQ(*FindModel("Org/Name-1.5B:q8_0"), (snapshot_ / "m-Q8_0.gguf").string());
  EXPECT_NE(
      Fault("Org/Name-1.5B").find("2 of its GGUF files match; name one as Org/Name-1.5B:QUANT: m-Q4_K_M"),
      std::string::npos);
}

TEST_F(HubCacheTest, AQuantMatchesAWholeWordOfAFileOrFolder) {
  Add("m-Q4_K_M.gguf");
  Add("m-Q4_K_S.gguf");
  Add("m-IQ4_XS.gguf");
  Add("m_q4_0.gguf");
  EXPECT_EQ(*FindModel("Org/Name-1.5B:Q4_0"), (snapshot_ / "m_q4_0.gguf").string());
  EXPECT_EQ(*FindModel("Org/Name-1.5B:q4_k_s"), (snapshot_ / "m-Q4_K_S.gguf").string());
  EXPECT_EQ(*FindModel("Org/Name-1.5B:m-Q4_K_M"), (snapshot_ / "m-Q4_K_M.gguf").string());
  for (const char* part : {"Q4_K", "Q4", "Q4_XS", "K_M.g"}) {
    EXPECT_NE(Fault(std::string("Org/Name-1.5B:") + part).find("0 of its GGUF files match"),
              std::string::npos)
        << part;
  }
}

TEST_F(HubCacheTest, FilesOfSubfoldersAreFound) {
  Add("BF16/m-BF16-00001-of-00002.gguf");
  Add("BF16/m-BF16-00002-of-00002.gguf");
  Add("Q8_0/m.gguf");
  EXPECT_EQ(*FindModel("Org/Name-1.5B:bf16"), (snapshot_ / "BF16/m-BF16-00001-of-00002.gguf").string());
  EXPECT_EQ(*FindModel("Org/Name-1.5B:Q8_0"), (snapshot_ / "Q8_0/m.gguf").string());
  EXPECT_NE(Fault("Org/Name-1.5B").find("BF16/m-BF16-00001-of-00002.gguf, Q8_0/m.gguf"), std::string::npos);
  fs::remove(repository_ / "blobs" / "m.gguf");
  EXPECT_NE(Fault("Org/Name-1.5B:bf16").find("incomplete, Q8_0/m.gguf is missing"), std::string::npos);
}

TEST_F(HubCacheTest, FindsTheCacheByTheEnvironmentOfTheHubsLibraries) {
  const auto with = [](const char* name, const char* value) {
    setenv(name, value, /*overwrite=*/1);
    const std::string folder = HubCacheFolder();
    unsetenv(name);
    return folder;
  };
  EXPECT_EQ(HubCacheFolder(), cache_.string());
  unsetenv("HF_HUB_CACHE");
  EXPECT_EQ(with("HF_HOME", "/data/hf"), "/data/hf/hub");
  EXPECT_EQ(with("HF_HOME", "~/hf"), std::string(std::getenv("HOME")) + "/hf/hub");
  EXPECT_EQ(with("XDG_CACHE_HOME", "/cache"), "/cache/huggingface/hub");
}

}  // namespace
}  // namespace moesaic::app
