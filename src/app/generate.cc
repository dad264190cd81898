// `moesaic generate MODEL` completes prompts: one as a stream, or many in a batch.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "app/generate_input.h"
#include "app/input.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/sampling_flags.h"
#include "app/session.h"
#include "app/sparsity_flags.h"
#include "app/speculative_flags.h"
#include "app/verb.h"
#include "engine/output_text.h"
#include "engine/philox.h"

namespace moesaic::app {
namespace {

struct GenerateFlags {
  ModelFlags model;
  SamplingFlags sampling;
  GenerateInput input;
  std::string format = "text";
  int logprobs = -1;
  bool prompt_logprobs = false;
  bool keep_special = false;
  bool stats = false;
  int max_sequences = 16;
};

// The output of one prompt while it is generated.
struct Output {
  const Prompt* prompt = nullptr;
  std::optional<engine::OutputText> decoder;  // none without a tokenizer
  std::string text;
  std::vector<int32_t> ids;
  std::vector<engine::LogprobEntry> logprobs, prompt_logprobs;
  std::string finish_reason;  // empty while the request runs
};

std::string FinishName(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::kStop:
      return "stop";
    case engine::FinishReason::kLength:
      return "length";
    case engine::FinishReason::kGrammar:
    case engine::FinishReason::kError:
    case engine::FinishReason::kInternal:
      return "error";
    default:
      return "cancelled";
  }
}

class Generator {
 public:
  Generator(const GenerateFlags& options, Session& session, const ModelText& text)
      : options_(options), engine_(*session.engine), text_(text) {}

  Status Run(const std::vector<Prompt>& prompts, const engine::SamplingParams& sampling) {
    RETURN_IF_ERROR(AddAll(prompts, sampling));
    const auto start = std::chrono::steady_clock::now();
    std::vector<engine::TokenEvent> events;
    while (!engine_.idle()) {
      if (Interrupted()) {
        if (streams()) WriteOutput("\n");
        return Cancelled("interrupted");
      }
      events.clear();
      RETURN_IF_ERROR(engine_.Step(&events));
      for (engine::TokenEvent& event : events) RETURN_IF_ERROR(Take(event));
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options_.stats) PrintStats(seconds);
    TellCut(sampling.max_tokens);
    for (const Output& output : outputs_) {
      if (output.finish_reason == "error") return absl::InternalError("the model's logits were not finite");
    }
    return OkStatus();
  }

 private:
  // True for a single prompt in text format, which is streamed.
  bool streams() const { return options_.format == "text" && outputs_.size() == 1; }

  Status AddAll(const std::vector<Prompt>& prompts, engine::SamplingParams sampling) {
    outputs_.resize(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      outputs_[i].prompt = &prompts[i];
      if (text_.tokenizer.ok()) {
        outputs_[i].decoder.emplace(*text_.tokenizer, !options_.keep_special, options_.sampling.stop);
      }
      if (options_.sampling.seed) sampling.seed = engine::SeedOf(*options_.sampling.seed, i);
      const auto id = engine_.Add(
          {.prompt = prompts[i].ids, .sampling = sampling, .prompt_logprobs = options_.prompt_logprobs});
      if (!id.ok()) {
        return prompts.size() == 1 ? id.status() : Annotate(id.status(), fmt::format("prompt {}", i));
      }
      index_[*id] = i;
    }
    return OkStatus();
  }

