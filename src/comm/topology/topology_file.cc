// The JSON form of a topology. docs/communication.md describes it for users.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/topology/topology.h"
#include "comm/topology/topology_builder.h"

namespace moesaic::comm {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxDevices = 65536;
constexpr int kMaxDepth = 16;
constexpr size_t kMaxFileBytes = size_t{16} << 20;
constexpr int kMaxGroups = 2 * kMaxDevices;  // enough for any tree whose groups have two children or more
constexpr size_t kMaxLevelBytes = 64;        // names of all groups are built from those of levels
// Limits within which no computation with a value overflows.
constexpr double kMinNumber = 1e-6, kMaxNumber = 1e24;
constexpr double kGiga = 1e9, kMicro = 1e6;

// A value for messages. Texts are in quotes, with escapes for all bytes but printable ASCII.
std::string Quoted(const Json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

// Control characters (C0, DEL, C1) would act on terminals, and XML does not allow them. `text` is UTF-8.
bool HasControlCharacters(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7f) return true;
    const bool has_next = i + 1 < text.size();
    if (byte == 0xc2 && has_next && static_cast<unsigned char>(text[i + 1]) < 0xa0) return true;
  }
  return false;
}

/// Reads the values of one file. The first error ends the reading; later reads return defaults.
class FileReader {
 public:
  explicit FileReader(const std::string& source) : source_(source) {}

  const Status& status() const { return status_; }

  template <typename... Args>
  void Fail(const std::string& path, fmt::format_string<Args...> format, Args&&... args) {
    if (!status_.ok()) return;
    status_ = InvalidArgument("{}: {}: {}", source_, path, fmt::format(format, std::forward<Args>(args)...));
  }

  // Whether `value` is an object whose keys are all in `known`.
  bool IsObject(const Json& value, const std::string& path, std::initializer_list<std::string_view> known) {
    if (!value.is_object()) {
      Fail(path, "must be an object, found {}", value.type_name());
      return false;
    }
    for (const auto& [key, unused] : value.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      Fail(path, "has no member {}; members are {}", Quoted(key), fmt::join(known, ", "));
      return false;
    }
    return true;
  }

  std::string Text(const Json& object, const char* key, const std::string& path) {
    const auto it = object.find(key);
    if (it == object.end()) {
      Fail(path, "needs the member \"{}\"", key);
    } else if (!it->is_string() || it->get_ref<const std::string&>().empty()) {
      Fail(path + "." + key, "must be a text that is not empty, found {}", Quoted(*it));
    } else if (HasControlCharacters(it->get_ref<const std::string&>())) {
      Fail(path + "." + key, "must have no control characters, found {}", Quoted(*it));
    } else {
      return it->get<std::string>();
    }
    return {};
  }

  // A positive number, or one that may be 0; `fallback` where the member is missing, unless that is NaN.
  double Number(const Json& object, const char* key, const std::string& path, double fallback,
                bool may_be_zero = false) {
    const auto it = object.find(key);
    if (it == object.end()) {
      if (std::isnan(fallback)) Fail(path, "needs the member \"{}\"", key);
      return fallback;
    }
    const double value = it->is_number() ? it->get<double>() : -1;
    if (value == 0 && may_be_zero) return 0;
    if (!(value > 0) || !std::isfinite(value)) {
      Fail(path + "." + key, "must be a {} number, found {}", may_be_zero ? "non-negative" : "positive",
           Quoted(*it));
      return 1;
    }
    if (value < kMinNumber || value > kMaxNumber) {
      Fail(path + "." + key, "must be in [{}, {}], found {}", kMinNumber, kMaxNumber, Quoted(*it));
      return 1;
    }
    return value;
  }

 private:
  const std::string& source_;
  Status status_ = OkStatus();
};

constexpr double kRequired = NAN;

std::vector<DeviceType> ReadDevices(const Json& devices, FileReader& reader) {
  std::vector<DeviceType> types;
  if (!devices.is_object() || devices.empty()) {
    reader.Fail("devices", "must be an object with at least one device type, found {}", devices.type_name());
    return types;
  }
  for (const auto& [name, value] : devices.items()) {
    if (name.empty() || HasControlCharacters(name)) {
      reader.Fail("devices", "names must not be empty and must have no control characters, found {}",
                  Quoted(name));
      return types;
    }
    const std::string path = "devices." + name;
    if (!reader.IsObject(value, path, {"flops", "memory_gb_per_s", "memory_gb"})) return types;
    DeviceType type = {.name = name, .flops = {}};
    if (const auto flops = value.find("flops"); flops != value.end()) {
      if (!reader.IsObject(*flops, path + ".flops", {"f64", "f32", "f16", "bf16", "fp8", "int8", "fp4"}))
        return types;
      for (const auto& [dtype, unused] : flops->items()) {
        type.flops[dtype] = reader.Number(*flops, dtype.c_str(), path + ".flops", 0);
      }
    }
    type.memory_bytes_per_s = reader.Number(value, "memory_gb_per_s", path, 0) * kGiga;
    type.memory_bytes = reader.Number(value, "memory_gb", path, 0) * kGiga;
    types.push_back(std::move(type));
  }
  return types;
}

