#include "quantizer/format/model_items.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <set>

#include "models/model_info.h"
#include "models/weight_decl.h"
#include "models/weight_plan.h"

namespace moesaic::quantizer {
namespace {

using models::PartDecl;
using models::RegionDecl;

// Last parts of the names of modules that other engines fuse, and the names after fusing.
const std::map<std::string, std::string, std::less<>> kFused = {{"q_proj", "qkv"},
                                                                {"k_proj", "qkv"},
                                                                {"v_proj", "qkv"},
                                                                {"gate_proj", "gate_up"},
                                                                {"up_proj", "gate_up"},
                                                                {"q_a_proj", "qkv_a"},
                                                                {"kv_a_proj_with_mqa", "qkv_a"}};

bool IsRoundable(const RegionDecl& region) {
  return region.precision == models::Precision::kAny && region.name != models::kHead &&
         !region.name.ends_with(".eh_proj") && !region.optional;
}

class Lister {
 public:
  void Add(const RegionDecl& region) {
    if (region.is_vector()) {
      items_.push_back({.name = region.name, .shape = {region.values}, .layer = LayerOf(region.name)});
      return;
    }
    for (int record = 0; record < region.count; ++record) {
      for (const PartDecl& part : region.parts) {
        std::string module = part.Module(record);
        if (!modules_.insert(module).second) continue;  // kv_b_proj occurs in many parts
        ModelItem item{.name = module,
                       .linear = true,
                       .shape = {part.module_out, part.module_in},
                       .roundable = IsRoundable(region),
                       .routed = region.touch == models::Touch::kTopK,
                       .layer = LayerOf(region.name)};
        if (item.roundable) item.fused = FusedNumber(module);
        items_.push_back(std::move(item));
      }
    }
  }

  // Returns the items, with fused ones moved next to the first of them.
  std::vector<ModelItem> Take() {
    std::map<int, std::vector<size_t>> members;
    for (size_t i = 0; i < items_.size(); ++i) {
      if (items_[i].fused >= 0) members[items_[i].fused].push_back(i);
    }
    std::vector<ModelItem> ordered;
    ordered.reserve(items_.size());
    for (size_t i = 0; i < items_.size(); ++i) {
      const int fused = items_[i].fused;
      if (fused < 0) {
        ordered.push_back(std::move(items_[i]));
        continue;
      }
      const std::vector<size_t>& group = members[fused];
      if (group.front() != i) continue;
      for (const size_t member : group) {
        ModelItem item = std::move(items_[member]);
        item.fused = group.size() > 1 ? fused : -1;
        ordered.push_back(std::move(item));
      }
    }
    return ordered;
  }

  const std::set<std::string>& modules() const { return modules_; }

 private:
  int FusedNumber(const std::string& module) {
    const size_t dot = module.rfind('.');
    const auto found = kFused.find(module.substr(dot + 1));
    if (found == kFused.end()) return -1;
    const auto next = static_cast<int>(numbers_.size());
    return numbers_.try_emplace(module.substr(0, dot + 1) + found->second, next).first->second;
  }

  std::vector<ModelItem> items_;
  std::set<std::string> modules_;
  std::map<std::string, int> numbers_;
};

std::string ModuleOf(const std::string& tensor) {
  const size_t dot = tensor.rfind('.');
  return dot == std::string::npos ? "" : tensor.substr(0, dot);
}

}  // namespace

int LayerOf(const std::string& name) {
  constexpr std::string_view kPrefix = "model.layers.";
  return name.starts_with(kPrefix) ? std::atoi(name.c_str() + kPrefix.size()) : -1;
}

int64_t ModelItem::elements() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

std::vector<ModelItem> ListItems(const models::DecoderSpec& spec) {
  Lister lister;
  for (const RegionDecl& region : models::DeclareWeights(spec, false)) {
    if (!region.optional) lister.Add(region);
  }
  return lister.Take();
}

StatusOr<std::vector<ModelItem>> ListItems(const checkpoint::Checkpoint& source) {
  ASSIGN_OR_RETURN(models::DecoderSpec spec,
                   models::SpecFromConfig(source.config(), models::ConfigFile(source)));
  models::DropAbsentMtp(source, spec);
  Lister lister;
  for (const RegionDecl& region : models::DeclareWeights(spec, false)) {
    if (region.optional && !source.Has(region.name + ".weight")) continue;
    lister.Add(region);
  }
  std::vector<ModelItem> items = lister.Take();
  std::set<std::string> tensors;
  for (size_t i = 0; i < items.size(); ++i) {
    const ModelItem& item = items[i];
    if (i % kItemsAMap == 0) source.ForgetMaps();
    if (item.linear) {
      RETURN_IF_ERROR(source.FindLinear(item.name, item.shape[0], item.shape[1]).status());
    } else {
      RETURN_IF_ERROR(source.Expect(item.name, item.shape).status());
      tensors.insert(item.name);
    }
  }
  for (const checkpoint::TensorEntry& entry : source.tensors()) {
    if (tensors.contains(entry.name)) continue;
    const bool bias = entry.name.ends_with(".bias");
    if (!bias && lister.modules().contains(ModuleOf(entry.name))) continue;  // X.weight, X.weight_scale, ...
    items.push_back({.name = entry.name, .shape = entry.shape});
  }
  return items;
}

}  // namespace moesaic::quantizer
