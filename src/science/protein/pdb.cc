// PDB files: fixed columns (wwPDB, "Atomic Coordinate Entry Format Description", version 3.3).
#include <charconv>
#include <cmath>

#include "science/protein/structure.h"
#include "science/protein/structure_builder.h"

namespace moesaic::science {
namespace {

std::string_view Trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

// Columns [first, last] of a line, counted from 1 as in the specification.
std::string_view Field(std::string_view line, size_t first, size_t last) {
  if (line.size() < first) return {};
  return Trim(line.substr(first - 1, last - first + 1));
}

template <typename Number>
bool ParseNumber(std::string_view text, Number* value) {
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

StatusOr<AtomRecord> ParseAtom(std::string_view line, const std::string& name, int64_t number) {
  if (line.size() < 54) {
    return DataLoss(
        "{}: line {}: an ATOM record needs 54 columns or more, but has {}; the file may be truncated", name,
        number, line.size());
  }
  AtomRecord atom;
  atom.hetero = line[0] == 'H';
  atom.atom = Field(line, 13, 16);
  atom.alternate = line[16];
  atom.residue = Field(line, 18, 20);
  atom.chain = Field(line, 22, 22);
  atom.insertion = line[26];
  if (!ParseNumber(Field(line, 23, 26), &atom.number)) {
    return DataLoss("{}: line {}: the residue number must be an integer, but is \"{}\"", name, number,
                    Field(line, 23, 26));
  }
  for (size_t axis = 0; axis < 3; ++axis) {
    const std::string_view field = Field(line, 31 + 8 * axis, 38 + 8 * axis);
    if (!ParseNumber(field, &atom.xyz[axis]) || !std::isfinite(atom.xyz[axis])) {
      return DataLoss("{}: line {}: coordinate {} must be a number, but is \"{}\"", name, number, "xyz"[axis],
                      field);
    }
  }
  const std::string_view occupancy = Field(line, 55, 60);
  if (!occupancy.empty() && (!ParseNumber(occupancy, &atom.occupancy) || !std::isfinite(atom.occupancy))) {
    return DataLoss("{}: line {}: the occupancy must be a number, but is \"{}\"", name, number, occupancy);
  }
  return atom;
}

}  // namespace

StatusOr<Structure> ParsePdb(std::string_view text, const std::string& name) {
  StructureBuilder builder(name);
  std::string id;
  bool more_models = false, ended = false;
  int64_t number = 0;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    ++number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    const std::string_view record = Trim(line.substr(0, 6));
    if (record == "HEADER") id = std::string(Field(line, 63, 66));
    if (record == "ENDMDL") {
      more_models = text.find("\nMODEL ") != std::string_view::npos || text.substr(0, 6) == "MODEL ";
      ended = true;
      break;
    }
    if (record == "END") {
      ended = true;
      break;
    }
    if (record != "ATOM" && record != "HETATM") continue;
    ASSIGN_OR_RETURN(const AtomRecord atom, ParseAtom(line, name, number));
    RETURN_IF_ERROR(builder.Add(atom));
  }
  ASSIGN_OR_RETURN(Structure structure, builder.Finish(std::move(id), more_models));
  structure.ended = ended;
  return structure;
}

}  // namespace moesaic::science
