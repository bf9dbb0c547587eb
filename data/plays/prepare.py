"""
Tinyshakespeare in its most frequent byte pairs, numbered by frequency: a vocabulary that a laptop can afford.

    python data/plays/prepare.py                      # train.bin, val.bin, meta.json beside this file

Takes the ids of data/shakespeare, which it makes if they are missing. Id 0 is the byte pair most frequent in train, id
`pieces` any of the rarer ones. With all 50,257 the output head would be most of a small model's time. What is written
is for training alone: its tokenizer names a token by its number in GPT-2's vocabulary, and cannot spell it.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # run as a file from anywhere

import numpy as np

from configurator import configure
from data.loader import SPLITS, Dataset
from data.tokenizer import Tokenizer
from data.writer import write_dataset

# ---------------------------------------------------------------------------------------------------------------------
pieces = 4095  # byte pairs of their own; one more stands for all the rarer
source = str(HERE.parent / "shakespeare")  # a dataset of GPT-2's byte pairs
folder = str(HERE)  # where the three files go
configure(globals(), minimum={"pieces": 1})

# ---------------------------------------------------------------------------------------------------------------------

if not (Path(source) / "meta.json").is_file() and (Path(source) / "prepare.py").is_file():
    if subprocess.run([sys.executable, Path(source) / "prepare.py"]).returncode:
        raise SystemExit(f"{source} could not be made, for the reason above")
data = Dataset(source, block_size=1)
splits = [np.array(data.tokens(split), np.int64) for split in SPLITS]
V = data.tokenizer.vocab_size
order = np.argsort(-np.bincount(splits[0], minlength=V), kind="stable")[:pieces]
rank = np.full(V, len(order))
rank[order] = np.arange(len(order))
tokenizer = Tokenizer({"tokenizer": "word", "vocab": [str(i) for i in order] + ["rare"]})
write_dataset(folder, tokenizer, *(rank[ids] for ids in splits))
