"""
OpenWebText, or any collection of documents, as GPT-2's byte pairs: 9 B tokens, 18 GB, in hours; or a file in seconds.

    pip install datasets && python data/openwebtext/prepare.py       # streamed from huggingface.co, not kept as text
    python data/openwebtext/prepare.py --input=FILE                  # or of your own: .jsonl or .txt

Of a .jsonl each line is a document, its "text"; a .txt is split at --separator. Each becomes <|endoftext|> and its
tokens, in train.bin or val.bin by a hash of its text, so that a document and its copies never lie on both sides and the
split is the same on every machine. Blank ones are left out; one of over 131,072 characters becomes several.

Documents are read as a stream, encoded by several processes and appended in order: memory does not grow with the
corpus, and the bytes do not depend on the number of processes. Stopped at any moment, the same command goes on.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file from anywhere

import numpy as np
from tqdm import tqdm

from configurator import configure
from data.tokenizer import Tokenizer
from data.writer import id_type, replace, write_meta

# ---------------------------------------------------------------------------------------------------------------------
input = ""  # a .jsonl or .txt file; empty = the dataset below
hub = "Skylion007/openwebtext"  # a dataset on huggingface.co with a train split and a text column
separator = "<|endoftext|>"  # what stands between the documents of a .txt; blank lines in bash: --separator=$'\n\n'
vocabulary = ""  # a dataset folder whose tokenizer to use; empty = GPT-2's byte pairs
val_share = 0.0005  # of the documents
max_documents = 0  # read that many, 0 = all
num_proc = 0  # processes that encode, 0 = one a core; each takes some 100 MB
folder = str(Path(__file__).resolve().parent)  # where the files go

_LONGEST = 2**17  # characters of a document
_PIECE = 32  # documents that a process encodes at a time

# ---------------------------------------------------------------------------------------------------------------------
# Reading.


def hub_documents():
    """The texts of a dataset on huggingface.co, as they arrive."""
    try:
        from datasets import load_dataset

        yield from (row["text"] for row in load_dataset(hub, split="train", streaming=True))
    except ImportError:
        raise ValueError("to stream a dataset: pip install datasets; or pass --input=FILE") from None
    except Exception as e:  # whatever that library and its network raise
        raise ValueError(f"cannot stream {hub}: {type(e).__name__}: {e}; or pass --input=FILE") from None


def shortened(text):
    """The beginning of a text longer than _LONGEST, to the last blank before that if there is one near; else all."""
    return text if len(text) <= _LONGEST else text[: text.rfind(" ", _LONGEST // 2, _LONGEST) + 1 or _LONGEST]


def jsonl_documents():
    """The "text" of each line."""
    with open(input, encoding="utf-8-sig", newline="") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)["text"] + ""  # a string, nothing else
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(f'{input} line {number} is not {{"text": "..."}}') from None


def txt_documents():
    """What lies between separators; where there is none for long, a part of it."""
    rest = ""
    with open(input, encoding="utf-8-sig", newline="") as file:
        while piece := file.read(_LONGEST // 2):
            *whole, rest = (rest + piece).split(separator)
            yield from whole
            if len(rest) > 2 * _LONGEST:
                yield (head := shortened(rest))
                rest = rest[len(head) :]
    yield rest


def documents():
    """(split, text) of the source's documents in its order, none blank; parts of a long one stay together."""
    texts = hub_documents() if not input else jsonl_documents() if input.endswith(".jsonl") else txt_documents()
    for text in islice(texts, max_documents or None):
        text = text.strip()
        split = "val" if zlib.crc32(text.encode(errors="replace")) < val_share * 2**32 else "train"
        while text:
            yield split, (head := shortened(text))
            text = text[len(head) :].strip()


# ---------------------------------------------------------------------------------------------------------------------
# Encoding, in other processes.


def start_process(meta):
    """Each has its tokenizer, leaves Ctrl-C to the main process, and ends with it even if that was killed."""
    global tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    tokenizer = Tokenizer(meta)


def encode(texts):
    """The bytes of the documents' ids, for each split."""
    ids = {"train": [], "val": []}
    for split, text in texts:
        ids[split] += [tokenizer.end_id, *tokenizer.encode(text)]
    return {split: np.array(i, id_type(tokenizer)).tobytes() for split, i in ids.items()}


