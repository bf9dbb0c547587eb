"""
Change what a model knows by moving rows of its tables: where it reads "Spain", let it find the rows of "Germany". The
text, its token embeddings and every other weight stay. Knowledge editing of arXiv 2601.10639; nothing is trained.

    python edit.py --out_dir=out/stem_edit --source=Spain --target=Germany --prompt="The capital of {} is"
    python edit.py --out_dir=out/stem_edit --source=Spain --target=Germany --save=out/edited    # else nothing is kept
    python edit.py --out_dir=out/stem_edit --eval=True --json=edit.json    # how often it works, by the facts' questions
    python edit.py --out_dir=out/stem_edit --inspect=Spain                 # what rows look like

An edit is a map from ids to ids. It is written into the rows, or the model is shown the tables through it, as
Mapped(tables, edit), for as long as one prompt takes; both give the same. As a module:

    with edited(tables, source_ids, target_ids, how="left", pad=tokenizer.end_id):
        ...                               # behind it the old rows are back, to the last bit

Names of several tokens: each token of the source keeps its place, `how` says what it reads. A shorter target is filled
up, at its left or right with the pad, which is <|endoftext|>, or with a copy of itself. Of a longer one the last tokens
are read (left), the first (right, copy), or those met least in training (subset). With average each reads the mean of
the target's rows, which only rows can. A token that several names share, like New, changes them all.
"""

import os
import random
from contextlib import contextmanager, nullcontext
from itertools import permutations
from json import dumps
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # beside another busy process, threads that spin crawl

import torch
from torch.nn.utils.rnn import pad_sequence

import checkpoint
from configurator import arguments
from data.loader import open_dataset
from device import choose_device
from look import compare, inspect_rows, look, pieces
from stem import Plan

# ---------------------------------------------------------------------------------------------------------------------
out_dir = "out/stem_edit"  # of a run (its best.pt, else ckpt.pt), or the path of a checkpoint
source = ""  # the name whose rows change
target = ""  # the name whose rows they become
prompt = ""  # text to show the edit on; {} in it stands for the source
how = "left"  # names of unequal length: left, right, copy, subset or average
swap = False  # the target's rows become the source's, too
layers = "all"  # STEM layers to edit, as "1,3"
way = "rows"  # rows (written, and taken back) or ids (mapped before rows are read)
save = ""  # folder for a checkpoint in which those rows differ and nothing else
max_new_tokens = 8  # of the likeliest continuation to show
eval = False  # edit many pairs of names and ask all there is to ask
pairs = 200  # of names in an evaluation, at most, for each way that their lengths can differ
split = "test"  # half of the entities to draw them from: dev to choose settings by, test to report
seed = 1  # of halves and pairs, and of the rows to inspect
dataset = ""  # whose questions to ask; empty = what the model was trained on
json = ""  # file for the evaluation's figures, too
inspect = ""  # a name whose rows to look at, and how far the rows of each table spread
twin = ""  # out_dir of a dense model, whose W_u x to compare the spread with
device = "auto"  # auto (cuda, else mps, else cpu), or a torch device such as cpu or cuda:1
dtype = "auto"  # auto, float32, bfloat16 or float16
offload = False  # tables in host memory

# ---------------------------------------------------------------------------------------------------------------------
# The edit.

RULES = ("left", "right", "copy", "subset", "average")
ALL = slice(None)


class Edit(NamedTuple):
    """In layers, positions among the STEM layers, rows source (n,) become the means over k of rows target (n, k)."""

    source: torch.Tensor
    target: torch.Tensor  # k is 1 but for average
    layers: list | slice = ALL


def fit(n, target, how, pad, count):
    """The n ids, out of target and pad, that a source of n tokens reads; see the top. count: updates of each row."""
    m = len(target)
    if n > m and how == "subset":
        raise ValueError("subset leaves out tokens of the target, which has too few: take left, right, copy or average")
    if n > m and how != "copy" and pad is None:
        raise ValueError("there is no <|endoftext|> to pad with: take copy or average")
    if how == "subset":
        return [target[i] for i in sorted(sorted(range(m), key=lambda i: count[target[i]])[:n])]
    if how == "left":
        return ([pad] * (n - m) + target)[-n:]
    return (target * n if how == "copy" else target + [pad] * (n - m))[:n]


