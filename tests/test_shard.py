"""shard.py, and train.py in several processes: any number of them trains as one does.

They are forked from a server that has imported torch once, and each does many checks. Sums over ranks run in another
order, so results are equal to the tolerances below, and to the last bit where nothing is summed.
"""

import csv
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, tiny_config
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import data.loader
import device
import traffic
from device import choose_device, join_processes, total
from model import GPT
from offload import HostTables
from shard import ShardedTables
from stem import StemTables

V, S, M = 41, 2, 8  # 4 does not divide V: ranks hold 11, 10, 10, 10 rows
KINDS = {"StemTables": StemTables, "HostTables": functools.partial(HostTables, max_rows=V)}
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "numpy", "tqdm", "pytest"])


def enter(rank, world, port, folder, work, args):
    """What one process does: work(*args) in `folder`, its result into a file, what it says on stderr into another."""
    torch.set_num_threads(1)
    os.chdir(folder)
    os.dup2(os.open(f"{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": f"{port}"}
    try:
        torch.save(work(*args), f"{rank}.pt")
    except Exception:
        sys.excepthook(*sys.exc_info())  # the script's own, which multiprocessing would not call
        sys.exit(1)


def on_ranks(world, folder, work, *args, codes=None, timeout=120):
    """The results of work(*args) on `world` ranks, or with codes, for which they end so, what they say on stderr."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    ranks = [processes.Process(target=enter, args=(r, world, port, folder, work, args)) for r in range(world)]
    try:
        [process.start() for process in ranks]
        deadline = time.monotonic() + timeout
        [process.join(max(0, deadline - time.monotonic())) for process in ranks]
        ended = [process.exitcode for process in ranks]
    finally:
        [process.kill() for process in ranks]
    said = [(folder / f"{rank}.err").read_text() for rank in range(world)]
    assert ended == (codes or [0] * world), said
    return said if codes else [torch.load(folder / f"{rank}.pt") for rank in range(world)]


# ---------------------------------------------------------------------------------------------------------------------
# The verbs.


def steps(tables, batches, rank=0, world=1, lr=0.1):
    """Losses and norms of training steps, of whose batches a rank takes its share of the sequences."""
    batches = [batch.unflatten(0, (world, -1)) for batch in batches]
    out, plan = [], tables.plan(batches[0])
    for step, batch in enumerate(batches):
        rows = tables.fetch(plan)
        following = tables.plan(batches[(step + 1) % len(batches)])
        tables.prefetch(following)
        random = torch.Generator().manual_seed(step)
        target = torch.randn(*batch.shape, S * M, generator=random)[rank].to(rows.device)
        loss = ((F.embedding(plan.inv[rank].to(rows.device), rows.flatten(1)) - target) ** 2).mean()
        loss.backward()
        norm2 = tables.reduce(plan, rows)
        if step % 2:
            rows.grad.mul_(1e-6)  # as clipping would: with AdamW it shows when the factor changes
        tables.update(plan, rows, lr)
        out.append(torch.tensor([total(loss.item()) / world, norm2]))
        plan = following
    return torch.stack(out)


def batches():
    """Many ids; one and the same for all; those of one owner, so that others own none; the last row."""
    random = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(4, 5, generator=random) ** 2 * V).long() for _ in range(12)]
    return [*drawn, torch.full((4, 5), 7), torch.arange(20).view(4, 5) % 3 * 4, *drawn[:3], torch.full((4, 5), V - 1)]


def use_verbs(kind):
    """What a rank finds when it uses every verb."""
    rank, world, _ = join_processes()
    where = choose_device(kind, "float32", rank)[0]
    found = {}
    for name, make in KINDS.items():
        tables = ShardedTables(make, V, S, M, 0.5, device=where)
        found[name] = f = {"initial": tables.part.state_dict()["weight"].cpu().clone()}
        f["steps"] = steps(tables, batches(), rank, world)
        plan = tables.plan(torch.arange(V))
        tables.prefetch(plan)
        tables.fetch(plan)
        f["early"] = tables.moved.get("early")
        f["read"] = tables.read(torch.tensor([[40, 3], [3, 8]]))
        f["state"] = tables.state_dict()
        if rank == 0:
            torch.save(f["state"], "state.pt")
        total(0)
        again = ShardedTables(make, V, S, M, None, device=where)
        again.load_state_dict(torch.load("state.pt", mmap=True), assign=True)
        f["part"], f["loaded"] = (
            {k: v.cpu().clone() for k, v in t.part.state_dict().items()} for t in (tables, again)
        )
        again.write(torch.tensor([5, 2]), torch.full((2, S, M), 9.0))
        f["written"] = again.read(torch.arange(V))
        try:
            tables.plan(torch.tensor([V]))
        except ValueError as e:
            f["refused"] = str(e)
    return found


@pytest.mark.parametrize(
    "kind, world",
    [
        ("cpu", 2),
        ("cpu", 4),
        pytest.param("cuda", 2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
    ],
)
def test_the_verbs_give_what_one_process_gives(tmp_path, kind, world):
    """Losses, norms, rows, moments; counts exactly, so that no row is updated twice for two ranks that saw it."""
    alone = StemTables(V, S, M, 0.5)
    initial, losses, state = alone.weight.clone(), steps(alone, batches()), alone.state_dict()
    ranks = on_ranks(world, tmp_path, use_verbs, kind)
    bits = {"rtol": 0, "atol": 0} if kind == "cpu" else {"rtol": 1e-3, "atol": 1e-4}  # a GPU sums in any order
    for rank, found in enumerate(ranks):
        for f in found.values():
            assert torch.equal(f["initial"], initial[rank::world])
            torch.testing.assert_close(f["steps"], losses, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(f["steps"], ranks[0]["StemTables"]["steps"], **bits)
            expected = state["weight"][torch.tensor([[40, 3], [3, 8]])]
            torch.testing.assert_close(f["read"], expected, rtol=1e-3, atol=1e-4)
            assert all(torch.equal(t, f["loaded"][name]) for name, t in f["part"].items())
            whole = found["StemTables"]["state"] if rank == 0 else {}
            torch.testing.assert_close(f["state"], whole, **bits)
            assert f["refused"].startswith("token ids run from 41 to 41, but the vocabulary has 41")
        assert found["HostTables"]["early"] == len(initial[rank::world]), "the prefetched rows were not taken"
    whole = ranks[0]["StemTables"]["state"]
    assert torch.equal(whole["count"], state["count"])
    for name, table in state.items():
        torch.testing.assert_close(whole[name], table, rtol=1e-3, atol=1e-4)
        for rank, found in enumerate(ranks):
            torch.testing.assert_close(found["HostTables"]["part"][name], whole[name][rank::world], **bits)
    whole["weight"][[2, 5]] = 9
    for f in (f for found in ranks for f in found.values()):
        torch.testing.assert_close(f["written"], whole["weight"], **bits)


def send(config, ids):
    """Bytes that this rank gives the others in a step on ids (world, B, T): of rows, and of DDP's gradients."""
    rank, world, _ = join_processes()
    sent, all_to_all = {"here": 0, "dense": 0}, dist.all_to_all_single

    def counted(taken, given, takes, gives):
        sent["here"] += given.nbytes - gives[rank] * given[:1].nbytes  # but what it gives itself
        all_to_all(taken, given, takes, gives)

    def counted_bucket(_, bucket):
        sent["dense"] += 2 * (world - 1) / world * bucket.buffer().nbytes  # a ring
        return allreduce_hook(None, bucket)

    dist.all_to_all_single = counted
    tables, model = ShardedTables(StemTables, *config.table_shape, 0.5), DistributedDataParallel(GPT(config))
    model.register_comm_hook(None, counted_bucket)
    plan = tables.plan(ids)
    rows = tables.fetch(plan)
    model(ids[rank], rows, plan.inv[rank], ids[rank]).backward()
    tables.reduce(plan, rows)
    return sent


def test_what_is_sent_is_what_traffic_counts(tmp_path):
    config = tiny_config(n_layer=2)
    ids = torch.randint(50, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    counted, sent = traffic.step_bytes(config, ids), on_ranks(2, tmp_path, send, config, ids)
    assert sum(rank["here"] for rank in sent) / 2 == counted["here"] > 0
    assert all(rank["dense"] == counted["dense"] for rank in sent)


# ---------------------------------------------------------------------------------------------------------------------
# train.py.

SMALL = ("--device=cpu --batch_size=2 --block_size=16 --n_layer=2 --n_embd=16 --n_head=2 --max_iters=20 --eval_iters=3 "
         "--eval_interval=10 --log_interval=10 --warmup_iters=2 --stem_every=1 --gradient_accumulation_steps=4 "
         "--grad_clip=0.5").split()


def train(*runs):
    """Runs of train.py one after another, each a list of flags; what dense weights each ended with on this rank."""
    init, made, ended = GPT.__init__, [], []
    device.join_processes = functools.cache(join_processes)  # the first run's, for all
    GPT.__init__ = lambda self, *args: (made.append(self), init(self, *args))[1]
    for flags in runs:
        sys.argv = ["train.py", *flags]
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as e:
            if e.code:
                raise
        ended.append({name: p.clone() for name, p in made[-1].state_dict().items()})
    return ended


def log(folder):
    """Loss, lr, norm and val loss of the steps."""
    rows = csv.DictReader(open(folder / "log.csv"))
    return torch.tensor([[float(row[name] or 0) for name in ("loss", "lr", "norm", "val_loss")] for row in rows])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, facts):
    """A folder of out folders: 20 steps on 1, 2 and 4 ranks, resident (r) and offloaded with a cache (o); those of a
    dense model (d); what 1, 2 and 4 ranks made of the first 10 steps of 4 (h). And {world: for each rank the weights
    its runs ended with}.
    """
    top, flags, ended = tmp_path_factory.mktemp("ranks"), [*SMALL, f"--dataset={facts}"], {}
    for world in (4, 2, 1):
        offloaded = [*flags, "--offload=True", "--cache_rows=9", f"--out_dir={top}/o{world}"]
        runs = [[*flags, f"--out_dir={top}/r{world}"], offloaded]
        if world == 4:
            runs += [[*flags, "--max_iters=10", "--lr_decay_iters=20", f"--out_dir={top}/h{w}"] for w in (1, 2, 4)]
        else:
            runs += [[*flags, "--stem_every=0", f"--out_dir={top}/d{world}"]]
        runs += [["--init_from=resume", "--max_iters=20", f"--out_dir={top}/h{world}"]]
        ended[world] = on_ranks(world, top / f"{world}", train, *runs)
    return top, ended


@pytest.mark.parametrize("run", ["r1", "r2", "r4", "o1", "o2", "o4", "d2", "h1", "h2", "h4"])
def test_any_number_of_processes_trains_alike(trained, run):
    """With 4, 2 and 1 micro-batches a rank, clipping, tables in either place, and going on with what 4 ranks saved."""
    top, ended = trained
    alone = "d1" if run == "d2" else "r1"
    steps, expected = log(top / run), log(top / alone)
    assert len(expected) == 20 and (expected[:, 2] > 0.5).all(), "clipping is not active"
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-4)
    one, other = (checkpoint.load(top / name / "ckpt.pt", resume=True) for name in (alone, run))
    assert torch.equal(one["tables"]["count"], other["tables"]["count"])
    for part in ("tables", "model"):
        for name, expected in one[part].items():
            torch.testing.assert_close(other[part][name], expected, rtol=1e-3, atol=1e-3)
    ranks = [runs[{"r": 0, "o": 1, "d": 2, "h": -1}[run[0]]] for runs in ended[int(run[1])]]
    assert all(torch.equal(weights[name], p) for weights in ranks for name, p in other["model"].items())


