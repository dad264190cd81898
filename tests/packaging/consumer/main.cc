// Loads a model and its tokenizer with the installed libraries, and prints the token ids of a text.
// Usage: consumer MODEL_FOLDER TEXT
#include <cstdio>

#include "engine/engine.h"
#include "models/model.h"
#include "runtime/thread_pool.h"
#include "text/tokenizer.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto threads = moesaic::runtime::ThreadPool::Create({.threads = 1, .pin = false});
  if (!threads.ok()) return 1;
  const auto model = moesaic::models::Model::Load(argv[1], {}, **threads);
  const auto tokenizer = moesaic::text::Tokenizer::FromFolder(argv[1]);
  if (!model.ok() || !tokenizer.ok()) {
    std::fprintf(stderr, "cannot load %s\n", argv[1]);
    return 1;
  }
  const auto ids = tokenizer->Encode(argv[2], /*add_special=*/false);
  if (!ids.ok()) return 1;
  std::printf("vocabulary %d:", (*model)->info().vocab_size);
  for (const int id : *ids) std::printf(" %d", id);
  std::printf("\n");
  return 0;
}
