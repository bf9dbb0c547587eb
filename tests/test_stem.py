"""stem.py against independent references: the dense layer, torch.optim.AdamW, and a loop over rows."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stem import (
    HashMoE,
    StemAdd,
    StemFFN,
    StemGate,
    StemHybrid,
    StemTables,
    SwiGLU,
    adamw_rows,
    is_stem_layer,
)

BETAS = (0.9, 0.95)


def test_stem_layers_are_the_papers():
    def layers(n, *rule):
        return [i for i in range(n) if is_stem_layer(i, *rule)]

    assert layers(16, 3) == [2, 5, 8, 11, 14]
    assert layers(6, 1) == [1, 2, 3, 4, 5]  # the release's "all": layer 0 stays dense
    assert layers(6, 1, 0) == [0, 1, 2, 3, 4, 5]
    assert layers(6, 2) == [1, 3, 5]
    assert layers(6, 0) == []


# ---------------------------------------------------------------------------------------------------------------------
# The layer.


def test_stem_equals_dense_when_x_depends_on_the_token_alone():
    """If h = E[t] then W_u h = (E W_u^T)[t]: that table makes a STEM layer the dense layer."""
    torch.manual_seed(0)
    dense, stem = SwiGLU(8, 12).double(), StemFFN(8, 12).double()
    stem.load_state_dict({k: v for k, v in dense.state_dict().items() if "w_up" not in k})
    E, ids = torch.randn(20, 8).double(), torch.randint(20, (3, 7))
    U = E @ dense.w_up.weight.T
    torch.testing.assert_close(stem(E[ids], F.embedding(ids, U), ids), dense(E[ids], None, ids), rtol=1e-12, atol=1e-14)


def test_variants_are_their_formulas():
    torch.manual_seed(0)
    h, u, ids = torch.randn(2, 5, 8).double(), torch.randn(2, 5, 12).double(), torch.zeros(2, 5, dtype=torch.int64)
    for kind in (StemFFN, StemGate, StemAdd):
        ffn = kind(8, 12).double()
        if kind is StemFFN:
            gate, up = h @ ffn.w_gate.weight.T, u
        elif kind is StemGate:
            gate, up = u, h @ ffn.w_up.weight.T
        else:
            gate, up = h @ ffn.w_gate.weight.T, h @ ffn.w_up.weight.T + u
        expected = (gate * gate.sigmoid() * up) @ ffn.w_down.weight.T
        torch.testing.assert_close(ffn(h, u, ids), expected, rtol=1e-12, atol=1e-14)


def test_the_hybrid_is_stem_for_frequent_ids_and_dense_for_the_rest():
    torch.manual_seed(0)
    h, u, ids = torch.randn(2, 5, 8).double(), torch.randn(2, 5, 12).double(), torch.randint(20, (2, 5))
    hybrid, stem, dense = StemHybrid(8, 12).double(), StemFFN(8, 12).double(), SwiGLU(8, 12).double()
    dense.load_state_dict(hybrid.state_dict())
    stem.load_state_dict({k: v for k, v in hybrid.state_dict().items() if "w_up" not in k})
    for frequent in (0, 7, 20):
        hybrid.frequent = frequent
        expected = torch.where((ids < frequent)[..., None], stem(h, u, ids), dense(h, None, ids))
        torch.testing.assert_close(hybrid(h, u, ids), expected, rtol=1e-12, atol=1e-14)


def test_hash_moe_of_one_expert_is_the_dense_layer():
    moe, dense = HashMoE(8, 12, experts=1).double(), SwiGLU(8, 12).double()
    dense.load_state_dict({k.removeprefix("experts.0."): v for k, v in moe.state_dict().items()})
    h, ids = torch.randn(2, 5, 8).double(), torch.randint(50, (2, 5))
    torch.testing.assert_close(moe(h, None, ids), dense(h, None, ids), rtol=1e-12, atol=1e-14)


def test_hash_moe_routes_by_the_token_alone_and_evenly():
    """Each token's output is that of its own expert, whatever stands around it; gradients reach the experts met."""
    moe = HashMoE(8, 12).double()
    h, ids = torch.randn(4, 8, 8).double(), torch.randint(8, (4, 8))
    y = moe(h, None, ids)
    for b, t in ((0, 0), (1, 5), (3, 7)):
        torch.testing.assert_close(y[b, t], moe.experts[ids[b, t] % 16](h[b, t], None, None))
    y.sum().backward()
    assert [f.w_up.weight.grad.any().item() for f in moe.experts] == [i in ids for i in range(16)]
    counts = torch.bincount(torch.arange(1137) % len(moe.experts))
    assert len(counts) == 16 and counts.max() - counts.min() <= 1


# ---------------------------------------------------------------------------------------------------------------------
# Row-wise AdamW.


