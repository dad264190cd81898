// Writes inputs for the proxy's fuzzers: proxy_fuzz_seeds CORPUS fills CORPUS/<fuzzer>/. Each seed is small
// and valid, so that mutations pass the first checks.
#include <string>
#include <string_view>
#include <vector>

#include "base/test_seeds.h"
#include "proxy/events/kv_encode.h"

namespace {

// Bodies of clients, answers of engines and whole HTTP responses. The fuzzer takes its step from the first
// byte.
constexpr std::string_view kProtocol[] = {
    R"({"model":"m","messages":[{"role":"system","content":"a \"b\" \u00e9\ud83d\ude00\n"},{"role":"user","content":[{"type":"text","text":"c"},{"type":"image_url","image_url":{"url":"x"}}]}],"max_tokens":7,"stream":true,"temperature":0.5,"stream_options":{"include_usage":true}})",
    R"({"prompt":[1,2,300,4],"max_tokens":1,"n":2,"priority":-3,"cache_salt":"s","kv_transfer_params":{"do_remote_decode":true,"remote_block_ids":[[1,2]]}})",
    R"({"prompt":"once","best_of":2,"logprobs":1,"return_token_ids":true,"add_special_tokens":false,"a":[[],{},[null,true,false,-1.5e-3]]})",
    R"({"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","content":"2"}],"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto","input_ids":[5,6],"bootstrap_room":7})",
    R"({"id":"x","choices":[{"index":0,"text":"a","finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":8}},"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[1],"remote_host":"h","remote_port":1}})",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[],\"usage\":"
    "{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n",
    ": comment\r\nevent: error\r\ndata: {\"error\":{\"message\":\"x\",\"code\":500}}\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: "
    "chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\n"
    "Trailer: z\r\n\r\n",
    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Too Many\r\nRetry-After: 1\r\nContent-Length: "
    "2\r\nConnection: "
    "close\r\n\r\n{}",
    "HTTP/1.0 204 No Content\r\n\r\n",
};

constexpr std::string_view kEtcd[] = {
    R"({"header":{"cluster_id":"1","revision":"42"},"kvs":[{"key":"L2Uv","value":"aHR0cDovL2E=","lease":"1"}],"more":true,"count":"1"})",
    R"({"result":{"header":{"revision":"43"},"events":[{"kv":{"key":"YQ==","value":"Yg=="}},{"type":"DELETE","kv":{"key":"YQ=="}}]}})",
    R"({"result":{"header":{"revision":"9"},"canceled":true,"compact_revision":"8"}})",
    R"({"error":{"grpc_code":14,"message":"no leader"}})",
};

constexpr std::string_view kSettings[] = {
    "engine http://10.0.0.1:8000/v1 role=prefill kv_events=bind:tcp://*:5557 kv_replay=tcp://[::1]:5558 "
    "dp_ranks=4 group=a max_prefill_tokens=9000 bootstrap_port=8998\n"
    "engine http://name.local:80 resolve role=decode kv_blocks=100\napi vllm\ntransfer nixl\nqueue 100 30s\n"
    "block_size 32\nskip_prefill 256\nhealth /health 50ms 1s\nretries 2 50ms\nbreaker 3 1s 1m\n",
    "policy moesaic\nstarvation_bound 10s\nslo 1s 50ms\npass /v1/embeddings /a/\nkey secret alice\n"
    "zone 64m\nmax_live 128\nmax_engines 8\nqueue_timeout 5m\ntoken_cache 64m\nclient_priority 10\nadapters "
    "a b\n"
    "tenant_rate 1000 5000\nmetaserver http://10.0.0.1:80/v1/metaserver\nmetaserver_allow 127.0.0.0/8 ::1\n"
    "etcd /engines/ http://10.0.0.5:2379\nforward_tokens on\nshed on\nmax_body 64m\nbody_memory 1g\n",
};

std::vector<std::string> Batches() {
  using namespace moesaic::proxy;  // NOLINT(google-build-using-namespace)
  KvEvent stored;
  stored.type = KvEvent::Type::kStored;
  stored.block_hashes = {1, 2};
  stored.parent = 7;
  stored.block_size = 2;
  stored.tokens = {1, 2, 3, 4};
  stored.lora_name = "a";
  stored.medium = "GPU";
  KvEvent removed;
  removed.type = KvEvent::Type::kRemoved;
  removed.block_hashes = {2};
  KvEvent cleared;
  cleared.type = KvEvent::Type::kCleared;
  KvEvent unusable = stored;
  unusable.block_size = 0;
  const KvBatch batch{.time = 1.5, .events = {stored, removed, cleared, unusable}, .dp_rank = 0};
  return {EncodeKvBatch(batch, KvEncoding::kMap), EncodeKvBatch(batch, KvEncoding::kArray)};
}

}  // namespace

int main(int argc, char** argv) {
  const moesaic::base::SeedCorpus corpus(argc, argv);
  std::vector<std::string> protocol;
  for (const std::string_view text : kProtocol) protocol.push_back("\x02" + std::string(text));
  corpus.WriteAll("proxy_protocol_fuzzer", protocol);
  corpus.WriteAll("etcd_messages_fuzzer", kEtcd);
  corpus.WriteAll("proxy_settings_fuzzer", kSettings);
  corpus.WriteAll("kv_decode_fuzzer", Batches());
  return 0;
}
