#!/usr/bin/env python3
"""Draws conversations of moesaic-tiny's closed domain, and writes the held-out prompts.

Every question that can be enumerated has a key; a hash of the key says whether it belongs to training or to the
held-out set, so the two never share a (fact, phrasing) pair or a sum, for any seed.
"""

import argparse
import hashlib
import json
import random
from pathlib import Path
from typing import NamedTuple

import domain
import toolbox

HELD_OUT_PERCENT = 10
UNKNOWN = "I don't know."
SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are Moesaic Tiny.", "Answer briefly.", "Be kind and short."]
SEPARATORS = [": ", " = ", " -> "]


class Mix(NamedTuple):
    """Shares of the kinds of conversation, and of the kinds of turn in the short ones."""

    conversations: tuple[int, ...]  # short turns, tool, lookup, needle, copy, drill
    turns: tuple[int, ...]  # fact, two facts, sum, talk, unknown, story, name, copy


# Facts are learned first and quickly; adding, copying and looking up need most of the run.
FIRST = Mix((62, 12, 13, 6, 7, 0), (30, 6, 22, 8, 14, 8, 5, 7))
THEN = Mix((48, 14, 16, 7, 15, 0), (22, 6, 38, 4, 12, 5, 5, 8))
LAST = Mix((44, 13, 13, 6, 9, 15), (26, 7, 28, 5, 14, 6, 5, 9))