  Status Take(engine::TokenEvent& event) {
    Output& output = outputs_[index_.at(event.request)];
    if (!output.finish_reason.empty()) return OkStatus();  // cancelled at a stop string
    if (!event.prompt_logprobs.empty()) output.prompt_logprobs = std::move(event.prompt_logprobs);
    std::string piece;
    if (event.token) {
      output.ids.push_back(*event.token);
      if (options_.logprobs >= 0) output.logprobs.push_back(std::move(event.logprobs));
      if (output.decoder) {
        ASSIGN_OR_RETURN(piece, output.decoder->Push(*event.token));
      } else {
        piece = fmt::format("{}{}", output.ids.size() > 1 ? "," : "", *event.token);
      }
    }
    if (event.finish != engine::FinishReason::kNone) {
      output.finish_reason = FinishName(event.finish);
      if (output.decoder) {
        ASSIGN_OR_RETURN(const std::string rest, output.decoder->Finish());
        piece += rest;
      }
    }
    if (output.decoder && output.decoder->stopped() && output.finish_reason != "stop") {
      output.finish_reason = "stop";
      engine_.Cancel(event.request);
    }
    output.text += piece;
    if (streams()) WriteOutput(piece);
    if (!output.finish_reason.empty()) PrintFinished();
    return FlushOutput();
  }

  // Prints finished outputs in the order of the prompts.
  void PrintFinished() {
    for (; printed_ < outputs_.size() && !outputs_[printed_].finish_reason.empty(); ++printed_) {
      const Output& output = outputs_[printed_];
      if (options_.format == "jsonl") {
        Print("{}\n", Json(output).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
      } else {
        if (!streams()) WriteOutput(output.text);
        WriteOutput("\n");
      }
    }
  }

  nlohmann::json Entry(int32_t id, const engine::LogprobEntry& entry) const {
    nlohmann::json json = {{"id", id}, {"logprob", entry.logprob}};
    if (text_.tokenizer.ok()) json["token"] = text_.tokenizer->TokenBytes(id);
    json["top"] = nlohmann::json::array();
    for (const engine::TokenLogprob& other : entry.top) {
      json["top"].push_back({{"id", other.token}, {"logprob", other.logprob}});
    }
    return json;
  }

  nlohmann::json Json(const Output& output) const {
    nlohmann::json json = {
        {"index", &output - outputs_.data()},
        {"ids", output.ids},
        {"finish_reason", output.finish_reason},
        {"usage", {{"prompt_tokens", output.prompt->ids.size()}, {"completion_tokens", output.ids.size()}}}};
    if (!output.prompt->id.empty()) json["id"] = nlohmann::json::parse(output.prompt->id);
    if (output.decoder) json["text"] = output.text;
    for (size_t i = 0; i < output.logprobs.size(); ++i) {
      json["logprobs"].push_back(Entry(output.ids[i], output.logprobs[i]));
    }
    for (size_t i = 0; i < output.prompt_logprobs.size(); ++i) {
      json["prompt_logprobs"].push_back(Entry(output.prompt->ids[i + 1], output.prompt_logprobs[i]));
    }
    return json;
  }

  // Reports outputs that the context ended before --max-tokens.
  void TellCut(int max_tokens) const {
    const auto cut = std::count_if(outputs_.begin(), outputs_.end(), [&](const Output& output) {
      return output.finish_reason == "length" && static_cast<int>(output.ids.size()) < max_tokens;
    });
    if (cut == 0) return;
    Tell("{} of {} outputs reached the context of {} tokens before --max-tokens {}\n", cut, outputs_.size(),
         engine_.max_context(), max_tokens);
  }

  void PrintStats(double seconds) const {
    const engine::EngineStats stats = engine_.stats();
    const auto rate = [&stats](double over) {
      return static_cast<double>(stats.output_tokens) / std::max(over, 1e-9);
    };
    Tell(
        "{} prompt and {} output tokens in {:.2f} s: {:.1f} tokens/s out, {:.1f} in decode, {} preemptions\n",
        stats.prompt_tokens, stats.output_tokens, seconds, rate(seconds), rate(stats.decode_seconds),
        stats.preemptions);
    if (engine_.speculative().method != "off")
      Tell("speculative decoding: {}\n", DescribeSpeculation(engine_));
    if (engine_.sparsity().key_summaries)
      Tell("block-sparse attention: {}\n", DescribeCounters(stats.sparsity));
  }

  const GenerateFlags& options_;
  engine::Engine& engine_;
  const ModelText& text_;
  std::vector<Output> outputs_;
  std::map<engine::RequestId, size_t> index_;
  size_t printed_ = 0;
};

Status RunGenerate(const GenerateFlags& options) {
  InterruptGuard guard;
  ASSIGN_OR_RETURN(const ModelText text, OpenModelText(options.model.model));
  ASSIGN_OR_RETURN(const std::vector<Prompt> prompts, ReadPrompts(options.input, text));
  ASSIGN_OR_RETURN(engine::SamplingParams sampling, ResolveSampling(options.sampling, text.generation));
  sampling.logprobs = options.logprobs;
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, OpenSession(options.model));
  const int sequences = std::clamp(static_cast<int>(prompts.size()), 1, options.max_sequences);
  RETURN_IF_ERROR(StartEngine(
      *session, options.model,
      {.max_sequences = sequences, .max_batch_tokens = std::max(512, sequences), .eos_ids = text.eos_ids}));
  return Generator(options, *session, text).Run(prompts, sampling);
}

}  // namespace

