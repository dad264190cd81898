// Writes inputs for this room's fuzzers: text_fuzz_seeds CORPUS fills CORPUS/<fuzzer>/. Each seed is small
// and valid, so that mutations pass the first checks.
#include <string>

#include "base/test_seeds.h"

namespace {

using namespace std::string_literals;  // NOLINT: seeds hold zero bytes

constexpr const char* kTemplates[] = {
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] if m.content is string else '' "
    "}}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- for m in messages -%}{%- for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments "
    "| "
    "tojson(indent=2) }}{% if not loop.last %}, {% endif %}{%- endfor -%}{%- else -%}none{%- endfor -%}",
    "{% set ns = namespace(n=0, l=[]) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n "
    "}}",
    "{% macro m(a, b=2, *c) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}{% endmacro "
    "%}{{ m(1, 3, 4, "
    "k=5) }}",
    "{% macro m(a) %}{{ a }}{{ kwargs }}{% endmacro %}{{ m(1, k=n) }}{% call m(2) %}x{% endcall %}",
    "{{ '%05.1f|%-4d|%x|%s|%r' % (3.14159, 7, 255, n, t) }}{{ '{:>5}|{:^5}|{:+d}|{:,}|{:.2f}'.format('a', "
    "'c', 3, 1234, x) }}",
    "{{ t[::-1] }}{{ t[1:-1:2] }}{{ messages[-1:] }}{{ messages[0].get('x', 5) }}{{ (1, 2)[0] }}{{ 7 // 2 ** "
    "3 % n }}",
    "{{ 1 < 2 <= n }}{{ not t and n or none }}{{ 'a' in t }}{{ n not in [1] }}{{ t is defined }}{{ q is not "
    "none }}",
    "{% set l = [] %}{% set _ = l.append(1) %}{% set _ = l.insert(0, l | length) %}{{ l.pop() }}{{ l }}",
    "{% set d = {'a': 1, 2: [t]} %}{% set _ = d.update(b=3) %}{% for k, v in d.items() %}{{ k ~ v }}{% "
    "endfor %}",
    "{{ messages | map(attribute='role') | unique | join(', ') }}{{ [3, 1] | sort(reverse=true) | first }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | "
    "rejectattr('content') | list }}",
    "{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}{{ [1, 2, 3] | "
    "batch(2, 0) | list }}",
    "{{ t | upper | replace('A', 'b', 1) | center(9) | indent(2, true) | truncate(3) | wordwrap(2) | trim }}",
    "{{ '<a>' | e ~ '<' }}{{ t | urlencode }}{{ x | round(2, 'floor') }}{{ '0x1f' | int(0, 16) }}{{ '1e3' | "
    "float }}",
    "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{{ loop.index0 }}{% endfor "
    "%}",
    "{% for i in range(9) if i is odd %}{% if i == 5 %}{% break %}{% endif %}{% continue %}{{ loop.cycle(1, "
    "2) }}{% endfor %}",
    "{% filter upper %}a{{ t }}{% endfilter %}{% raw %}{{ x }}{% endraw %}{# c #}{% generation %}g{% "
    "endgeneration %}",
    "{% set x %}a{{ n }}{% endset %}{{ x }}{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ "
    "strftime_now('%Y-%m-%d %j') }}",
    "{% if tools %}{{ tools[0].function.parameters.properties | dictsort }}{% elif n %}b{% else %}{{ "
    "raise_exception('x') }}{% endif %}",
    "{{ t.split() }}{{ t.split(' ', 1) }}{{ t.strip('a').startswith(('a', 'b')) }}{{ t.rfind('b') }}{{ "
    "t.partition(' ') }}",
    "{{ dict(a=1) }}{{ cycler(1, 2).next() }}{{ joiner(', ')() }}{{ lipsum is defined }}{{ range(1, 9, 2) | "
    "list }}",
    "{\"chat_template\":[{\"name\":\"default\",\"template\":\"{{ bos_token "
    "}}\"},{\"name\":\"tool_use\",\"template\":"
    "\"{{ tools | length "
    "}}\"}],\"bos_token\":{\"content\":\"<s>\"},\"added_tokens_decoder\":{\"0\":{\"content\":\"<s>\"}}}",
};

