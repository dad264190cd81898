#include "app/mix_flags.h"

#include <algorithm>

namespace moesaic::app {

void AddMixFlags(Verb& verb, MixFlags& flags) {
  verb.AddOption(
          "--mix", flags.precisions,
          "Instead of --scheme: precisions to choose from for each layer's parts by measured loss, e.g. "
          "nvfp4,w8a16,bf16: the schemes, w4a16-g32, -g64, -g128, w8a16 likewise and w8a16-channel, and "
          "bf16, fp16, "
          "fp32, which keep")
      .Delimiter(',')
      .OneValue();  // MODEL may follow
  verb.AddOption("--bits-per-weight", flags.bits_per_weight,
                 "mix: what its linears may take on average, scales included, e.g. 4.75")
      .Range(0.01, 32.0);
  verb.AddOption("--budget", flags.budget, "mix: what all weight files may take, e.g. 12G")
      .Bytes()
      .Positive();
  verb.AddOption("--budget-per-token", flags.budget_per_token,
                 "mix: what a token may read of the model, of routed experts those that it is given to")
      .Bytes()
      .Positive();
  verb.AddOption("--mix-tokens", flags.tokens,
                 "mix: calibration tokens over which losses are measured; memory and time go with it")
      .Range(int64_t{16}, int64_t{1} << 20)
      .ShowDefault();
}

StatusOr<quantizer::MixSettings> ParseMix(const MixFlags& flags, int group_size) {
  using Unit = quantizer::MixBudget::Unit;
  quantizer::MixSettings mix;
  mix.tokens = flags.tokens;
  for (const std::string& name : flags.precisions) {
    ASSIGN_OR_RETURN(const quantizer::Precision precision, quantizer::ParsePrecision(name, group_size));
    if (std::ranges::find(mix.options, precision) != mix.options.end()) {
      return InvalidArgument("--mix: {} is there twice", precision.Name());
    }
    mix.options.push_back(precision);
  }
  if (mix.options.size() < 2) return InvalidArgument("--mix needs two precisions or more to choose from");
  int budgets = 0;
  for (const auto& [unit, amount] :
       {std::pair(Unit::kBitsPerWeight, flags.bits_per_weight),
        std::pair(Unit::kBytes, static_cast<double>(flags.budget)),
        std::pair(Unit::kBytesPerToken, static_cast<double>(flags.budget_per_token))}) {
    if (amount <= 0) continue;
    mix.budget = {unit, amount};
    ++budgets;
  }
  // Of kept precisions alone the widest may be had for all: what is asked is which are safe.
  const bool kept = std::ranges::all_of(mix.options, &quantizer::Precision::kept);
  if (budgets == 0 && kept) {
    mix.budget = {Unit::kBitsPerWeight, 32};
    budgets = 1;
  }
  if (budgets != 1) {
    return InvalidArgument(
        "--mix needs one of --bits-per-weight, --budget and --budget-per-token, found {}; without a "
        "limit the dearest precision would be best everywhere",
        budgets);
  }
  return mix;
}

}  // namespace moesaic::app
