#include "app/report_page.h"

#include <fmt/format.h>

#include "app/svg_plot.h"
#include "app/table.h"

namespace moesaic::app {
namespace {

// Colours are those of the server's page. Those of series do not rely on red and green, and have contrast on
// both backgrounds.
constexpr const char* kStyle = R"(:root{color-scheme:light dark;--ground:#fbfaf8;--panel:#fff;--line:#e5e2dc;
--ink:#1d1c1a;--faint:#6f6b64;--tint:#f1eee8;--s1:#0f766e;--s2:#b45309;--s3:#4f46e5;--s4:#be185d;--s5:#0369a1;
--s6:#65713a}
@media(prefers-color-scheme:dark){:root{--ground:#141413;--panel:#1c1c1a;--line:#33312d;--ink:#ecebe7;
--faint:#a09c93;--tint:#262522;--s1:#2dd4bf;--s2:#fbbf24;--s3:#a5b4fc;--s4:#f472b6;--s5:#38bdf8;--s6:#bef264}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:64rem;padding:1.5rem 1rem 4rem;background:var(--ground);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:0 0 .5rem}
p{margin:.4rem 0}.sub,.cap{color:var(--faint)}.cap{font-size:.85rem}.sub{overflow-wrap:anywhere}
.lead{font-size:1.05rem;max-width:46rem;overflow-wrap:anywhere}p{overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem;margin:1.2rem 0}
.facts div,section{background:var(--panel);border:1px solid var(--line);border-radius:.6rem}
.facts div{padding:.7rem .8rem}.facts b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums}
.facts span{color:var(--faint);font-size:.82rem}
section{padding:1rem;margin:1rem 0}.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.25rem .5rem;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--faint);font-weight:500}th:first-child,td:first-child{text-align:left;white-space:normal}
tr:last-child td{border-bottom:0}
svg{width:100%;min-width:19rem;height:auto;display:block;margin:.4rem 0}
svg text{font:14px system-ui,sans-serif}@media(min-width:48rem){svg text{font-size:11px}}.t{fill:var(--ink)}.n{fill:var(--faint)}
.g{stroke:var(--line)}.key{display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.85rem}
.key i{display:inline-block;width:.7rem;height:.7rem;border-radius:50%;margin-right:.35rem}
)";

std::string ColourRules() {
  std::string rules;
  for (int i = 1; i <= 6; ++i) {
    rules += fmt::format(
        ".f{0}{{fill:var(--s{0})}}.l{0}{{fill:none;stroke:var(--s{0});stroke-width:1.8}}"
        ".k{0}{{background:var(--s{0})}}",
        i);
  }
  return rules;
}

std::string TableHtml(const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<div class=\"wide\"><table>";
  for (size_t r = 0; r < rows.size(); ++r) {
    html += "<tr>";
    for (const std::string& cell : rows[r]) {
      html += fmt::format("<{0}>{1}</{0}>", r == 0 ? "th" : "td", EscapeHtml(cell));
    }
    html += "</tr>";
  }
  return html + "</table></div>\n";
}

std::string PlotHtml(const ReportPlot& plot) {
  if (plot.svg.empty()) return "";
  std::string html = fmt::format("<p class=\"cap\">{}</p>", EscapeHtml(plot.caption));
  if (plot.series.size() > 1) {
    html += "<div class=\"key\">";
    for (size_t i = 0; i < plot.series.size(); ++i) {
      html += fmt::format("<span><i class=\"k{}\"></i>{}</span>", i % 6 + 1, EscapeHtml(plot.series[i]));
    }
    html += "</div>";
  }
  return fmt::format("{}<div class=\"wide\">{}</div>\n", html, plot.svg);
}

}  // namespace

std::string ReportMarkdown(const Report& report) {
  std::string text = fmt::format("# {}\n\n{}\n", report.title, report.subtitle);
  if (!report.origin.empty()) text += fmt::format("\n{}\n", report.origin);
  if (!report.facts.empty()) {
    std::vector<std::vector<std::string>> rows = {{"", ""}};
    for (const auto& [value, what] : report.facts) rows.push_back({what, value});
    text += fmt::format("\n{}", FormatTable(rows, /*markdown=*/true));
  }
  for (const ReportSection& section : report.sections) {
    text += fmt::format("\n## {}\n", section.title);
    for (const std::string& note : section.notes) text += fmt::format("\n{}\n", note);
    if (!section.table.empty()) text += fmt::format("\n{}", FormatTable(section.table, /*markdown=*/true));
  }
  return text;
}

std::string ReportHtml(const Report& report) {
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
      "<title>{}</title>\n<style>{}{}</style></head>\n<body><h1>{}</h1><p class=\"lead\">{}</p>\n",
      EscapeHtml(report.title), kStyle, ColourRules(), EscapeHtml(report.title), EscapeHtml(report.subtitle));
  if (!report.origin.empty()) html += fmt::format("<p class=\"sub\">{}</p>\n", EscapeHtml(report.origin));
  if (!report.facts.empty()) {
    html += "<div class=\"facts\">";
    for (const auto& [value, what] : report.facts) {
      html += fmt::format("<div><b>{}</b><span>{}</span></div>", EscapeHtml(value), EscapeHtml(what));
    }
    html += "</div>\n";
  }
  for (const ReportSection& section : report.sections) {
    html += fmt::format("<section><h2>{}</h2>\n", EscapeHtml(section.title));
    for (const std::string& note : section.notes) html += fmt::format("<p>{}</p>\n", EscapeHtml(note));
    for (const ReportPlot& plot : section.plots) html += PlotHtml(plot);
    if (!section.table.empty()) html += TableHtml(section.table);
    html += "</section>\n";
  }
  return html + "</body></html>\n";
}

}  // namespace moesaic::app
