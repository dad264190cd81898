#include "parallel/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <utility>

namespace moesaic::parallel {
namespace {

constexpr int kMaxDegree = 1 << 16;

Status CheckCounts(const char* what, const char* parts, const std::vector<int>& counts, int degree) {
  if (counts.empty()) return OkStatus();
  if (std::ssize(counts) != degree) {
    return InvalidArgument("the {} must be divided among {} {}, found {} numbers: {}", what, degree, parts,
                           counts.size(), fmt::join(counts, "+"));
  }
  for (const int count : counts) {
    if (count < 1 || count > kMaxDegree) {
      return InvalidArgument("each of the {} {} needs at least one of the {}, found {}", degree, parts, what,
                             fmt::join(counts, "+"));
    }
  }
  return OkStatus();
}

// Takes the text before the first `end` from the front of `text`.
std::string_view TakeUntil(char end, std::string_view* text) {
  const size_t at = text->find(end);
  const std::string_view taken = text->substr(0, at);
  text->remove_prefix(at == std::string_view::npos ? text->size() : at + 1);
  return taken;
}

StatusOr<std::vector<int>> ParseCounts(std::string_view text) {
  std::vector<int> counts;
  if (text.ends_with('+')) return InvalidArgument("a number is missing after \"{}\"", text);
  for (std::string_view left = text; !left.empty() || counts.empty();) {
    const std::string_view number = TakeUntil('+', &left);
    int count = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), count);
    if (error != std::errc() || end != number.data() + number.size() || count < 1) {
      return InvalidArgument("a layout needs positive numbers, found \"{}\"", text);
    }
    counts.push_back(count);
  }
  return counts;
}

}  // namespace

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

StatusOr<Layout> Layout::Create(const Degrees& degrees, Split split) {
  const std::pair<const char*, int> named[] = {{"tensor", degrees.tensor},
                                               {"pipeline", degrees.pipeline},
                                               {"data", degrees.data},
                                               {"expert", degrees.expert}};
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
  RETURN_IF_ERROR(CheckCounts("layers", "pipeline stages", split.layers, degrees.pipeline));
  RETURN_IF_ERROR(CheckCounts("experts", "parts", split.experts, degrees.expert));
  return Layout(degrees, std::move(split));
}

StatusOr<Layout> Layout::Parse(std::string_view text) {
  Degrees degrees;
  Split split;
  std::set<std::string_view> seen;
  if (text.ends_with(',')) return InvalidArgument("a size is missing after \"{}\"", text);
  for (std::string_view left = text; !left.empty() || seen.empty();) {
    std::string_view value = TakeUntil(',', &left);
    const std::string_view key = TakeUntil('=', &value);
    if (!seen.insert(key).second) return InvalidArgument("the layout \"{}\" has {} twice", text, key);
    ASSIGN_OR_RETURN(std::vector<int> counts, ParseCounts(value));
    const std::pair<std::string_view, int*> sizes[] = {
        {"tp", &degrees.tensor}, {"pp", &degrees.pipeline}, {"dp", &degrees.data}, {"ep", &degrees.expert}};
    const auto size = std::ranges::find(sizes, key, &std::pair<std::string_view, int*>::first);
    if (size != std::end(sizes) && counts.size() == 1) {
      *size->second = counts.front();
    } else if (key == "layers") {
      split.layers = std::move(counts);
    } else if (key == "experts") {
      split.experts = std::move(counts);
    } else {
      return InvalidArgument(
          "a layout has sizes tp, pp, dp and ep, and numbers of layers and experts, as in "
          "\"tp=2,pp=2,layers=20+28\"; found \"{}\"",
          text);
    }
  }
  return Create(degrees, std::move(split));
}

std::string Layout::PartsText() const {
  std::string text = fmt::format("tp={}", degrees_.tensor);
  if (degrees_.pipeline > 1) text += fmt::format(",pp={}", degrees_.pipeline);
  if (exchanges_tokens()) text += fmt::format(",dp={}", degrees_.data);
  if (degrees_.expert > 1) text += fmt::format(",ep={}", degrees_.expert);
  if (!split_.layers.empty()) text += fmt::format(",layers={}", fmt::join(split_.layers, "+"));
  if (!split_.experts.empty()) text += fmt::format(",experts={}", fmt::join(split_.experts, "+"));
  return text;
}

std::string Layout::Name() const {
  std::string name = parallel::Name(degrees_);
  if (!split_.layers.empty()) name += fmt::format(", layers {}", fmt::join(split_.layers, "+"));
  if (!split_.experts.empty()) name += fmt::format(", experts {}", fmt::join(split_.experts, "+"));
  return name;
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
        "experts can be placed on ranks if data parallel replicas divide them, which {} does not do", Name());
  }
  const int ranks = degrees_.tensor * degrees_.data;
  if (placement->ranks() != ranks) {
    return InvalidArgument("the placement must have {} ranks for {}, found {}", ranks, Name(),
                           placement->ranks());
  }
  placement_ = std::move(placement);
  return OkStatus();
}

Status Layout::SetSpeeds(std::vector<double> speeds) {
  const int ranks = degrees_.tensor * degrees_.data;
  if (!exchanges_tokens() || std::ssize(speeds) != ranks ||
      !std::ranges::all_of(speeds, [](double speed) { return speed >= 1e-6 && speed <= 1e6; })) {
    return InvalidArgument(
        "speeds of ranks must be one positive number for each of the {} ranks that divide the experts of {}, "
        "from 1e-6 to 1e6, found {}",
        exchanges_tokens() ? ranks : 0, Name(), fmt::join(speeds, ", "));
  }
  speeds_ = std::move(speeds);
  return OkStatus();
}

Status Layout::TolerateFailures() {
  if (!exchanges_tokens()) {
    return InvalidArgument(
        "a job continues without a rank if data parallel replicas divide the experts (-dp N -ep), found {}",
        Name());
  }
  if (degrees_.tensor > 1 || degrees_.pipeline > 1) {
    return InvalidArgument(
        "a job continues without a rank if each replica is one rank, because the ranks of a replica have "
        "parts that no other rank has; found {}",
        Name());
  }
  tolerates_failures_ = true;
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
