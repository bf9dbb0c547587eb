"""
Shakespeare's plays, or any text, as GPT-2's byte pairs.

    python data/shakespeare/prepare.py                   # train.bin, val.bin, meta.json beside this file
    python data/shakespeare/prepare.py --input=FILE      # of your own text

Without --input it fetches tinyshakespeare (1.1 MB) once, keeps it as input.txt, and takes that from then on: 301,966
tokens are train, the first 90 % of the text, and 36,059 val. tiktoken fetches its byte pairs once, too; the README says
how to do without network.
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
tokenizer = Tokenizer({"tokenizer": "gpt2"})
write_dataset(folder, tokenizer, *split(read_text(input, folder), tokenizer))
