#!/usr/bin/env python3
"""Finds words that plain technical English avoids, in comments, pages, help texts and messages.

usage: words.py ROOT [--list [PATH ...] | --lower]

Without flags it compares the uses in each room with tests/structure/words.json, which has the number of old uses. More
uses than that are faults: each new use is printed with its file, line, word, and a replacement. Exit status 1 when there
is a fault. The test structure_words runs the same comparison.

    --list [PATH ...]   print every use, of all files or of the named files and folders
    --lower             write the current numbers to words.json; refuses if the total of a word rises. Run it after uses
                        were removed, or moved to another room

Checked are comments and string literals of at least four words in C++, Rust and JavaScript (tests: comments only),
comments and docstrings in Python, comments in CMake and shell, Markdown without its code, and the names of tests, in
which a clause with what, who or which is another fault. Text that must contain a word, such as a quotation or a
protocol, is exempt on a line with "words: quoted" in a comment.
"""
import argparse
import collections
import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize

COUNTS = pathlib.Path("tests/structure/words.json")
EXEMPT = "words: quoted"

# (name, pattern, what to write instead). Patterns see one line of prose.
WORDS = [(name, re.compile(pattern, re.IGNORECASE), instead) for name, pattern, instead in (
    ("behind", r"(?<!fall )(?<!falls )(?<!fell )(?<!lag )(?<!lags )\bbehind\b(?! (a|an|the|nginx|another)? ?"
               r"(\w+ )?(proxy|proxies|nginx|load balancer|router|firewall))", "after, beyond, or a possessive"),
    ("stands", r"\b(stands?|stood)\b(?!-| (for|in for|alone|still)\b)", "is, is stored, is written"),
    ("told", r"\b(is|are|was|were|be|been|not|nobody|as) told\b|\btold (of|to|that|by|which)\b", "reported, notified"),
    ("anew", r"\banew\b", "again"),
    ("asked for", r"\b(asked|asks) for\b", "requested, read, prefetched"),
    ("of what", r"\b(of|by|to|from|with|than|in|at|for|on|beside|but) what\b(?! (if|is the)\b)(?!\?)",
     "the noun that the clause describes"),
    ("What ... (noun)", r"(^|[.:;] )(?-i:What) (?!if\b)(?![^.]*\?)[a-z']+", "a noun: \"Bytes that ...\", \"Names of ...\""),
    ("Who ... (noun)", r"(^|[.:;] )(?-i:Who(se)?) (?![^.]*\?)[a-z']+", "a noun: \"A caller that ...\", \"The thread that ...\""),
    ("goes on", r"\b(go|goes|went|gone|going) on\b(?! (in|at) the\b)", "continues, resumes"),
    ("held against", r"\b(hold|holds|held|holding)\b[^.;]{0,40}\bagainst\b", "compared with"),
    ("gone", r"\bgone\b(?! on\b)", "evicted, removed, closed, released"),
    ("is there", r"\b(is|are|was|were|be) (already |not |still )?there\b(?! (is|are|was|any|a)\b)", "exists, is present"),
    ("unless said", r"\bunless (said|told|asked|given)\b|\bwhere said\b", "by default; if NAME is set"),
    ("nobody", r"\b(nobody|somebody|anybody|everybody)\b", "no thread, no request, a caller"),
    ("of late", r"\bof late\b", "recently"),
    ("let go", r"\b(let|lets|letting) (\w+ )?go\b", "release, evict, free"),
    ("but for", r"\bbut for\b", "except"),
    ("fares", r"\b(fares?|fared)\b", "the measured quantity: is accepted, takes"),
    ("as it is", r"\bas (it|they) (stands?|lies?|lie)\b", "unchanged"),
    ("so many", r"\b(of|every|after|from|by) so many\b|\bso many (of|in)\b", "the name of the number"),
    ("in its stead", r"\bin (its|their|whose) stead\b|\bin their turn\b", "instead"),
    ("beside", r"\bbeside\b(?! (the|a) (cursor|button|field|menu)\b)", "next to, compared with, in addition to"),
    ("whatever", r"\b(whatever|whoever)\b", "any, each"),
)]

