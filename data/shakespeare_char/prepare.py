"""
Shakespeare's plays, or any text, as characters.

    python data/shakespeare_char/prepare.py                   # train.bin, val.bin, meta.json beside this file
    python data/shakespeare_char/prepare.py --input=FILE      # of your own text

Without --input it fetches tinyshakespeare (1.1 MB) once, keeps it as input.txt, and takes that from then on. The
vocabulary is the set of the text's characters. The first 90 % of the text are train, the rest val.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file from anywhere

from configurator import configure
from data.tokenizer import Tokenizer
from data.writer import read_text, split, write_dataset

# ---------------------------------------------------------------------------------------------------------------------
input = ""  # a UTF-8 text file; empty = input.txt in the folder below
folder = str(Path(__file__).resolve().parent)  # where the files go
configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
text = read_text(input, folder)
tokenizer = Tokenizer({"tokenizer": "char", "vocab": sorted(set(text))})
write_dataset(folder, tokenizer, *split(text, tokenizer))
