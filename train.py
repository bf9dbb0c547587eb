"""
Train a GPT, dense or STEM, on a dataset of data/, and leave in out_dir what sample.py needs.

    python train.py config/stem_small.py                           # a config file's settings
    python train.py config/stem_small.py --stem_every=1 --seed=2   # and flags over them; --help lists all
    python train.py --init_from=resume --out_dir=out/stem_small    # go on where a run stopped, with its settings
    python train.py config/stem_small.py --dry_run=True            # what a model would cost, allocating nothing
    torchrun --standalone --nproc_per_node=8 train.py config/stem_openwebtext.py   # the same run by 8 processes

Writes ckpt.pt (the latest, to resume from), best.pt (lowest val loss, to sample from), log.csv (a row a step) and, at
the end, summary.json. Ctrl-C finishes the step, saves and leaves.

The shape of a step is that of nanoGPT; what STEM adds are the calls on `tables`. A step is a function of (seed, step):
its batch is drawn, and dropout reseeded, from them alone. So the next batch is known in advance, and resuming needs no
state of a random number generator. Of several processes (ranks) each draws the whole batch and takes its share of the
micro-batches; all hold the model, each a part of the tables (shard.py), and rank 0 writes.
"""

import contextlib
import copy
import csv
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # beside another busy process, threads that spin crawl

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import checkpoint
from configurator import arguments, settings_of
from data.loader import open_dataset, recall
from device import choose_device, compiled, join_processes, peak_memory, rows_that_fit, total
from model import GPT, GPTConfig, print_accounting
from offload import FrozenTables, HostTables
from shard import ShardedTables
from stem import Plan, StemTables

# ---------------------------------------------------------------------------------------------------------------------
# Settings. Names and meanings are nanoGPT's where it has them.

out_dir = "out"  # where the run's files go, from the current directory
init_from = "scratch"  # scratch, resume (out_dir's ckpt.pt), or the path of a checkpoint whose weights to start from
eval_only = False  # evaluate what init_from names, train nothing
dry_run = False  # print parameters, FLOPs and memory, allocate nothing
seed = 1  # of weights, tables, batches and dropout
train_only = ""  # rows = table rows alone, of what init_from names; empty = all weights and rows
rows = "all"  # with train_only=rows, of which tokens: all, frequent:N (in train.bin) or a file of words, one a line
# data
dataset = "facts"  # a folder of data/, or the path of one, that a prepare.py has filled
batch_size = 8  # sequences in a micro-batch
block_size = 64  # tokens in a sequence
gradient_accumulation_steps = 1  # micro-batches in a step, over all processes
# model
vocab_size = 0  # 0 = the dataset's; may be larger, to pad it
n_layer = 4
n_head = 2
n_kv_head = 0  # key and value heads, each shared by n_head / n_kv_head query heads; 0 = n_head
n_embd = 64
d_ff = 0  # width of the feed-forward layers and of a table row; 0 = 8/3 n_embd, rounded up to a multiple of 32
dropout = 0.0
wte_dropout = 0.0  # share of positions whose token embedding is zeroed in training; their table rows stay
rope_base = 10000.0
doc_mask = False  # attend to nothing before the document's <|endoftext|>; takes the place of the causal kernel
tie_head = False  # the output head is the token embedding
stem_every = 3  # every which layer is STEM: 0 = none (dense), 3 = a third, 2 = half, 1 = all from stem_first on
stem_first = 1  # first layer that may be STEM
stem_variant = "up"  # what the table row replaces: up, gate, add (to the up-projection) or hybrid; hash = Hash-MoE
# optimizer
learning_rate = 2e-3
max_iters = 2000  # steps
weight_decay = 0.1  # of dense matrices; tables and norms never decay
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0  # joint norm of dense and row gradients is clipped to this, 0 = off
stem_lr_scale = 1.5  # learning rate of table rows over the dense one
dense_adamw = False  # plan every id at every step: AdamW without its row-wise saving, to compare with
decay_lr = True  # cosine from learning_rate to min_lr; False = constant after warm-up
warmup_iters = 100
lr_decay_iters = 0  # step at which min_lr is reached, 0 = max_iters
min_lr = 0.0
# evaluation and log
eval_interval = 500  # steps between evaluations and checkpoints, 0 = only at the end
eval_iters = 50  # batches of an evaluation, always the same ones
log_interval = 100  # steps between log lines, 0 = none; log.csv has every step
# system
device = "auto"  # auto (cuda, else mps, else cpu), or a torch device such as cpu or cuda:1
dtype = "auto"  # auto, float32, bfloat16 or float16: of activations and matmuls, master weights are fp32
offload = False  # tables and their optimizer state in host memory, a step's rows on the device; results are the same
cache_rows = 0  # with offload: rows of the most used tokens that stay on the device, -1 = half its free memory
table_dtype = "float32"  # of rows in memory; int8 is for sample.py
compile = "auto"  # torch.compile: auto (only on cuda), True or False

