#include "app/hub_cache.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

namespace moesaic::app {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFolderPrefix = "models--";

std::string HubEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string ExpandHome(std::string path) {
  return path == "~" || path.starts_with("~/") ? HubEnvironment("HOME") + path.substr(1) : path;
}

struct HubId {
  std::string id, quant;  // "ORG/NAME" and "Q4_K_M" or ""
};

// Accepts parts that begin with a letter, digit or underscore, and at most one slash. The id is empty when
// `text` can only be a path.
HubId ParseHubId(const std::string& text) {
  const size_t colon = text.find(':');
  HubId hub{.id = text.substr(0, colon), .quant = colon == std::string::npos ? "" : text.substr(colon + 1)};
  bool at_start = true;
  int slashes = 0;
  for (const char c : hub.id) {
    const bool is_word = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
    if (c == '/') {
      if (at_start || ++slashes > 1) return {};
      at_start = true;
      continue;
    }
    if (!is_word && (at_start || (c != '-' && c != '.'))) return {};
    at_start = false;
  }
  if (at_start) return {};
  return hub;
}

std::string FolderName(const std::string& id) {
  std::string name(kFolderPrefix);
  for (const char c : id) name += c == '/' ? "--" : std::string(1, c);
  return name;
}

std::string Lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Files of a snapshot are links to ../../blobs. A link without its blob belongs to an incomplete download.
struct Snapshot {
  std::vector<std::string> names;    // paths inside the snapshot, sorted
  std::vector<std::string> missing;  // names of links without a blob, sorted
};

StatusOr<Snapshot> ListSnapshot(const fs::path& folder) {
  Snapshot snapshot;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(folder, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::error_code ignored;
    if (it->is_directory(ignored)) continue;
    std::string name = it->path().lexically_relative(folder).generic_string();
    if (!fs::exists(it->path(), ignored)) snapshot.missing.push_back(name);
    snapshot.names.push_back(std::move(name));
  }
  if (error) return NotFound("{}: {}", folder.string(), error.message());
  std::ranges::sort(snapshot.names);
  std::ranges::sort(snapshot.missing);
  return snapshot;
}

// Accepts whole files and the first parts of split files.
bool IsGguf(const std::string& name) {
  return name.ends_with(".gguf") &&
         (name.find("-of-") == std::string::npos || name.find("-00001-of-") != std::string::npos);
}

// True if `name` contains `quant` as a word, in either case. Underscores belong to a quantization's name, so
// "Q4_K" is not a word of "m-Q4_K_M.gguf". A name may precede it with one: "m_q4_0.gguf".
bool HasQuant(const std::string& name, const std::string& quant) {
  const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  const std::string text = Lower(name), word = Lower(quant);
  for (size_t at = 0; (at = text.find(word, at)) != std::string::npos; ++at) {
    const size_t end = at + word.size();
    const bool begins = at == 0 || !is_word(text[at - 1]);
    const bool ends = end == text.size() || (!is_word(text[end]) && text[end] != '_');
    if (begins && ends) return true;
  }
  return false;
}

StatusOr<std::string> ChooseFile(const fs::path& folder, const HubId& hub, const Snapshot& snapshot) {
  const bool has_config = std::ranges::find(snapshot.names, "config.json") != snapshot.names.end();
  if (hub.quant.empty() && has_config) return folder.string();
  std::vector<std::string> all, chosen;
  for (const std::string& name : snapshot.names) {
    if (!IsGguf(name)) continue;
    all.push_back(name);
    if (hub.quant.empty() || HasQuant(name, hub.quant)) chosen.push_back(name);
  }
  if (chosen.size() == 1) return (folder / chosen.front()).string();
  if (all.empty() && hub.quant.empty()) return folder.string();  // opening it names the file that is missing
  if (all.empty())
    return NotFound("{} has no GGUF file, so \":{}\" selects nothing", folder.string(), hub.quant);
  return NotFound("{}: {} of its GGUF files match; name one as {}:QUANT: {}", folder.string(), chosen.size(),
                  hub.id, fmt::join(all, ", "));
}

}  // namespace

std::string HubCacheFolder() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (std::string folder = HubEnvironment(name); !folder.empty()) return ExpandHome(std::move(folder));
  }
  if (const std::string home = HubEnvironment("HF_HOME"); !home.empty()) return ExpandHome(home) + "/hub";
  const std::string cache = HubEnvironment("XDG_CACHE_HOME");
  return (cache.empty() ? HubEnvironment("HOME") + "/.cache" : ExpandHome(cache)) + "/huggingface/hub";
}

StatusOr<std::string> FindModel(const std::string& model) {
  std::error_code error;
  if (fs::exists(model, error)) return model;
  const HubId hub = ParseHubId(model);
  if (hub.id.empty()) return NotFound("path does not exist: {}", model);
  const fs::path cache = HubCacheFolder();
  const std::string download = fmt::format("hf download {}", hub.id);
  const fs::path repository = cache / FolderName(hub.id);
  if (!fs::exists(repository, error)) {
    if (hub.id.find('/') == std::string::npos) return NotFound("path does not exist: {}", model);
    return NotFound(
        "path does not exist: {}; the Hugging Face cache {} has no such model either; to download it: {}",
        model, cache.string(), download);
  }
  std::string commit;
  if (!(std::ifstream(repository / "refs" / "main") >> commit)) {
    return NotFound("{}: {} has no refs/main; to download the model: {}", model, repository.string(),
                    download);
  }
  const fs::path folder = repository / "snapshots" / commit;
  auto snapshot = ListSnapshot(folder);
  if (!snapshot.ok()) {
    return NotFound("{}: {}; to download the model: {}", model, Message(snapshot.status()), download);
  }
  if (!snapshot->missing.empty()) {
    return NotFound("{}: the download into {} is incomplete, {} is missing; to finish it: {}", model,
                    folder.string(), fmt::join(snapshot->missing, ", "), download);
  }
  return ChooseFile(folder, hub, *snapshot);
}

std::string HubIdOf(std::string_view path) {
  const size_t snapshots = path.find("/snapshots/");
  if (snapshots == std::string_view::npos) return "";
  const std::string_view repository = path.substr(0, snapshots);
  std::string_view name = repository.substr(repository.rfind('/') + 1);  // npos + 1 is 0
  if (!name.starts_with(kFolderPrefix)) return "";
  name.remove_prefix(kFolderPrefix.size());
  const size_t dashes = name.find("--");
  if (dashes == std::string_view::npos) return std::string(name);
  return fmt::format("{}/{}", name.substr(0, dashes), name.substr(dashes + 2));
}

}  // namespace moesaic::app
