// Finds models in the cache that `hf download` and Hugging Face's libraries fill.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::app {

/// The cache folder: HF_HUB_CACHE, else HUGGINGFACE_HUB_CACHE, else HF_HOME/hub, else
/// XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub.
std::string HubCacheFolder();

/// Returns `model` itself where that path exists. Else `model` is an id, ORG/NAME or ORG/NAME:QUANT, and the
/// result is its snapshot of the branch main (models--ORG--NAME/refs/main), or a GGUF file of it: the only
/// one, or the one whose path inside the snapshot contains QUANT as a word, in either case. NotFound: neither
/// exists, or the snapshot lacks files; the message says how to download the model.
StatusOr<std::string> FindModel(const std::string& model);

/// Returns "ORG/NAME" for a path inside a snapshot folder of the cache; "" for other paths.
std::string HubIdOf(std::string_view path);

}  // namespace moesaic::app
