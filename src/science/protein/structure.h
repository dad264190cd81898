// Protein structures from PDB and mmCIF files: chains of residues with the atoms of their backbone.
//
// Rules for irregular files:
// - Only the first model is read.
// - ATOM records of amino acids are read, and HETATM records of selenomethionine (MSE), which counts as MET.
//   Nucleotides, waters, ligands and unknown residues without a CA atom are skipped.
// - Of alternate locations of an atom, the one with the highest occupancy is taken; the first of equals.
// - An atom that appears twice without alternate locations keeps its first position.
// - A residue without all of N, CA, C and O stays in the chain, but is not `complete`.
// - A damaged record is an error that names its line: too short, a number that does not parse or is not
// finite.
// - A PDB file that is cut at the end of a line lacks its END or ENDMDL record: see Structure::ended. mmCIF
// has no mark of the end, so that a file cut at the end of a row is read as a whole one.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::science {

using Point = std::array<float, 3>;  // angstroms

/// Backbone atoms, in the order of ProteinMPNN's coordinates.
enum class Backbone : uint8_t { kN, kCa, kC, kO };
inline constexpr int kBackboneAtoms = 4;

struct Residue {
  int number = 0;        ///< Residue number of the file, which may be negative.
  char insertion = ' ';  ///< Insertion code.
  char letter = 'X';     ///< One-letter code; X for other amino acids.
  std::array<Point, kBackboneAtoms> atoms{};
  std::array<bool, kBackboneAtoms> present{};

  bool complete() const { return present[0] && present[1] && present[2] && present[3]; }
};

struct Chain {
  std::string name;
  std::vector<Residue> residues;  ///< In the order of the file.
};

struct Structure {
  std::string id;  ///< Identifier of the entry, or empty.
  std::vector<Chain> chains;
  int64_t alternates = 0;  ///< Backbone atoms of locations that were not taken.
  bool more_models = false;
  bool ended = true;  ///< PDB: END or ENDMDL follows the atoms; without, the file may be truncated.

  int64_t residues() const;
  int64_t incomplete() const;  ///< Residues that lack a backbone atom.
};

inline constexpr int64_t kMaxResidues = 1 << 20;

/// Parses the text of a file. `name` appears in messages. Fails if the text has no residue of an amino acid,
/// or more than kMaxResidues.
StatusOr<Structure> ParsePdb(std::string_view text, const std::string& name);
StatusOr<Structure> ParseMmcif(std::string_view text, const std::string& name);
/// Chooses the format by content: mmCIF begins with "data_", after comments.
StatusOr<Structure> ParseStructure(std::string_view text, const std::string& name);

/// Returns the one-letter code of a three-letter name, 'X' for other amino acids.
char LetterOf(std::string_view name);

}  // namespace moesaic::science
