// Structures and weights that `moesaic protein` reads.
#include "app/protein_files.h"

#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "checkpoint/test_safetensors.h"
#include "science/protein/protein_mpnn.h"

namespace moesaic::app {
namespace {

using checkpoint::SafetensorsFile;

class ProteinFilesTest : public testing::Test {
 protected:
  ProteinFilesTest() {
    std::string pattern = testing::TempDir() + "protein_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    std::ifstream in(std::string(MOESAIC_SOURCE_DIR) + "/examples/science/helix.pdb", std::ios::binary);
    helix_ = {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  ~ProteinFilesTest() override { std::filesystem::remove_all(folder_); }
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
    return folder_ + "/" + name;
  }
  // Appends a gzip member.
  std::string Append(const std::string& name, const std::string& bytes) const {
    std::string path = folder_ + "/" + name;
    const gzFile file = gzopen(path.c_str(), "ab");
    EXPECT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
              static_cast<int>(bytes.size()));
    gzclose(file);
    return path;
  }
  std::string folder_, helix_;
};

TEST_F(ProteinFilesTest, AllMembersOfAGzipFileAreRead) {
  ASSERT_EQ(ReadStructure(Write("helix.pdb", helix_))->residues(), 24);
  const size_t half = helix_.find('\n', helix_.size() / 2) + 1;
  Append("helix.pdb.gz", helix_.substr(0, half));
  const std::string path = Append("helix.pdb.gz", helix_.substr(half));
  EXPECT_EQ(ReadStructure(path)->residues(), 24);
  const auto size = std::filesystem::file_size(path);
  for (const auto cut : {size - 1, size - 9, size / 2 + 40}) {
    std::filesystem::resize_file(path, cut);
    EXPECT_EQ(Message(ReadStructure(path).status()), path + ": the gzip data are damaged or truncated");
  }
}

// The folder of the Python test of ProteinMPNN.
std::string StructuresFolder() {
  const char* named = std::getenv("MOESAIC_STRUCTURES");
  return named != nullptr ? named : std::string(MOESAIC_SOURCE_DIR) + "/../shared/data/graphs";
}

std::string LettersOf(const science::Chain& chain) {
  std::string letters;
  for (const science::Residue& residue : chain.residues) letters.push_back(residue.letter);
  return letters;
}

TEST_F(ProteinFilesTest, AModelOfTheProteinDataBankIsRead) {
  const std::string path = StructuresFolder() + "/5nmu.pdb.gz";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no test data: " << path;
  const science::Structure structure = *ReadStructure(path);
  EXPECT_TRUE(structure.ended);
  EXPECT_FALSE(structure.more_models);
  EXPECT_EQ(structure.alternates, 0);
  EXPECT_EQ(structure.incomplete(), 0);
  ASSERT_EQ(structure.chains.size(), 6);
  for (size_t c = 0; c < 6; ++c) {
    const science::Chain& chain = structure.chains[c];
    EXPECT_EQ(chain.name, std::string(1, static_cast<char>('B' + c)));
    EXPECT_EQ(
        LettersOf(chain),
        "GPMVLQAQEIMTQNVVTIRGSATVADAVKLMKEKKLRGLIVEPRHEQDPYGIVTETDIVYKVAAFGHDPKTMRVYEIMAKPCVVVNPELGVEYVA"
        "RLFAQTRIRRAPVIQGKTLLGIISVSDILFKSDFVEKPKRLFIEDEIEAAREDARAICAAKGETSPDCAAAWDVVEELQAEASHQRAKKQGSNSF"
        "QAYCEANPDALECRIYDD")
        << chain.name;
    EXPECT_EQ(chain.residues.front().number, 1);
    EXPECT_EQ(chain.residues.back().number, 208);
  }
  const science::Residue& first = structure.chains[0].residues[0];
  EXPECT_EQ(first.atoms[0], (science::Point{-13.429F, -31.688F, 20.141F}));
  EXPECT_EQ(first.atoms[3], (science::Point{-10.829F, -30.806F, 20.371F}));
  EXPECT_EQ(structure.chains[5].residues[207].atoms[1], (science::Point{-41.388F, 12.382F, 8.99F}));
  const science::MpnnInput input = *science::MakeMpnnInput(structure);
  EXPECT_EQ(input.known, std::vector<uint8_t>(6 * 208, 1));
}

// Its residues have N, CA and C only, and the file has no END record.
TEST_F(ProteinFilesTest, AComplexWithoutOxygensIsReadAndNotDesigned) {
  const std::string path = StructuresFolder() + "/complex.pdb.gz";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no test data: " << path;
  const science::Structure structure = *ReadStructure(path);
  EXPECT_FALSE(structure.ended);
  ASSERT_EQ(structure.chains.size(), 2);
  EXPECT_EQ(structure.chains[0].residues.size(), 218);
  EXPECT_EQ(structure.chains[1].residues.size(), 310);
  EXPECT_EQ(LettersOf(structure.chains[0]).substr(0, 20), "MQRARCYLIGETAVVLELEP");
  EXPECT_EQ(LettersOf(structure.chains[1]).substr(290), "ARQDQQRYFEQLAWRLHNEN");
  for (const science::Chain& chain : structure.chains) {
    for (const science::Residue& residue : chain.residues)
      EXPECT_EQ(residue.present, (std::array<bool, science::kBackboneAtoms>{true, true, true, false}));
  }
  EXPECT_EQ(structure.chains[1].residues[309].atoms[1], (science::Point{-24.572F, 11.444F, -6.229F}));
  EXPECT_EQ(Message(science::MakeMpnnInput(structure).status()),
            "no residue to design has all of the atoms N, CA, C, O: residue 1 of chain \"A\" lacks O, for "
            "example");
}

TEST_F(ProteinFilesTest, GitLfsPointersAreNamed) {
  const std::string path =
      Write("v_48_020.pt", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  const std::string message =
      path +
      ": this is a Git LFS pointer and not the file itself; run \"git lfs pull\" in its repository, or "
      "download the file again";
  EXPECT_EQ(Message(ReadProteinWeights(path).status()), message);
  EXPECT_EQ(Message(ReadStructure(path).status()), message);
}

TEST_F(ProteinFilesTest, NumberOfNeighborsIsChecked) {
  auto with = [&](const std::string& number) {
    std::string header = R"({"__metadata__":{"num_edges":")" + number + R"("}})";
    header.resize(64, ' ');
    return Write("weights.safetensors", SafetensorsFile(header, ""));
  };
  EXPECT_EQ(ReadProteinWeights(with("48"))->neighbors, 48);
  for (const std::string number : {"48x", "abc", "", "0", "-1", "10001", "1e300", "nan", "48.5"}) {
    const std::string path = with(number);
    EXPECT_EQ(Message(ReadProteinWeights(path).status()),
              path + ": \"num_edges\" must be an integer in [1, 10000], but is " + number);
  }
}

TEST_F(ProteinFilesTest, SafetensorsOfAllTypesAreConverted) {
  const std::string header =
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},)"
      R"("c":{"dtype":"F16","shape":[2],"data_offsets":[12,16]},"d":{"dtype":"F32","shape":[0],"data_offsets":[16,16]}})";
  const std::string data("\0\0\x80\x3f\0\0\0\xc0\x80\x3f\0\xc0\0\x3c\0\xc0", 16);
  const ProteinWeights weights =
      *ReadProteinWeights(Write("weights.safetensors", SafetensorsFile(header, data)));
  for (const std::string name : {"a", "b", "c"})
    EXPECT_EQ(weights.tensors.at(name).values, (std::vector<float>{1, -2})) << name;
  EXPECT_TRUE(weights.tensors.at("d").values.empty());
  EXPECT_EQ(weights.neighbors, 0);
}

}  // namespace
}  // namespace moesaic::app
