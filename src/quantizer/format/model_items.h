// Lists the tensors and linears of a checkpoint in the order of a forward pass.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "models/decoder_spec.h"

namespace moesaic::quantizer {

/// The weight of a linear layer, or another tensor.
struct ModelItem {
  std::string name;  // module of a linear ("model.layers.0.mlp.down_proj"), else the tensor's name
  bool linear = false;
  std::vector<int64_t> shape;  // of a linear [out, in]
  /// True if it may be rounded. False for routers, embeddings, heads, MLA's kv_b_proj (kernels absorb it into
  /// other products), and the projection of an MTP module.
  bool roundable = false;
  bool routed = false;  // part of a routed expert
  int layer = -1;       // decoder layer; MTP modules continue the count; -1: none
  /// Linears with the same number are fused by other engines (q/k/v, gate/up, q_a/kv_a) and must be quantized
  /// alike. They are adjacent in the list. -1: not fused.
  int fused = -1;

  int64_t elements() const;
};

/// Number of items after which loops release the checkpoint's mapped pages. Finding a linear reads a few
/// bytes through the map, for which the kernel maps 1 to 16 pages; 128 items use some 8 MiB.
inline constexpr size_t kItemsAMap = 128;

/// Returns N of "model.layers.N.", or -1 if the name has no such prefix.
int LayerOf(const std::string& name);

/// Lists all items of a model, given its spec alone.
std::vector<ModelItem> ListItems(const models::DecoderSpec& spec);

/// Lists the items of an opened checkpoint: those of its spec that exist, then the tensors that the spec does
/// not know (rotary tables, parts of MTP modules). A missing tensor or a wrong shape is an error.
StatusOr<std::vector<ModelItem>> ListItems(const checkpoint::Checkpoint& source);

}  // namespace moesaic::quantizer
