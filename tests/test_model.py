"""model.py: accounting against the paper and by hand, causality, and generation with a cache against none."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config, tiny_model

from model import GPT, KVCache
from stem import StemTables, SwiGLU

# Llama-3.2-1B's shape, untied: the paper's 1B model
LLAMA_1B = dict(block_size=2048, vocab_size=128256, n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, d_ff=8192)


def logits_of(model, tables, ids, cache=None):
    plan = tables.plan(ids)
    return model(ids, tables.fetch(plan), plan.inv, cache=cache)


# ---------------------------------------------------------------------------------------------------------------------
# Shape and accounting.


@pytest.mark.parametrize(
    "wrong, word",
    [
        (dict(n_embd=18), "n_embd 18"),
        (dict(n_kv_head=3), "n_kv_head 3"),
        (dict(n_layer=0), "n_layer"),
        (dict(dropout=1.0), "dropout"),
        (dict(stem_variant="down"), "up, gate, add"),
        (dict(stem_every=4), "no STEM layer"),
        (dict(stem_every=-1), "stem_every"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(wrong, word):
    """Above all a STEM model that would silently be a dense one."""
    with pytest.raises(ValueError, match=word):
        tiny_config(**wrong)


def test_one_rule_gives_the_width_of_dense_and_stem_layers():
    for n_embd, width in ((64, 192), (96, 256), (8, 32)):
        config = tiny_config(n_embd=n_embd, d_ff=0)
        assert config.d_ff == config.table_shape[2] == SwiGLU(n_embd, config.d_ff).w_up.out_features == width


def test_the_papers_1b_figures_follow_from_the_config():
    with torch.device("meta"):
        dense, stem = (GPT(tiny_config(**LLAMA_1B, stem_every=every)) for every in (0, 3))
    tables = stem.parameters_by_role()["tables"]
    active, twin = stem.active_parameters(), dense.active_parameters()
    assert stem.config.stem_layers == [2, 5, 8, 11, 14]
    assert round(twin / 1e9, 4) == 1.4985
    assert round(tables / 1e9, 4) == 5.2534
    assert round((twin - active) / 1e9, 4) == 0.0839  # the five replaced up-projections
    assert round((active + tables) / 1e9, 3) == 6.668  # stored
    assert round((twin + tables) / 1e9, 2) == 6.75  # the paper's total keeps what was replaced
    assert round(active / 1e9, 4) == 1.4146
    assert (round(2 * twin / 1e9, 2), round(2 * active / 1e9, 2)) == (3.00, 2.83)  # GFLOPs per token


def test_flops_saved_in_a_layer_are_the_papers_share():
    """d_ff / (4d + 2L + 3 d_ff) of a layer, with as many key and value heads as heads."""
    d, M, L = 16, 24, 32
    shape = dict(n_embd=d, d_ff=M, block_size=L, n_layer=1, stem_first=0)
    dense, stem = (GPT(tiny_config(**shape, stem_every=every)).flops_per_token() for every in (0, 1))
    layer = dense - 6 * d * 50  # without the head
    assert layer == 6 * d * (4 * d + 2 * L + 3 * M)
    assert (dense - stem) / layer == pytest.approx(M / (4 * d + 2 * L + 3 * M))


@pytest.mark.parametrize(
    "shape", [{}, dict(tie_head=True), dict(n_kv_head=2), dict(stem_every=0), dict(stem_variant="add")]
)
def test_parameters_by_role_cover_everything(shape):
    """The total is asserted inside; tied weights count once, and the tables by hand."""
    model = GPT(tiny_config(**shape))
    role = model.parameters_by_role()
    S = 0 if shape.get("stem_every") == 0 else 2
    assert role["tables"] == 50 * S * 24
    assert role["embedding"] + role["head"] == 50 * 16 * (1 if shape.get("tie_head") else 2)
    # by hand: three norms a layer and a half; a dense feed-forward has three matrices, a STEM one two
    matrices = 3 * 3 - (S if shape.get("stem_variant") != "add" else 0)
    assert role["feed-forward"] == matrices * 16 * 24 and role["norms"] == 7 * 16


def test_a_token_pays_for_one_expert_of_sixteen():
    """Hash-MoE stores 16 feed-forward layers, has no table, and costs what the dense model does."""
    dense, moe = GPT(tiny_config(stem_every=0)), GPT(tiny_config(stem_every=2, stem_variant="hash"))
    assert moe.config.varied_layers == [1] and moe.config.table_shape == (50, 0, 24)
    assert moe.flops_per_token() == dense.flops_per_token() and moe.active_parameters() == dense.active_parameters()
    more = moe.parameters_by_role()["feed-forward"] - dense.parameters_by_role()["feed-forward"]
    assert more == 15 * 3 * 16 * 24


def test_optimizer_groups_cover_everything_and_spare_norms():
    model = GPT(tiny_config())
    groups = {g["name"]: g for g in model.configure_optimizer(1e-3, 0.1, (0.9, 0.95)).param_groups}
    assert groups["matrices"]["weight_decay"] == 0.1 and groups["norms"]["weight_decay"] == 0
    assert len(groups["norms"]["params"]) == 7


# ---------------------------------------------------------------------------------------------------------------------
# Forward.


@pytest.mark.parametrize("stem_every", [0, 1])
def test_loss_at_init_is_near_ln_v(stem_every):
    torch.manual_seed(0)
    config = tiny_config(vocab_size=500, n_embd=64, d_ff=0, stem_every=stem_every)
    model, tables = GPT(config), StemTables(*config.table_shape, std=config.table_std)
    ids, targets = torch.randint(500, (2, 8, 16))
    plan = tables.plan(ids)
    assert abs(model(ids, tables.fetch(plan), plan.inv, targets).item() - math.log(500)) < 0.1


@pytest.mark.parametrize(
    "shape", [{}, dict(n_kv_head=2), dict(stem_variant="gate"), dict(stem_variant="hash"), dict(stem_every=0)]
)
def test_causal(shape):
    """A later token changes nothing before it, and changes what is behind it."""
    model, tables = tiny_model(torch.float64, **shape)
    ids = torch.randint(50, (2, 16))
    other = ids.clone()
    other[:, 9] = (ids[:, 9] + 1) % 50
    a, b = logits_of(model, tables, ids), logits_of(model, tables, other)
    torch.testing.assert_close(a[:, :9], b[:, :9], rtol=1e-12, atol=1e-12)
    assert (a[:, 9:] != b[:, 9:]).any(dim=-1).all()


def test_every_stem_layer_reads_its_own_table():
    model, tables = tiny_model()
    ids = torch.randint(50, (1, 16))
    before = logits_of(model, tables, ids)
    for layer in range(2):
        changed = StemTables(50, 2, 24, std=0.5)
        changed.weight[:, layer] += 1
        assert not torch.allclose(logits_of(model, changed, ids), before)


def test_micro_batches_sum_to_one_batch():
    """A batch's mean is the mean over equal parts: gradients agree to float64 rounding, the last part's rows too."""
    model, tables = tiny_model(torch.float64)
    tables.weight = tables.weight.double()
    ids, targets = torch.randint(50, (2, 8, 16))
    gradients = []
    for parts in (1, 4):
        model.zero_grad()
        plan = tables.plan(ids)
        rows = tables.fetch(plan)
        for x, inv, y in zip(*(t.split(8 // parts) for t in (ids, plan.inv, targets))):
            (model(x, rows, inv, y) / parts).backward()
        gradients.append([rows.grad, *(p.grad for p in model.parameters())])
    assert gradients[0][0].flatten(1).any(dim=1).all()  # every row got some
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_duplicates_gradients_sum_in_fp32():
    """4,096 occurrences of one token: in bf16 their sum stops growing at 256 times the smallest term."""
    config = tiny_config(block_size=4096, n_layer=1, stem_first=0)
    torch.manual_seed(0)
    model, tables = GPT(config, torch.bfloat16), StemTables(*config.table_shape, std=0.5)
    plan = tables.plan(torch.zeros(1, 4096, dtype=torch.int64))
    rows = tables.fetch(plan)
    h = model.hidden(torch.zeros_like(plan.inv), rows, plan.inv)
    h.float().sum().backward()
    assert rows.grad.dtype == torch.float32 and h.dtype == torch.bfloat16
    wide, fp32 = GPT(config), tables.fetch(plan)
    wide.load_state_dict(model.state_dict())
    wide.hidden(torch.zeros_like(plan.inv), fp32, plan.inv).sum().backward()
    assert F.cosine_similarity(rows.grad.flatten(), fp32.grad.flatten(), dim=0) > 0.99
    assert 0.9 < rows.grad.norm() / fp32.grad.norm() < 1.1


def test_wte_dropout_hides_the_embedding_but_not_the_row(monkeypatch):
    """A position whose embedding is zeroed still depends on its token through the row, and through nothing else."""
    model, tables = tiny_model(wte_dropout=0.5)
    a, b = torch.randint(50, (2, 1, 16))
    b[:, :-1] = a[:, :-1]
    monkeypatch.setattr(
        torch, "rand", lambda shape, device: torch.arange(16).flip(0).expand(shape) / 2
    )  # 0 at the last
    model.train()
    assert not torch.allclose(logits_of(model, tables, a), logits_of(model, tables, b))
    tables.weight[b[0, -1]] = tables.weight[a[0, -1]]
    torch.testing.assert_close(logits_of(model, tables, a), logits_of(model, tables, b))
    model.eval()  # and evaluation zeroes nothing
    assert not torch.allclose(logits_of(model, tables, a), logits_of(model, tables, b))


def test_dropout_acts_in_training_only():
    model, tables = tiny_model(dropout=0.5)
    ids = torch.randint(50, (1, 16))
    model.train()
    assert not torch.allclose(logits_of(model, tables, ids), logits_of(model, tables, ids))
    model.eval()
    assert torch.equal(logits_of(model, tables, ids), logits_of(model, tables, ids))


def test_half_precision_computes_in_it_and_keeps_masters():
    model, tables = tiny_model()
    half = GPT(model.config, torch.bfloat16)
    half.load_state_dict(model.state_dict())
    ids = torch.randint(50, (2, 16))
    logits = logits_of(half, tables, ids)
    assert logits.dtype == torch.float32 and all(p.dtype == torch.float32 for p in half.parameters())
    assert (logits - logits_of(model, tables, ids)).abs().mean() < 0.1 * logits.abs().mean()


@pytest.mark.parametrize("shape", [dict(stem_every=0), dict(n_kv_head=2)])
def test_a_documents_logits_do_not_depend_on_its_neighbours(shape):
    """Nor on where it begins, up to rounding, since positions are relative; without the mask they do."""
    model, tables = tiny_model(**shape, doc_id=0)
    document = torch.cat((torch.zeros(1, dtype=torch.int64), torch.randint(1, 50, (5,))))
    before, after = torch.randint(1, 50, (2, 2, 8))
    before[1, 5] = 0  # one neighbour is the end of a document, the other two documents
    windows = torch.stack([torch.cat((before[i], document, after[j, :2])) for i in (0, 1) for j in (0, 1)])
    for doc_id in (0, -1):
        model.config.doc_id = doc_id
        alone, got = logits_of(model, tables, document[None]), logits_of(model, tables, windows)[:, 8:14]
        moved = logits_of(model, tables, windows[:, 4:])[:, 4:10]
        assert torch.equal(got[:1], got[1:2]) and torch.equal(got[2:3], got[3:])  # what comes behind is never seen
        for other in (got[2:3], alone, moved):
            assert torch.allclose(got[:1], other, rtol=1e-4, atol=1e-4) == (doc_id == 0)
            assert doc_id == 0 or (got[:1] - other).abs().max() > 0.1


def test_the_mask_is_that_of_a_loop_over_pairs(monkeypatch):
    """Of a window that begins amid a document and has one of a single token; with -1 the causal kernel is asked."""
    model, tables = tiny_model(doc_id=7)
    ids = torch.tensor([[3, 4, 7, 5, 7, 7, 6, 1], [7, 3, 4, 5, 6, 1, 2, 7]])
    masks, attention = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *a, **k: (masks.append((k["attn_mask"], k["is_causal"])), attention(*a, **k))[1])
    logits_of(model, tables, ids)
    for b, row in enumerate(ids.tolist()):
        for i in range(8):
            for j in range(8):
                assert masks[0][0][b, 0, i, j] == (j <= i and 7 not in row[j + 1 : i + 1])
    model.config.doc_id = -1
    logits_of(model, tables, ids)
    assert [m for m in masks[3:]] == [(None, True)] * 3


# ---------------------------------------------------------------------------------------------------------------------
# Generation.


@pytest.mark.parametrize("shape", [{}, dict(n_kv_head=2), dict(stem_every=0), dict(n_kv_head=2, doc_id=0)])
@pytest.mark.parametrize("chunks", [[16], [1] * 16, [5, 1, 7, 3]])
def test_cached_logits_equal_full_ones_at_every_position(shape, chunks):
    """Prefill, single tokens and a prefill in pieces: the rows are the current tokens', the positions go on."""
    model, tables = tiny_model(torch.float64, **shape)
    ids = torch.randint(50, (3, 16))
    ids[:2, 4] = ids[1:, 9] = 0  # with doc_id documents start in different places
    cache = KVCache(16)
    pieces = [logits_of(model, tables, part, cache) for part in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits_of(model, tables, ids), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="do not fit into block_size 16"):
        logits_of(model, tables, ids[:, :1], cache)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("prompt", [1, 15, 16, 40])
