#include <gmock/gmock.h>

#include "app/report_sections.h"
#include "app/svg_plot.h"

namespace moesaic::app {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kRun = R"({"settings":{"scheme":"w4a16","method":"gptq"},
  "calibration":{"tokens":4096,"sequences":8},
  "stages":[{"name":"read","seconds":1.0},{"name":"round","seconds":3.5}],
  "linears":[
    {"name":"model.layers.1.mlp.experts.0.up_proj","layer":1,"kind":"up_proj","method":"gptq","tokens":900,
     "shrinkage":0.0,"loss":0.1,"of_nearest":0.25,"damping":0.01},
    {"name":"model.layers.1.mlp.experts.1.up_proj","layer":1,"kind":"up_proj","method":"gptq","tokens":0,
     "shrinkage":1.0,"of_nearest":0.75,"damping":0.1},
    {"name":"model.layers.1.self_attn.q_proj","layer":1,"kind":"q_proj","method":"gptq","of_nearest":0.5}],
  "device":"Card 9, cuBLAS 12","peak_bytes":1048576,"seconds":5,"bytes":{"source":100,"output":30,"read":100,"written":33}})";

std::vector<quantizer::LinearError> Errors() {
  return {{"model.layers.0.self_attn.q_proj", "q_proj", 0, 0.01, 1},
          {"model.layers.1.self_attn.q_proj", "q_proj", 1, 0.04, 1}};
}

TEST(ReportTest, ExplainsHowToObtainMissingParts) {
  const Report report = MakeReport({.folder = "out", .bytes = {.total = 1024, .active = 512}});
  const std::string text = ReportMarkdown(report);
  EXPECT_THAT(text, HasSubstr("`moesaic report out --source MODEL --text FILE`"));
  EXPECT_THAT(text, HasSubstr("`moesaic report out --source MODEL` reads"));
  EXPECT_THAT(text, HasSubstr("out has no quantize.json"));
  EXPECT_THAT(text, HasSubstr("512"));
  EXPECT_THAT(ReportHtml(report), Not(HasSubstr("<svg")));
}

TEST(ReportTest, DescribesACalibratedRun) {
  ReportInput input{.folder = "out", .source = "model", .bytes = {.total = 1024, .active = 512}};
  input.source_bytes = {.total = 4096, .active = 1024};
  input.errors = Errors();
  const auto run = ParseQuantizeRecord(kRun, "quantize.json");
  ASSERT_TRUE(run.ok()) << run.status();
  input.run = *run;
  const Report report = MakeReport(input);
  const std::string text = ReportMarkdown(report);
  EXPECT_THAT(text, HasSubstr("4096 tokens in 8 sequences."));
  EXPECT_THAT(text, HasSubstr("Of 3 linears 1 had too few tokens"));
  EXPECT_THAT(text, HasSubstr("largest damping was 0.1"));
  EXPECT_THAT(text, HasSubstr("ran on a device: Card 9, cuBLAS 12."));
  EXPECT_THAT(text, HasSubstr("1.023 x the minimum bytes"));  // 133 of 130 bytes
  EXPECT_THAT(text, HasSubstr("experts.up_proj"));
  EXPECT_THAT(text, HasSubstr("0.15811"));  // sqrt(0.05 / 2)
  EXPECT_THAT(text, HasSubstr("model.layers.1.self_attn.q_proj"));
  const std::string html = ReportHtml(report);
  EXPECT_THAT(html, HasSubstr("Tokens of each routed expert"));
  EXPECT_THAT(html, HasSubstr("Seconds by stage"));
  EXPECT_THAT(html, Not(HasSubstr("http")));  // one file that needs no other
  EXPECT_THAT(html, Not(HasSubstr("nan")));
}

