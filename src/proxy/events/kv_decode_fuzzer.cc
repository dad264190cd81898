// Feeds bytes to the decoder of KV events, and accepted batches to an index. A batch that was accepted must
// be the same after encoding and decoding again.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "proxy/events/kv_decode.h"
#include "proxy/events/kv_encode.h"
#include "proxy/index/index_writer.h"
#include "proxy/state/test_zone.h"

namespace {

void CheckAgain(const moesaic::proxy::KvBatch& batch) {
  using namespace moesaic::proxy;  // NOLINT(google-build-using-namespace)
  const auto again = DecodeKvBatch(EncodeKvBatch(batch, KvEncoding::kMap));
  if (!again.ok() || again->events.size() != batch.events.size()) std::abort();
  for (size_t i = 0; i < batch.events.size(); ++i) {
    const KvEvent &event = batch.events[i], &read = again->events[i];
    if (event.type == KvEvent::Type::kStored &&
        (read.tokens != event.tokens || read.block_size != event.block_size))
      std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::proxy;
  const auto batch = DecodeKvBatch({reinterpret_cast<const char*>(data), size});
  if (!batch.ok()) return 0;
  CheckAgain(*batch);
  static TestZone zone;
  static State state(zone.zone());
  static const bool configured =
      state.Configure(std::vector<InstanceConfig>{{.url = "http://fuzzed"}}, 1).ok();
  if (!configured) std::abort();
  IndexWriter writer(state, BlockIndex(zone.zone()), 0);
  writer.Reset();
  writer.Apply(0, *batch);
  return 0;
}
