#!/usr/bin/env python3
"""Makes calibration.safetensors and heldout_chat.txt with text that SmolLM2-135M-Instruct generates.

Usage: make_calibration.py PATH_TO_MOESAIC DENSE_GGUF

All text is sampled from the dense model by `moesaic generate` with fixed seeds, so only the model's licence applies. The
held-out chats use other seeds. The questions of questions.json are not used. Standard library only.
"""
import array
import json
import pathlib
import random
import struct
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
LENGTH = 384  # tokens of a calibration sequence; shorter ones end with -1
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER = SYSTEM + "<|im_start|>user\n"  # the model continues with a question, its answer, and the next question

# Openings of encyclopaedia articles, in WikiText's spelling. Names are made up or common.
SUBJECTS = [
    ("{bird}", "The {bird} is a species of bird in the family <unk> ."),
    ("Lake {place}", "Lake {place} is a freshwater lake in"),
    ("HMS {ship} ( {year} )", "HMS {ship} was a light cruiser of the Royal Navy , built"),
    ("{person}", "{person} ( {day} {month} {year} – {day} {month} ) was an"),
    ("{year} Atlantic hurricane season", "The {year} Atlantic hurricane season was"),
    ("The {ship} Road ( film )", "The {ship} Road is a {year} American drama film directed by"),
    ("Battle of {place}", "The Battle of {place} was fought between"),
    ("Interstate {number}", "Interstate {number} ( I @-@ {number} ) is an auxiliary Interstate Highway in"),
    ("{ship} ( song )", '" {ship} " is a song recorded by American singer'),
    ("{place} F.C.", "{place} Football Club is a professional association football club"),
    ("St. {saint} 's Church , {place}", "St. {saint} 's Church is a medieval church in the village of"),
    ("{ship} ( video game )", "{ship} is a {year} role @-@ playing video game developed by"),
    ("{person} ( cricketer )", "{person} ( born {day} {month} {year} ) is a former English cricketer who"),
    ("Tropical Storm {saint} ( {year} )", "Tropical Storm {saint} was a weak tropical cyclone that"),
    ("SMS {ship}", "SMS {ship} was a battleship of the German Imperial Navy , the second ship of"),
    ("Temple of {place}", "The Temple of {place} is an ancient temple built by"),
    ("River {place}", "The River {place} is a river in the north of England , flowing"),
    ("Mount {place}", "Mount {place} is a stratovolcano in the Cascade Range of"),
    ("Operation {ship}", "Operation {ship} was a military operation during World War II in which"),
    ("{person} ( tennis )", "{person} is a Spanish professional tennis player who"),
    ("The {ship} ( novel )", "The {ship} is a {year} novel by"),
    ("{place} railway station", "{place} railway station serves the town of {place} in"),
    ("{person} ( politician )", "{person} was a politician who served in the"),
    ("{place} Castle", "{place} Castle is a ruined castle near"),
    ("{ship} ( album )", "{ship} is the third studio album by"),
    ("{year} {place} earthquake", "The {year} {place} earthquake struck on"),
    ("University of {place}", "The University of {place} is a public research university in"),
    ("{ship} ( TV series )", "{ship} is a television comedy series created by"),
]
WORDS = {
    "bird": ["grey heron", "barn owl", "song thrush", "red kite", "snow goose", "black tern", "wood duck", "rock dove"],
    "place": ["Carrow", "Northwick", "Kestrel Ridge", "Wend", "Ladoga", "Marlow", "Altena", "Harrowby", "Sorrento",
              "Belmont", "Ardal", "Rosario", "Tamar", "Ostrava", "Glenmore", "Kavala"],
    "ship": ["Defiant", "Silver Lantern", "Morning Tide", "Iron Harvest", "Albatross", "Northern Star", "Quiet Sea",
             "Red Horizon", "Long Winter", "Second Light", "Empire", "Glass Tower"],
    "person": ["Clara Whitfield", "John Harcastle", "Lena Ortiz", "Edmund Royce", "Maria Velasco", "Thomas Adeyemi",
               "Ruth Abernathy", "George Lindqvist", "Anna Petrova", "Henry Castell"],
    "saint": ["Aldhelm", "Alma", "Bertha", "Clement", "Dunstan", "Edith", "Oswald", "Helena"],
    "month": ["January", "March", "April", "June", "August", "October", "December"],
    "year": [str(y) for y in range(1871, 2012, 7)],
    "day": [str(d) for d in range(1, 29, 3)],
    "number": [str(n) for n in range(105, 990, 97)],
}