def make_edit(tables, source, target, how="left", pad=None, swap=False, layers=ALL):
    """The Edit by which source, a list of ids, reads target, another. ValueError, with the reason, where none can."""
    for wrong, why in ((how not in RULES, f"how must be one of {', '.join(RULES)}, got {how!r}"),
                       (not source or not target, "a name is empty"),
                       (source == target, "source and target are the same"),
                       (len(set(source)) < len(source), "a token of the source repeats, and a row becomes one other"),
                       (swap and len(source) != len(target), "only names of equally many tokens can be swapped")):
        if wrong:
            raise ValueError(why)
    if how == "average" and len(source) != len(target):
        return Edit(torch.tensor(source), torch.tensor([target] * len(source)), layers)
    tables.plan(torch.tensor([*source, *target]))  # which refuses ids that there are no rows of
    count = tables.state_dict()["count"] if how == "subset" else None
    to = dict(zip(source, fit(len(source), target, how, pad, count)))
    for s, t in list(to.items()) if swap else ():
        if to.setdefault(t, s) != s:
            raise ValueError("a token repeats, or its places in the names differ: they cannot be swapped")
    return Edit(torch.tensor(list(to)), torch.tensor(list(to.values()))[:, None], layers)


def write_edit(tables, edit):
    """Write an edit into the rows. Returns the old ones, (n, S, M): tables.write(edit.source, old) undoes it."""
    old = tables.read(edit.source)
    if not old.numel():
        raise ValueError("a dense model has no rows to move")
    new, rows = old.clone(), tables.read(edit.target.flatten()).view(*edit.target.shape, *old.shape[1:])
    new[:, edit.layers] = (rows.mean(dim=1) if rows.size(1) > 1 else rows[:, 0])[:, edit.layers]
    tables.write(edit.source, new)
    return old


@contextmanager
def edited(tables, source_ids, target_ids, how="left", pad=None, swap=False, layers=ALL):
    """Tables whose rows are edited inside the with block, however it ends. Arguments as of make_edit."""
    edit = make_edit(tables, source_ids, target_ids, how, pad, swap, layers)
    old = write_edit(tables, edit)
    try:
        yield edit
    finally:
        tables.write(edit.source, old)


class Mapped:
    """Tables seen through an edit, with the two verbs that generating asks for; nothing is written.

    edits: one Edit, or a list with one for each sequence of the batch, all of the same layers.
    """

    def __init__(self, tables, edits):
        edits = [edits] if isinstance(edits, Edit) else edits
        if any(e.target.size(1) > 1 for e in edits):
            raise ValueError("an average is the row of no id: it has to be written, --way=rows")
        self.tables, self.layers = tables, edits[0].layers
        self.source = pad_sequence([e.source for e in edits], True, -1)  # (B or 1, n); -1 is no token
        self.target = pad_sequence([e.target[:, 0] for e in edits], True, 0)

    def plan(self, ids):  # (B, T) -> a Plan of what is to be told apart: id << 32 | the id it is mapped to
        mapped = ids
        for s, t in zip(self.source.T[..., None], self.target.T[..., None]):
            mapped = torch.where(ids == s, t, mapped)
        return Plan(*torch.unique(ids << 32 | mapped, return_inverse=True))

    def fetch(self, plan):
        plans = map(self.tables.plan, (plan.ids >> 32, plan.ids & 0xFFFFFFFF))
        own, moved = (self.tables.fetch(p)[p.inv] for p in plans)
        own[:, self.layers] = moved[:, self.layers]
        return own


# ---------------------------------------------------------------------------------------------------------------------
# How often it works.


def mean(xs):
    return sum(xs) / len(xs) if xs else None


