"""convert.py as a user runs it: equal where it must be, the nearest constant elsewhere, bit for bit there and back."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model

import checkpoint
from data.loader import Dataset
from data.tokenizer import Tokenizer
from data.writer import write_dataset

WORDS = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"]  # 50


@pytest.fixture
def dense(tmp_path):
    """dense(n_layer=1) writes a dense model of 50 words to the folder dense, as if trained on a text without W."""
    text = torch.randint(49, (3000,), generator=torch.Generator().manual_seed(0))
    write_dataset(tmp_path / "text", Tokenizer({"tokenizer": "word", "vocab": WORDS}), text[:2500], text[2500:])

    def make(edit=lambda model: None, **shape):
        return write(tmp_path / "dense", tiny_model(**{"stem_every": 0, **shape}), edit, tmp_path / "text")

    return make


def write(folder, model_and_tables, edit=lambda model: None, dataset="", **more):
    model, tables = model_and_tables
    edit(model)
    folder.mkdir(exist_ok=True)
    checkpoint.save(folder / "best.pt", {
        "model_config": vars(model.config), "meta": {"tokenizer": "word", "vocab": WORDS}, "model": model.state_dict(),
        "settings": {"dataset": str(dataset), "stem_every": model.config.stem_every, "vocab_size": 0},
        "tables": tables.state_dict(), "optimizer": {"state": {}}, "step": 3, **more})
    return model


def logits(model, tables, ids):
    plan = tables.plan(ids)
    with torch.no_grad():
        return model.eval()(ids, tables.fetch(plan), plan.inv)


def rebuilt(folder):
    return checkpoint.rebuild(checkpoint.load(folder))


TO_STEM = ("convert.py", "--to=stem", "--out_dir=dense", "--save=stem")
IDS = torch.randint(49, (4, 16), generator=torch.Generator().manual_seed(1))

# ---------------------------------------------------------------------------------------------------------------------
# Dense to STEM.


def context_free(model):
    """Attention writes nothing, so the stream depends on the token alone; W_u picks numbers, which rounds nothing."""
    for block in model.blocks:
        block.attn.w_out.weight.data.zero_()
        w_up = block.ffn.w_up.weight.data
        w_up.zero_()[torch.arange(len(w_up)), torch.arange(len(w_up)) % w_up.size(1)] = 2.0


@pytest.mark.parametrize("shape", [{"n_layer": 1}, {"n_layer": 3}])
def test_the_logits_are_equal_when_x_depends_on_the_token_alone(script, dense, shape):
    """Then the mean of W_u x over a token's occurrences is each of them, to the last bit, and so is what follows."""
    model = dense(context_free, **shape)
    script(*TO_STEM, "--stem_every=1", "--stem_first=0", "--batches=9")
    stem, tables, _ = rebuilt("stem")
    assert tables.weight.shape == (50, shape["n_layer"], 24) and tables.weight.abs().min(dim=2).values.max() > 0
    none = torch.zeros(16 * 4, 0, 24)
    assert torch.equal(logits(stem, tables, IDS), model.eval()(IDS, none, IDS))


def occurrences(model, data, layer, batches):
    """A loop over the same sample: W_u x at every position, (N, M), and the tokens there."""
    found, ids = [], []
    model.blocks[layer].ffn.w_up.register_forward_hook(lambda module, inputs, out: found.append(out[0]))
    for i in range(batches):
        for row in data.get_batch("train", i, 8)[0]:
            ids.append(row)
            with torch.no_grad():
                model.eval()(row[None], torch.zeros(16, 0, 24), row[None])
    return torch.cat(found).double(), torch.cat(ids)


def test_token_mean_is_the_least_squares_constant(script, dense):
    """Against the normal equations' answer; a token that the sample lacks gets the mean over all."""
    model = dense()
    out = script(*TO_STEM, "--stem_every=1", "--batches=2")
    _, tables, _ = rebuilt("stem")
    for s, layer in enumerate((1, 2)):
        up, ids = occurrences(model, Dataset("text", 16), layer, batches=2)
        one_hot = F.one_hot(ids, 50).double()
        seen = one_hot.sum(0) > 0
        expected = up.mean(0).repeat(50, 1)
        expected[seen] = torch.linalg.lstsq(one_hot[:, seen], up).solution
        torch.testing.assert_close(tables.weight[:, s].double(), expected, rtol=1e-4, atol=1e-5)
    assert not seen[49] and seen.sum() > 40 and f"256 tokens of {Dataset('text', 16).folder.absolute()}" in out