std::string Json(const std::string& normalizer, const std::string& pre_tokenizer,
                 const std::string& post_processor, const std::string& decoder, const std::string& model) {
  return R"(j{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":3,"content":"<s>",)"
         R"("single_word":false,"lstrip":false,"rstrip":true,"normalized":false,"special":true}],"normalizer":)" +
         normalizer + R"(,"pre_tokenizer":)" + pre_tokenizer + R"(,"post_processor":)" + post_processor +
         R"(,"decoder":)" + decoder + R"(,"model":)" + model + "}";
}

void WriteTokenizers(const moesaic::base::SeedCorpus& corpus) {
  const auto write = [&corpus](std::string_view name, std::string_view content) {
    corpus.Write("tokenizer_fuzzer", name, content);
  };
  const std::string level =
      R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true})";
  const std::string config =
      "\0"s +
      R"({"tokenizer_class":"PreTrainedTokenizerFast","bos_token":"<s>","eos_token":{"content":"</s>"},)"
      R"("add_bos_token":true,"add_eos_token":true,"added_tokens_decoder":{"4":{"content":"</s>","special":true}}})";
  const std::string bpe =
      R"({"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":"","end_of_word_suffix":"",)"
      R"("fuse_unk":false,"byte_fallback":false,"ignore_merges":true,"vocab":{"a":0,"b":1,"ab":2,"l":5,"o":6,"lo":7},)"
      R"("merges":[["a","b"],["l","o"]]})";
  write("bpe", Json("null", level, "null", level, bpe) + config);
  const std::string split =
      R"({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{N}{1,3}|\\s+(?!\\S)|[^ ]+"},)"
      R"("behavior":"Isolated","invert":false},{"type":"Digits","individual_digits":true},{"type":"Punctuation",)"
      R"("behavior":"Contiguous"},)" +
      level + "]}";
  const std::string pair =
      R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A",)"
      R"("type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],)"
      R"("special_tokens":{"<s>":{"id":"<s>","ids":[3],"tokens":["<s>"]}}})";
  write("split", Json(R"({"type":"NFC"})", split, pair, level, bpe) + config);
  write(
      "llama",
      Json(
          R"({"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":)"
          R"({"String":" "},"content":"▁"},{"type":"Lowercase"}]})",
          "null", "null",
          R"({"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},)"
          R"({"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]})",
          R"({"type":"BPE","byte_fallback":true,"unk_token":"<unk>","vocab":{"<unk>":0,"▁":1,"<0x41>":2,"a":4},)"
          R"("merges":[]})"));
  write(
      "unigram",
      Json(
          "null", R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true})", "null",
          R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true})",
          R"({"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["▁a",-1.5],["b",-2.0],["▁",-3.0]],"byte_fallback":false})"));
  write(
      "wordpiece",
      Json(
          R"({"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,"lowercase":true})",
          R"({"type":"BertPreTokenizer"})", R"({"type":"BertProcessing","sep":["a",1],"cls":["b",2]})",
          R"({"type":"WordPiece","prefix":"##","cleanup":true})",
          R"({"type":"WordPiece","unk_token":"[UNK]","continuing_subword_prefix":"##","max_input_chars_per_word":100,)"
          R"("vocab":{"[UNK]":0,"a":1,"##b":2,"hello":4}})"));
  write("tiktoken", "tSGU= 0\nbGxv 1\nIA== 2\nSA== 3\nZQ== 4\nbA== 5\nbw== 6\n"s +
                        "\0{\"added_tokens_decoder\":{\"7\":{\"content\":\"[BOS]\",\"special\":true}},"s +
                        "\"bos_token\":\"[BOS]\"}");
  write("gguf_gpt2", "ggpt2 qwen2\n3<s>\n1a\n1b\n1ab\n1l\n1Ġ\na b\n");
  write("gguf_llama", "gllama \n2<unk>\n3<s>\n1▁\n1a\n1▁a\n6<0x41>\n4<think>\n");
  write("text", "x  Hello a ab \xf0\x9f\x99\x82 \xed\x9f\xbf日本<s></s><0x41>▁\xcc\x81");
}

}  // namespace

int main(int argc, char** argv) {
  const moesaic::base::SeedCorpus corpus(argc, argv);
  corpus.WriteAll("template_fuzzer", kTemplates);
  WriteTokenizers(corpus);
  return 0;
}
