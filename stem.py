"""
STEM in one file: "Scaling Transformers with Embedding Modules", arXiv 2601.10639.

In a STEM layer the up-projection of the feed-forward network is not a matmul but a row of a table, chosen by the id of
the current token: W_u x becomes U[t]. This file holds that layer beside the dense one it replaces, the variants that it
is compared with, the rule for which layers are STEM, the tables of all layers as one object, and the optimizer that
touches only the rows of a step's tokens.

It imports torch alone: copy it into another project and it works. It knows nothing of attention, data or training; a
model hands its layers the rows (model.py) and a training loop calls the tables' verbs (train.py).

    plan = tables.plan(ids)           # which distinct rows this step needs
    rows = tables.fetch(plan)         # those rows, (U, S, M), a leaf that gradients gather in
    u = F.embedding(plan.inv, rows[:, layer]); loss = ...; loss.backward()
    tables.reduce(plan, rows)         # squared norm of the rows' gradient, for joint clipping
    tables.update(plan, rows, lr)     # AdamW on those rows alone

Shapes: B batch, T time, C n_embd, M d_ff, V vocab_size, S STEM layers, U distinct ids of a step, R = S M.
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F


def is_stem_layer(layer, stem_every, stem_first=1):
    """Whether `layer` (from 0) reads a table: every stem_every-th one, none before stem_first; 0 means a dense model.

    16 layers with stem_every = 3 gives 2, 5, 8, 11, 14. stem_every = 1 gives all but layer 0, which is the official
    release's "all"; stem_first = 0 takes layer 0 too.
    """
    return stem_every > 0 and layer >= stem_first and (layer + 1) % stem_every == 0


class Linear(nn.Linear):
    """A matmul in its input's dtype over an fp32 master weight, no bias: all there is to mixed precision here."""

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, h):  # (..., n_in) -> (..., n_out)
        return F.linear(h, self.weight.to(h.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# The layer. All are called ffn(h, u, ids): h the normed hidden state, u the tokens' table rows of this layer (None in a
# dense one), ids the tokens themselves.


class SwiGLU(nn.Module):
    """The dense feed-forward layer of a Llama: y = W_d(SiLU(W_g h) * W_u h). Three matmuls."""

    def __init__(self, C, M):
        super().__init__()
        self.w_gate = Linear(C, M)
        self.w_up = Linear(C, M)
        self.w_down = Linear(M, C)

    def forward(self, h, u, ids):  # (B, T, C), None, (B, T) -> (B, T, C)
        return self.w_down(F.silu(self.w_gate(h)) * self.w_up(h))


class StemFFN(nn.Module):
    """STEM, the paper's layer: y = W_d(SiLU(W_g h) * U[t]). Two matmuls and a row; the gate still sees the context."""

    def __init__(self, C, M):
        super().__init__()
        self.w_gate = Linear(C, M)
        self.w_down = Linear(M, C)

    def forward(self, h, u, ids):  # (B, T, C), (B, T, M), (B, T) -> (B, T, C)
        return self.w_down(F.silu(self.w_gate(h)) * u)


class StemGate(nn.Module):
    """The paper's control: y = W_d(SiLU(U[t]) * W_u h). A gate blind to the context; it falls below the dense model."""

    def __init__(self, C, M):
        super().__init__()
        self.w_up = Linear(C, M)
        self.w_down = Linear(M, C)

    def forward(self, h, u, ids):  # (B, T, C), (B, T, M), (B, T) -> (B, T, C)
        return self.w_down(F.silu(u) * self.w_up(h))


class StemAdd(SwiGLU):
    """The paper's STEM-dagger: y = W_d(SiLU(W_g h) * (W_u h + U[t])). Costs a dense layer's FLOPs and the table."""

    def forward(self, h, u, ids):  # (B, T, C), (B, T, M), (B, T) -> (B, T, C)
        return self.w_down(F.silu(self.w_gate(h)) * (self.w_up(h) + u))


class StemHybrid(SwiGLU):
    """Ours to test: ids below `frequent` read the table, rarer ones pay the matmul. For ids numbered by frequency, as
    GPT-2's nearly are. As built every token pays, and rare tokens' rows lie idle: it shows a loss, not a saving."""

    def __init__(self, C, M, frequent=512):
        super().__init__(C, M)
        self.frequent = frequent

    def forward(self, h, u, ids):  # (B, T, C), (B, T, M), (B, T) -> (B, T, C)
        up = torch.where((ids < self.frequent)[..., None], u, self.w_up(h))
        return self.w_down(F.silu(self.w_gate(h)) * up)


class HashMoE(nn.Module):
    """The paper's rival, Hash-MoE, top-1 of 16: y = f_{t mod 16}(h), each f a whole SwiGLU. It reads no table, costs a
    dense layer's FLOPs, and every expert serves equally many ids."""

    def __init__(self, C, M, experts=16):
        super().__init__()
        self.experts = nn.ModuleList(SwiGLU(C, M) for _ in range(experts))

    def forward(self, h, u, ids):  # (B, T, C), None, (B, T) -> (B, T, C)
        y = torch.empty_like(h)
        for i, f in enumerate(self.experts):
            here = ids % len(self.experts) == i
            y[here] = f(h[here], None, None)
        return y


STEM_VARIANTS = {"up": StemFFN, "gate": StemGate, "add": StemAdd, "hybrid": StemHybrid, "hash": HashMoE}


# ---------------------------------------------------------------------------------------------------------------------
# The tables' optimizer.


@torch.no_grad()
def adamw_rows(weight, exp_avg, exp_avg_sq, count, ids, grad, lr, betas, eps=1e-8):
    """One step of AdamW on rows `ids` of a table, in place; every other row, moment and count stays as it is.

    weight, exp_avg, exp_avg_sq: (V, R) fp32, on one device. count: (V,) int64 on the CPU, the updates each row has
    seen. ids: (U,) int64 on the CPU, distinct. grad: (U, R) fp32, the gradients of those rows in the order of ids,
    duplicates of a token already summed.

    A row's bias correction follows its own count: a rare token's second update is its second, not the 10,000th. There
    is no weight decay, since decay on use would shrink frequent rows and spare rare ones. A row seen at every step
    equals torch.optim.AdamW(weight_decay=0, foreach=False) to the last bit on the CPU. That needs the corrections in
    float64 and torch's own order of operations; keep both.
    """
    beta1, beta2 = betas
    count[ids] += 1
    step = count[ids].double()[:, None]
    step_size = (-lr / (1 - beta1**step)).float().to(grad.device)  # (U, 1)
    sqrt_bias2 = (1 - beta2**step).sqrt().float().to(grad.device)  # (U, 1)
    ids = ids.to(grad.device)

    # The update is bound by memory traffic. A few rows at a time, in buffers that stay in the CPU's cache, is up to 5
    # times faster than ten passes over (U, R); a GPU wants few launches instead.
    R = grad.size(1)
    block = max(1, (2**18 if grad.device.type == "cpu" else 2**24) // max(1, R))
    buffers = grad.new_empty(4, min(block, len(ids)), R)
    for start in range(0, len(ids), block):
        span = slice(start, start + block)
        i, g = ids[span], grad[span]
        w, m, v, denom = buffers[:, : len(i)]
        torch.index_select(weight, 0, i, out=w)
        torch.index_select(exp_avg, 0, i, out=m)
        torch.index_select(exp_avg_sq, 0, i, out=v)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.sqrt(v, out=denom).div_(sqrt_bias2[span]).add_(eps)
        exp_avg.index_copy_(0, i, m)
        exp_avg_sq.index_copy_(0, i, v)
        weight.index_copy_(0, i, w.addcdiv_(m.mul_(step_size[span]), denom))


# ---------------------------------------------------------------------------------------------------------------------
# The tables and their verbs.


class Plan(NamedTuple):
    """The rows a step needs: ids (U,) sorted, distinct; inv of the batch's shape with ids[inv] == batch. On the CPU."""

    ids: torch.Tensor
    inv: torch.Tensor


def initial_rows(vocab_size, n_stem, d_ff, std, seed):
    """The rows that tables start with, as (ids, rows) in pieces: no second copy of a large table on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    for ids in torch.arange(vocab_size).split(1024) if std else ():
        yield ids, torch.randn(len(ids), n_stem, d_ff, generator=generator).mul_(std)


class StemTables:
    """All STEM layers' tables as one object, resident on `device`, with the state of their optimizer.

    Token-major, (V, S, M): one token's rows for all layers are one contiguous block, moved or updated at once. These
    are plain tensors, not nn.Parameters: a dense optimizer would scan all V rows a step where a batch touches U of
    them, and .to(), weight decay or DDP would take hold of the largest thing there is. S = 0 is a dense model: every
    verb works and does nothing.

    vocab_size, n_stem, d_ff: V, S, M. std: scale of the initial rows; None = memory to load over. seed: the rows are a
    function of it, whatever the device. Holds 12 bytes a number: weight, exp_avg, exp_avg_sq.
    """

    def __init__(self, vocab_size, n_stem, d_ff, std, betas=(0.9, 0.95), device="cpu", seed=0):
        self.vocab_size, self.betas = vocab_size, betas
        make = torch.zeros if std is not None else torch.empty  # which touches no memory
        self.weight = make(vocab_size, n_stem, d_ff, device=device)  # (V, S, M)
        for ids, rows in initial_rows(vocab_size, n_stem, d_ff, std, seed):
            self.write(ids, rows)
        self.exp_avg = make(vocab_size, n_stem, d_ff, device=device)
        self.exp_avg_sq = make(vocab_size, n_stem, d_ff, device=device)
        self.count = torch.zeros(vocab_size, dtype=torch.int64)  # (V,), where the plan's ids are: on the CPU

    moved = {}  # what the last step moved between host and device, for the log: nothing, rows are where they are used

    def plan(self, ids):
        """The rows that a batch of ids (any shape, int64, CPU) needs. Pure. ValueError for an id outside the table."""
        distinct, inv = torch.unique(ids, return_inverse=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < self.vocab_size:
            raise ValueError(f"token ids run from {distinct[0]} to {distinct[-1]}, but the vocabulary has "
                             f"{self.vocab_size}: the data and the model do not belong together")
        return Plan(distinct, inv)

    def prefetch(self, plan):
        """A hint that `plan` comes next. Resident rows are where they are needed already."""

    def fetch(self, plan):
        """The plan's rows, (U, S, M) fp32 in the order of plan.ids: a leaf that requires grad iff grad is enabled."""
        rows = self.weight.index_select(0, plan.ids.to(self.weight.device))
        return rows.requires_grad_(torch.is_grad_enabled())

    def reduce(self, plan, rows):
        """The squared norm of rows.grad, 0-dim; called once a step, when the gradients of all micro-batches are in."""
        if rows.grad is None:
            return rows.new_zeros(())
        return torch.linalg.vector_norm(rows.grad.flatten(1), dim=1).square().sum()

    def update(self, plan, rows, lr):
        """Row-wise AdamW on the plan's rows, which uses rows.grad up. Without one, or with S = 0, nothing."""
        grad, rows.grad = rows.grad, None
        if grad is not None:
            self.adamw(plan.ids, grad.flatten(1), lr)

    def adamw(self, ids, grad, lr):
        """adamw_rows on these tables."""
        adamw_rows(self.weight.flatten(1), self.exp_avg.flatten(1), self.exp_avg_sq.flatten(1), self.count, ids, grad,
                   lr, self.betas)

    def read(self, ids):
        """A copy of the rows of ids (n,), as (n, S, M) fp32 on the CPU."""
        return self.weight[ids.to(self.weight.device)].cpu()

    def write(self, ids, rows):
        """Overwrite the rows of ids (n,), distinct, by rows (n, S, M). Their moments and counts stay."""
        self.weight[ids.to(self.weight.device)] = rows.to(self.weight.device)

    def state_dict(self):
        """weight, exp_avg, exp_avg_sq (V, S, M) and count (V,): the tensors themselves, not copies."""
        return {name: getattr(self, name) for name in ("weight", "exp_avg", "exp_avg_sq", "count")}

    def load_state_dict(self, state, assign=False):
        """Take over a state_dict, from whatever mode wrote it. ValueError if it is of another shape.

        assign: where device and dtype allow, the tensors themselves: those mapped from a file need no second copy.
        """
        for name, mine in self.state_dict().items():
            if name not in state:
                raise ValueError(f"the checkpoint's tables have no {name}")
            if state[name].shape != mine.shape:
                raise ValueError(f"table {name} is {tuple(state[name].shape)} in the checkpoint and "
                                 f"{tuple(mine.shape)} in this model")
            if assign and (state[name].device, state[name].dtype) == (mine.device, mine.dtype):
                setattr(self, name, state[name])
            else:
                mine.copy_(state[name])
