#include "comm/explain/tree_svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "comm/explain/explanation.h"

namespace moesaic::comm {
namespace {

// Sizes in pixels.
constexpr double kDeviceWidth = 46, kDeviceHeight = 28;
constexpr double kGap = 8;          // between boxes
constexpr double kHeader = 36;      // two lines of text
constexpr double kCharacter = 6.3;  // average width at 11 px
constexpr double kAspect = 1.6;     // of a box's width and height
constexpr double kTitle = 26;       // height of the title
constexpr double kLegendRow = 20;

constexpr std::array<std::string_view, 6> kDeviceColours = {"#cfe3f7", "#f9dcc0", "#d3edd2",
                                                            "#e6d8f3", "#f6d1d5", "#e3e3c8"};
constexpr std::array<std::string_view, 4> kGroupColours = {"#ffffff", "#f3f5f8", "#e6eaf0",
                                                           "#d8dee7"};  // by depth

std::string EscapedForSvg(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

double TextWidth(const std::string& text) { return kCharacter * static_cast<double>(text.size()); }

struct Box {
  double width = 0, height = 0;
  int columns = 1;
  std::vector<double> column_widths, row_heights;  // of the children
};

class Drawing {
 public:
  explicit Drawing(const Topology& topology) : topology_(topology), boxes_(topology.groups().size()) {
    // Children follow their parents.
    for (int g = static_cast<int>(boxes_.size()) - 1; g >= 0; --g) Measure(g);
  }

  std::string Text() {
    const std::string& name = topology_.name();
    const double width = std::max(boxes_[0].width, TextWidth(name) * 1.25) + 2 * kGap;
    const double legend = kLegendRow * static_cast<double>(topology_.device_types().size());
    const double height = kTitle + boxes_[0].height + legend + 3 * kGap;
    svg_ = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 "
        "{0:.0f} {1:.0f}\" "
        "font-family=\"sans-serif\" font-size=\"11\" fill=\"#1c2733\">\n"
        "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        width, height);
    AddText(kGap, 18, name, "font-size=\"14\" font-weight=\"bold\"");
    Draw(0, kGap, kTitle, 0);
    double y = kTitle + boxes_[0].height + kGap;
    for (size_t type = 0; type < topology_.device_types().size(); ++type, y += kLegendRow) {
      AddRectangle(kGap, y, 14, 14, kDeviceColours[type % kDeviceColours.size()]);
      AddText(kGap + 20, y + 11, topology_.device_types()[type].name, "");
    }
    return svg_ + "</svg>\n";
  }

 private:
  std::string FirstLine(int g) const {
    const Group& group = topology_.groups()[g];
    const std::string own = group.name.substr(group.name.rfind('/') + 1);
    if (group.parent < 0) return own;
    const bool shared = topology_.groups()[group.parent].link.shared;
    return fmt::format("{}: {} port{}", own, RateText(group.port_bytes_per_s), shared ? "" : " per device");
  }

  std::string SecondLine(int g) const {
    const Link& link = topology_.groups()[g].link;
    return fmt::format("inside: {}, {}{}", RateText(link.bytes_per_s), TimeText(link.latency_s),
                       link.full_duplex ? "" : ", half duplex");
  }

  void Measure(int g) {
    const Group& group = topology_.groups()[g];
    Box& box = boxes_[g];
    if (group.device_type >= 0) {
      box.width = kDeviceWidth;
      box.height = kDeviceHeight;
      return;
    }
    const double least = std::max(TextWidth(FirstLine(g)) * 1.08, TextWidth(SecondLine(g))) + 2 * kGap;
    double best = std::numeric_limits<double>::infinity();
    const int children = static_cast<int>(group.children.size());
    for (int columns = 1; columns <= std::min(children, 32); ++columns) {
      Box candidate = Arranged(group, columns);
      candidate.width = std::max(candidate.width, least);
      const double error = std::abs(std::log(candidate.width / candidate.height / kAspect));
      // Rows of equal length are easier to read.
      const double penalty = children % columns == 0 ? 0 : 0.4;
      if (error + penalty < best) {
        best = error + penalty;
        box = std::move(candidate);
      }
    }
  }

  Box Arranged(const Group& group, int columns) const {
    Box box;
    box.columns = columns;
    box.column_widths.assign(columns, 0);
    box.row_heights.assign((group.children.size() + columns - 1) / columns, 0);
    for (size_t i = 0; i < group.children.size(); ++i) {
      const Box& child = boxes_[group.children[i]];
      double& width = box.column_widths[i % columns];
      double& height = box.row_heights[i / columns];
      width = std::max(width, child.width);
      height = std::max(height, child.height);
    }
    box.width = kGap;
    for (const double width : box.column_widths) box.width += width + kGap;
    box.height = kHeader + kGap;
    for (const double height : box.row_heights) box.height += height + kGap;
    return box;
  }

  void Draw(int g, double x, double y, size_t depth) {
    const Group& group = topology_.groups()[g];
    const Box& box = boxes_[g];
    if (group.device_type >= 0) {
      AddRectangle(x, y, box.width, box.height, kDeviceColours[group.device_type % kDeviceColours.size()]);
      AddText(x + box.width / 2, y + box.height / 2 + 4, fmt::format("{}", group.ranks[0]),
              "text-anchor=\"middle\"");
      return;
    }
    AddRectangle(x, y, box.width, box.height, kGroupColours[std::min(depth, kGroupColours.size() - 1)]);
    AddText(x + kGap, y + 15, FirstLine(g), "font-weight=\"bold\"");
    AddText(x + kGap, y + 30, SecondLine(g), "fill=\"#51606f\"");
    double top = y + kHeader + kGap;
    for (size_t row = 0; row < box.row_heights.size(); ++row) {
      double left = x + kGap;
      for (int column = 0; column < box.columns; ++column) {
        const size_t child = row * box.columns + column;
        if (child >= group.children.size()) break;
        Draw(group.children[child], left, top, depth + 1);
        left += box.column_widths[column] + kGap;
      }
      top += box.row_heights[row] + kGap;
    }
  }

  void AddRectangle(double x, double y, double width, double height, std::string_view colour) {
    svg_ += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"4\" fill=\"{}\" "
        "stroke=\"#8a97a5\"/>\n",
        x, y, width, height, colour);
  }
  void AddText(double x, double y, const std::string& text, std::string_view attributes) {
    svg_ +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, attributes, EscapedForSvg(text));
  }

  const Topology& topology_;
  std::vector<Box> boxes_;  // by group
  std::string svg_;
};

}  // namespace

StatusOr<std::string> TreeSvg(const Topology& topology) {
  if (topology.ranks() > kMaxDrawnDevices) {
    return InvalidArgument("a picture shows at most {} devices; topology {} has {}", kMaxDrawnDevices,
                           topology.name(), topology.ranks());
  }
  return Drawing(topology).Text();
}

}  // namespace moesaic::comm
