"""
Continue a text with a trained model, printed as it is made.

    python sample.py --out_dir=out/stem_small --start="The capital of Spain is"
    python sample.py --out_dir=out/stem_small --start=FILE:prompt.txt --temperature=0 --num_samples=1

Needs the checkpoint alone, no config and no data. Speaks only the words of its training data if their tokens are words.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # beside another busy process, threads that spin crawl

import torch

import checkpoint
from configurator import configure
from device import choose_device

# ---------------------------------------------------------------------------------------------------------------------
out_dir = "out/stem_small"  # of a run (its best.pt, else ckpt.pt), or the path of a checkpoint
start = ""  # text to continue; FILE:path reads it from a file; empty starts a new document
num_samples = 1
max_new_tokens = 100
temperature = 0.8  # 0 = always the likeliest token; below 1 closer to that, above 1 wilder
top_k = 0  # choose among that many likeliest tokens, 0 = all
stop = True  # end a sample at <|endoftext|>; False goes on into the next document
seed = 1
device = "auto"  # auto (cuda, else mps, else cpu), or a torch device such as cpu or cuda:1
dtype = "auto"  # auto, float32, bfloat16 or float16
offload = False  # tables in host memory, only the rows in use on the device
cache_rows = 0  # with offload: rows of the most used tokens that stay on the device, -1 = half its free memory
table_dtype = "float32"  # with offload: of rows in memory, int8 takes a quarter; those in the cache are float32
configure(globals(), minimum={"cache_rows": -1})
if table_dtype not in ("float32", "int8"):
    raise SystemExit(f"table_dtype must be float32 or int8, got {table_dtype!r}")
if not offload and (cache_rows or table_dtype == "int8"):
    raise SystemExit("cache_rows and int8 need --offload=True, tables in host memory")

# ---------------------------------------------------------------------------------------------------------------------
if start.startswith("FILE:"):
    try:
        start = Path(start.removeprefix("FILE:")).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise SystemExit(f"cannot read the prompt {start!r}: {e}") from None
device, torch_dtype = choose_device(device, dtype)
model, tables, tokenizer = checkpoint.rebuild(checkpoint.load(out_dir), device, torch_dtype, offload, cache_rows,
                                              table_dtype == "int8")
prompt = tokenizer.encode(start)
if not prompt:  # something must come first: a document's start, or where there are no documents, a line's
    prompt = [tokenizer.end_id] if tokenizer.end_id is not None else tokenizer.encode("\n")
if len(prompt) > model.config.block_size:
    print(f"the prompt has {len(prompt)} tokens, the model reads the last {model.config.block_size}", file=sys.stderr)

# ---------------------------------------------------------------------------------------------------------------------
torch.manual_seed(seed)
for _ in range(num_samples):
    ids, printed = list(prompt), 0
    for token in model.generate(tables, torch.tensor([prompt]), max_new_tokens, temperature, top_k,
                                tokenizer.end_id if stop else None, tokenizer.vocab_size):
        ids.append(token.item())
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # half of a character that takes two tokens
            print(text[printed:], end="", flush=True)
            printed = len(text)
    print(tokenizer.decode(ids)[printed:])
