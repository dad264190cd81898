// Readers of expert loads that engines record.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {

/// Parses a file by its content:
/// - .npy: [layers, experts], or [windows, layers, experts];
/// - JSON of SGLang's recorder: "logical_count" of the same shapes;
/// - JSON of vLLM's EPLB state: "expert_load_window" or "expert_load_pass" [..., layers, slots] with
///   "physical_to_logical_map" [layers, slots].
/// `name` names the workload and begins messages. InvalidArgument says which value is wrong.
StatusOr<Workload> ParseLoad(std::string_view bytes, const std::string& name);

/// Reads a file for ParseLoad(), or a folder:
/// - of OmniPlacement: activation_counts_recordstep_STEP_rank_RANK.txt, one line per layer, one window per
/// step;
/// - of TensorRT-LLM: meta_info.json and rank*.safetensors with a tensor "ITERATION_LAYER" per iteration and
/// layer.
/// PyTorch's files (.pt) are not read: moesaic::science has their reader.
StatusOr<Workload> ReadLoad(const std::string& path);

/// Parses one safetensors file of TensorRT-LLM, rank*.safetensors: tensors "ITERATION_LAYER" of counts.
StatusOr<Workload> ParseTensorRtFile(std::string_view bytes, const std::string& name);

/// Parses one text file of OmniPlacement, whose rows are layers. Appended to `layers`: [layers][positions].
/// `values` counts the values of all files of a folder.
Status ParseOmniText(std::string_view text, const std::string& source,
                     std::vector<std::vector<double>>& layers, int64_t& values);

}  // namespace moesaic::parallel
