// Measures Encode and Decode on real text in MB/s. Arguments: a folder with a tokenizer and a text file; by
// default the shared test data. bench/tokenizer_vs_hf.py runs the same measurement with HF's own tokenizers.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdio>

#include "text/file.h"
#include "text/tokenizer.h"

namespace moesaic::text {
namespace {

/// Text is encoded request by request: pieces of about this many bytes, split at line ends.
constexpr size_t kPieceBytes = 4096;

std::vector<std::string> Pieces(const std::string& text) {
  std::vector<std::string> pieces;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(at + kPieceBytes, text.size());
    const size_t line = text.find('\n', end);
    end = line == text.npos ? text.size() : line + 1;
    pieces.push_back(text.substr(at, end - at));
    at = end;
  }
  return pieces;
}

void Encode(benchmark::State& state, const Tokenizer& tokenizer, const std::vector<std::string>& pieces) {
  int64_t bytes = 0;
  for (auto _ : state) {
    for (const std::string& piece : pieces) {
      benchmark::DoNotOptimize(tokenizer.Encode(piece, false));
      bytes += static_cast<int64_t>(piece.size());
    }
  }
  state.SetBytesProcessed(bytes);
}

void Decode(benchmark::State& state, const Tokenizer& tokenizer, const std::vector<std::string>& pieces) {
  std::vector<std::vector<int32_t>> ids;
  for (const std::string& piece : pieces) ids.push_back(*tokenizer.Encode(piece, false));
  int64_t tokens = 0;
  for (auto _ : state) {
    for (const auto& row : ids) {
      StreamingDecoder decoder(tokenizer, false);
      for (const int32_t id : row) benchmark::DoNotOptimize(decoder.Push(id));
      tokens += static_cast<int64_t>(row.size());
    }
  }
  state.SetItemsProcessed(tokens);
}

int Main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (argc != 3) {
    std::fprintf(stderr, "usage: text_tokenizer_bench TOKENIZER_FOLDER TEXT_FILE [--benchmark_...]\n");
    return 2;
  }
  StatusOr<Tokenizer> tokenizer = Tokenizer::FromFolder(argv[1]);
  StatusOr<std::string> text = ReadFile(argv[2]);
  if (!tokenizer.ok() || !text.ok()) {
    std::fprintf(stderr, "%s\n", Message(tokenizer.ok() ? text.status() : tokenizer.status()).c_str());
    return 1;
  }
  const std::vector<std::string> pieces = Pieces(*text);
  benchmark::RegisterBenchmark("Encode", [&](benchmark::State& s) { Encode(s, *tokenizer, pieces); });
  benchmark::RegisterBenchmark("StreamingDecode",
                               [&](benchmark::State& s) { Decode(s, *tokenizer, pieces); });
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace moesaic::text

int main(int argc, char** argv) { return moesaic::text::Main(argc, argv); }
