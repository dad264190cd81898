#include "science/protein/structure.h"

#include <algorithm>
#include <iterator>

#include "science/protein/structure_builder.h"

namespace moesaic::science {
namespace {

constexpr std::pair<std::string_view, char> kAminoAcids[] = {
    {"ALA", 'A'}, {"ARG", 'R'}, {"ASN", 'N'}, {"ASP", 'D'}, {"CYS", 'C'}, {"GLN", 'Q'}, {"GLU", 'E'},
    {"GLY", 'G'}, {"HIS", 'H'}, {"ILE", 'I'}, {"LEU", 'L'}, {"LYS", 'K'}, {"MET", 'M'}, {"MSE", 'M'},
    {"PHE", 'F'}, {"PRO", 'P'}, {"SER", 'S'}, {"THR", 'T'}, {"TRP", 'W'}, {"TYR", 'Y'}, {"VAL", 'V'}};

int BackboneIndex(std::string_view atom) {
  if (atom == "N") return 0;
  if (atom == "CA") return 1;
  if (atom == "C") return 2;
  return atom == "O" ? 3 : -1;
}

}  // namespace

char LetterOf(std::string_view name) {
  for (const auto& [known, letter] : kAminoAcids) {
    if (name == known) return letter;
  }
  return 'X';
}

int64_t Structure::residues() const {
  int64_t count = 0;
  for (const Chain& chain : chains) count += static_cast<int64_t>(chain.residues.size());
  return count;
}

int64_t Structure::incomplete() const {
  int64_t count = 0;
  for (const Chain& chain : chains) {
    count += std::count_if(chain.residues.begin(), chain.residues.end(),
                           [](const Residue& r) { return !r.complete(); });
  }
  return count;
}

Status StructureBuilder::Add(const AtomRecord& atom) {
  if (atom.hetero && atom.residue != "MSE") return OkStatus();
  auto chain_at = chain_index_.find(atom.chain);
  if (chain_at == chain_index_.end()) {
    chain_at = chain_index_.emplace(std::string(atom.chain), chains_.size()).first;
    chains_.push_back({.name = std::string(atom.chain), .residues = {}, .index = {}});
  }
  OpenChain& chain = chains_[chain_at->second];
  const auto [place, added] = chain.index.try_emplace({atom.number, atom.insertion}, chain.residues.size());
  if (added) {
    if (++residues_ > kMaxResidues) {
      return ResourceExhausted("{}: more than {} residues; split the file", name_, kMaxResidues);
    }
    OpenResidue residue;
    residue.residue.number = atom.number;
    residue.residue.insertion = atom.insertion;
    residue.residue.letter = LetterOf(atom.residue);
    residue.amino = residue.residue.letter != 'X';
    chain.residues.push_back(residue);
  }
  OpenResidue& residue = chain.residues[place->second];
  const int index = BackboneIndex(atom.atom);
  if (index < 0) return OkStatus();
  // An unknown residue with a CA atom and peptide atoms is a modified amino acid.
  if (index == static_cast<int>(Backbone::kCa)) residue.amino = true;
  if (residue.residue.present[index]) {
    const bool alternate = atom.alternate != residue.alternate[index];
    alternates_ += alternate ? 1 : 0;
    if (!alternate || atom.occupancy <= residue.occupancy[index]) return OkStatus();
  }
  residue.residue.present[index] = true;
  residue.residue.atoms[index] = atom.xyz;
  residue.occupancy[index] = atom.occupancy;
  residue.alternate[index] = atom.alternate;
  return OkStatus();
}

StatusOr<Structure> StructureBuilder::Finish(std::string id, bool more_models) {
  Structure structure;
  structure.id = std::move(id);
  structure.more_models = more_models;
  structure.alternates = alternates_;
  for (OpenChain& open : chains_) {
    Chain chain{.name = std::move(open.name), .residues = {}};
    for (const OpenResidue& residue : open.residues) {
      if (residue.amino) chain.residues.push_back(residue.residue);
    }
    if (!chain.residues.empty()) structure.chains.push_back(std::move(chain));
  }
  if (structure.chains.empty()) {
    return InvalidArgument("{}: no amino acid found; the file needs ATOM records of a protein", name_);
  }
  return structure;
}

StatusOr<Structure> ParseStructure(std::string_view text, const std::string& name) {
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    const bool comment =
        line.empty() || line[0] == '#' || line.find_first_not_of(" \t\r") == std::string_view::npos;
    if (!comment) return line.substr(0, 5) == "data_" ? ParseMmcif(text, name) : ParsePdb(text, name);
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
  }
  return InvalidArgument("{}: the file is empty", name);
}

}  // namespace moesaic::science
