"""
Surgery on checkpoints: a dense model becomes STEM, a vocabulary grows, weights leave for other tools and come back.

    python convert.py --to=stem --out_dir=out/dense_small --save=out/warm --stem_every=2
    python convert.py --to=grow --out_dir=out/stem_small --save=out/grown --words=FILE    # lines like Newtown = Madrid
    python convert.py --to=safetensors --out_dir=out/stem_small --save=out/export    # --to=checkpoint is the way back

Writes best.pt (or model.safetensors) into the folder save, overwrites nothing. It has weights and no dense optimizer:
sample.py takes it and train.py --init_from=PATH, a resume does not. Growing keeps rows' moments, exporting drops them.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # beside another busy process, threads that spin crawl

import torch

import checkpoint
from configurator import configure
from data.loader import open_dataset
from data.writer import replace
from model import GPT, GPTConfig
from stem import StemTables

# ---------------------------------------------------------------------------------------------------------------------
to = ""  # stem, grow, safetensors or checkpoint
out_dir = "out/dense_small"  # of a run (its best.pt, else ckpt.pt) or an export, or the path of a checkpoint
save = ""  # folder for what it becomes
stem_every = 3  # every which layer becomes STEM: 3 = a third, 2 = half, 1 = all from stem_first on
stem_first = 1  # first layer that may be STEM
init = "token_mean"  # of the tables' rows: token_mean, row_mean or random
dataset = ""  # for token_mean; empty = what the model was trained on
batches = 200  # for token_mean: how many of 8 sequences to read
words = "words.txt"  # file of words to grow by
configure(globals(), minimum={"stem_every": 1, "batches": 1})

# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def mean_inputs(layers):  # -> (S, V, C) fp64, in which the mean of equal numbers is that number
    """What the layers' W_u reads, averaged over each token's occurrences; for tokens without any, over all tokens."""
    data = open_dataset(dataset or old.get("settings", {}).get("dataset", ""), model.config.block_size, seed=0)
    checkpoint.check_fit(old, model.config, data.meta)
    total, count = torch.zeros(len(layers), *model.wte.weight.shape, dtype=torch.float64), 0
    for layer, mine in zip(layers, total):
        def add(ffn, inputs, mine=mine):
            mine.index_add_(0, inputs[2].flatten(), inputs[0].flatten(0, 1).double())
        model.blocks[layer].ffn.register_forward_pre_hook(add)
    for i in range(batches):
        x, _ = data.get_batch("train", i, 8)
        plan = tables.plan(x)
        model.hidden(x, tables.fetch(plan), plan.inv)
        count += torch.bincount(x.flatten(), minlength=total.size(1))
    print(f"token_mean  {count.sum():,} tokens of {data.folder}, {(count > 0).sum():,} of {len(count):,} distinct")
    return torch.where(count[:, None] > 0, total / count[:, None], total.sum(1, keepdim=True) / count.sum())


def to_stem():
    """W_u of some layers becomes a table.

    token_mean: row t is the mean, in the dense model, of W_u x where the token is t: of constants the nearest in mean
    square. row_mean: an article's "mean of W_u's rows", those of W_u as (C, M), whose mean has M numbers, for every t.
    """
    change = {"stem_every": stem_every, "stem_first": stem_first, "stem_variant": "up"}
    config = GPTConfig(**old["model_config"] | change)
    if model.config.stem_layers:
        raise ValueError(f"{out_dir} is a STEM model already; only a dense one becomes one")
    names = [f"blocks.{layer}.ffn.w_up.weight" for layer in config.stem_layers]
    w_up = torch.stack([old["model"][name] for name in names]).double()  # (S, M, C)
    new = StemTables(*config.table_shape, std=config.table_std if init == "random" else 0.0)
    if init == "row_mean":
        new.weight.copy_(w_up.mean(dim=2))
    if init == "token_mean":  # W_u times the mean of x
        new.weight.copy_(torch.einsum("svc,smc->vsm", mean_inputs(config.stem_layers), w_up))
    return {"model": {k: w for k, w in old["model"].items() if k not in names}, "tables": new.state_dict()}, change


def grow():
    """New words get the rows behind the old ones', spare ones first; they start as the mean of those named for them."""
    if tokenizer.kind == "gpt2":
        raise ValueError("GPT-2's byte pairs spell every word already, and tiktoken's list of them cannot grow")
    new, n, pieces = {}, tokenizer.vocab_size, str.split if tokenizer.kind == "word" else list
    for line in [s for s in Path(words).read_bytes().decode("utf-8-sig", "replace").split("\n") if s.strip()] or [""]:
        word, _, named = (part.strip() for part in line.partition("="))
        if pieces(word) != [word] or word in {*tokenizer.vocab, *new} or not named:
            raise ValueError(f"{words}: expected a new {tokenizer.kind} = known ones to start as, got {line.strip()!r}")
        new[word] = [i for piece in named.split() for i in tokenizer.encode(piece)]
    def grown(t, mean=True):
        rows = [t[ids].mean(0) if mean else torch.zeros_like(t[0]) for ids in new.values()]
        return torch.cat((t[:n], torch.stack(rows), t[n + len(new) :]))

    weights = {name: grown(w) if name in ("wte.weight", "lm_head.weight") else w for name, w in old["model"].items()}
    rows = {name: grown(t, name == "weight") for name, t in old["tables"].items()}  # the new have no moments yet
    return ({"model": weights, "tables": rows, "meta": old["meta"] | {"vocab": [*tokenizer.vocab, *new]}},
            {"vocab_size": len(weights["wte.weight"])})


