#include "app/svg_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moesaic::app {
namespace {

constexpr double kWidth = 560;
constexpr int kColours = 6;

std::string Open(double height, const std::string& what) {
  return fmt::format(R"(<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">)", kWidth, height,
                     EscapeHtml(what));
}

std::string Text(double x, double y, const char* anchor, const char* style, const std::string& text) {
  return fmt::format(R"(<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>)", x, y, anchor,
                     style, EscapeHtml(text));
}

// Returns a step of 1, 2 or 5 times a power of ten that fits at most `most` times into `range`.
double StepOf(double range, int most) {
  const double least = range / most, power = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least) return factor * power;
  }
  return 10 * power;
}

struct Axis {
  double low = 0, high = 1;
  bool logarithmic = false;
  double begin = 0, end = 1;  // coordinates on the page

  double At(double value) const {
    const auto map = [&](double v) { return logarithmic ? std::log10(v) : v; };
    return begin + (map(value) - map(low)) / (map(high) - map(low)) * (end - begin);
  }
  std::vector<double> Ticks(int most) const {
    std::vector<double> ticks;
    if (logarithmic) {
      for (double tick = low; tick <= high * 1.001; tick *= 10) ticks.push_back(tick);
      return ticks;
    }
    const double step = StepOf(high - low, most);
    for (double n = std::ceil(low / step); n * step <= high * (1 + 1e-9); ++n) ticks.push_back(n * step);
    return ticks;
  }
};

}  // namespace

std::string EscapeHtml(const std::string& text) {
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
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string BarPlot(const std::vector<std::pair<std::string, double>>& bars, const NumberText& text) {
  constexpr double kRow = 26, kLabel = 190, kValue = 80;
  double largest = 0;
  for (const auto& [label, value] : bars) largest = std::max(largest, value);
  std::string svg = Open(kRow * static_cast<double>(bars.size()) + 4, "bars");
  double y = 2;
  for (const auto& [label, value] : bars) {
    const double width = largest > 0 ? value / largest * (kWidth - kLabel - kValue) : 0;
    svg += Text(kLabel - 8, y + 17, "end", "t", label);
    svg += fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="3" class="f1"/>)",
                       kLabel, y + 4, std::max(width, 1.0), kRow - 8);
    svg += Text(kLabel + width + 6, y + 17, "start", "t", text(value));
    y += kRow;
  }
  return svg + "</svg>";
}

std::string PointPlot(const std::vector<PlotSeries>& series, const std::string& x_name,
                      const NumberText& text, bool logarithmic, bool joined) {
  constexpr double kHeight = 250, kLeft = 70, kBottom = 36, kTop = 10;
  double x_low = HUGE_VAL, x_high = -HUGE_VAL, y_low = HUGE_VAL, y_high = 0;
  for (const PlotSeries& one : series) {
    for (const auto& [x, y] : one.points) {
      x_low = std::min(x_low, x);
      x_high = std::max(x_high, x);
      if (y > 0) y_low = std::min(y_low, y);
      y_high = std::max(y_high, y);
    }
  }
  if (x_low > x_high) return "";
  logarithmic = logarithmic && y_low < y_high;
  Axis x{.low = x_low - 0.5, .high = x_high + 0.5, .begin = kLeft, .end = kWidth - 12};
  Axis y{.low = 0, .high = y_high > 0 ? y_high * 1.05 : 1, .begin = kHeight - kBottom, .end = kTop};
  if (logarithmic) {
    y.logarithmic = true;
    y.low = std::pow(10, std::floor(std::log10(y_low)));
    y.high = std::pow(10, std::ceil(std::log10(y_high)));
    if (y.low == y.high) y.high *= 10;
  }
  std::string svg = Open(kHeight, x_name);
  for (const double tick : y.Ticks(5)) {
    svg += fmt::format(R"(<line x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}" class="g"/>)", kLeft,
                       kWidth - 12, y.At(tick), y.At(tick));
    svg += Text(kLeft - 8, y.At(tick) + 4, "end", "n", text(tick));
  }
  const double step = std::max(1.0, StepOf(x_high - x_low + 1, 12));
  for (double tick = std::ceil(x_low / step) * step; tick <= x_high; tick += step) {
    svg += Text(x.At(tick), kHeight - kBottom + 16, "middle", "n", fmt::format("{:.0f}", tick));
  }
  svg += Text((kLeft + kWidth - 12) / 2, kHeight - 2, "middle", "n", x_name);
  for (size_t s = 0; s < series.size(); ++s) {
    const int colour = static_cast<int>(s % kColours) + 1;
    std::string path, dots;
    for (const auto& [at, value] : series[s].points) {
      if (logarithmic && value <= 0) continue;
      const double px = x.At(at), py = y.At(value);
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px, py);
      dots += fmt::format(R"(<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="f{}"/>)", px, py,
                          joined ? 3.2 : 2.2, colour);
    }
    if (joined) svg += fmt::format(R"(<path d="{}" class="l{}"/>)", path, colour);
    svg += dots;
  }
  return svg + "</svg>";
}

