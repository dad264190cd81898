// `moesaic mock-engine` serves a model of an inference engine, to test and measure routers without one.
#include <csignal>
#include <memory>
#include <string>
#include <thread>

#include "app/output.h"
#include "app/verb.h"
#include "proxy/mock_server/mock_server.h"
#include "proxy/protocol/url_host.h"

namespace moesaic::app {
namespace {

struct MockFlags {
  proxy::MockServerOptions server;
  std::string transfer = "aggregated", role = "both", encoding = "array";
  int block_size = 16, blocks = 4096, batch_tokens = 8192, sequences = 256;
  double prefill_us = 15.183, prefill_base_ms = 16.5, pair_ns = 0.421, step_ms = 5.74, sequence_us = 50,
         kv_token_ns = 12;
  double transfer_ms = 2, transfer_us = 1, jitter = 0;
  uint64_t seed = 1;
};

Status RunMock(MockFlags flags) {
  proxy::MockEngineOptions& engine = flags.server.engine;
  ASSIGN_OR_RETURN(flags.server.transfer, proxy::ParseTransfer(flags.transfer));
  engine.role = flags.role == "prefill"  ? proxy::Role::kPrefill
                : flags.role == "decode" ? proxy::Role::kDecode
                                         : proxy::Role::kBoth;
  engine.block_size = static_cast<uint32_t>(flags.block_size);
  engine.num_blocks = static_cast<uint32_t>(flags.blocks);
  engine.max_batch_tokens = static_cast<uint32_t>(flags.batch_tokens);
  engine.max_sequences = static_cast<uint32_t>(flags.sequences);
  engine.time = {.base = flags.prefill_base_ms * 1e6,
                 .per_token = flags.prefill_us * 1e3,
                 .per_pair = flags.pair_ns,
                 .step_base = flags.step_ms * 1e6,
                 .per_sequence = flags.sequence_us * 1e3,
                 .per_kv_token = flags.kv_token_ns};
  engine.transfer_latency = static_cast<proxy::Nanos>(flags.transfer_ms * 1e6);
  engine.transfer_nanos_per_token = flags.transfer_us * 1e3;
  engine.jitter = flags.jitter;
  engine.seed = flags.seed;
  flags.server.kv_encoding = flags.encoding == "map" ? proxy::KvEncoding::kMap : proxy::KvEncoding::kArray;
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM}) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  ASSIGN_OR_RETURN(const auto server, proxy::MockServer::Create(flags.server));
  Print("moesaic mock-engine: listening at http://{}:{}\n", proxy::UrlHost(flags.server.host),
        server->port());
  RETURN_IF_ERROR(FlushOutput());
  std::thread waits([&] {
    int signal = 0;
    sigwait(&signals, &signal);
    server->Stop();
  });
  server->Run();
  waits.join();
  return OkStatus();
}

}  // namespace

void AddMockEngine(Verb& root, VerbRun& run) {
  auto flags = std::make_shared<MockFlags>();
  Verb verb = root.AddVerb("mock-engine", "Serve a model of an engine, to test and measure routers");
  verb.AddOption("--host", flags->server.host, "IP address to listen at").ShowDefault();
  verb.AddOption("--port", flags->server.port,
                 "Port to listen at; 0: any, which the first line of output names")
      .Range(0, 65535)
      .ShowDefault();
  verb.AddOption("--served-model-name", flags->server.model, "Name of the model").ShowDefault();
  verb.AddOption("--transfer", flags->transfer, "Protocol of the transfer of KV between engines")
      .OneOf({"aggregated", "nixl", "mooncake", "sglang", "ascend"})
      .ShowDefault();
  verb.AddOption("--role", flags->role, "Part in the transfer")
      .OneOf({"both", "prefill", "decode"})
      .ShowDefault();
  verb.AddOption("--block-size", flags->block_size, "Tokens of a KV block").Range(1, 4096).ShowDefault();
  verb.AddOption("--blocks", flags->blocks, "KV blocks").Range(1, 1 << 24).ShowDefault();
  verb.AddOption("--max-batch-tokens", flags->batch_tokens, "Tokens of one step")
      .Range(1, 1 << 24)
      .ShowDefault();
  verb.AddOption("--max-sequences", flags->sequences, "Sequences of one step")
      .Range(1, 1 << 16)
      .ShowDefault();
  const std::string times = "Times";
  verb.AddOption("--prefill-base-ms", flags->prefill_base_ms, "Time of a step with prefill, in milliseconds")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--prefill-us", flags->prefill_us, "Time per prompt token, in microseconds")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--pair-ns", flags->pair_ns, "Time per pair of tokens that attend, in nanoseconds")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--step-ms", flags->step_ms, "Time of a decode step, in milliseconds")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--sequence-us", flags->sequence_us, "Time per sequence, in microseconds")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--kv-token-ns", flags->kv_token_ns, "Time per token in the cache, in nanoseconds")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--transfer-ms", flags->transfer_ms, "Latency of a transfer of KV, in milliseconds")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--transfer-us", flags->transfer_us, "Time per token of a transfer of KV, in microseconds")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--jitter", flags->jitter, "Relative standard deviation of step times")
      .ShowDefault()
      .Group(times);
  verb.AddOption("--seed", flags->seed, "Seed of jitter, faults and block hashes").ShowDefault();
  verb.AddOption("--kv-events", flags->server.kv_endpoint,
                 "ZeroMQ endpoint of KV events: tcp://*:PORT is bound, a concrete "
                 "host is connected to");
  verb.AddOption("--kv-replay", flags->server.kv_replay_endpoint, "ZeroMQ endpoint of their replay");
  verb.AddOption("--kv-encoding", flags->encoding, "Encoding of events")
      .OneOf({"array", "map"})
      .ShowDefault();
  verb.AddOption("--kv-topic", flags->server.kv_topic, "Topic of events");
  verb.Footer(
      "Requests inject faults with the headers x-mock-status, x-mock-delay-ms and x-mock-drop-after.\n\n"
      "Examples:\n"
      "  moesaic mock-engine --port 8000 --kv-events 'tcp://*:5557' --kv-replay 'tcp://*:5558'\n"
      "  moesaic mock-engine --port 8001 --transfer nixl --role prefill");
  verb.OnParsed([flags, &run] { run = [flags] { return RunMock(*flags); }; });
}

}  // namespace moesaic::app
