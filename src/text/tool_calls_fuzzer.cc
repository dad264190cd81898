// Fuzzes tool-call and reasoning parsers with any text, cut at any position. The first bytes select format
// and cuts.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "text/reasoning.h"
#include "text/tool_calls.h"

namespace text = moesaic::text;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const auto format = static_cast<text::ToolFormat>(data[0] % 10);
  const size_t step = 1 + data[1] % 32;
  const bool inside = data[1] >= 128;
  const std::string_view all(reinterpret_cast<const char*>(data) + 2, size - 2);
  text::ReasoningSplitter splitter(text::ReasoningFormat::kThink, inside);
  const auto parser = text::MakeToolCallParser(format, R"([{"function":{"name":"f","parameters":{}}}])");
  int begun = 0;
  const auto check = [&begun](const text::ToolDelta& delta) {
    for (const auto& call : delta.calls) {
      if (!call.name.empty() && call.index != begun++) std::abort();
      if (call.index < 0 || call.index >= begun) std::abort();
    }
  };
  for (size_t at = 0; at < all.size(); at += step) {
    std::string reasoning, content;
    text::ToolDelta delta;
    splitter.Push(all.substr(at, step), &reasoning, &content);
    parser->Push(content, &delta);
    check(delta);
  }
  std::string reasoning, content;
  text::ToolDelta delta;
  splitter.Finish(&reasoning, &content);
  parser->Push(content, &delta);
  parser->Finish(&delta);
  check(delta);
  return 0;
}
