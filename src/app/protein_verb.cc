// `moesaic protein inspect|design|property FILE` reads a structure and reports it, designs sequences for its
// backbone with ProteinMPNN, or predicts a property with an EGNN.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "app/host_features.h"
#include "app/input.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/protein_files.h"
#include "app/table.h"
#include "app/verb.h"
#include "runtime/atomic_file.h"
#include "science/egnn.h"
#include "science/neighbors.h"
#include "science/protein/protein_mpnn.h"

namespace moesaic::app {
namespace {

constexpr int kDefaultNeighbors = 48;  // of the published models
constexpr int kPropertyNeighbors = 30;

struct ProteinFlags {
  std::string action, file, weights;
  std::optional<uint64_t> random_weights;
  std::vector<std::string> chains;
  int sequences = 1;
  double temperature = 0.1;
  uint64_t seed = 0;
  std::string omit = "X";
  int neighbors = 0;
  int threads = 0;
  std::string out;
};

std::string ChainLetters(const science::Chain& chain) {
  std::string letters;
  for (const science::Residue& residue : chain.residues) letters.push_back(residue.letter);
  return letters;
}

void ReportIrregular(const science::Structure& structure) {
  if (structure.more_models) Tell("only the first model is read\n");
  if (!structure.ended) Tell("the file has no END record: it may be truncated\n");
  if (structure.alternates > 0) {
    Tell("{} alternate locations of backbone atoms: the highest occupancies are taken\n",
         structure.alternates);
  }
  if (structure.incomplete() > 0) {
    Tell("{} residues lack backbone atoms: they keep their letters\n", structure.incomplete());
  }
}

Status RunProteinInspect(const ProteinFlags& options) {
  ASSIGN_OR_RETURN(const science::Structure structure, ReadStructure(options.file));
  ReportIrregular(structure);
  std::vector<std::vector<std::string>> rows = {
      {"chain", "residues", "first", "last", "incomplete", "sequence"}};
  for (const science::Chain& chain : structure.chains) {
    const auto incomplete = std::count_if(chain.residues.begin(), chain.residues.end(),
                                          [](const science::Residue& r) { return !r.complete(); });
    std::string letters = ChainLetters(chain);
    constexpr size_t kShown = 40;
    if (letters.size() > kShown) letters = letters.substr(0, kShown - 3) + "...";
    rows.push_back({chain.name.empty() ? "-" : chain.name, fmt::format("{}", chain.residues.size()),
                    fmt::format("{}", chain.residues.front().number),
                    fmt::format("{}", chain.residues.back().number), fmt::format("{}", incomplete), letters});
  }
  WriteOutput(FormatTable(rows, false));
  return OkStatus();
}

StatusOr<science::ProteinMpnn> OpenProteinMpnn(const ProteinFlags& options) {
  ProteinWeights weights;
  if (options.random_weights.has_value()) {
    Tell("the weights are random: sequences have no meaning\n");
    weights.tensors = science::ProteinMpnn::RandomWeights(*options.random_weights);
  } else {
    ASSIGN_OR_RETURN(weights, ReadProteinWeights(options.weights));
  }
  int neighbors = options.neighbors > 0 ? options.neighbors : weights.neighbors;
  if (neighbors <= 0) neighbors = kDefaultNeighbors;
  auto model = science::ProteinMpnn::Load(weights.tensors, neighbors);
  if (!model.ok() && !options.weights.empty()) return Annotate(model.status(), options.weights);
  return model;
}

// Letters of the designed chains, separated by '/', as ProteinMPNN writes them.
std::string FastaLetters(const science::MpnnInput& input, const std::vector<int32_t>& sequence) {
  std::string letters;
  int32_t chain = 0;
  for (int64_t i = 0; i < input.size(); ++i) {
    if (input.designed[i] == 0) continue;
    if (chain != 0 && input.chain[i] != chain) letters.push_back('/');
    chain = input.chain[i];
    letters.push_back(science::kMpnnAlphabet[sequence[i]]);
  }
  return letters;
}

double ScoreOf(const science::MpnnInput& input, const std::vector<float>& logs) {
  double score = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < input.size(); ++i) {
    if (input.designed[i] == 0 || input.known[i] == 0) continue;
    score -= logs[i * science::kMpnnLetters + input.sequence[i]];
    ++count;
  }
  return count > 0 ? score / static_cast<double>(count) : 0;
}

Status RunDesign(const ProteinFlags& options) {
  ASSIGN_OR_RETURN(const science::Structure structure, ReadStructure(options.file));
  ReportIrregular(structure);
  ASSIGN_OR_RETURN(const science::MpnnInput input, science::MakeMpnnInput(structure, options.chains));
  ASSIGN_OR_RETURN(const science::ProteinMpnn model, OpenProteinMpnn(options));
  ASSIGN_OR_RETURN(const runtime::CpuFeatures cpu, FeaturesOfHost());
  ASSIGN_OR_RETURN(const auto workspace, graph::Workspace::Create(options.threads, cpu));
  const graph::Context ctx = workspace->context();
  ASSIGN_OR_RETURN(const science::MpnnEncoding encoding, model.Encode(ctx, input));
  const std::vector<int32_t> order = science::DecodingOrder(input, options.seed);
  ASSIGN_OR_RETURN(const std::vector<float> logs,
                   model.LogProbabilities(ctx, input, encoding, input.sequence, order));
  const double native = ScoreOf(input, logs);
  std::vector<std::vector<std::string>> rows = {{"sample", "score", "recovery", "residues"}};
  const auto designed = std::count(input.designed.begin(), input.designed.end(), 1);
  rows.push_back({"native", fmt::format("{:.4f}", native), "1.0000", fmt::format("{}", designed)});
  const std::string title = structure.id.empty() ? InputName(options.file) : structure.id;
  std::string fasta = fmt::format(">{}, score={:.4f}, seed={}\n{}\n", title, native, options.seed,
                                  FastaLetters(input, input.sequence));
  const InterruptGuard guard;
  Progress progress("designing");
  for (int i = 0; i < options.sequences; ++i) {
    progress.Show(i, options.sequences, fmt::format("sequence {}", i + 1));
    if (Interrupted()) return Cancelled("interrupted");
    ASSIGN_OR_RETURN(
        const science::MpnnSample sample,
        model.Sample(ctx, input, encoding,
                     {.temperature = options.temperature, .seed = options.seed + i, .omit = options.omit}));
    fasta += fmt::format(">T={}, sample={}, score={:.4f}, seq_recovery={:.4f}\n{}\n", options.temperature,
                         i + 1, sample.score, sample.recovery, FastaLetters(input, sample.sequence));
    rows.push_back({fmt::format("{}", i + 1), fmt::format("{:.4f}", sample.score),
                    fmt::format("{:.4f}", sample.recovery), fmt::format("{}", designed)});
  }
  if (options.out.empty()) {
    WriteOutput(fasta);
    return OkStatus();
  }
  RETURN_IF_ERROR(runtime::WriteFileAtomically(options.out, fasta));
  Print("{}\nwritten to {}\n", FormatTable(rows, false), options.out);
  return OkStatus();
}

Status RunProperty(const ProteinFlags& options) {
  ASSIGN_OR_RETURN(const science::Structure structure, ReadStructure(options.file));
  ReportIrregular(structure);
  ASSIGN_OR_RETURN(const ProteinWeights weights, ReadProteinWeights(options.weights));
  auto model = science::EgnnModel::Load(weights.tensors);
  if (!model.ok()) return Annotate(model.status(), options.weights);
  if (model->inputs() != science::kMpnnLetters) {
    return InvalidArgument(
        "{}: \"embedding.weight\" must have {} inputs, one per letter of {}, but has {}; the verb predicts "
        "from residues, and models of atoms (QM9's has 15 inputs) run from C++",
        options.weights, science::kMpnnLetters, science::kMpnnAlphabet, model->inputs());
  }
  // A node is a residue with a CA atom; its features are its letter.
  std::vector<float> xyz, features;
  for (const science::Chain& chain : structure.chains) {
    for (const science::Residue& residue : chain.residues) {
      constexpr auto kCa = static_cast<int>(science::Backbone::kCa);
      if (!residue.present[kCa]) continue;
      xyz.insert(xyz.end(), residue.atoms[kCa].begin(), residue.atoms[kCa].end());
      features.resize(features.size() + science::kMpnnLetters, 0);
      features[features.size() - science::kMpnnLetters + science::kMpnnAlphabet.find(residue.letter)] = 1;
    }
  }
  ASSIGN_OR_RETURN(const runtime::CpuFeatures cpu, FeaturesOfHost());
  ASSIGN_OR_RETURN(const auto workspace, graph::Workspace::Create(options.threads, cpu));
  const graph::Context ctx = workspace->context();
  const auto nodes = static_cast<int64_t>(xyz.size() / 3);
  const int neighbors = options.neighbors > 0 ? options.neighbors : kPropertyNeighbors;
  ASSIGN_OR_RETURN(const graph::EdgeList list, graph::NearestGraph(ctx, xyz, {.k = neighbors}));
  const auto edges = static_cast<int64_t>(list.src.size());
  ASSIGN_OR_RETURN(const graph::Graph graph,
                   graph::Graph::FromCoo(graph::Indices::Of(list.dst.data(), edges),
                                         graph::Indices::Of(list.src.data(), edges), nodes, nodes));
  const int64_t bounds[] = {0, nodes};
  ASSIGN_OR_RETURN(const graph::Segments molecule,
                   graph::SegmentsFromPtr(graph::Indices::Of(bounds, 2), nodes));
  ASSIGN_OR_RETURN(const std::vector<float> value,
                   model->Predict(ctx, graph, features.data(), xyz.data(), molecule));
  WriteOutput(
      FormatTable({{"structure", "residues", "edges", "property"},
                   {structure.id.empty() ? InputName(options.file) : structure.id, fmt::format("{}", nodes),
                    fmt::format("{}", edges), fmt::format("{:.6g}", value[0])}},
                  false));
  return OkStatus();
}

void AddDesignFlags(Verb& verb, ProteinFlags& options) {
  const std::string group = "Flags of design";
  verb.AddOption("--chains", options.chains, "Chains to design, e.g. A,B; others are kept. Default: all")
      .Delimiter(',')
      .OneValue()
      .Group(group);
  verb.AddOption("-n,--sequences", options.sequences, "Sequences to design")
      .Range(1, 1000000)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--temperature", options.temperature, "Temperature of the choice of letters")
      .Range(1e-4, 100.0)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--seed", options.seed, "Seed of the first sequence; the next ones add 1")
      .ShowDefault()
      .Group(group);
  verb.AddOption("--omit", options.omit, "Letters that are never chosen").ShowDefault().Group(group);
  verb.AddOption("--random-weights", options.random_weights,
                 "Seed of random weights, to try the program without a model")
      .Group(group);
  verb.AddOption("-o,--out", options.out, "FASTA file to write; a table of scores is printed instead")
      .Group(group);
}

}  // namespace

