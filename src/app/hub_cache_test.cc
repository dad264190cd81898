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
    std::ofstream(repository_ / "blobs" / name) << "{}";
    fs::create_symlink("../../blobs/" + name, snapshot_ / name);
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

TEST_F(HubCacheTest, MissingModelErrorSaysHowToDownloadIt) {
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

TEST_F(HubCacheTest, ReportsAnIncompleteDownload) {
  Add("config.json");
  Add("model.safetensors");
  fs::remove(repository_ / "blobs" / "model.safetensors");
  EXPECT_NE(
      Fault("Org/Name-1.5B").find("incomplete, model.safetensors is missing; to finish it: hf download"),
      std::string::npos)
      << Fault("Org/Name-1.5B");
}

TEST_F(HubCacheTest, QuantSelectsAGgufFile) {
  Add("m-Q4_K_M-00001-of-00002.gguf");
  Add("m-Q4_K_M-00002-of-00002.gguf");
  EXPECT_EQ(*FindModel("Org/Name-1.5B"), (snapshot_ / "m-Q4_K_M-00001-of-00002.gguf").string());
  Add("m-Q8_0.gguf");
  EXPECT_EQ(*FindModel("Org/Name-1.5B:q8_0"), (snapshot_ / "m-Q8_0.gguf").string());
  EXPECT_NE(
      Fault("Org/Name-1.5B").find("2 of its GGUF files match; name one as Org/Name-1.5B:QUANT: m-Q4_K_M"),
      std::string::npos);
}

TEST_F(HubCacheTest, FolderComesFromTheEnvironment) {
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