class Exam:
    """A dataset's questions as ids, what the model answers to them, and in which of them a token has a say."""

    def __init__(self, model, tables, data):
        encode, self.model, self.tables, self.pad = data.tokenizer.encode, model, tables, data.tokenizer.end_id
        self.questions = [{"wording": q["prompt"].replace(q["entity"], "{}")}
                          | q | {key: encode(q[key]) for key in ("prompt", "answer")} for q in data.questions]
        self.name = {q["entity"]: encode(q["entity"]) for q in self.questions}
        self.kind = {q["entity"]: q["attribute"] for q in self.questions}  # towns have other attributes than countries
        self.taught = {(q["entity"], q["wording"]): q["answer"] for q in self.questions if q["template_seen"]}
        self.longest = max(len(q["answer"]) for q in self.questions)
        self.met = {}  # token -> positions of questions
        for i, (q, answer) in enumerate(zip(self.questions, self.ask(self.questions))):
            q["before"] = answer[: len(q["answer"])]
            for token in {*q["prompt"], *answer}:
                self.met.setdefault(token, set()).add(i)
        self.recall = mean([q["before"] == q["answer"] for q in self.questions if q["template_seen"]])

    def ask(self, questions, edits=None):
        """Greedy answers, a list of ids each, to questions under no edit or each under its own."""
        lengths, answers = [len(q["prompt"]) for q in questions], {}
        for length in set(lengths):
            part = [i for i, n in enumerate(lengths) if n == length]
            tables = Mapped(self.tables, [edits[i] for i in part]) if edits else self.tables
            prompts = torch.tensor([questions[i]["prompt"] for i in part])
            tokens = self.model.generate(tables, prompts, self.longest, temperature=0)
            answers |= zip(part, torch.stack(list(tokens), dim=1).tolist())
        return [answers[i] for i in range(len(questions))]

    def draw_pairs(self):
        """{how lengths relate: (source, target) pairs}, both of one kind and from one half of the entities."""
        rng, found = random.Random(seed), {}
        names = rng.sample(sorted(self.name), len(self.name))
        names = names[: len(names) // 2] if split == "dev" else names[len(names) // 2 :]
        both = [(s, t) for s, t in permutations(names, 2) if self.kind[s] == self.kind[t]]
        for s, t in rng.sample(both, len(both)):
            n, m = len(self.name[s]), len(self.name[t])
            relation = "single" if n == m == 1 else "equal" if n == m else "longer" if n > m else "shorter"
            if len(set(self.name[s])) == n and len(found.setdefault(relation, [])) < pairs:
                found[relation].append((s, t))
        return found

    def cases(self, s, t, edit):
        """(question, edit, t's answer) for what s is asked and t answers otherwise, in wordings that both were met in;
        (question, edit, None) about others that an edited token is in."""
        for i in sorted(set().union(*(self.met.get(token, ()) for token in edit.source.tolist()))):
            q, wanted = self.questions[i], self.taught.get((t, self.questions[i]["wording"]))
            if q["entity"] != s:
                yield q, edit, None
            elif q["template_seen"] and wanted and wanted != q["answer"]:
                yield q, edit, wanted

    def grade(self, couples, how="left", layers=ALL):
        """Shares of the answers after edits of all couples. success: the target's; changed: another than before;
        locality: about all other entities, as before; shared: about those that share an edited token, as before."""
        cases, answers = [], []
        for s, t in couples:
            with edited(self.tables, self.name[s], self.name[t], how, self.pad, False, layers) as edit:
                cases += (mine := list(self.cases(s, t, edit)))
                if how == "average":  # only rows can; the other rules are asked all at once, behind their mapped ids
                    answers += self.ask([q for q, _, _ in mine])
        if not cases:
            raise ValueError("the names that were drawn have the same answers: raise --pairs, or take another --seed")
        questions, edits, wanted = zip(*cases)
        answers = answers or self.ask(questions, edits)
        told = [(a, q["before"], w) for a, q, w in zip(answers, questions, wanted) if w]
        shared = [a[: len(q["before"])] == q["before"] for a, q, w in zip(answers, questions, wanted) if not w]
        others = sum(q["entity"] != s for s, _ in couples for q in self.questions)
        return {"success": mean([a[: len(w)] == w for a, _, w in told]),
                "changed": mean([a[: len(before)] != before for a, before, _ in told]),
                "locality": 1 - shared.count(False) / others, "shared": mean(shared),
                "pairs": len(couples), "questions": len(told)}


def evaluate(exam, stem_layers):
    """Print and return all that the exam measures."""
    def line(label, figures):
        shares = (f"{100 * x:8.2f} %" if x is not None else " " * 9 + "-" for x in list(figures.values())[:4])
        print(f"{label:24}", *shares, f"{figures['pairs']:7,} {figures['questions']:9,}", flush=True)
        return figures

    drawn, S = exam.draw_pairs(), len(stem_layers)
    if "single" not in drawn:
        raise ValueError("the dataset has no questions about two entities of a kind, with names of one token")
    print(f"recall {exam.recall:.2%}; {split} half of {len(exam.name)} entities, seed {seed}\n"
          f"{'':24}    success    changed   locality     shared   pairs questions")
    total = line("single tokens", exam.grade(drawn["single"]))
    subsets = [[i] for i in range(S)] * (S > 1) + [[j for j in range(S) if j != i] for i in range(S)] * (S > 2)
    subsets = {",".join(str(stem_layers[i]) for i in subset): subset for subset in subsets}
    by_layer = {name: line(f"  layers {name}", exam.grade(drawn["single"], "left", subset))
                for name, subset in subsets.items()}
    rules = {"longer": ("left", "right", "copy"), "equal": ("left",), "shorter": ("left", "right", "subset", "average")}
    by_rule = {f"{relation} {rule}": line(f"{relation} source: {rule}", exam.grade(drawn[relation], rule))
               for relation in rules if relation in drawn for rule in rules[relation]}
    return {"recall": exam.recall, **total, "layers": by_layer, "strategies": by_rule, "split": split, "seed": seed}


# ---------------------------------------------------------------------------------------------------------------------
if __name__ == "__main__":
    asked = arguments(globals(), minimum={"pairs": 1})
    globals().update(asked)
    of_an_edit = {"source", "target", "prompt", "how", "swap", "layers", "way", "save"} & set(asked)
    if (eval or inspect) and of_an_edit:
        raise SystemExit(f"--eval and --inspect do not look at {', '.join(sorted(of_an_edit))}: leave that out")
    for name, value, allowed in (("way", way, ("rows", "ids")), ("split", split, ("dev", "test"))):
        if value not in allowed:
            raise SystemExit(f"{name} must be {' or '.join(allowed)}, got {value!r}")
    device, torch_dtype = choose_device(device, dtype)
    loaded = checkpoint.load(out_dir)
    model, tables, tokenizer = checkpoint.rebuild(loaded, device, torch_dtype, offload)
    there = {str(layer): s for s, layer in enumerate(model.config.stem_layers)}
    if not there:
        raise SystemExit(f"{out_dir} is a dense model: it has no rows to move")

    if eval:
        dataset = dataset or loaded.get("settings", {}).get("dataset")
        if not dataset:
            raise SystemExit("the checkpoint does not say what it was trained on: name a --dataset")
        data = open_dataset(dataset, model.config.block_size, seed)
        checkpoint.check_fit(loaded, model.config, data.meta)
        if not data.questions:
            raise SystemExit(f"{data.folder} has no questions.json: there is nothing to ask")
        if json:
            Path(json).touch()  # a place that cannot be written to is found now
        figures = evaluate(Exam(model, tables, data), model.config.stem_layers)
        if json:
            Path(json).write_text(dumps(figures, indent=1), encoding="utf-8")
        raise SystemExit
    if inspect:
        dense = checkpoint.rebuild(checkpoint.load(twin), device)[0] if twin else None
        shapes = [(m.config.vocab_size, m.config.n_layer) for m in (model, dense or model)]
        if dense and (dense.config.stem_layers or shapes[0] != shapes[1]):
            raise SystemExit(f"{twin} is no dense model of the same vocabulary and as many layers")
        inspect_rows(model, tables, tokenizer, tokenizer.encode(inspect), dense, seed)
        raise SystemExit

    if not (prompt or save):
        raise SystemExit("name a --prompt to show the edit on, or where to --save it; --help lists all settings")
    if save and any((Path(save) / name).exists() for name in ("best.pt", "ckpt.pt")):
        raise SystemExit(f"{save} holds a checkpoint, which is never overwritten: name another folder")
    layers = layers.replace(" ", "")
    if unknown := [layer for layer in layers.split(",") if layers != "all" and layer not in there]:
        raise SystemExit(f"layers must be all or some of {','.join(there)}, got {','.join(unknown)}")
    ids, by = tokenizer.encode(source), tokenizer.encode(target)
    text = (prompt.replace(" {}", "{}") if source.startswith(" ") else prompt).replace("{}", source)
    asked = tokenizer.encode(text)[-model.config.block_size :]
    settings = (how, tokenizer.end_id, swap, ALL if layers == "all" else [there[x] for x in layers.split(",")])
    try:
        if prompt and ids not in [asked[i : i + len(ids)] for i in range(len(asked))]:
            raise ValueError(f"the source is not in the prompt, which is {pieces(tokenizer, asked)}")
        edit = make_edit(tables, ids, by, *settings)
        seen = Mapped(tables, edit) if way == "ids" else tables
    except ValueError as e:
        raise SystemExit(f"{e}; source: {pieces(tokenizer, ids)}, target: {pieces(tokenizer, by)}") from None
    reads = (f"{pieces(tokenizer, [s])} reads {' and '.join(pieces(tokenizer, [i]) for i in t)}"
             for s, t in zip(edit.source.tolist(), edit.target.tolist()))
    print(f"prompt: {text}\nedit:   {', '.join(reads)}; {how}, by {way}, layers {layers} of {', '.join(there)}")
    if prompt:
        before = look(model, tables, tokenizer, asked, max_new_tokens)
        with edited(tables, ids, by, *settings) if way == "rows" else nullcontext():
            after = look(model, seen, tokenizer, asked, max_new_tokens)
        compare(tokenizer, before, after)
    if save:
        write_edit(tables, edit)
        Path(save).mkdir(parents=True, exist_ok=True)
        checkpoint.save(Path(save) / "best.pt", loaded | {"tables": tables.state_dict()})
        print(f"saved {save}/best.pt")
