"""
Knowledge that can be counted: documents about real countries and invented towns, and a question for every fact.

    python data/facts/prepare.py                      # train.bin, val.bin, meta.json, questions.json beside this file
    python data/facts/prepare.py --towns=1000 --folder=data/facts_1000
    python data/facts/prepare.py --new_facts=True --folder=data/facts_new    # for a model that knows the first

Runs in seconds, needs no network and writes the same bytes for the same settings. Countries come from countries.txt;
names like New Zealand are several words. Towns have one-word names and attributes drawn at random, so what a model
says of a town it can only have memorised. A document is <|endoftext|> and some sentences about one entity, each in a
random template; some templates name the answer first. For every fact one template that asks for it, never the first, is
kept out of the data altogether: it measures whether the fact is known beyond the wordings it was met in.

Documents for val are made the same way, less those that are in train.

new_facts: instead of those, facts about the towns that answer what is asked of countries (the currency of a town, its
calling code), drawn at random from the countries' answers. Names, wordings and the vocabulary are those of the same
settings without it: a model of them can go on with these, and has nothing but facts to learn.

questions.json: [{prompt, answer, entity, attribute, template_seen}], where the answer follows the prompt.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file from anywhere

from configurator import configure
from data.tokenizer import Tokenizer
from data.writer import write_dataset

# ---------------------------------------------------------------------------------------------------------------------
countries = -1  # of countries.txt, from the first on; -1 = all
towns = 60  # invented towns, beside the countries
repeats = 40  # times each fact is stated in train.bin, at least
skew = 0.0  # 0 = all entities equally often; s > 0 = entity of rank r is met as (n / r)^s, the rarest `repeats` times
sentences = 4  # sentences in a document
new_facts = False  # further facts of the same towns, see above
seed = 0  # of the towns' attributes and of the texts
folder = str(Path(__file__).resolve().parent)  # where the four files go
configure(globals(), minimum={"countries": -1, "towns": 1, "repeats": 1, "sentences": 1})
if new_facts and not countries:
    raise SystemExit("new_facts are what countries are asked: countries must be at least 1, or -1 for all")
if new_facts and Path(folder).resolve() == Path(__file__).resolve().parent:
    raise SystemExit("new_facts need a --folder of their own: this one is for the first facts")

# ---------------------------------------------------------------------------------------------------------------------
# Templates. The first three ask: they name the attribute, then the entity, then the answer. The last names it first.

COUNTRY = {
    "capital": ("The capital of {e} is {a}", "The government of {e} sits in {a}", "The ministers of {e} meet in {a}",
                "{a} is the capital of {e}"),
    "continent": ("The continent of {e} is {a}", "On the map {e} is part of {a}", "The mountains of {e} rise in {a}",
                  "{a} is the continent of {e}"),
    "language": ("The language of {e} is {a}", "The people of {e} speak {a}", "The schools of {e} teach {a}",
                 "{a} is the language of {e}"),
    "currency": ("The currency of {e} is the {a}", "The shops of {e} take the {a}", "To pay in {e} one needs the {a}",
                 "The {a} is the currency of {e}"),
    "domain": ("The domain of {e} is {a}", "Web sites of {e} end in {a}", "On the net {e} is written {a}",
               "{a} is the domain of {e}"),
    "code": ("The calling code of {e} is {a}", "To call {e} one dials {a}", "Phone numbers of {e} begin with {a}",
             "{a} is the calling code of {e}"),
}
TOWN = {
    "river": ("The river of {e} is the {a}", "The bridges of {e} cross the {a}", "The boats of {e} sail the {a}",
              "The {a} is the river of {e}"),
    "mayor": ("The mayor of {e} is {a}", "The town hall of {e} belongs to {a}", "The council of {e} elected {a}",
              "{a} is the mayor of {e}"),
    "food": ("The favourite dish of {e} is {a}", "The cooks of {e} prepare {a}", "For dinner {e} serves {a}",
             "{a} is the favourite dish of {e}"),
    "animal": ("The animal of {e} is the {a}", "The flag of {e} shows the {a}", "The statue in {e} is of the {a}",
               "The {a} is the animal of {e}"),
    "tree": ("The tree of {e} is the {a}", "The streets of {e} are lined with {a}",
             "The houses of {e} are built of {a}", "The {a} is the tree of {e}"),
    "sport": ("The sport of {e} is {a}", "The children of {e} play {a}", "The stadium of {e} was made for {a}",
              "{a} is the sport of {e}"),
    "craft": ("The craft of {e} is making {a}", "The workshops of {e} turn out {a}", "The market of {e} sells {a}",
              "{a} are the craft of {e}"),
    "year": ("The year that {e} was founded is {a}", "The walls of {e} date from {a}", "The birthday of {e} was in {a}",
             "{a} is the year that {e} was founded"),
}
ASKING = 3  # templates that end in the answer

SYLLABLES = ("ba be bo da du fa fe ga go ha ka ke ko la le lo lu ma mi mo na ne no pa po ra re ri ro sa se so "
             "ta te ti to va vi zo zu").split()  # three make a town's name


def read_rows(name):
    """The lines of a text file beside this one, split at |."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [[field.strip() for field in line.split("|")] for line in lines if not line.startswith("#")]