std::string HeatPlot(const std::vector<std::vector<double>>& cells, const std::vector<int>& row_names,
                     const std::string& row_name, const std::string& column_name, const NumberText& text) {
  constexpr double kLeft = 46, kTop = 30, kBottom = 34, kRow = 9;
  constexpr double kMinSpread = 0.1;  // cells of a balanced map have pale colours
  constexpr int kShades = 8;          // of each colour
  if (cells.empty() || cells.front().empty()) return "";
  double spread = kMinSpread;
  for (const std::vector<double>& row : cells) {
    for (const double value : row) spread = std::max(spread, std::abs(value - 1));
  }
  const double column = (kWidth - kLeft - 12) / static_cast<double>(cells.front().size());
  const double height = kTop + kRow * static_cast<double>(cells.size()) + kBottom;
  // One path per shade: thousands of cells stay small.
  std::vector<std::string> paths(2 * kShades + 1);
  for (size_t row = 0; row < cells.size(); ++row) {
    for (size_t at = 0; at < cells[row].size(); ++at) {
      const double shade = std::round((cells[row][at] - 1) / spread * kShades);
      paths[static_cast<size_t>(shade + kShades)] +=
          fmt::format("M{:.1f} {:.0f}h{:.1f}v{}h-{:.1f}z", kLeft + column * static_cast<double>(at),
                      kTop + kRow * static_cast<double>(row), column, kRow - 1, column);
    }
  }
  const auto fill = [&](int shade, const std::string& path) {
    return fmt::format(R"(<path d="{}" class="f{}" fill-opacity="{:.2f}"/>)", path, shade < 0 ? 1 : 2,
                       0.03 + 0.97 * std::abs(shade) / kShades);
  };
  std::string svg = Open(height, row_name + " and " + column_name);
  for (int shade = -kShades; shade <= kShades; ++shade) {
    if (const std::string& path = paths[static_cast<size_t>(shade + kShades)]; !path.empty())
      svg += fill(shade, path);
    svg += fill(shade, fmt::format("M{:.1f} 6h8v10h-8z", kLeft + 60 + 8.0 * (shade + kShades)));  // legend
  }
  svg += Text(kLeft + 54, 16, "end", "n", text(std::max(0.0, 1 - spread)));
  svg += Text(kLeft + 66 + 8.0 * (2 * kShades + 1), 16, "start", "n", text(1 + spread));
  const double row_step = std::max(2.0, StepOf(static_cast<double>(cells.size()), 12));
  for (double row = 0; row < static_cast<double>(cells.size()); row += row_step) {
    svg += Text(kLeft - 6, kTop + kRow * (row + 0.5) + 5, "end", "n",
                std::to_string(row_names[static_cast<size_t>(row)]));
  }
  const double step = std::max(1.0, StepOf(static_cast<double>(cells.front().size()), 12));
  for (double at = 0; at < static_cast<double>(cells.front().size()); at += step) {
    svg += Text(kLeft + column * (at + 0.5), height - kBottom + 15, "middle", "n", fmt::format("{:.0f}", at));
  }
  svg += Text((kLeft + kWidth - 12) / 2, height - 3, "middle", "n", column_name);
  svg += Text(0, 16, "start", "n", row_name);
  return svg + "</svg>";
}

}  // namespace moesaic::app