def train_until(event, *flags):
    """train.py, in which this rank does something, {(rank, step): what}, when it draws that step's batch."""
    rank, draw = int(os.environ["RANK"]), data.loader.Dataset.get_batch

    def drawn(self, split, step, n):
        if split == "train" and (rank, step) in event:
            event[rank, step]()
        return draw(self, split, step, n)

    data.loader.Dataset.get_batch = drawn
    return train(flags)


def be_stopped():
    os.kill(os.getpid(), signal.SIGTERM)


def fail():
    raise IndexError("the batch is on fire")


def test_a_signal_to_one_rank_stops_all_at_the_same_step(trained, tmp_path, facts):
    """Were it not agreed upon, the others would wait for ever. What is saved goes on as if nothing had been."""
    flags = [*SMALL, f"--dataset={facts}", f"--out_dir={tmp_path}/out"]
    on_ranks(2, tmp_path, train_until, {(1, 8): be_stopped}, *flags, codes=[130, 130])
    assert checkpoint.load(tmp_path / "out/ckpt.pt")["step"] == 8
    on_ranks(1, tmp_path, train, ["--init_from=resume", f"--out_dir={tmp_path}/out"])
    torch.testing.assert_close(log(tmp_path / "out"), log(trained[0] / "r1"), rtol=1e-4, atol=1e-4)


