// A mixture-of-experts layer: a router, its routed experts and the shared experts.
#pragma once

#include <span>
#include <vector>

#include "kernels/moe.h"
#include "kernels/route.h"
#include "layers/linear.h"
#include "parallel/expert_group.h"

namespace moesaic::layers {

/// Start of the first expert's record, which has all its matrices. Records follow each other.
const std::byte* RecordsOf(const kernels::ExpertWeights& experts);

/// `experts` with `count` records that begin at `records`.
kernels::ExpertWeights WithRecords(kernels::ExpertWeights experts, const std::byte* records, int count);

/// Chooses experts and their weights. It computes in f32 regardless of the experts' format.
struct Router {
  Linear gate;                         // [experts, hidden]
  const float* choice_bias = nullptr;  // [experts] or null
  int top_k = 0;
  kernels::RouteParams::Scoring scoring{};
  kernels::RouteParams::GroupScore group_score{};
  int groups = 1, top_groups = 1;
  bool normalize = false;
  float scale = 1;
  std::vector<float> left_out_bias = {};  // [experts] choice_bias after LeaveOut(); empty: none is left out

  /// Leaves exactly these experts out of the choice. Weights of the others are divided by their own sum where
  /// the router normalizes, and stay the same otherwise.
  void LeaveOut(std::span<const int> experts);
  /// Writes ids and weights [rows, top_k]. If the eligible groups have fewer than top_k experts that are not
  /// left out, the other ids are experts that are, with weight 0.
  void Route(const Step& step, const float* x, int32_t* ids, float* weights) const;
};

/// With several ranks, each rank has some of the routed experts, or some columns of each, and some columns of
/// the shared experts. Its output is then a partial sum. If replicas divide the experts, tokens travel to the
/// ranks of their experts.
struct MoeLayer {
  Router router;
  kernels::ExpertWeights experts;  // of this rank; count may be 0
  // [routed experts] position in `experts`, -1: on another rank. Empty: all experts are here.
  std::vector<int32_t> local_expert;
  int index = 0;                                             // among the rank's layers with experts
  tensor::PackedMatrix shared_gate, shared_up, shared_down;  // empty: no shared expert

  /// Overwrites out [rows, hidden]; x is [rows, hidden]. A rank without rows still takes part in the exchange
  /// of tokens. `parts` are those of `out`.
  void Forward(const Step& step, const float* x, float* out, const kernels::ColumnParts& parts = {}) const;

 private:
  void Count(const Step& step, const int32_t* ids) const;
  void Exchange(const Step& step, parallel::ExpertGroup& group, const float* x, const int32_t* ids,
                const float* weights, float* out) const;
  Status ExchangeRows(const Step& step, parallel::ExpertGroup& group, const float* x, const int32_t* ids,
                      const float* weights, float* out) const;
  void ComputeRows(const Step& step, const parallel::ExpertGroup::Rows& received, int first, int end,
                   const kernels::ExpertWeights& of, float* y) const;
  void AddShared(const Step& step, const float* x, float* out) const;
};

}  // namespace moesaic::layers
