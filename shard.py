"""
Tables split over processes. ShardedTables answers the verbs of stem.StemTables, but each of `world` processes holds only
the rows with id % world == rank, with their optimizer state, on its device or in host memory.

    torchrun --standalone --nproc_per_node=8 train.py config/stem_openwebtext.py

A step's batch is a function of the seed, so every rank draws all of it and knows without asking which rows it takes:

    fetch    each rank gives the rows that it owns, and all get them all        all-gather
    reduce   each row's gradient goes to its owner, averaged as DDP does        reduce-scatter, one number for the norm
    update   the owner's AdamW: once a step, whichever ranks saw the token      nothing

Together the bytes of all-reducing replicas, in 1 / world of their memory; a step's rows are on every rank. What all
ranks must call, in one order and with the same ids: fetch, reduce, read, write, state_dict. A rank that does not keeps
the others waiting. Dense parameters are DDP's business (train.py). Not for Windows or mps. Shapes as in stem.py.
"""

import atexit
import os
import sys
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from stem import Plan, StemTables, initial_rows


def start():
    """(rank, world, index on this machine) of this process among torchrun's; (0, 1, 0) alone. Only rank 0 prints."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return 0, 1, 0
    # gloo carries what is on the CPU, checkpoints for one. An hour, since all wait while rank 0 writes them
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=1))
    atexit.register(dist.destroy_process_group)
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")
    return dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])


def total(number):
    """A number's sum over ranks, the same on all; they wait for each other."""
    if not dist.is_initialized():
        return number
    sums = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.item()


class ShardedPlan(NamedTuple):
    """As stem.Plan, with who holds what."""

    ids: torch.Tensor
    inv: torch.Tensor
    own: torch.Tensor  # (n,) the positions in ids of this rank's
    mine: Plan  # those, as its own tables number them: ids // world
    longest: int  # rows of the rank that holds most of them; all send so many
    place: torch.Tensor  # (U,) where each row then lies among world x longest


class ShardedTables:
    """Tables of which each rank holds a part, in tables that make(V', S, M, std, betas, device) returns.

    The other arguments are those of StemTables, and so are rows and results, whatever the number of ranks.
    """

    def __init__(self, make, vocab_size, n_stem, d_ff, std, betas=(0.9, 0.95), device="cpu", seed=0):
        self.vocab_size, self.rank, self.world = vocab_size, dist.get_rank(), dist.get_world_size()
        n = len(range(self.rank, vocab_size, self.world))
        self.part = make(n, n_stem, d_ff, None if std is None else 0.0, betas, device)  # 0.0: zeros, nothing drawn
        for ids, rows in initial_rows(vocab_size, n_stem, d_ff, std, seed):
            self.write(ids, rows)

    moved = property(lambda self: self.part.moved)

    def plan(self, ids):
        """As of StemTables."""
        plan = StemTables.plan(self, ids)
        owned = [(plan.ids % self.world == rank).nonzero()[:, 0] for rank in range(self.world)]
        own, longest, place = owned[self.rank], max(map(len, owned)), torch.empty_like(plan.ids)
        for rank, positions in enumerate(owned):
            place[positions] = rank * longest + torch.arange(len(positions))
        return ShardedPlan(*plan, own, Plan(plan.ids[own] // self.world, own), longest, place)

    def prefetch(self, plan):
        """As of StemTables."""
        self.part.prefetch(plan.mine)

    def fetch(self, plan):
        """As of StemTables; all ranks together."""
        rows = self.part.fetch(plan.mine).detach()
        rows = F.pad(rows, (0, 0, 0, 0, 0, plan.longest - len(rows)))
        gathered = rows.new_empty(self.world * plan.longest, *rows.shape[1:])
        dist.all_gather_single(gathered, rows)
        return gathered[plan.place.to(rows.device)].requires_grad_(torch.is_grad_enabled())

    def reduce(self, plan, rows):
        """As of StemTables; all ranks together. Leaves in rows.grad the mean over ranks of own rows, of others 0."""
        grad = rows.grad.new_zeros(self.world * plan.longest, *rows.shape[1:])
        grad.index_copy_(0, plan.place.to(rows.device), rows.grad)
        mine = grad.new_empty(plan.longest, *rows.shape[1:])
        dist.reduce_scatter_single(mine, grad)
        rows.grad.zero_().index_copy_(0, plan.own.to(rows.device), mine[: len(plan.own)] / self.world)
        norm2 = StemTables.reduce(self, plan, rows)
        dist.all_reduce(norm2)
        return norm2

    def update(self, plan, rows, lr):
        """As of StemTables: each rank its own rows."""
        own, grad, rows.grad = plan.own.to(rows.device), rows.grad, None
        mine = rows.detach()[own]
        mine.grad = grad[own]
        self.part.update(plan.mine, mine, lr)

    def read(self, ids):
        """As of StemTables; all ranks together."""
        with torch.no_grad():
            plan = self.plan(ids)
            return self.fetch(plan).cpu()[plan.inv]

    def write(self, ids, rows):
        """As of StemTables; all ranks with the same."""
        own = ids % self.world == self.rank
        self.part.write(ids[own] // self.world, rows[own])

    def state_dict(self):
        """As of StemTables, in rank 0's host memory, to which the others send their rows in pieces; they get {}."""
        whole = {}
        for name, mine in self.part.state_dict().items():
            if self.rank:
                for piece in mine.split(1024):
                    dist.send(piece.cpu(), 0)
                continue
            whole[name] = torch.empty(self.vocab_size, *mine.shape[1:], dtype=mine.dtype)
            whole[name][:: self.world] = mine
            for rank in range(1, self.world):
                for piece in whole[name][rank :: self.world].split(1024):
                    dist.recv(received := torch.empty_like(piece, memory_format=torch.contiguous_format), rank)
                    piece.copy_(received)
        return whole

    def load_state_dict(self, state, assign=False):
        """As of StemTables: the rank's own rows are copied, so that of a mapped file the others stay unread."""
        if any(len(table) != self.vocab_size for table in state.values()):
            raise ValueError(f"the checkpoint's tables do not have the {self.vocab_size} rows of this model's")
        self.part.load_state_dict({name: table[self.rank :: self.world] for name, table in state.items()})
