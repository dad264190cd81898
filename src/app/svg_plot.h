// Plots as SVG text that takes its colours from the page it stands in (variables --ink, --faint, --line,
// --s1 to --s6).
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace moesaic::app {

using NumberText = std::function<std::string(double)>;

/// Horizontal bars, one a label, from 0 to the largest value.
std::string BarPlot(const std::vector<std::pair<std::string, double>>& bars, const NumberText& text);

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points = {};  // x, y
};

/// Points over whole numbers x, such as layers, joined in the order given; y from 0, or logarithmic. At most
/// six series have colours of their own.
std::string PointPlot(const std::vector<PlotSeries>& series, const std::string& x_name,
                      const NumberText& text, bool logarithmic, bool joined);

/// Text with the characters escaped that mean something in HTML.
std::string EscapeHtml(const std::string& text);

}  // namespace moesaic::app
