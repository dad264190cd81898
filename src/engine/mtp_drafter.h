// Drafts with the model's own multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437 section 2.2),
// whose keys and values are in the sequences' blocks, in the layer after the decoder's.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/drafter.h"
#include "engine/executor.h"

namespace moesaic::engine {

/// Computes the first draft from the final hidden state of the last computed token and the token drawn after
/// it, and each later one from the module's own hidden state. The rows of a sequence are contiguous from the
/// beginning of a block (DraftState::mtp_first). If rows are missing, the module restarts in the current
/// block, with zeros for the missing rows.
class MtpDrafter : public Drafter {
 public:
  /// `executor` is borrowed. `blocks` is the number of blocks of the cache, and `layer` the index of the
  /// module's layer in a block.
  MtpDrafter(Executor& executor, int blocks, int layer, int hidden_size);
  int Limit(const Sequence& sequence, int most) override;
  int PendingRows(const Sequence& sequence) const override;
  Status Draft(std::span<const DraftJob> jobs) override;
  bool wants_hidden() const override { return true; }
  void Admitted(const StepPlan& plan) override;
  void Allocated(const StepPlan& plan, cache::KvOps* ops) override;
  void Computed(const StepPlan& plan, std::span<const float> hidden) override;
  void Skip(Sequence& sequence) override;

 private:
  // A job whose draft is shorter than its depth.
  struct Chain {
    Sequence* sequence;
    int depth;
    int row;  // of the last pass
  };

  // Number of rows to compute before a draft.
  int Rows(const Sequence& sequence) const {
    return static_cast<int>(sequence.draft.hidden.size() / hidden_size_);
  }
  void Restart(Sequence& sequence, cache::KvOps* ops) const;
  static void NoteLastBlock(Sequence& sequence);
  bool IsWhole(const Sequence& sequence) const;
  StatusOr<std::vector<Chain>> TakeIn(std::span<const DraftJob> jobs, StepResult* result);
  void Append(std::vector<Chain>& chains, const StepResult& result) const;

  Executor& executor_;
  const int layer_;
  const size_t hidden_size_;
  // [total blocks] For full blocks, the index in its sequence of the block in which the module's rows begin,
  // from which positions count; -1: rows are missing.
  std::vector<int32_t> origins_;
};

}  // namespace moesaic::engine