def state(V, R):
    return torch.randn(V, R), torch.zeros(V, R), torch.zeros(V, R), torch.zeros(V, dtype=torch.int64)


@pytest.mark.parametrize("V,R", [(5, 48), (3, 7), (40, 8 * 1536)])  # the last one takes several blocks
def test_a_row_seen_every_step_equals_torch_adamw_bitwise(V, R):
    """The same arithmetic in the same order: torch's own for one tensor, ours row by row with counts that agree."""
    torch.manual_seed(0)
    weight, m, v, count = state(V, R)
    reference = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([reference], betas=BETAS, weight_decay=0, foreach=False)
    for step in range(25):
        reference.grad = torch.randn(V, R) * 10 ** (step % 5 - 2)
        optimizer.param_groups[0]["lr"] = lr = 1e-2 / (1 + step)
        optimizer.step()
        adamw_rows(weight, m, v, count, torch.arange(V), reference.grad, lr, BETAS)
        assert torch.equal(weight, reference.detach()), f"differs at step {step}"
    assert torch.equal(m, optimizer.state[reference]["exp_avg"])
    assert torch.equal(v, optimizer.state[reference]["exp_avg_sq"])


def test_rows_at_their_own_count_equal_a_loop_over_rows():
    """Each row is its own torch.optim.AdamW that only steps when its token is there."""
    torch.manual_seed(0)
    V, R = 12, 10
    weight, m, v, count = state(V, R)
    rows = [torch.nn.Parameter(row.clone()) for row in weight]
    optimizers = [torch.optim.AdamW([row], lr=1e-2, betas=BETAS, weight_decay=0, foreach=False) for row in rows]
    for _ in range(30):
        ids = torch.randperm(V)[: torch.randint(1, V, ()).item()].sort().values
        grad = torch.randn(len(ids), R)
        adamw_rows(weight, m, v, count, ids, grad, 1e-2, BETAS)
        for i, g in zip(ids, grad):
            rows[i].grad = g
            optimizers[i].step()
    assert torch.equal(weight, torch.stack([row.detach() for row in rows]))
    assert count.tolist() == [int(o.state[r]["step"]) if o.state else 0 for o, r in zip(optimizers, rows)]


def test_duplicates_sum_before_the_update():
    """Adam is not linear: its step for a token met three times is that of the summed gradient, as in nn.Embedding."""
    torch.manual_seed(0)
    ids = torch.tensor([[5, 5, 7], [5, 7, 7]])
    tables = StemTables(10, 1, 6, std=1.0)
    embedding = torch.nn.Embedding.from_pretrained(tables.weight[:, 0].clone(), freeze=False)
    optimizer = torch.optim.AdamW(embedding.parameters(), lr=0.1, betas=BETAS, weight_decay=0, foreach=False)
    target = torch.randn(2, 3, 6)
    for _ in range(3):
        optimizer.zero_grad()
        (embedding(ids) - target).square().sum().backward()
        optimizer.step()
        plan = tables.plan(ids)
        rows = tables.fetch(plan)
        (F.embedding(plan.inv, rows[:, 0]) - target).square().sum().backward()
        tables.update(plan, rows, 0.1)
    torch.testing.assert_close(tables.weight[:, 0], embedding.weight.detach())


# ---------------------------------------------------------------------------------------------------------------------
# The verbs.


def one_step(tables, ids, lr=0.1):
    plan = tables.plan(ids)
    rows = tables.fetch(plan)
    F.embedding(plan.inv, rows.flatten(1)).square().sum().backward()
    norm2 = tables.reduce(plan, rows)
    tables.update(plan, rows, lr)
    return norm2


def test_a_row_changes_iff_its_token_is_in_the_batch():
    tables = StemTables(30, 2, 8, std=1.0)
    one_step(tables, torch.randint(30, (40,)))  # some history, so that stray momentum would show
    before = {k: v.clone() for k, v in tables.state_dict().items()}
    ids = torch.tensor([[3, 9], [9, 29]])
    for _ in range(3):
        one_step(tables, ids)
    for name, after in tables.state_dict().items():
        changed = (after != before[name]).reshape(30, -1).any(dim=1).nonzero().flatten()
        assert changed.tolist() == [3, 9, 29], name


def test_a_row_with_zero_gradient_still_counts_as_touched():
    tables = StemTables(5, 1, 4, std=1.0)
    plan = tables.plan(torch.tensor([2]))
    rows = tables.fetch(plan)
    (rows * 0).sum().backward()
    tables.update(plan, rows, 0.1)
    assert tables.count.tolist() == [0, 0, 1, 0, 0]


