#include "carve/carve.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "carve/carve_layer.h"
#include "checkpoint/safetensors_writer.h"
#include "kernels/exec_context.h"
#include "models/decoder_spec.h"
#include "models/weight_decl.h"
#include "quantizer/calibrate/dense_layer.h"
#include "runtime/atomic_file.h"

namespace moesaic::carve {
namespace {

using checkpoint::TensorOutput;
using models::DecoderSpec;
using quantizer::CalibrationStream;
using quantizer::DenseLayer;
using tensor::DType;

// Router scores are scaled down so that sigmoid(score) is 1/2 for every expert to four digits. Each active
// expert's weight is then 2 x 1/2 = 1 for any score, and any number of experts may be active. Scores are
// within about +-10, which leaves steps of 1e-3 between neighbouring f32 values of the sigmoid.
constexpr float kRouterScale = 1e-4F;
constexpr float kSigmoidSlope = 0.25F;  // slope at 0; converts the intercept into a choice bias

Status CheckDense(const DecoderSpec& spec, const CarveOptions& options) {
  if (spec.architecture != "LlamaForCausalLM" || spec.mlp_bias || spec.attention.qkv_bias ||
      spec.attention.o_bias) {
    return Unimplemented("carving needs a LlamaForCausalLM without biases, found {}", spec.architecture);
  }
  if (options.slices < 2 || spec.intermediate % options.slices != 0) {
    return InvalidArgument("--slices must divide the FFN's {} neurons, found {}", spec.intermediate,
                           options.slices);
  }
  if (options.shared < 1 || options.shared >= options.slices) {
    return InvalidArgument("--shared must be in [1, {}], found {}", options.slices - 1, options.shared);
  }
  if (options.active < 1 || options.active > options.slices - options.shared) {
    return InvalidArgument("--active must be in [1, {}], found {}", options.slices - options.shared,
                           options.active);
  }
  return OkStatus();
}

// Collects the tensors of the output, which memory holds until the end. Values are converted at once.
class Output {
 public:
  explicit Output(bool f32) : dtype_(f32 ? DType::kF32 : DType::kBF16) {}

  void Add(const std::string& name, std::vector<int64_t> shape, const std::vector<float>& values) {
    if (dtype_ == DType::kF32) return AddF32(name, std::move(shape), values);
    std::vector<tensor::BF16> halves(values.size());
    std::ranges::transform(values, halves.begin(), tensor::ToBF16);
    tensors_.push_back(
        checkpoint::HeldTensor(name, dtype_, std::move(shape), std::as_bytes(std::span(halves))));
  }
  void AddF32(const std::string& name, std::vector<int64_t> shape, const std::vector<float>& values) {
    tensors_.push_back(
        checkpoint::HeldTensor(name, DType::kF32, std::move(shape), std::as_bytes(std::span(values))));
  }
  const std::vector<TensorOutput>& tensors() const { return tensors_; }

