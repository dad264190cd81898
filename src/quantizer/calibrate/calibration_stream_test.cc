// Tests that calibration texts do not attend to each other, although they share KV blocks.
#include "quantizer/calibrate/calibration_stream.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <array>

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "models/test_session.h"

namespace moesaic::quantizer {
namespace {

TEST(CalibrationStreamTest, TextsDoNotInfluenceEachOther) {
  const auto source = *checkpoint::Checkpoint::Open(models::SourcePath("tests/golden/llama-untied-f16"));
  const models::DecoderSpec spec = *models::SpecFromConfig(source->config(), "config.json");
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const kernels::KernelTable kernels = kernels::SelectKernels(runtime::DetectCpu());
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = pool.get(), .scratch = &scratch};
  const DenseLayer layer = *DenseLayer::Read(*source, spec, 0, *pool);

  // Three groups of 16. The later ones use blocks that longer texts have used before.
  std::vector<std::vector<int32_t>> texts(40);
  int32_t id = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    texts[i].resize(std::array{130, 64, 1, 65, 63, 128, 2}[i % 7] / (1 + i / 16));
    for (int32_t& token : texts[i]) token = id++ * 37 % spec.vocab;
    if (texts[i].empty()) texts[i].push_back(5);
  }
  CalibrationStream all = *CalibrationStream::Create(*source, spec, texts, ctx);
  all.AddAttention(ctx, layer);
  const float* row = all.hidden();
  for (const std::vector<int32_t>& text : texts) {
    CalibrationStream alone = *CalibrationStream::Create(*source, spec, {text}, ctx);
    alone.AddAttention(ctx, layer);
    for (int64_t i = 0; i < alone.tokens() * int64_t{spec.hidden}; ++i) {
      ASSERT_EQ(row[i], alone.hidden()[i]);
    }
    row += alone.tokens() * int64_t{spec.hidden};
  }
}

}  // namespace
}  // namespace moesaic::quantizer
