"""offload.py: tables in host memory give what resident ones give, bit for bit, whatever the order of calls."""

import random
import threading
import time
import traceback

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model

import offload
from offload import HostTables
from stem import StemTables

V, S, M = 40, 3, 8
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")),
]


def pair(device="cpu", **more):
    """Resident and offloaded tables of the same rows."""
    return StemTables(V, S, M, 0.5, device=device), HostTables(V, S, M, 0.5, device=device, max_rows=32, **more)


def same(a, b):
    """Bit for bit on the CPU; on a GPU the row sums run in another order, and AdamW's arithmetic is the device's."""
    return torch.equal(a, b) if b.device.type == "cpu" else torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def backward(rows, plan, seed):
    """Some loss that depends on every row; the same for the same seed."""
    torch.manual_seed(seed)
    target = torch.randn(plan.inv.numel(), S * M, device=rows.device)
    h = F.embedding(plan.inv.flatten().to(rows.device), rows.flatten(1))
    loss = ((h - target) ** 2).sum() + h.sin().sum()
    loss.backward()
    return loss.detach()


def train_steps(tables, batches, lr=0.1):
    """The losses of a loop as train.py's."""
    losses, plan = [], tables.plan(batches[0])
    for step in range(len(batches)):
        rows = tables.fetch(plan)
        following = tables.plan(batches[(step + 1) % len(batches)])
        tables.prefetch(following)
        losses.append(backward(rows, plan, step))
        losses.append(tables.reduce(plan, rows))
        tables.update(plan, rows, lr)
        plan = following
    return torch.stack([loss.cpu() for loss in losses])


def overlapping(n=60, seed=0):
    """Batches that share some tokens with the next."""
    g = torch.Generator().manual_seed(seed)
    return [(torch.rand(4, 5, generator=g) ** 2 * V).long() for _ in range(n)]


def equal_state(a, b):
    return all(same(x.cpu(), b.state_dict()[name].cpu()) for name, x in a.state_dict().items())


# ---------------------------------------------------------------------------------------------------------------------
# Equality.

SAME = [torch.tensor([[1, 2, 3]])] * 10
DISJOINT = [torch.arange(i % 4 * 10, i % 4 * 10 + 10)[None] for i in range(12)]
ONE = [torch.tensor([[i % 3]]) for i in range(9)]
WHOLE = [torch.arange(32)[None]] * 5 + [torch.arange(8, 40)[None]] * 5  # U = max_rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batches", [overlapping(), SAME, DISJOINT, ONE, WHOLE])
def test_training_equals_resident_training(batches, device):
    resident, offloaded = pair(device)
    assert same(train_steps(resident, batches), train_steps(offloaded, batches))
    assert equal_state(resident, offloaded)


def test_gathering_everything_early_is_found_out(monkeypatch):
    """The negative control: without the late rows the equality above must fail."""
    monkeypatch.setattr(offload.torch, "isin", lambda ids, _: torch.zeros(len(ids), dtype=torch.bool))
    resident, offloaded = pair()
    assert not torch.equal(train_steps(resident, overlapping()), train_steps(offloaded, overlapping()))