Link ReadLink(const Json& value, const std::string& path, FileReader& reader) {
  Link link;
  if (!reader.IsObject(value, path, {"latency_us", "gb_per_s", "duplex", "shared"})) return link;
  link.latency_s = reader.Number(value, "latency_us", path, kRequired, /*may_be_zero=*/true) / kMicro;
  link.bytes_per_s = reader.Number(value, "gb_per_s", path, kRequired) * kGiga;
  if (const auto duplex = value.find("duplex"); duplex != value.end()) {
    if (*duplex != "full" && *duplex != "half") {
      reader.Fail(path + ".duplex", "must be \"full\" or \"half\", found {}", Quoted(*duplex));
    }
    link.full_duplex = *duplex == "full";
  }
  if (const auto shared = value.find("shared"); shared != value.end()) {
    if (!shared->is_boolean()) {
      reader.Fail(path + ".shared", "must be true or false, found {}", Quoted(*shared));
    } else {
      link.shared = shared->get<bool>();
    }
  }
  return link;
}

/// Adds the nodes of the tree to a builder.
class TreeReader {
 public:
  TreeReader(const std::vector<DeviceType>& types, FileReader& reader, TopologyBuilder& builder)
      : types_(types), reader_(reader), builder_(builder) {}

  // Adds the node `value` once, below `parent`. `port` is the bandwidth of its port; 0: that of the parent's
  // link.
  void AddNode(const Json& value, const std::string& path, int parent, double port, int depth) {
    if (!reader_.status().ok()) return;
    if (depth > kMaxDepth) return reader_.Fail(path, "is deeper than {} levels", kMaxDepth);
    if (value.contains("device")) return AddDevice(value, path, parent, port);
    if (!reader_.IsObject(value, path, {"count", "level", "link", "uplink", "children"})) return;
    const std::string level = reader_.Text(value, "level", path);
    if (level.size() > kMaxLevelBytes) {
      return reader_.Fail(path + ".level", "must have at most {} bytes, found {}", kMaxLevelBytes,
                          level.size());
    }
    if (builder_.groups() >= kMaxGroups)
      return reader_.Fail(path, "a topology has at most {} groups", kMaxGroups);
    const auto link = value.find("link"), children = value.find("children");
    if (link == value.end()) return reader_.Fail(path, "needs the member \"link\"");
    if (children == value.end() || !children->is_array() || children->empty()) {
      return reader_.Fail(path + ".children", "must be a list of at least one group or device");
    }
    const int group = builder_.AddGroup(parent, level, ReadLink(*link, path + ".link", reader_), port);
    for (size_t i = 0; i < children->size() && reader_.status().ok(); ++i) {
      AddChild((*children)[i], fmt::format("{}.children[{}]", path, i), group, depth + 1);
    }
  }

 private:
  void AddChild(const Json& value, const std::string& path, int parent, int depth) {
    if (!value.is_object()) return reader_.Fail(path, "must be an object, found {}", value.type_name());
    int64_t count = 1;
    if (const auto it = value.find("count"); it != value.end()) {
      const bool in_range = it->is_number_integer() && *it >= 1 && *it <= kMaxDevices;
      if (!in_range) {
        return reader_.Fail(path + ".count", "must be an integer in [1, {}], found {}", kMaxDevices,
                            Quoted(*it));
      }
      count = it->get<int64_t>();
    }
    double port = 0;
    if (const auto uplink = value.find("uplink"); uplink != value.end()) {
      if (!reader_.IsObject(*uplink, path + ".uplink", {"gb_per_s"})) return;
      port = reader_.Number(*uplink, "gb_per_s", path + ".uplink", kRequired) * kGiga;
    }
    for (int64_t i = 0; i < count && reader_.status().ok(); ++i) AddNode(value, path, parent, port, depth);
  }

  void AddDevice(const Json& value, const std::string& path, int parent, double port) {
    if (!reader_.IsObject(value, path, {"count", "device", "uplink"})) return;
    const std::string name = reader_.Text(value, "device", path);
    if (!reader_.status().ok()) return;
    if (parent < 0) return reader_.Fail(path, "must be a group; one device is a group of one");
    for (size_t type = 0; type < types_.size(); ++type) {
      if (types_[type].name != name) continue;
      if (builder_.devices() == kMaxDevices) {
        return reader_.Fail(path, "a topology has at most {} devices", kMaxDevices);
      }
      builder_.AddDevice(parent, static_cast<int>(type), port);
      return;
    }
    reader_.Fail(path + ".device", "must be a device type of \"devices\", found {}", Quoted(name));
  }

  const std::vector<DeviceType>& types_;
  FileReader& reader_;
  TopologyBuilder& builder_;
};

// Returns the shortest number that `to_model` turns into `value`: the one that a file had.
template <typename ToModel>
double FileNumber(double value, double approximate, ToModel to_model) {
  for (int digits = 6; digits <= 17; ++digits) {
    const double number = std::strtod(fmt::format("{:.{}g}", approximate, digits).c_str(), nullptr);
    if (to_model(number) == value) return number;
  }
  return approximate;
}

