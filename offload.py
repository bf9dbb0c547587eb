"""
Tables in host memory. HostTables answers the verbs of stem.StemTables, but keeps the tables and their optimizer state
(12 bytes a number) in CPU memory; on the device are the rows of the step at hand and those of the most used tokens. On
the CPU, where it can be checked, results are those of resident tables to the last bit. FrozenTables are for generating,
when nothing is updated: in fp32, or in int8.

A step's tokens are known before the step, so its rows can be copied while the step before still computes. All but one
kind: a row that the step before also uses will be changed by it. Rows of a plan are therefore

    hot     in the cache, with their optimizer state: used and updated on the device, they move no bytes
    early   not in the batch now running: gathered and copied by prefetch, behind that batch's forward and backward
    late    in it, or written since: gathered by fetch, after that batch's update

which makes prefetching exact. Time runs to the right; h2d and d2h are copies to and from the device:

    main      fetch(t) prefetch(t+1) | forward and backward of t | update(t) | fetch(t+1) prefetch(t+2) | forward ...
    worker                            early(t+1)                  AdamW(t)    late(t+1)
    h2d                                   early(t+1)                              late(t+1)
    d2h                                                      gradients(t)

One worker thread owns the tables: whatever reads or writes them is a job in its queue, done in order. So nothing needs
a lock, and a read behind an update sees it. On the CPU there are no streams and no copies to hide, and the rest is the
same code. Shapes: V vocab_size, K cache rows, U distinct ids of a step, S STEM layers, M = d_ff, R = S M.
"""

import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from stem import Plan, StemTables


def pinned(rows, R, dtype):
    """Host memory that a GPU copies from and to without the CPU's help; ordinary memory where there is none left."""
    try:
        return torch.empty(rows, R, dtype=dtype, pin_memory=True)
    except RuntimeError as e:  # containers and WSL limit it; copies then wait, results are the same
        warnings.warn(f"host memory cannot be pinned ({e}): copies will not overlap with compute", stacklevel=2)
        return torch.empty(rows, R, dtype=dtype)


class Lane:
    """A way to the device for one plan's rows: a staging area on the host, a buffer on the device, the copy between.

    The worker loads, the main thread unloads when it has joined that job. On the CPU stage and buffer are one; without
    a stream (mps) copies wait.
    """

    def __init__(self, max_rows, R, dtype, device, stream):
        self.stream = stream
        self.buffer = self.stage = torch.empty(max_rows, R, dtype=dtype, device=device)
        if device.type != "cpu":
            self.stage = pinned(max_rows, R, dtype) if stream else torch.empty(max_rows, R, dtype=dtype)
        self.copied, self.free = (torch.cuda.Event(), torch.cuda.Event()) if stream else (None, None)

    def load(self, table, ids):
        """Gather rows ids of table (V, R) and send them off."""
        stage, buffer = self.stage[: len(ids)], self.buffer[: len(ids)]
        if self.stream:
            self.copied.synchronize()  # the last copy may still read the stage
        if stage.dtype == table.dtype:
            torch.index_select(table, 0, ids, out=stage)  # table[ids] would be pageable memory, and a second copy
        else:
            stage.copy_(table.index_select(0, ids))
        if self.stream:
            with torch.cuda.stream(self.stream):
                self.stream.wait_event(self.free)  # the compute stream may still read the buffer
                buffer.copy_(stage, non_blocking=True)
                self.copied.record()
        elif stage.device != buffer.device:
            buffer.copy_(stage)

    def unload(self, rows, where):
        """Put what was loaded into rows (U, R) at positions where (n,)."""
        if self.stream:
            torch.cuda.current_stream().wait_event(self.copied)  # the copy may still be on its way
        rows.index_copy_(0, where.to(rows.device), self.buffer[: len(where)].to(rows.dtype))
        if self.stream:
            self.free.record()


def start_worker(device):
    """A thread has a grad mode of its own, and a device."""
    torch.set_grad_enabled(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)


@dataclass
class Ahead:
    """A plan whose early rows are on their way."""

    plan: Plan
    early: torch.Tensor  # (n,) positions in plan.ids that were gathered
    late: torch.Tensor  # (U,) bool: those that were not, or have been written since; late or hot when they are fetched
    job: object