def test_a_slow_worker_changes_nothing(monkeypatch):
    """Reads of a row while its update is under way would show."""
    adamw, load, rng = HostTables._adamw, offload.Lane.load, random.Random(0)
    monkeypatch.setattr(HostTables, "_adamw", lambda *a: (time.sleep(rng.random() / 100), adamw(*a))[1])
    monkeypatch.setattr(offload.Lane, "load", lambda *a: (time.sleep(rng.random() / 100), load(*a))[1])
    resident, offloaded = pair()
    assert torch.equal(train_steps(resident, overlapping(30)), train_steps(offloaded, overlapping(30)))
    assert equal_state(resident, offloaded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("slow", ["h2d", "d2h", "compute"])
def test_slow_streams_change_nothing(monkeypatch, slow):
    """Whichever stream is late, none may read what another has not written, or write what it still reads."""
    resident, offloaded = pair("cuda")
    load, adamw, reduce = offload.Lane.load, HostTables._adamw, StemTables.reduce

    def after_a_nap(job, stream):
        def run(*args):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10**7)
            return job(*args)

        return run

    if slow == "h2d":
        monkeypatch.setattr(offload.Lane, "load", after_a_nap(load, offloaded.h2d))
    elif slow == "d2h":
        monkeypatch.setattr(HostTables, "_adamw", after_a_nap(adamw, offloaded.d2h))
    else:
        monkeypatch.setattr(HostTables, "reduce", after_a_nap(reduce, torch.cuda.current_stream()))
    assert same(train_steps(resident, overlapping()), train_steps(offloaded, overlapping()))
    assert equal_state(resident, offloaded)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_calls_equals_resident_tables(seed, device):
    """Plans in flight, prefetches never taken, skipped updates, evaluations, edits and saves, in random order."""
    rng, both = random.Random(seed), pair(device)
    flights, ahead = [], None  # plans fetched and not updated, with their rows in either table

    def draw():
        return both[0].plan(torch.tensor([rng.choices(range(V), k=rng.choice((1, 4, 20)))]))

    for step in range(80):
        act = rng.choice("prefetch fetch update skip evaluate read write save load again".split())
        if act == "prefetch":
            ahead = draw()
            [tables.prefetch(ahead) for tables in both]
        elif act == "fetch":
            plan, ahead = ahead or draw(), None
            rows = [tables.fetch(plan) for tables in both]
            assert same(*rows)
            assert same(*(backward(r, plan, step) for r in rows))
            flights.append((plan, rows))
        elif act == "update" and flights:
            plan, rows = flights.pop(rng.randrange(len(flights)))
            assert same(*(tables.reduce(plan, r) for tables, r in zip(both, rows)))
            [tables.update(plan, r, 0.05) for tables, r in zip(both, rows)]
        elif act == "again" and flights:  # an update that has no gradient to use any more
            plan, rows = flights[0]
            [tables.update(plan, tables.fetch(plan), 0.05) for tables in both]
        elif act == "skip":
            flights.clear()
        elif act == "evaluate":
            with torch.no_grad():
                plan = draw()
                assert same(*(tables.fetch(plan) for tables in both))
        elif act == "read":
            ids = torch.randperm(V)[: rng.randrange(V)]
            assert same(*(tables.read(ids) for tables in both))
        elif act == "write":
            ids = torch.randperm(V)[: rng.randrange(1, V)]
            new = torch.randn(len(ids), S, M)
            [tables.write(ids, new) for tables in both]
        elif act == "save":
            assert equal_state(*both)
        elif act == "load":
            state = {name: t.clone() for name, t in both[rng.randrange(2)].state_dict().items()}
            [tables.load_state_dict(state) for tables in both]
    assert equal_state(*both)


def test_two_gradients_of_one_row_in_flight_are_both_applied():
    resident, offloaded = pair()
    for tables in (resident, offloaded):
        plans = [tables.plan(torch.tensor([[5, i]])) for i in (1, 2)]
        rows = [tables.fetch(plan) for plan in plans]
        for plan, r in zip(plans, rows):
            backward(r, plan, 1)
            tables.update(plan, r, 0.1)
        assert tables.state_dict()["count"][5] == 2
    assert equal_state(resident, offloaded)


# ---------------------------------------------------------------------------------------------------------------------
# What a prefetch leaves.


def test_rows_written_after_a_prefetch_arrive_as_written():
    """An edit reaches a batch that is already on its way."""
    tables = pair()[1]
    plan = tables.plan(torch.tensor([[3, 4]]))
    tables.prefetch(plan)
    tables.write(torch.tensor([4]), torch.full((1, S, M), 7.0))
    assert (tables.fetch(plan)[1] == 7.0).all()


