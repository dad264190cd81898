#include "proxy/protocol/request_body.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace moesaic::proxy {
namespace {

constexpr const char* kChat =
    R"({"model":"m", "messages":[{"role":"user","content":"Hi"}],"temperature":0.70,"max_tokens":32,)"
    R"("stream":true,"stream_options":{"include_usage":true},"user":"u"})";
constexpr const char* kText = R"({"model":"m","prompt":"Once","min_tokens":5})";

RequestBody Read(Endpoint endpoint, std::string_view text) {
  StatusOr<RequestBody> body = ReadRequestBody(endpoint, text);
  EXPECT_TRUE(body.ok()) << body.status();
  return body.ok() ? *std::move(body) : RequestBody{};
}

TEST(RequestBody, ReadsFields) {
  const RequestBody body = Read(Endpoint::kChat, kChat);
  EXPECT_EQ(body.model, "m");
  EXPECT_TRUE(body.stream);
  EXPECT_TRUE(body.include_usage);
  EXPECT_EQ(body.max_tokens, 32);
  EXPECT_FALSE(body.has_kv_transfer);
}

TEST(RequestBody, NamesTheWrongField) {
  for (const auto& [text, word] : std::initializer_list<std::pair<const char*, const char*>>{
           {R"({"model":"m"})", "messages"},
           {R"({"messages":"x"})", "messages"},
           {R"({"messages":[],"model":3})", "model"},
           {R"({"messages":[],"stream":"yes"})", "stream"},
           {R"({"messages":[],"max_tokens":-1})", "max_tokens"},
           {R"([1])", "object"},
           {R"({"messages":[],"ec_transfer_params":{"a":1}})", "encode"}}) {
    const auto body = ReadRequestBody(Endpoint::kChat, text);
    ASSERT_FALSE(body.ok()) << text;
    EXPECT_NE(body.status().message().find(word), absl::string_view::npos) << body.status();
  }
}

TEST(RequestBody, ReadsPromptIds) {
  EXPECT_EQ(PromptIds(Read(Endpoint::kCompletions, R"({"prompt":[ 1, 22 ,3]})")),
            (std::vector<int32_t>{1, 22, 3}));
  for (const char* text :
       {R"({"prompt":"1"})", R"({"prompt":[]})", R"({"prompt":[1,"a"]})", R"({"prompt":[[1],[2]]})",
        R"({"prompt":[-1]})", R"({"prompt":[1.5]})", R"({"prompt":[99999999999]})"}) {
    EXPECT_EQ(PromptIds(Read(Endpoint::kCompletions, text)), std::nullopt) << text;
  }
}

TEST(RequestBody, ReadsIntegersInAnySpelling) {
  for (const char* number : {"4000", "4000.0", "4e3", "40000e-1"}) {
    EXPECT_EQ(
        Read(Endpoint::kCompletions, fmt::format(R"({{"prompt":"a","max_tokens":{}}})", number)).max_tokens,
        4000);
  }
  EXPECT_EQ(Read(Endpoint::kCompletions, R"({"prompt":"a","max_tokens":null})").max_tokens, 0);
  EXPECT_EQ(Read(Endpoint::kCompletions, R"({"prompt":"a","priority":-9223372036854775808})").priority,
            INT64_MIN);
  for (const char* number : {"0.5", "1e30", "9223372036854775808", "-1.0"}) {
    EXPECT_FALSE(
        ReadRequestBody(Endpoint::kCompletions, fmt::format(R"({{"prompt":"a","max_tokens":{}}})", number))
            .ok())
        << number;
  }
}

TEST(RequestBody, TransferFieldsOfClientsReachNoEngine) {
  const std::string text =
      R"({"prompt":"a","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"},"bootstrap_host":"evil",)"
      R"("data_parallel_rank":3,"input_ids":[1],"user":"u"})";
  RequestBody body = Read(Endpoint::kCompletions, text);
  EXPECT_TRUE(body.has_kv_transfer);
  const std::string clean = R"({"prompt":"a","user":"u"})";
  EXPECT_EQ(AggregatedBody(body), clean);
  EXPECT_EQ(DecodeBody(body, {.transfer = Transfer::kAggregated}), clean);
  EXPECT_EQ(DecodeBody(body, {.transfer = Transfer::kVllmNixl}), clean);
  for (const Transfer transfer :
       {Transfer::kVllmNixl, Transfer::kVllmMooncake, Transfer::kSglang, Transfer::kAscend}) {
    EXPECT_EQ(PrefillBody(body, {.transfer = transfer}, "{}").find("evil"), std::string::npos);
    EXPECT_EQ(DecodeBody(body, {.transfer = transfer}, "{}").find("evil"), std::string::npos);
  }
  body.has_kv_transfer = false;  // the pool trusts its clients
  EXPECT_EQ(AggregatedBody(body), text);
}

TEST(ReleaseBody, ComputesOneToken) {
  const RequestBody body =
      Read(Endpoint::kCompletions,
           R"({"prompt":"a","n":4,"logprobs":5,"min_tokens":9,"stream":true,"max_tokens":50})");
  EXPECT_EQ(
      ReleaseBody(body, R"({"x":1})"),
      R"({"prompt":"a","n":1,"min_tokens":1,"stream":false,"max_tokens":1,"kv_transfer_params":{"x":1}})");
}

TEST(PrefillBody, SetsTheParametersOfNixl) {
  EXPECT_EQ(
      PrefillBody(Read(Endpoint::kChat, kChat), {.transfer = Transfer::kVllmNixl}),
      R"({"model":"m", "messages":[{"role":"user","content":"Hi"}],"temperature":0.70,"max_tokens":1,)"
      R"("stream":false,"user":"u","kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,)"
      R"("remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}})");
  EXPECT_EQ(PrefillBody(Read(Endpoint::kCompletions, kText), {.transfer = Transfer::kVllmNixl}),
            R"({"model":"m","prompt":"Once","min_tokens":1,"kv_transfer_params":{"do_remote_decode":true,)"
            R"("do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,)"
            R"("remote_port":null},"max_tokens":1,"stream":false})");
}

