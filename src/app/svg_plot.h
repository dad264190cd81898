// Plots as SVG text with the colours of the containing page (variables --ink, --faint, --line, --s1 to --s6).
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace moesaic::app {

using NumberText = std::function<std::string(double)>;

/// Horizontal bars, one per label, from 0 to the largest value.
std::string BarPlot(const std::vector<std::pair<std::string, double>>& bars, const NumberText& text);

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points = {};  // x, y
};

/// Points over integer x, such as layers, joined in the given order; y from 0, or logarithmic. At most six
/// series have colours of their own.
std::string PointPlot(const std::vector<PlotSeries>& series, const std::string& x_name,
                      const NumberText& text, bool logarithmic, bool joined);

/// Escapes the characters that have a meaning in HTML.
std::string EscapeHtml(const std::string& text);

}  // namespace moesaic::app