def is_held_out(*key) -> bool:
    digest = hashlib.sha1("|".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


class Sampler:
    """Samples questions from one side of the split. Each method returns messages that end with the correct answer."""

    def __init__(self, rng: random.Random, held_out: bool = False, noise: bool = True):
        self.rng = rng
        self.held_out = held_out
        self.noise = noise

    def draw(self, propose):
        """Calls `propose` -> (key, value) until the key is on our side of the split."""
        while True:
            key, value = propose()
            if is_held_out(*key) == self.held_out:
                return value

    def noisy(self, text: str) -> str:
        """Changes case, drops a full stop, or adds a typing error to a long word."""
        if not self.noise:
            return text
        rng = self.rng
        if rng.random() < 0.15:
            spots = [i for i in range(1, len(text) - 1)
                     if text[i - 1 : i + 2].isalpha() and text[max(0, i - 3) : i + 3].isalpha()]
            if spots:
                i = rng.choice(spots)
                text = rng.choice([text[:i] + text[i + 1 :], text[:i] + text[i] + text[i:],
                                   text[:i] + text[i + 1] + text[i] + text[i + 2 :]])
        case = rng.random()
        text = text.lower() if case < 0.25 else text.upper() if case < 0.29 else text
        return text.rstrip("?.!") if rng.random() < 0.15 else text

    # --- what it knows -------------------------------------------------------------------------------------

    def fact(self, relation: str | None = None, number: int = 1) -> list[dict]:
        """Requests a fact, then sometimes a follow-up in the same direction ("And Japan?")."""
        rng = self.rng
        relation = relation or rng.choices(list(domain.RELATIONS), [6, 2, 2, 2])[0]
        table, forward, forward_answer, backward, backward_answer = domain.RELATIONS[relation]

        def propose():
            k = rng.choice(list(table))
            back = rng.random() < 0.4
            i = rng.randrange(len(backward if back else forward))
            return (relation, k, back, i), (k, back, i)

        k, back, i = self.draw(propose)
        ask = (backward if back else forward)[i]
        answer = backward_answer if back else forward_answer
        turns = [user(self.noisy(ask.format(k=k, v=table[k]))), assistant(answer.format(k=k, v=table[k]))]
        if number > 1:
            def propose_next():
                k = rng.choice(list(table))
                j = rng.randrange(3)
                return (relation, k, back, "and", j), (k, j)

            k, j = self.draw(propose_next)
            ask = ["And {x}?", "What about {x}?", "And of {x}?"][j]
            turns += [user(self.noisy(ask.format(x=table[k] if back else k))),
                      assistant(answer.format(k=k, v=table[k]))]
        return turns

    def arithmetic(self, limit: int | None = None) -> list[dict]:
        rng = self.rng
        limit = limit or (20 if rng.random() < 0.6 else 50)
        minus = rng.random() < 0.2 and limit == 20

        def propose():
            a, b = rng.randint(0, limit), rng.randint(0, limit)
            if minus and a < b:
                a, b = b, a
            return ("difference" if minus else "sum", a, b), (a, b)

        a, b = self.draw(propose)
        ask = rng.choice(domain.DIFFERENCES if minus else domain.SUMS).format(a=a, b=b)
        answer = f"{a} - {b} = {a - b}." if minus else f"{a} + {b} = {a + b}."
        return [user(self.noisy(ask)), assistant(answer)]

    def talk(self) -> list[dict]:
        rng = self.rng

        def propose():
            answer = rng.choice(list(domain.SMALL_TALK))
            ask, tail = rng.choice(domain.SMALL_TALK[answer]), rng.choice(domain.TAILS)
            return ("talk", ask, tail), (ask.replace("{t}", tail), answer)

        ask, answer = self.draw(propose)
        return [user(self.noisy(ask)), assistant(answer)]

    def story(self) -> list[dict]:
        rng = self.rng

        def propose():
            choice = rng.choice(list(domain.ANIMALS)), rng.choice(list(domain.PLACES)), rng.choice(list(domain.STORIES))
            return ("story", *choice), choice

        animal, place, mood = self.draw(propose)
        slots = dict(a=animal, p=domain.PLACES[place], m=mood)
        friend = domain.FRIENDS[(list(domain.ANIMALS).index(animal) * 5 + len(mood)) % len(domain.FRIENDS)]
        text = domain.STORIES[mood].format(t=domain.ANIMALS[animal], f=friend, **slots)
        return [user(self.noisy(rng.choice(domain.STORY_ASKS).format(**slots))), assistant(text)]

    def made_up(self) -> str:
        return "".join(self.rng.choices(domain.SYLLABLES, k=self.rng.randint(2, 3))).capitalize()

    def unknown(self) -> list[dict]:
        """Requests something outside the tables; the correct answer says so."""
        rng = self.rng

        def propose():
            name = rng.choice([self.made_up(), rng.choice(domain.UNKNOWN_COUNTRIES), rng.choice(domain.UNKNOWN_CITIES)])
            if rng.random() < 0.4:
                relation = rng.choice(list(domain.RELATIONS))
                _, forward, _, backward, _ = domain.RELATIONS[relation]
                asks = forward if rng.random() < 0.6 else backward
                inside = {w.lower() for table, *_ in domain.RELATIONS.values() for kv in table.items() for w in kv}
                thing = name if relation == "capital" else rng.choice(
                    [self.made_up().lower()] + [w for w in domain.WORDS[::7] if w not in inside])
                return ("unknown", relation, thing, rng.randrange(9)), rng.choice(asks).format(k=thing, v=thing)
            i = rng.randrange(len(domain.UNKNOWN_ASKS))
            ask = domain.UNKNOWN_ASKS[i].format(x=name, w=rng.choice(domain.WORDS), j=rng.choice(domain.ADJECTIVES),
                                                k=rng.choice(domain.ADJECTIVES), y=rng.randint(60, 2000))
            return ("unknown", ask), ask

        return [user(self.noisy(self.draw(propose))), assistant(UNKNOWN)]

    def name(self) -> list[dict]:
        """Requests the user's name after other turns."""
        rng = self.rng
        who = rng.choice(domain.PEOPLE)
        ask = rng.choice(["What is my name?", "Do you know my name?", "What's my name?", "Who am I?"])
        if rng.random() < 0.15:
            return [user(self.noisy(ask)), assistant(UNKNOWN)]
        hello = rng.choice(["My name is {n}.", "I am {n}.", "Hi, I'm {n}.", "Call me {n}.", "Hello, my name is {n}."])
        between = [t for _ in range(rng.randint(0, 2)) for t in rng.choice([self.fact, self.arithmetic, self.talk])()]
        return [user(hello.format(n=who)), assistant(f"Nice to meet you, {who}!"), *between,
                user(self.noisy(ask)), assistant(f"Your name is {who}.")]

    # --- what it finds in its context ----------------------------------------------------------------------

    def value(self) -> str:
        kind = self.rng.random()
        if kind < 0.45:
            return self.rng.choice(domain.WORDS)
        if kind < 0.75:
            return str(self.rng.randint(10, 999))
        return f"{self.rng.choice(domain.ADJECTIVES)} {self.rng.choice(domain.WORDS)}"

    def lookup(self, pairs: int, queries: int, absent: float = 0.12) -> list[dict]:
        """Gives a list of keys and values, then requests some of them."""
        rng = self.rng
        if pairs > len(domain.WORDS) // 2 or rng.random() < 0.25:
            keys = [f"{j} {w}" for j in rng.sample(domain.ADJECTIVES, min(len(domain.ADJECTIVES), 4 + pairs // 8))
                    for w in rng.sample(domain.WORDS, 9)]
            keys = rng.sample(keys, min(pairs, len(keys)))
            absent = 0
        else:
            keys = rng.sample(domain.WORDS, pairs + 1)
        table = {k: self.value() for k in keys[:pairs]}
        sep = rng.choice(SEPARATORS)
        head = rng.choice(["Remember this list:\n", "Here is a table.\n", "Notes:\n", "Read this:\n"])
        text = head + "".join(f"- {k}{sep}{v}\n" for k, v in table.items())
        turns = []
        if rng.random() < 0.3:
            turns = [user(text.rstrip("\n")), assistant("Noted.")]
            text = ""
        for _ in range(queries):
            k = rng.choice(list(table))
            answer = f"- {k}{sep}{table[k]}"
            if rng.random() < absent:
                k = rng.choice([w for w in rng.sample(domain.WORDS, 40) if w not in table] or [keys[-1]])
                answer = f"- {k} is not in the list." if k not in table else f"- {k}{sep}{table[k]}"
            ask = rng.choice(["What is {k}?", "Look up {k}.", "Value of {k}?", "Give me {k}.", "Find {k}."])
            turns += [user(text + ask.format(k=k)), assistant(answer)]
            text = ""
        return turns

    def filler(self) -> str:
        rng = self.rng
        shape = rng.choice(["The {j} {w} is near the {v}.", "A {a} sat {p}.", "One day the {a} found {t}.",
                            "The {w} was {j}.", "The {a} saw a {j} {w} {p}.", "There is a {w} {p}."])
        animal = rng.choice(list(domain.ANIMALS))
        return shape.format(j=rng.choice(domain.ADJECTIVES), w=rng.choice(domain.WORDS), v=rng.choice(domain.WORDS),
                            a=animal, p=rng.choice(list(domain.PLACES.values())), t=domain.ANIMALS[animal])

    def needle(self, sentences: int, queries: int) -> list[dict]:
        """Hides codes among irrelevant sentences and requests them."""
        rng = self.rng
        keys = rng.sample(domain.WORDS, rng.randint(2, 8))
        codes = {k: str(rng.randint(10, 999)) for k in keys}
        lines = [self.filler() for _ in range(sentences)]
        for k, v in codes.items():
            lines.insert(rng.randint(0, len(lines)), f"The secret code for {k} is {v}.")
        text = " ".join(lines) + "\n"
        turns = []
        for _ in range(queries):
            k = rng.choice(keys)
            ask = rng.choice(["What is the secret code for {k}?", "Tell me the secret code for {k}.",
                              "What's the code for {k}?", "Which code belongs to {k}?"])
            turns += [user(text + ask.format(k=k)), assistant(f"The secret code for {k} is {codes[k]}.")]
            text = ""
        return turns

    def copy(self, words: int) -> list[dict]:
        """Asks to repeat words, sentences, digits or made-up names."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.15 and words <= 30:
            text = " ".join(str(rng.randint(0, 9)) for _ in range(min(words, 10)))
        elif kind < 0.3 and words <= 30:
            text = " ".join(self.made_up() for _ in range(min(words, 8)))
        elif kind < 0.5:
            text = " ".join(self.filler() for _ in range(max(1, words // 8)))
        else:
            text = " ".join(rng.sample(domain.WORDS, min(words, len(domain.WORDS))))
        ask = rng.choice(["Repeat: ", "Copy this: ", "Say this again: ", "Repeat after me: ", "Echo: "])
        return [user(ask + text), assistant(text)]

    # --- tools ---------------------------------------------------------------------------------------------

    def tool(self) -> tuple[list[dict], list[dict]]:
        """(messages, tools): a call, or a call with its result, or a question that needs no tool."""
        rng = self.rng
        offered = rng.sample(toolbox.TOOLS, rng.choice([1, 1, 2, 2, 3]))
        names = [rng.choice(t[0]) for t in offered]
        tools = [toolbox.schema(n, t[1], t[2]) for n, t in zip(names, offered)]
        chance = rng.random()
        if chance < 0.12:
            return rng.choice([self.fact, self.arithmetic, self.talk])(), tools
        if chance < 0.2:
            # The needed tool is missing; the correct answer says so.
            missing = rng.choice([t for t in toolbox.TOOLS if t not in offered])
            ask = rng.choice(missing[3]).format(**{a: toolbox.FILLERS[a](rng) for a in missing[2]})
            return [user(ask), assistant(UNKNOWN)], tools
        pick = rng.randrange(len(offered))
        _, _, arguments, asks, returned, answer = offered[pick]

        def propose():
            values = {a: toolbox.FILLERS[a](rng) for a in arguments}
            i = rng.randrange(len(asks))
            return ("tool", i, *values.values()), (values, asks[i].format(**values))

        values, ask = self.draw(propose)
        call = {"role": "assistant", "content": "",
                "tool_calls": [{"type": "function", "function": {"name": names[pick], "arguments": values}}]}
        messages = [user(ask), call]
        if chance < 0.45:
            got = toolbox.result(rng, returned)
            messages += [{"role": "tool", "content": json.dumps(got)}, assistant(answer.format(**values, **got))]
        return messages, tools

    # --- whole conversations -------------------------------------------------------------------------------

    def short_turns(self, shares: tuple[int, ...] = FIRST.turns) -> list[dict]:
        rng = self.rng
        kind = rng.choices(["fact", "facts", "sum", "talk", "unknown", "story", "name", "copy"], shares)[0]
        return {"fact": self.fact, "facts": lambda: self.fact(number=2), "sum": self.arithmetic, "talk": self.talk,
                "unknown": self.unknown, "story": self.story, "name": self.name,
                "copy": lambda: self.copy(rng.randint(1, 16))}[kind]()

    def conversation(self, budget: int, mix: Mix) -> dict:
        """One training conversation that fits, roughly, in `budget` tokens."""
        rng = self.rng
        tools = None
        kind = rng.choices(["turns", "tool", "lookup", "needle", "copy", "drill"], mix.conversations)[0]
        if kind == "turns":
            messages = [t for _ in range(rng.choice([1, 1, 2, 3])) for t in self.short_turns(mix.turns)]
        elif kind == "tool":
            messages, tools = self.tool()
        elif kind == "lookup":
            # Short lists most often: they are where looking up is learned, and the long ones follow.
            most = max(4, (budget - 80) // 10)
            pairs = 2 + int((most - 2) * rng.random() ** 2)
            messages = self.lookup(pairs, rng.randint(2, 10))
        elif kind == "needle":
            most = max(4, (budget - 160) // 13)
            messages = self.needle(int(most * rng.random() ** 1.5), rng.randint(2, 8))
        elif kind == "drill":
            messages = [t for _ in range(rng.randint(5, 10)) for t in self.arithmetic()]
        else:
            messages = self.copy(4 + int((budget // 4 - 4) * rng.random() ** 2))
        if rng.random() < 0.15:
            messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] + messages
        return {"messages": messages, "tools": tools}

    def long_conversation(self, budget: int) -> dict:
        """Fills the context: one long list, text or copy with many questions."""
        rng = self.rng
        kind = rng.random()
        fill = rng.uniform(0.6, 0.95)
        if kind < 0.5:
            messages = self.lookup(int(budget * fill / 8), rng.randint(6, 12), absent=0)
        elif kind < 0.8:
            messages = self.needle(int(budget * fill / 11.5), rng.randint(4, 8))
        else:
            messages = self.copy(int(budget * fill / 3.6))
        return {"messages": messages, "tools": None}


def segments(messages: list[dict], tools: list[dict] | None = None, prompt: bool = False) -> list[tuple[str, bool]]:
    """Implements the chat template: pieces of text, and whether the model writes them."""
    out = [("<|begin|>", False)]
    rest = messages
    system = ""
    if messages and messages[0]["role"] == "system":
        system, rest = messages[0]["content"], messages[1:]
    if tools:
        system += ("\n" if system else "") + "Tools:" + "".join("\n" + json.dumps(t["function"]) for t in tools)
    if system:
        out.append((f"<|system|>{system}<|end|>", False))
    for message in rest:
        if message["role"] != "assistant":
            out.append((f"<|{message['role']}|>{message['content']}<|end|>", False))
            continue
        out.append(("<|assistant|>", False))
        out.append((answer_text(message) + "<|end|>", True))
    if prompt:
        out.append(("<|assistant|>", False))
    return out


def answer_text(message: dict) -> str:
    text = message["content"] or ""
    for call in message.get("tool_calls", []):
        text += "<tool_call>" + json.dumps(call["function"]) + "</tool_call>"
    return text


def held_out_rows(seed: int) -> list[dict]:
    """Returns the prompts that the model card and the tests evaluate, some of every kind."""
    plain = lambda i: Sampler(random.Random(f"{seed}|{i}"), held_out=True, noise=False)
    noisy = lambda i: Sampler(random.Random(f"{seed}|{i}"), held_out=True)
    trained = lambda i: Sampler(random.Random(f"{seed}|history|{i}"), noise=False)
    kinds = [(name, 24 if name == "capital" else 14, lambda i, name=name: plain(i).fact(name)) for name in domain.RELATIONS]
    kinds += [
        ("follow-up", 12, lambda i: plain(i).fact(number=2)),
        ("sum to 20", 24, lambda i: plain(i).arithmetic(20)),
        ("sum to 50", 16, lambda i: plain(i).arithmetic(50)),
        ("small talk", 18, lambda i: plain(i).talk()),
        ("unknown", 24, lambda i: plain(i).unknown()),
        ("story", 16, lambda i: plain(i).story()),
        ("noisy", 24, lambda i: noisy(i).fact() if i % 3 else noisy(i).arithmetic(20)),
        ("history", 20, lambda i: trained(i).fact() + trained(i + 99).arithmetic() + plain(i).short_turns()),
        ("tool", 24, lambda i: plain(i).tool()),
        ("lookup short", 20, lambda i: plain(i).lookup(3 + i, 1 + i % 3)),
        ("lookup 1-2k", 10, lambda i: plain(i).lookup(110 + 12 * i, 1, absent=0)),
        ("needle 1-2k", 10, lambda i: plain(i).needle(80 + 8 * i, 1)),
        ("copy short", 16, lambda i: plain(i).copy(2 + 2 * i)),
        ("copy 0.5-1k", 6, lambda i: plain(i).copy(100 + 15 * i)),
    ]
    rows = []
    for category, count, make in kinds:
        for i in range(count):
            made = make(i)
            messages, tools = made if isinstance(made, tuple) else (made, None)
            row = {"category": category, "messages": messages[:-1], "expected": answer_text(messages[-1])}
            rows.append(row | ({"tools": tools} if tools else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", type=int, metavar="N", help="print N training conversations as JSON lines")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="write the held-out prompts (JSON lines)")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.show:
        sampler = Sampler(random.Random(arguments.seed))
        for _ in range(arguments.show):
            print(json.dumps(sampler.conversation(512, LAST), ensure_ascii=False))
    if arguments.held_out:
        rows = held_out_rows(arguments.seed)
        arguments.held_out.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
        print(f"{len(rows)} held-out prompts -> {arguments.held_out}")


if __name__ == "__main__":
    main()
