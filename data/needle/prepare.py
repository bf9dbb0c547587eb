"""
Long contexts in which something must be read to be known: nobody can have memorised it.

    python data/needle/prepare.py                     # train.bin, val.bin, meta.json, asked.json beside this file

Documents of about 1,100 words: true facts of data/facts; amid them the rivers of four countries, drawn anew for each
document and told again and again; and lists of pairs of words, each told twice. Writes the same bytes for the same
settings, and needs no network.

asked.json: [{kind, prompt, answer, template_seen}]. Of kind "needle L": a made-up river told once, at some depth of a
prompt of L - 1 words, and asked for at its end. Of kind "copy n": one of n pairs told just before. They are not in
questions.json, of which train.py would print one share for all.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file from anywhere

from configurator import configure
from data.loader import open_dataset
from data.tokenizer import END
from data.writer import replace, write_dataset

# ---------------------------------------------------------------------------------------------------------------------
documents = 400  # in train.bin; val.bin has a twentieth of it
asked = 40  # questions of each kind
lengths = "128,256,512,1024"  # of contexts, in words
depths = "0.1,0.5,0.9"  # where in them the needle is
pairs = "4,8,16"  # in a list
seed = 0
source = "facts"  # the dataset whose sentences are the hay; data/facts is made if missing
folder = str(Path(__file__).resolve().parent)  # where the four files go
configure(globals(), minimum={"documents": 20, "asked": 1})

# ---------------------------------------------------------------------------------------------------------------------


def numbers(name, kind, least, most):
    """Those of a setting such as "4,8,16"."""
    try:
        found = [kind(x) for x in globals()[name].split(",")]
    except ValueError:
        found = []
    if not found or not all(least <= x <= most for x in found):
        raise SystemExit(f"{name} must be numbers from {least} to {most}, with commas between; got {globals()[name]!r}")
    return found


rng, hay = random.Random(seed), open_dataset(source, 1, 0)
answers = {}  # attribute -> all answers
for q in hay.questions:
    answers.setdefault(q["attribute"], set()).add(q["answer"])
if not {"continent", "river", "tree", "food", "animal"} <= answers.keys():
    raise SystemExit(f"{hay.folder} has no facts about countries and towns: take a source by data/facts/prepare.py")
countries = sorted({q["entity"] for q in hay.questions if q["attribute"] == "continent" and " " not in q["entity"]})
rivers, keys = sorted(answers["river"]), sorted(answers["tree"] | answers["food"] | answers["animal"])
facts = [text.strip() for text in hay.tokenizer.decode(hay.tokens("train").tolist()).split(END) if text.strip()]
if min(len(countries), len(rivers)) < 4:
    raise SystemExit(f"{hay.folder} has too few countries or rivers: take a source of at least 4 and 10 towns")
sizes = numbers("pairs", int, 1, len(keys))
contexts, places = numbers("lengths", int, 32, 2**20), numbers("depths", float, 0, 1)


def tell(country, river):
    return f"The river of {country} is the {river} ."


def draw_pairs(n):
    """n short sentences of a key and a value; keys differ."""
    return [f"{key} {value} ." for key, value in zip(rng.sample(keys, n), rng.choices(rivers, k=n))]


def make_document():
    """Facts, repeated rivers and twice-told lists in random order."""
    told = list(zip(rng.sample(countries, 4), rng.sample(rivers, 4)))
    parts = rng.choices(facts, k=8) + [tell(*rng.choice(told)) for _ in range(20)]
    for _ in range(12):
        listed = draw_pairs(rng.choice(sizes))
        parts.append(" ".join(listed + rng.sample(listed, len(listed))))
    return f"{END} " + " ".join(rng.sample(parts, len(parts)))


def make_questions():
    """(kind, words) of each, where words end in the answer and a full stop."""
    for _ in range(asked):
        for length in contexts:
            for depth in places:
                told = tell(rng.choice(countries), rng.choice(rivers)).split()
                words = " ".join(rng.choices(facts, k=length)).split()[: length - 2 * len(told) + 1]
                at = int(depth * len(words))
                while at and words[at - 1] != ".":  # between two sentences
                    at -= 1
                yield f"needle {length}", words[:at] + told + words[at:] + told
        for n in sizes:
            listed = draw_pairs(n)
            yield f"copy {n}", " ".join([*listed, rng.choice(listed)]).split()


train, val = ([make_document() for _ in range(n)] for n in (documents, documents // 20))
questions = [{"kind": kind, "prompt": " ".join(words[:-2]), "answer": words[-2], "template_seen": True}
             for kind, words in make_questions()]
write_dataset(folder, hay.tokenizer, *(hay.tokenizer.encode(" ".join(text)) for text in (train, val)))
replace(Path(folder) / "asked.json", json.dumps(questions).encode())
print(f"{len(questions):,} questions")
