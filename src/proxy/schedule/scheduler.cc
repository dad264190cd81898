#include "proxy/schedule/scheduler.h"

#include <algorithm>

#include "proxy/schedule/scheduler_impl.h"

namespace moesaic::proxy {

Scheduler::Scheduler(State state, BlockIndex index, std::unique_ptr<Policy> policy,
                     const SchedulerOptions& options)
    : impl_(std::make_unique<Impl>(state, index, std::move(policy), options)) {}
Scheduler::~Scheduler() = default;
Scheduler::Scheduler(Scheduler&&) noexcept = default;

Admission Scheduler::Submit(RequestId id, Nanos now, const TenantLimit* limit) {
  return impl_->Submit(id, now, limit);
}
bool Scheduler::PrefillDone(RequestId id, Nanos now) { return impl_->PrefillDone(id, now); }
bool Scheduler::Requeue(RequestId id, int failed, bool keeps_prefill, Nanos now) {
  return impl_->Requeue(id, failed, keeps_prefill, now);
}
RunResult Scheduler::Run(LeaseToken lease, Nanos now) { return impl_->Run(lease, now); }
bool Scheduler::Match(RequestId id, MatchResult& result) const { return impl_->Match(id, result); }
const Policy& Scheduler::policy() const { return *impl_->policy_; }

LatencyCoefficients Scheduler::Model(uint32_t model_class) const {
  const StateView view(impl_->state_.zone());
  const Locked lock(impl_->state_.zone());
  return view.s.models[std::min<uint32_t>(model_class, kModelClasses - 1)].coefficients;
}

void Scheduler::SetPrior(const LatencyCoefficients& prior) {
  const StateView view(impl_->state_.zone());
  const Locked lock(impl_->state_.zone());
  for (LatencyModel& model : view.s.models) {
    if (model.prefill.samples() == 0 && model.decode.samples() == 0) model.Init(prior);
  }
}

}  // namespace moesaic::proxy