# ---------------------------------------------------------------------------------------------------------------------
# What to do, and whether it can be done: what is wrong shall be found before anything is written into out_dir.

POSITIVE = ("batch_size", "block_size", "gradient_accumulation_steps", "eval_iters", "rope_base")
asked = arguments(globals(), minimum=dict.fromkeys(POSITIVE, 1) | {"cache_rows": -1})
globals().update(asked)
config = settings_of(globals())
rank, world, local_rank = join_processes()
start = None
if init_from != "scratch":
    resume = init_from == "resume"
    start = checkpoint.load(Path(out_dir) / "ckpt.pt" if resume else init_from, resume)
    inherited = start["settings"] if resume else start["model_config"]  # all of them, or a shape to fill with weights
    if not resume:
        inherited = inherited | {"doc_mask": inherited.get("doc_id", GPTConfig.doc_id) != GPTConfig.doc_id}
    given = {"out_dir", *asked}  # a folder may have been moved since
    config |= {name: value for name, value in inherited.items() if name in config and name not in given}
    globals().update(config)
print("settings    " + (", ".join(f"{name}={value}" for name, value in asked.items()) or "the defaults"))
for wrong, why in ((min_lr > learning_rate, f"min_lr {min_lr} must be at most learning_rate {learning_rate}"),
                   (max(beta1, beta2) >= 1, f"beta1 and beta2 must be below 1, got {beta1} and {beta2}"),
                   (eval_only and not start, "eval_only needs --init_from=resume or the path of a checkpoint"),
                   (train_only not in ("", "rows"), f"train_only must be rows or empty, got {train_only!r}"),
                   (train_only and not start, "train_only=rows goes on with what a model knows: name its checkpoint "
                    "by --init_from=PATH"),
                   (train_only and world > 1, "train_only=rows is for one process: leave out torchrun"),
                   ("rows" in asked and not train_only, "rows says which rows --train_only=rows trains: set that too"),
                   (dense_adamw and (offload or world > 1), "dense_adamw takes all rows at every step: leave out "
                    "--offload, and torchrun"),
                   (asked.get("cache_rows") and not offload, "cache_rows needs --offload=True, tables in host memory"),
                   (table_dtype != "float32", f"table_dtype must be float32 to train, got {table_dtype!r}: most "
                    "updates are smaller than the steps of int8 and would be lost. sample.py takes int8"),
                   (not out_dir, "out_dir is empty: name a folder, . for this one"),
                   (gradient_accumulation_steps % world, f"gradient_accumulation_steps {gradient_accumulation_steps} "
                    f"counts over all processes: with {world} of them make it a multiple of that"),
                   (compile not in ("auto", True, False), f"compile must be auto, True or False, got {compile!r}")):
    if wrong:
        raise SystemExit(why)

doc_id = GPTConfig.doc_id  # none
if not (dry_run and vocab_size):
    if rank:
        total(0)  # wait until rank 0 has made missing facts
    data = open_dataset(dataset, block_size, seed)
    if rank == 0:
        total(0)
    vocab_size = vocab_size or data.tokenizer.vocab_size
    doc_id = data.tokenizer.end_id if doc_mask else doc_id
