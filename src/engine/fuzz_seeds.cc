// Writes the first inputs of this room's fuzzers: FOLDER/step_batch_fuzzer/.
#include <string_view>
#include <vector>

#include "base/test_seeds.h"
#include "engine/step_batch.h"

int main(int argc, char** argv) {
  using namespace moesaic;
  const base::SeedCorpus corpus(argc, argv);
  const auto write = [&corpus](std::string_view name, const engine::StepBatch& batch) {
    corpus.Write("step_batch_fuzzer", name, engine::Serialize(batch));
  };
  write("empty", {});
  engine::StepBatch batch = {.want_hidden = true};
  batch.ops_before = {{.kind = cache::KvOpKind::kSave, .block = 1, .slot = 2}};
  batch.ops_after = {{.kind = cache::KvOpKind::kBuildSummary, .block = 3}};
  batch.ended = {1};
  const std::vector<int32_t> tokens = {1, 2, 3}, table = {4, 5};
  const kernels::SparsitySettings setting = {.budget_blocks = 4, .reuse = 2};
  batch.AddRows({.sequence = 2, .start = 63, .first_logits = 2}, tokens, {}, table, &setting);
  write("rows", batch);
  engine::StepBatch draft = {.kind = engine::StepKind::kMtp};
  draft.AddRows({.sequence = 2}, std::span(tokens).first(1), {}, table);
  draft.hidden = {0.5F, 1.5F};
  write("mtp", draft);
  return 0;
}