 private:
  DType dtype_;
  std::vector<TensorOutput> tensors_;
};

// Returns rows `neurons` of a row-major [width, hidden].
std::vector<float> PickRows(const std::vector<float>& values, const std::vector<int>& neurons, int hidden) {
  std::vector<float> picked;
  picked.reserve(neurons.size() * hidden);
  for (const int j : neurons) {
    picked.insert(picked.end(), values.begin() + int64_t{j} * hidden,
                  values.begin() + (int64_t{j} + 1) * hidden);
  }
  return picked;
}

std::vector<float> PickColumns(const RowMatrix& values, const std::vector<int>& neurons) {
  std::vector<float> picked;
  picked.reserve(static_cast<size_t>(values.rows()) * neurons.size());
  for (int64_t i = 0; i < values.rows(); ++i) {
    for (const int j : neurons) picked.push_back(values(i, j));
  }
  return picked;
}

void AddExpert(const std::string& prefix, const std::vector<int>& neurons, const DenseLayer& layer,
               const CarvedFfn& ffn, int hidden, Output* output) {
  const auto width = std::ssize(neurons);
  output->Add(prefix + ".gate_proj.weight", {width, hidden}, PickRows(layer.gate, neurons, hidden));
  output->Add(prefix + ".up_proj.weight", {width, hidden}, PickRows(layer.up, neurons, hidden));
  output->Add(prefix + ".down_proj.weight", {hidden, width}, PickColumns(ffn.down, neurons));
}

void AddFfn(int index, const DenseLayer& layer, const CarvedFfn& ffn, int hidden, Output* output) {
  const std::string mlp = fmt::format("model.layers.{}.mlp.", index);
  const auto routed = std::ssize(ffn.plan.experts);
  AddExpert(mlp + "shared_experts", ffn.plan.shared, layer, ffn, hidden, output);
  for (int64_t e = 0; e < routed; ++e) {
    AddExpert(fmt::format("{}experts.{}", mlp, e), ffn.plan.experts[e], layer, ffn, hidden, output);
  }
  std::vector<float> router(ffn.plan.router.weights.data(),
                            ffn.plan.router.weights.data() + ffn.plan.router.weights.size());
  for (float& w : router) w *= kRouterScale;
  std::vector<float> bias = ffn.plan.router.bias;
  for (float& b : bias) b *= kRouterScale * kSigmoidSlope;
  output->AddF32(mlp + "gate.weight", {routed, hidden}, router);
  output->AddF32(mlp + "gate.e_score_correction_bias", {routed}, bias);
}

Status CopyNorm(const checkpoint::Checkpoint& source, const std::string& name, int64_t size, Output* output) {
  std::vector<int64_t> shape = {size};
  ASSIGN_OR_RETURN(const std::vector<float> values, source.ReadF32(name, shape));
  output->Add(name, std::move(shape), values);
  return OkStatus();
}

// Copies the weight of `module`, which the source may store in a quantized format.
Status CopyMatrix(const checkpoint::Checkpoint& source, const std::string& module, int rows, int columns,
                  Output* output) {
  ASSIGN_OR_RETURN(const std::vector<float> values, quantizer::ReadWeight(source, module, rows, columns));
  output->Add(module + ".weight", {rows, columns}, values);
  return OkStatus();
}

Status CopyAttention(const checkpoint::Checkpoint& source, const DecoderSpec& spec, int index,
                     Output* output) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const int hidden = spec.hidden;
  const int q = spec.attention.heads * spec.attention.head_dim;
  const int kv = spec.attention.kv_heads * spec.attention.head_dim;
  RETURN_IF_ERROR(CopyNorm(source, prefix + "input_layernorm.weight", hidden, output));
  RETURN_IF_ERROR(CopyMatrix(source, prefix + "self_attn.q_proj", q, hidden, output));
  RETURN_IF_ERROR(CopyMatrix(source, prefix + "self_attn.k_proj", kv, hidden, output));
  RETURN_IF_ERROR(CopyMatrix(source, prefix + "self_attn.v_proj", kv, hidden, output));
  RETURN_IF_ERROR(CopyMatrix(source, prefix + "self_attn.o_proj", hidden, q, output));
  return CopyNorm(source, prefix + "post_attention_layernorm.weight", hidden, output);
}

// Returns "rope_scaling" of config.json for `rope`. YaRN's factors are written as they are used, so that no
// reader derives others.
nlohmann::ordered_json RopeScaling(const layers::RopeSpec& rope, int context) {
  using Scaling = layers::RopeSpec::Scaling;
  switch (rope.scaling) {
    case Scaling::kNone:
      return nullptr;
    case Scaling::kLinear:
      return {{"rope_type", "linear"}, {"factor", rope.factor}};
    case Scaling::kLlama3:
      return {{"rope_type", "llama3"},
              {"factor", rope.factor},
              {"low_freq_factor", rope.low_freq_factor},
              {"high_freq_factor", rope.high_freq_factor},
              {"original_max_position_embeddings", rope.original_context}};
    case Scaling::kYarn:
      break;
  }
  nlohmann::ordered_json yarn = {{"rope_type", "yarn"},
                                 {"factor", rope.factor},
                                 {"beta_fast", rope.beta_fast},
                                 {"beta_slow", rope.beta_slow},
                                 {"attention_factor", rope.attention_factor}};
  // It defaults to the context. Some versions of transformers divide the context by it instead of reading
  // `factor`.
  if (rope.original_context != context) yarn["original_max_position_embeddings"] = rope.original_context;
  return yarn;
}

std::string ConfigText(const nlohmann::json& dense, const DecoderSpec& spec, const CarveOptions& options) {
  const int slice = spec.intermediate / options.slices;
  nlohmann::ordered_json config = {{"architectures", {"Glm4MoeForCausalLM"}},
                                   {"model_type", "glm4_moe"},
                                   {"attention_bias", false},
                                   {"attention_dropout", 0.0},
                                   {"first_k_dense_replace", 0},
                                   {"head_dim", spec.attention.head_dim},
                                   {"hidden_act", "silu"},
                                   {"hidden_size", spec.hidden},
                                   {"intermediate_size", spec.intermediate},
                                   {"max_position_embeddings", spec.context},
                                   {"moe_intermediate_size", slice},
                                   {"n_group", 1},
                                   {"n_routed_experts", options.slices - options.shared},
                                   {"n_shared_experts", options.shared},
                                   {"norm_topk_prob", false},
                                   {"num_attention_heads", spec.attention.heads},
                                   {"num_experts_per_tok", options.active},
                                   {"num_hidden_layers", spec.layers},
                                   {"num_key_value_heads", spec.attention.kv_heads},
                                   {"partial_rotary_factor", 1.0},
                                   {"rms_norm_eps", spec.norm_eps},
                                   {"rope_theta", spec.rope.theta},
                                   {"routed_scaling_factor", 2.0},
                                   {"tie_word_embeddings", spec.tied},
                                   {"topk_group", 1},
                                   {"torch_dtype", options.f32 ? "float32" : "bfloat16"},
                                   {"use_cache", true},
                                   {"use_qk_norm", false},
                                   {"vocab_size", spec.vocab}};
  if (auto scaling = RopeScaling(spec.rope, spec.context); !scaling.is_null()) {
    config["rope_scaling"] = std::move(scaling);
  }
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    if (dense.contains(key)) config[key] = dense[key];
  }
  return config.dump(2) + "\n";
}

