// What a checkpoint of a model consists of, told in the order in which a forward pass meets it.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "models/decoder_spec.h"

namespace moesaic::quantizer {

/// A linear layer's weight, or a tensor that is none.
struct ModelItem {
  std::string name;  // of a linear its module, "model.layers.0.mlp.down_proj"; else the tensor's name
  bool linear = false;
  std::vector<int64_t> shape;  // of a linear [out, in]
  /// Whether it may be rounded. Not: routers, embeddings and heads, MLA's kv_b_proj (kernels absorb it into
  /// others), and what joins an MTP module to its model.
  bool roundable = false;
  bool routed = false;  // part of a routed expert
  int layer = -1;       // decoder layer, MTP modules counted on; -1: none
  /// Linears with the same number run as one where other engines fuse them (q/k/v, gate/up, q_a/kv_a) and
  /// then must be alike; they stand one after the other. -1: none.
  int fused = -1;

  int64_t elements() const;
};

/// Finding a linear reads some numbers of a few bytes through the checkpoint's maps, and the kernel brings a
/// page or sixteen for each. Loops over items give them back this often: after 128 of them some 8 MiB.
inline constexpr size_t kItemsAMap = 128;

/// N of "model.layers.N."; -1 when the name does not begin so.
int LayerOf(const std::string& name);

/// All items of a model, from its spec alone.
std::vector<ModelItem> ListItems(const models::DecoderSpec& spec);

/// The items of an opened checkpoint: those of its spec that are there, and last the tensors that no spec
/// knows (rotary tables, MTP modules in part). A missing tensor or a wrong shape is an error.
StatusOr<std::vector<ModelItem>> ListItems(const checkpoint::Checkpoint& source);

}  // namespace moesaic::quantizer
