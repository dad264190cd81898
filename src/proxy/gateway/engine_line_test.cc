#include "proxy/gateway/engine_line.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <string>

#include "proxy/gateway/engine_checks.h"
#include "proxy/gateway/network.h"

namespace moesaic::proxy {
namespace {

std::string Address(const char* text, uint16_t port = 0) {
  sockaddr_in four{};
  sockaddr_in6 six{};
  if (inet_pton(AF_INET, text, &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(port);
    return {reinterpret_cast<const char*>(&four), sizeof four};
  }
  inet_pton(AF_INET6, text, &six.sin6_addr);
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(port);
  return {reinterpret_cast<const char*>(&six), sizeof six};
}

TEST(EngineLine, ANameHasAUrlForEachOfItsAddresses) {
  const std::string_view words[] = {"http://vllm.local:8000/a", "resolve", "dp_ranks=2",
                                    "kv_events=tcp://vllm.local:5557", "kv_replay=tcp://other:5558"};
  const auto ranks = ParseEngine(words);
  ASSERT_TRUE(ranks.ok()) << ranks.status();
  ASSERT_EQ(ranks->size(), 2U);
  EXPECT_TRUE((*ranks)[1].resolve);
  const EngineSettings four = AtAddress((*ranks)[1], Address("10.1.2.3"));
  EXPECT_EQ(four.instance.url, "http://10.1.2.3:8000/a");
  EXPECT_EQ(four.instance.dp_rank, 1U);
  EXPECT_EQ(four.address.host, "10.1.2.3:8000");
  EXPECT_EQ(four.address.sockaddr, Address("10.1.2.3", 8000));
  EXPECT_EQ(four.kv_events, "tcp://10.1.2.3:5558");  // the port of the second rank
  EXPECT_EQ(four.kv_replay, "tcp://other:5559");
  const EngineSettings six = AtAddress((*ranks)[0], Address("fd00::1"));
  EXPECT_EQ(six.instance.url, "http://[fd00::1]:8000/a");
  EXPECT_EQ(six.kv_events, "tcp://[fd00::1]:5557");
  EXPECT_NE(four.instance.pod, six.instance.pod);
}

TEST(EngineLine, ReadsTheOptionsOfTheStepAndOfDraining) {
  const std::string_view words[] = {"http://10.0.0.1", "batch_tokens=2048", "drain"};
  const auto engine = ParseEngine(words);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_EQ(engine->front().instance.batch_tokens, 2048U);
  EXPECT_TRUE(engine->front().instance.drain);
  for (const char* wrong : {"batch_tokens=0", "batch_tokens=x", "drain=off"}) {
    const std::string_view bad[] = {"http://10.0.0.1", wrong};
    EXPECT_FALSE(ParseEngine(bad).ok()) << wrong;
  }
}

TEST(EngineLine, ReadsTheRelativeSpeedAndTheClass) {
  const std::string_view words[] = {"http://10.0.0.1", "weight=2.5", "class=3"};
  const auto engine = ParseEngine(words);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_EQ(engine->front().instance.weight, 2.5);
  EXPECT_EQ(engine->front().instance.model_class, 3U);
  for (const char* wrong :
       {"weight=0", "weight=-1", "weight=1e6", "weight=fast", "class=-1", "class=1000000"}) {
    const std::string_view bad[] = {"http://10.0.0.1", wrong};
    EXPECT_FALSE(ParseEngine(bad).ok()) << wrong;
  }
}

TEST(EngineChecks, ReadsTheSizeOfThePoolFromMetrics) {
  constexpr std::string_view kMetrics =
      "# TYPE vllm:cache_config_info gauge\n"
      "vllm:cache_config_info{block_size=\"16\",engine=\"0\",x_num_gpu_blocks=\"7\",num_gpu_blocks=\"1000\"} "
      "1.0\n"
      "vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"2000\"} 1.0\n"
      "vllm:other 3\n";
  EXPECT_EQ(ReportedBlocks(kMetrics, 0), 1000U);
  EXPECT_EQ(ReportedBlocks(kMetrics, 1), 2000U);
  EXPECT_EQ(ReportedBlocks("vllm:cache_config_info{num_gpu_blocks=\"None\"} 1.0\n", 0), 0U);
  EXPECT_EQ(ReportedBlocks("sglang:cache_config_info{num_pages=\"300\",page_size=\"16\"} 1.0\n", 0), 300U);
  EXPECT_EQ(ReportedBlocks("", 0), 0U);
}

TEST(EngineLine, RanksHaveValidPorts) {
  for (const char* option : {"kv_events=tcp://h:65535", "kv_replay=tcp://h:65529"}) {
    const std::string_view words[] = {"http://10.0.0.1", option, "dp_ranks=8"};
    const auto ranks = ParseEngine(words);
    ASSERT_FALSE(ranks.ok()) << option;
    EXPECT_NE(Message(ranks.status()).find("65535 is the last one"), std::string::npos) << ranks.status();
  }
  const std::string_view last[] = {"http://10.0.0.1", "kv_events=tcp://h:65528", "dp_ranks=8"};
  const auto ranks = ParseEngine(last);
  ASSERT_TRUE(ranks.ok()) << ranks.status();
  EXPECT_EQ(ranks->back().kv_events, "tcp://h:65535");
}

TEST(EngineLine, TheNumberOfRanksHasABound) {
  const std::string_view words[] = {"http://10.0.0.1", "dp_ranks=9"};
  EXPECT_FALSE(ParseEngine(words, /*max_ranks=*/8).ok());
  const auto ranks = ParseEngine(words, /*max_ranks=*/9);
  ASSERT_TRUE(ranks.ok()) << ranks.status();
  ASSERT_EQ(ranks->size(), 9U);
  EXPECT_EQ(ranks->back().instance.dp_ranks, 9U);
  EXPECT_TRUE(ranks->front().instance.ranked());
  EXPECT_FALSE(ParseEngine(std::span(words, 1))->front().instance.ranked());
}

TEST(EngineLine, NumericAddressesNeedNoNameServer) {
  EngineSettings engine;
  ASSERT_TRUE(ParseUrl("http://[::1]:80", &engine).ok());
  EXPECT_TRUE(Resolve(&engine, /*numeric=*/true).ok());
  EXPECT_EQ(engine.address.sockaddr, Address("::1", 80));
  ASSERT_TRUE(ParseUrl("http://name", &engine).ok());
  EXPECT_FALSE(Resolve(&engine, /*numeric=*/true).ok());
}

TEST(Settings, DurationsHaveUnitsAndALimit) {
  EXPECT_EQ(ParseDuration("250ms").value_or(0), 250 * kMillisecond);
  EXPECT_EQ(ParseDuration("2").value_or(0), 2 * kSecond);
  EXPECT_EQ(ParseDuration("5m").value_or(0), 300 * kSecond);
  EXPECT_EQ(ParseDuration("277777h").value_or(0), 277777 * 3600 * kSecond);
  for (const char* wrong :
       {"", "s", "-1s", "1.5s", "1d", "277778h", "555555551m", "1000000001", "99999999999999999999s"})
    EXPECT_FALSE(ParseDuration(wrong).ok()) << wrong;
}

TEST(Network, ContainsAddresses) {
  std::vector<Network> networks;
  for (const char* text : {"10.0.0.0/9", "192.168.1.7", "fd00::/16"}) {
    const auto network = ParseNetwork(text);
    ASSERT_TRUE(network.ok()) << network.status();
    networks.push_back(*network);
  }
  for (const char* in : {"10.127.0.1", "192.168.1.7", "fd00:1::1"})
    EXPECT_TRUE(Contains(networks, Address(in))) << in;
  for (const char* out : {"10.128.0.1", "192.168.1.8", "fd01::1", "::ffff:11.0.0.1"})
    EXPECT_FALSE(Contains(networks, Address(out))) << out;
  EXPECT_TRUE(Contains(networks, Address("::ffff:10.0.0.1")));
  networks.push_back(*ParseNetwork("all"));
  EXPECT_TRUE(Contains(networks, Address("fd01::1")));
  for (const char* wrong : {"", "10.0.0.0/33", "10.0.0.0/", "::1/129", "name", "10.0.0.0/-1"})
    EXPECT_FALSE(ParseNetwork(wrong).ok()) << wrong;
}

}  // namespace
}  // namespace moesaic::proxy
