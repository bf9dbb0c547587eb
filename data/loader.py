"""
A dataset is a folder: train.bin and val.bin (token ids, uint16 or uint32, one stream each), meta.json (its tokenizer,
id type and token counts) and, where what was learnt can be asked, questions.json. prepare.py scripts write one
with data/writer.py, train.py reads it.

    data = Dataset("data/facts", block_size=128, seed=1)
    x, y = data.get_batch("train", step, n=16)      # (16, 128) each, a pure function of (seed, split, step)

It reads nothing from the network and knows no model; recall() asks one its questions.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from data.tokenizer import Tokenizer

SPLITS = ("train", "val")

# ---------------------------------------------------------------------------------------------------------------------
# Reading.


def open_dataset(name, block_size, seed):
    """The Dataset in a folder of data/, or at a path. Missing facts are made: that takes seconds and no network."""
    folder = Path(__file__).resolve().parent / name
    if Path(name).is_dir() and (Path(name).name != name or not folder.is_dir()):  # ./facts is not data/facts
        folder = Path(name)
    if name == "facts" and not (folder / "meta.json").exists():
        if subprocess.run([sys.executable, folder / "prepare.py"]).returncode:
            raise ValueError(f"{folder} could not be made, for the reason above")
    return Dataset(folder, block_size, seed)


class Dataset:
    """An opened folder. ValueError, with what to do, for one that is missing, cut short, foreign or too small.

    folder: where prepare.py wrote. block_size: T, tokens of a sequence. seed: of the batches. Has meta (a dict),
    tokenizer, and questions: dicts as in data/facts/prepare.py, none for most data.
    """

    def __init__(self, folder, block_size, seed=0):
        self.folder, self.block_size, self.seed = Path(folder), block_size, seed
        if not (self.folder / "meta.json").is_file():
            raise ValueError(self.how_to_prepare())
        again = "prepare the data again"
        try:
            self.meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            sizes = {split: int(self.meta[f"{split}_tokens"]) for split in SPLITS}
            itemsize, vocab_size = {"uint16": 2, "uint32": 4}[self.meta["dtype"]], int(self.meta["vocab_size"])
            questions = self.folder / "questions.json"
            self.questions = json.loads(questions.read_text(encoding="utf-8")) if questions.is_file() else []
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{self.folder} has damaged or foreign json ({type(e).__name__}); {again}") from None
        try:
            self.tokenizer = Tokenizer(self.meta)
            asked = [(q["template_seen"], self.tokenizer.encode(q["prompt"]), self.tokenizer.encode(q["answer"]))
                     for q in self.questions]
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{self.folder} has a damaged vocabulary or questions ({e}); {again}") from None
        if not all(seen in (True, False) and prompt and answer for seen, prompt, answer in asked):
            raise ValueError(f"{self.folder}/questions.json has a question without words; {again}")
        for split, size in sizes.items():
            path = self.folder / f"{split}.bin"
            found = path.stat().st_size if path.is_file() else 0
            if found != size * itemsize:
                raise ValueError(f"{path} has {found:,} bytes, meta.json says {size:,} tokens of {itemsize}; {again}")
            if size <= block_size:
                raise ValueError(f"{path} has {size:,} tokens, too few for block_size {block_size} and a target: "
                                 f"set --block_size below {size}")
            top = int(self.tokens(split).max())  # one pass over the file; a batch could meet a bad id hours later
            if not top < vocab_size <= self.tokenizer.vocab_size:
                raise ValueError(f"{path} holds token id {top}, meta.json has vocab_size {vocab_size} and a tokenizer "
                                 f"of {self.tokenizer.vocab_size}: they do not belong together; {again}")

    def how_to_prepare(self):
        """What to say of a folder without data."""
        if (self.folder / "prepare.py").is_file():
            return f"{self.folder} has no meta.json: run python {shlex.quote(str(self.folder / 'prepare.py'))} first"
        there = ", ".join(sorted(p.parent.name for p in Path(__file__).parent.glob("*/prepare.py")))
        return f"there is no dataset {self.folder}; data/ has {there}"

    def tokens(self, split):
        """The split's ids as a memory map, opened anew: one that lives on keeps every page it ever read resident."""
        return np.memmap(self.folder / f"{split}.bin", dtype=self.meta["dtype"], mode="r")

    def get_batch(self, split, step, n):
        """Inputs and targets of n sequences, (n, T) int64 on the CPU; a function of (seed, split, step) alone."""
        tokens = self.tokens(split)
        rng = np.random.default_rng([self.seed, SPLITS.index(split), step])
        start = rng.integers(len(tokens) - self.block_size, size=(n, 1))
        window = torch.from_numpy(tokens[start + np.arange(self.block_size + 1)].astype(np.int64))
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def choose(self, which):
        """Some of the vocabulary's ids, (n,) int64, ascending: "all", "frequent:N", the N most frequent of the train
        split, or the path of a text file of words, one a line: all their tokens. ValueError for what is none of these.
        """
        V, (kind, _, n) = self.tokenizer.vocab_size, which.partition(":")
        if which == "all":
            return torch.arange(V)
        if kind == "frequent":
            if not n.isdecimal() or not 1 <= int(n) <= V:
                raise ValueError(f"frequent:N takes an N from 1 to {V}, the size of the vocabulary; got {which!r}")
            tokens = self.tokens("train")  # in pieces: they are counted as int64
            count = sum(np.bincount(part, minlength=V) for part in np.array_split(tokens, 1 + len(tokens) // 2**24))
            return torch.from_numpy(np.sort(np.argsort(-count, kind="stable")[: int(n)]))
        if not Path(which).is_file():
            raise ValueError(f"rows must be all, frequent:N or a file of words, one a line; {which!r} is no file")
        ids, unknown = set(), []
        for word in Path(which).read_bytes().decode("utf-8-sig", "replace").splitlines():
            try:
                ids.update(self.tokenizer.encode(word))
            except ValueError:
                unknown.append(repr(word.strip()))
        if unknown or not ids:
            some = ", ".join(unknown[:5]) + f" and {len(unknown) - 5:,} more" * (len(unknown) > 5)
            raise ValueError(f"{which} has " + (f"words that the data do not: {some}" if unknown else "no words"))
        return torch.tensor(sorted(ids))


# ---------------------------------------------------------------------------------------------------------------------
# Asking.


def recall(model, tables, tokenizer, questions):
    """The share of questions whose answer a greedy continuation gives in full: {"recall": .., "recall_unseen": ..}.

    recall is over the wordings that the fact was trained in, recall_unseen over those it was not; None without
    questions.
    """
    groups = {}  # a batch is of prompts of one length
    for q in questions:
        prompt, answer = tokenizer.encode(q["prompt"]), tokenizer.encode(q["answer"])
        groups.setdefault((len(prompt), len(answer)), []).append((prompt, answer, q["template_seen"]))
    correct = {True: [], False: []}
    for (_, length), group in groups.items():
        for i in range(0, len(group), 256):
            prompts, answers, seen = zip(*group[i : i + 256])
            got = torch.stack(list(model.generate(tables, torch.tensor(prompts), length, temperature=0)), dim=1)
            for s, right in zip(seen, (got == torch.tensor(answers)).all(dim=1).tolist()):
                correct[s].append(right)
    mean = {seen: sum(rights) / len(rights) if rights else None for seen, rights in correct.items()}
    return {"recall": mean[True], "recall_unseen": mean[False]}
