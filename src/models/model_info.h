// What a model is and needs, told without its weights.
#pragma once

#include "checkpoint/checkpoint.h"
#include "models/decoder_spec.h"
#include "models/model.h"
#include "models/weight_plan.h"

namespace moesaic::models {

/// Facts of a model with these weights in memory.
ModelInfo InfoFromPlan(const DecoderSpec& spec, const WeightPlan& plan);

/// The same from a config alone, every weight in the format that `dtype` gives ("auto" is bf16).
StatusOr<ModelInfo> InfoFromSpec(const DecoderSpec& spec, const std::string& dtype);

/// What its cache holds of a token.
KvSpec KvOf(const DecoderSpec& spec);

/// The file that `checkpoint`'s config came from, for messages.
std::string ConfigFile(const checkpoint::Checkpoint& checkpoint);

/// Of an opened checkpoint, with what is stored in it deciding "auto"; of a config without weights as
/// InfoFromSpec.
StatusOr<ModelInfo> InfoOf(const checkpoint::Checkpoint& checkpoint, const std::string& dtype);

}  // namespace moesaic::models