model_config = GPTConfig(**{field.name: globals()[field.name] for field in dataclasses.fields(GPTConfig)})
if train_only and not model_config.stem_layers:
    raise SystemExit("train_only=rows needs a model with table rows, and this one has none: take a STEM checkpoint")
if start and not dry_run:
    checkpoint.check_fit(start, model_config, data.meta)
if doc_id is None:
    raise SystemExit(f"doc_mask needs documents, and {dataset}'s tokenizer has no <|endoftext|> to start them")
if not dry_run and vocab_size < data.tokenizer.vocab_size:
    raise SystemExit(f"vocab_size {vocab_size} is below the dataset's {data.tokenizer.vocab_size}; 0 takes that")
print_accounting(model_config, batch_size, gradient_accumulation_steps, world, max(0, cache_rows))
if dry_run:
    sys.exit()
trained = data.choose(rows) if train_only and not eval_only else None  # ids; `rows` below are those of a step

# ---------------------------------------------------------------------------------------------------------------------
# Model, tables, optimizers.

device, torch_dtype = choose_device(device, dtype, local_rank if world > 1 else None)
if train_only and torch_dtype is torch.float16:  # whose loss scale hangs on the dense optimizer's gradients
    raise SystemExit("train_only=rows cannot train in float16: set --dtype=float32, or bfloat16")
torch.manual_seed(seed)
model = GPT(model_config, torch_dtype).to(device).requires_grad_(not train_only)
parameters = [p for p in model.parameters() if p.requires_grad]
if trained is not None:
    numbers, stored = len(trained) * math.prod(model_config.table_shape[1:]), sum(model.parameters_by_role().values())
    print(f"trains      the rows of {len(trained):,} of {vocab_size:,} tokens: {numbers:,} numbers, "
          f"{numbers / stored:.2%} of the {stored:,} stored")
# a seed of their own: with that of the weights, of which the CPU takes 32 bits, tables would repeat their numbers
shape_and_start = (*model_config.table_shape, None if start else model_config.table_std, (beta1, beta2), device,
                   seed + 2**31)
sequences = gradient_accumulation_steps * batch_size  # in a step
make_tables = StemTables
if offload:
    cache_rows = rows_that_fit(cache_rows, model_config.table_shape, 12, device)
    make_tables = functools.partial(HostTables, max_rows=sequences * block_size, dtype=torch_dtype,
                                    cache_rows=cache_rows)
if world > 1 and model_config.stem_layers:
    tables = ShardedTables(make_tables, *shape_and_start)
else:
    tables = make_tables(*shape_and_start)
optimizer = model.configure_optimizer(learning_rate, weight_decay, (beta1, beta2))
scaler = torch.amp.GradScaler(torch.device(device).type, enabled=torch_dtype is torch.float16)  # of the loss
step, seconds, best_val_loss = 0, 0.0, math.inf
if start:
    checkpoint.fill(model, tables, start)