class Slots:
    """Which K of V tokens are hot, where their rows lie, and how often tokens are used. On the CPU, main thread only.

    freq counts the steps a token is in, not its occurrences: a row costs the same either way. Uses age, by a factor of
    e in WINDOW steps, so that what was hot once does not stay for ever: each counts a little more than the one before.
    """

    WINDOW = 128

    def __init__(self, V, K):
        self.of = torch.full((V,), -1)  # slot of a token, -1 = cold
        self.token = torch.full((K,), -1)  # token of a slot, -1 = empty
        self.freq, self.use_now = torch.zeros(V), 1.0

    def find(self, ids):
        """(hot, cold, slots): the positions in ids of tokens with and without a slot, and the slots of the former."""
        slots = self.of[ids]
        hot = slots >= 0
        return hot.nonzero()[:, 0], (~hot).nonzero()[:, 0], slots[hot]

    def use(self, ids):
        """Count one step with these distinct ids."""
        self.freq[ids] += self.use_now
        self.use_now *= 1 + 1 / self.WINDOW
        if self.use_now > 1e6:  # far below what fp32 holds
            self.freq /= self.use_now
            self.use_now = 1.0

    def swaps(self, tokens, factor=1.0, uses=0):
        """(tokens, slots): which of these tokens should get whose slots: hotter by a factor and by that many uses.

        For an empty slot one use is enough.
        """
        tokens = tokens[self.of[tokens] < 0]
        tokens = tokens[self.freq[tokens].argsort(descending=True, stable=True)][: len(self.token)]
        least = torch.where(self.token < 0, 0.0, factor * self.freq[self.token] + uses * self.use_now)
        least, slots = least.topk(len(tokens), largest=False)
        hotter = self.freq[tokens] > least
        return tokens[hotter], slots[hotter]

    def give(self, tokens, slots):
        """Let tokens have those slots; who had them is cold."""
        left = self.token[slots]
        self.of[left[left >= 0]] = -1
        self.token[slots], self.of[tokens] = tokens, slots


