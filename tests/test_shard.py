"""shard.py: any number of processes trains as one does; a few process groups on the CPU, many checks in each."""

import multiprocessing
import os
import socket
import time

import pytest
import torch
import torch.nn.functional as F

from device import join_processes, total
from offload import HostTables
from shard import ShardedTables
from stem import StemTables

V, S, M = 41, 2, 8  # 4 does not divide V: ranks hold 11, 10, 10, 10 rows
processes = multiprocessing.get_context("forkserver")  # torch is imported once, every process starts in no time
processes.set_forkserver_preload(["torch", "pytest", "numpy"])


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def enter(rank, world, port, folder, work, args):
    """What one of the processes does: work(rank, world, *args), its result into a file."""
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": f"{port}"}
    result = work(*args)
    torch.save(result, f"{folder}/{rank}.pt")


def on_ranks(world, folder, work, *args, timeout=60):
    """work(*args) in `world` processes; their results. None outlives it."""
    folder = folder / f"ranks{world}"
    folder.mkdir(exist_ok=True)
    port = free_port()
    ranks = [processes.Process(target=enter, args=(r, world, port, folder, work, args)) for r in range(world)]
    [process.start() for process in ranks]
    try:
        deadline = time.monotonic() + timeout
        while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
            assert time.monotonic() < deadline, "they hang"
            time.sleep(0.02)
    finally:
        [process.kill() for process in ranks]
        [process.join() for process in ranks]
    assert [process.exitcode for process in ranks] == [0] * world
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


# ---------------------------------------------------------------------------------------------------------------------
# The verbs.


def steps(tables, batches, rank=0, world=1, lr=0.1):
    """Losses, norms and last rows of training steps on `batches`, of each of which a rank takes its sequences."""
    out, plan = [], tables.plan(batches[0])
    for step, batch in enumerate(batches):
        rows = tables.fetch(plan)
        following = tables.plan(batches[(step + 1) % len(batches)])
        tables.prefetch(following)
        mine = slice(rank * len(batch) // world, (rank + 1) * len(batch) // world)
        target = torch.randn(*batch.shape, S * M, generator=torch.Generator().manual_seed(step))[mine]
        loss = ((F.embedding(plan.inv[mine], rows.flatten(1)) - target) ** 2).mean()
        loss.backward()
        norm2 = tables.reduce(plan, rows)
        if step % 2:
            rows.grad.mul_(0.5)  # as clipping does
        tables.update(plan, rows, lr)
        out += [torch.tensor(total(loss.item()) / world), norm2]
        plan = following
    return torch.stack(out)


def batches():
    """All kinds: many ids, one and the same everywhere, some of a single owner, so that others own none."""
    random = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(4, 5, generator=random) ** 2 * V).long() for _ in range(12)]
    return [*drawn, torch.full((4, 5), 7), torch.arange(20).view(4, 5) % 3 * 4, *drawn[:3], torch.full((4, 5), V - 1)]


def verbs():
    """Everything that a rank can tell, of resident and of offloaded tables."""
    rank, world, _ = join_processes()
    told = {}
    for kind in (StemTables, HostTables):
        tables = ShardedTables(kind, V, S, M, 0.5)
        mine = tables.part.state_dict()["weight"].clone()
        losses = steps(tables, batches(), rank, world)
        ids = torch.tensor([40, 3, 3, 8])
        told[kind.__name__] = {"initial": mine, "losses": losses, "read": tables.read(ids)}
        state = tables.state_dict()
        told[kind.__name__] |= {"state": state}
        tables.write(torch.tensor([5, 2]), torch.full((2, S, M), 9.0))
        told[kind.__name__] |= {"written": tables.read(torch.arange(6))}
    return told


@pytest.mark.parametrize("world", [2, 4])
def test_the_verbs_give_what_one_process_gives(tmp_path, world):
    told = on_ranks(world, tmp_path, verbs)
    alone = StemTables(V, S, M, 0.5)
    initial = alone.weight.clone()
    losses = steps(alone, batches())
    for kind in ("StemTables", "HostTables"):
        for rank, rank_told in enumerate(told):
            t = rank_told[kind]
            assert torch.equal(t["initial"], initial[rank::world])
            torch.testing.assert_close(t["losses"], losses)