def test_prefetches_that_are_never_updated_leave_nothing_waiting():
    """A thousand evaluations, each prefetched, then an error between the two, then training as if nothing had been."""
    resident, offloaded = pair()
    with torch.no_grad():
        for batch in overlapping(1000):
            plan = offloaded.plan(batch)
            offloaded.prefetch(plan)
            offloaded.fetch(plan)
    offloaded.prefetch(offloaded.plan(overlapping()[5]))  # and is forgotten
    assert len(offloaded.jobs) < 5
    assert torch.equal(train_steps(resident, overlapping(20)), train_steps(offloaded, overlapping(20)))


def test_a_plan_with_more_rows_than_the_lanes_hold_is_still_fetched():
    resident, offloaded = pair()
    batches = [torch.arange(40)[None], torch.arange(30)[None], torch.arange(40)[None]]
    assert torch.equal(train_steps(resident, batches), train_steps(offloaded, batches))
    assert equal_state(resident, offloaded)


def test_half_precision_rows_are_the_rounded_rows():
    """What the layer would do with them anyway; the tables stay fp32, and gradients travel in fp32."""
    tables = pair(dtype=torch.bfloat16)[1]
    plan = tables.plan(torch.tensor([[3, 4]]))
    tables.prefetch(plan)
    rows = tables.fetch(plan)
    assert rows.dtype == torch.float32 and torch.equal(rows, tables.host.weight[plan.ids].bfloat16().float())
    backward(rows, plan, 0)
    before = tables.read(plan.ids)
    tables.update(plan, rows, 1e-4)
    moved = tables.read(plan.ids) - before
    assert moved.abs().max() == pytest.approx(1e-4, rel=1e-2)  # lost if a row were kept in bf16


def test_bytes_and_rows_are_counted():
    """Batches [0, 1, 2] and [2, 3]: the second finds one row late and one early."""
    tables = pair()[1]
    train_steps(tables, [torch.tensor([[0, 1, 2, 2]]), torch.tensor([[2, 3]])])
    moved = tables.moved
    assert (moved["rows"], moved["early"], moved["late"]) == (2, 1, 1)
    assert moved["bytes_up"] == moved["bytes_down"] == 2 * S * M * 4 and moved["host_stall_ms"] > 0
    assert moved["device_bytes"] == 2 * 32 * S * M * 4 + 12 * 2 * S * M  # two lanes of max_rows; the step's rows


# ---------------------------------------------------------------------------------------------------------------------
# Failures.


def test_what_fails_in_the_worker_is_raised_at_the_next_call_with_its_traceback(monkeypatch):
    def broken(*args):
        raise RuntimeError("the row caught fire")

    tables = pair()[1]
    monkeypatch.setattr(offload, "adamw_rows", broken)
    plan = tables.plan(torch.tensor([[1]]))
    rows = tables.fetch(plan)
    backward(rows, plan, 0)
    tables.update(plan, rows, 0.1)
    with pytest.raises(RuntimeError, match="caught fire") as e:
        tables.fetch(plan)
    assert "in broken" in "".join(traceback.format_exception(e.value))


def test_no_thread_outlives_the_tables():
    before = threading.active_count()
    tables = pair()[1]
    train_steps(tables, overlapping(3))
    assert threading.active_count() == before + 1
    del tables
    for _ in range(100):
        time.sleep(0.01)
        if threading.active_count() == before:
            return
    raise AssertionError("the worker is still there")


def test_memory_that_cannot_be_pinned_is_ordinary(monkeypatch):
    empty = torch.empty

    def no_pinning(*args, pin_memory=False, **more):
        if pin_memory:
            raise RuntimeError("out of pinned memory")
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", no_pinning)
    with pytest.warns(UserWarning, match="copies will not overlap"):
        assert offload.pinned(3, 4, torch.float32).shape == (3, 4)


def test_the_model_never_sees_the_tables():
    """They are no parameters, so .to() and half() leave them where and what they are."""
    model, resident = tiny_model()
    offloaded = HostTables(*resident.weight.shape, 0.5, max_rows=16)
    model.tables = offloaded
    model.to("meta")
    model.half()
    assert offloaded.host.weight.device.type == "cpu" and offloaded.host.weight.dtype == torch.float32
    assert all(p.shape != offloaded.host.weight.shape for p in model.parameters())