class HostTables:
    """Tables in host memory, with the arguments and verbs of StemTables; see there and at the top.

    max_rows: distinct tokens of a step at most; a larger plan is not prefetched. dtype: in which rows travel; half
    precision only where the model's activations are rounded to it anyway. cache_rows: K, rows of the most used tokens
    to keep on the device, chosen anew at intervals. Device bytes: 12 R K, two lanes of max_rows rows, and 12 R U for a
    step's rows, their gradients and what autograd stacks them from.
    """

    rebalance_interval = 50  # updates

    def __init__(self, vocab_size, n_stem, d_ff, std, betas=(0.9, 0.95), device="cpu", seed=0, max_rows=0,
                 dtype=torch.float32, cache_rows=0):
        self.host = StemTables(vocab_size, n_stem, d_ff, std, betas, "cpu", seed)
        self.device = torch.empty(0, device=device).device  # with its index, which another thread needs
        self.max_rows = min(max_rows, vocab_size)
        self.slots = Slots(vocab_size, min(cache_rows, vocab_size))
        self.hot = StemTables(len(self.slots.token), n_stem, d_ff, None, betas, device)  # row i is in slot i
        cuda, self.R = self.device.type == "cuda", n_stem * d_ff
        self.h2d, self.d2h = (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)) if cuda else (None, None)
        self.early, self.late = (Lane(self.max_rows, self.R, dtype, self.device, self.h2d) for _ in range(2))
        self.grads = pinned(self.max_rows, self.R, torch.float32) if cuda else None
        self.worker = ThreadPoolExecutor(1, "tables", start_worker, (self.device,))  # ends when the tables go
        self.jobs = deque()  # those not joined yet, in order
        self.running = None  # the plan whose update is to come
        self.ahead = None  # the one that was prefetched
        self.updates = 0
        self.wait = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else None  # of a fetch
        self.moved = dict.fromkeys(("rows", "hot", "early", "late", "row_hit_rate", "token_hit_rate", "swaps",
                                    "bytes_up", "bytes_down", "device_bytes", "host_stall_ms", "device_stall_ms"), 0)

    # -----------------------------------------------------------------------------------------------------------------
    # The worker.

    def _submit(self, job, *args):
        """Queue a job; raises here what an earlier one has failed with."""
        while self.jobs and self.jobs[0].done():
            self.jobs.popleft().result()
        self.jobs.append(self.worker.submit(job, *args))
        return self.jobs[-1]

    def _join(self, job):
        """Wait for a job and all before it, and raise what the first of them failed with; returns its result."""
        while job in self.jobs:
            self.jobs.popleft().result()
        return job.result()

    def _touched(self, ids):
        """Rows that are being written: what was gathered of them ahead is old."""
        if self.ahead:
            self.ahead.late |= torch.isin(self.ahead.plan.ids, ids)

    def _adamw(self, ids, grad, ready, lr):
        if ready:
            with torch.cuda.stream(self.d2h):
                self.d2h.wait_event(ready)  # the gradient may still be computed
                if len(ids) <= self.max_rows:
                    there = self.grads[: len(ids)].copy_(grad, non_blocking=True)
                    self.d2h.synchronize()  # the copy may still be on its way; till then `grad` must live
                    grad = there
        self.host.adamw(ids, grad.cpu(), lr)

    def _exchange(self, leaving, state, entering):
        """Take rows `leaving` back in, with the state of their optimizer, and give out those of `entering`."""
        for name, table in self.host.state_dict().items():
            table[leaving] = state[name]
        return {name: table[entering] for name, table in self.host.state_dict().items()}

    def _count(self, plan, hot, late, start):
        """Note what the rows of a step cost; on a GPU the wait is known when the step is over."""
        if self.wait:
            self.wait[1].record()
        U, n_hot = len(plan.ids), len(hot)
        held = 2 * self.early.buffer.nbytes + 12 * self.R * (U + len(self.slots.token))  # lanes; leaf, gradient, unbind
        self.moved |= {
            "rows": U, "hot": n_hot, "early": U - n_hot - len(late), "late": len(late),
            "row_hit_rate": n_hot / max(1, U),
            "token_hit_rate": int(torch.isin(plan.inv, hot).sum()) / max(1, plan.inv.numel()), "swaps": 0,
            "bytes_up": (U - n_hot) * self.R * self.early.buffer.itemsize, "bytes_down": 0,
            "device_bytes": held, "host_stall_ms": 1000 * (time.perf_counter() - start)}

    # -----------------------------------------------------------------------------------------------------------------
    # The cache.

    def _hot_state(self, slots):
        """What the rows in those slots are, with the state of their optimizer."""
        return {name: table[slots.to(table.device)].cpu() for name, table in self.hot.state_dict().items()}

    def _rebalance(self):
        """Give slots to tokens that earn them: a swap moves 24 bytes a number, a use of a cold row 6 or 8."""
        slots = self.slots
        tokens, places = slots.swaps(slots.freq.topk(len(slots.token)).indices, factor=1.1, uses=4)
        full = places[slots.token[places] >= 0]
        state = self._join(self._submit(self._exchange, slots.token[full], self._hot_state(full), tokens))
        for name, table in self.hot.state_dict().items():
            table[places.to(table.device)] = state[name].to(table.device)
        slots.give(tokens, places)
        self.moved["swaps"] += len(tokens)
        self.moved["bytes_up"] += 12 * self.R * len(tokens)
        self.moved["bytes_down"] += 12 * self.R * len(full)

    def warm_start(self, batches):
        """Fill the cache as if these batches of ids had been steps."""
        for ids in batches:
            self.slots.use(ids.unique())
        self._rebalance()

    # -----------------------------------------------------------------------------------------------------------------
    # The verbs.

    def plan(self, ids):
        """As of StemTables."""
        return self.host.plan(ids)

    def prefetch(self, plan):
        """Start the way of those rows of `plan` that are cold and that the batch now running leaves as they are."""
        if len(plan.ids) > self.max_rows:
            return
        late = self.slots.of[plan.ids] >= 0
        if self.running:
            late |= torch.isin(plan.ids, self.running.ids)
        early = (~late).nonzero()[:, 0]
        job = self._submit(self.early.load, self.host.weight.flatten(1), plan.ids[early])
        self.ahead = Ahead(plan, early, late, job)

    def fetch(self, plan):
        """As of StemTables. A plan that was not prefetched is gathered now, in memory of its own."""
        start, ahead, (hot, cold, slots) = time.perf_counter(), self.ahead, self.slots.find(plan.ids)
        if self.wait and torch.is_grad_enabled():
            self.wait[0].record()
        if ahead and ahead.plan is plan:
            ahead.late[hot] = False
            self.ahead, late = None, ahead.late.nonzero()[:, 0]
            job = self._submit(self.late.load, self.host.weight.flatten(1), plan.ids[late])
            rows = torch.empty(len(plan.ids), self.R, device=self.device)
            self._join(job)  # and with it the early rows' job
            self.early.unload(rows, ahead.early)
            self.late.unload(rows, late)  # over rows that came early and are old
            rows[hot.to(self.device)] = self.hot.weight.flatten(1)[slots.to(self.device)]
        else:
            late = cold
            rows = self.read(plan.ids).flatten(1).to(self.early.buffer.dtype).to(self.device).float()
        if torch.is_grad_enabled():
            self.running = plan
            self._count(plan, hot, late, start)
        return rows.view(len(rows), *self.host.weight.shape[1:]).requires_grad_(torch.is_grad_enabled())

    reduce = StemTables.reduce

    def update(self, plan, rows, lr):
        """As of StemTables; returns at once, and uses rows.grad up. Whatever comes next waits for what it needs."""
        running, self.running = self.running or plan, None  # whose rows were fetched; `plan` may be a part of them
        grad, rows.grad = rows.grad, None
        if grad is None:
            return
        self._touched(plan.ids)
        grad, (hot, cold, slots) = grad.flatten(1), self.slots.find(plan.ids)  # perhaps not those of the fetch
        if len(hot):
            self.hot.adamw(slots, grad[hot.to(self.device)], lr)
            grad = grad[cold.to(self.device)]
        ready = None
        if self.d2h:
            self.wait[1].synchronize()
            self.moved["device_stall_ms"] = self.wait[0].elapsed_time(self.wait[1])
            ready = torch.cuda.Event()
            ready.record()
        self._submit(self._adamw, plan.ids[cold], grad, ready, lr)
        self.moved["bytes_down"] = len(cold) * self.R * 4
        self.slots.use(running.ids)
        self.updates += 1
        if len(self.slots.token) and self.updates % self.rebalance_interval == 0:
            self._rebalance()

    def read(self, ids):
        """As of StemTables."""
        rows, (hot, _, slots) = self._join(self._submit(self.host.read, ids)), self.slots.find(ids)
        rows[hot] = self.hot.read(slots)
        return rows

    def write(self, ids, rows):
        """As of StemTables; also rows that are on their way arrive as written."""
        self._touched(ids)
        self._join(self._submit(self.host.write, ids, rows))
        hot, _, slots = self.slots.find(ids)
        self.hot.write(slots, rows[hot])

    def state_dict(self):
        """As of StemTables, when all updates are done and hot rows are written back. They stay hot."""
        full = (self.slots.token >= 0).nonzero()[:, 0]
        self._join(self._submit(self._exchange, self.slots.token[full], self._hot_state(full), full[:0]))
        return self.host.state_dict()

    def load_state_dict(self, state, assign=False):
        """As of StemTables. The cache is then empty, until the next time it is filled."""
        self.state_dict()  # writes hot rows back: a state that does not fit leaves the old one
        self.ahead = None
        self.slots.token.fill_(-1)
        self.slots.of.fill_(-1)
        self._join(self._submit(self.host.load_state_dict, state, assign))


