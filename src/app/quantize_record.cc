#include "app/quantize_record.h"

#include <nlohmann/json.hpp>

#include "checkpoint/json_text.h"

namespace moesaic::app {
namespace {

using nlohmann::json;

// Reads fields and keeps the first error.
class Fields {
 public:
  explicit Fields(const std::string& file) : file_(file) {}

  void Read(const json& from, const char* key, std::optional<double>* to) {
    if (const json* value = Find(from, key, &json::is_number, "a number")) *to = value->get<double>();
  }
  void Read(const json& from, const char* key, std::string* to) {
    if (const json* value = Find(from, key, &json::is_string, "text")) *to = value->get<std::string>();
  }
  void Read(const json& from, const char* key, bool* to) {
    if (const json* value = Find(from, key, &json::is_boolean, "true or false")) *to = value->get<bool>();
  }
  const json* Object(const json& from, const char* key) {
    return Find(from, key, &json::is_object, "an object");
  }
  // Returns the objects of a list.
  std::vector<const json*> Objects(const json& from, const char* key) {
    std::vector<const json*> objects;
    const json* list = Find(from, key, &json::is_array, "a list");
    if (list == nullptr) return objects;
    for (const json& one : *list) {
      if (!one.is_object()) {
        Complain(key, "a list of objects", one);
        return {};
      }
      objects.push_back(&one);
    }
    return objects;
  }
  const Status& status() const { return status_; }

 private:
  const json* Find(const json& from, const char* key, bool (json::*is)() const noexcept,
                   const char* expected) {
    const auto found = from.find(key);
    if (found == from.end() || found->is_null()) return nullptr;
    if (((*found).*is)()) return &*found;
    Complain(key, expected, *found);
    return nullptr;
  }
  void Complain(const char* key, const char* expected, const json& found) {
    if (!status_.ok()) return;
    status_ = DataLoss("{}: \"{}\" must be {}, found {}", file_, key, expected, checkpoint::ShownJson(found));
  }

  const std::string& file_;
  Status status_;
};

}  // namespace

StatusOr<QuantizeRecord> ParseQuantizeRecord(const std::string& text, const std::string& file) {
  ASSIGN_OR_RETURN(const json record, checkpoint::ParseJsonObject(text, file));
  QuantizeRecord run;
  Fields fields(file);
  if (const json* settings = fields.Object(record, "settings")) run.settings = settings->dump();
  if (const json* calibration = fields.Object(record, "calibration")) {
    fields.Read(*calibration, "tokens", &run.tokens);
    fields.Read(*calibration, "sequences", &run.sequences);
  }
  for (const json* stage : fields.Objects(record, "stages")) {
    std::string name;
    std::optional<double> seconds;
    fields.Read(*stage, "name", &name);
    fields.Read(*stage, "seconds", &seconds);
    if (seconds) run.stages.emplace_back(name, *seconds);
  }
  for (const json* linear : fields.Objects(record, "linears")) {
    QuantizeRecord::Linear& to = run.linears.emplace_back();
    std::optional<double> layer;
    fields.Read(*linear, "name", &to.name);
    fields.Read(*linear, "kind", &to.kind);
    fields.Read(*linear, "method", &to.method);
    fields.Read(*linear, "layer", &layer);
    to.layer = static_cast<int>(layer.value_or(-1));
    fields.Read(*linear, "tokens", &to.tokens);
    fields.Read(*linear, "shrinkage", &to.shrinkage);
    fields.Read(*linear, "loss", &to.loss);
    fields.Read(*linear, "of_nearest", &to.of_nearest);
    fields.Read(*linear, "damping", &to.damping);
  }
  run.analyzed = record.contains("analysis") || record.contains("mix");
  if (const json* mix = fields.Object(record, "mix")) {
    StatusOr<quantizer::Mix> parsed = quantizer::Mix::FromJson(nlohmann::ordered_json(*mix));
    if (!parsed.ok()) return Annotate(parsed.status(), file);
    run.mix = *std::move(parsed);
  }
  fields.Read(record, "device", &run.device);
  fields.Read(record, "peak_bytes", &run.peak_bytes);
  fields.Read(record, "seconds", &run.seconds);
  fields.Read(record, "units", &run.units);
  fields.Read(record, "resumed_units", &run.resumed_units);
  fields.Read(record, "resumed_analysis", &run.resumed_analysis);
  if (const json* bytes = fields.Object(record, "bytes")) {
    fields.Read(*bytes, "source", &run.source_bytes);
    fields.Read(*bytes, "output", &run.output_bytes);
    fields.Read(*bytes, "read", &run.read_bytes);
    fields.Read(*bytes, "written", &run.written_bytes);
  }
  RETURN_IF_ERROR(fields.status());
  return run;
}

}  // namespace moesaic::app
