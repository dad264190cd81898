// Writes inputs for this room's fuzzers. server_fuzz_seeds CORPUS fills two folders:
// - CORPUS/request_fuzzer/ with one request of each API that uses most of its fields; the first byte chooses
//   the reader of the request.
// - CORPUS/http_fuzzer/ with requests as bytes; the first byte is the size of the pieces.
#include "base/test_seeds.h"

namespace {

constexpr const char* kRequests[] = {
    R"(0{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"hi"}]},)"
    R"({"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f",)"
    R"("arguments":"{\"city\":\"x\"}"}}]},{"role":"tool","tool_call_id":"c","content":"ok"}],"tools":[{"type":"function",)"
    R"("function":{"name":"f","description":"d","strict":true,"parameters":{"type":"object","properties":{"city":)"
    R"({"type":"string"},"n":{"type":"integer","enum":[1,2]}},"required":["city"]}}}],"tool_choice":"auto",)"
    R"("parallel_tool_calls":true,"temperature":0.5,"top_p":0.9,"max_tokens":5,"stop":["a"],"logprobs":true,)"
    R"("top_logprobs":2,"seed":1,"n":2,"logit_bias":{"1":-5},"stream":true,"stream_options":{"include_usage":true},)"
    R"("response_format":{"type":"json_schema","json_schema":{"name":"x","strict":true,"schema":{"type":"object",)"
    R"("properties":{"a":{"type":"number"}}}}}})",
    R"(0{"messages":[{"role":"user","content":"x"}],"structured_outputs":{"grammar":"start: \"a\" | \"b\"+"}})",
    R"(1{"model":"m","max_tokens":9,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":"q"},)"
    R"({"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"city":"x"}}]},{"role":"user",)"
    R"("content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"r"}]}]}],"tools":)"
    R"([{"name":"f","input_schema":{"type":"object","properties":{"city":{"type":"string"}}}}],"tool_choice":)"
    R"({"type":"tool","name":"f"},"stop_sequences":["x"]})",
    R"(2{"model":"m","instructions":"i","input":[{"role":"user","content":[{"type":"input_text","text":"q"}]},)"
    R"({"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c",)"
    R"("output":"o"}],"tools":[{"type":"function","name":"f","parameters":{"type":"object"}}],"text":{"format":)"
    R"({"type":"json_schema","name":"x","schema":{"type":"object"}}},"max_output_tokens":7,"reasoning":{"effort":"low"}})",
    R"(3{"model":"m","prompt":["a",[0,1,2]],"max_tokens":4,"best_of":2,"echo":true,"min_p":0.1,"typical_p":0.5,)"
    R"("repetition_penalty":1.1,"presence_penalty":0.5,"min_tokens":1,"ignore_eos":true,"return_token_ids":true,)"
    R"("cache_salt":"s","priority":3,"structured_outputs":{"regex":"a+"},"stop_token_ids":[1],"session":)"
    R"({"state":"continues","tokens":5,"returns_in":2},"prompt_cache_key":"k","kv_sparsity":{"mode":"all","budget":512,)"
    R"("reuse":4}})"};

constexpr const char* kWires[] = {
    "0GET /a?b HTTP/1.1\r\nHost: a:80\r\nAccept: */*\r\n\r\n",
    "1POST http://b/%41 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhelloGET /",
    ("2POST / HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n5;a=\"b\"\r\nhello\r\n0\r\nT: "
     "x\r\n\r\n"),
    "3OPTIONS * HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"};

}  // namespace

int main(int argc, char** argv) {
  const moesaic::base::SeedCorpus corpus(argc, argv);
  corpus.WriteAll("request_fuzzer", kRequests);
  corpus.WriteAll("http_fuzzer", kWires);
  return 0;
}