TEST(ReportTest, BeginsWithASummary) {
  ReportInput input{.folder = "out", .source = "model", .bytes = {.total = 1 << 20, .active = 1 << 19}};
  input.source_bytes = {.total = 4 << 20, .active = 1 << 20};
  input.quality = {{"kl", 0.0125}, {"same_top", 0.97}, {"ratio", 1.012},
                   {"scored", 1},  {"window", 2},      {"windows", 1}};
  input.run = *ParseQuantizeRecord(R"({"settings":{"scheme":"w4a16","method":"gptq","group_size":128,
    "shard_bytes":5000000000},"calibration":{"tokens":40960,"sequences":8}})",
                                   "f");
  const Report report = MakeReport(input);
  EXPECT_EQ(report.subtitle,
            "4-bit integer weights in groups of 128 (w4a16), rounded by GPTQ, calibrated on 40,960 tokens. "
            "All tensors "
            "take 1.00 MiB, 25 % of the source; a token reads 512.00 KiB. It predicts the source's likeliest "
            "token 97 % of "
            "the time. Its perplexity is 1.2 % higher than the source's. Its predictions diverge from the "
            "source's by "
            "0.0125 nats per token (KL).");
  const std::string html = ReportHtml(report);
  EXPECT_THAT(html.substr(html.find("<body>"), html.find("<section>") - html.find("<body>")),
              Not(HasSubstr("shard_bytes")));
  EXPECT_THAT(html, HasSubstr("Made from model."));
  input.run = *ParseQuantizeRecord(R"({"settings":{"mix":{},"method":"rtn"}})", "f");
  input.quality = nullptr;
  EXPECT_THAT(MakeReport(input).subtitle,
              ::testing::StartsWith(
                  "A mix of precisions, chosen by precision group, rounded to the nearest. All tensors"));
  input.run = *ParseQuantizeRecord(R"({"settings":{"method":"mse"}})", "f");
  EXPECT_THAT(MakeReport(input).subtitle, ::testing::StartsWith("Weights, rounded to the nearest"));
}

TEST(ReportTest, ComparesTimesWithTheMachine) {
  ReportInput input{.folder = "out"};
  input.run = *ParseQuantizeRecord(R"({"seconds":20, "stages":[{"name":"read","seconds":4},
    {"name":"hessians","seconds":8},{"name":"forward","seconds":3},{"name":"analysis","seconds":5}]})",
                                   "f");
  EXPECT_THAT(ReportMarkdown(MakeReport(input)), HasSubstr("`moesaic report out --source MODEL --roofline`"));
  input.roofline = {.disk_seconds = 5, .stages = {{"hessians", 2}, {"forward", 4}}, .rates = "so fast"};
  const std::string text = ReportMarkdown(MakeReport(input));
  EXPECT_THAT(text, HasSubstr("so fast"));
  for (const auto& [what, share] :
       {std::pair("hessians", "25 %"), std::pair("forward, analysis", "50 %"),
        std::pair("processor, of all computing", "37.5 %"), std::pair("processor, of the run", "30 %"),
        std::pair("disk, of the run", "25 %")}) {
    EXPECT_THAT(text, ::testing::ContainsRegex(fmt::format("[|] {} .*[|] *{} *[|]", what, share)));
  }
}

TEST(ReportTest, ResumedRunHasNoRoofline) {
  ReportInput input{.folder = "out"};
  input.run = *ParseQuantizeRecord(R"({"seconds":2, "stages":[{"name":"rounding","seconds":1}], "units":10,
    "resumed_units":9, "bytes":{"source":100,"output":30,"read":10,"written":3}})",
                                   "f");
  input.roofline = {.disk_seconds = 5, .stages = {{"rounding", 20}}, .rates = "so fast"};
  const std::string text = ReportMarkdown(MakeReport(input));
  EXPECT_THAT(text, HasSubstr("10 B were read and 3 B written."));
  EXPECT_THAT(text, HasSubstr("Partial: times and bytes moved cover only the units after"));
  EXPECT_THAT(text, HasSubstr("Not measured: times"));
  EXPECT_THAT(text, HasSubstr("9 of 10 were done earlier."));
  EXPECT_THAT(text, Not(HasSubstr("the minimum bytes")));
  EXPECT_THAT(text, Not(HasSubstr("2000 %")));
}

TEST(ReportTest, RunWithResumedAnalysisHasNoRoofline) {
  ReportInput input{.folder = "out"};
  input.run = *ParseQuantizeRecord(R"({"seconds":2, "stages":[{"name":"analysis","seconds":0.01}], "units":10,
    "resumed_units":0, "resumed_analysis":true})",
                                   "f");
  input.roofline = {.disk_seconds = 5, .stages = {{"forward", 20}}, .rates = "so fast"};
  const std::string text = ReportMarkdown(MakeReport(input));
  EXPECT_FALSE(input.run->has_roofline());
  EXPECT_THAT(text, HasSubstr("Not measured: the time of the analysis covers only its part"));
  EXPECT_THAT(text, HasSubstr("Partial: the time of the analysis"));
  EXPECT_THAT(text, Not(HasSubstr("so fast")));
  input.run = *ParseQuantizeRecord(R"({"resumed_units":0, "resumed_analysis":false})", "f");
  EXPECT_TRUE(input.run->has_roofline());
}