def test_greedy_text_is_the_same_with_and_without_cache_across_block_size(B, prompt):
    model, tables = tiny_model(torch.float64, n_kv_head=2)
    ids = torch.randint(50, (B, prompt))
    texts = [torch.stack(list(model.generate(tables, ids, 50, temperature=0, use_cache=c))) for c in (True, False)]
    assert torch.equal(*texts) and texts[0].shape == (50, B)
    assert len(texts[0].unique()) > 3  # not one token for ever


def test_a_text_of_several_documents_is_the_same_with_and_without_cache():
    """Across full contexts, too, which are read again."""
    texts = []
    for doc_id, use_cache in ((0, True), (0, False), (-1, True)):
        model, tables = tiny_model(torch.float64, vocab_size=8, doc_id=doc_id)
        ids = torch.randint(8, (3, 20))
        texts.append(torch.stack(list(model.generate(tables, ids, 36, use_cache=use_cache))))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert ((texts[0] == 0).sum(0) > 1).all()


def sample_once(logits, **how):
    """The id that generate draws from these logits, through a model whose head says just them."""
    model, tables = tiny_model(vocab_size=len(logits))
    model.norm.weight.data.zero_()
    model.lm_head.forward = lambda h: logits.expand(*h.shape[:-1], -1)
    return next(iter(model.generate(tables, torch.zeros(5000, 1, dtype=torch.int64), 1, **how)))