void AddGenerate(Verb& root, VerbRun& run) {
  auto options = std::make_shared<GenerateFlags>();
  Verb verb = root.AddVerb("generate", "Complete prompts");
  AddModelFlags(verb, options->model, /*answers=*/true);
  AddCacheFlags(verb, options->model);
  AddSpeculativeFlags(verb, options->model);
  AddSparsityFlags(verb, options->model.sparsity, {"off", "decode", "all"});
  verb.AddOption("-p,--prompt", options->input.prompts, "Text to complete; may be repeated").OneValue();
  verb.AddOption("--file", options->input.file, "File whose contents are one prompt").ExistingFile();
  AddIdsFlag(verb, options->input.ids);
  verb.AddOption(
          "--jsonl", options->input.jsonl,
          "File of JSON lines with \"prompt\", \"messages\" or \"ids\", and optionally \"id\"; -: standard "
          "input")
      .Check(CheckExistingInput);
  verb.AddFlag("--no-special{false}", options->input.add_special,
               "Do not add BOS or other special tokens to prompts");
  AddSamplingFlags(verb, options->sampling, 128);
  verb.AddOption("--format", options->format, "Output format: text, or jsonl (one object per prompt)")
      .OneOf({"text", "jsonl"})
      .ShowDefault();
  verb.AddOption("--logprobs", options->logprobs,
                 "With jsonl: include log-probabilities of the output tokens and of the K likeliest "
                 "alternatives")
      .Range(0, 1 << 20);
  verb.AddFlag("--prompt-logprobs", options->prompt_logprobs,
               "With jsonl: also include log-probabilities of the prompts' tokens");
  verb.AddFlag("--keep-special", options->keep_special, "Keep special tokens in the output text");
  verb.AddOption("--max-sequences", options->max_sequences, "Maximum number of prompts that run at once")
      .Range(1, 1 << 16)
      .ShowDefault();
  verb.AddFlag("--stats", options->stats, "Print token counts and speed to stderr at the end");
  verb.Footer(
      "Without a prompt, standard input is one. Many prompts run in one batch and are printed in their "
      "order;\n"
      "their outputs are independent of each other. The first prompt uses --seed itself, the others use "
      "seeds\n"
      "derived from it and their position. Log-probabilities are the model's own, before penalties and\n"
      "temperature.\n\n"
      "Examples:\n"
      "  moesaic generate model/ --prompt \"Once upon a time\" -n 64 --temperature 0\n"
      "  moesaic generate model.gguf --jsonl prompts.jsonl --format jsonl --logprobs 5 > answers.jsonl\n"
      "  moesaic generate model/ --ids 1,2,3 --format jsonl");
  verb.OnParsed([options, &run] {
    if (options->format != "jsonl" && (options->logprobs >= 0 || options->prompt_logprobs)) {
      FailUsage("log-probabilities need --format jsonl");
    }
    run = [options] { return RunOnRanks(options->model, [options] { return RunGenerate(*options); }); };
  });
}

}  // namespace moesaic::app
