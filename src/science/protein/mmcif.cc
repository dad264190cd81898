// mmCIF files: the atom_site loop (IUCr, CIF 1.1 syntax; wwPDB PDBx/mmCIF dictionary).
#include <array>
#include <charconv>
#include <cmath>
#include <vector>

#include "science/protein/structure.h"
#include "science/protein/structure_builder.h"

namespace moesaic::science {
namespace {

struct CifToken {
  std::string_view text;
  bool quoted = false;
  int64_t line = 0;
};

// Splits a file into tokens. Text fields between lines that begin with ';' are one token.
class CifTokens {
 public:
  CifTokens(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  /// Returns false at the end of the file.
  StatusOr<bool> Next(CifToken* token) {
    SkipBlanks();
    if (at_ >= text_.size()) return false;
    token->line = line_;
    token->quoted = true;
    const char c = text_[at_];
    if (c == ';' && (at_ == 0 || text_[at_ - 1] == '\n')) return TextField(token);
    if (c == '\'' || c == '"') return Quoted(c, token);
    token->quoted = false;
    const size_t begin = at_;
    while (at_ < text_.size() && !IsBlank(text_[at_])) ++at_;
    token->text = text_.substr(begin, at_ - begin);
    return true;
  }

 private:
  static bool IsBlank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

  void SkipBlanks() {
    while (at_ < text_.size()) {
      if (text_[at_] == '#') {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (!IsBlank(text_[at_])) {
        return;
      } else {
        if (text_[at_] == '\n') ++line_;
        ++at_;
      }
    }
  }

  StatusOr<bool> TextField(CifToken* token) {
    const size_t begin = at_ + 1;
    const size_t end = text_.find("\n;", begin);
    if (end == std::string_view::npos) {
      return DataLoss("{}: line {}: a text field has no end; the file may be truncated", name_, line_);
    }
    token->text = text_.substr(begin, end - begin);
    for (size_t i = at_; i < end + 1; ++i) line_ += text_[i] == '\n' ? 1 : 0;
    at_ = end + 2;
    return true;
  }

  StatusOr<bool> Quoted(char quote, CifToken* token) {
    const size_t begin = ++at_;
    // A quote ends the string only before a blank.
    while (at_ < text_.size() && text_[at_] != '\n') {
      if (text_[at_] == quote && (at_ + 1 == text_.size() || IsBlank(text_[at_ + 1]))) {
        token->text = text_.substr(begin, at_ - begin);
        ++at_;
        return true;
      }
      ++at_;
    }
    return DataLoss("{}: line {}: a quoted string has no end", name_, line_);
  }

  std::string_view text_;
  const std::string& name_;
  size_t at_ = 0;
  int64_t line_ = 1;
};

// Columns of the atom_site loop that are read.
enum Column {
  kGroup,
  kAtom,
  kAlternate,
  kResidue,
  kChain,
  kLabelChain,
  kNumber,
  kLabelNumber,
  kInsertion,
  kX,
  kY,
  kZ,
  kOccupancy,
  kModel,
  kColumns
};
constexpr std::string_view kColumnNames[kColumns] = {
    "group_PDB",     "label_atom_id", "label_alt_id", "label_comp_id",     "auth_asym_id",
    "label_asym_id", "auth_seq_id",   "label_seq_id", "pdbx_PDB_ins_code", "Cartn_x",
    "Cartn_y",       "Cartn_z",       "occupancy",    "pdbx_PDB_model_num"};

bool IsAbsent(std::string_view text) { return text.empty() || text == "." || text == "?"; }

template <typename Number>
bool ParseWhole(std::string_view text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

bool StartsReserved(const CifToken& token) {
  if (token.quoted || token.text.empty()) return false;
  return token.text[0] == '_' || token.text == "loop_" || token.text.substr(0, 5) == "data_" ||
         token.text.substr(0, 5) == "save_";
}

// Reads the rows of the loop.
class AtomSite {
 public:
  AtomSite(const std::string& name, std::vector<int> columns) : name_(name), columns_(std::move(columns)) {
    for (auto& position : at_) position = -1;
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (columns_[i] >= 0) at_[columns_[i]] = static_cast<int>(i);
    }
  }

  Status CheckColumns() const {
    for (const Column column : {kAtom, kResidue, kX, kY, kZ}) {
      if (at_[column] < 0)
        return InvalidArgument("{}: the atom_site loop has no column \"{}\"", name_, kColumnNames[column]);
    }
    if (at_[kChain] < 0 && at_[kLabelChain] < 0)
      return InvalidArgument("{}: the atom_site loop names no chains", name_);
    if (at_[kNumber] < 0 && at_[kLabelNumber] < 0)
      return InvalidArgument("{}: the atom_site loop has no residue numbers", name_);
    return OkStatus();
  }

  /// Adds a row, unless it belongs to a further model. Returns whether it was of the first model.
  StatusOr<bool> Add(const std::vector<CifToken>& row, StructureBuilder* builder) {
    const int64_t line = row[0].line;
    auto field = [&](Column column) { return at_[column] < 0 ? std::string_view() : row[at_[column]].text; };
    if (at_[kModel] >= 0) {
      if (model_.empty()) model_ = std::string(field(kModel));
      if (field(kModel) != model_) return false;
    }
    AtomRecord atom;
    atom.hetero = field(kGroup) == "HETATM";
    atom.atom = field(kAtom);
    atom.residue = field(kResidue);
    atom.chain = IsAbsent(field(kChain)) ? field(kLabelChain) : field(kChain);
    atom.alternate = IsAbsent(field(kAlternate)) ? ' ' : field(kAlternate)[0];
    atom.insertion = IsAbsent(field(kInsertion)) ? ' ' : field(kInsertion)[0];
    if (atom.hetero && atom.residue != "MSE") return true;  // waters and ligands may have no number
    const std::string_view number = IsAbsent(field(kNumber)) ? field(kLabelNumber) : field(kNumber);
    if (!ParseWhole(number, &atom.number)) {
      return DataLoss("{}: line {}: the residue number must be an integer, but is \"{}\"", name_, line,
                      number);
    }
    for (int axis = 0; axis < 3; ++axis) {
      const std::string_view text = field(static_cast<Column>(kX + axis));
      if (!ParseWhole(text, &atom.xyz[axis]) || !std::isfinite(atom.xyz[axis])) {
        return DataLoss("{}: line {}: {} must be a number, but is \"{}\"", name_, line,
                        kColumnNames[kX + axis], text);
      }
    }
    const std::string_view occupancy = field(kOccupancy);
    if (!IsAbsent(occupancy) && (!ParseWhole(occupancy, &atom.occupancy) || !std::isfinite(atom.occupancy))) {
      return DataLoss("{}: line {}: occupancy must be a number, but is \"{}\"", name_, line, occupancy);
    }
    RETURN_IF_ERROR(builder->Add(atom));
    return true;
  }

  size_t width() const { return columns_.size(); }

 private:
  const std::string& name_;
  std::vector<int> columns_;
  std::array<int, kColumns> at_;
  std::string model_;
};

int ColumnOf(std::string_view tag) {
  constexpr std::string_view kCategory = "_atom_site.";
  if (tag.substr(0, kCategory.size()) != kCategory) return -1;
  for (int i = 0; i < kColumns; ++i) {
    if (tag.substr(kCategory.size()) == kColumnNames[i]) return i;
  }
  return -1;
}

struct ReadRows {
  CifToken next;  // the token after the loop
  bool more = false, more_models = false;
};

// Reads the rows of a loop whose first value is `token`.
StatusOr<ReadRows> ReadLoop(CifTokens* tokens, CifToken token, AtomSite* site, const std::string& name,
                            StructureBuilder* builder) {
  RETURN_IF_ERROR(site->CheckColumns());
  ReadRows rows;
  std::vector<CifToken> row;
  while (true) {
    if (StartsReserved(token)) {
      rows.more = true;
      break;
    }
    row.push_back(token);
    if (row.size() == site->width()) {
      ASSIGN_OR_RETURN(const bool first_model, site->Add(row, builder));
      rows.more_models |= !first_model;
      row.clear();
    }
    ASSIGN_OR_RETURN(const bool more, tokens->Next(&token));
    if (!more) break;
  }
  if (!row.empty()) {
    return DataLoss("{}: line {}: a row of the atom_site loop has {} of {} values; the file may be truncated",
                    name, row[0].line, row.size(), site->width());
  }
  rows.next = token;
  return rows;
}

}  // namespace

StatusOr<Structure> ParseMmcif(std::string_view text, const std::string& name) {
  CifTokens tokens(text, name);
  StructureBuilder builder(name);
  std::string id;
  CifToken token;
  ASSIGN_OR_RETURN(bool more, tokens.Next(&token));
  while (more) {
    if (!token.quoted && token.text.substr(0, 5) == "data_" && id.empty())
      id = std::string(token.text.substr(5));
    if (token.quoted || token.text != "loop_") {
      ASSIGN_OR_RETURN(more, tokens.Next(&token));
      continue;
    }
    std::vector<int> columns;
    bool atoms = false;
    ASSIGN_OR_RETURN(more, tokens.Next(&token));
    while (more && !token.quoted && !token.text.empty() && token.text[0] == '_') {
      atoms |= token.text.substr(0, 11) == "_atom_site.";
      columns.push_back(ColumnOf(token.text));
      ASSIGN_OR_RETURN(more, tokens.Next(&token));
    }
    if (!atoms || !more) continue;
    AtomSite site(name, std::move(columns));
    ASSIGN_OR_RETURN(const ReadRows rows, ReadLoop(&tokens, token, &site, name, &builder));
    return builder.Finish(std::move(id), rows.more_models);
  }
  return InvalidArgument("{}: no atom_site loop found; the file needs coordinates of atoms", name);
}

}  // namespace moesaic::science
