#include "parallel/layout.h"

#include <fmt/format.h>

#include <utility>

namespace moesaic::parallel {

std::string Name(const Degrees& degrees) {
  std::string name;
  const auto add = [&](const char* kind, int degree) {
    if (degree > 1) name += fmt::format("{}{}{}", name.empty() ? "" : " x ", kind, degree);
  };
  add("TP", degrees.tensor);
  add("PP", degrees.pipeline);
  add("DP", degrees.data);
  add("EP", degrees.expert);
  return name.empty() ? "1 rank" : name;
}

StatusOr<Layout> Layout::Create(const Degrees& degrees) {
  const std::pair<const char*, int> named[] = {{"tensor", degrees.tensor},
                                               {"pipeline", degrees.pipeline},
                                               {"data", degrees.data},
                                               {"expert", degrees.expert}};
  constexpr int kMaxDegree = 1 << 16;
  for (const auto& [name, degree] : named) {
    if (degree < 1 || degree > kMaxDegree) {
      return InvalidArgument("the {} parallel size must be in [1, {}], found {}", name, kMaxDegree, degree);
    }
  }
  const int64_t ranks = int64_t{degrees.tensor} * degrees.pipeline * degrees.data;
  if (ranks > kMaxDegree)
    return InvalidArgument("a layout has at most {} ranks, found {}", kMaxDegree, ranks);
  const int group = degrees.tensor * degrees.data;
  if (group % degrees.expert != 0) {
    return InvalidArgument(
        "the expert parallel size must divide tensor x data parallel size, which is {}, found {}", group,
        degrees.expert);
  }
  if (degrees.data > 1 && degrees.expert != 1 && degrees.expert != group) {
    return InvalidArgument(
        "the expert parallel size must be 1 or {} with {} data parallel replicas, found {}", group,
        degrees.data, degrees.expert);
  }
  return Layout(degrees);
}

Coordinates Layout::At(int rank) const {
  const int group = rank / degrees_.tensor;
  return {.replica = group / degrees_.pipeline,
          .stage = group % degrees_.pipeline,
          .shard = rank % degrees_.tensor};
}

int Layout::RankAt(const Coordinates& at) const {
  return (at.replica * degrees_.pipeline + at.stage) * degrees_.tensor + at.shard;
}

std::vector<int> Layout::TensorGroup(int rank) const {
  Coordinates at = At(rank);
  std::vector<int> ranks;
  for (at.shard = 0; at.shard < degrees_.tensor; ++at.shard) ranks.push_back(RankAt(at));
  return ranks;
}

std::vector<int> Layout::ExpertGroup(int rank) const {
  Coordinates at = At(rank);
  std::vector<int> ranks;
  for (at.replica = 0; at.replica < degrees_.data; ++at.replica) {
    for (at.shard = 0; at.shard < degrees_.tensor; ++at.shard) ranks.push_back(RankAt(at));
  }
  return ranks;
}

Status Layout::PlaceExperts(std::shared_ptr<const Placement> placement) {
  if (!exchanges_tokens()) {
    return InvalidArgument(
        "experts can be placed on ranks if data parallel replicas divide them, which {} does not do",
        Name(degrees_));
  }
  const int ranks = degrees_.tensor * degrees_.data;
  if (placement->ranks() != ranks) {
    return InvalidArgument("the placement must have {} ranks for {}, found {}", ranks, Name(degrees_),
                           placement->ranks());
  }
  placement_ = std::move(placement);
  return OkStatus();
}

int Layout::expert_slices() const {
  // Replicas that do not exchange tokens have all experts each.
  return degrees_.expert == 1 ? degrees_.tensor : degrees_.tensor * degrees_.data / degrees_.expert;
}

int Layout::IndexInExpertGroup(int rank) const {
  const Coordinates at = At(rank);
  return at.replica * degrees_.tensor + at.shard;
}

int Layout::ExpertPart(int rank) const {
  return degrees_.expert == 1 ? 0 : IndexInExpertGroup(rank) / expert_slices();
}

int Layout::ExpertSlice(int rank) const {
  return degrees_.expert == 1 ? At(rank).shard : IndexInExpertGroup(rank) % expert_slices();
}

}  // namespace moesaic::parallel
