// The backward pass of triangle multiplication.
#include <algorithm>

#include "base/round.h"
#include "science/evoformer.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

// Rows (i, j) whose projections exist at once.
constexpr int64_t kPairRows = 8192;

}  // namespace

struct TriangleMultiplication::BackwardRun {
  const TriangleMultiplication& layer;
  const graph::Context& ctx;
  int64_t n;
  const float *mask, *z;
  DenseBackward a{layer.a_}, a_gate{layer.a_gate_}, b{layer.b_}, b_gate{layer.b_gate_}, gate{layer.gate_},
      out{layer.out_};
  DenseGradients a_grads{}, a_gate_grads{}, b_grads{}, b_gate_grads{}, gate_grads{}, out_grads{};
  NormGradients norm_in_grads{}, norm_out_grads{};
  // Buffers of a block of rows.
  float *normal = nullptr, *normal_grad = nullptr, *value = nullptr, *gate_value = nullptr,
        *value_grad = nullptr, *gate_grad = nullptr;

  int c() const { return layer.a_.k(); }
  int hidden() const { return layer.a_.n(); }
  int64_t square() const { return n * n; }

  Status FindGradients(const GradientMap& parameters) {
    const GradientScope scope(parameters);
    ASSIGN_OR_RETURN(a_grads, DenseGradients::Find(scope, "linear_a_p", layer.a_));
    ASSIGN_OR_RETURN(a_gate_grads, DenseGradients::Find(scope, "linear_a_g", layer.a_gate_));
    ASSIGN_OR_RETURN(b_grads, DenseGradients::Find(scope, "linear_b_p", layer.b_));
    ASSIGN_OR_RETURN(b_gate_grads, DenseGradients::Find(scope, "linear_b_g", layer.b_gate_));
    ASSIGN_OR_RETURN(gate_grads, DenseGradients::Find(scope, "linear_g", layer.gate_));
    ASSIGN_OR_RETURN(out_grads, DenseGradients::Find(scope, "linear_z", layer.out_));
    ASSIGN_OR_RETURN(norm_in_grads, NormGradients::Find(scope, "layer_norm_in", layer.norm_in_));
    ASSIGN_OR_RETURN(norm_out_grads, NormGradients::Find(scope, "layer_norm_out", layer.norm_out_));
    return OkStatus();
  }

  void TakeBuffers() {
    const int64_t rows = std::min(kPairRows, square()), widest = std::max(c(), hidden());
    for (float** buffer : {&normal, &normal_grad, &value, &gate_value, &value_grad, &gate_grad})
      *buffer = ctx.exec.scratch->Take<float>(rows * widest).data();
  }

  template <typename Body>
  void ForBlocks(const Body& body) const {
    for (int64_t first = 0; first < square(); first += kPairRows)
      body(first, std::min(kPairRows, square() - first));
  }

  void Normalize(int64_t first, int64_t count) const {
    Apply(ctx, layer.norm_in_, z + first * c(), count, normal);
  }

  // [count, width] to and from [width][square].
  void ToChannels(const float* rows, int64_t first, int64_t count, int width, bool masked,
                  float* channels) const {
    constexpr int64_t kRows = 256;
    ForRows(ctx, count, kRows, [&](int64_t begin, int64_t end) {
      ctx.graph->rows.transpose(rows + begin * width, width, end - begin, width, channels + first + begin,
                                square());
      for (int channel = 0; channel < width && masked && mask != nullptr; ++channel) {
        float* to = channels + channel * square() + first;
        for (int64_t r = begin; r < end; ++r) to[r] *= mask[first + r];
      }
    });
  }
  void FromChannels(const float* channels, int64_t first, int64_t count, int width, float* rows) const {
    constexpr int64_t kRows = 256;
    ForRows(ctx, count, kRows, [&](int64_t begin, int64_t end) {
      ctx.graph->rows.transpose(channels + first + begin, square(), width, end - begin, rows + begin * width,
                                width);
    });
  }

  // value = linear(normal), gate_value = sigmoid(gate(normal)).
  void Project(const Dense& linear, const Dense& gate_linear, int64_t count) const {
    Apply(ctx, linear, normal, c(), count, value, linear.n());
    Apply(ctx, gate_linear, normal, c(), count, gate_value, linear.n());
    Activate(ctx, gate_value, count * linear.n(), graph::Activation::kSigmoid);
  }