# Short everyday questions; none of questions.json.
QUESTIONS = [
    "What is the capital of {country}?", "Which language do people speak in {country}?", "What is {a} + {b}?",
    "What is {a} times {b}?", "What is {b} minus {a}?", "What color is {colored}?", "Name three {kind}.",
    "Name two {kind}.", "What is the opposite of {adjective}?", "What do people use {tool} for?", "Where does {animal} live?",
    "What does {animal} eat?", "What sound does {animal} make?", "Tell me one fact about {topic}.", "What is {topic}?",
    "Explain {topic} in one sentence.", "Write a sentence about {topic}.", "Who was {famous}?",
    "How do I {task}?", "Give me a tip to {task}.", "Write a short poem about {topic}.", "Is {animal} a mammal?",
    "How many months are in {count} years?", "How many minutes are in {count} hours?", "What should I wear when it {weather}?",
    "Can you help me {task}?", "What comes after {day}?", "Which month comes after {month}?", "Thank you! You were a great help.",
    "Write a short note to say {occasion}.", "What is the past tense of '{verb}'?", "What is a {topic2} made of?",
]
FILLERS = {
    "country": ["Italy", "Spain", "Germany", "Canada", "India", "Egypt", "Brazil", "Poland", "Greece", "Kenya", "Mexico"],
    "a": ["2", "3", "4", "6", "8", "9"], "b": ["10", "11", "12", "15", "20"],
    "colored": ["a banana", "grass", "snow", "a tomato", "coal", "the ocean", "a carrot", "the sun"],
    "kind": ["animals", "vegetables", "colors", "countries", "sports", "musical instruments", "birds", "trees", "drinks"],
    "adjective": ["big", "fast", "happy", "light", "old", "rich", "full", "early", "loud", "wet"],
    "tool": ["a hammer", "a spoon", "an umbrella", "scissors", "a lamp", "soap", "a map", "a phone"],
    "animal": ["a cow", "a dog", "a penguin", "an eagle", "a horse", "a shark", "a frog", "an elephant", "a hen", "a lion"],
    "topic": ["rain", "the moon", "gravity", "bread", "friendship", "the heart", "electricity", "winter", "music", "rivers",
              "vaccines", "volcanoes", "coffee", "democracy", "trains", "sleep", "gardens", "the ocean", "reading"],
    "famous": ["Marie Curie", "Albert Einstein", "Leonardo da Vinci", "Nelson Mandela", "Mozart", "Cleopatra"],
    "task": ["boil an egg", "learn a language", "sleep better", "write a letter", "clean a window", "save money",
             "make tea", "stay healthy", "study for an exam", "plan a trip", "cook rice", "plant a tree"],
    "count": ["two", "three", "four"], "weather": ["rains", "snows", "is sunny", "is windy"],
    "day": ["Monday", "Tuesday", "Friday", "Saturday"], "month": ["January", "March", "June", "October"],
    "occasion": ["thank you", "happy birthday", "good luck", "I am sorry", "get well soon"],
    "verb": ["go", "see", "eat", "write", "run", "take"], "topic2": ["table", "window", "shirt", "book", "cake", "tire"],
}


class Dense:
    def __init__(self, binary, model):
        self.binary, self.model = binary, model

    def _run(self, lines, *arguments):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        result = subprocess.run([self.binary, *arguments], input=text, stdout=subprocess.PIPE, text=True, check=True)
        return [json.loads(line) for line in result.stdout.splitlines()]

    def tokenize(self, texts):
        rows = self._run([{"text": t} for t in texts], "tokenize", self.model, "--no-special")
        return [row["ids"] for row in rows]

    def write(self, texts, length, seed, temperature, stop_at_end=False):
        """Continues each text; returns (ids [<= length], generated text)."""
        prompts = self.tokenize(texts)
        flags = ["--temperature", str(temperature), "--top-k", "50", "--seed", str(seed), "--keep-special"]
        flags += [] if stop_at_end else ["--ignore-eos"]
        rows = self._run([{"ids": ids} for ids in prompts], "generate", self.model, "--jsonl", "-", "--format", "jsonl",
                         "--max-sequences", "64", "-n", str(length), "--stats", *flags)
        return [((p + row["ids"])[:length], row["text"]) for p, row in zip(prompts, rows)]


def fill(pattern, words, rng):
    """Replaces every {name} of a pattern by a word; equal names get the same word."""
    return pattern.format(**{name: rng.choice(choices) for name, choices in words.items()})


def articles(count, rng):
    texts = []
    for i in range(count):
        title, opening = SUBJECTS[i % len(SUBJECTS)]
        texts.append(fill(f"<|endoftext|> \n = {title} = \n \n {opening}", WORDS, rng))
    return texts


def questions(count, rng):
    asked = []
    while len(asked) < count:
        question = fill(QUESTIONS[len(asked) % len(QUESTIONS)], FILLERS, rng)
        asked.append(f"{USER}{question}<|im_end|>\n<|im_start|>assistant\n")
    return asked


def main():
    binary, model = sys.argv[1:]
    dense, rng = Dense(binary, model), random.Random(1)
    sequences = []
    for texts, seed, temperature, stop in (
        ([USER] * 40, 11, 0.85, False),
        (articles(120, rng), 12, 0.95, False),
        (["<|endoftext|>"] * 48, 13, 0.95, False),
        (questions(96, rng), 14, 0.5, True),
    ):
        sequences += [ids for ids, _ in dense.write(texts, LENGTH, seed, temperature, stop)]
    # Long and short kinds alternate, so that every prefix of the file is a mixture.
    rng.shuffle(sequences)
    values = array.array("i", (i for ids in sequences for i in ids + [-1] * (LENGTH - len(ids))))
    header = json.dumps({
        "__metadata__": {"source": "written by SmolLM2-135M-Instruct, see make_calibration.py"},
        "tokens": {"dtype": "I32", "shape": [len(sequences), LENGTH], "data_offsets": [0, 4 * len(values)]},
    }).encode()
    header += b" " * (-len(header) % 8)
    (HERE / "calibration.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    print(f"{len(sequences)} sequences, {sum(i >= 0 for i in values)} tokens", file=sys.stderr)
    held_out = dense.write([USER] * 32, 384, 1001, 0.85)
    (HERE / "heldout_chat.txt").write_text("".join(USER + text + "\n" for _, text in held_out))


if __name__ == "__main__":
    main()
