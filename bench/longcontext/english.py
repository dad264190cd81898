"""Tasks for chat models over long English documents: RULER's tasks (arXiv 2404.06654) in its noise of five sentences.

- needle: one number, a document for each of ten depths
- keys: ten cities, each with its number, far apart; the questions cover all of them, one at a time
- values: four numbers of one city; correct if all are named
- frequent: a list of words, two of which occur ten times as often as the others; correct if both are named

An answer is correct if it has every expected word, in either case. Lengths are in tokens of the model, about.
"""
import random

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NOISE_TOKENS, NEEDLE_TOKENS, WORD_TOKENS = 25, 20, 1.05  # of most vocabularies, about
QUESTION = 72  # tokens reserved for question and template
# Tokens of an answer at most. Four numbers whose 28 digits are tokens each, and a sentence around each, need the most.
OUTPUT = {"needle": 48, "keys": 48, "values": 128, "frequent": 48}
ROOM = 256  # tokens of context beyond a length, at least: lengths are about
CITIES = ("London Paris Berlin Madrid Rome Vienna Prague Oslo Cairo Tokyo Delhi Lima Athens Dublin Lisbon Warsaw Moscow Kiev "
          "Boston Chicago Dallas Denver Houston Seattle Toronto Sydney Beijing Seoul Bangkok Jakarta Nairobi Lagos Havana "
          "Bogota Santiago Geneva Zurich Munich Milan Naples").split()
WORDS = ("apple river stone candle window garden bridge silver winter summer doctor mother letter button pencil bottle "
         "rocket camera guitar basket butter cotton desert dragon engine flower forest hammer island jacket kitten ladder "
         "market mirror monkey needle orange palace parrot planet pocket rabbit ribbon saddle school shadow spider spring "
         "statue street sugar tailor temple ticket tunnel turtle valley velvet violin wallet").split()


def statement(city, number):
    return f"One of the special magic numbers for {city} is: {number}."


def haystack(tokens, statements):
    """Returns noise of about this many tokens with (depth from 0 to 1, sentence) inserted."""
    lines = [NOISE] * ((tokens - NEEDLE_TOKENS * len(statements)) // NOISE_TOKENS)
    for depth, said in sorted(statements, reverse=True):
        lines.insert(round(depth * len(lines)), said)
    return "\n".join(lines)


def asked(text, city, plural):
    what = "are all the special magic numbers" if plural else "is the special magic number"
    return ("Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you "
            f"about the numbers afterwards.\n{text}\nWhat {what} for {city} mentioned in the provided text?")


def questions(kind, length, share=1.0):
    """Returns [(prompt, expected words)]. `share` scales the number of documents, except for keys, which has one."""
    made = []
    tokens = length - QUESTION - OUTPUT[kind]  # of the document
    count = max(1, round({"needle": 10, "keys": 1, "values": 5, "frequent": 5}[kind] * share))
    for number in range(count):
        rng = random.Random(f"{kind}|{length}|{number}")

        def draw(rng=rng):
            return str(rng.randrange(1_000_000, 10_000_000))

        cities = rng.sample(CITIES, len(CITIES))
        if kind == "needle":
            magic = draw()
            text = haystack(tokens, [(number / max(1, count - 1), statement(cities[0], magic))])
            made.append((asked(text, cities[0], False), [magic]))
        elif kind == "keys":
            magics = {city: draw() for city in cities[:10]}
            text = haystack(tokens, [(i / (len(magics) - 1), statement(*pair)) for i, pair in enumerate(magics.items())])
            made += [(asked(text, city, False), [magic]) for city, magic in magics.items()]
        elif kind == "values":
            magic = [draw() for _ in range(4)]
            text = haystack(tokens, [(rng.random(), statement(cities[0], one)) for one in magic])
            made.append((asked(text, cities[0], True), magic))
        else:
            words = rng.sample(WORDS, len(WORDS))
            times = tokens / WORD_TOKENS / (len(words) - 2 + 20)
            row = [word for i, word in enumerate(words) for _ in range(round(times * (10 if i < 2 else 1)))]
            rng.shuffle(row)
            made.append((f"Below is a list of words. Memorize the ones that appear most often.\n{' '.join(row)}\n"
                         "What are the two most common words in the above list?", words[:2]))
    return made


def right(said, words):
    said = said.lower()
    return all(word.lower() in said for word in words)
