// Plots as SVG text with the colours of the containing page (variables --ink, --faint, --line, --s1 to --s6).
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace moesaic::app {

/// Formats a value for a label.
using NumberText = std::function<std::string(double)>;

/// Returns horizontal bars, one per (label, value), on an axis from 0 to the largest value.
std::string BarPlot(const std::vector<std::pair<std::string, double>>& bars, const NumberText& text);

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points = {};  // x, y
};

/// Returns points over an integer x, such as layers; "" without points. The y axis begins at 0. With
/// `logarithmic` it is logarithmic, and values of 0 or less are omitted. With `joined`, lines connect the
/// points of a series in the given order. Colours repeat after six series.
std::string PointPlot(const std::vector<PlotSeries>& series, const std::string& x_name,
                      const NumberText& text, bool logarithmic, bool joined);

/// Returns a map of coloured cells [rows][columns], one row per layer from top to bottom: colour 1 below 1,
/// colour 2 above, the stronger the farther. Rows are numbered by `row_names`; "" without cells.
std::string HeatPlot(const std::vector<std::vector<double>>& cells, const std::vector<int>& row_names,
                     const std::string& row_name, const std::string& column_name, const NumberText& text);

/// Returns `text` with &, <, > and " escaped for HTML.
std::string EscapeHtml(const std::string& text);

}  // namespace moesaic::app
