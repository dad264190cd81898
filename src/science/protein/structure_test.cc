// PDB and mmCIF files: regular, irregular and damaged.
#include "science/protein/structure.h"

#include <gtest/gtest.h>

#include "science/protein/protein_mpnn.h"

namespace moesaic::science {
namespace {

std::string Atom(int serial, const char* atom, const char* residue, char chain, int number, float x,
                 char alternate = ' ', float occupancy = 1, const char* record = "ATOM",
                 char insertion = ' ') {
  return fmt::format("{:<6}{:>5} {:^4}{}{:>3} {}{:>4}{}   {:>8.3f}{:>8.3f}{:>8.3f}{:>6.2f}{:>6.2f}\n", record,
                     serial, atom, alternate, residue, chain, number, insertion, x, 2.0, 3.0, occupancy, 0.0);
}

std::string BackboneAtoms(const char* residue, char chain, int number, float x) {
  return Atom(1, "N", residue, chain, number, x) + Atom(2, "CA", residue, chain, number, x + 1) +
         Atom(3, "C", residue, chain, number, x + 2) + Atom(4, "O", residue, chain, number, x + 3);
}

std::string Fault(const StatusOr<Structure>& structure) { return Message(structure.status()); }

TEST(PdbTest, ReadsChainsAndBackbones) {
  const std::string text = "HEADER    TEST                                    01-JAN-00   1ABC\n" +
                           BackboneAtoms("ALA", 'A', 1, 0) + Atom(5, "CB", "ALA", 'A', 1, 9) +
                           BackboneAtoms("TRP", 'A', 2, 10) + BackboneAtoms("GLY", 'B', -3, 20) + "END\n";
  const Structure structure = *ParseStructure(text, "x.pdb");
  EXPECT_EQ(structure.id, "1ABC");
  ASSERT_EQ(structure.chains.size(), 2);
  EXPECT_EQ(structure.chains[0].name, "A");
  ASSERT_EQ(structure.chains[0].residues.size(), 2);
  EXPECT_EQ(structure.chains[0].residues[1].letter, 'W');
  EXPECT_EQ(structure.chains[0].residues[1].atoms[1], (Point{11, 2, 3}));
  EXPECT_EQ(structure.chains[1].residues[0].number, -3);
  EXPECT_EQ(structure.residues(), 3);
  EXPECT_EQ(structure.incomplete(), 0);
  EXPECT_TRUE(structure.ended);
}

TEST(PdbTest, AMissingEndIsReported) {
  const std::string atoms = BackboneAtoms("ALA", 'A', 1, 0) + BackboneAtoms("GLY", 'A', 2, 5);
  for (const std::string end : {"END", "END\n", "TER\nEND   \n", "ENDMDL\nEND\n", "ENDMDL\nMODEL        2\n"})
    EXPECT_TRUE(ParsePdb(atoms + end, "x.pdb")->ended) << end;
  for (const std::string end : {"", "TER\n", "ENDX\n", "MODEL        2\n"})
    EXPECT_FALSE(ParsePdb(atoms + end, "x.pdb")->ended) << end;
  // A file cut at a line loses the residues after it.
  const Structure cut = *ParsePdb(BackboneAtoms("ALA", 'A', 1, 0), "x.pdb");
  EXPECT_EQ(cut.residues(), 1);
  EXPECT_FALSE(cut.ended);
}

TEST(PdbTest, GapsOfALongChainAreBounded) {
  Structure structure;
  structure.chains.push_back({.name = "A", .residues = {}});
  for (int r = 0; r < 1000; ++r) {
    Residue residue;
    residue.number = 500 * r;
    residue.present.fill(true);
    structure.chains[0].residues.push_back(residue);
  }
  EXPECT_EQ(
      Message(MakeMpnnInput(structure).status()),
      "the structure has more than 131072 residues, counting those that its numbering omits; design some of "
      "its chains by themselves");
  structure.chains[0].residues.resize(200);
  EXPECT_EQ(MakeMpnnInput(structure)->size(), 500 * 199 + 1);
}

TEST(PdbTest, NumberOfResiduesIsBounded) {
  constexpr int kNumbers = 10000, kCodes = 26;  // of a chain
  const std::string line = Atom(1, "CA", "ALA", 'A', 0, 0);
  constexpr size_t kChain = 21, kNumber = 22, kCode = 26;  // columns
  std::string text;
  for (int64_t r = 0; r <= kMaxResidues; ++r) {
    text += line;
    char* last = text.data() + text.size() - line.size();
    last[kChain] = static_cast<char>('A' + r / (kNumbers * kCodes));
    fmt::format_to_n(last + kNumber, 4, "{:>4}", r % kNumbers);
    last[kCode] = static_cast<char>('A' + r / kNumbers % kCodes);
  }
  EXPECT_EQ(Fault(ParsePdb(text, "x.pdb")), "x.pdb: more than 1048576 residues; split the file");
  text.resize(text.size() - line.size());
  EXPECT_EQ(ParsePdb(text, "x.pdb")->residues(), kMaxResidues);
}

TEST(PdbTest, SelectsTheLocationWithTheHighestOccupancy) {
  const std::string text =
      Atom(1, "CA", "SER", 'A', 1, 1, 'A', 0.4F) + Atom(2, "CA", "SER", 'A', 1, 2, 'B', 0.6F) +
      Atom(3, "N", "SER", 'A', 1, 5, 'A', 0.5F) + Atom(4, "N", "SER", 'A', 1, 6, 'B', 0.5F) +
      Atom(5, "O", "SER", 'A', 1, 7) + Atom(6, "O", "SER", 'A', 1, 8);  // the same atom twice
  const Structure structure = *ParsePdb(text, "x.pdb");
  const Residue& residue = structure.chains[0].residues[0];
  EXPECT_EQ(residue.atoms[1][0], 2);
  EXPECT_EQ(residue.atoms[0][0], 5);
  EXPECT_EQ(residue.atoms[3][0], 7);
  EXPECT_EQ(structure.alternates, 2);
  EXPECT_EQ(structure.incomplete(), 1);  // no C
}

TEST(PdbTest, SkipsLigandsAndReadsSelenomethionine) {
  const std::string text = BackboneAtoms("DA", 'D', 1, 0).replace(0, 0, "") +
                           Atom(1, "CA", "MSE", 'A', 1, 1, ' ', 1, "HETATM") +
                           Atom(2, "CA", "CA", 'A', 2, 1, ' ', 1, "HETATM") + Atom(3, "P", "U", 'C', 1, 1);
  const Structure structure = *ParsePdb(text, "x.pdb");
  ASSERT_EQ(structure.chains.size(), 2);  // chain D has CA atoms and counts as a modified amino acid
  EXPECT_EQ(structure.chains[1].residues.size(), 1);
  EXPECT_EQ(structure.chains[1].residues[0].letter, 'M');
}

TEST(PdbTest, ReadsTheFirstModelAndInsertionCodes) {
  const std::string text = "MODEL        1\n" + BackboneAtoms("ALA", 'A', 5, 0) +
                           Atom(5, "CA", "GLY", 'A', 5, 7, ' ', 1, "ATOM", 'A') + "ENDMDL\nMODEL        2\n" +
                           BackboneAtoms("ALA", 'B', 5, 0) + "ENDMDL\nEND\n";
  const Structure structure = *ParsePdb(text, "x.pdb");
  EXPECT_TRUE(structure.more_models);
  ASSERT_EQ(structure.chains.size(), 1);
  ASSERT_EQ(structure.chains[0].residues.size(), 2);
  EXPECT_EQ(structure.chains[0].residues[1].insertion, 'A');
}

TEST(PdbTest, DamagedRecordsAreNamed) {
  const std::string good = BackboneAtoms("ALA", 'A', 1, 0);
  EXPECT_EQ(Fault(ParsePdb(good + "ATOM      5  CB  ALA A   1      11.1", "x.pdb")),
            "x.pdb: line 5: an ATOM record needs 54 columns or more, but has 36; the file may be truncated");
  std::string bad = good;
  bad.replace(30, 8, "   1.2x3");
  EXPECT_EQ(Fault(ParsePdb(bad, "x.pdb")), "x.pdb: line 1: coordinate x must be a number, but is \"1.2x3\"");
  bad.replace(30, 8, "     nan");
  EXPECT_EQ(Fault(ParsePdb(bad, "x.pdb")), "x.pdb: line 1: coordinate x must be a number, but is \"nan\"");
  bad = good;
  bad.replace(22, 4, "  A1");
  EXPECT_EQ(Fault(ParsePdb(bad, "x.pdb")),
            "x.pdb: line 1: the residue number must be an integer, but is \"A1\"");
  EXPECT_EQ(Fault(ParseStructure("", "x.pdb")), "x.pdb: the file is empty");
  EXPECT_EQ(Fault(ParseStructure("hello\n", "x.pdb")),
            "x.pdb: no amino acid found; the file needs ATOM records of a protein");
}

constexpr const char* kCifHead =
    "data_9XYZ\n#\n_entry.id "
    "9XYZ\nloop_\n_atom_site.group_PDB\n_atom_site.label_atom_id\n_atom_site.label_alt_id\n"
    "_atom_site.label_comp_id\n_atom_site.label_asym_id\n_atom_site.auth_asym_id\n_atom_site.auth_seq_id\n"
    "_atom_site.pdbx_PDB_ins_code\n_atom_site.Cartn_x\n_atom_site.Cartn_y\n_atom_site.Cartn_z\n_atom_site."
    "occupancy\n"
    "_atom_site.pdbx_PDB_model_num\n";

TEST(MmcifTest, ReadsTheAtomLoop) {
  const std::string text = std::string(kCifHead) +
                           "ATOM N . LEU A X 10 ? 1.5 2 3 1.0 1\nATOM CA . LEU A X 10 ? 2.5 2 3 1.0 1\n"
                           "ATOM C . LEU A X 10 ? 3 2 3 1.0 1\nATOM \"O\" A LEU A X 10 ? 4 2 3 0.3 1\n"
                           "ATOM 'O' B LEU A X 10 ? 5 2 3 0.7 1\nHETATM O . HOH B X . ? 1 1 1 1 1\n"
                           "ATOM CA . GLY A X 10 ? 9 9 9 1.0 2\n#\nloop_\n_other.id\n1\n2\n";
  const Structure structure = *ParseStructure(text, "x.cif");
  EXPECT_TRUE(structure.ended);
  EXPECT_EQ(structure.id, "9XYZ");
  EXPECT_TRUE(structure.more_models);
  ASSERT_EQ(structure.chains.size(), 1);
  EXPECT_EQ(structure.chains[0].name, "X");
  const Residue& residue = structure.chains[0].residues.at(0);
  EXPECT_EQ(residue.number, 10);
  EXPECT_EQ(residue.letter, 'L');
  EXPECT_EQ(residue.atoms[3][0], 5);
  EXPECT_TRUE(residue.complete());
}

TEST(MmcifTest, SkipsTextFieldsAndStrings) {
  const std::string text = "data_x\n_struct.title\n;\nloop_\n_atom_site.nothing\n;\n_a.b 'it''s' \n" +
                           std::string(kCifHead + 10) + "ATOM CA . ALA A A 1 ? 1 2 3 1 1\n";
  EXPECT_EQ(ParseMmcif(text, "x.cif")->residues(), 1);
}

TEST(MmcifTest, DamagedFilesAreNamed) {
  const std::string head = kCifHead;
  EXPECT_EQ(Fault(ParseMmcif(head + "ATOM CA . ALA A A 1 ? 1 2", "x.cif")),
            "x.cif: line 18: a row of the atom_site loop has 10 of 13 values; the file may be truncated");
  EXPECT_EQ(Fault(ParseMmcif(head + "ATOM CA . ALA A A one ? 1 2 3 1 1", "x.cif")),
            "x.cif: line 18: the residue number must be an integer, but is \"one\"");
  EXPECT_EQ(Fault(ParseMmcif(head + "ATOM CA . ALA A A 1 ? 1 inf 3 1 1", "x.cif")),
            "x.cif: line 18: Cartn_y must be a number, but is \"inf\"");
  EXPECT_EQ(Fault(ParseMmcif("data_x\n;text", "x.cif")),
            "x.cif: line 2: a text field has no end; the file may be truncated");
  EXPECT_EQ(Fault(ParseMmcif("data_x\n_a.b 'no end\n", "x.cif")),
            "x.cif: line 2: a quoted string has no end");
  EXPECT_EQ(Fault(ParseMmcif("data_x\n", "x.cif")),
            "x.cif: no atom_site loop found; the file needs coordinates of atoms");
  EXPECT_EQ(Fault(ParseMmcif("data_x\nloop_\n_atom_site.Cartn_x\n1\n", "x.cif")),
            "x.cif: the atom_site loop has no column \"label_atom_id\"");
}

TEST(MpnnInputTest, FillsGapsAndKeepsChains) {
  const Structure structure = *ParsePdb(
      BackboneAtoms("ALA", 'A', 1, 0) + BackboneAtoms("CYS", 'A', 4, 5) + BackboneAtoms("TYR", 'B', 7, 9),
      "x.pdb");
  const MpnnInput input = *MakeMpnnInput(structure, {"B"});
  EXPECT_EQ(input.known, (std::vector<uint8_t>{1, 0, 0, 1, 1}));
  EXPECT_EQ(input.sequence, (std::vector<int32_t>{0, 20, 20, 1, 19}));
  EXPECT_EQ(input.index, (std::vector<int32_t>{0, 1, 2, 3, 104}));
  EXPECT_EQ(input.chain, (std::vector<int32_t>{1, 1, 1, 1, 2}));
  EXPECT_EQ(input.designed, (std::vector<uint8_t>{0, 0, 0, 0, 1}));
  EXPECT_EQ(Message(MakeMpnnInput(structure, {"Q"}).status()),
            "the structure has no chain \"Q\"; it has A, B");
}

TEST(MpnnInputTest, ChainsWithoutACompleteResidueAreRefused) {
  std::string text = BackboneAtoms("ALA", 'A', 1, 0);
  for (const int number : {7, 8})
    text += Atom(1, "CA", "GLY", 'B', number, 3) + Atom(2, "C", "GLY", 'B', number, 4);
  const Structure structure = *ParsePdb(text, "x.pdb");
  EXPECT_EQ(MakeMpnnInput(structure)->known, (std::vector<uint8_t>{1, 0, 0}));
  EXPECT_EQ(Message(MakeMpnnInput(structure, {"B"}).status()),
            "no residue to design has all of the atoms N, CA, C, O: residue 7 of chain \"B\" lacks N, O, for "
            "example");
}

}  // namespace
}  // namespace moesaic::science
