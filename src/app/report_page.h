// A report of sections with text, a table and plots, as Markdown and as a self-contained HTML file.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace moesaic::app {

struct ReportPlot {
  std::string caption;
  std::string svg;
  std::vector<std::string> series = {};  // names in the order of their colours; not needed for one series
};

struct ReportSection {
  std::string title;
  std::vector<std::string> notes = {};               // paragraphs
  std::vector<std::vector<std::string>> table = {};  // the first row is the header; empty: none
  std::vector<ReportPlot> plots = {};                // HTML only
};

struct Report {
  std::string title;
  std::string subtitle = {};                                    // the outcome in words
  std::string origin = {};                                      // description of the source; may be empty
  std::vector<std::pair<std::string, std::string>> facts = {};  // (value, label)
  std::vector<ReportSection> sections = {};
};

std::string ReportMarkdown(const Report& report);
std::string ReportHtml(const Report& report);

}  // namespace moesaic::app