def test_plan_is_pure_sorted_and_inverts():
    tables = StemTables(30, 1, 4, std=1.0)
    ids = torch.randint(30, (4, 5))
    plan = tables.plan(ids)
    assert plan.ids.tolist() == sorted(set(ids.flatten().tolist())) and torch.equal(plan.ids[plan.inv], ids)
    assert torch.equal(tables.plan(ids).inv, plan.inv) and not tables.count.any()


@pytest.mark.parametrize("bad", [-1, 30])
def test_an_id_outside_the_table_is_refused_on_the_host(bad):
    with pytest.raises(ValueError, match="the vocabulary has 30"):
        StemTables(30, 1, 4, std=1.0).plan(torch.tensor([3, bad]))


def test_fetch_gives_a_leaf_that_requires_grad_iff_grad_is_enabled():
    tables = StemTables(30, 2, 4, std=1.0)
    plan = tables.plan(torch.tensor([7, 1, 7]))
    rows = tables.fetch(plan)
    assert rows.is_leaf and rows.requires_grad and torch.equal(rows.detach(), tables.weight[[1, 7]])
    with torch.no_grad():
        assert not tables.fetch(plan).requires_grad


def test_nothing_to_do_is_no_error():
    """An update without a backward, a batch of no tokens, and the dense model's S = 0."""
    tables = StemTables(6, 2, 4, std=1.0)
    before = tables.weight.clone()
    plan = tables.plan(torch.tensor([1, 2]))
    rows = tables.fetch(plan)
    for _ in range(2):
        tables.update(plan, rows, 0.1)
    assert tables.reduce(plan, rows) == 0
    one_step(tables, torch.empty(0, dtype=torch.int64))
    assert torch.equal(tables.weight, before) and not tables.count.any()
    dense = StemTables(6, 0, 4, std=1.0)
    plan = dense.plan(torch.tensor([1, 2]))
    rows = dense.fetch(plan)
    assert rows.shape == (2, 0, 4) and dense.reduce(plan, rows) == 0
    dense.update(plan, rows, 0.1)


def test_reduce_is_the_squared_norm_of_the_gradient():
    tables = StemTables(6, 2, 4, std=1.0)
    plan = tables.plan(torch.tensor([1, 2, 1]))
    rows = tables.fetch(plan)
    (rows * torch.arange(16.0).view(2, 2, 4)).sum().backward()
    torch.testing.assert_close(tables.reduce(plan, rows), torch.arange(16.0).square().sum())


def test_read_write_and_state_dict_round_trip():
    tables, other = StemTables(6, 2, 4, std=1.0), StemTables(6, 2, 4, std=1.0, seed=1)
    one_step(tables, torch.tensor([1, 2]))
    ids = torch.tensor([5, 0])
    tables.write(ids, torch.ones(2, 2, 4))
    assert torch.equal(tables.read(ids), torch.ones(2, 2, 4))
    other.load_state_dict({k: v.clone() for k, v in tables.state_dict().items()})
    one_step(tables, torch.tensor([1, 3])), one_step(other, torch.tensor([1, 3]))  # moments and counts came along
    assert all(torch.equal(a, b) for a, b in zip(tables.state_dict().values(), other.state_dict().values()))
    with pytest.raises(ValueError, match=r"\(6, 2, 4\) in the checkpoint"):
        StemTables(6, 1, 4, std=1.0).load_state_dict(tables.state_dict())


def test_initial_rows_are_a_function_of_the_seed():
    a, b, c = (StemTables(3000, 1, 8, std=0.16, seed=s) for s in (1, 1, 2))
    assert torch.equal(a.weight, b.weight) and not torch.equal(a.weight, c.weight)
    assert abs(a.weight.std() - 0.16) < 2e-3


def test_a_step_neither_allocates_nor_scans_a_table():
    """At V = 50,257 only gathers and scatters may see a table; every tensor that is made is of the batch's size."""
    V, S, M = 50257, 1, 64
    tables = StemTables(V, S, M, std=1.0)
    free = {"aten::index_select", "aten::index_copy_", "aten::view", "aten::detach", "aten::_unsafe_view"}
    scans = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
            if any(t.numel() >= V * M for t in tensors) and func._schema.name not in free:
                scans.append(func._schema.name)
            return out

    with Watch():
        one_step(tables, torch.randint(V, (2, 64)))
    assert not scans


def test_small_updates_are_not_lost_in_half_precision():
    """In bf16 1.0 - 6e-4 is 1.0. The master row moves by about lr a step."""
    tables = StemTables(4, 1, 3, std=0)
    tables.weight[2] = 1.0
    for _ in range(100):
        plan = tables.plan(torch.tensor([2]))
        rows = tables.fetch(plan)
        rows.bfloat16().sum().backward()
        tables.update(plan, rows, 6e-4)
    assert tables.weight[2].flatten().tolist() == pytest.approx([0.94] * 3, abs=1e-3)