def test_top_k_never_draws_another_token():
    """Also with all logits negative, and with ties at the threshold."""
    torch.manual_seed(0)
    assert sample_once(torch.tensor([-5.0, -1.5, -3.0, -1.0]), top_k=2).unique().tolist() == [1, 3]
    assert len(sample_once(torch.tensor([1.0, 1.0, 1.0, 1.0]), top_k=2).unique()) == 2
    assert len(sample_once(torch.zeros(4), top_k=100).unique()) == 4


def test_sampling_follows_the_distribution_and_temperature():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0])
    for temperature in (1.0, 0.5):
        share = sample_once(logits, temperature=temperature).bincount(minlength=3) / 5000
        torch.testing.assert_close(share, (logits / temperature).softmax(0), atol=0.03, rtol=0)
    assert sample_once(logits, temperature=0).unique().tolist() == [2]
    assert sample_once(logits, temperature=1e-30).unique().tolist() == [2]


def test_ids_beyond_the_tokenizer_are_never_drawn():
    torch.manual_seed(0)
    assert sample_once(torch.tensor([0.0, 0.0, 9.0, 9.0]), vocab_size=2).max() == 1


def test_a_stopped_sequence_stays_stopped_and_the_others_go_on():
    model, tables = tiny_model()
    ids = torch.randint(50, (4, 3))
    free = torch.stack(list(model.generate(tables, ids, 12, temperature=0)))  # (12, 4)
    stop = free[2, 1].item()
    stopped = torch.stack(list(model.generate(tables, ids, 12, temperature=0, stop_id=stop)))
    for b in range(4):
        hits = (free[:, b] == stop).nonzero().flatten().tolist()
        end = hits[0] if hits else 12
        assert torch.equal(stopped[:end, b], free[:end, b]) and (stopped[end:, b] == stop).all()
    assert (
        len(list(model.generate(tables, ids[1:2], 12, temperature=0, stop_id=stop))) == 3
    )  # then nothing is left to do
