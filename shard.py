"""
Tables split over processes. ShardedTables answers the verbs of stem.StemTables, but each of `world` processes (ranks)
holds only the rows with id % world == rank and their optimizer state, on its device or in host memory.

A step's batch is a function of the seed: every rank draws all of it, and knows without asking who needs which rows.

    fetch    owners give each rank the rows of its ids                        all-to-all
    reduce   gradients go back, and the owner takes their mean as DDP does    all-to-all, and a number for the norm
    update   the owner's AdamW: once a step, whichever ranks saw the token    nothing

So a rank holds and moves the rows of its own distinct ids, where replicas all-reduce those of all ranks. All ranks must
call all verbs in one order with the same ids, or they wait. train.py puts DDP around the dense part.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from stem import Plan, StemTables, initial_rows


class ShardedPlan(NamedTuple):
    """As stem.Plan, of this rank's ids, with who gives what."""
    ids: torch.Tensor
    inv: torch.Tensor
    mine: Plan  # what all need of this rank: ids (n,) as its part numbers them, id // world; inv: rank after rank
    gives: list  # how many each rank needs of it
    takes: list  # how many it needs of each
    order: torch.Tensor  # (U,) where in ids these are, owner after owner


class ShardedTables:
    """StemTables' arguments, verbs and rows; make(V / world, S, M, std, betas, device) holds the rank's part. S > 0."""

    def __init__(self, make, vocab_size, n_stem, d_ff, std, betas=(0.9, 0.95), device="cpu", seed=0):
        self.rank, self.world, self.vocab_size = dist.get_rank(), dist.get_world_size(), vocab_size
        self.part = make(len(range(self.rank, vocab_size, self.world)), n_stem, d_ff, 0.0, betas, device)
        self.moved = self.part.moved
        for ids, rows in initial_rows(vocab_size, n_stem, d_ff, std, seed):
            self.write(ids, rows)

    def plan(self, ids):
        """For ids (ranks, B, T) the rows of this rank's batch, but all of inv; for another shape those of all ids."""
        plans = [StemTables.plan(self, batch) for batch in (ids if ids.dim() == 3 else ids[None])]
        needs = [plan.ids for plan in plans] * (1 if ids.dim() == 3 else self.world)
        needs += [ids.new_empty(0)] * (self.world - len(needs))  # an evaluation may end with fewer batches than ranks
        asked = [need[need % self.world == self.rank] // self.world for need in needs]
        mine, owner = Plan(*torch.unique(torch.cat(asked), return_inverse=True)), needs[self.rank] % self.world
        return ShardedPlan(needs[self.rank], torch.stack([plan.inv for plan in plans]).view_as(ids), mine,
                           [len(ids) for ids in asked], owner.bincount(minlength=self.world).tolist(),
                           owner.argsort(stable=True))

    def prefetch(self, plan):
        self.part.prefetch(plan.mine)

    def fetch(self, plan):
        given = self.part.fetch(plan.mine).detach()[plan.mine.inv]
        taken = given.new_empty(len(plan.ids), *given.shape[1:])
        dist.all_to_all_single(taken, given, plan.takes, plan.gives)
        return taken[plan.order.argsort()].requires_grad_(torch.is_grad_enabled())

    def reduce(self, plan, rows):
        """Turns rows into those that this rank owns, for clipping and update; only their gradient is in them."""
        taken = rows.new_empty(len(plan.mine.inv), *rows.shape[1:])
        dist.all_to_all_single(taken, rows.grad[plan.order], plan.gives, plan.takes)
        grad = rows.new_zeros(len(plan.mine.ids), *rows.shape[1:])
        rows.data = rows.grad = grad.index_add_(0, plan.mine.inv.to(rows.device), taken).div_(self.world)
        dist.all_reduce(norm2 := StemTables.reduce(self, plan, rows))
        return norm2

    def update(self, plan, rows, lr):
        self.part.update(plan.mine, rows, lr)

    def warm_start(self, batches):
        self.part.warm_start(self.plan(ids).mine.ids for ids in batches)

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
