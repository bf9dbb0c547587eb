"""
How fast, and in how much memory: STEM beside its dense twin, beside torch's own parts, with and without KV cache.

    python bench.py                                  # all sections, minutes on a CPU
    python bench.py --only=training,decode --json=bench.json

Contenders of a section take turns in one process, on random ids as frequent as words are; shown are the median of a
step's milliseconds and the median over the rounds of their ratio, since a machine's mood shifts from minute to minute
and its ratios much less. Peak memory is that of a process of its own.

    training    STEM in all layers but the first over its dense twin, beside what their FLOPs predict
    memory      peak memory of both, at two sizes of a step, and by those the largest that fits
    plain       the dense twin over a model of the same matmuls in torch's own modules, below
    embedding   training over STEM with nn.Embedding tables under torch.optim.AdamW
    tables      fetch, lookup, its gradient and update alone, over the same and over larger vocabularies
    decode      generating with and without KV cache, STEM over dense
    offload     training and generating with tables in host memory over resident, on real text and on uniform ids
    cache       training with tables in host memory and the rows of 560 tokens on the device, over without
    int8        perplexity of out_dir's model on its val split with its tables in int8, and generating with them
    shard       2 processes over one at the same batch, on real text

The last four need data/shakespeare/prepare.py to have run, int8 a trained config/stem_shakespeare.py. What other caches
and more processes would move is counted, not timed: traffic.py.
"""

import functools
import math
import multiprocessing
import os
import platform
import socket
import statistics
import time
from json import dumps
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # beside another busy process, threads that spin crawl

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from configurator import configure
from data.loader import open_dataset
from device import choose_device, join_processes, peak_memory, total
from model import GPT, GPTConfig
from offload import FrozenTables, HostTables
from shard import ShardedTables
from stem import Plan, StemTables

# ---------------------------------------------------------------------------------------------------------------------
only = ""  # sections, as "training,decode"; empty = all
rounds = 7  # measured turns of each contender, after one that is not
memory_limit = 8.0  # GiB for which to tell the largest batch
out_dir = "out/stem_shakespeare"  # the run whose model the int8 section takes
json = ""  # file to write the rows to, too
device = "auto"  # auto (cuda, else mps, else cpu), or a torch device such as cpu or cuda:1
dtype = "auto"  # auto, float32, bfloat16 or float16

# ---------------------------------------------------------------------------------------------------------------------
# Contenders.


def shape(n_embd, n_layer, vocab_size, stem_every):
    """A GPTConfig of heads of 64 and contexts of 256."""
    return GPTConfig(block_size=256, vocab_size=vocab_size, n_layer=n_layer, n_head=n_embd // 64, n_kv_head=0,
                     n_embd=n_embd, d_ff=0, dropout=0.0, wte_dropout=0.0, rope_base=10000.0, tie_head=False,
                     stem_every=stem_every, stem_first=1, stem_variant="up")


class EmbeddingTables:
    """Tables as torch offers them: an nn.Embedding a layer, its gradient as large as itself, AdamW over all rows."""

    def __init__(self, V, S, M):
        self.weights = [nn.Embedding(V, M, device=device).weight for _ in range(S)]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3, fused=True)

    def plan(self, ids):
        return Plan(ids.unique(), ids)

    prefetch = StemTables.prefetch

    def reduce(self, plan, rows):
        """There is no clipping here."""

    def fetch(self, plan):
        return SimpleNamespace(unbind=lambda dim: self.weights)  # as rows (V, S, M) would be

    def update(self, plan, rows, lr):
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainBlock(nn.Module):
    """The dense block in torch's own modules."""

    def __init__(self, C, M, H):
        super().__init__()
        self.H, self.norm1, self.norm2 = H, nn.RMSNorm(C), nn.RMSNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((C, M), (C, M), (M, C)))

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.H, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PlainGPT(nn.Module):
    """nanoGPT's model with the dense twin's matmuls, learnt positions, and nothing of this project."""

    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.blocks = nn.ModuleList(PlainBlock(c.n_embd, c.d_ff, c.n_head) for _ in range(c.n_layer))
        self.norm, self.head = nn.RMSNorm(c.n_embd), nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def forward(self, ids, rows, inv, targets):
        x = self.wte(ids) + self.wpe.weight[: ids.size(1)]
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def trained_tables(V, S, M):
    """StemTables with every page of their memory in use, as after long training."""
    tables = StemTables(V, S, M, 0.02, device=device)
    tables.exp_avg.fill_(1e-3)
    tables.exp_avg_sq.fill_(1e-6)
    return tables


