// Backward passes of whole models against PyTorch's gradients of transcriptions, on every instruction set.
#include <gtest/gtest.h>

#include <functional>

#include "science/evoformer.h"
#include "science/protein/protein_mpnn.h"
#include "science/structure_module.h"
#include "science/test_gradients.h"

namespace moesaic::science {
namespace {

class ModelGradientsTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  Goldens goldens_{"model_gradients"};

  std::vector<float> Floats(const std::string& name) const { return goldens_.Floats(name); }

  // Runs `backward` with one and three threads. Expects equal gradients, and those of the goldens. The
  // gradients of `inputs` have the sizes of the inputs.
  void Check(const std::string& name, const std::vector<std::string>& inputs, float tolerance,
             const std::function<Status(const graph::Context&, std::map<std::string, std::vector<float>>&,
                                        const GradientMap&)>& backward) {
    std::map<std::string, std::vector<float>> first, first_parameters;
    for (const int threads : {1, 3}) {
      const auto workspace = graph::MakeWorkspace(GetParam(), threads);
      std::map<std::string, std::vector<float>> grads;
      for (const std::string& key : inputs) grads[key].resize(Floats(name + "." + key).size());
      const ParameterGradients parameters(goldens_, name, tolerance);
      const Status status = backward(workspace->context(), grads, parameters.map());
      ASSERT_TRUE(status.ok()) << status;
      if (threads == 1) {
        first = grads;
        first_parameters = parameters.values();
        for (const auto& [key, grad] : grads)
          ExpectClose(grad, Floats(name + ".grad.input." + key), tolerance, key.c_str());
        parameters.ExpectGoldens();
      }
      EXPECT_EQ(first, grads) << name;
      EXPECT_EQ(first_parameters, parameters.values()) << name;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Isa, ModelGradientsTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(ModelGradientsTest, EvoformerBlockMatchesPyTorch) {
  const auto block = *EvoformerBlock::Load(WeightScope(goldens_.Weights("evoformer.weights.")), 2, 2);
  const std::vector<int64_t> shape = goldens_.Shape("evoformer.m");
  const std::vector<float> m = Floats("evoformer.m"), z = Floats("evoformer.z"),
                           msa_mask = Floats("evoformer.msa_mask"), pair_mask = Floats("evoformer.pair_mask"),
                           m_seed = Floats("evoformer.seed0"), z_seed = Floats("evoformer.seed1");
  Check(
      "evoformer", {"m", "z"}, kGradientTolerance, [&](const auto& ctx, auto& grads, const auto& parameters) {
        return block.Backward(ctx, shape[0], shape[1], msa_mask.data(), pair_mask.data(), m.data(), z.data(),
                              {m_seed.data(), z_seed.data(), grads["m"].data(), grads["z"].data()},
                              parameters);
      });
}

TEST_P(ModelGradientsTest, StructureModuleMatchesPyTorch) {
  for (const bool stop : {true, false}) {
    const std::string name = stop ? "structure.stop" : "structure.full";
    WeightMap weights = goldens_.Weights(name + ".weights.");
    weights.merge(goldens_.Weights("structure.full.geometry."));
    const auto module = *StructureModule::Load(WeightScope(weights), {2, 3, 2, 3}, 3);
    const std::vector<float> single = Floats(name + ".single"), pair = Floats(name + ".pair"),
                             mask = Floats(name + ".mask");
    const std::vector<int32_t> types = goldens_.Ints(name + ".types");
    std::vector<std::vector<float>> seeds;
    for (int i = 0; i < 6; ++i) seeds.push_back(Floats(name + ".seed" + std::to_string(i)));
    Check(name, {"single", "pair"}, kGradientTolerance,
          [&](const auto& ctx, auto& grads, const auto& parameters) {
            return module.Backward(
                ctx, goldens_.Shape(name + ".single")[0], single.data(), pair.data(), types.data(),
                mask.data(), stop,
                {seeds[0].data(), seeds[1].data(), seeds[2].data(), seeds[3].data(), seeds[4].data(),
                 seeds[5].data(), grads["single"].data(), grads["pair"].data()},
                parameters);
          });
  }
}

TEST_P(ModelGradientsTest, ProteinMpnnMatchesPyTorch) {
  const std::string name = "protein_mpnn";
  MpnnInput input;
  input.xyz = Floats(name + ".xyz");
  for (const int32_t known : goldens_.Ints(name + ".known")) input.known.push_back(known != 0 ? 1 : 0);
  input.index = goldens_.Ints(name + ".index");
  input.chain = goldens_.Ints(name + ".chain");
  input.sequence = goldens_.Ints(name + ".sequence");
  input.designed.assign(input.known.size(), 1);
  const std::vector<int32_t> order = goldens_.Ints(name + ".order");
  const std::vector<float> seed = Floats(name + ".seed0");
  const auto model =
      *ProteinMpnn::Load(goldens_.Weights(name + ".weights."), static_cast<int>(input.known.size()));
  Check(name, {"xyz"}, kGradientTolerance, [&](const auto& ctx, auto& grads, const auto& parameters) {
    return model.Backward(ctx, input, input.sequence, order, seed.data(), grads["xyz"].data(), parameters);
  });
}

}  // namespace
}  // namespace moesaic::science