def encoded(texts, meta, processes):
    """(number of documents, encode() of them), piece by piece in order; a few are under way, however many there are."""
    under_way, spawn = deque(), multiprocessing.get_context("spawn")  # the same on every platform
    with ProcessPoolExecutor(processes, spawn, initializer=start_process, initargs=(meta,)) as pool:
        for piece in iter(lambda: list(islice(texts, _PIECE)), []):
            under_way.append((len(piece), pool.submit(encode, piece)))
            if len(under_way) > 2 * processes:
                count, future = under_way.popleft()
                yield count, future.result()
        for count, future in under_way:
            yield count, future.result()


# ---------------------------------------------------------------------------------------------------------------------
# Writing.


def earlier(source, parts):
    """What an earlier run of the same source has done: documents, and bytes of each split."""
    try:
        found = json.loads((Path(folder) / "progress.json").read_text(encoding="utf-8"))
        if found["source"] == source and all(part.tell() >= found[split] for split, part in parts.items()):
            print(f"going on after {found['documents']:,} documents")
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {"source": source, "documents": 0, "train": 0, "val": 0}


def stamp(path):
    """What tells a file from another, or from itself as it was."""
    return [str(Path(path).resolve()), Path(path).stat().st_size, Path(path).stat().st_mtime_ns] if path else []


def lock(part):
    """Two at once would mix their documents. A lock ends with its process, however that ends; Windows has none."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing into {folder}: wait for it, or set --folder") from None


def check_settings():
    """What would else be found after hours."""
    for wrong, why in ((not 0 < val_share < 1, f"val_share must lie between 0 and 1, got {val_share}"),
                       (not separator, "separator is empty: pass what stands between documents"),
                       (not folder, "folder is empty: name one, . for this one")):
        if wrong:
            raise ValueError(why)


def main(settings):
    check_settings()
    known = vocabulary and Path(vocabulary) / "meta.json"
    meta = json.loads(known.read_text(encoding="utf-8")) if known else {"tokenizer": "gpt2"}
    source = {name: settings[name] for name in settings if name not in ("num_proc", "folder")}
    source |= {"input": stamp(input), "vocabulary": stamp(known)}
    tokenizer, where = Tokenizer(meta), Path(folder)
    if tokenizer.end_id is None:
        raise ValueError(f"the tokenizer of {vocabulary} has no <|endoftext|> to put between documents")
    where.mkdir(parents=True, exist_ok=True)
    parts = {split: open(where / f"{split}.part", "ab") for split in ("train", "val")}
    lock(parts["train"])
    done = earlier(source, parts)
    for split, part in parts.items():
        part.truncate(done[split])  # a kill may have left more behind the last whole piece

    texts = islice(documents(), done["documents"], None)
    bar = tqdm(initial=done["documents"], unit=" documents", disable=None)  # None: only on a terminal
    for count, content in encoded(texts, meta, num_proc or os.cpu_count()):
        for split, part in parts.items():
            part.write(content[split])
            part.flush()
            done[split] += len(content[split])
        done["documents"] += count
        replace(where / "progress.json", json.dumps(done).encode())
        bar.update(count)
    bar.close()
    for split, part in parts.items():
        part.close()
        if not done[split]:
            why = "set --val_share" if done["documents"] else f"there is none in {input or hub}"
            raise ValueError(f"of {done['documents']:,} documents none fell to {split}: {why}")
    for split in parts:
        os.replace(where / f"{split}.part", where / f"{split}.bin")
    write_meta(folder, tokenizer, *(done[split] // id_type(tokenizer).itemsize for split in parts))
    (where / "progress.json").unlink()


if __name__ == "__main__":
    try:
        main(configure(globals()))
    except BrokenProcessPool:
        raise SystemExit("a process died, of memory? The same command goes on; --num_proc=1 needs the least") from None
    except UnicodeDecodeError as e:
        raise SystemExit(f"{input} is not UTF-8 text: {e}") from None
    except ValueError as e:  # of a process, too: a word outside the vocabulary
        raise SystemExit(e) from None
    except OSError as e:
        raise SystemExit(f"{e.filename or folder}: {e.strerror}") from None
