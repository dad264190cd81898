#include "parallel/placement/tensorrt_file.h"

#include <algorithm>
#include <charconv>

#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {
namespace {

constexpr std::string_view kAssignments = "initial_global_assignments:";
constexpr std::string_view kBlanks = " \t\r";

std::string_view Trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

// Takes a whole number from the front of `text`.
bool TakeNumber(std::string_view& text, int& value) {
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return false;
  text.remove_prefix(static_cast<size_t>(rest - text.data()));
  return true;
}

class YamlReader {
 public:
  explicit YamlReader(const std::string& source) : source_(source) {}

  StatusOr<std::vector<std::vector<double>>> Read(std::string_view text) {
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      ++line_;
      RETURN_IF_ERROR(ReadLine(text.substr(0, end)));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    if (open_) return Fault("list without end");
    if (layers_.empty()) return Fault("needs a layer under \"initial_global_assignments\"");
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      if (num_slots_ >= 0 && layers_[layer].size() != static_cast<size_t>(num_slots_))
        return InvalidArgument("{}: layer {} must have {} slots as \"num_slots\", found {}", source_,
                               numbers_[layer], num_slots_, layers_[layer].size());
    }
    return std::move(layers_);
  }

 private:
  Status Fault(std::string_view reason) const {
    return InvalidArgument("{}: line {}: {}", source_, line_, reason);
  }

  Status ReadLine(std::string_view line) {
    line = line.substr(0, line.find('#'));
    const bool indented = !line.empty() && (line[0] == ' ' || line[0] == '-');
    line = Trimmed(line);
    if (line.empty() || line == "---") return OkStatus();
    if (open_) return ReadList(line);
    if (!indented) return ReadKey(line);
    if (!in_assignments_) return Fault("unexpected indented line");
    if (line[0] == '-') {
      line = Trimmed(line.substr(1));
      RETURN_IF_ERROR(ReadExpert(line));
      return line.empty() ? OkStatus() : Fault("expected one expert per line");
    }
    int number = 0;
    if (!TakeNumber(line, number) || line.empty() || line[0] != ':')
      return Fault("expected \"LAYER: [EXPERTS]\"");
    if (!numbers_.empty() && number <= numbers_.back()) return Fault("layer numbers must ascend");
    if (layers_.size() == static_cast<size_t>(kMaxLayers)) return Fault("too many layers");
    numbers_.push_back(number);
    layers_.emplace_back();
    line = Trimmed(line.substr(1));
    if (line.empty()) return OkStatus();  // experts follow, one per line
    if (line[0] != '[') return Fault("expected a list of experts");
    open_ = true;
    return ReadList(line.substr(1));
  }

  Status ReadKey(std::string_view line) {
    in_assignments_ = line.substr(0, kAssignments.size()) == kAssignments;
    if (in_assignments_)
      return line == kAssignments ? OkStatus() : Fault("expected layers on lines of their own");
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) return Fault("expected \"KEY: VALUE\"");
    if (line.substr(0, colon) != "num_slots") return OkStatus();  // other settings of the balancer
    std::string_view value = Trimmed(line.substr(colon + 1));
    if (!TakeNumber(value, num_slots_) || !value.empty())
      return Fault("\"num_slots\" must be a whole number");
    return OkStatus();
  }

  // Experts of a list in brackets, which may continue on the next line.
  Status ReadList(std::string_view line) {
    for (line = Trimmed(line); !line.empty(); line = Trimmed(line)) {
      if (line[0] == ']') {
        open_ = false;
        return line.size() == 1 ? OkStatus() : Fault("unexpected text after the list");
      }
      RETURN_IF_ERROR(ReadExpert(line));
      line = Trimmed(line);
      if (!line.empty() && line[0] == ',') {
        line.remove_prefix(1);
      } else if (!line.empty() && line[0] != ']') {
        return Fault("expected ',' or ']'");
      }
    }
    return OkStatus();
  }

  Status ReadExpert(std::string_view& text) {
    int expert = 0;
    if (layers_.empty() || !TakeNumber(text, expert)) return Fault("expected an expert");
    if (++values_ > kMaxLoadValues) return Fault("too many slots");
    layers_.back().push_back(expert);
    return OkStatus();
  }

  const std::string& source_;
  std::vector<std::vector<double>> layers_;
  std::vector<int> numbers_;  // of layers
  int num_slots_ = -1;
  int64_t values_ = 0;
  int line_ = 0;
  bool in_assignments_ = false;
  bool open_ = false;  // a list in brackets continues
};

}  // namespace

bool IsTensorRtYaml(std::string_view text) {
  for (size_t at = 0; (at = text.find(kAssignments, at)) != std::string_view::npos; ++at) {
    if (at == 0 || text[at - 1] == '\n') return true;
  }
  return false;
}

StatusOr<std::vector<std::vector<double>>> ParseTensorRtYaml(std::string_view text,
                                                             const std::string& source) {
  return YamlReader(source).Read(text);
}

}  // namespace moesaic::parallel