TEST(ReportTest, RunWithAnAnalysisHasNoShareOfTheMinimum) {
  ReportInput input{.folder = "out"};
  for (const char* analysis : {R"("analysis":[])", R"("mix":{"units":[],"routers":[]})"}) {
    const auto run = ParseQuantizeRecord(
        fmt::format(R"({{"seconds":2, "bytes":{{"source":100,"output":30,"read":100,"written":30}}, {}}})",
                    analysis),
        "f");
    ASSERT_TRUE(run.ok()) << run.status();
    input.run = *run;
    input.roofline = {.disk_seconds = 5, .stages = {{"forward", 20}}, .rates = "so fast"};
    const std::string text = ReportMarkdown(MakeReport(input));
    EXPECT_THAT(text, HasSubstr("100 B were read and 30 B written by the waves, in addition to the reads"));
    EXPECT_THAT(text, HasSubstr("The seconds of the disk exclude the reads of the analysis."));
    EXPECT_THAT(text, Not(HasSubstr("the minimum bytes")));
  }
}

TEST(ReportTest, DeviceTimesAreNotComparedWithTheCpu) {
  ReportInput input{.folder = "out"};
  input.run = *ParseQuantizeRecord(kRun, "f");
  EXPECT_FALSE(input.run->has_roofline());
  // A measured roofline is ignored as well.
  for (const bool measured : {false, true}) {
    if (measured) input.roofline = {.disk_seconds = 5, .stages = {{"rounding", 20}}, .rates = "so fast"};
    const std::string text = ReportMarkdown(MakeReport(input));
    EXPECT_THAT(text, HasSubstr("Not measured: Hessians, factors and rounding ran on a device, Card 9, "));
    EXPECT_THAT(text, Not(HasSubstr("so fast")));
    EXPECT_THAT(text, Not(HasSubstr("--roofline")));
    EXPECT_THAT(text, Not(HasSubstr("processor, of the run")));
  }
}

TEST(ReportTest, ReportsTheDivergence) {
  ReportInput input{.folder = "out", .source = "model", .text = "text.txt"};
  input.quality = {{"scored", 255},
                   {"window", 256},
                   {"windows", 1},
                   {"kl", 0.0125},
                   {"kl_error", nullptr},
                   {"same_top", 0.97},
                   {"ratio", 1.01},
                   {"ratio_low", nullptr},
                   {"router_flips", {{"share", 0.02}, {"layers", {{{"layer", 3}, {"share", 0.02}}}}}}};
  const Report report = MakeReport(input);
  const std::string text = ReportMarkdown(report);
  EXPECT_THAT(text, HasSubstr("0.0125 ± n/a"));
  EXPECT_THAT(text, HasSubstr("layer 3"));
  EXPECT_THAT(ReportHtml(report), HasSubstr("Router flips"));
}

TEST(ReportTest, EscapesNames) {
  const Report report = MakeReport({.folder = "a<b>&\"c"});
  EXPECT_THAT(ReportHtml(report), HasSubstr("a&lt;b&gt;&amp;&quot;c"));
  EXPECT_THAT(ReportHtml(report), Not(HasSubstr("a<b>")));
}

TEST(QuantizeRecordTest, RejectsFieldsOfAnotherType) {
  for (const auto& [text, expected] :
       {std::pair(R"({"stages":{}})", "\"stages\" must be a list, found {}"),
        std::pair(R"({"linears":[{"tokens":"many"}]})", "\"tokens\" must be a number, found \"many\""),
        std::pair(R"({"stages":[1]})", "\"stages\" must be a list of objects, found 1"),
        std::pair(R"({"resumed_analysis":1})", "\"resumed_analysis\" must be true or false, found 1"),
        std::pair("[]", "f:")}) {
    const auto run = ParseQuantizeRecord(text, "f");
    EXPECT_THAT(Message(run.status()), HasSubstr(expected)) << text;
  }
  EXPECT_TRUE(ParseQuantizeRecord("{}", "f").ok());
}

TEST(SvgPlotTest, StaysWithinItsBox) {
  const auto text = [](double value) { return fmt::format("{:g}", value); };
  EXPECT_EQ(PointPlot({}, "layer", text, false, true), "");
  EXPECT_EQ(PointPlot({{"none", {}}}, "layer", text, false, true), "");
  for (const bool logarithmic : {false, true}) {
    for (const auto& points :
         {std::vector<std::pair<double, double>>{{0, 0}}, std::vector<std::pair<double, double>>{{3, 5}},
          std::vector<std::pair<double, double>>{{0, 1}, {60, 0}, {61, 1e6}}}) {
      const std::string svg = PointPlot({{"one", points}}, "layer", text, logarithmic, true);
      EXPECT_THAT(svg, HasSubstr("<circle")) << logarithmic;
      EXPECT_THAT(svg, Not(HasSubstr("nan")));
      EXPECT_THAT(svg, Not(HasSubstr("inf")));
    }
  }
  EXPECT_THAT(BarPlot({{"a", 0}, {"b", 0}}, text), HasSubstr("<rect"));
}

}  // namespace
}  // namespace moesaic::app
