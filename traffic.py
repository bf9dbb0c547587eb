"""
What moves, counted and not timed: rows between host and device, by how a cache chooses those to keep, and what
processes send each other in a step. bench.py measures what that takes. Nothing is trained; rows do as in training.

    python traffic.py                                 # a minute on a CPU; needs data/shakespeare/prepare.py to have run
    python traffic.py --datasets=facts --steps=100

    lfu                  this project's cache (offload.py): tokens of most steps, older ones count less; swaps must pay
    lru                  takes in each row it misses, in place of the one that was not used for the longest time
    top of the text      the most frequent tokens of the train split, which never change
    top of these steps   the best that never change, in hindsight
"""

import math
from collections import OrderedDict

import torch

from configurator import configure
from data.loader import open_dataset
from model import GPT, GPTConfig
from offload import HostTables

# ---------------------------------------------------------------------------------------------------------------------
datasets = "shakespeare,facts"  # folders of data/, or the paths of some, that a prepare.py has filled
steps = 1000  # of 512 tokens, of which to count a cache's hits

# ---------------------------------------------------------------------------------------------------------------------
# Caches. Each gives (hot rows, swaps, bytes a number) of each step; batches: the distinct ids of each.


def lfu(batches, V, K):
    """K rows by this project's cache, started as train.py does."""
    tables, counts = HostTables(V, 1, 1, None, max_rows=V, cache_rows=K), []  # rows of a single number
    tables.warm_start(batches[:100])
    for ids in batches:
        plan = tables.plan(ids)
        rows = tables.fetch(plan)
        rows.grad = torch.zeros_like(rows)
        tables.update(plan, rows, 0.0)
        moved = tables.moved
        counts.append((moved["hot"], moved["swaps"], moved["bytes_up"] + moved["bytes_down"]))
    return counts


def lru(batches, K):
    """A swap is 12 bytes each way, weight and moments; a row that is not kept 4 up, and 4 of gradient down."""
    cache, counts = OrderedDict(), []
    for ids in map(torch.Tensor.tolist, batches):
        hot = sum(token in cache for token in ids)
        taken = min(K, len(ids) - hot)
        cache |= dict.fromkeys(ids)
        for token in ids:
            cache.move_to_end(token)
        while len(cache) > K:
            cache.popitem(last=False)
        counts.append((hot, taken, 24 * taken + 8 * (len(ids) - hot - taken)))
    return counts


def top(batches, uses, K):
    """The K tokens with the most uses."""
    kept = torch.zeros(len(uses), dtype=torch.bool)
    kept[uses.topk(K).indices] = True
    return [(int(kept[ids].sum()), 0, 8 * int((~kept[ids]).sum())) for ids in batches]


def compare_caches(name):
    """Print what each cache keeps and moves of a dataset's rows, with room for some shares of its tokens."""
    data = open_dataset(name, 64, 0)
    V, batches = data.tokenizer.vocab_size, [data.get_batch("train", step, 8)[0].unique() for step in range(steps)]
    corpus = torch.from_numpy(data.tokens("train").astype("int64")).bincount(minlength=V)
    presence = torch.cat(batches).bincount(minlength=V)
    needed = sum(map(len, batches))
    print(f"{name}: {needed / steps:.1f} distinct of 512 tokens, {steps:,} steps\n"
          f"{'cached rows':32} rows hit   swaps a step   bytes over no cache's")
    for share in (0.01, 0.05, 0.25):
        K = round(share * int((corpus > 0).sum()))
        counts = {"lfu": lfu(batches, V, K), "lru": lru(batches, K), "top of the text": top(batches, corpus, K),
                  "top of these steps": top(batches, presence, K)}
        for cache, count in counts.items():
            hot, swaps, moved = map(sum, zip(*count))
            print(f"{K:6,}, {share:4.0%}  {cache:18} {hot / needed:8.2%} {swaps / steps:14.4g} "
                  f"{moved / (8 * needed):23.4g}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Processes.


def step_bytes(config, ids):
    """Bytes that a rank sends in a step on ids (world, B, T), on average, there and back, each rank a batch of its own.

    here: the rows of those of its distinct ids that it does not own (shard.py). replicas: all-reduced, the rows of all
    ranks' distinct ids. split: tables split along d_ff give and take (world - 1) / world of a row for each token.
    dense: DDP's, beside any of them.
    """
    world, row = len(ids), 4 * math.prod(config.table_shape[1:])
    not_owned = [(part.unique() % world != rank).sum().item() for rank, part in enumerate(ids)]
    with torch.device("meta"):
        dense = 4 * GPT(config).active_parameters()
    share = 2 * (world - 1) / world
    return {"here": 2 * row * sum(not_owned) / world, "replicas": share * row * len(ids.unique()),
            "split": share * row * ids[0].numel(), "dense": share * dense}


def compare_processes(name):
    """Print step_bytes of a model of width 384 and 6 layers, a third of them STEM, by the number of processes."""
    data = open_dataset(name, 256, 0)
    config = GPTConfig(block_size=256, vocab_size=data.tokenizer.vocab_size, n_layer=6, n_head=6, n_kv_head=0,
                       n_embd=384, d_ff=0, dropout=0.0, wte_dropout=0.0, rope_base=10000.0, tie_head=False,
                       stem_every=3, stem_first=1, stem_variant="up")
    for sequences in (8, 64):
        ids = data.get_batch("train", 0, sequences)[0]
        print(f"{name}: {len(ids.unique()):,} distinct of {ids.numel():,} tokens, MiB that a process sends in a step\n"
              "processes       here   replicas      split      dense")
        for world in (2**i for i in range(1, 7) if 2**i <= sequences):
            sizes = step_bytes(config, ids.unflatten(0, (world, -1))).values()
            print(f"{world:9}", *(f"{size / 2**20:10.4g}" for size in sizes))


if __name__ == "__main__":
    configure(globals(), minimum={"steps": 1})
    for dataset in datasets.split(","):  # said now, not after minutes
        open_dataset(dataset, 256, 0)
    for dataset in datasets.split(","):
        compare_caches(dataset)
        compare_processes(dataset)