def host_tables(V, S, M, cache_rows=0):
    """The same tables in host memory; a cache is filled for text_batch."""
    tables = HostTables(V, S, M, None, device=device, max_rows=2048, dtype=dtype, cache_rows=cache_rows)
    tables.load_state_dict(trained_tables(V, S, M).state_dict(), assign=True)
    if cache_rows:
        tables.warm_start(text_batch(None, 8, step)[0] for step in range(100))
    return tables


def frozen_tables(V, S, M, **more):
    """The same to generate with."""
    tables = FrozenTables(V, S, M, device, **more)
    tables.load_state_dict(trained_tables(V, S, M).state_dict(), assign=True)
    return tables


def sharded_tables(V, S, M):
    """The same, of which each process holds a part."""
    return ShardedTables(lambda V, S, M, *rest: trained_tables(V, S, M), V, S, M, 0.02, device=device)


@functools.cache
def shakespeare():
    """Shakespeare's plays in GPT-2's byte pairs, read once."""
    return open_dataset("shakespeare", 256, 0)


def text_batch(config, n, step):
    """n sequences of them."""
    return shakespeare().get_batch("train", step, n)


def two_text_batches(config, n, step):
    """The same sequences for two ranks."""
    return [t.unflatten(0, (2, -1)) for t in text_batch(config, n, step)]


def random_batch(config, n, step, exponent=1.0):
    """n sequences of random ids, the r-th as frequent as words are, 1 / (r + 2.7) ** exponent, and their targets."""
    random = torch.Generator().manual_seed(step)
    weights = (torch.arange(config.vocab_size) + 3.7) ** -exponent
    ids = torch.multinomial(weights, n * (config.block_size + 1), replacement=True, generator=random).view(n, -1)
    return ids[:, :-1], ids[:, 1:]


def training_step(config, tokens, make_model=GPT, make_tables=trained_tables, batch=random_batch, part=slice(None)):
    """A function that trains a new model for one more step on that many tokens, or a part; returns its tables."""
    model, tables, step = make_model(config).to(device), make_tables(*config.table_shape), 0
    model.dtype = dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    n = tokens // config.block_size
    x, y = batch(config, n, 0)
    plan = tables.plan(x)

    def train():
        nonlocal x, y, plan, step
        rows, step = tables.fetch(plan), step + 1
        next_x, next_y = batch(config, n, step)
        next_plan = tables.plan(next_x)
        tables.prefetch(next_plan)
        ids, inv, targets = (t[part].to(device) for t in (x, plan.inv, y))
        model(ids, rows, inv, targets).backward()
        tables.reduce(plan, rows)
        optimizer.step()
        tables.update(plan, rows, 1e-3)
        optimizer.zero_grad()
        x, y, plan = next_x, next_y, next_plan
        return tables

    return train