class FrozenTables:
    """Tables in host memory to generate with: the verbs of StemTables but for reduce and update.

    cache_rows: K rows on the device too, at first those of the tokens that training met most. In fp32 a row that had to
    come for a token takes the place of a less used one, at no cost. int8: in a row of a layer the largest number is
    127 and the others are rounded to whole steps of it: a quarter of the bytes in memory and on the way. Rows in the
    cache are as they were trained, and stay there: a text must not depend on those before it.
    """

    def __init__(self, vocab_size, n_stem, d_ff, device="cpu", cache_rows=0, int8=False):
        self.shape, self.device, self.int8 = (vocab_size, n_stem, d_ff), device, int8
        self.host = StemTables(*self.shape, None)  # its weight may be int8
        self.scale = torch.empty(vocab_size if int8 else 0, n_stem, 1, dtype=torch.bfloat16)  # of a step
        self.slots = Slots(vocab_size, min(cache_rows, vocab_size))
        self.hot = torch.empty(len(self.slots.token), n_stem, d_ff, device=device)  # row i is in slot i
        self.moved = {"rows": 0, "hot": 0, "bytes_up": 0}  # by all fetches

    def _store(self, ids, rows):
        """Write rows (n, S, M) into host memory. What was rounded once is not changed by rounding it again."""
        if self.int8:  # 127 scales of 8 bits are exact in fp32, and so is the way back
            self.scale[ids] = (rows.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30).bfloat16()
            rows = (rows / self.scale[ids].float()).round().clamp(-127, 127).to(torch.int8)
        self.host.weight[ids] = rows

    def _rows(self, ids):
        """The rows of ids (n,) on the device, (n, S, M), and which of ids were cold."""
        hot, cold, slots = self.slots.find(ids)
        sent = self.host.weight[ids[cold]].to(self.device)
        if self.int8:
            sent = sent * self.scale[ids[cold]].to(self.device).float()
        if not len(hot):
            return sent, cold
        rows = sent.new_empty(len(ids), *self.shape[1:])
        rows[hot], rows[cold] = self.hot[slots], sent
        return rows, cold

    prefetch = StemTables.prefetch

    def plan(self, ids):
        """As of StemTables."""
        return self.host.plan(ids)

    def fetch(self, plan):
        """As of StemTables, without a gradient; ValueError where one is asked for."""
        if torch.is_grad_enabled():
            raise ValueError("these tables are to generate with; StemTables and HostTables train. In int8 most updates "
                             "would be lost: they are smaller than its steps")
        rows, cold = self._rows(plan.ids)
        if len(self.hot) and not self.int8:
            self.slots.use(plan.ids)
            tokens, places = self.slots.swaps(plan.ids[cold])
            self.slots.give(tokens, places)
            self.hot[places] = rows[torch.searchsorted(plan.ids, tokens)]
        sent = len(cold) * (self.host.weight[0].nbytes + self.scale[:1].nbytes)
        for name, n in (("rows", len(rows)), ("hot", len(rows) - len(cold)), ("bytes_up", sent)):
            self.moved[name] += n
        return rows

    def read(self, ids):
        """As of StemTables."""
        return self._rows(ids)[0].cpu()

    def write(self, ids, rows):
        """As of StemTables."""
        self._store(ids, rows)
        hot, _, slots = self.slots.find(ids)
        self.hot[slots] = rows[hot].to(self.device)

    def state_dict(self):
        """As of StemTables; ValueError in int8."""
        if self.int8:
            raise ValueError("int8 rows are rounded, and no checkpoint to go on from: use fp32 tables")
        return self.host.state_dict()

    def load_state_dict(self, state, assign=False):
        """As of StemTables; fills the cache."""
        loaded = StemTables(*self.shape, None)
        loaded.load_state_dict(state, assign)
        self.host, weight, self.slots = loaded, loaded.weight, Slots(self.shape[0], len(self.slots.token))
        self.slots.freq += loaded.count * (Slots.WINDOW / max(1, loaded.count.max()))
        tokens = self.slots.freq.topk(len(self.slots.token)).indices
        self.slots.give(tokens, torch.arange(len(tokens)))
        self.hot.copy_(weight[tokens])
        if self.int8:
            del loaded.exp_avg, loaded.exp_avg_sq
            loaded.weight = torch.empty(self.shape, dtype=torch.int8)
            for ids in torch.arange(self.shape[0]).split(1024):  # in pieces: no second copy of a large table
                self._store(ids, weight[ids])