// Appends sequences of one token each, drawn evenly from the calibration text. Any token may open a text,
// where it attends to itself only. It then becomes an attention sink: a massive activation on which all later
// tokens rely. Calibration texts often open with the same one or two tokens, so other openings must be added.
// With 2,048 of them, 4 of 1,493 tokens lose more than a fifth of SmolLM2-135M's largest activation; with
// 512, 15; with none, 107.
void AddOpenings(std::vector<std::vector<int32_t>>* sequences) {
  constexpr int64_t kOpenings = 2048;
  std::vector<int32_t> tokens;
  for (const std::vector<int32_t>& ids : *sequences) tokens.insert(tokens.end(), ids.begin(), ids.end());
  const int64_t count = std::min(kOpenings, std::ssize(tokens));
  for (int64_t i = 0; i < count; ++i) sequences->push_back({tokens[i * std::ssize(tokens) / count]});
}

}  // namespace

StatusOr<std::vector<CarveLayerReport>> Carve(const checkpoint::Checkpoint& dense,
                                              const std::vector<std::vector<int32_t>>& calibration,
                                              const CarveOptions& options,
                                              const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                              const std::string& out) {
  ASSIGN_OR_RETURN(const DecoderSpec spec, models::SpecFromConfig(dense.config(), "config.json"));
  RETURN_IF_ERROR(CheckDense(spec, options));
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
  std::vector<LayerPlan> given, plans;
  if (!options.plan.empty()) {
    ASSIGN_OR_RETURN(given, ReadCarvePlan(options.plan, spec, options));
  }
  // Fails before the work if the plan cannot be written.
  if (!options.save_plan.empty()) RETURN_IF_ERROR(runtime::AtomicFile::Create(options.save_plan).status());
  std::vector<std::vector<int32_t>> sequences = calibration;
  AddOpenings(&sequences);
  ASSIGN_OR_RETURN(CalibrationStream stream, CalibrationStream::Create(dense, spec, sequences, ctx));
  Output output(options.f32);
  RETURN_IF_ERROR(CopyMatrix(dense, models::kEmbedding, spec.vocab, spec.hidden, &output));
  std::vector<CarveLayerReport> reports;
  for (int i = 0; i < spec.layers; ++i) {
    ASSIGN_OR_RETURN(const DenseLayer layer, DenseLayer::Read(dense, spec, i, pool));
    stream.AddAttention(ctx, layer);
    reports.emplace_back();
    ASSIGN_OR_RETURN(CarvedFfn ffn, CarveFfn(ctx, spec, layer, options, given.empty() ? nullptr : &given[i],
                                             &stream, &reports.back()));
    RETURN_IF_ERROR(CopyAttention(dense, spec, i, &output));
    AddFfn(i, layer, ffn, spec.hidden, &output);
    plans.push_back(std::move(ffn.plan));
    if (options.progress && !options.progress(i + 1, spec.layers)) {
      return Cancelled("carving was interrupted");
    }
  }
  RETURN_IF_ERROR(CopyNorm(dense, models::kFinalNorm, spec.hidden, &output));
  if (!spec.tied) RETURN_IF_ERROR(CopyMatrix(dense, models::kHead, spec.vocab, spec.hidden, &output));

  if (!options.save_plan.empty()) RETURN_IF_ERROR(WriteCarvePlan(options.save_plan, options, plans));
  std::error_code error;
  std::filesystem::create_directories(out, error);
  if (error) return IoError("{}: cannot be created: {}", out, error.message());
  RETURN_IF_ERROR(checkpoint::WriteSafetensors(out + "/model.safetensors", output.tensors(),
                                               {{"format", "pt"}, {"recipe", CarveRecipe(options)}}));
  const std::string config = ConfigText(dense.config(), spec, options);
  RETURN_IF_ERROR(runtime::WriteFileAtomically(out + "/config.json", config));
  return reports;
}

std::string CarveRecipe(const CarveOptions& options) {
  constexpr int kVersion = 3;  // must be raised whenever the same options give another result
  return fmt::format("carve {}: {} slices, {} shared, {} active, refit {}, ridge {}, at most {} tokens, {}",
                     kVersion, options.slices, options.shared, options.active, options.refit ? "on" : "off",
                     options.ridge, options.max_tokens, options.f32 ? "f32" : "bf16");
}

}  // namespace moesaic::carve
