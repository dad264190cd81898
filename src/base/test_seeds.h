// Writes the first inputs of fuzzers. A program *fuzz_seeds is run with a folder CORPUS and fills
// CORPUS/<fuzzer>/.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace moesaic::base {

/// The folder of a program's seeds. An error ends the program, so that a corpus is never incomplete.
class SeedCorpus {
 public:
  /// Reads the arguments of main().
  SeedCorpus(int argc, char** argv) {
    if (argc != 2) {
      std::fprintf(stderr, "usage: %s CORPUS\n", argc > 0 ? argv[0] : "fuzz_seeds");
      std::exit(2);
    }
    corpus_ = argv[1];
  }

  /// Returns the folder of the inputs of `fuzzer`, which exists.
  std::filesystem::path Folder(std::string_view fuzzer) const {
    std::filesystem::path folder = corpus_ / fuzzer;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) Fail(folder, error.message());
    return folder;
  }

  void Write(std::string_view fuzzer, std::string_view name, std::string_view content) const {
    const std::filesystem::path file = Folder(fuzzer) / name;
    std::ofstream stream(file, std::ios::binary);
    if (!(stream << content) || !stream.flush()) Fail(file, "the file cannot be written");
  }

  /// Writes each element of `contents` as the file seed0, seed1 and so on.
  template <typename Contents>
  void WriteAll(std::string_view fuzzer, const Contents& contents) const {
    int count = 0;
    for (const std::string_view content : contents) Write(fuzzer, "seed" + std::to_string(count++), content);
  }

  [[noreturn]] static void Fail(const std::filesystem::path& where, const std::string& reason) {
    std::fprintf(stderr, "%s: %s\n", where.c_str(), reason.c_str());
    std::exit(1);
  }

 private:
  std::filesystem::path corpus_;
};

}  // namespace moesaic::base
