// Finds models in the cache that `hf download` and the Hugging Face libraries use.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::app {

/// Returns the cache folder: HF_HUB_CACHE, else HUGGINGFACE_HUB_CACHE, else HF_HOME/hub, else
/// XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub.
std::string HubCacheFolder();

/// Returns `model` itself if that path exists. Else `model` is an id, ORG/NAME or ORG/NAME:QUANT. The result
/// is its snapshot of the branch main (models--ORG--NAME/refs/main), or a GGUF file of it: the only one, or
/// the one whose name contains QUANT in either case. Returns NotFound if neither exists or the snapshot is
/// incomplete; the message says how to download the model.
StatusOr<std::string> FindModel(const std::string& model);

/// Returns "ORG/NAME" for a path within a snapshot folder of the cache, else "".
std::string HubIdOf(std::string_view path);

}  // namespace moesaic::app
