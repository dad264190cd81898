// A report of sections, each with words, a table and plots, as Markdown and as one HTML file that needs
// nothing else.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace moesaic::app {

struct ReportPlot {
  std::string caption;
  std::string svg;
  std::vector<std::string> series = {};  // names, in the order of their colours; one needs none
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
  std::string origin = {};                                      // the source in words; may be empty
  std::vector<std::pair<std::string, std::string>> facts = {};  // value, what it is
  std::vector<ReportSection> sections = {};
};

std::string ReportMarkdown(const Report& report);
std::string ReportHtml(const Report& report);

}  // namespace moesaic::app
