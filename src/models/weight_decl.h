// Declares the weights of a decoder from its DecoderSpec alone: regions, shapes and source modules in the
// checkpoint. Nothing is opened or allocated here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/decoder_spec.h"
#include "parallel/shard.h"

namespace moesaic::models {

/// One matrix [n, k] in every record of a region. Record r is read from rows [FirstRow(r), FirstRow(r) +
/// (transposed ? k : n)) of module Module(r), which is [module_out, module_in], and from columns
/// [first_column, first_column + k) if it is not transposed.
struct PartDecl {
  std::string module;  // "model.layers.3.mlp.experts.{}.gate_proj": {} is replaced by the record's number
  int64_t module_out = 0, module_in = 0;
  int64_t first_row = 0, record_rows = 0;  // FirstRow(r) = first_row + r * record_rows
  int first_column = 0;
  int n = 0, k = 0;
  bool transposed = false;
  std::vector<int32_t> records = {};  // numbers of the records in module names; empty: 0, 1, ...

  /// Returns whether the matrix has some of the module's columns only.
  bool has_slice() const { return !transposed && k != module_in; }

  std::string Module(int record) const;
  int64_t FirstRow(int record) const { return first_row + record * record_rows; }
};

/// Element types that a region permits.
enum class Precision {
  kF32,    // norms, biases, routers
  kFloat,  // f32 or bf16: embeddings and MLA's absorbed matrices
  kAny,
};

/// Part of a region that one token reads.
enum class Touch {
  kAll,
  kRow,   // one row of the matrix (embedding)
  kTopK,  // moe.top_k records
};

/// A contiguous byte range in memory or in a packed file. It holds either `values` f32 values of one tensor,
/// or `count` records with `parts` matrices each (an expert: gate, up, down).
struct RegionDecl {
  std::string name;  // "model.layers.3.mlp.experts"
  Precision precision = Precision::kAny;
  int64_t values = 0;                          // > 0: a vector of this length, read from tensor `name`
  int64_t first_value = 0, tensor_values = 0;  // vectors: first element, and elements of the tensor
  int count = 1;
  std::vector<PartDecl> parts;
  Touch touch = Touch::kAll;
  bool mtp = false;
  bool optional = false;   // used only if the checkpoint has it
  int64_t parameters = 0;  // parameters of the published model, 0 for copies

  bool is_vector() const { return values > 0; }
};

/// Names of regions that several files use.
std::string LayerPrefix(int layer);  // "model.layers.3."
inline constexpr char kEmbedding[] = "model.embed_tokens";
inline constexpr char kHead[] = "lm_head";
inline constexpr char kFinalNorm[] = "model.norm.weight";

/// The sizes of `spec` that ranks can divide, with units of 1.
parallel::ModelShape ShapeOf(const DecoderSpec& spec);

/// Returns all regions in the order in which a forward pass reads them, MTP modules last. `separate_head`: a
/// tied head gets its own region (an int8 head next to a bf16 embedding).
std::vector<RegionDecl> DeclareWeights(const DecoderSpec& spec, bool separate_head);
/// The regions of one rank. Its matrices have the names of the whole model's.
std::vector<RegionDecl> DeclareWeights(const DecoderSpec& spec, bool separate_head,
                                       const parallel::Shard& shard);

}  // namespace moesaic::models