# Like WORDS, for names of tests alone. Relative clauses pass: "an engine whose ...", "a file, which ...", "a file in which ...".
NAME_WORDS = [("what, who or which (test name)",
               re.compile(r"\b(what|whatever|who|whoever|whichever)\b|(^|\b(?!(after|at|before|by|for|from|in|of|on|than|through|to"
                          r"|under|until|with)\b)\w+ )which\b", re.IGNORECASE), "the noun that the clause describes")]

SLASHES = {".h", ".cc", ".cu", ".cuh", ".c", ".rs", ".js", ".mjs", ".css"}
HASHES = {".cmake", ".sh", ".toml", ".service", ".yml", ".yaml"}
TOKEN = re.compile(
    r"""(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|R"(?P<tag>[^(\s]*)\((?P<raw>.*?)\)(?P=tag)\""""
    r"""|(?P<text>"(?:\\.|[^"\\\n])*")|(?P<char>'(?:\\.|[^'\\\n])')""", re.DOTALL)
TEST_NAME = {
    ".cc": re.compile(r"^\s*(?:TYPED_)?TEST(?:_[FP])?\(\s*\w+\s*,\s*(\w+)\s*\)", re.MULTILINE),
    ".py": re.compile(r"^\s*(?:async )?def test_(\w+)\(", re.MULTILINE),
    ".rs": re.compile(r"^\s*#\[test\](?:\s*#\[.*\])*\s*fn (\w+)", re.MULTILINE),
    ".mjs": re.compile(r"^\s*test\(\"([^\"]*)\"", re.MULTILINE),
}
HEREDOC = re.compile(r"<<'EOF'\n(.*?)\nEOF\n", re.DOTALL)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def slashed(text, is_test):
    """(line number, prose) of a source in a language with // comments."""
    found, literal = [], []

    def flush():
        # Adjacent literals are one sentence: the number of words decides over all of them.
        if len(" ".join(part for _, part in literal).split()) >= 4:
            found.extend(literal)
        literal.clear()

    end = 0
    for token in TOKEN.finditer(text):
        number = text.count("\n", 0, token.start()) + 1
        if literal and text[end:token.start()].strip():
            flush()
        if token["line"] or token["block"]:
            body = re.sub(r"^\s*(//[/!]*|/\*+|\*+/?)\s?", "", token[0].replace("*/", ""))
            for i, line in enumerate(body.split("\n")):
                found.append((number + i, re.sub(r"^\s*\*\s?", "", line)))
        elif not is_test and (token["text"] or token["raw"]) and not text[:token.start()].rstrip().endswith("#include"):
            body = token["raw"] or token["text"][1:-1]
            literal.extend((number + i, line) for i, line in enumerate(re.split(r"\\n|\n", body)))
        end = token.end()
    flush()
    return found


def python(text):
    found = []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return found
    previous = tokenize.NEWLINE
    for token in tokens:
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string.lstrip("# ")))
        elif token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL):
            found.extend((token.start[0] + i, line.strip('" ')) for i, line in enumerate(token.string.split("\n")))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            previous = token.type
    return found


def hashed(text):
    found = [(number, re.sub(r".*?(^|\s)#\s?", "", line, count=1))
             for number, line in enumerate(text.split("\n"), 1) if re.search(r"(^|\s)#[^!]", line)]
    for document in HEREDOC.finditer(text):
        first = text.count("\n", 0, document.start(1)) + 1
        found.extend((first + i, line) for i, line in enumerate(document[1].split("\n")))
    return found


def markdown(text):
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    return list(enumerate((re.sub(r"`[^`]*`", "`", line) for line in text.split("\n")), 1))


def test_names(text, suffix):
    """(line number, name in separate words) of each test of a source."""
    for test in TEST_NAME[suffix].finditer(text) if suffix in TEST_NAME else ():
        # "AGgufFile", "Answers404AtOnce" and "a_file" become "A Gguf File", "Answers 404 At Once" and "a file".
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z])(?=[0-9])|_", " ", test[1])
        yield text.count("\n", 0, test.start(1)) + 1, words


