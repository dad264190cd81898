"""Documents of a made-up language in which something must be recalled from far back, as tokens and as text.

A document is filler sentences (each document has favourite nouns), statements, and statements made again, then questions:

- name: "here lives KEY VALUE." among as many of its kind as wanted; the question names the key.
- met: three statements "KEY met VALUE." about one key, anywhere; the answer says all three again, in any order.
- seen: "we saw VALUE." many times; the answer is the value seen most often, which only counting tells.

After RULER's (arXiv 2404.06654) needle, multi-key and multi-value retrieval, and frequent words.
"""

import random
from dataclasses import dataclass, field

FUNCTION = "the here lives who is did meet met we saw was seen most near".split()
ADJECTIVES = ("big small old new red blue green dark bright cold warm quiet loud slow quick soft hard round tall short "
              "wild calm pale thin").split()
NOUNS = ("dog cat horse bird fish tree stone river hill road house door window lamp table chair boat wagon field "
         "garden king queen child farmer baker sailor miller hunter fox wolf bear owl goose sheep goat cow mouse "
         "bridge tower mill forge barn well gate wall path pond").split()
VERBS = "sees finds likes follows leaves paints guards carries moves hears meets wants knows builds draws holds".split()
PLACES = "forest lake harbour market village castle valley shore meadow island mountain desert church school".split()
ROLES = ["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
MARKS = [".", "?"]
MET = 3  # by a key


def made_up(count: int) -> list[str]:
    """Words of two syllables, always the same ones."""
    syllables = [c + v for c in "bdfgjklmnprstvz" for v in "aeiou"]
    words = [a + b for a in syllables for b in syllables]
    random.Random(7).shuffle(words)
    taken = {*FUNCTION, *ADJECTIVES, *NOUNS, *VERBS, *PLACES}
    return [w for w in words if w not in taken][:count]


KEYS, VALUES = made_up(768)[:512], made_up(768)[512:]
WORDS = FUNCTION + ADJECTIVES + NOUNS + VERBS + PLACES + KEYS + VALUES

PLAIN, ANSWER, REPEATED, NAME, MANY, SEEN = range(6)  # kinds of tokens for the loss


def text_of(tokens: list[str]) -> str:
    """Joins tokens; words are preceded by a space, marks and roles are not."""
    return "".join(t if t in MARKS or t in ROLES else " " + t for t in tokens)


def said_met(key: str, values: list[str]) -> str:
    return ". ".join(f"{key} met {value}" for value in values)


@dataclass
class Document:
    """State of a document under construction, and the questions that it can answer."""
    rng: random.Random
    tokens: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    met: dict[str, list[str]] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    also: dict[int, list[str]] = field(default_factory=dict)  # by index in `tokens`: other correct words

    def __post_init__(self):
        rng = self.rng
        self.nouns = rng.sample(NOUNS, 12)
        self.places = rng.sample(PLACES, 4)
        self.keys = rng.sample(KEYS, len(KEYS))  # those not used yet
        self.most, *self.others = rng.sample(VALUES, 9)
        self.share = rng.uniform(0.3, 0.5)

    def say(self, words: str, kind=PLAIN, at=()):
        """Appends words; those at the indices `at` are of that kind."""
        new = words.replace(".", " .").replace("?", " ?").split()
        kinds = [PLAIN] * len(new)
        for place in at:
            kinds[place] = kind
        self.tokens += new
        self.kinds += kinds

    def filler(self):
        rng = self.rng
        self.say(f"the {rng.choice(ADJECTIVES)} {rng.choice(self.nouns)} {rng.choice(VERBS)} the "
                 f"{rng.choice(self.nouns)} near the {rng.choice(self.places)}.")

    def name(self, key=None, value=None):
        key = key or self.keys.pop()
        self.names[key] = value or self.rng.choice(VALUES)
        self.say(f"here lives {key} {self.names[key]}.")

    def again(self):
        key = self.rng.choice(list(self.names))
        self.say(f"here lives {key} {self.names[key]}.", REPEATED, at=[3])

    def meet(self, key, value):
        self.met.setdefault(key, []).append(value)
        self.say(f"{key} met {value}.")

    def see(self, value=None):
        value = value or (self.most if self.rng.random() < self.share else self.rng.choice(self.others))
        self.seen[value] = self.seen.get(value, 0) + 1
        self.say(f"we saw {value}.")

    def ask(self, question: str, answer: str, kind: int, at):
        """Appends a turn: the question, and the answer whose words at the indices `at` must be recalled."""
        self.say(f"{question}?")
        self.tokens += ["<|end|>", "<|assistant|>"]
        self.kinds += [PLAIN, PLAIN]
        start = len(self.tokens)
        self.say(f"{answer}.", kind, at)
        self.tokens.append("<|end|>")
        self.kinds.append(PLAIN)
        for i in range(start, len(self.tokens)):
            self.kinds[i] = self.kinds[i] or ANSWER

    def ask_name(self, key=None):
        key = key or self.rng.choice(list(self.names))
        self.ask(f"who is {key}", f"here lives {key} {self.names[key]}", NAME, [3])

    def ask_met(self, key=None):
        key = key or self.rng.choice(list(self.met))
        values, places = self.rng.sample(self.met[key], MET), [2, 6, 10]
        self.ask(f"who did {key} meet", said_met(key, values), MANY, places)
        start = len(self.tokens) - 2 - places[-1] - 1  # before the answer's mark and end
        self.also |= {start + place: values[i + 1:] for i, place in enumerate(places)}

    def ask_seen(self):
        self.ask("who was seen most", f"we saw {max(self.seen, key=self.seen.get)} most", SEEN, [2])

    def open(self):
        self.tokens += ["<|begin|>", "<|user|>"]
        self.kinds += [PLAIN, PLAIN]

    def turn(self):
        self.tokens.append("<|user|>")
        self.kinds.append(PLAIN)


def training_row(rng: random.Random, length: int, names_only=False, crowded=False) -> Document:
    """A document and questions about it that fill `length` tokens and no less.

    `crowded`: statements about up to 12 keys that met someone, more questions, and each about another key while there
    are such.
    """
    made = Document(rng)
    made.open()
    rooms = [200, 600, 1500] if crowded else [50, 200, 600]
    asked = length // 4 if names_only else min(length // 2, rng.choice(rooms))  # tokens left for questions
    share = rng.choice([0.02, 0.1, 0.3, 0.9]) if length > 512 else rng.choice([0.4, 0.9])
    repeats, sights = rng.uniform(0, 0.6), rng.choice([0, 0, 0.15])
    if names_only:
        share, repeats, sights = 0.95, 0.6, 0
    giving = 0 if names_only else rng.choice([0, 3, 6, 12] if crowded and length > 512 else [1, 3, 5] if crowded else [0, 1, 2])
    givers = {key: rng.sample(VALUES, MET) for key in (made.keys.pop() for _ in range(giving))}
    presents = [(key, value) for key, values in givers.items() for value in values]
    rng.shuffle(presents)
    sentences = max((length - asked) // 6, 1)
    places = sorted(rng.randrange(sentences) for _ in presents)
    limit = min(400, max(2, length // 20))
    made.name()
    for i in range(sentences):
        while places and places[0] <= i:
            places.pop(0)
            made.meet(*presents.pop())
        if len(made.tokens) > length - asked:
            break
        draw = rng.random()
        if draw < sights:
            made.see()
        elif draw < sights + share * (1 - sights):
            if len(made.names) < limit and (len(made.names) < 3 or rng.random() > repeats):
                made.name()
            else:
                made.again()
        else:
            made.filler()
    for present in presents:
        made.meet(*present)
    asks = [made.ask_name] * 2
    asks += [made.ask_met] * 3 * bool(made.met) + [made.ask_seen] * (len(made.seen) > 8)
    fresh = {made.ask_name: list(made.names), made.ask_met: list(made.met)}  # keys without a question so far
    for keys in fresh.values():
        rng.shuffle(keys)
    first = True
    while len(made.tokens) < length:
        if not first:
            made.turn()
        ask = rng.choice(asks)
        if crowded and fresh.get(ask):
            ask(fresh[ask].pop())
        else:
            ask()
        first = False
    return made
