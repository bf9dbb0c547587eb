"""
Tables in host memory. HostTables answers the verbs of stem.StemTables, but keeps the tables and their optimizer state
(12 bytes a number) in CPU memory, and on the device only the rows of the step at hand. On the CPU, where it can be
checked, results are those of resident tables to the last bit.

A step's tokens are known before the step, so its rows can be copied while the step before still computes. All but one
kind: a row that the step before also uses will be changed by it. Rows of the next plan are therefore

    early   not in the batch now running: gathered and copied by prefetch, behind that batch's forward and backward
    late    in it, or written since: gathered by fetch, after that batch's update

which makes prefetching exact. Time runs to the right; h2d and d2h are copies to and from the device:

    main      fetch(t) prefetch(t+1) | forward and backward of t | update(t) | fetch(t+1) prefetch(t+2) | forward ...
    worker                            early(t+1)                  AdamW(t)    late(t+1)
    h2d                                   early(t+1)                              late(t+1)
    d2h                                                      gradients(t)

One worker thread owns the tables: whatever reads or writes them is a job in its queue, done in order. So nothing needs
a lock, and a read behind an update sees it. On the CPU there are no streams and no copies to hide, and the rest is the
same code. It holds no cache of hot rows. Shapes: V vocab_size, U distinct ids of a step, R = S M.
"""

import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from stem import Plan, StemTables, adamw_rows


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
    late: torch.Tensor  # (U,) bool: those that were not, or have been written since
    job: object


class HostTables:
    """Tables in host memory, with the arguments and verbs of StemTables; see there and at the top.

    max_rows: distinct tokens of a step at most; a larger plan is not prefetched. dtype: in which rows travel; half
    precision only where the model's activations are rounded to it anyway. Device bytes: two lanes of max_rows rows.
    """

    def __init__(self, vocab_size, n_stem, d_ff, std, betas=(0.9, 0.95), device="cpu", seed=0, max_rows=0,
                 dtype=torch.float32):
        self.host = StemTables(vocab_size, n_stem, d_ff, std, betas, "cpu", seed)
        self.device = torch.empty(0, device=device).device  # with its index, which another thread needs
        self.max_rows = min(max_rows, vocab_size)
        cuda, R = self.device.type == "cuda", n_stem * d_ff
        self.h2d, self.d2h = (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)) if cuda else (None, None)
        self.early, self.late = (Lane(self.max_rows, R, dtype, self.device, self.h2d) for _ in range(2))
        self.grads = pinned(self.max_rows, R, torch.float32) if cuda else None
        self.worker = ThreadPoolExecutor(1, "tables", start_worker, (self.device,))  # ends when the tables go
        self.jobs = deque()  # those not joined yet, in order
        self.running = None  # the plan whose update is to come
        self.ahead = None  # the one that was prefetched
        self.wait = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else None  # of a fetch
        self.moved = dict.fromkeys(("rows", "early", "late", "bytes_up", "bytes_down", "device_bytes", "host_stall_ms",
                                    "device_stall_ms"), 0)  # in the last step

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
        host = self.host
        adamw_rows(host.weight.flatten(1), host.exp_avg.flatten(1), host.exp_avg_sq.flatten(1), host.count, ids,
                   grad.cpu(), lr, host.betas)

    def _count(self, plan, n_late, start):
        """Note what the rows of a step cost; on a GPU the wait is known when the step is over."""
        if self.wait:
            self.wait[1].record()
        U, number = len(plan.ids), self.host.weight[0].numel()
        up, down = U * number * self.early.buffer.itemsize, U * number * 4  # rows, their gradients
        held = 2 * self.early.buffer.nbytes + 3 * down  # lanes; leaf, gradient, what unbind's backward stacks
        self.moved |= {"rows": U, "early": U - n_late, "late": n_late, "bytes_up": up, "bytes_down": down,
                       "device_bytes": held, "host_stall_ms": 1000 * (time.perf_counter() - start)}

    # -----------------------------------------------------------------------------------------------------------------
    # The verbs.

    def plan(self, ids):
        """As of StemTables."""
        return self.host.plan(ids)

    def prefetch(self, plan):
        """Start the way of those rows of `plan` that the batch now running leaves as they are."""
        if len(plan.ids) > self.max_rows:
            return
        late = torch.isin(plan.ids, self.running.ids if self.running else plan.ids[:0])
        early = (~late).nonzero()[:, 0]
        job = self._submit(self.early.load, self.host.weight.flatten(1), plan.ids[early])
        self.ahead = Ahead(plan, early, late, job)

    def fetch(self, plan):
        """As of StemTables. A plan that was not prefetched is gathered now, in memory of its own."""
        start, ahead, n_late = time.perf_counter(), self.ahead, len(plan.ids)
        if self.wait and torch.is_grad_enabled():
            self.wait[0].record()
        if ahead and ahead.plan is plan:
            self.ahead, late = None, ahead.late.nonzero()[:, 0]
            job = self._submit(self.late.load, self.host.weight.flatten(1), plan.ids[late])
            rows = torch.empty(len(plan.ids), self.host.weight[0].numel(), device=self.device)
            self._join(job)  # and with it the early rows' job
            self.early.unload(rows, ahead.early)
            self.late.unload(rows, late)  # over rows that came early and are old
            n_late = len(late)
        else:
            rows = self.read(plan.ids).flatten(1).to(self.device)
        if torch.is_grad_enabled():
            self.running = plan
            self._count(plan, n_late, start)
        return rows.view(len(rows), *self.host.weight.shape[1:]).requires_grad_(torch.is_grad_enabled())

    reduce = StemTables.reduce

    def update(self, plan, rows, lr):
        """As of StemTables; returns at once, and uses rows.grad up. Whatever comes next waits for what it needs."""
        self.running = None
        grad, rows.grad = rows.grad, None
        if grad is None:
            return
        self._touched(plan.ids)
        ready = None
        if self.d2h:
            self.wait[1].synchronize()
            self.moved["device_stall_ms"] = self.wait[0].elapsed_time(self.wait[1])
            ready = torch.cuda.Event()
            ready.record()
        self._submit(self._adamw, plan.ids, grad.flatten(1), ready, lr)

    def read(self, ids):
        """As of StemTables."""
        return self._join(self._submit(self.host.read, ids))

    def write(self, ids, rows):
        """As of StemTables; also rows that are on their way arrive as written."""
        self._touched(ids)
        self._join(self._submit(self.host.write, ids, rows))

    def state_dict(self):
        """As of StemTables, when all updates are done."""
        return self._join(self._submit(self.host.state_dict))

    def load_state_dict(self, state, assign=False):
        """As of StemTables."""
        self.ahead = None
        self._join(self._submit(self.host.load_state_dict, state, assign))
