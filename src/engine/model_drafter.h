// Drafts with a second, smaller model of the same vocabulary (Leviathan et al., arXiv 2211.17192).
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kv_store.h"
#include "engine/drafter.h"
#include "engine/local_executor.h"

namespace moesaic::engine {

/// Has its own KV blocks. If none is free, it drafts nothing for a sequence that needs one.
class ModelDrafter : public Drafter {
 public:
  /// `model`, `kernels` and `threads` are borrowed. A step reads at most `max_rows` tokens, and the last 16
  /// of each sequence besides.
  ModelDrafter(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
               std::unique_ptr<cache::KvStore> store, int max_rows);
  void Keep(const std::vector<std::unique_ptr<Sequence>>& running) override;
  int Limit(const Sequence& sequence, int most) override;
  int PendingRows(const Sequence& sequence) const override;
  Status Draft(std::span<const DraftJob> jobs) override;

 private:
  struct State {
    std::vector<int32_t> tokens;  // with keys and values in `blocks`
    std::vector<cache::BlockRef> blocks;
    std::vector<int32_t> block_table;
  };
  // A job that is not finished.
  struct Chain {
    Sequence* sequence;
    State* state;
    int depth;
    int end;  // tokens to compute before the first draft
  };

  static int End(const Sequence& sequence);
  static int Known(const State& state, const Sequence& sequence);
  bool Reserve(State& state, int tokens);
  Status TakeIn(std::vector<Chain>& chains);
  Status Append(std::vector<Chain>& chains);

  const int context_, max_rows_;
  const std::unique_ptr<cache::KvStore> store_;
  cache::BlockPool pool_;
  LocalExecutor executor_;
  absl::flat_hash_map<RequestId, std::unique_ptr<State>> states_;
};

}  // namespace moesaic::engine
