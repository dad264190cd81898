// Reads the fields of a request body that scheduling needs, and writes the bodies that engines get.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "proxy/protocol/json_members.h"
#include "proxy/state/stage.h"

namespace moesaic::proxy {

/// Protocols by which prefill and decode engines exchange KV blocks.
enum class Transfer {
  kAggregated,    ///< one engine does both
  kVllmNixl,      ///< sequential: P answers with kv_transfer_params, D pulls
  kVllmMooncake,  ///< parallel: both get one transfer_id, D asks P's bootstrap server
  kSglang,        ///< parallel: both get the body with a bootstrap room
  kAscend,        ///< D first: it posts its blocks to the proxy's metaserver, then P pushes layer by layer
};

/// Parses "aggregated", "nixl", "mooncake", "sglang" or "ascend".
StatusOr<Transfer> ParseTransfer(std::string_view name);
std::string_view TransferName(Transfer transfer);
/// Returns the order in which the engines of a pair get a request.
Mode ModeOf(Transfer transfer);

/// The API of an engine, which decides how token ids are forwarded.
enum class Dialect { kVllm, kSglang, kMoesaic };
StatusOr<Dialect> ParseDialect(std::string_view name);

enum class Endpoint { kChat, kCompletions, kOther };
/// Returns the endpoint of a normalized path, with or without a prefix before "/v1".
Endpoint EndpointOf(std::string_view path);

/// A checked body. It refers to the bytes of the body, which must outlive it.
struct RequestBody {
  Endpoint endpoint = Endpoint::kOther;
  JsonMembers members;
  std::string model;
  std::string cache_salt;
  bool stream = false;
  bool include_usage = false;  ///< stream_options.include_usage
  int64_t max_tokens = 0;      ///< limit of output tokens; 0: the body gives none
  int64_t priority = 0;
  int64_t choices = 1;  ///< "n"
  /// The client sent kv_transfer_params or other fields of the transfer itself. They are removed from the
  /// bodies for engines while this is set.
  bool has_kv_transfer = false;

  std::string_view text() const { return members.text(); }
};

/// Checks and reads a body of `endpoint`. InvalidArgument names the field. Media parts are accepted; encode
/// stages of other engines are not (Unimplemented for "ec_transfer_params").
StatusOr<RequestBody> ReadRequestBody(Endpoint endpoint, std::string_view body);

/// Returns the token ids of the prompt if the body has them ("prompt": [1, 2, 3]); nullopt otherwise.
std::optional<std::vector<int32_t>> PromptIds(const RequestBody& body);

/// The pair of engines of one request with separate prefill and decode.
struct TransferPeers {
  Transfer transfer = Transfer::kAggregated;
  std::string prefill_host = "";  ///< of the bootstrap server, for kSglang
  int bootstrap_port = 8998;
  int64_t room = 0;                           ///< random, 63 bits, for kSglang
  std::optional<uint32_t> prefill_rank = {};  ///< data-parallel rank of a P that has several, for kSglang
  std::string transfer_id = "";               ///< for kVllmMooncake
  std::string bootstrap_address = "";         ///< "http://HOST:PORT" of P, for kVllmMooncake
  std::string engine_id = "";                 ///< of P, for kVllmMooncake
  std::string metaserver = "";                ///< "http://PROXY/v1/metaserver", for kAscend
};

/// Token ids that an engine gets with a prompt or instead of it. Requires CanForwardTokens. They equal the
/// ids that the engine would compute, so the answer is the same and the engine's tokenizer does not run.
struct ForwardedIds {
  Dialect dialect = Dialect::kVllm;
  std::string_view list;  ///< IdList of them; empty: none are forwarded
};

/// Returns `ids` as the text of a JSON list.
std::string IdList(std::span<const int32_t> ids);

/// Returns the body for an engine that computes both prefill and decode.
std::string AggregatedBody(const RequestBody& body, const ForwardedIds& ids = {});

/// Returns the body for P. `params` are D's blocks, which D posted to the metaserver (kAscend only).
std::string PrefillBody(const RequestBody& body, const TransferPeers& peers, std::string_view params = {},
                        const ForwardedIds& ids = {});

/// Returns the body for D. `params` is the text of kv_transfer_params in P's response (kVllmNixl only);
/// empty: P sent none, and D computes the prompt.
std::string DecodeBody(const RequestBody& body, const TransferPeers& peers, std::string_view params = {},
                       const ForwardedIds& ids = {});

/// Returns the body with which a decode engine fetches the blocks that P holds for the request and computes
/// one token, so that P frees them. `params` is that of DecodeBody.
std::string ReleaseBody(const RequestBody& body, std::string_view params);

/// Returns whether a body for an engine of `dialect` can have token ids for its prompt. `decode`: the body is
/// for the D of a pair, where vLLM takes the ids of a chat as kv_transfer_params.prompt_token_ids.
bool CanForwardTokens(const RequestBody& body, Dialect dialect, bool decode);

}  // namespace moesaic::proxy
