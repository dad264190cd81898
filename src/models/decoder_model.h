// The only Model implementation: a stack of decoder layers described by a DecoderSpec.
#pragma once

#include "models/decoder_spec.h"
#include "models/decoder_weights.h"
#include "models/model.h"
#include "models/movable_experts.h"
#include "models/pipeline_parts.h"

namespace moesaic::models {

class DecoderModel : public Model {
 public:
  /// `weights` must hold every region of DeclareWeights(spec, shard). `groups` may be null if `shard` is the
  /// whole model.
  static StatusOr<std::unique_ptr<DecoderModel>> Create(DecoderSpec spec, parallel::Shard shard,
                                                        WeightMap weights, ModelInfo info,
                                                        layers::MlaPath mla_path,
                                                        std::shared_ptr<parallel::RankGroups> groups);
  const ModelInfo& info() const override { return info_; }
  parallel::GroupTraffic traffic() const override {
    return groups_ == nullptr ? parallel::GroupTraffic{} : groups_->traffic();
  }
  ExpertLoad expert_load() const override;
  Status BeginExpertMove(const ExpertMoveOrder& order) override;
  ExpertMoveReport AdvanceExpertMove(bool in_step) override {
    return movable_ == nullptr ? ExpertMoveReport() : movable_->Advance(in_step);
  }
  Status ApplyExpertMove(uint64_t number) override;
  void DropExpertMove() override {
    if (movable_ != nullptr) movable_->Drop();
  }
  Status ExcludeRanks(std::span<const int> ranks) override;
  Status LeaveOutExperts(const LeftOutExperts& left_out) override;
  std::vector<LeftOutExperts> left_out_experts() const override { return left_out_; }
  Status Forward(const kernels::ExecContext& ctx, const ForwardBatch& batch,
                 std::span<const kernels::KvLayer> kv, const ForwardOutput& out) override;
  Status ForwardMtp(const kernels::ExecContext& ctx, int depth, const ForwardBatch& batch,
                    std::span<const float> hidden, std::span<const kernels::KvLayer> kv,
                    const ForwardOutput& out) override;

 private:
  DecoderModel(DecoderSpec spec, parallel::Shard shard, WeightMap weights, ModelInfo info,
               layers::RopeTable rope, std::shared_ptr<parallel::RankGroups> groups);
  Status Check(const ForwardBatch& batch, std::span<const kernels::KvLayer> kv,
               const ForwardOutput& out) const;
  std::span<const int32_t> Positions(layers::ScratchScope& scratch, const kernels::ExecContext& ctx,
                                     const ForwardBatch& batch);
  void Embed(const layers::Step& step, const tensor::PackedMatrix& table, std::span<const int32_t> tokens,
             float* x) const;
  void RunPart(const kernels::ExecContext& ctx, const ForwardBatch& batch, const PipelinePart& part,
               std::span<const int32_t> positions, std::span<const kernels::KvLayer> kv, std::span<float> x,
               const ForwardOutput& out) const;
  Status JoinExperts();
  Status CheckJoint(const JointStep& joint, size_t parts) const;
  bool exchanges() const { return groups_ != nullptr && groups_->experts() != nullptr; }
  void RunIdle(const kernels::ExecContext& ctx) const;
  void LetExpertsMove();
  layers::MoeLayer* MoeOf(int layer);
  Status LeaveOutLostExperts();
  void Progress() const;
  void RunLayers(const layers::Step& step, std::span<const kernels::KvLayer> kv, float* x) const;
  void Finish(const kernels::ExecContext& ctx, const ForwardBatch& batch, const float* norm,
              const layers::Linear& head, float* x, const ForwardOutput& out) const;

  DecoderSpec spec_;
  parallel::Shard shard_;
  std::shared_ptr<parallel::RankGroups> groups_;
  WeightMap weights_;
  ModelInfo info_;
  layers::RopeTable rope_;
  DecoderWeights decoder_;                    // views into weights_ and rope_
  std::unique_ptr<MovableExperts> movable_;   // null: experts stay
  std::vector<int> moe_layers_;               // decoder layers of the rank that have routed experts
  std::vector<int> exchanged_layers_;         // these, and those of MTP modules, as in the expert group
  std::vector<LeftOutExperts> left_out_;      // by layer
  mutable std::vector<int64_t> expert_load_;  // [MoE layers of the rank, those of MTP last, experts]
};

}  // namespace moesaic::models