def test_row_mean_is_one_row_of_the_mean_over_the_input(script, dense):
    model = dense()
    script(*TO_STEM, "--init=row_mean")
    new, tables, _ = rebuilt("stem")
    assert new.config.stem_layers == [2]
    row = model.blocks[2].ffn.w_up(torch.full((16,), 1 / 16))  # W_u of a constant input
    torch.testing.assert_close(tables.weight, row.detach().repeat(50, 1, 1))


@pytest.mark.parametrize("init", ["token_mean", "row_mean", "random"])
def test_all_else_stays_and_the_settings_agree(script, dense, init):
    dense(stem_first=0, stem_variant="add")
    script(*TO_STEM, "--stem_every=2", "--batches=3", "--init=" + init)
    old, new = checkpoint.load("dense"), checkpoint.load("stem")
    assert set(old["model"]) - set(new["model"]) == {"blocks.1.ffn.w_up.weight"}
    assert all(torch.equal(w, old["model"][name]) for name, w in new["model"].items())
    assert all(new[key]["stem_every"] == 2 and new[key]["stem_variant"] == "up" for key in ("model_config", "settings"))
    assert new["meta"] == old["meta"] and set(new) == {"format", "model_config", "meta", "settings", "model", "tables"}
    state = new["tables"]
    assert state["weight"].any() and not any(state[name].any() for name in ("exp_avg", "exp_avg_sq", "count"))


def test_scripts_take_what_it_writes_and_a_resume_does_not(script, dense):
    dense()
    script(*TO_STEM, "--batches=3")
    assert script("sample.py", "--out_dir=stem", "--start=a", "--max_new_tokens=3").strip()
    small = ["--dataset=text", "--max_iters=2", "--eval_iters=1", "--batch_size=2"]
    assert "STEM: 2" in script("train.py", "--init_from=stem", "--out_dir=on", *small)
    Path("stem/best.pt").rename("stem/ckpt.pt")
    with pytest.raises(ValueError, match="lacks optimizer, .*--init_from=PATH needs only weights"):
        script("train.py", "--init_from=resume", "--out_dir=stem", *small)


# ---------------------------------------------------------------------------------------------------------------------
# New words.


def grown(script, tmp_path, lines, vocab_size=50, **shape):
    torch.manual_seed(3)
    model, tables = tiny_model(vocab_size=vocab_size, **shape)
    tables.exp_avg.normal_(), tables.count.fill_(7)
    write(tmp_path / "old", (model, tables))
    (tmp_path / "words.txt").write_text(lines, encoding="utf-8")
    script("convert.py", "--to=grow", "--out_dir=old", "--save=new")
    return checkpoint.load("old"), checkpoint.load("new")


@pytest.mark.parametrize("shape", [{}, {"stem_every": 0}, {"tie_head": True}, {"vocab_size": 51}, {"vocab_size": 60}])
def test_growing_changes_no_bit_of_what_was_there(script, tmp_path, shape):
    """Old ids keep their rows, moments and logits; new ones stand behind them, in a padded model's spare rows first."""
    old, new = grown(script, tmp_path, "Newtown = b\n\nOldville = c D\n", **shape)
    V = max(52, shape.get("vocab_size", 50))
    assert all(new[key]["vocab_size"] == V for key in ("model_config", "settings"))
    assert new["meta"]["vocab"] == [*WORDS, "Newtown", "Oldville"]
    of_tokens = {name: t for part in ("model", "tables") for name, t in new[part].items() if len(t) == V}
    assert len(of_tokens) == 6
    for name, t in (old["model"] | old["tables"]).items():
        now = (new["model"] | new["tables"])[name]
        if name in of_tokens:
            assert torch.equal(now[:50], t[:50]) and torch.equal(now[52:], t[52:]), name
        else:
            assert torch.equal(now, t), name
    for t in (new["model"]["wte.weight"], new["model"]["lm_head.weight"], new["tables"]["weight"]):
        assert torch.equal(t[50], t[2])
        torch.testing.assert_close(t[51], (t[3] + t[30]) / 2)
    assert not any(new["tables"][name][50:52].any() for name in ("exp_avg", "exp_avg_sq", "count"))
    before, after = (logits(*rebuilt(folder)[:2], IDS)[..., :50] for folder in ("old", "new"))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_a_new_word_is_read_as_the_one_it_was_named_after(script, tmp_path):
    grown(script, tmp_path, "Newtown = b")
    model, tables, tokenizer = rebuilt("new")
    by_name = [logits(model, tables, torch.tensor([tokenizer.encode(f"a {word} c")])) for word in ("b", "Newtown")]
    assert torch.equal(*by_name)
    assert script("sample.py", "--out_dir=new", "--start=a Newtown", "--max_new_tokens=2").split("\n")[1]


