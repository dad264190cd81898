#include "quantizer/io/state_store.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/checksum.h"
#include "quantizer/io/hidden_state.h"
#include "runtime/atomic_file.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;

std::string ChecksumOf(const ordered_json& key, const ordered_json& state, const ordered_json& files) {
  base::Xxh3 sum;
  for (const ordered_json* json : {&key, &state, &files}) sum.AddText(json->dump());
  return sum.Hex();
}

}  // namespace

std::optional<StateStore::Saved> StateStore::LoadFrom(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ordered_json json = ordered_json::parse(text, nullptr, false);
  if (!json.is_object()) return std::nullopt;
  for (const char* member : {"key", "state", "files"}) {
    if (!json.contains(member) || !json[member].is_object()) return std::nullopt;
  }
  const ordered_json &key = json["key"], &state = json["state"], &files = json["files"];
  if (!json.contains("xxh3") || json["xxh3"] != ChecksumOf(key, state, files)) return std::nullopt;
  Saved saved{.key = key, .state = state, .files = {}};
  for (const auto& [name, xxh3] : files.items()) {
    if (!xxh3.is_string()) return std::nullopt;
    saved.files[name] = xxh3.get<std::string>();
  }
  return saved;
}

Status StateStore::Save(const ordered_json& state, const std::vector<Hidden>& hidden,
                        const std::vector<std::string>& written, Files* files) {
  if (!saves()) return OkStatus();
  const Clock::time_point start = Clock::now();
  Files next;
  for (const Hidden& of : hidden) {
    const auto found = files->find(of.name);
    if (of.reuse && found != files->end()) {
      next.insert(*found);
      continue;
    }
    ASSIGN_OR_RETURN(next[of.name], SaveHidden(PathOf(of.name), of.values));
  }
  for (const std::string& name : written) next[name] = ChecksumOfFile(PathOf(name));
  const ordered_json names(next);
  const ordered_json whole = {
      {"key", key_}, {"files", names}, {"xxh3", ChecksumOf(key_, state, names)}, {"state", state}};
  RETURN_IF_ERROR(runtime::WriteFileAtomically(PathOf(name_), whole.dump()));
  *files = std::move(next);
  saved_ = Clock::now();
  took_ = Since(start);
  return RemoveOthers(*files);
}

Status StateStore::RemoveOthers(const Files& files) const {
  if (!saves()) return OkStatus();
  const bool analysis = IsAnalysisState(name_);
  return RemoveStates(folder_, analysis ? States::kAnalysis : States::kCalibration,
                      [&](const std::string& name) { return name == name_ || files.contains(name); });
}

bool StateStore::IsWhole(const Files& files, const std::string& name) const {
  const auto found = files.find(name);
  return found != files.end() && std::filesystem::exists(PathOf(name)) &&
         ChecksumOfFile(PathOf(name)) == found->second;
}

bool StateStore::Read(const Files& files, const std::string& name, std::span<float> values) const {
  const auto found = files.find(name);
  return found != files.end() && LoadHidden(PathOf(name), found->second, values);
}

}  // namespace moesaic::quantizer
