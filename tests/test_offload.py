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
from offload import FrozenTables, HostTables, Slots
from stem import Plan, StemTables

V, S, M = 40, 3, 8
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")),
]


def pair(device="cpu", every=3, **more):
    """Resident and offloaded tables of the same rows; a cache changes every few updates."""
    offloaded = HostTables(V, S, M, 0.5, device=device, max_rows=32, **more)
    offloaded.rebalance_interval = every
    return StemTables(V, S, M, 0.5, device=device), offloaded


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
DISJOINT = [torch.arange(i % 4 * 10, i % 4 * 10 + 10)[None] for i in range(32)]
ONE = [torch.tensor([[i % 3]]) for i in range(24)]
WHOLE = [torch.arange(32)[None]] * 5 + [torch.arange(8, 40)[None]] * 5  # U = max_rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("K", [0, 1, 6, V, 2 * V])
@pytest.mark.parametrize("batches", [overlapping(), SAME, DISJOINT, ONE, WHOLE])
def test_training_equals_resident_training(batches, K, device):
    resident, offloaded = pair(device, cache_rows=K)
    assert same(train_steps(resident, batches), train_steps(offloaded, batches))
    assert equal_state(resident, offloaded)
    assert (offloaded.slots.token >= 0).any() == (K > 0)


def test_gathering_everything_early_is_found_out(monkeypatch):
    """The negative control: without the late rows the equality above must fail."""
    monkeypatch.setattr(offload.torch, "isin", lambda ids, _: torch.zeros(len(ids), dtype=torch.bool))
    resident, offloaded = pair(cache_rows=4)
    assert not torch.equal(train_steps(resident, overlapping()), train_steps(offloaded, overlapping()))


