#include "science/protein/mpnn_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace moesaic::science {
namespace {

constexpr float kSumScale = 30;

int32_t ChooseLetter(const float* logits, const MpnnSampling& sampling, std::mt19937_64* random) {
  auto omitted = [&](int c) { return sampling.omit.find(kMpnnAlphabet[c]) != std::string::npos; };
  float max = -std::numeric_limits<float>::infinity();
  for (int c = 0; c < kMpnnLetters; ++c) {
    if (!omitted(c)) max = std::max(max, logits[c]);
  }
  // Differences are divided by the temperature: quotients of logits overflow if it is small.
  double scaled[kMpnnLetters], total = 0;
  for (int c = 0; c < kMpnnLetters; ++c)
    total += scaled[c] = omitted(c) ? 0 : std::exp((double{logits[c]} - max) / sampling.temperature);
  double at = std::uniform_real_distribution<double>(0, total)(*random);
  int32_t last = 0;
  for (int32_t c = 0; c < kMpnnLetters; ++c) {
    if (scaled[c] <= 0) continue;
    last = c;
    at -= scaled[c];
    if (at < 0) break;
  }
  return last;
}

// The largest number of inputs of a layer that the sampler runs.
int WidestInput(const MpnnDecoder& model) {
  int width = 2 * model.hidden;
  for (const MpnnLayer& layer : model.decoder) width = std::max(width, layer.dense_out.k());
  return width;
}

}  // namespace

void LogSoftmax(float* x, int n) {
  const float max = *std::max_element(x, x + n);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += std::exp(double{x[i]} - max);
  const auto shift = static_cast<float>(max + std::log(sum));
  for (int i = 0; i < n; ++i) x[i] -= shift;
}

MpnnSampler::MpnnSampler(const graph::Context& ctx, const MpnnDecoder& model, const MpnnInput& input,
                         const MpnnEncoding& encoding)
    : ctx_(ctx),
      model_(model),
      input_(input),
      encoding_(encoding),
      dense_(ctx, tensor::PackedFormat::kF32, std::max(1, encoding.neighbors), WidestInput(model)) {
  const int64_t size = encoding.size;
  const int h = model.hidden;
  const size_t layers = model.decoder.size();
  state_.resize((layers + 1) * size * h);
  std::copy(encoding.nodes.begin(), encoding.nodes.end(), state_.begin());
  waiting_.resize(layers * size * h);
  decoded_.resize(layers * size * h);
  std::vector<float> sources(2 * size * h, 0);
  for (int64_t j = 0; j < size; ++j)
    std::copy_n(encoding.nodes.data() + j * h, h, sources.data() + (2 * j + 1) * h);
  for (size_t l = 0; l < layers; ++l)
    Apply(ctx, model.decoder[l].message.first_src, sources.data(), 2 * h, size,
          waiting_.data() + l * size * h, h);
  in_.resize(static_cast<size_t>(encoding.neighbors) * h);
  out_.resize(in_.size());
}

void MpnnSampler::RunLayer(size_t l, int64_t t) {
  const MpnnLayer& layer = model_.decoder[l];
  const int h = model_.hidden, k = encoding_.neighbors;
  const graph::RowKernels& rows = ctx_.graph->rows;
  const int64_t size = encoding_.size;
  float* node = State(l + 1, t);
  std::vector<float> from_node(h);
  dense_.Run(layer.message.first_dst, State(l, t), h, 1, from_node.data(), h);
  dense_.Run(layer.message.first_edge, encoding_.edges.data() + t * k * h, h, k, in_.data(), h);
  for (int n = 0; n < k; ++n) {
    const int32_t j = encoding_.neighbor[t * k + n];
    const std::vector<float>& from = rank_[j] < rank_[t] ? decoded_ : waiting_;
    float* y = in_.data() + int64_t{n} * h;
    const float* parts[] = {from_node.data(), from.data() + (static_cast<int64_t>(l) * size + j) * h, y};
    rows.activate(parts, 3, nullptr, 0, h, layer.message.activation, y);
  }
  dense_.Run(layer.message.rest[0], in_.data(), h, k, out_.data(), h);
  const float* middle = out_.data();
  rows.activate(&middle, 1, nullptr, 0, k * h, layer.message.activation, out_.data());
  dense_.Run(layer.message.rest[1], out_.data(), h, k, in_.data(), h);
  std::copy_n(State(l, t), h, node);
  for (int n = 0; n < k; ++n) ctx_.exec.kernels->axpy(1 / kSumScale, in_.data() + int64_t{n} * h, h, node);
  rows.layer_norm(node, layer.norm1.gamma.data(), layer.norm1.beta.data(), h, layer.norm1.eps, node);
  inner_.resize(layer.dense_in.n());
  dense_.Run(layer.dense_in, node, h, 1, inner_.data(), layer.dense_in.n());
  const float* inner = inner_.data();
  rows.activate(&inner, 1, nullptr, 0, layer.dense_in.n(), graph::Activation::kGelu, inner_.data());
  dense_.Run(layer.dense_out, inner_.data(), layer.dense_in.n(), 1, from_node.data(), h);
  ctx_.exec.kernels->axpy(1, from_node.data(), h, node);
  rows.layer_norm(node, layer.norm2.gamma.data(), layer.norm2.beta.data(), h, layer.norm2.eps, node);
}

void MpnnSampler::Publish(int64_t t, int32_t letter) {
  const int h = model_.hidden;
  std::vector<float> source(2 * static_cast<size_t>(h));
  std::copy_n(model_.letters.data() + int64_t{letter} * h, h, source.data());
  for (size_t l = 0; l < model_.decoder.size(); ++l) {
    std::copy_n(State(l, t), h, source.data() + h);
    dense_.Run(model_.decoder[l].message.first_src, source.data(), 2 * h, 1,
               decoded_.data() + (l * encoding_.size + t) * h, h);
  }
}

StatusOr<MpnnSample> MpnnSampler::Run(const MpnnSampling& sampling) {
  const int64_t size = encoding_.size;
  const std::vector<int32_t> order = DecodingOrder(input_, sampling.seed);
  rank_.resize(size);
  for (int64_t r = 0; r < size; ++r) rank_[order[r]] = static_cast<int32_t>(r);
  std::mt19937_64 random(sampling.seed + 0x9e3779b97f4a7c15ULL);
  MpnnSample sample;
  sample.sequence.resize(size);
  int64_t scored = 0, same = 0;
  for (const int32_t t : order) {
    int32_t letter = input_.sequence[t];
    if (input_.known[t] != 0) {
      for (size_t l = 0; l < model_.decoder.size(); ++l) RunLayer(l, t);
      float logits[kMpnnLetters];
      dense_.Run(model_.out, State(model_.decoder.size(), t), model_.hidden, 1, logits, kMpnnLetters);
      for (const float logit : logits) {
        if (!std::isfinite(logit))
          return InvalidArgument("position {} has a logit of {}: the weights or coordinates are not usable",
                                 t, logit);
      }
      if (input_.designed[t] != 0) {
        letter = ChooseLetter(logits, sampling, &random);
        LogSoftmax(logits, kMpnnLetters);
        sample.score -= logits[letter];
        ++scored;
        same += letter == input_.sequence[t] ? 1 : 0;
      }
    }
    sample.sequence[t] = letter;
    Publish(t, letter);
  }
  if (scored > 0) {
    sample.score /= static_cast<double>(scored);
    sample.recovery = static_cast<double>(same) / static_cast<double>(scored);
  }
  return sample;
}

}  // namespace moesaic::science