double InGiga(double value) {
  return FileNumber(value, value / kGiga, [](double number) { return number * kGiga; });
}

double InMicro(double seconds) {
  return FileNumber(seconds, seconds * kMicro, [](double number) { return number / kMicro; });
}

Json LinkJson(const Link& link) {
  return {{"latency_us", InMicro(link.latency_s)},
          {"gb_per_s", InGiga(link.bytes_per_s)},
          {"duplex", link.full_duplex ? "full" : "half"},
          {"shared", link.shared}};
}

Json NodeJson(const Topology& topology, int index) {
  const Group& group = topology.groups()[index];
  Json node = Json::object();
  if (group.device_type >= 0) {
    node["device"] = topology.device_types()[group.device_type].name;
  } else {
    node["level"] = group.level;
    node["link"] = LinkJson(group.link);
    Json& children = node["children"] = Json::array();
    int count = 0;
    for (const int child : group.children) {
      Json next = NodeJson(topology, child);
      // Equal neighbours are one entry with a count.
      if (!children.empty()) {
        children.back().erase("count");
        if (children.back() == next) {
          children.back()["count"] = ++count;
          continue;
        }
        if (count > 1) children.back()["count"] = count;
      }
      children.push_back(std::move(next));
      count = 1;
    }
  }
  const bool own_port =
      group.parent >= 0 && group.port_bytes_per_s != topology.groups()[group.parent].link.bytes_per_s;
  if (own_port) node["uplink"] = {{"gb_per_s", InGiga(group.port_bytes_per_s)}};
  return node;
}

// Nesting of brackets, so that a hostile file does not exhaust the stack.
int NestingOf(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

StatusOr<Topology> Topology::Parse(std::string_view json, const std::string& source) {
  if (json.size() > kMaxFileBytes) {
    return InvalidArgument("{}: a topology file has at most {} bytes, found {}", source, kMaxFileBytes,
                           json.size());
  }
  // Two brackets per level, and some for links.
  if (const int nesting = NestingOf(json); nesting > 2 * kMaxDepth + 8) {
    return InvalidArgument("{}: is deeper than {} levels", source, kMaxDepth);
  }
  std::vector<std::set<std::string>> open;  // keys of the objects that are being read
  std::string twice;
  const auto check = [&](int, Json::parse_event_t event, const Json& value) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !open.back().insert(value.get<std::string>()).second) {
      twice = value.get<std::string>();
    }
    return true;
  };
  Json file;
  try {
    file = Json::parse(json, check);
  } catch (const Json::parse_error& error) {
    const auto end = json.begin() + static_cast<std::ptrdiff_t>(std::min(error.byte, json.size()));
    return InvalidArgument("{}: the file is not valid JSON; see line {}", source,
                           1 + std::count(json.begin(), end, '\n'));
  } catch (const Json::exception&) {  // of a number
    return InvalidArgument("{}: the file is not valid JSON; a number is out of range", source);
  }
  if (!twice.empty()) return InvalidArgument("{}: an object has the member {} twice", source, Quoted(twice));
  FileReader reader(source);
  if (!reader.IsObject(file, "the file", {"$schema", "name", "source", "devices", "tree"}))
    return reader.status();
  std::string name = reader.Text(file, "name", "the file"), origin = reader.Text(file, "source", "the file");
  const std::vector<DeviceType> types = ReadDevices(file.value("devices", Json()), reader);
  RETURN_IF_ERROR(reader.status());
  const auto tree = file.find("tree");
  if (tree == file.end()) return InvalidArgument("{}: needs the member \"tree\"", source);
  if (!tree->is_object())
    return InvalidArgument("{}: tree: must be an object, found {}", source, tree->type_name());
  for (const char* key : {"count", "uplink"}) {
    if (tree->contains(key)) reader.Fail("tree", "the root has no \"{}\"", key);
  }
  TopologyBuilder builder;
  TreeReader(types, reader, builder).AddNode(*tree, "tree", -1, 0, 1);
  RETURN_IF_ERROR(reader.status());
  return builder.Finish(std::move(name), std::move(origin), types);
}

Status Topology::CheckName(const std::string& name) {
  bool is_utf8 = true;
  try {
    (void)Json(name).dump();
  } catch (const Json::type_error&) {
    is_utf8 = false;
  }
  if (!name.empty() && is_utf8 && !HasControlCharacters(name)) return OkStatus();
  return InvalidArgument("a topology's name must be UTF-8 text without control characters, found {}",
                         Quoted(name));
}

std::string Topology::ToJson() const {
  Json file = {{"name", name_}, {"source", origin_}, {"devices", Json::object()}};
  for (const DeviceType& type : device_types_) {
    Json& device = file["devices"][type.name] = Json::object();
    if (!type.flops.empty()) device["flops"] = type.flops;
    if (type.memory_bytes_per_s > 0) device["memory_gb_per_s"] = InGiga(type.memory_bytes_per_s);
    if (type.memory_bytes > 0) device["memory_gb"] = InGiga(type.memory_bytes);
  }
  file["tree"] = NodeJson(*this, 0);
  return file.dump(2) + "\n";
}

}  // namespace moesaic::comm
