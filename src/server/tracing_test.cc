#include "server/tracing.h"

#include <gtest/gtest.h>

#include "server/json_fields.h"

namespace moesaic::server {
namespace {

constexpr const char* kTrace = "0af7651916cd43dd8448eb211c80319c";
constexpr const char* kParent = "b7ad6b7169203331";

TEST(Traceparent, ContinuesTheCallersTrace) {
  for (const std::string& header :
       {fmt::format("00-{}-{}-01", kTrace, kParent), fmt::format("00-{}-{}-00", kTrace, kParent),
        fmt::format("01-{}-{}-01-more", kTrace, kParent)}) {
    const TraceContext context = ReadTraceparent(header);
    EXPECT_EQ(context.trace_id, kTrace) << header;
    EXPECT_EQ(context.parent_id, kParent);
    EXPECT_EQ(context.Traceparent(), fmt::format("00-{}-{}-01", kTrace, context.span_id));
  }
}

TEST(Traceparent, BeginsANewTraceWithoutAValidHeader) {
  for (const std::string& header :
       {std::string(), std::string("00"), std::string(55, '0'), fmt::format("ff-{}-{}-01", kTrace, kParent),
        fmt::format("00-{}-{}-01-more", kTrace, kParent), fmt::format("00-{}-0000000000000000-01", kTrace),
        fmt::format("00-00000000000000000000000000000000-{}-01", kParent),
        fmt::format("00-{}-{}-0x", kTrace, kParent),
        fmt::format("00-0AF7651916CD43DD8448EB211C80319C-{}-01", kParent)}) {
    const TraceContext context = ReadTraceparent(header);
    EXPECT_EQ(context.trace_id.size(), 32u);
    EXPECT_NE(context.trace_id, kTrace) << header;
    EXPECT_EQ(context.parent_id, "");
  }
}

TEST(Tracer, KeepsTheLatestSpans) {
  Tracer tracer(2);
  const auto start = Tracer::Clock::now();
  for (const char* name : {"a", "b", "c"}) {
    tracer.Add(
        {name, kTrace, kParent, RandomHex(16), 7, start, start + std::chrono::milliseconds(3), R"({"n":1})"});
  }
  const Json events = ParseJson(tracer.ChromeJson()).value()["traceEvents"];
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["name"], "b");
  EXPECT_EQ(events[1]["dur"], 3000.0);
  EXPECT_EQ(events[1]["args"]["n"], 1);
  EXPECT_EQ(events[1]["tid"], 7);
}

}  // namespace
}  // namespace moesaic::server