TEST(PrefillBody, SetsTheLimitThatTheClientUsed) {
  const std::string body = PrefillBody(Read(Endpoint::kChat, R"({"messages":[],"max_completion_tokens":9})"),
                                       {.transfer = Transfer::kVllmNixl});
  EXPECT_NE(body.find(R"("max_completion_tokens":1)"), std::string::npos);
  EXPECT_EQ(body.find(R"("max_tokens")"), std::string::npos);
}

TEST(DecodeBody, NixlCopiesTheParametersOfP) {
  const std::string params =
      R"({"do_remote_prefill": true, "remote_block_ids":[[1,2]] , "remote_port":5600})";
  EXPECT_EQ(DecodeBody(Read(Endpoint::kCompletions, R"({"prompt":"a" , "top_p":0.10})"),
                       {.transfer = Transfer::kVllmNixl}, params),
            R"({"prompt":"a" , "top_p":0.10,"kv_transfer_params":)" + params + "}");
  // Without parameters D computes the prompt, and what the client put there is dropped.
  EXPECT_EQ(DecodeBody(Read(Endpoint::kCompletions, R"({"kv_transfer_params":{"x":1},"prompt":"a"})"),
                       {.transfer = Transfer::kVllmNixl}),
            R"({"prompt":"a"})");
}

TEST(DecodeBody, SglangSendsIntegersToBoth) {
  const TransferPeers peers{
      .transfer = Transfer::kSglang, .prefill_host = "10.0.0.1", .bootstrap_port = 8998, .room = 77};
  const RequestBody body = Read(Endpoint::kCompletions, R"({"prompt":"a","stream":true})");
  const char* wanted =
      R"({"prompt":"a","stream":true,"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":77})";
  EXPECT_EQ(PrefillBody(body, peers), wanted);
  EXPECT_EQ(DecodeBody(body, peers), wanted);
}

TEST(DecodeBody, SglangsDecodeEngineGetsTheRankOfP) {
  const TransferPeers peers{
      .transfer = Transfer::kSglang, .prefill_host = "10.0.0.1", .room = 77, .prefill_rank = 5};
  const RequestBody body =
      Read(Endpoint::kCompletions, R"({"prompt":"a","disagg_prefill_dp_rank":1,"routed_dp_rank":2})");
  const std::string prefill =
      R"({"prompt":"a","bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":77)";
  EXPECT_EQ(PrefillBody(body, peers), prefill + "}");
  const std::string text = DecodeBody(body, peers);
  const StatusOr<JsonMembers> decode = JsonMembers::Scan(text);
  ASSERT_TRUE(decode.ok()) << decode.status();
  EXPECT_EQ(decode->Integer("disagg_prefill_dp_rank"), 5);
  EXPECT_EQ(decode->Integer("bootstrap_room"), 77);
  EXPECT_FALSE(decode->Given("routed_dp_rank"));
}