def test_a_text_in_new_words_trains_it(script, tmp_path):
    grown(script, tmp_path, "Newtown = b")
    tokenizer = rebuilt("new")[2]
    write_dataset("text", tokenizer, tokenizer.encode("a Newtown " * 40), tokenizer.encode("Newtown c " * 20))
    small = ("--dataset=text", "--max_iters=2", "--eval_iters=1", "--batch_size=2")
    script("train.py", "--init_from=new", "--out_dir=on", *small)
    assert checkpoint.load("on")["tables"]["count"][50] == 2  # those of the old ones went on from 7


def test_characters_grow_too(script, tmp_path):
    model, tables = tiny_model()
    write(tmp_path / "old", (model, tables), meta={"tokenizer": "char", "vocab": [chr(65 + i) for i in range(50)]})
    (tmp_path / "words.txt").write_text("é = a", encoding="utf-8")
    script("convert.py", "--to=grow", "--out_dir=old", "--save=new")
    assert rebuilt("new")[2].encode("aé") == [32, 50]


# ---------------------------------------------------------------------------------------------------------------------
# Safetensors.

SHAPES = [{}, {"stem_every": 0}, {"tie_head": True}, {"n_kv_head": 2}, *({"stem_variant": v} for v in ("add", "gate"))]


@pytest.mark.parametrize("shape", SHAPES)
def test_safetensors_and_back_is_bit_exact(script, tmp_path, shape):
    pytest.importorskip("safetensors")
    write(tmp_path / "old", tiny_model(**shape))
    script("convert.py", "--to=safetensors", "--out_dir=old", "--save=there")
    script("convert.py", "--to=checkpoint", "--out_dir=there", "--save=back")
    old, back = checkpoint.load("old"), checkpoint.load("back")
    assert list(old["model"]) == list(back["model"])
    assert all(torch.equal(w, back["model"][name]) for name, w in old["model"].items())
    assert torch.equal(old["tables"]["weight"], back["tables"]["weight"]) and not back["tables"]["count"].any()
    assert all(old[key] == back[key] for key in ("model_config", "meta", "settings"))


