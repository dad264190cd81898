// Collects atom records of either format into a structure.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "science/protein/structure.h"

namespace moesaic::science {

struct AtomRecord {
  bool hetero = false;
  std::string_view atom, residue, chain;  // without blanks
  char alternate = ' ';                   // ' ': none
  int number = 0;
  char insertion = ' ';
  Point xyz{};
  float occupancy = 1;
};

class StructureBuilder {
 public:
  explicit StructureBuilder(std::string name) : name_(std::move(name)) {}
  Status Add(const AtomRecord& atom);
  /// Drops residues that are no amino acids, and returns the structure.
  StatusOr<Structure> Finish(std::string id, bool more_models);

 private:
  struct OpenResidue {
    Residue residue;
    bool amino = false;
    std::array<float, kBackboneAtoms> occupancy{};
    std::array<char, kBackboneAtoms> alternate{};
  };
  struct OpenChain {
    std::string name;
    std::vector<OpenResidue> residues;
    std::map<std::pair<int, char>, size_t> index;
  };
  std::string name_;
  std::vector<OpenChain> chains_;
  std::map<std::string, size_t, std::less<>> chain_index_;
  int64_t residues_ = 0, alternates_ = 0;
};

}  // namespace moesaic::science
