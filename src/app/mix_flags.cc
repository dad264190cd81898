#include "app/mix_flags.h"

#include <algorithm>

namespace moesaic::app {

void AddMixFlags(Verb& verb, MixFlags& flags) {
  verb.AddOption("--mix", flags.precisions,
                 "Instead of --scheme: comma-separated precisions to choose from for each precision group by "
                 "measured loss, e.g. nvfp4,w8a16,bf16: the schemes, and bf16, fp16 and fp32, which are not "
                 "rounded")
      .Delimiter(',')
      .OneValue();  // MODEL may follow
  verb.AddOption("--bits-per-weight", flags.bits_per_weight,
                 "mix: maximum average bits per weight of its linears, scales included, e.g. 4.75")
      .Range(0.01, 32.0);
  verb.AddOption("--budget", flags.budget, "mix: maximum size of all weight files, e.g. 12G")
      .Bytes()
      .Positive();
  verb.AddOption("--mix-tokens", flags.tokens,
                 "mix: number of calibration tokens for measuring losses; memory and time are proportional")
      .Range(int64_t{16}, int64_t{1} << 20)
      .ShowDefault();
}

StatusOr<quantizer::MixSettings> ParseMix(const MixFlags& flags) {
  using Kind = quantizer::MixBudget::Kind;
  quantizer::MixSettings mix;
  mix.tokens = flags.tokens;
  for (const std::string& name : flags.precisions) {
    ASSIGN_OR_RETURN(const quantizer::Precision precision, quantizer::ParsePrecision(name));
    if (std::ranges::find(mix.options, precision) != mix.options.end()) {
      return InvalidArgument("--mix: {} is repeated", precision.Name());
    }
    mix.options.push_back(precision);
  }
  if (mix.options.size() < 2) return InvalidArgument("--mix needs at least two precisions");
  const bool bits = flags.bits_per_weight > 0, bytes = flags.budget > 0;
  // Without rounding, the default budget admits the widest precision everywhere: only fp16's range decides.
  const bool kept = std::ranges::all_of(mix.options, &quantizer::Precision::kept);
  if (bits ? bytes : !bytes && !kept) {
    return InvalidArgument(
        "--mix needs either --bits-per-weight or --budget, found {}; without a limit the most expensive "
        "precision would be chosen everywhere",
        bits ? "both" : "none");
  }
  if (bytes) {
    mix.budget = {Kind::kBytes, static_cast<double>(flags.budget)};
  } else {
    mix.budget = {Kind::kBitsPerWeight, bits ? flags.bits_per_weight : 32};
  }
  return mix;
}

}  // namespace moesaic::app