if init_from == "resume":
    state = copy.deepcopy(start["optimizer"].get("state", {}))  # in memory of its own, not mapped from the file
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    moments = [(p, optimizer.state[p].get(name)) for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    if start["step"] and any(m is None or m.shape != p.shape for p, m in moments):  # fused AdamW would not look
        raise SystemExit("the checkpoint lacks moments of some weights; --init_from=PATH goes on with weights alone")
    if start["scaler"]:  # empty unless it was float16
        scaler.load_state_dict(start["scaler"])
    step, seconds, best_val_loss = start["step"], start["seconds"], checkpoint.load(out_dir)["best_val_loss"]
start = None  # a loaded checkpoint is as large as the model
forward = compiled(model, compile, device)  # model itself keeps its parameters' own names, for checkpoints
is_compiled, no_sync = forward is not model, contextlib.nullcontext
if world > 1:  # no device_ids: all inputs are where the model is. Its one buffer is a constant
    forward = DistributedDataParallel(forward, forward_sync_buffers=False, gradient_as_bucket_view=True)
    no_sync = forward.no_sync  # of a micro-batch's gradients, which wait for those of the last

# ---------------------------------------------------------------------------------------------------------------------
# Pieces of the loop.


def get_lr(step):
    """nanoGPT's schedule: linear warm-up, then cosine from learning_rate to min_lr."""
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    if not decay_lr:
        return learning_rate
    ratio = min(1.0, (step - warmup_iters) / max(1, (lr_decay_iters or max_iters) - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def draw(step):
    """Inputs and targets of a step, (world, n, T) each: of all ranks, since each knows by them what the others need."""
    return [t.unflatten(0, (world, -1)) for t in data.get_batch("train", step, sequences)]


@torch.no_grad()
def evaluate():
    """Mean loss, nats per token, over the same eval_iters batches of the val split each time, each on one rank."""
    model.eval()
    loss = 0.0
    for first in range(0, eval_iters, world):
        batches = [data.get_batch("val", i, batch_size) for i in range(first, min(first + world, eval_iters))]
        plan = tables.plan(torch.stack([x for x, _ in batches]))
        rows = tables.fetch(plan)  # also on a rank that is left without a batch: all must take part
        if rank < len(batches):
            x, y = batches[rank]
            loss += model(x.to(device), rows, plan.inv[rank].to(device), y.to(device)).item()
    model.train()
    return total(loss) / eval_iters


def ask():
    """The shares of questions answered, on rank 0 alone: ranks whose sums differ in a bit could choose other tokens."""
    whole = tables
    if world > 1:
        every_row = tables.state_dict()
        if rank:
            return {}
        whole = FrozenTables(*model_config.table_shape, device)
        whole.load_state_dict(every_row, assign=True)
    return recall(model.eval(), whole, data.tokenizer, data.questions)


def save(name):
    """Write everything that sampling or going on needs into out_dir."""
    every_row = tables.state_dict()  # of all ranks, on rank 0
    if rank == 0:
        checkpoint.save(Path(out_dir) / name, {
            "model_config": dataclasses.asdict(model_config), "meta": data.tokenizer.meta, "settings": config,
            "model": model.state_dict(), "tables": every_row, "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(), "step": step, "seconds": seconds, "best_val_loss": best_val_loss})


def save_and_evaluate():
    """Write ckpt.pt and, when the val loss is the lowest yet, best.pt; returns the val loss."""
    global best_val_loss
    save("ckpt.pt")  # first: an evaluation that runs out of memory must not cost the steps before it
    val_loss = evaluate()
    if val_loss < best_val_loss:
        best_val_loss = val_loss
        save("best.pt")
    return val_loss


def plan_step(x):
    """The rows of a step: those of its ids, or with dense_adamw all there are."""
    return Plan(torch.arange(vocab_size), x) if dense_adamw else tables.plan(x)


def trained_part(plan, rows):
    """A step's plan and rows as if its other tokens had none, for what comes after the backward pass."""
    here = torch.isin(plan.ids, trained)
    part = rows.detach()[here]
    part.grad = rows.grad[here]
    return Plan(plan.ids[here], plan.inv), part


def apply_gradients(plan, rows, lr, loss):
    """Clip dense and row gradients by their joint norm and step both optimizers, or neither; returns the norm."""
    if train_only:
        plan, rows = trained_part(plan, rows)
    scale = scaler.get_scale()  # 1 unless float16
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
        if rows.grad is not None:
            rows.grad.div_(scale)
    dense = torch.nn.utils.get_total_norm(p.grad for p in parameters)
    norm = (dense.square() + tables.reduce(plan, rows)).sqrt().item()
    if math.isfinite(norm):
        if 0 < grad_clip < norm:
            torch.nn.utils.clip_grads_with_norm_([*parameters, rows], grad_clip, torch.tensor(norm, device=device))
        optimizer.step()
        tables.update(plan, rows, lr * stem_lr_scale)
        scaler.update()
    elif scale > 1 and math.isfinite(loss):  # the scaled gradients overflowed: skip the step, halve the scale
        scaler.update(scale * scaler.get_backoff_factor())
    else:
        raise SystemExit(f"step {step + 1}: the loss is {loss}, the gradient norm {norm}; {out_dir} keeps what was "
                         "saved before. Lower learning_rate, or set grad_clip")
    optimizer.zero_grad(set_to_none=True)
    return norm


def take_out_dir():
    """Make out_dir; an earlier run's files go into a folder of their own in it: a start by mistake loses nothing."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    if init_from != "resume" and any((Path(out_dir) / name).exists() for name in ("ckpt.pt", "best.pt")):
        earlier = next(p for i in itertools.count(1) if not (p := Path(out_dir) / f"earlier{i}").exists())
        earlier.mkdir()
        for name in ("ckpt.pt", "best.pt", "log.csv", "summary.json"):
            if (Path(out_dir) / name).exists():
                os.replace(Path(out_dir) / name, earlier / name)
        print(f"{out_dir} held an earlier run, now in {earlier}; --init_from=resume would have gone on with it")
    (Path(out_dir) / "summary.json").unlink(missing_ok=True)  # says of a run that it has finished


def open_log():
    """log.csv as a csv.DictWriter, with the rows up to `step` of before a resume, which may have had other columns."""
    path, rows, names = Path(out_dir) / "log.csv" if rank == 0 else Path(os.devnull), [], []
    if step and path.is_file():
        old = csv.DictReader(path.read_text(encoding="utf-8", errors="replace").replace("\0", "").splitlines())
        names = old.fieldnames or []
        rows = [row for row in old if re.fullmatch(r"\d+", row.get("step") or "") and int(row["step"]) <= step
                and row.get("val_loss") is not None]  # a kill may have cut one
    columns = ("step", "loss", "lr", "norm", "ms", "tokens_per_second", "val_loss", *names, *tables.moved)
    file = open(path, "w", buffering=1, encoding="utf-8")  # line by line, so that what a killed run did can be read
    log = csv.DictWriter(file, dict.fromkeys(columns), restval="", extrasaction="ignore", lineterminator="\n")
    log.writeheader()
    log.writerows(rows)
    return log


def on_signal(signum, frame):
    """The first Ctrl-C or SIGTERM lets the step finish; a second one kills as usual."""
    global interrupted
    interrupted = True
    if rank == 0:
        print("finishing the step, then saving; once more to stop without", file=sys.stderr)
    signal.signal(signum, signal.SIG_DFL)


def describe(val_loss, shares):
    """What training was for, in one line."""
    line = f"val loss {val_loss:.4f} nats per token"
    for name, share in shares.items():
        line += f", {name} {share:.1%}" if share is not None else ""
    return line


# ---------------------------------------------------------------------------------------------------------------------
# The loop.

if eval_only:
    print(describe(evaluate(), ask()))
    sys.exit()
total(0)  # all have read their checkpoint, which rank 0 may now move
try:
    if rank == 0:
        take_out_dir()
    log = open_log()
except OSError as e:
    raise SystemExit(f"cannot write into out_dir {out_dir}: {e.strerror}") from None
interrupted = False
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, on_signal)

if step >= max_iters:
    print(f"already at step {step} of max_iters {max_iters}: nothing to train, only to evaluate")
model.train()
first_step, earlier_seconds, moved = step, seconds, Counter()
k_tokens = sequences * block_size / 1000
val_loss = None
bar = tqdm(total=max_iters, initial=step, unit="step", dynamic_ncols=True,
           disable=not all(stream and stream.isatty() for stream in (sys.stdout, sys.stderr)))
if offload and cache_rows:  # from the steps to come
    tables.warm_start(draw(step + i)[0] for i in range(100))
x, y = draw(step)
plan = plan_step(x)
while not (stopped := total(interrupted) > 0) and step < max_iters:  # a signal to one rank stops all, at one step
    t0 = time.perf_counter()
    torch.manual_seed(hash((seed, step)) + rank)  # dropout is a function of the step, too
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    rows = tables.fetch(plan)  # those of the whole step, for all its micro-batches
    next_x, next_y = draw(step + 1)
    next_plan = plan_step(next_x)
    tables.prefetch(next_plan)
    if is_compiled:
        torch._dynamo.maybe_mark_dynamic(rows, 0)  # one graph for any number of rows
    loss = 0.0
    micro_batches = list(zip(*(t[rank].to(device).split(batch_size) for t in (x, plan.inv, y))))
    for i, (ids, inv, targets) in enumerate(micro_batches):
        with no_sync() if i + 1 < len(micro_batches) else contextlib.nullcontext():  # DDP's forward asks for it, too
            part = forward(ids, rows, inv, targets) / len(micro_batches)
            scaler.scale(part).backward()
        loss += part.detach()
    loss = total(loss.item()) / world
    norm = apply_gradients(plan, rows, lr, loss)
    x, y, plan, step = next_x, next_y, next_plan, step + 1
    ms = max(1e-3, 1000 * (time.perf_counter() - t0))  # a clock may stand still, or be set back
    seconds += ms / 1000

    moved.update(tables.moved)
    due = step == max_iters or (eval_interval and step % eval_interval == 0)
    val_loss = save_and_evaluate() if due else None
    log.writerow({"step": step, "loss": loss, "lr": lr, "norm": norm, "ms": f"{ms:.3f}",
                  "tokens_per_second": f"{1e6 * k_tokens / ms:.0f}", "val_loss": val_loss if due else "",
                  **{name: f"{x:.6g}" for name, x in tables.moved.items()}})
    bar.update()
    if log_interval and step % log_interval == 0:
        line = f"loss {loss:.4f}  lr {lr:.2e}  norm {norm:.3f}  {ms:.1f} ms  {1000 * k_tokens / ms:.1f} k tokens/s"
        if offload and cache_rows:
            line += f"  {tables.moved['row_hit_rate']:.0%} of rows hot"
        if bar.disable:
            print(f"step {step:6d}/{max_iters}  {line}", flush=True)
        bar.set_description_str(line[:12], refresh=False)  # in front, for a narrow terminal: the loss
        bar.set_postfix_str(line[14:])
    if due:
        tqdm.write(f"step {step:6d}/{max_iters}  val loss {val_loss:.4f} nats per token, lowest {best_val_loss:.4f}")
bar.close()

# ---------------------------------------------------------------------------------------------------------------------
# The end.

if stopped:
    save("ckpt.pt")
    print(f"stopped after step {step}; go on with python train.py --init_from=resume --out_dir={shlex.quote(out_dir)}")
    sys.exit(130)
if val_loss is None:  # there was no step left to do
    val_loss = save_and_evaluate()
shares = ask()
if rank:  # from here on nothing is done together
    sys.exit()
summary = {"val_loss": val_loss, **shares, "seconds": seconds,
           "tokens_per_second": 1000 * (step - first_step) * k_tokens / max(1e-3, seconds - earlier_seconds),
           "flops_per_token": model.flops_per_token(), "parameters": model.parameters_by_role(),
           "active_parameters": model.active_parameters(),
           "moved": {name: total / max(1, step - first_step) for name, total in moved.items()},
           "peak_memory_bytes": peak_memory(device), "best_val_loss": best_val_loss, "steps": step, "settings": config}
(Path(out_dir) / "summary.tmp").write_text(json.dumps(summary, indent=1), encoding="utf-8")
os.replace(Path(out_dir) / "summary.tmp", Path(out_dir) / "summary.json")
if moved:
    print("offload     a step: " + ", ".join(f"{name} {mean:,.4g}" for name, mean in summary["moved"].items())
          + f"; resident tables hold {12 * math.prod(model_config.table_shape) / world:,.4g} device bytes")
print(f"{step} steps in {seconds:.1f} s: {describe(val_loss, shares)}")