def tables_step(V, make_tables=trained_tables):
    """A function that does the tables' part of that step: 256 tokens, the same of 8,192 spread over any vocabulary."""
    S, M = shape(384, 6, V, 1).table_shape[1:]
    tables, random = make_tables(V, S, M), torch.Generator().manual_seed(0)
    gradients = [torch.randn(1, 256, M, device=device) for _ in range(S)]

    def step():
        plan = tables.plan(torch.randint(8192, (1, 256), generator=random) * (V // 8192))
        rows, inv = tables.fetch(plan), plan.inv.to(device)
        torch.autograd.backward([F.embedding(inv, table) for table in rows.unbind(1)], gradients)
        tables.update(plan, rows, 1e-3)

    return step


def generation(stem_every, use_cache=True, make_tables=trained_tables, n=1):
    """A function that generates n sequences up to a full context of 256 tokens."""
    config = shape(384, 6, 8192, stem_every)
    model, tables = GPT(config, dtype).to(device).eval(), make_tables(*config.table_shape)
    return lambda: list(model.generate(tables, torch.zeros(n, 1, dtype=torch.int64), 255, use_cache=use_cache))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring.


def report(what, value, unit="", goal="", **more):
    """One line of the table and one dict of the file."""
    results.append({"section": section, "what": what, "value": value, "unit": unit, "goal": goal} | more)
    spread = "{:,.4g} to {:,.4g}".format(*more["spread"]) if "spread" in more else ""
    print(f"{section:10} {what:40} {value:10,.4g} {unit:4} {spread or goal and 'goal: ' + goal}".rstrip(), flush=True)


def report_times(times):
    """Medians of {name: milliseconds in each round}, which it returns."""
    for name, ms in times.items():
        report(name, statistics.median(ms), "ms", spread=[min(ms), max(ms)])
    return times


def time_of(run, calls=1):
    """Milliseconds that a call takes, on the device too."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start) / calls


def take_turns(**contenders):
    """{name: milliseconds a call in each round} of functions that take turns; prints medians."""
    calls = {name: math.ceil(500 / time_of(run)) for name, run in contenders.items()}  # a turn: half a second or more
    turns = [{name: time_of(run, calls[name]) for name, run in contenders.items()} for _ in range(rounds)]
    return report_times({name: [turn[name] for turn in turns] for name in contenders})


def ratio(times, over, under):
    """The median over rounds."""
    return statistics.median(a / b for a, b in zip(times[over], times[under]))


def in_processes(n, run, *args):
    """What run(rank, *args) returns in each of n new processes, which get this one's settings."""
    with multiprocessing.get_context("spawn").Pool(n, take_settings, (device, dtype, rounds)) as pool:
        return pool.starmap(run, [(rank, *args) for rank in range(n)], chunksize=1)


def take_settings(*settings):
    """What such a process does first."""
    global device, dtype, rounds
    device, dtype, rounds = settings


def peak(*args):
    """GiB at most in use while a process of its own takes three steps of training_step(*args)."""
    return in_processes(1, take_three, *args)[0] / 2**30


def take_three(_, *args):
    """What that process does."""
    step = training_step(*args)
    for _ in range(3):
        step()
    return peak_memory(device)


def one_of_two(rank, port, config, tokens):
    """{name: milliseconds in each round} of steps that rank 0 takes alone and that both share, a thread each."""
    global device
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": f"{port}"}
    join_processes()
    device, _ = choose_device(device.split(":")[0], "auto", rank)

    def replicated(config):
        return DistributedDataParallel(GPT(config, dtype).to(device), gradient_as_bucket_view=True)

    alone = training_step(config, tokens, batch=text_batch) if rank == 0 else None
    both = training_step(config, tokens, replicated, sharded_tables, two_text_batches, rank)
    turns = [(total(time_of(alone) if rank == 0 else 0), time_of(both)) for _ in range(rounds + 1)]  # total: 1 waits
    return dict(zip(("one process", "two processes"), zip(*turns[1:])))


def train_with(batch, **kinds):
    """The times of training with kinds of tables, a third of the layers STEM, and what a step of each moves."""
    steps = {name: training_step(shape(384, 6, 50257, 3), 2048, GPT, make, batch) for name, make in kinds.items()}
    return take_turns(**steps), {name: step().moved for name, step in steps.items()}


def report_moved(name, moved, ms):
    """What a step with tables in host memory moves and waits for."""
    for what in ("rows", "hot", "early"):
        report(f"{name}: {what} of 2,048 tokens", moved[what])
    report(f"{name}: up and down a step", (moved["bytes_up"] + moved["bytes_down"]) / 2**20, "MiB")
    report(f"{name}: fetch waited", moved["host_stall_ms"], "ms")
    if device.startswith("cuda"):
        report(f"{name}: the device waited", moved["device_stall_ms"], "ms")
        report(f"{name}: of a step", moved["device_stall_ms"] / statistics.median(ms), goal="below 0.05")


def pinned_copy():
    """What the machine's link can do, beside the offloaded steps' bytes over their time."""
    host, there = torch.empty(2**26, pin_memory=True), torch.empty(2**26, device=device)
    ways = {"up": (there, host), "down": (host, there)}
    times = take_turns(**{way: lambda to=to, of=of: to.copy_(of, non_blocking=True) for way, (to, of) in ways.items()})
    for way, ms in times.items():
        report(f"pinned copy {way}", 2**28 / 1e6 / statistics.median(ms), "GB/s")


# ---------------------------------------------------------------------------------------------------------------------
# Sections.


def training():
    dense, full = (shape(512, 12, 8192, stem_every) for stem_every in (0, 1))
    times = take_turns(dense=training_step(dense, 1024), stem=training_step(full, 1024))
    with torch.device("meta"):
        predicted = GPT(dense).flops_per_token() / GPT(full).flops_per_token()
    report("speed-up that FLOPs predict", predicted)
    report("speed-up", ratio(times, "dense", "stem"))
    report("of the predicted", ratio(times, "dense", "stem") / predicted, goal="at least 0.92")


def memory():
    for name, stem_every in (("dense", 0), ("stem", 1)):
        config = shape(512, 12, 8192, stem_every)
        small, large = (peak(config, tokens) for tokens in (1024, 4096))
        report(f"{name}, 1,024 tokens", small, "GiB")
        report(f"{name}, 4,096 tokens", large, "GiB")
        fit = 1024 + 3072 * (memory_limit - small) / (large - small)
        report(f"{name}, fits into {memory_limit} GiB by those two", fit // 256 * 256, "tok.")


def plain():
    config = shape(384, 6, 8192, 0)
    times = take_turns(plain=training_step(config, 1024, PlainGPT), dense=training_step(config, 1024))
    report("dense over plain", ratio(times, "plain", "dense"), goal="at least 1.0")


def embedding():
    config = shape(384, 6, 50257, 1)
    times = take_turns(embedding=training_step(config, 256, GPT, EmbeddingTables), stem=training_step(config, 256))
    report("stem over nn.Embedding", ratio(times, "embedding", "stem"), goal="at least 1.8")
    theirs, ours = (peak(config, 256, GPT, kind) for kind in (EmbeddingTables, trained_tables))
    report("peak memory, nn.Embedding", theirs, "GiB")
    report("peak memory, stem", ours, "GiB")
    report("peak memory, stem over nn.Embedding", ours / theirs, goal="at most 0.85")


def tables():
    times = take_turns(embedding=tables_step(50257, EmbeddingTables), stem=tables_step(50257))
    report("stem over nn.Embedding", ratio(times, "embedding", "stem"), goal="at least 10")
    times = take_turns(V8k=tables_step(8192), V50k=tables_step(50257), V128k=tables_step(128256))
    report("V = 8k over 50k", ratio(times, "V8k", "V50k"), goal="0.9 to 1.1")
    report("V = 128k over 50k", ratio(times, "V128k", "V50k"), goal="0.9 to 1.1")


def decode():
    times = take_turns(**{f"{name} {how}": generation(stem_every, how == "cached")
                          for name, stem_every in (("dense", 0), ("stem", 1)) for how in ("uncached", "cached")})
    report("KV cache over none, stem", ratio(times, "stem uncached", "stem cached"), goal="at least 5")
    report("stem over dense, cached", ratio(times, "dense cached", "stem cached"), goal="at least 1.0")


def offload():
    for name, batch in (("text", text_batch), ("uniform ids", functools.partial(random_batch, exponent=0.0))):
        times, moved = train_with(batch, resident=trained_tables, offloaded=host_tables)
        report(f"{name}: offloaded over resident, ms", ratio(times, "offloaded", "resident"), goal="at most 1.10")
        report_moved(name, moved["offloaded"], times["offloaded"])
    for n in (1, 8):
        times = take_turns(resident=generation(3, n=n), offloaded=generation(3, make_tables=frozen_tables, n=n))
        report(f"decoding {n}: offloaded over resident, ms", ratio(times, "offloaded", "resident"))
    if device.startswith("cuda"):
        pinned_copy()


def cache():
    with_cache = functools.partial(host_tables, cache_rows=560)
    times, moved = train_with(text_batch, offloaded=host_tables, cached=with_cache)
    report("training with 560 cached rows over without, ms", ratio(times, "cached", "offloaded"))
    for name in times:
        report_moved(name, moved[name], times[name])


@torch.no_grad()
def int8():
    saved = checkpoint.load(out_dir)
    data = open_dataset(saved["settings"]["dataset"], saved["model_config"]["block_size"], 0)
    ways = {"fp32": {}, "int8": {"int8": True}, "int8, 560 hot rows in fp32": {"int8": True, "cache_rows": 560}}
    perplexity = {}
    for name, how in ways.items():
        model, tables, _ = checkpoint.rebuild(saved, device, dtype, offload=True, **how)
        losses = []
        for step in range(50):
            x, y = data.get_batch("val", step, 8)
            plan = tables.plan(x)
            losses.append(model(x.to(device), tables.fetch(plan), plan.inv.to(device), y.to(device)).item())
        perplexity[name] = math.exp(statistics.mean(losses))
        report(f"perplexity, {name}", perplexity[name])
        report(f"perplexity over fp32's, {name}", 100 * (perplexity[name] / perplexity["fp32"] - 1), "%")
        report(f"rows in memory, {name}", (tables.host.weight.nbytes + tables.scale.nbytes) / 2**20, "MiB")
    times = take_turns(fp32=generation(3, make_tables=frozen_tables),
                       int8=generation(3, make_tables=functools.partial(frozen_tables, int8=True)))
    report("generating, int8 over fp32, ms", ratio(times, "int8", "fp32"))


def shard():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    times = report_times(in_processes(2, one_of_two, port, shape(384, 6, 50257, 3), 2048)[0])
    report("speed-up of two processes", ratio(times, "one process", "two processes"))


# ---------------------------------------------------------------------------------------------------------------------
SECTIONS = {f.__name__: f for f in (training, memory, plain, embedding, tables, decode, offload, cache, int8, shard)}
NEEDS = {"offload": shakespeare, "cache": shakespeare, "shard": shakespeare, "int8": lambda: checkpoint.load(out_dir)}

if __name__ == "__main__":
    configure(globals(), minimum={"rounds": 1})
    if unknown := set(only.split(",")) - {"", *SECTIONS}:
        raise SystemExit(f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    device, dtype = choose_device(device, dtype)
    results, sections = [], only.split(",") if only else list(SECTIONS)
    for section in list(sections):
        try:
            NEEDS.get(section, int)()
        except ValueError as e:  # said now, not after minutes
            if only:
                raise
            sections.remove(section)
            print(f"{section:10} left out: {e}")
    for section in sections:
        SECTIONS[section]()
    if json:
        machine = {"processor": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        Path(json).write_text(dumps({"machine": machine, "results": results}, indent=1), encoding="utf-8")