TEST(DecodeBody, SetsTheParametersOfMooncake) {
  const TransferPeers peers{.transfer = Transfer::kVllmMooncake,
                            .transfer_id = "xfer-1",
                            .bootstrap_address = "http://10.0.0.1:8998",
                            .engine_id = "e"};
  const RequestBody body = Read(Endpoint::kCompletions, R"({"prompt":"a"})");
  EXPECT_EQ(PrefillBody(body, peers),
            R"({"prompt":"a","kv_transfer_params":{"do_remote_prefill":false,"do_remote_decode":true,)"
            R"("transfer_id":"xfer-1"},"max_tokens":1,"stream":false})");
  EXPECT_EQ(
      DecodeBody(body, peers),
      R"({"prompt":"a","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,)"
      R"("transfer_id":"xfer-1","remote_bootstrap_addr":"http://10.0.0.1:8998","remote_engine_id":"e"}})");
}

TEST(DecodeBody, AscendNamesTheMetaserver) {
  const TransferPeers peers{.transfer = Transfer::kAscend, .metaserver = "http://p/v1/metaserver"};
  EXPECT_EQ(DecodeBody(Read(Endpoint::kCompletions, R"({"prompt":"a"})"), peers),
            R"({"prompt":"a","kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,)"
            R"("metaserver":"http://p/v1/metaserver"}})");
}

TEST(ForwardTokens, UsesTheFieldOfEachEngine) {
  const std::vector<int32_t> ids = {5, 6};
  const std::string list = IdList(ids);
  EXPECT_EQ(
      AggregatedBody(Read(Endpoint::kCompletions, R"({"prompt":"a\"b","n":1})"), {Dialect::kVllm, list}),
      R"({"prompt":[5,6],"n":1})");
  EXPECT_EQ(AggregatedBody(Read(Endpoint::kChat, R"({"messages":[]})"), {Dialect::kSglang, list}),
            R"({"messages":[],"input_ids":[5,6]})");
  const RequestBody chat = Read(Endpoint::kChat, R"({"messages":[]})");
  const TransferPeers nixl{.transfer = Transfer::kVllmNixl};
  EXPECT_EQ(DecodeBody(chat, nixl, R"({"a":1})", {Dialect::kVllm, list}),
            R"({"messages":[],"kv_transfer_params":{"a":1,"prompt_token_ids":[5,6]}})");
  EXPECT_EQ(DecodeBody(chat, nixl, "", {Dialect::kVllm, list}),
            R"({"messages":[],"kv_transfer_params":{"prompt_token_ids":[5,6]}})");
}

TEST(IdList, IsAJsonArray) {
  EXPECT_EQ(IdList({}), "[]");
  EXPECT_EQ(IdList(std::vector<int32_t>{0, 2147483647, -2147483647}), "[0,2147483647,-2147483647]");
}

TEST(ForwardTokens, IsRefusedWhereAnswersWouldChange) {
  EXPECT_TRUE(CanForwardTokens(Read(Endpoint::kCompletions, R"({"prompt":"a"})"), Dialect::kMoesaic, false));
  EXPECT_FALSE(
      CanForwardTokens(Read(Endpoint::kCompletions, R"({"prompt":"a","echo":true})"), Dialect::kVllm, false));
  EXPECT_FALSE(
      CanForwardTokens(Read(Endpoint::kCompletions, R"({"prompt":["a","b"]})"), Dialect::kVllm, false));
  EXPECT_FALSE(
      CanForwardTokens(Read(Endpoint::kChat, R"({"messages":[]})"), Dialect::kVllm, /*decode=*/false));
  EXPECT_TRUE(CanForwardTokens(Read(Endpoint::kChat, R"({"messages":[]})"), Dialect::kVllm, /*decode=*/true));
  EXPECT_TRUE(CanForwardTokens(Read(Endpoint::kChat, R"({"messages":[]})"), Dialect::kSglang, false));
  EXPECT_FALSE(
      CanForwardTokens(Read(Endpoint::kChat, R"({"messages":[],"tools":[{}]})"), Dialect::kSglang, false));
  EXPECT_FALSE(CanForwardTokens(Read(Endpoint::kChat, R"({"messages":[]})"), Dialect::kMoesaic, false));
}

}  // namespace
}  // namespace moesaic::proxy