def prose(text, path):
    if path.suffix in SLASHES:
        is_test = re.search(r"_(test|bench|fuzzer)\.|(^|/)test_|^tests/", str(path)) is not None
        return slashed(text, is_test)
    if path.suffix == ".py":
        return python(text)
    if path.suffix == ".md":
        return markdown(text)
    if path.suffix in HASHES or path.name in ("CMakeLists.txt", "run"):
        return hashed(text)
    return []


def uses(root, path):
    """(line number, name of the word, replacement, line) of each use in a file."""
    if str(path).startswith("tests/structure/words"):
        return
    text = (root / path).read_text(errors="replace")
    checked = [(number, line, WORDS) for number, line in prose(text, path)]
    checked += [(number, name, WORDS + NAME_WORDS) for number, name in test_names(text, path.suffix)]
    source = None
    for number, line, words in checked:
        for name, pattern, instead in words:
            if pattern.search(line):
                source = source or text.split("\n")
                if EXEMPT not in source[number - 1]:
                    yield number, name, instead, line.strip()


def room(path):
    parts = path.parts
    return "/".join(parts[:2]) if parts[0] == "src" else parts[0] if len(parts) > 1 else "."


def tracked(root):
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True)
    if listed.returncode == 0:
        return [pathlib.Path(line) for line in listed.stdout.splitlines() if (root / line).is_file()]
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(path for path in found if not {"build", "node_modules", "target"} & set(path.parts))


def count(root):
    """{room: {word: [(path, line number, replacement, line)]}}."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in tracked(root):
        for number, name, instead, line in uses(root, path):
            found[room(path)][name].append((path, number, instead, line))
    return found


def changed_lines(root):
    """Lines that changed since words.json was last written, {path: numbers}; None without git."""
    last = subprocess.run(["git", "-C", root, "log", "-1", "--format=%H", "--", COUNTS], capture_output=True, text=True)
    if last.returncode != 0 or not last.stdout.strip():
        return None
    diff = subprocess.run(["git", "-C", root, "diff", "-U0", "--no-renames", last.stdout.strip()], capture_output=True,
                          text=True, errors="replace")
    lines, path = collections.defaultdict(set), None
    for line in diff.stdout.splitlines():
        if line.startswith("+++ "):
            path = line[6:]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, size = int(hunk[1]), int(hunk[2] or 1)
            lines[path].update(range(first, first + size))
    return lines


def faults(root):
    allowed = json.loads((root / COUNTS).read_text())
    changed = None
    for place, words in sorted(count(root).items()):
        for name, found in sorted(words.items()):
            limit = allowed.get(place, {}).get(name, 0)
            if len(found) <= limit:
                continue
            changed = changed_lines(root) or {} if changed is None else changed
            new = [use for use in found if use[1] in changed.get(str(use[0]), ())] or found
            yield (f"{place}: \"{name}\" is used {len(found)} times, {limit} are allowed. "
                   f"{'New' if len(new) < len(found) else 'All'} uses:")
            for path, number, instead, line in new:
                yield f"  {path}:{number}: \"{name}\": write {instead}, not: {line}"


def totals(counts):
    """Uses of each word in all rooms."""
    total = collections.Counter()
    for words in counts.values():
        total.update(words)
    return total


def lower(root):
    old = json.loads((root / COUNTS).read_text()) if (root / COUNTS).exists() else None
    new = {place: {name: len(found) for name, found in sorted(words.items())}
           for place, words in sorted(count(root).items())}
    before, now = totals(old or new), totals(new)
    raised = [f"\"{name}\": {before[name]} to {now[name]}" for name in now if now[name] > before[name]]
    if raised:
        sys.exit("totals may only fall: " + ", ".join(raised))
    (root / COUNTS).write_text(json.dumps(new, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--list", nargs="*", metavar="PATH")
    parser.add_argument("--lower", action="store_true")
    options = parser.parse_args()
    root = options.root.resolve()
    if options.list is not None:
        total = collections.Counter()
        for path in tracked(root):
            if not options.list or any(str(path).startswith(prefix.rstrip("/")) for prefix in options.list):
                for number, name, instead, line in uses(root, path):
                    print(f"{path}:{number}: \"{name}\": {line}")
                    total[name] += 1
        print(", ".join(f"{name} {number}" for name, number in total.most_common()), file=sys.stderr)
        return 0
    if options.lower:
        lower(root)
        return 0
    found = list(faults(root))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