def lingua_forward(w, ids, D, n_layer, stem_layers):
    """The official release's forward pass, written down from its names and shapes alone, with complex rotary pairs."""
    B, T = ids.shape
    angle = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]  # (1, T, 1, D / 2)

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"{name}.weight"]

    def heads(x, name, rotate):
        x = F.linear(x, w[f"{name}.weight"]).view(B, T, -1, D)
        if rotate:
            x = torch.view_as_real(torch.view_as_complex(x.view(B, T, -1, D // 2, 2)) * turn).flatten(3)
        return x

    h = w["tok_embeddings.weight"][ids]
    for i in range(n_layer):
        x, a = norm(h, f"layers.{i}.attention_norm"), f"layers.{i}.attention"
        q, k, v = heads(x, f"{a}.wq", True), heads(x, f"{a}.wk", True), heads(x, f"{a}.wv", False)
        k, v = (t.repeat_interleave(q.size(2) // t.size(2), dim=2) for t in (k, v))
        score = torch.einsum("bthd,bshd->bhts", q, k) / D**0.5
        score = score.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        h = h + F.linear(torch.einsum("bhts,bshd->bthd", score, v).flatten(2), w[f"{a}.wo.weight"])
        x, f = norm(h, f"layers.{i}.ffn_norm"), f"layers.{i}.feed_forward"
        stem = i in stem_layers
        up = w[f"stem_embeddings.{stem_layers.index(i)}.weight"][ids] if stem else F.linear(x, w[f"{f}.w3.weight"])
        h = h + F.linear(F.silu(F.linear(x, w[f"{f}.w1.weight"])) * up, w[f"{f}.w2.weight"])
    return F.linear(norm(h, "norm"), w["output.weight"])


def test_the_names_and_orders_are_those_of_the_release(script, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, tables = tiny_model(n_kv_head=2, stem_every=2)
    write(tmp_path / "old", (model, tables))
    script("convert.py", "--to=safetensors", "--out_dir=old", "--save=there")
    w = safetensors.load_file("there/model.safetensors")
    assert w["layers.0.attention.wk.weight"].shape == (8, 16) and "layers.1.feed_forward.w3.weight" not in w
    torch.testing.assert_close(lingua_forward(w, IDS, 4, 3, [1]), logits(model, tables, IDS), rtol=1e-4, atol=1e-4)


def test_without_the_package_one_line_says_so(script, tmp_path, monkeypatch):
    write(tmp_path / "old", tiny_model())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SystemExit, match="pip install safetensors"):
        script("convert.py", "--to=safetensors", "--out_dir=old", "--save=there")


@pytest.mark.parametrize("damage", ["missing", "bytes", "metadata", "tensor", "json"])
def test_a_damaged_export_is_refused(script, tmp_path, damage):
    safetensors = pytest.importorskip("safetensors.torch")
    there, about = {"x": torch.zeros(2)}, {"model_config": json.dumps(vars(tiny_model()[0].config)), "meta": "{}"}
    about = {"bytes": about, "metadata": None, "tensor": about, "json": {"format": "pt"}}.get(damage)
    (tmp_path / "there").mkdir()
    if damage != "missing":
        safetensors.save_file(there, tmp_path / "there/model.safetensors", about)
    if damage == "bytes":
        (tmp_path / "there/model.safetensors").write_bytes(b"hello")
    with pytest.raises(ValueError, match="there is no folder of --to=safetensors, or is damaged"):
        script("convert.py", "--to=checkpoint", "--out_dir=there", "--save=back")
    assert not (tmp_path / "back").exists()


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, words, message",
    [
        (["--to=moe"], "", "--to='moe' or .* is none of those"),
        (["--to=stem", "--init=zero"], "", "--init='zero' is none of those"),
        (["--to=stem", "--save="], "", "name a folder without a checkpoint"),
        (["--to=stem", "--save=dense"], "", "none is overwritten"),
        (["--to=stem", "--out_dir=stem"], "", "stem is a STEM model already"),
        (["--to=stem", "--stem_every=0"], "", "stem_every must be at least 1"),
        (["--to=stem", "--stem_every=9"], "", "leave no STEM layer among 3"),
        (["--to=stem", "--dataset=nowhere"], "", "there is no dataset .*nowhere"),
        (["--to=stem", "--out_dir=nowhere"], "", "there is no checkpoint"),
        (["--to=grow", "--words=nowhere"], "", "No such file"),
        (["--to=grow"], "\n", "expected a new word = known ones to start as, got ''"),
        (["--to=grow"], "Newtown", "expected a new word = known ones to start as, got 'Newtown'"),
        (["--to=grow"], "New town = a", "got 'New town = a'"),
        (["--to=grow"], "a = b", "got 'a = b'"),
        (["--to=grow"], "X = b\nX = c", "got 'X = c'"),
        (["--to=grow"], "X = Spain", "the word 'Spain' is not among the 50"),
        (["--to=grow", "--out_dir=bpe"], "X = a", "byte pairs spell every word already"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(
    script, dense, tmp_path, monkeypatch, args, words, message
):
    dense()
    write(tmp_path / "stem", tiny_model())
    write(tmp_path / "bpe", tiny_model(stem_every=0), meta={"tokenizer": "gpt2"})
    (tmp_path / "words.txt").write_text(words)
    monkeypatch.setattr("data.tokenizer.load_gpt2", lambda: type("BPE", (), {"n_vocab": 50, "eot_token": 49}))
    before = Path("dense/best.pt").stat().st_mtime_ns
    with pytest.raises((ValueError, SystemExit, OSError), match=message) as e:
        script("convert.py", "--out_dir=dense", "--save=new", *args)
    assert "\n" not in str(e.value) and not (tmp_path / "new").exists()
    assert Path("dense/best.pt").stat().st_mtime_ns == before