  // a and b [hidden][square]: the gated projections.
  void Operands(float* a_channels, float* b_channels) const {
    ForBlocks([&](int64_t first, int64_t count) {
      Normalize(first, count);
      for (const bool second : {false, true}) {
        Project(second ? layer.b_ : layer.a_, second ? layer.b_gate_ : layer.a_gate_, count);
        ForRows(ctx, count * hidden(), 1 << 15, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) value[i] *= gate_value[i];
        });
        ToChannels(value, first, count, hidden(), true, second ? b_channels : a_channels);
      }
    });
  }

  // c [n, n] = a b, a b^T, with transposed copies of left operands.
  void Multiply(const float* left, bool transpose_left, const float* right, bool transpose_right, float* copy,
                float* product) const {
    if (transpose_left) ctx.graph->rows.transpose(left, n, n, n, copy, n);
    ctx.graph->rows.matmul({.a = transpose_left ? copy : left,
                            .b = right,
                            .c = product,
                            .a_stride = n,
                            .b_stride = n,
                            .c_stride = n,
                            .m = n,
                            .n = n,
                            .k = n,
                            .b_transposed = transpose_right});
  }

  template <typename Body>
  void ForChannels(const Body& body) const {
    const graph::ScratchScope scope(ctx);
    std::vector<float*> copies;
    for (int w = 0; w < ctx.exec.pool->size(); ++w)
      copies.push_back(ctx.exec.scratch->Take<float>(2 * square()).data());
    ctx.exec.pool->Run(hidden(),
                       [&](int64_t channel, int worker) { body(channel * square(), copies[worker]); });
  }

  // Replaces the product by its gradient. z_grad gets the part of the gate and of the residual.
  void Result(const float* out_grad, float* product, float* z_grad) const {
    ForBlocks([&](int64_t first, int64_t count) {
      const float* grad = out_grad + first * c();
      FromChannels(product, first, count, hidden(), value_grad);  // the product's rows
      Normalize(first, count);
      Apply(ctx, layer.norm_out_, value_grad, count, gate_grad);  // normalized rows of the product
      Apply(ctx, layer.out_, gate_grad, hidden(), count, value, c());
      Apply(ctx, layer.gate_, normal, c(), count, gate_value, c());
      Activate(ctx, gate_value, count * c(), graph::Activation::kSigmoid);
      ForRows(ctx, count * c(), 1 << 15, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const float g = gate_value[i], through = grad[i] * value[i] * g * (1 - g);
          value[i] = grad[i] * g;
          gate_value[i] = through;
        }
      });
      AddWeightGradients(ctx, value, c(), c(), gate_grad, hidden(), hidden(), count, out_grads);
      AddWeightGradients(ctx, gate_value, c(), c(), normal, c(), c(), count, gate_grads);
      gate.Inputs(ctx, gate_value, c(), count, normal_grad, c());
      if (z_grad != nullptr) {
        for (int64_t i = 0; i < count * c(); ++i) z_grad[first * c() + i] += grad[i];
      }
      AddNormGradient(first, count, z_grad);
      out.Inputs(ctx, value, c(), count, gate_grad, hidden());
      std::fill_n(normal_grad, count * hidden(), 0.0F);
      NormBackward(ctx, layer.norm_out_, value_grad, gate_grad, count, normal_grad, norm_out_grads);
      ToChannels(normal_grad, first, count, hidden(), false, product);
    });
  }

  // Adds the gradient of layer_norm_in for normal_grad.
  void AddNormGradient(int64_t first, int64_t count, float* z_grad) const {
    NormBackward(ctx, layer.norm_in_, z + first * c(), normal_grad, count,
                 z_grad == nullptr ? nullptr : z_grad + first * c(), norm_in_grads);
  }

  // Gradients of a and b [hidden][square] go through the gated projections to z.
  void OperandGradients(const float* a_channels, const float* b_channels, float* z_grad) const {
    ForBlocks([&](int64_t first, int64_t count) {
      Normalize(first, count);
      for (const bool second : {false, true}) {
        Project(second ? layer.b_ : layer.a_, second ? layer.b_gate_ : layer.a_gate_, count);
        FromChannels(second ? b_channels : a_channels, first, count, hidden(), value_grad);
        ForRows(ctx, count, 256, [&](int64_t begin, int64_t end) {
          for (int64_t r = begin; r < end; ++r) {
            const float weight = mask == nullptr ? 1 : mask[first + r];
            for (int64_t i = r * hidden(); i < (r + 1) * hidden(); ++i) {
              const float g = gate_value[i], grad = weight * value_grad[i];
              value_grad[i] = grad * g;
              gate_grad[i] = grad * value[i] * g * (1 - g);
            }
          }
        });
        AddWeightGradients(ctx, value_grad, hidden(), hidden(), normal, c(), c(), count,
                           second ? b_grads : a_grads);
        AddWeightGradients(ctx, gate_grad, hidden(), hidden(), normal, c(), c(), count,
                           second ? b_gate_grads : a_gate_grads);
        (second ? b : a).Inputs(ctx, value_grad, hidden(), count, normal_grad, c(), second);
        (second ? b_gate : a_gate).Inputs(ctx, gate_grad, hidden(), count, normal_grad, c(), true);
      }
      AddNormGradient(first, count, z_grad);
    });
  }
};

Status TriangleMultiplication::Backward(const graph::Context& ctx, int64_t n, const float* mask,
                                        const float* z, const float* out_grad, float* z_grad,
                                        const GradientMap& parameters) const {
  BackwardRun run{*this, ctx, n, mask, z};
  RETURN_IF_ERROR(run.FindGradients(parameters));
  if (n == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  run.TakeBuffers();
  const int64_t size = run.hidden() * run.square();
  float *a = ctx.exec.scratch->Take<float>(size).data(), *b = ctx.exec.scratch->Take<float>(size).data(),
        *product = ctx.exec.scratch->Take<float>(size).data();
  run.Operands(a, b);
  // P = a b^T, or a^T b for incoming edges.
  run.ForChannels([&](int64_t at, float* copy) {
    run.Multiply(a + at, incoming_, b + at, !incoming_, copy, product + at);
  });
  run.Result(out_grad, product, z_grad);
  // Outgoing: a' = P' b, b' = P'^T a. Incoming: a' = b P'^T, b' = a P'.
  run.ForChannels([&](int64_t at, float* copy) {
    float* a_grad = copy + run.square();
    if (incoming_) {
      run.Multiply(b + at, false, product + at, true, copy, a_grad);
      run.Multiply(a + at, false, product + at, false, copy, b + at);
    } else {
      run.Multiply(product + at, false, b + at, false, copy, a_grad);
      run.Multiply(product + at, true, a + at, false, copy, b + at);
    }
    std::copy_n(a_grad, run.square(), a + at);
  });
  run.OperandGradients(a, b, z_grad);
  return OkStatus();
}

}  // namespace moesaic::science