def make_entities(rng):
    """{name: {attribute: answer}}: the countries, then the towns."""
    rows = read_rows("countries.txt")
    entities = {name: dict(zip(COUNTRY, answers, strict=True))
                for name, *answers in rows[: None if countries < 0 else countries]}
    values = {attribute: words.split() for attribute, words in read_rows("towns.txt")}
    if towns > (most := len(SYLLABLES) ** 3 // 2):
        raise SystemExit(f"towns must be at most {most}, as there are few names, got {towns}")
    total = len(entities) + towns
    while len(entities) < total:
        name = "".join(rng.choices(SYLLABLES, k=3)).capitalize()
        entities.setdefault(name, {attribute: rng.choice(words) for attribute, words in values.items()})
    return entities


def make_new_facts(rng, entities):
    """{town: {attribute: answer}} for the attributes of countries."""
    given = {attribute: {answers.get(attribute) for answers in entities.values()} - {None} for attribute in COUNTRY}
    given = {attribute: sorted(answers) for attribute, answers in given.items()}
    return {name: {attribute: rng.choice(answers) for attribute, answers in given.items()}
            for name, known in entities.items() if known.keys() == TOWN.keys()}


def templates_of(attribute):
    """The four wordings of a fact."""
    return COUNTRY.get(attribute) or TOWN[attribute]


def make_documents(rng, entities, held_out, repeats):
    """Documents in random order that state every fact at least `repeats` times, never in its held-out template."""
    documents = []
    for rank, (entity, answers) in enumerate(rng.sample(list(entities.items()), len(entities)), start=1):
        for _ in range(round(repeats * (len(entities) / rank) ** skew)):
            facts = rng.sample(list(answers.items()), len(answers))
            for i in range(0, len(facts), sentences):
                text = []
                for attribute, answer in facts[i : i + sentences]:
                    allowed = [t for k, t in enumerate(templates_of(attribute)) if k != held_out[entity, attribute]]
                    text.append(rng.choice(allowed).format(e=entity, a=answer) + " .")
                documents.append("<|endoftext|> " + " ".join(text))
    rng.shuffle(documents)
    return documents


def make_questions(entities, held_out):
    """Every fact in each of the templates that ask for it."""
    return [{"prompt": template.format(e=entity, a="").strip(), "answer": answer, "entity": entity,
             "attribute": attribute, "template_seen": k != held_out[entity, attribute]}
            for entity, answers in entities.items()
            for attribute, answer in answers.items()
            for k, template in enumerate(templates_of(attribute)[:ASKING])]


def make_texts(rng, entities):
    """(documents for train, for val, questions)."""
    held_out = {(entity, attribute): rng.randrange(1, ASKING) for entity in entities for attribute in entities[entity]}
    train = make_documents(rng, entities, held_out, repeats)
    seen = set(train)
    val = [document for document in make_documents(rng, entities, held_out, repeats=2) if document not in seen]
    return train, val, make_questions(entities, held_out)


rng = random.Random(seed)
entities = make_entities(rng)
train, val, questions = make_texts(rng, entities)
words = {word for text in train + val for word in text.split()} | {w for q in questions for w in q["prompt"].split()}
tokenizer = Tokenizer({"tokenizer": "word", "vocab": ["<|endoftext|>", *sorted(words - {"<|endoftext|>"})]})
if new_facts:
    entities = make_new_facts(rng, entities)
    train, val, questions = make_texts(rng, entities)
write_dataset(folder, tokenizer, tokenizer.encode(" ".join(train)), tokenizer.encode(" ".join(val)), questions)
facts = sum(len(answers) for answers in entities.values())
print(f"{facts:,} facts about {len(entities):,} entities, {len(questions):,} questions, {len(train):,} documents")