def test_an_exception_on_one_rank_ends_all(tmp_path, facts):
    """The others in one line, and the checkpoint is the last that was written."""
    flags = [*SMALL, f"--dataset={facts}", f"--out_dir={tmp_path}/out"]
    said = on_ranks(2, tmp_path, train_until, {(1, 15): fail}, *flags, codes=[1, 1])
    assert "another process has failed or is gone" in said[0] and said[0].count("\n") == 1
    assert "the batch is on fire" in said[1]
    assert checkpoint.load(tmp_path / "out/ckpt.pt", resume=True)["step"] == 10


def test_a_killed_rank_ends_what_torchrun_started(tmp_path, facts):
    """With a message, in time, and a checkpoint that is whole; nothing is left running."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = [*SMALL, f"--dataset={facts}", f"--out_dir={tmp_path}/out", "--max_iters=1000000"]
    job = subprocess.Popen([*torchrun, ROOT / "train.py", *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "out/best.pt").exists() and time.monotonic() < deadline and job.poll() is None:
            time.sleep(0.05)
        ranks = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(job.pid)]).split()]
        os.kill(ranks[-1], signal.SIGKILL)
        out = job.communicate(timeout=60)[0].decode()
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 1 and "another process has failed or is gone" in out and "(SIGKILL)" in out
    assert out.count("step     10/") == 2, "ranks other than 0 print, too"
    assert checkpoint.load(tmp_path / "out/ckpt.pt", resume=True)["step"] % 10 == 0
    assert len(ranks) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_what_several_processes_cannot_do_is_said_in_one_line(tmp_path, facts, monkeypatch):
    flags = [*SMALL, f"--dataset={facts}", "--gradient_accumulation_steps=3"]
    said = on_ranks(2, tmp_path, train, flags, codes=[1, 1])
    assert said[1] == ("gradient_accumulation_steps 3 counts over all processes: "
                       "with 2 of them make it a multiple of that\n")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="several processes cannot share mps"):
        choose_device("mps", "auto", 0)
    assert join_processes() == (0, 1, 0) and not torch.distributed.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_processes() == (0, 1, 0) and not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match="several processes need Linux or macOS"):
        join_processes()