@pytest.mark.parametrize("K", [0, 6])
def test_a_slow_worker_changes_nothing(monkeypatch, K):
    """Reads of a row while its update is under way would show."""
    adamw, load, rng = HostTables._adamw, offload.Lane.load, random.Random(0)
    monkeypatch.setattr(HostTables, "_adamw", lambda *a: (time.sleep(rng.random() / 100), adamw(*a))[1])
    monkeypatch.setattr(offload.Lane, "load", lambda *a: (time.sleep(rng.random() / 100), load(*a))[1])
    resident, offloaded = pair(cache_rows=K)
    assert torch.equal(train_steps(resident, overlapping(30)), train_steps(offloaded, overlapping(30)))
    assert equal_state(resident, offloaded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("slow", ["h2d", "d2h", "compute"])
def test_slow_streams_change_nothing(monkeypatch, slow):
    """Whichever stream is late, none may read what another has not written, or write what it still reads."""
    resident, offloaded = pair("cuda", cache_rows=6)
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
    """Plans in flight, prefetches in vain, skipped updates, evaluations, edits, saves and swaps, in random order."""
    rng = random.Random(seed)
    both = pair(device, cache_rows=rng.choice((0, 3, 15, V)))
    flights, ahead = [], None  # plans fetched and not updated, with their rows in either table

    def draw():
        return both[0].plan(torch.tensor([rng.choices(range(V), k=rng.choice((1, 4, 20)))]))

    for step in range(80):
        act = rng.choice("prefetch fetch update skip evaluate read write save load again rebalance".split())
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
        elif act == "rebalance":
            both[1].slots.freq.copy_(torch.rand(V) * 100)
            both[1]._rebalance()
    assert equal_state(*both)


def test_tables_of_no_rows_are_tables():
    """A process may own none of a small vocabulary."""
    tables = HostTables(0, S, M, 0.5, max_rows=4, cache_rows=4)
    tables.warm_start([torch.empty(0, dtype=torch.int64)])
    train_steps(tables, [torch.empty(1, 0, dtype=torch.int64)] * 4)
    assert tables.moved["rows"] == 0 and tables.state_dict()["weight"].shape == (0, S, M)


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
    at_once = tables.fetch(plan)
    tables.prefetch(plan)
    rows = tables.fetch(plan)
    assert torch.equal(rows, at_once) and tables.moved["bytes_up"] == 2 * S * M * 2
    assert rows.dtype == torch.float32 and torch.equal(rows, tables.host.weight[plan.ids].bfloat16().float())
    backward(rows, plan, 0)
    before = tables.read(plan.ids)
    tables.update(plan, rows, 1e-4)
    moved = tables.read(plan.ids) - before
    assert moved.abs().max() == pytest.approx(1e-4, rel=1e-2)  # lost if a row were kept in bf16


# ---------------------------------------------------------------------------------------------------------------------
# The cache.


def test_a_hot_row_and_its_stored_one_agree_after_every_step():
    """A row used in every batch is hot, trains as without a cache, and a save between steps has it."""
    resident, offloaded = pair(cache_rows=2)
    for step in range(20):
        for tables in (resident, offloaded):
            plan = tables.plan(torch.tensor([[7, step]]))
            rows = tables.fetch(plan)
            backward(rows, plan, step)
            tables.update(plan, rows, 0.1)
        assert torch.equal(offloaded.state_dict()["weight"][7], resident.weight[7])
        assert torch.equal(offloaded.read(torch.tensor([7])), resident.read(torch.tensor([7])))
    assert offloaded.slots.of[7] >= 0 and offloaded.moved["hot"] == 1


def test_moments_and_counts_move_with_the_row_and_not_with_the_slot():
    """One slot, which two tokens take in turns."""
    resident, offloaded = pair(cache_rows=1, every=1)
    batches = [torch.tensor([[token]]) for token in ([3] * 12 + [9] * 40 + [3] * 80)]
    holders = set()
    for i in range(0, len(batches), 4):
        assert torch.equal(train_steps(resident, batches[i : i + 4]), train_steps(offloaded, batches[i : i + 4]))
        holders.add(offloaded.slots.token.item())
        assert equal_state(resident, offloaded)
    assert {3, 9} <= holders


def test_an_edit_reaches_a_cached_row_and_undoing_it_restores_it():
    for tables in (pair(cache_rows=V)[1], FrozenTables(V, S, M, cache_rows=V), FrozenTables(V, S, M, cache_rows=4)):
        if isinstance(tables, FrozenTables):
            tables.load_state_dict(pair()[0].state_dict())
        else:
            tables.warm_start([torch.arange(V)] * 9)
        before, ids = tables.read(torch.arange(V)), torch.tensor([3])
        plan = tables.plan(torch.tensor([[3, 4]]))
        with torch.no_grad():
            tables.prefetch(plan)
            tables.write(ids, before[[9]])
            assert torch.equal(tables.fetch(plan).cpu(), before[[9, 4]])
            tables.write(ids, before[[3]])
            assert torch.equal(tables.fetch(plan).cpu(), before[[3, 4]])
        assert (tables.slots.of[[3, 4]] >= 0).all()
        assert torch.equal(tables.read(torch.arange(V)), before)


def test_a_use_is_a_step_with_the_token_and_evaluations_are_none():
    """Not an occurrence, and once for a prefetch with its fetch."""
    tables = pair(cache_rows=2)[1]
    plan = tables.plan(torch.tensor([[1, 1, 1, 2]]))
    with torch.no_grad():
        tables.fetch(plan)
    assert not tables.slots.freq.any()
    tables.prefetch(plan)
    rows = tables.fetch(plan)
    assert not tables.slots.freq.any()  # a step that is skipped is none either
    backward(rows, plan, 0)
    tables.update(plan, rows, 0.1)
    assert tables.slots.freq[[1, 2]].tolist() == [1, 1] and tables.slots.freq.sum() == 2


def test_rows_that_are_fetched_and_not_trained_are_used_and_send_nothing_back():
    _, tables = pair(cache_rows=1)
    plan = tables.plan(torch.tensor([[1, 2, 3]]))
    rows = tables.fetch(plan)
    part = rows.detach()[1:2]
    part.grad = torch.ones_like(part)
    tables.update(Plan(torch.tensor([2]), plan.inv), part, 0.1)
    assert tables.slots.freq.nonzero()[:, 0].tolist() == [1, 2, 3]
    assert tables.moved["bytes_down"] == S * M * 4 and tables.moved["bytes_up"] == 3 * S * M * 4


def test_rows_that_were_hot_once_make_room():
    """1,000 steps of some tokens, then others: the cache follows, and what it counts stays finite."""
    tables = HostTables(120, 1, 2, 0.5, max_rows=16, cache_rows=16)
    for step in range(1150):
        plan = tables.plan(torch.arange(16)[None] + (100 if step >= 1000 else 0))
        rows = tables.fetch(plan)
        rows.grad = torch.ones_like(rows)
        tables.update(plan, rows, 0.1)
        if step == 999:
            assert tables.slots.token.max() < 16 and tables.moved["row_hit_rate"] == 1
    assert tables.slots.token.min() >= 100
    for _ in range(3000):
        tables.slots.use(plan.ids)
    assert tables.slots.freq.isfinite().all() and tables.slots.use_now < 1e7


def test_the_slots_hold_what_they_say():
    """Empty slots go first, then the coldest; a colder token gets none, and no two tokens share one."""
    slots = Slots(20, 4)
    for n, token in enumerate((5, 6, 7, 8, 9, 10)):
        for _ in range(n + 1):
            slots.use(torch.tensor([token]))
    slots.give(torch.tensor([6, 8]), torch.tensor([1, 3]))
    tokens, places = slots.swaps(torch.tensor([5, 6, 7, 9, 10]))
    assert tokens.tolist() == [10, 9, 7] and sorted(places.tolist()[:2]) == [0, 2] and places[2] == 1  # not 5 for 8
    slots.give(tokens, places)
    assert sorted(slots.token.tolist()) == [7, 8, 9, 10] and slots.of[[5, 6]].tolist() == [-1, -1]
    assert slots.of[slots.token].tolist() == [0, 1, 2, 3] and slots.token[[1, 3]].tolist() == [7, 8]
    assert not len(slots.swaps(torch.tensor([5, 6]), factor=1.1, uses=4)[0])


def test_hits_swaps_and_bytes_are_counted():
    """A cache that holds the tokens 1 and 2 of [1, 1, 2, 3]: two rows of three are hot, three tokens of four."""
    tables, row = pair(cache_rows=2, every=100)[1], S * M * 4
    tables.warm_start([torch.tensor([1, 2])] * 9)
    assert (tables.moved["swaps"], tables.moved["bytes_up"], tables.moved["bytes_down"]) == (2, 2 * 3 * row, 0)
    train_steps(tables, [torch.tensor([[1, 1, 2, 3]])] * 2)
    moved = tables.moved
    assert (moved["rows"], moved["hot"], moved["early"], moved["late"], moved["swaps"]) == (3, 2, 0, 1, 0)
    assert moved["row_hit_rate"] == pytest.approx(2 / 3) and moved["token_hit_rate"] == 3 / 4
    assert moved["bytes_up"] == moved["bytes_down"] == row
    tables.slots.freq[[8, 9]] = 1e3
    tables._rebalance()
    assert (moved["swaps"], moved["bytes_up"], moved["bytes_down"]) == (2, row + 2 * 3 * row, row + 2 * 3 * row)


# ---------------------------------------------------------------------------------------------------------------------
# Tables to generate with.


def frozen(K=0, int8=False, device="cpu"):
    """Tables that training has used, the lower the token the more often, and frozen ones of the same rows."""
    tables = StemTables(V, S, M, 0.5)
    tables.count += torch.arange(V, 0, -1)
    other = FrozenTables(V, S, M, device, K, int8)
    other.load_state_dict(tables.state_dict())
    return tables, other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("K", [0, 3, V])
def test_frozen_rows_are_those_that_were_trained(K, device):
    """Whatever the cache holds and lets go."""
    tables, other = frozen(K, device=device)
    hits = []
    with torch.no_grad():
        for batch in [*overlapping(40), *[torch.tensor([[38, 39]])] * 400]:
            plan, hot = other.plan(batch), other.moved["hot"]
            assert torch.equal(other.fetch(plan).cpu(), tables.fetch(plan))
            hits.append(other.moved["hot"] - hot)
    assert equal_state(tables, other)
    assert hits[-1] == min(K, 2)  # a row that is used often is admitted
    assert other.moved["bytes_up"] == (other.moved["rows"] - other.moved["hot"]) * S * M * 4


def test_int8_rows_are_within_half_a_step_in_a_quarter_of_the_bytes():
    """A step is 1 / 127 of the largest number of a row in its layer, known to 8 bits; hot rows are not rounded."""
    tables, other = frozen(K=5, int8=True)
    rows, back = tables.read(torch.arange(V)), other.read(torch.arange(V))
    step = rows.abs().amax(-1, keepdim=True) / 127
    error = (rows - back).abs()
    assert (error <= step * (0.5 + 0.3)).all() and (error[5:].flatten(1).amax(1) > 0).all()
    assert torch.equal(rows[:5], back[:5])  # used most
    assert other.host.weight.nbytes * 4 == tables.weight.nbytes
    with torch.no_grad():
        other.fetch(other.plan(torch.tensor([[1, 2, 8, 9]])))
    assert other.moved == {"rows": 4, "hot": 2, "bytes_up": 2 * S * (M + 2)}


def test_an_int8_text_does_not_depend_on_those_before_it():
    """And reading, writing back and reading a row again gives the same bits: an edit can be undone."""
    other = frozen(K=5, int8=True)[1]
    before = other.read(torch.arange(V))
    with torch.no_grad():
        for batch in overlapping(50):
            plan = other.plan(batch)
            assert torch.equal(other.fetch(plan), before[plan.ids])
    other.write(torch.arange(V), before.flip(0))
    other.write(torch.arange(V), before)
    assert torch.equal(other.read(torch.arange(V)), before)
    zero = torch.zeros(1, S, M)
    other.write(torch.tensor([20]), zero)
    assert torch.equal(other.read(torch.tensor([20])), zero)


def test_rounding_twice_is_rounding_once():
    tables, other = StemTables(2000, 1, 64, 1.0), FrozenTables(2000, 1, 64, int8=True)
    rows = tables.weight.mul_(torch.logspace(-20, 20, 2000)[:, None, None])
    other.load_state_dict(tables.state_dict())
    once = other.read(torch.arange(2000))
    other.write(torch.arange(2000), once)
    assert torch.equal(other.read(torch.arange(2000)), once) and (once != rows).any()


def test_frozen_tables_are_not_trained_nor_saved_when_rounded():
    other = frozen(int8=True)[1]
    with pytest.raises(ValueError, match="to generate with.* smaller than its steps"):
        other.fetch(other.plan(torch.tensor([[1]])))
    with pytest.raises(ValueError, match="no checkpoint to go on from"):
        other.state_dict()


def test_a_state_that_does_not_fit_leaves_the_rows_as_they_were():
    hot = pair(cache_rows=V)[1]
    hot.warm_start([torch.arange(V)] * 9)
    train_steps(hot, overlapping(5))
    for tables in (hot, frozen(K=4)[1], frozen(K=4, int8=True)[1]):
        before = tables.read(torch.arange(V))
        with pytest.raises(ValueError, match="weight is"):
            tables.load_state_dict(StemTables(V + 1, S, M, 0.5).state_dict())
        assert torch.equal(tables.read(torch.arange(V)), before)


# ---------------------------------------------------------------------------------------------------------------------
# What is counted.


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
    monkeypatch.setattr(StemTables, "adamw", broken)
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
