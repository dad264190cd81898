// Computes a model's properties and memory needs without loading weights.
#pragma once

#include "checkpoint/checkpoint.h"
#include "models/decoder_spec.h"
#include "models/model.h"
#include "models/weight_plan.h"

namespace moesaic::models {

/// Returns the properties of a model whose weights are laid out by `plan`.
ModelInfo InfoFromPlan(const DecoderSpec& spec, const WeightPlan& plan);
/// The same for one rank's part of the weights.
ModelInfo InfoFromPlan(const DecoderSpec& spec, const WeightPlan& plan, const parallel::Shard& shard);

/// Returns the properties computed from a config alone, with every weight in the format of `dtype` ("auto" is
/// bf16).
StatusOr<ModelInfo> InfoFromSpec(const DecoderSpec& spec, const std::string& dtype);

/// Returns the cache space of one token, for the whole model or one rank.
KvSpec KvOf(const DecoderSpec& spec);
KvSpec KvOf(const DecoderSpec& spec, const parallel::Shard& shard);

/// Returns the file that `checkpoint`'s config came from, for messages.
std::string ConfigFile(const checkpoint::Checkpoint& checkpoint);

/// Plans loading an opened checkpoint or mapping a packed file. Drops MTP modules from `spec` that are not
/// stored.
StatusOr<WeightPlan> PlanOf(const checkpoint::Checkpoint& checkpoint, WeightDtype dtype, DecoderSpec& spec);

/// Returns the properties of an opened checkpoint, where "auto" follows the stored formats. A config without
/// weights is handled like InfoFromSpec.
StatusOr<ModelInfo> InfoOf(const checkpoint::Checkpoint& checkpoint, const std::string& dtype);

}  // namespace moesaic::models