void AddProtein(Verb& root, VerbRun& run) {
  auto options = std::make_shared<ProteinFlags>();
  Verb verb = root.AddVerb("protein", "Read protein structures, design sequences, predict properties");
  verb.AddOption("ACTION", options->action, "inspect, design or property")
      .OneOf({"inspect", "design", "property"})
      .Required();
  verb.AddOption("FILE", options->file, "Structure: PDB or mmCIF, may be gzipped; - for standard input")
      .Check(CheckExistingInput)
      .Required();
  verb.AddOption(
          "-w,--weights", options->weights,
          "Model: ProteinMPNN for design, EGNN for property; a PyTorch checkpoint (.pt) or safetensors")
      .ExistingFile();
  verb.AddOption("--neighbors", options->neighbors,
                 "Neighbours per residue; default: the model's, else 48 (property: 30)")
      .Range(1, 10000);
  verb.AddOption("-t,--threads", options->threads, "Threads; default: one per core").Range(1, 4096);
  AddDesignFlags(verb, *options);
  verb.Footer(
      "design prints FASTA: the native sequence with its score, then one entry per sample. Scores are\n"
      "means of -log p over designed residues. docs/science.md describes files and models.\n\n"
      "Examples:\n"
      "  moesaic protein inspect 5nmu.pdb.gz\n"
      "  moesaic protein design 5nmu.pdb.gz --weights v_48_020.pt --chains A -n 8 -o designs.fasta\n"
      "  moesaic protein property 5nmu.pdb.gz --weights egnn.safetensors");
  verb.OnParsed([options, verb, &run] {
    const bool design = options->action == "design";
    if (!design) {
      for (const char* flag :
           {"--chains", "--sequences", "--temperature", "--seed", "--omit", "--random-weights", "--out"}) {
        if (verb.Count(flag) > 0) FailUsage(flag, "is for moesaic protein design");
      }
    }
    if (options->action == "inspect") {
      for (const char* flag : {"--weights", "--neighbors", "--threads"}) {
        if (verb.Count(flag) > 0) FailUsage(flag, "is for moesaic protein design and property");
      }
      run = [options] { return RunProteinInspect(*options); };
      return;
    }
    if (options->weights.empty() == !options->random_weights.has_value()) {
      FailUsage(design ? "--weights or --random-weights is required, and not both" : "--weights is required");
    }
    run = [options, design] { return design ? RunDesign(*options) : RunProperty(*options); };
  });
}

}  // namespace moesaic::app
