"""
Checkpoints: one file that rebuilds a model with no flags and no data folder, written so that no crash can spoil it.

    save("out/ckpt.pt", checkpoint)                    # whole or not at all
    checkpoint = load("out")                           # the run's best.pt, else its ckpt.pt; or any file by its path
    model, tables, tokenizer = rebuild(checkpoint)     # ready to sample from

A checkpoint is a dict of tensors and plain Python values only, so torch.load(weights_only=True) takes it, and a file
from a stranger can run no code. Its keys: format; model_config (GPTConfig); meta (the tokenizer); settings (of
train.py); model, optimizer and scaler (torch state dicts); tables (every row with moments and counts, the same
whatever mode wrote it); step (optimizer steps done); seconds of training; best_val_loss.
"""

import os
import sys
from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from device import rows_that_fit
from model import GPT, GPTConfig
from offload import FrozenTables
from stem import StemTables

FORMAT = 1  # goes up when an older load() could not read the file
MODEL_KEYS = ("model_config", "meta", "model", "tables")
RUN_KEYS = {"settings": dict, "optimizer": dict, "scaler": dict, "step": int, "seconds": float,
            "best_val_loss": float}
FREE = ("block_size", "dropout", "wte_dropout", "rope_base", "doc_id")  # of a shape: what weights do not depend on


def save(path, checkpoint):
    """Write a checkpoint (all but its format) to path: after a crash at any moment the old file is there, or the new.

    ValueError if the file cannot be written (a full disk); the old one is then untouched.
    """
    path, temporary = Path(path), Path(f"{path}.{os.getpid()}.tmp")  # another run's in the same folder is another
    try:
        with open(temporary, "wb") as f:
            torch.save({"format": FORMAT} | checkpoint, f)
            f.flush()
            os.fsync(f.fileno())  # a rename may reach the disk before the data does
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:  # torch reports a failed write as RuntimeError
        temporary.unlink(missing_ok=True)
        reason = e.strerror if isinstance(e, OSError) else "perhaps the disk is full"
        raise ValueError(f"cannot write {path}: {reason}. What stood there before, if anything, still does") from e


def load(path, resume=False):
    """The checkpoint in a file, or in a run's out_dir. Tensors are mapped from the file and read when used.

    resume: also insist on what a run needs to go on, rather than on what a model needs.
    ValueError, in one line, if there is none, or it is cut short, foreign, unsafe or of a newer format.
    """
    path = Path(path)
    if path.is_dir():
        path = next((p for p in (path / "best.pt", path / "ckpt.pt") if p.is_file()), path / "best.pt")
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}: train first, or name another folder or file")
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        newer = checkpoint["format"] > FORMAT
    except PermissionError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    except UnicodeEncodeError:  # torch opens the file by its name in UTF-8
        raise ValueError(f"this locale cannot spell the path of {path.name}: set PYTHONUTF8=1") from None
    except Exception as e:  # torch.load has no error of its own: a bad file raises whatever its reader stumbles over
        raise ValueError(f"{path} is not a checkpoint of this project, or damaged ({type(e).__name__})") from None
    if newer:
        raise ValueError(f"{path} has format {checkpoint['format']}, this version reads up to {FORMAT}: update it")
    lacking = [key for key in MODEL_KEYS if not isinstance(checkpoint.get(key), dict)]
    lacking += [key for key, kind in RUN_KEYS.items() if resume and not isinstance(checkpoint.get(key), kind)]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}" + "; --init_from=PATH needs only weights" * resume)
    # other tools' files may carry the prefixes of compiled and wrapped models; ours never do
    weights = checkpoint["model"]
    checkpoint["model"] = {key.removeprefix("module.").removeprefix("_orig_mod."): weights[key] for key in weights}
    return checkpoint


def check_fit(checkpoint, config, meta):
    """ValueError if a checkpoint's weights do not fit a GPTConfig, or its vocabulary a dataset's meta."""
    if any(checkpoint["meta"].get(key) != meta.get(key) for key in ("tokenizer", "vocab")):
        raise ValueError("the dataset has another vocabulary than the checkpoint was trained with; set --dataset")
    for name, here in vars(config).items():
        was = checkpoint["model_config"].get(name)
        if was != here and name not in FREE:
            raise ValueError(f"{name} is {here!r} here and {was!r} in the checkpoint: leave it as it was")


def fill(model, tables, checkpoint):
    """Load a checkpoint's weights and tables. ValueError if they are not those of the model's shape."""
    try:
        model.load_state_dict(checkpoint["model"])
        # on the CPU mapped from the file, not copied; but Windows cannot replace a file that is mapped
        tables.load_state_dict(checkpoint["tables"], assign=sys.platform != "win32")
    except (RuntimeError, TypeError, AttributeError) as e:
        raise ValueError(f"the checkpoint's weights do not fit its shape ({type(e).__name__}): damaged?") from None


def rebuild(checkpoint, device="cpu", dtype=torch.float32, offload=False, cache_rows=0, int8=False):
    """A checkpoint's model, in eval mode, its tables and its tokenizer.

    offload: the tables are FrozenTables, in host memory, with cache_rows on the device (-1 = as fit), rounded if int8.
    """
    try:
        config = GPTConfig(**checkpoint["model_config"])
        tokenizer = Tokenizer(checkpoint["meta"])
    except (TypeError, KeyError) as e:
        raise ValueError(f"the checkpoint's model_config or meta is not one ({type(e).__name__}): damaged?") from None
    model = GPT(config, dtype).to(device).eval()
    if offload:
        cache_rows = rows_that_fit(cache_rows, config.table_shape, 4, device)
        tables = FrozenTables(*config.table_shape, device, cache_rows, int8)
    else:
        tables = StemTables(*config.table_shape, std=None, device=device)
    fill(model, tables, checkpoint)
    return model, tables, tokenizer
