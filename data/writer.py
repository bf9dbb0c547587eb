"""
What the prepare.py scripts share: a text from a file or fetched once, and a dataset's files, each whole or not at all.

    text = read_text(input, folder)                                     # a file's, or tinyshakespeare
    write_dataset(folder, tokenizer, *split(text, tokenizer))           # train.bin, val.bin, meta.json

It imports no torch, so that preparing starts at once. data/loader.py reads what this writes.
"""

import hashlib
import http.client
import json
import os
import urllib.request
from pathlib import Path

import numpy as np

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# ---------------------------------------------------------------------------------------------------------------------
# Text.


def read_text(path, folder):
    """The text of the UTF-8 file at path; without a path that of folder's input.txt, fetched from URL if missing.

    ValueError, with what to do, if there is no such file, it is not text, or the download fails or is another file.
    """
    kept = Path(folder) / "input.txt"
    if not path and not kept.is_file():
        replace(kept, download(kept))
    path = Path(path or kept)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # newlines as they are
    except OSError as e:
        raise ValueError(f"cannot read the text {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text: {e}") from None
    if len(text) < 10:
        raise ValueError(f"{path} has {len(text)} characters, too few to split into train and val")
    return text


def download(kept):
    """Tinyshakespeare's bytes. A captive portal's page, or half a file, has another hash and is refused."""
    instead = f"without network pass --input=FILE, any text; or bring the file as {kept}"
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as e:
        raise ValueError(f"cannot download {URL}: {e}; {instead}") from None
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(f"{URL} gave another file, {len(content):,} bytes of SHA-256 {found}; {instead}")
    return content


def split(text, tokenizer):
    """Token ids of the text's first 90 %, for train, and of the rest, for val."""
    middle = len(text) * 9 // 10
    return tokenizer.encode(text[:middle]), tokenizer.encode(text[middle:])


# ---------------------------------------------------------------------------------------------------------------------
# Files.


def replace(path, content):
    """Write bytes to path: after a crash the old file is there, or the new. ValueError if it cannot be written."""
    path, temporary = Path(path), Path(f"{path}.{os.getpid()}.tmp")  # two runs may make the same data at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None
    finally:
        if temporary.exists():
            temporary.unlink()


def id_type(tokenizer):
    """The numpy type of a .bin's ids: two bytes where the vocabulary allows."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def write_meta(folder, tokenizer, train_tokens, val_tokens, questions=None):
    """Describe the two .bin files beside it: last, since it is what makes a folder a dataset."""
    if questions is not None:
        replace(Path(folder) / "questions.json", json.dumps(questions, indent=0).encode())
    else:  # those of other data that stood here
        (Path(folder) / "questions.json").unlink(missing_ok=True)
    meta = tokenizer.meta | {"dtype": id_type(tokenizer).name, "vocab_size": tokenizer.vocab_size,
                             "train_tokens": train_tokens, "val_tokens": val_tokens}
    replace(Path(folder) / "meta.json", json.dumps(meta).encode())
    print(f"{folder}: {train_tokens:,} train and {val_tokens:,} val tokens, vocabulary {tokenizer.vocab_size:,}")


def write_dataset(folder, tokenizer, train, val, questions=None):
    """Write two splits (sequences of ids) and what describes them."""
    if not str(folder):
        raise ValueError("folder is empty: name one, . for this one")
    for name, ids in (("train.bin", train), ("val.bin", val)):
        replace(Path(folder) / name, np.asarray(ids, id_type(tokenizer)).tobytes())
    write_meta(folder, tokenizer, len(train), len(val), questions)