def lingua(config, model, weight):
    """{name: view of ours}, names confirmed in Infini-AI-Lab/STEM, lingua/transformer.py and apps/main/stem.py."""
    C, D = config.n_embd, config.n_embd // config.n_head
    parts = {"attn_norm": "attention_norm", "attn.w_out": "attention.wo", "ffn_norm": "ffn_norm",
             "ffn.w_gate": "feed_forward.w1", "ffn.w_down": "feed_forward.w2", "ffn.w_up": "feed_forward.w3"}
    there = {"tok_embeddings": model["wte.weight"], "norm": model["norm.weight"], "output": model["lm_head.weight"]}
    for i in range(config.n_layer):
        q, k, v = model[f"blocks.{i}.attn.w_qkv.weight"].split([C] + 2 * [D * config.n_kv_head])
        q, k = (w.view(-1, 2, D // 2, C).transpose(1, 2) for w in (q, k))  # rotary pairs are neighbours there, not here
        there |= {f"layers.{i}.attention.{name}": w for name, w in (("wq", q), ("wk", k), ("wv", v))}
        there |= {f"layers.{i}.{name}": model[key] for part, name in parts.items()
                  if (key := f"blocks.{i}.{part}.weight") in model}  # but w3 of the gate variant is assumed
    there |= {f"stem_embeddings.{s}": table for s, table in enumerate(weight.unbind(1))}
    return {f"{name}.weight": w for name, w in there.items() if name != "output" or not config.tie_head}


# ---------------------------------------------------------------------------------------------------------------------
if to not in ("stem", "grow", "safetensors", "checkpoint") or init not in ("token_mean", "row_mean", "random"):
    raise SystemExit(f"--to={to!r} or --init={init!r} is none of those that --help lists")
if not save or any((Path(save) / name).exists() for name in ("best.pt", "ckpt.pt", "model.safetensors")):
    raise SystemExit(f"--save={save}: name a folder without a checkpoint, as none is overwritten")
if to in ("safetensors", "checkpoint"):
    try:
        import safetensors.torch
    except ImportError:
        raise SystemExit("this needs a package that is not here: pip install safetensors") from None
old = {} if to == "checkpoint" else checkpoint.load(out_dir)
if to == "checkpoint":
    try:
        with safetensors.safe_open(Path(out_dir) / "model.safetensors", "pt") as f:
            old = {key: json.loads(text) for key, text in f.metadata().items()}
            config = GPTConfig(**old["model_config"])
            old |= {"model": GPT(config).state_dict(), "tables": StemTables(*config.table_shape, 0.0).state_dict()}
            for name, w in lingua(config, old["model"], old["tables"]["weight"]).items():
                w.copy_(f.get_tensor(name).view(w.shape))
    except Exception as e:  # the reader of a bad file raises whatever it stumbles over
        raise ValueError(f"{out_dir} is no folder of --to=safetensors, or is damaged ({type(e).__name__})") from None
model, tables, tokenizer = checkpoint.rebuild(old)
parts, change = {"stem": to_stem, "grow": grow}.get(to, lambda: ({}, {}))()
about = {key: old[key] | change for key in ("model_config", "settings") if key in old} | {"meta": old["meta"]}
new = about | {"model": old["model"], "tables": old["tables"]} | parts
if to == "safetensors":
    there = {name: w.flatten(0, -2).contiguous() if w.dim() > 1 else w  # matrices again
             for name, w in lingua(model.config, old["model"], tables.weight).items()}
    about = {key: json.dumps(value) for key, value in about.items()}
    replace(Path(save) / "model.safetensors", safetensors.torch.save(there, about))
else:
    Path(save).mkdir(parents=True, exist_ok=True)
    checkpoint.save(Path(save) / "best.pt", new)
print(f"saved {save}")
