"""
Tables split over processes. ShardedTables answers the verbs of stem.StemTables, but each of `world` processes (ranks)
holds only the rows with id % world == rank and their optimizer state, on its device or in host memory.

A step's batch is a function of the seed: every rank draws all of it, and knows without asking which rows it takes.

    fetch    each rank gives those it owns, and all get them all             all-gather
    reduce   a row's gradient goes to its owner, averaged as DDP does        reduce-scatter, and a number for the norm
    update   the owner's AdamW: once a step, whichever ranks saw the token   nothing

All ranks must call all verbs in one order with the same ids, or they wait. train.py puts DDP around the dense part.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from stem import Plan, StemTables, initial_rows


class ShardedPlan(NamedTuple):
    """As stem.Plan, with who holds what."""

    ids: torch.Tensor
    inv: torch.Tensor
    mine: Plan  # ids (n,) of this rank's rows, as its part numbers them: id // world; inv (n,), where they are in ids
    longest: int  # n of the rank with most; so many each sends, since gathered parts must be of one size
    place: torch.Tensor  # (U,) where each row then lies among world x longest


class ShardedTables:
    """StemTables' arguments, verbs and rows; make(V / world, S, M, std, betas, device) holds the rank's part. S > 0."""

    def __init__(self, make, vocab_size, n_stem, d_ff, std, betas=(0.9, 0.95), device="cpu", seed=0):
        self.rank, self.world, self.vocab_size = dist.get_rank(), dist.get_world_size(), vocab_size
        self.part = make(len(range(self.rank, vocab_size, self.world)), n_stem, d_ff, 0.0, betas, device)
        self.moved = self.part.moved
        for ids, rows in initial_rows(vocab_size, n_stem, d_ff, std, seed):
            self.write(ids, rows)

    def plan(self, ids):
        plan = StemTables.plan(self, ids)
        owned = [(plan.ids % self.world == rank).nonzero()[:, 0] for rank in range(self.world)]
        own, longest, place = owned[self.rank], max(map(len, owned)), torch.empty_like(plan.ids)
        for rank, where in enumerate(owned):
            place[where] = rank * longest + torch.arange(len(where))
        return ShardedPlan(*plan, Plan(plan.ids[own] // self.world, own), longest, place)

    def prefetch(self, plan):
        self.part.prefetch(plan.mine)

    def fetch(self, plan):
        mine = self.part.fetch(plan.mine).detach()
        rows = mine.new_empty(self.world * plan.longest, *mine.shape[1:])
        dist.all_gather_single(rows, F.pad(mine, (0, 0, 0, 0, 0, plan.longest - len(mine))))
        return rows[plan.place.to(rows.device)].requires_grad_(torch.is_grad_enabled())

    def reduce(self, plan, rows):
        """Leaves in rows.grad, for clipping to scale, the mean over ranks for own rows and 0 for others."""
        mine = rows.new_empty(plan.longest, *rows.shape[1:])
        grad = rows.new_zeros(self.world * plan.longest, *rows.shape[1:])
        dist.reduce_scatter_single(mine, grad.index_copy_(0, plan.place.to(rows.device), rows.grad))
        own = plan.mine.inv.to(rows.device)
        rows.grad.zero_().index_copy_(0, own, mine[: len(own)] / self.world)
        dist.all_reduce(norm2 := StemTables.reduce(self, plan, rows))
        return norm2

    def update(self, plan, rows, lr):
        own = plan.mine.inv.to(rows.device)
        mine, mine.grad, rows.grad = rows.detach()[own], rows.grad[own], None
        self.part.update(plan.mine, mine, lr)

    @torch.no_grad()
    def read(self, ids):
        return self.fetch(plan := self.plan(ids)).cpu()[plan.inv]

    def write(self, ids, rows):
        own = ids % self.world == self.rank
        self.part.write(ids[own] // self.world, rows[own])

    def state_dict(self):
        """On rank 0, in host memory, all rows, which the others send in pieces; on those nothing."""
        whole = {}
        for name, mine in self.part.state_dict().items():
            for piece in mine.split(1024) if self.rank else ():
                dist.send(piece.cpu(), 0)
            if self.rank == 0:
                whole[name] = torch.empty(self.vocab_size, *mine.shape[1:], dtype=mine.dtype)
                whole[name][:: self.world] = mine
            for rank in range(1, self.world if whole else 1):
                for piece in whole[name][rank :: self.world].split(1024):
                    dist.recv(received := torch.empty(piece.shape, dtype=piece.dtype), rank)
                    piece.copy_(received)
        return whole

    def load_state_dict(self, state, assign=False):
        """Own rows are copied; of a mapped file the others stay unread."""
        self.part.load_state_dict({name: table[self.rank :: self.world] for name, table in state.items()})
