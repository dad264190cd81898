// Declares the weights of a decoder from its DecoderSpec alone: regions, shapes and source modules in the
// checkpoint. Nothing is opened or allocated here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/decoder_spec.h"

namespace moesaic::models {

/// One matrix [n, k] in every record of a region. Record r is read from rows [FirstRow(r), FirstRow(r) +
/// (transposed ? k : n)) of module Module(r), which is [module_out, module_in].
struct PartDecl {
  std::string module;  // "model.layers.3.mlp.experts.{}.gate_proj": {} is replaced by the record
  int64_t module_out = 0, module_in = 0;
  int64_t first_row = 0, record_rows = 0;  // FirstRow(r) = first_row + r * record_rows
  int n = 0, k = 0;
  bool transposed = false;

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
  int64_t values = 0;  // > 0: a vector of this length, read from tensor `name`
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

/// Returns all regions in the order in which a forward pass reads them, MTP modules last. `separate_head`: a
/// tied head gets its own region (an int8 head next to a bf16 embedding).
std::vector<RegionDecl> DeclareWeights(const DecoderSpec& spec, bool separate_head);

}  // namespace moesaic::models
