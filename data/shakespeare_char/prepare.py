"""
Any text as characters: Shakespeare's plays, or whatever file is given.

    python data/shakespeare_char/prepare.py --input=FILE      # train.bin, val.bin, meta.json beside this file

The vocabulary is the set of the text's characters. The first 90 % of the text are train, the rest val. It downloads
nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file from anywhere

from configurator import configure
from data.loader import write_dataset
from data.tokenizer import Tokenizer

# ---------------------------------------------------------------------------------------------------------------------
input = ""  # a UTF-8 text file; empty = input.txt in the folder below
folder = str(Path(__file__).resolve().parent)  # where the three files go
configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
path = Path(input or Path(folder) / "input.txt")
if not path.is_file():
    raise SystemExit(f"there is no text {path}: pass --input=FILE; nanoGPT's tinyshakespeare is at "
                     "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")
try:
    text = path.read_text(encoding="utf-8")
except UnicodeDecodeError as e:
    raise SystemExit(f"{path} is not UTF-8 text: {e}") from None
if len(text) < 10:
    raise SystemExit(f"{path} has {len(text)} characters, too few to split into train and val")
tokenizer = Tokenizer({"tokenizer": "char", "vocab": sorted(set(text))})
split = len(text) * 9 // 10
write_dataset(folder, tokenizer, tokenizer.encode(text[:split]), tokenizer.encode(text[split:]))
