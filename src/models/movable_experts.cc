#include "models/movable_experts.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <ctime>
#include <utility>

namespace moesaic::models {
namespace {

using kernels::ExpertWeights;

// Processor time of the calling thread, in seconds. A call of a microsecond may have to wait milliseconds for
// a shared processor, which is no cost of a move.
double ThreadSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

Status CheckMovable(const ExpertWeights& experts, int layer) {
  if (experts.stride == 0) {
    return absl::FailedPreconditionError(
        fmt::format("layer {}: a rank that was loaded without experts of a layer can't receive any", layer));
  }
  if (experts.input_scales != nullptr) {
    return Unimplemented("layer {}: experts with static activation scales can't move", layer);
  }
  if (experts.gate.images > 1) {
    return Unimplemented("layer {}: experts with an image for each NUMA node can't move", layer);
  }
  return OkStatus();
}

}  // namespace

MovableExperts::MovableExperts(std::vector<Layer> layers, parallel::ExpertGroup& group)
    : layers_(std::move(layers)), group_(group), weights_(layers_.size()) {
  for (const Layer& layer : layers_) loaded_.push_back(layer.moe->experts);
}

Status MovableExperts::Begin(const ExpertMoveOrder& order) {
  if (move_ != nullptr) {
    return absl::FailedPreconditionError(
        fmt::format("move {} of experts is not over, but {} begins", move_->report.number, order.number));
  }
  move_ = std::make_unique<Move>();
  move_->report = {.number = order.number, .state = MoveState::kMoving};
  Status started = Start(order, *move_);
  if (!started.ok()) Fail(started);
  return started;
}

void MovableExperts::Fail(const Status& why) {
  move_->report.state = MoveState::kFailed;
  move_->report.failure = Message(why);
}

Status MovableExperts::Start(const ExpertMoveOrder& order, Move& move) {
  const auto found = std::ranges::find(layers_, order.layer, &Layer::number);
  move.elsewhere = found == layers_.end();
  if (move.elsewhere) {
    move.report.state = MoveState::kReady;
    return OkStatus();
  }
  move.layer = static_cast<size_t>(found - layers_.begin());
  move.next = order.next;
  move.loads = order.loads;
  move.speeds = order.speeds;
  const ExpertWeights& loaded = loaded_[move.layer];
  RETURN_IF_ERROR(CheckMovable(loaded, order.layer));
  RETURN_IF_ERROR(group_.CheckExperts(move.next));
  const std::vector<int>& own = move.next[group_.rank()];
  ASSIGN_OR_RETURN(move.weights, runtime::Buffer::Allocate(
                                     std::max<size_t>(1, own.size()) * static_cast<size_t>(loaded.stride),
                                     /*huge=*/true));
  const auto group_layer = static_cast<int>(move.layer);
  const parallel::LayerPlacement& current = group_.experts(group_layer);
  const std::vector<int>& held = current[group_.rank()];
  const std::byte* const base =
      weights_[move.layer].size() > 0 ? weights_[move.layer].data() : layers::RecordsOf(loaded);
  const auto old_weights = [&held, base, stride = loaded.stride](int expert) {
    return base + (std::ranges::find(held, expert) - held.begin()) * stride;
  };
  ASSIGN_OR_RETURN(parallel::ExpertMove transfers,
                   parallel::ExpertMove::Create(group_.transport(), order.number, group_.LivingPart(current),
                                                group_.LivingPart(move.next), loaded.stride, old_weights,
                                                move.weights.data()));
  move.transfers.emplace(std::move(transfers));
  return OkStatus();
}

ExpertMoveReport MovableExperts::Advance(bool in_step) {
  if (move_ == nullptr) return {};
  ExpertMoveReport& report = move_->report;
  if (report.state != MoveState::kMoving) return report;
  const double begin = in_step ? ThreadSeconds() : 0;
  const Status advanced = move_->transfers->Advance();
  report.sent_bytes = move_->transfers->sent_bytes();
  if (!advanced.ok()) {
    Fail(advanced);
    spdlog::warn("move {} of experts: {}", report.number, report.failure);
  } else if (move_->transfers->done()) {
    report.state = MoveState::kReady;
  }
  if (in_step) report.step_seconds += ThreadSeconds() - begin;
  return report;
}

Status MovableExperts::Apply(uint64_t number) {
  if (move_ == nullptr || move_->report.number != number || move_->report.state != MoveState::kReady) {
    return absl::FailedPreconditionError(
        fmt::format("experts are used as move {} placed them, but this rank has not gathered them", number));
  }
  const std::unique_ptr<Move> move = std::move(move_);
  if (move->elsewhere) return OkStatus();
  move->transfers.reset();
  RETURN_IF_ERROR(group_.SetExperts(static_cast<int>(move->layer), move->next));
  if (!move->loads.empty()) {
    RETURN_IF_ERROR(group_.SetLoads(static_cast<int>(move->layer), move->loads, move->speeds));
  }
  const std::vector<int>& own = move->next[group_.rank()];
  layers::MoeLayer& moe = *layers_[move->layer].moe;
  moe.experts = layers::WithRecords(loaded_[move->layer], move->weights.data(), static_cast<int>(own.size()));
  std::ranges::fill(moe.local_expert, -1);
  moe.local_expert.resize(group_.options().experts, -1);
  for (size_t i = 0; i < own.size(); ++i) moe.local_expert[own[i]] = static_cast<int32_t>(i);
  if (weights_[move->layer].size() == 0 && layers_[move->layer].release) layers_[move->layer].release();
  weights_[move->layer] = std::move(move->weights);
  return OkStatus();
}

void MovableExperts::Drop() { move_.reset(); }

}  // namespace moesaic::models
