// Implements POST /v1/completions.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "server/openai_stream.h"
#include "server/prompts.h"

namespace moesaic::server {
namespace {

constexpr int kDefaultTokens = 16;  // OpenAI's default of "max_tokens"

struct CompletionShape : OpenAiShape {
  int prompts = 1, n = 1, best_of = 1;
  int logprobs = -1;  // -1: none
  bool echo = false;
  std::vector<std::vector<int32_t>> prompt_ids;
  std::vector<std::string> prompt_texts;  // with echo
};

// Builds OpenAI's four parallel lists of logprobs.
class LogprobLists {
 public:
  explicit LogprobLists(const text::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // `entry` is null for the first token of a prompt, which has no distribution.
  void Add(int32_t id, const engine::LogprobEntry* entry, int top) {
    const std::string text = TokenText(tokenizer_, id);
    tokens_.push_back(text);
    logprobs_.push_back(entry == nullptr ? Json() : Json(entry->logprob));
    Json likeliest;
    if (entry != nullptr && top > 0) {
      likeliest = Json::object();
      for (size_t i = 0; i < entry->top.size() && i < static_cast<size_t>(top); ++i) {
        likeliest[Valid(TokenText(tokenizer_, entry->top[i].token))] = entry->top[i].logprob;
      }
      if (!likeliest.contains(Valid(text))) likeliest[Valid(text)] = entry->logprob;
    }
    tops_.push_back(std::move(likeliest));
    offsets_.push_back(offset_);
    // Offsets count characters. Bytes 10xxxxxx continue a character.
    offset_ += std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
  }

  Json Take() {
    return {{"tokens", std::exchange(tokens_, Json::array())},
            {"token_logprobs", std::exchange(logprobs_, Json::array())},
            {"top_logprobs", std::exchange(tops_, Json::array())},
            {"text_offset", std::exchange(offsets_, Json::array())}};
  }

 private:
  // Keys of an object must be UTF-8, since Dump would make different keys equal.
  static std::string Valid(const std::string& text) {
    return Json::parse(Dump(Json(text))).get<std::string>();
  }

  const text::Tokenizer& tokenizer_;
  Json tokens_ = Json::array(), logprobs_ = Json::array(), tops_ = Json::array(), offsets_ = Json::array();
  int64_t offset_ = 0;
};

class CompletionWhole : public AnswerSink {
 public:
  CompletionWhole(CompletionShape shape, const text::Tokenizer& tokenizer,
                  std::shared_ptr<ResponseWriter> writer)
      : shape_(std::move(shape)),
        tokenizer_(tokenizer),
        writer_(std::move(writer)),
        choices_(static_cast<size_t>(shape_.prompts) * shape_.best_of) {}

  void Delta(ChoiceDelta delta, const Usage&) override {
    AnsweredChoice& choice = choices_[delta.choice];
    choice.Add(std::move(delta));
  }
  void Failed(const ApiError& error) override { writer_->Send(ErrorResponse(error, ApiStyle::kOpenAi)); }

  void Done(const Usage& usage) override {
    Json list = Json::array();
    for (int prompt = 0; prompt < shape_.prompts; ++prompt) {
      for (const int choice : Best(prompt))
        list.push_back(ChoiceJson(static_cast<int>(list.size()), prompt, choice));
    }
    Json answer = AnswerHead(shape_, "text_completion");
    answer["choices"] = std::move(list);
    answer["usage"] = UsageJson(usage);
    answer["system_fingerprint"] = nullptr;
    SendJson(*writer_, answer);
  }

 private:
  // Selects the n likeliest of best_of choices by the mean logprob of their tokens.
  std::vector<int> Best(int prompt) const {
    std::vector<int> order(shape_.best_of);
    std::iota(order.begin(), order.end(), prompt * shape_.best_of);
    if (shape_.best_of == shape_.n) return order;
    const auto mean = [this](int index) {
      const auto& tokens = choices_[index].tokens;
      double sum = 0;
      for (const GeneratedToken& token : tokens) sum += token.logprobs.logprob;
      return tokens.empty() ? 0.0 : sum / static_cast<double>(tokens.size());
    };
    std::stable_sort(order.begin(), order.end(), [&mean](int a, int b) { return mean(a) > mean(b); });
    order.resize(shape_.n);
    return order;
  }

  Json ChoiceJson(int index, int prompt, int number) const {
    const AnsweredChoice& choice = choices_[number];
    const std::vector<int32_t>& ids = shape_.prompt_ids[prompt];
    Json json = {{"index", index},
                 {"text", (shape_.echo ? shape_.prompt_texts[prompt] : "") + choice.content}};
    if (shape_.logprobs >= 0) {
      LogprobLists lists(tokenizer_);
      for (size_t i = 0; shape_.echo && i < ids.size(); ++i) {
        const bool known = i > 0 && i - 1 < choice.prompt_logprobs.size();
        lists.Add(ids[i], known ? &choice.prompt_logprobs[i - 1] : nullptr, shape_.logprobs);
      }
      for (const GeneratedToken& token : choice.tokens) lists.Add(token.id, &token.logprobs, shape_.logprobs);
      json["logprobs"] = lists.Take();
    } else {
      json["logprobs"] = nullptr;
    }
    json["finish_reason"] = choice.finish_reason;
    json["stop_reason"] = StopReasonJson(choice.stop_cause);
    if (shape_.ids) {
      json["prompt_token_ids"] = ids;
      json["token_ids"] = TokenIds(choice.tokens);
    }
    return json;
  }

