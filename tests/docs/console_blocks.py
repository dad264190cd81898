"""Reads the ```console blocks of Markdown files, and compares the form of two outputs. Standard library only."""
import dataclasses
import json
import re
import shlex

BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Values that differ between runs and machines, and the word that stands for them.
MASKS = (
    (r"\b(chatcmpl|cmpl|resp|msg|call|fc|rs|batch|file)[-_][0-9a-zA-Z]{6,}\b", "ID"),
    (r"\b[0-9a-f]{16,}\b", "ID"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?", "TIME"),
    (r'model_name="[^"]*"', "MODEL"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    # The processor decides these.
    (r"(?<![a-z])(ref|avx2|avxvnni|avx512(bf16|vnni|f)?|amx)(?![a-z0-9])", "ISA"),
    (r"\b(buffered|direct) I/O with (io_uring|threads|pread)\b", "READS"),
    (r"(?<![\w.])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\s?([KMGT]i?B|B|[kKMGTB]|ms|us|ns|s|min|h)(/s)?(?![\w])", "#"),
    (r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#"),
    (r"#( #)+", "#"),  # 1 h 20 min
    # The machine decides these, too.
    (r"\blimited by (computing|the disk)", "limited by X"),
    (r"# free, # (is|are) missing", "# free"),
)


@dataclasses.dataclass
class Command:
    document: str  # path from the root
    line: int
    text: str  # without the "$ "
    expected: list[str]  # lines that the document shows below the command

    def __str__(self):
        return f"{self.document}:{self.line}: $ {self.text}"


def is_complete(text):
    """Whether a shell would run `text` without waiting for another line."""
    if text.endswith("\\"):
        return False
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def commands_of(markdown, document):
    """The commands of all console blocks, in order."""
    found = []
    for block in BLOCK.finditer(markdown):
        number = markdown[: block.start(1)].count("\n")
        command = None
        for line in block[1].splitlines():
            number += 1
            if command is not None and not is_complete(command.text):
                command.text += "\n" + line
            elif line.startswith("$ "):
                command = Command(document, number, line[2:], [])
                found.append(command)
            elif command is None:
                raise ValueError(f"{document}:{number}: a console block must begin with \"$ \"")
            else:
                command.expected.append(line)
    return found


# The first word of a line in a plain block that is a command, after variables of its environment.
COMMAND = re.compile(r"(\$ |(\w+=\S+ )*(\./|moesaic |mpirun |pip |python3 |curl ))")


def hidden_commands(markdown, document, data, python_is_run):
    """Places of blocks that hold commands but are no console blocks. Blocks of the languages `data` hold none; nor do plain
    blocks, unless a line looks like a command. Blocks of Python are commands unless a test runs them."""
    found, fence = [], None
    for number, line in enumerate(markdown.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)\s*(\w*)", line)
        if mark and fence is None:
            fence, language, is_found = mark[1], mark[2], False
            if language and language != "console" and language not in data and not (language == "python" and python_is_run):
                found.append(f"{document}:{number}: a block of {language}")
        elif mark and mark[1] == fence and not mark[2]:
            fence = None
        elif fence and not language and not is_found and COMMAND.match(line.strip()):
            found.append(f"{document}:{number}: {line.strip()}")
            is_found = True
    return found


def json_form(value):
    """The keys and types of a JSON value; a list has the form of its first element."""
    if isinstance(value, dict):
        return {key: json_form(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_form(item) for item in value[:1]]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number"
    return type(value).__name__


def line_form(line):
    """`line` with its values masked, its spaces and rules as one, or the form of its JSON."""
    event = re.match(r"data: (?=[{\[])", line)
    text = line[event.end():] if event else line
    if text[:1] in ("{", "["):
        try:
            return ("data: " if event else "") + json.dumps(json_form(json.loads(text)))
        except ValueError:
            pass
    for pattern, word in MASKS:
        line = re.sub(pattern, word, line)
    return re.sub(r"-{2,}", "--", re.sub(r"\s+", " ", line)).strip()


def forms(lines):
    """Forms of non-empty lines; rows of one form in a row count once."""
    result = []
    for line in lines:
        form = line_form(line)
        if form and form != (result[-1] if result else None):
            result.append(form)
    return result


def mismatch(expected, actual):
    """How the form of `actual` lines differs from `expected`, where a line "..." stands for any lines; else None."""
    parts, part = [], []
    for line in expected:
        if line.strip() == "...":
            parts.append(forms(part))
            part = []
        else:
            part.append(line)
    parts.append(forms(part))
    found = forms(actual)
    at = 0
    for i, wanted in enumerate(parts):
        last = i == len(parts) - 1
        starts = [at] if i == 0 else range(at, len(found) - len(wanted) + 1)
        if last and i > 0:
            starts = [len(found) - len(wanted)] if len(found) - len(wanted) >= at else []
        start = next((s for s in starts if found[s:s + len(wanted)] == wanted), None)
        if start is None or (last and start + len(wanted) != len(found)):
            shown = "\n".join(f"    {form}" for form in wanted)
            got = "\n".join(f"    {form}" for form in found[at:])
            return f"the document shows lines of this form:\n{shown}\n  the command printed:\n{got}"
        at = start + len(wanted)
    return None