  const CompletionShape shape_;
  const text::Tokenizer& tokenizer_;
  const std::shared_ptr<ResponseWriter> writer_;
  std::vector<AnsweredChoice> choices_;
};

class CompletionStream : public OpenAiStream {
 public:
  CompletionStream(CompletionShape shape, const text::Tokenizer& tokenizer,
                   std::shared_ptr<ResponseWriter> writer)
      : OpenAiStream(shape_, "text_completion", std::move(writer)),
        shape_(std::move(shape)),
        lists_(static_cast<size_t>(shape_.prompts) * shape_.n, LogprobLists(tokenizer)),
        begun_(lists_.size()) {}

  void Delta(ChoiceDelta delta, const Usage& so_far) override {
    const int prompt = delta.choice / shape_.n;
    const bool first = !begun_[delta.choice];
    begun_[delta.choice] = true;
    std::string text = std::move(delta.content);
    if (first && shape_.echo) text = shape_.prompt_texts[prompt] + text;
    Json choice = {{"index", delta.choice}, {"text", std::move(text)}};
    choice["logprobs"] = shape_.logprobs < 0 ? Json() : Lists(delta, prompt, first);
    choice["finish_reason"] = delta.finish_reason.empty() ? Json() : Json(delta.finish_reason);
    if (!delta.finish_reason.empty()) choice["stop_reason"] = StopReasonJson(delta.stop_cause);
    if (shape_.ids) {
      if (first) choice["prompt_token_ids"] = shape_.prompt_ids[prompt];
      choice["token_ids"] = TokenIds(delta.tokens);
    }
    SendChunk(std::move(choice), so_far, Json());
  }

 private:
  Json Lists(const ChoiceDelta& delta, int prompt, bool first) {
    LogprobLists& lists = lists_[delta.choice];
    const std::vector<int32_t>& ids = shape_.prompt_ids[prompt];
    for (size_t i = 0; first && shape_.echo && i < ids.size(); ++i) {
      const bool known = i > 0 && i - 1 < delta.prompt_logprobs.size();
      lists.Add(ids[i], known ? &delta.prompt_logprobs[i - 1] : nullptr, shape_.logprobs);
    }
    for (const GeneratedToken& token : delta.tokens) lists.Add(token.id, &token.logprobs, shape_.logprobs);
    return lists.Take();
  }

  const CompletionShape shape_;
  std::vector<LogprobLists> lists_;
  std::vector<bool> begun_;
};

}  // namespace

Status Completions(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  GenerationFields fields = ReadGeneration(body, context.model);
  CompletionShape shape;
  bool special = true;
  body.Int("best_of", 1, kMaxChoices, &fields.best_of);
  if (body.ok() && fields.best_of < fields.n) {
    body.Fail("best_of", "invalid_value",
              fmt::format("Invalid 'best_of': at least 'n', found {}", fields.best_of));
  }
  if (body.ok() && fields.stream && fields.best_of > fields.n) {
    body.Fail("best_of", "invalid_value",
              "Invalid 'best_of': the best choices cannot be streamed, since all must end first");
  }
  body.Int("logprobs", 0, kMaxLogprobs, &shape.logprobs);
  body.Bool("echo", &shape.echo);
  body.Bool("add_special_tokens", &special);
  if (body.Has("suffix"))
    body.Fail("suffix", "invalid_value", "'suffix' is not offered: the model does not fill in");
  const std::optional<GrammarText> grammar = ReadStructured(body);
  const Json* prompt = body.Any("prompt");
  if (body.ok() && prompt == nullptr) {
    body.Fail("prompt", "missing_required_parameter", "Missing required parameter: 'prompt'.");
  }
  RETURN_IF_ERROR(body.status());

  GenerationSpec spec;
  RETURN_IF_ERROR(SetCommon(call, fields, grammar, &spec));
  ASSIGN_OR_RETURN(spec.prompts, ReadPrompts(context.model, *prompt, "prompt", special));
  for (const auto& ids : spec.prompts) {
    ASSIGN_OR_RETURN(const int budget,
                     OutputBudget(context.model, ids.size(), fields.max_tokens, kDefaultTokens, "prompt"));
    spec.budgets.push_back(budget);
    if (shape.echo) {
      ASSIGN_OR_RETURN(std::string text, context.model.tokenizer.Decode(ids, /*skip_special=*/true));
      shape.prompt_texts.push_back(std::move(text));
    }
  }
  shape.id = NewId("cmpl-");
  shape.model = context.model.names.front();
  shape.prompts = static_cast<int>(spec.prompts.size());
  shape.n = fields.n;
  shape.best_of = fields.best_of;
  shape.usage = fields.stream_usage;
  shape.continuous = fields.stream_usage_continuous;
  shape.ids = fields.return_token_ids;
  shape.prompt_ids = spec.prompts;

  spec.id = shape.id;
  spec.n = fields.best_of;
  spec.sampling.logprobs = shape.best_of > shape.n ? std::max(shape.logprobs, 0) : shape.logprobs;
  spec.prompt_logprobs = shape.echo && shape.logprobs >= 0;
  return StartAnswer<CompletionWhole, CompletionStream>(context, call, fields.stream, std::move(spec),
                                                        std::move(shape));
}

}  // namespace moesaic::server
