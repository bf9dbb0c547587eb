"""train.py as a user runs it, on a tiny model: what it leaves behind, resuming, stopping and what can go wrong."""

import csv
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

import checkpoint
import data.loader
from model import GPT
from stem import StemTables


def log(folder="out"):
    return list(csv.DictReader(open(Path(folder) / "log.csv")))


def summary(folder="out"):
    return json.loads((Path(folder) / "summary.json").read_text())


def equal(a, b):
    """Whether two nests of dicts, lists, tensors and values are the same to the last bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves.


def test_a_run_leaves_checkpoints_a_log_and_a_summary(train):
    out = train("--wte_dropout=0.1", "--dropout=0.1")
    assert {p.name for p in Path("out").iterdir()} == {"ckpt.pt", "best.pt", "log.csv", "summary.json"}
    rows = log()
    assert [int(r["step"]) for r in rows] == [1, 2, 3, 4]
    assert [bool(r["val_loss"]) for r in rows] == [False, True, False, True]
    assert all(
        math.isfinite(float(r[name])) for r in rows for name in ("loss", "lr", "norm", "ms", "tokens_per_second")
    )
    s = summary()
    assert s["val_loss"] == float(rows[-1]["val_loss"]) and 0 <= s["recall"] <= 1 and 0 <= s["recall_unseen"] <= 1
    vocab = json.loads(Path(s["settings"]["dataset"], "meta.json").read_text())["vocab"]
    assert s["parameters"]["tables"] == len(vocab) * 64
    assert s["flops_per_token"] > 0 and s["peak_memory_bytes"] > 1e7
    assert s["seconds"] == pytest.approx(sum(float(r["ms"]) for r in rows) / 1000, abs=0.01)
    assert s["tokens_per_second"] == pytest.approx(4 * 2 * 16 / s["seconds"])
    assert out.count("nats per token") == 3 and "recall " in out and "FLOPs" in out and "device cpu (as set)" in out
    assert checkpoint.load("out/ckpt.pt")["step"] == 4


@pytest.mark.parametrize("data", ["small", "shakespeare", "shakespeare_char"])
def test_twins_differ_in_stem_and_folder_only(data):
    stem, dense = (runpy.run_path(str(ROOT / f"config/{name}_{data}.py")) for name in ("stem", "dense"))
    assert {k for k in stem.keys() | dense.keys() if k[0] != "_" and stem.get(k) != dense.get(k)} == {
        "out_dir",
        "stem_every",
    }
    assert dense["stem_every"] == 0 < stem["stem_every"] and stem["out_dir"] == f"out/stem_{data}"


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "config").glob("*.py")))
def test_every_config_is_one(script, name):
    """Its settings exist and agree; no data is needed for a dry run, and the twin's folder is not its own."""
    out = script("train.py", f"config/{name}.py", "--init_from=scratch", "--vocab_size=300", "--dry_run=True")
    assert f"out_dir=out/{name}," in out and ("STEM: none" in out) == name.startswith("dense")


@pytest.mark.parametrize("size", ["small", "shakespeare", "1b"])
def test_stages_go_on_from_each_other(size):
    """Weights, the schedule where it is continued, and rope_base with the length."""
    first, mid, last = (runpy.run_path(str(ROOT / f"config/stem_{size}{s}.py")) for s in ("", "_midtrain", "_extend"))
    assert [c["init_from"] for c in (mid, last)] == [c["out_dir"] + "/best.pt" for c in (first, mid)]
    longer = last["block_size"] // first["block_size"]
    assert longer > 1 and last["rope_base"] == longer * first.get("rope_base", 10000.0) and last["doc_mask"]
    assert mid["learning_rate"] == first["min_lr"] if mid["warmup_iters"] == 0 else "min_lr" not in first


def test_an_extension_keeps_the_shape_and_trains(train, script, facts, monkeypatch):
    monkeypatch.setattr(data.loader, "recall", lambda *_: {})
    train("--max_iters=1")
    few = ("--max_iters=1", "--batch_size=1", "--eval_iters=1", "--device=cpu", "--eval_interval=0")
    script("train.py", "config/stem_small_extend.py", "--init_from=out/ckpt.pt", f"--dataset={facts}", *few)
    a, b = (checkpoint.load(name)["model_config"] for name in ("out", "out/stem_small_extend"))
    assert b == a | {"block_size": 512, "rope_base": 80000.0, "doc_id": 0}


def test_the_1b_config_has_the_papers_counts(script):
    out = script("train.py", "config/stem_1b.py", "--dry_run=True")
    assert "a step may use so many rows" in out  # 524,288 tokens, a vocabulary of 128,256
    assert "stored 6,667,962,368" in out and "2.829 GFLOPs" in out and "twin + tables, 6,751,848,448" in out


def test_without_any_terminal_a_run_is_the_same(train, monkeypatch):
    """As under a service manager: no stdin, stdout or stderr at all."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    train()
    assert summary()["steps"] == 4


def test_a_users_path_is_not_a_dataset_of_the_same_name(train, facts):
    shutil.copytree(facts, "facts")
    train("--dataset=./facts", "--max_iters=1")
    assert summary()["parameters"]["tables"] == 64 * len(json.loads(Path("facts/meta.json").read_text())["vocab"])


def test_data_without_questions_has_no_recall(script, train, tmp_path):
    (tmp_path / "t.txt").write_text("to be or not to be\n" * 50)
    script("data/shakespeare_char/prepare.py", "--input=t.txt", f"--folder={tmp_path / 'chars'}")
    with pytest.raises(SystemExit, match="chars's tokenizer has no <|endoftext|> to start them"):
        train(f"--dataset={tmp_path / 'chars'}", "--doc_mask=True")
    out = train(f"--dataset={tmp_path / 'chars'}")
    assert summary()["recall"] is None and "recall " not in out
    assert (
        script("sample.py", "--device=cpu", "--out_dir=out", "--start=to be", "--max_new_tokens=5")
        .split("\n", 1)[1]
        .startswith("to be")
    )


@pytest.mark.parametrize(
    "flags, K", [([], 0), (["--gradient_accumulation_steps=3", "--grad_clip=0.5"], 30), (["--stem_every=0"], 9)]
)
def test_offloaded_training_equals_resident_training_bitwise(train, flags, K):
    """Losses, val losses, recall and every number of the checkpoint, moments and counts too; with and without cache."""
    train("--out_dir=resident", "--max_iters=6", *flags)
    out = train("--out_dir=offloaded", "--max_iters=6", "--offload=True", f"--cache_rows={K}", *flags)
    a, b = (checkpoint.load(name) for name in ("resident", "offloaded"))
    for part in ("model", "tables"):
        assert all(torch.equal(t, b[part][name]) for name, t in a[part].items())
    for x, y in zip(log("resident"), log("offloaded")):
        assert all(x[name] == y[name] for name in ("loss", "norm", "lr", "val_loss"))
        assert int(y["rows"]) == int(y["hot"]) + int(y["early"]) + int(y["late"]) and "rows" not in x
        assert (float(y["row_hit_rate"]) > 0.2) == (float(y["token_hit_rate"]) > 0.2) == (K > 0)  # from the first step
    assert summary("resident")["recall"] == summary("offloaded")["recall"]
    assert "offload     a step: rows" in out and "resident tables hold" in out
    assert ("of rows hot" in out) == (K > 0)


def test_a_cache_and_int8_are_refused_where_they_cannot_be(train):
    for flags, why in (
        (["--cache_rows=5"], "needs --offload=True"),
        (["--cache_rows=-2", "--offload=True"], "at least -1"),
        (["--offload=True", "--table_dtype=int8"], "updates are smaller than the steps of int8"),
    ):
        with pytest.raises(SystemExit, match=why):
            train(*flags)
        assert not Path("out").exists()


def test_a_resume_may_change_where_tables_are(train, script):
    """Two steps, then two more in the other mode, and back: the uninterrupted run to the last bit."""
    train("--out_dir=whole", "--max_iters=6")
    whole = checkpoint.load("whole/ckpt.pt")
    train("--out_dir=parts", "--max_iters=2", "--lr_decay_iters=6", "--offload=True", "--cache_rows=20")
    for steps, offload in ((4, False), (6, True)):
        script("train.py", "--init_from=resume", "--out_dir=parts", f"--max_iters={steps}", f"--offload={offload}")
    parts = checkpoint.load("parts/ckpt.pt")
    assert all(torch.equal(t, parts["tables"][name]) for name, t in whole["tables"].items())
    assert [r["loss"] for r in log("parts")] == [r["loss"] for r in log("whole")]
    lines = Path("parts/log.csv").read_text().splitlines()
    assert "device_bytes" in lines[0] and len({line.count(",") for line in lines}) == 1
    assert [bool(r["device_bytes"]) for r in log("parts")] == [True, True, False, False, True, True]


def test_the_dense_twin_runs_through_the_same_loop(train):
    train("--stem_every=0")
    assert summary()["parameters"]["tables"] == 0 and checkpoint.load("out")["tables"]["weight"].numel() == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--stem_variant=gate"],
        ["--stem_variant=add"],
        ["--stem_variant=hybrid"],
        ["--stem_variant=hash"],
        ["--dense_adamw=True"],
        ["--stem_first=0"],
        ["--n_kv_head=1"],
        ["--tie_head=True"],
        ["--dtype=bfloat16"],
        ["--vocab_size=1200"],
        ["--decay_lr=False"],
        ["--grad_clip=0.0"],
        ["--rope_base=500.0"],
        ["--d_ff=40"],
        ["--doc_mask=True"],
        ["--weight_decay=0.0"],
        ["--seed=7"],
        ["--eval_interval=0", "--log_interval=0"],
        ["--beta1=0.8", "--beta2=0.99"],
    ],
)
def test_every_setting_trains(train, flags):
    train(*flags)
    settings = summary()["settings"]
    for flag in flags:
        name, value = flag[2:].split("=")
        assert str(settings[name]) == value
    assert float(log()[-1]["loss"]) < float(log()[0]["loss"]) + 0.5 and len(log()) == 4
    assert checkpoint.load("out")["tables"]["weight"].dtype == torch.float32


def test_dense_adamw_updates_every_row_at_every_step(train):
    train()
    some = checkpoint.load("out")["tables"]["count"]
    train("--dense_adamw=True", "--out_dir=dense")
    assert 0 < some.count_nonzero() < len(some)
    assert (checkpoint.load("dense")["tables"]["count"] == 4).all()


def test_log_lines_and_evaluations_come_when_set(train):
    out = train("--max_iters=6", "--log_interval=3", "--eval_interval=4")
    assert out.count("tokens/s") == 2 and [bool(r["val_loss"]) for r in log()] == [False] * 3 + [True, False, True]
    out = train("--max_iters=3", "--log_interval=0", "--eval_interval=0")
    assert out.count("tokens/s") == 0 and [bool(r["val_loss"]) for r in log()] == [False, False, True]


def test_on_a_terminal_a_bar_takes_the_place_of_log_lines(train, script, monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    out = train()
    assert "tokens/s" not in out and out.count("val loss") == 3
    assert "4/4" in script.err and "loss" in script.err and "tokens/s" in script.err


def test_the_learning_rate_warms_up_and_decays(train):
    train(
        "--max_iters=8",
        "--warmup_iters=3",
        "--learning_rate=0.4",
        "--min_lr=0.1",
        "--lr_decay_iters=7",
        "--eval_interval=0",
    )
    lr = [float(r["lr"]) for r in log()]
    assert lr[:3] == pytest.approx([0.1, 0.2, 0.3]) and lr[3] == 0.4 and lr[7] == pytest.approx(0.1)
    assert lr[5] == pytest.approx(0.25) and lr[3:] == sorted(lr[3:], reverse=True)


def test_table_rows_learn_at_their_own_scale(train):
    """With scale 0 no row moves; weights do."""
    train("--stem_lr_scale=0.0")
    c = checkpoint.load("out/ckpt.pt")
    start = StemTables(*c["tables"]["weight"].shape, std=0.02 * math.sqrt(16), seed=1 + 2**31)
    assert torch.equal(c["tables"]["weight"], start.weight) and c["tables"]["count"].sum() > 0
    train("--stem_lr_scale=1.0")
    assert not torch.equal(checkpoint.load("out/ckpt.pt")["tables"]["weight"], start.weight)


def test_only_rows_of_drawn_tokens_ever_change(train, facts):
    train()
    c = checkpoint.load("out/ckpt.pt")
    drawn = {
        i
        for step in range(4)
        for i in data.loader.Dataset(facts, 16, 1).get_batch("train", step, 2)[0].flatten().tolist()
    }
    assert set(c["tables"]["count"].nonzero().flatten().tolist()) == drawn
    start = StemTables(*c["tables"]["weight"].shape, std=0.02 * math.sqrt(16), seed=1 + 2**31)
    changed = (c["tables"]["weight"] != start.weight).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) == drawn


def test_micro_batches_train_like_one_batch(train):
    """4 x 1 against 1 x 4 sequences, clipping active: the same step, to fp32 summation order."""
    train("--batch_size=4", "--out_dir=one", "--grad_clip=0.5")
    train("--batch_size=1", "--gradient_accumulation_steps=4", "--out_dir=four", "--grad_clip=0.5")
    for a, b in zip(log("one"), log("four")):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-5) and float(a["norm"]) == pytest.approx(
            float(b["norm"]), rel=1e-4
        )
        assert float(a["norm"]) > 0.5
    one, four = (checkpoint.load(f"{name}/ckpt.pt")["tables"] for name in ("one", "four"))
    assert torch.equal(one["count"], four["count"])
    torch.testing.assert_close(
        one["weight"], four["weight"], rtol=0, atol=2e-3
    )  # Adam turns tiny gradients into whole steps


def test_the_norm_that_clips_is_joint(train, monkeypatch):
    """It equals the norm over dense and row gradients of the same batch, computed apart."""
    seen = []
    update = StemTables.update
    monkeypatch.setattr(
        StemTables,
        "update",
        lambda self, plan, rows, lr: (seen.append(rows.grad.norm().item()), update(self, plan, rows, lr)),
    )
    total = torch.nn.utils.get_total_norm
    dense = []
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda g: (dense.append(total(g)), dense[-1])[1])
    train("--grad_clip=0.0")
    for row, r, d in zip(log(), seen, dense):
        assert float(row["norm"]) == pytest.approx(math.hypot(r, d.item()), rel=1e-5)
    seen.clear()
    train("--grad_clip=0.01")
    assert all(0 < r < 0.01 for r in seen)


# ---------------------------------------------------------------------------------------------------------------------
# Resuming and starting from weights.


def test_interrupted_and_resumed_equals_uninterrupted_bitwise(train, script):
    """A step is a function of (seed, step) and the state, dropout included; so is everything after a resume."""
    flags = (
        "--dropout=0.3",
        "--wte_dropout=0.2",
        "--gradient_accumulation_steps=2",
        "--max_iters=6",
        "--lr_decay_iters=6",
    )
    train(*flags, "--out_dir=whole")
    train(*flags, "--out_dir=parts", "--max_iters=3", "--eval_interval=3")
    Path("parts").rename("moved")
    script("train.py", "--init_from=resume", "--out_dir=moved", "--max_iters=6", "--eval_interval=2")
    whole, parts = checkpoint.load("whole/ckpt.pt"), checkpoint.load("moved/ckpt.pt")
    assert [(r["step"], r["loss"], r["lr"], r["norm"]) for r in log("whole")] == [
        (r["step"], r["loss"], r["lr"], r["norm"]) for r in log("moved")
    ]
    for key in ("model", "tables", "optimizer", "step"):
        assert equal(whole[key], parts[key]), key


def test_a_changed_setting_takes_effect_on_resume_for_rows_and_weights(train, script, monkeypatch):
    rates = []
    update = StemTables.update
    monkeypatch.setattr(
        StemTables, "update", lambda self, plan, rows, lr: (rates.append(lr), update(self, plan, rows, lr))
    )
    train("--max_iters=2", "--decay_lr=False", "--warmup_iters=0", "--learning_rate=6e-3", "--stem_lr_scale=1.5")
    script("train.py", "--init_from=resume", "--max_iters=4", "--learning_rate=0.5")
    assert [float(r["lr"]) for r in log()] == [6e-3, 6e-3, 0.5, 0.5]
    assert rates == pytest.approx([9e-3, 9e-3, 0.75, 0.75])
    script("train.py", "--init_from=resume", "--max_iters=5", "--weight_decay=0.3", "--beta2=0.5")
    matrices = checkpoint.load("out/ckpt.pt")["optimizer"]["param_groups"][0]
    assert (matrices["weight_decay"], tuple(matrices["betas"])) == (0.3, (0.9, 0.5))


def test_a_run_can_be_resumed_in_float16(train, script):
    train("--max_iters=2")
    script("train.py", "--init_from=resume", "--max_iters=4", "--dtype=float16")
    assert checkpoint.load("out/ckpt.pt")["scaler"]["scale"] == 65536.0


def test_a_new_run_does_not_keep_an_earlier_ones_best(train, monkeypatch):
    """Interrupted before its first evaluation, it leaves its own ckpt.pt and no best.pt of another run."""
    train()
    monkeypatch.setattr(GPT, "forward", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        train("--max_iters=0", "--seed=9")
    assert checkpoint.load("out")["step"] == 0 and not Path("out/best.pt").exists()
    assert checkpoint.load("out/earlier1")["step"] == 4 and summary("out/earlier1")["steps"] == 4  # nothing is lost


def test_a_cut_log_does_not_hinder_a_resume(train, script):
    train("--max_iters=3")
    with open("out/log.csv", "ab") as f:
        f.write(b"x,1,2,3,4,5,6\n\xff\n2,0.5")
    script("train.py", "--init_from=resume", "--max_iters=4")
    assert [r["step"] for r in log()] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.pop("tables"), "lacks tables"),
        (lambda c: c.update(meta=None), "lacks meta"),
        (lambda c: c["model"].popitem(), "do not fit its shape"),
        (lambda c: c["tables"].pop("exp_avg"), "tables have no exp_avg"),
        (lambda c: c["model_config"].update(n_embd=32), "do not fit its shape|n_embd is 16"),
        (lambda c: c["model_config"].update(colour=1), "model_config or meta is not one|n_embd"),
    ],
)
def test_a_checkpoint_with_the_wrong_things_in_it_is_refused(train, script, facts, change, words):
    train("--max_iters=1")
    c = checkpoint.load("out/ckpt.pt")
    change(c)
    torch.save(c, "bad.pt")
    with pytest.raises(ValueError, match=words) as e:
        script("sample.py", "--out_dir=bad.pt", "--device=cpu", "--max_new_tokens=1")
    assert "\n" not in str(e.value)


def test_betas_and_decay_reach_rows_and_weights(train):
    train("--beta1=0.8", "--beta2=0.99", "--weight_decay=0.2", "--max_iters=1")
    a = checkpoint.load("out/ckpt.pt")
    groups = {g["name"]: g for g in a["optimizer"]["param_groups"]}
    assert tuple(groups["norms"]["betas"]) == (0.8, 0.99) and groups["norms"]["weight_decay"] == 0
    assert groups["matrices"]["weight_decay"] == 0.2
    train("--beta1=0.9", "--beta2=0.9", "--weight_decay=0.2", "--max_iters=1")
    b = checkpoint.load("out/ckpt.pt")["tables"]  # after one step the moments are (1 - beta) g and (1 - beta2) g^2
    torch.testing.assert_close(2 * b["exp_avg"], a["tables"]["exp_avg"])
    torch.testing.assert_close(b["exp_avg_sq"], 10 * a["tables"]["exp_avg_sq"])


def test_seed_and_rope_base_change_the_first_step(train):
    norms = set()
    for flag in ("--seed=1", "--seed=2", "--rope_base=2.0"):
        train(flag, "--max_iters=1")
        norms.add(log()[0]["norm"])
    assert len(norms) == 3


def test_a_fresh_copy_makes_its_facts_from_anywhere(tmp_path, monkeypatch, script):
    """As after a clone: no data, another current directory, a config found beside the scripts."""
    ignored = shutil.ignore_patterns("*.bin", "meta.json", "questions.json", "__pycache__")
    shutil.copytree(ROOT / "data", tmp_path / "my copy/data", ignore=ignored)
    shutil.copytree(ROOT / "config", tmp_path / "my copy/config")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path / "my copy")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    args = ["config/stem_small.py", "--max_iters=1", "--eval_iters=1", "--n_embd=16", "--out_dir=o", "--device=cpu"]
    run = subprocess.run([sys.executable, "../my copy/train.py", *args], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "facts about" in run.stdout, run.stderr
    assert (tmp_path / "my copy/data/facts/train.bin").exists() and (tmp_path / "else/o/best.pt").exists()
    (tmp_path / "else/mine").symlink_to(tmp_path / "my copy/data/facts")
    script("train.py", "--dataset=mine", "--dry_run=True")  # a path from here


def test_resuming_a_finished_run_only_evaluates(train, script):
    train()
    before = checkpoint.load("out/ckpt.pt")
    script("train.py", "--init_from=resume")
    after = checkpoint.load("out/ckpt.pt")
    assert all(equal(before[k], after[k]) for k in ("model", "tables", "step"))
    assert equal(before["optimizer"]["state"], after["optimizer"]["state"])
    assert len(log()) == 4 and summary()["steps"] == 4


def test_starting_from_weights_takes_shape_weights_and_tables_but_no_state(train, script, facts):
    train("--n_embd=24", "--stem_first=0", "--out_dir=a", "--learning_rate=0.01")
    script(
        "train.py",
        "--init_from=a/best.pt",
        "--out_dir=b",
        "--max_iters=0",
        f"--dataset={facts}",
        "--eval_iters=2",
        "--device=cpu",
        "--block_size=8",
        "--learning_rate=0.5",
    )
    a, b = checkpoint.load("a/best.pt"), checkpoint.load("b/ckpt.pt")
    assert equal(a["model"], b["model"]) and equal(a["tables"], b["tables"])
    assert b["step"] == 0 and not b["optimizer"]["state"] and b["settings"]["learning_rate"] == 0.5
    assert b["model_config"] == a["model_config"] | {"block_size": 8}


def test_documents_stay_apart_in_all_that_a_checkpoint_is_for(train, script, facts, monkeypatch):
    """Training, sampling, and runs that start from it; a file from before there was doc_id has none."""
    monkeypatch.setattr(data.loader, "recall", lambda *_: {})
    losses = {}
    for name, doc_id in (("apart", 0), ("across", -1)):
        train(f"--doc_mask={doc_id == 0}", f"--out_dir={name}", "--max_iters=1", "--block_size=32")
        losses[name], c = log(name)[0]["loss"], checkpoint.load(f"{name}/ckpt.pt")
        assert c["model_config"].pop("doc_id") == doc_id
    assert losses["apart"] != losses["across"]
    c["model"] = {name: 10 * w if w.dim() == 2 else w for name, w in c["model"].items()}  # so that all depends on all
    checkpoint.save("old.pt", c)
    checkpoint.save("new.pt", c | {"model_config": c["model_config"] | {"doc_id": 0}})
    ask, text = ("--device=cpu", "--temperature=0", "--max_new_tokens=12"), "<|endoftext|> The capital of"
    for name, same in (("new.pt", True), ("old.pt", False)):
        said = [script("sample.py", f"--out_dir={name}", f"--start={before} {text}", *ask).split(text)[1]
                for before in ("Spain is", "<|endoftext|> The river")]
        assert (said[0] == said[1]) == same
    flags = "--eval_only=True", f"--dataset={facts}", "--eval_iters=2", "--device=cpu"
    for name, *flag in (["new"], ["new", "--doc_mask=False"], ["old"], ["old", "--doc_mask=True"]):
        out = script("train.py", f"--init_from={name}.pt", *flags, *flag)
        losses[(name, *flag)] = out.split("val loss ")[1]
    assert losses["new",] == losses["old", "--doc_mask=True"] != losses["old",] == losses["new", "--doc_mask=False"]
    script("train.py", "--init_from=resume", "--out_dir=apart", "--max_iters=2")
    assert checkpoint.load("apart/ckpt.pt")["model_config"]["doc_id"] == 0


def test_eval_only_measures_and_writes_nothing(train, script):
    train()
    before = {p: p.stat().st_mtime_ns for p in Path("out").iterdir()}
    out = script("train.py", "--init_from=resume", "--eval_only=True")
    assert f"val loss {summary()['val_loss']:.4f}" in out and "recall " in out
    assert before == {p: p.stat().st_mtime_ns for p in Path("out").iterdir()}


def test_prefixes_of_compiled_and_wrapped_models_are_accepted(train, script):
    """Checkpoints of ours never have them; those of other tools may."""
    train()
    c = checkpoint.load("out/ckpt.pt")
    assert not any("_orig_mod" in k or "module." in k for k in c["model"])
    c["model"] = {f"_orig_mod.{k}" if i % 2 else f"module.{k}": v for i, (k, v) in enumerate(c["model"].items())}
    torch.save(c, "foreign.pt")
    model, _, _ = checkpoint.rebuild(checkpoint.load("foreign.pt"))
    assert equal(dict(model.state_dict()), dict(checkpoint.load("out/ckpt.pt")["model"]))


# ---------------------------------------------------------------------------------------------------------------------
# Training only rows.


@pytest.fixture(scope="module")
def base(tmp_path_factory, facts):
    """The facts without their questions, whose asking would take longest, and a run of three steps on them."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(facts, folder / "facts", ignore=shutil.ignore_patterns("questions.json"))
    flags = (f"--dataset={folder / 'facts'}", f"--out_dir={folder / 'a'}", "--batch_size=2", "--block_size=16",
             "--n_layer=2", "--n_embd=16", "--stem_every=1", "--warmup_iters=2", "--max_iters=3", "--eval_iters=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--device=cpu", *flags])
        patch.setattr(sys, "excepthook", sys.excepthook)
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    return folder


@pytest.fixture
def train_rows(base, script):
    """train_rows("--rows=all") goes on from that run with rows alone; words.txt has a word that occurs, and two."""
    Path("words.txt").write_text("of\n\nNew Zealand\n")
    common = ("--device=cpu", f"--dataset={base / 'facts'}", f"--init_from={base / 'a/best.pt'}", "--train_only=rows",
              "--batch_size=2", "--eval_iters=1", "--eval_interval=0", "--log_interval=0", "--warmup_iters=2")
    return lambda *args: script("train.py", *common, "--max_iters=4", *args)


@pytest.mark.parametrize("rows, also", [("words.txt", []), ("frequent:9", ["--dense_adamw=True"])])
def test_only_the_listed_rows_ever_change(train_rows, base, rows, also):
    """All else has the checkpoint's bits: weights in spite of their decay, other rows, their moments and counts."""
    out = train_rows(f"--rows={rows}", "--weight_decay=0.5", *also)
    before, after = checkpoint.load(base / "a"), checkpoint.load("out")
    data_ = data.loader.Dataset(base / "facts", 16, 1)
    listed = set(data_.choose(rows).tolist())
    drawn = set().union(*(set(data_.get_batch("train", step, 2)[0].flatten().tolist()) for step in range(4)))
    assert equal(dict(after["model"]), dict(before["model"])) and not after["optimizer"]["state"]
    for name, table in before["tables"].items():
        changed = (after["tables"][name] != table).view(len(table), -1).any(dim=1).nonzero()[:, 0]
        assert changed.tolist() == sorted(listed if also else listed & drawn) != [], name
    n, stored = len(listed), sum(summary()["parameters"].values())
    assert f"trains      the rows of {n:,} of {data_.tokenizer.vocab_size:,} tokens: {64 * n:,} numbers, " in out
    assert f"{64 * n / stored:.2%} of the {stored:,} stored" in out


def test_rows_that_are_not_trained_do_not_count_in_the_norm(train_rows, base, monkeypatch):
    """It is that of the trained rows' gradients, which it clips; and these are the same whoever else is trained."""
    seen, reduce = [], StemTables.reduce
    monkeypatch.setattr(StemTables, "reduce", lambda self, plan, rows: (seen.append((plan.ids, rows.grad.clone())),
                                                                        reduce(self, plan, rows))[1])
    for folder, rows in (("b", "all"), ("c", "frequent:9")):
        train_rows(f"--out_dir={folder}", f"--rows={rows}", "--grad_clip=1e-3", "--max_iters=1")
        assert float(log(folder)[0]["norm"]) == pytest.approx(seen[-1][1].norm().item(), rel=1e-5)
    (all_ids, all_grads), (ids, grads) = seen
    assert 0 < len(ids) < len(all_ids) and torch.equal(grads, all_grads[torch.isin(all_ids, ids)])
    before, after = (checkpoint.load(folder)["tables"]["exp_avg"][ids] for folder in (base / "a", "c"))
    assert (after - 0.9 * before).norm() == pytest.approx(0.1 * 1e-3, rel=1e-3) and grads.norm() > 1e-3


def test_training_rows_is_the_same_offloaded_and_resumed(train_rows, script):
    """To the last bit, with a cache of rows that are and are not trained."""
    flags = ("--rows=frequent:20", "--dropout=0.2", "--max_iters=6")
    train_rows("--out_dir=whole", *flags)
    train_rows("--out_dir=offloaded", *flags, "--offload=True")
    train_rows("--out_dir=parts", *flags, "--offload=True", "--cache_rows=12", "--max_iters=3", "--lr_decay_iters=6")
    script("train.py", "--init_from=resume", "--out_dir=parts", "--max_iters=6")
    whole = checkpoint.load("whole/ckpt.pt")
    for name in ("offloaded", "parts"):
        there = checkpoint.load(f"{name}/ckpt.pt")
        assert equal([dict(there["model"]), there["tables"]], [dict(whole["model"]), whole["tables"]])
        assert [(r["loss"], r["norm"]) for r in log(name)] == [(r["loss"], r["norm"]) for r in log("whole")]
    assert summary("parts")["settings"]["rows"] == "frequent:20"
    with pytest.raises(SystemExit, match="lacks moments of some weights"):  # those that were not trained
        script("train.py", "--init_from=resume", "--out_dir=parts", "--train_only=", "--max_iters=7")


def test_a_run_of_all_weights_goes_on_with_rows_and_keeps_the_others_moments(base, script):
    shutil.copytree(base / "a", "out")
    script("train.py", "--init_from=resume", "--out_dir=out", "--train_only=rows", "--max_iters=4")
    before, after = checkpoint.load(base / "a/ckpt.pt"), checkpoint.load("out/ckpt.pt")
    assert equal(dict(after["model"]), dict(before["model"])) and not equal(after["tables"], before["tables"])
    assert equal(after["optimizer"]["state"], before["optimizer"]["state"]) and after["optimizer"]["state"]
    script("train.py", "--init_from=resume", "--out_dir=out", "--rows=gone.txt", "--eval_only=True")  # trains none


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--train_only=row"], "train_only must be rows or empty, got 'row'"),
        (["--init_from=scratch"], "name its checkpoint by --init_from=PATH"),
        (["--train_only=", "--rows=all"], "set that too"),
        (["--dtype=float16"], "cannot train in float16"),
        ([], "for one process: leave out torchrun"),
        (["--stem_every=0"], "this one has none"),
        (["--rows=frequent:0"], "from 1 to [0-9]+, the size of the vocabulary; got 'frequent:0'"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused_in_one_line(train_rows, monkeypatch, flags, words):
    if not flags:
        monkeypatch.setattr("device.join_processes", lambda: (0, 2, 0))  # as under torchrun
    with pytest.raises((SystemExit, ValueError), match=words) as e:
        train_rows(*flags)
    assert "\n" not in str(e.value) and not Path("out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Best, worse and broken evaluations.


def test_best_is_never_replaced_by_a_worse_model(train, script, monkeypatch):
    """Val losses 3, 1, 2, then 1.5 after a resume: best.pt stays that of 1, ckpt.pt the latest."""
    losses = iter([3.0, 1.0, 2.0, 1.5])

    def forward(self, ids, rows, inv, targets=None, cache=None, real=GPT.forward):
        value = real(self, ids, rows, inv, targets, cache)
        return value if self.training or targets is None else torch.tensor(next(losses))

    monkeypatch.setattr(GPT, "forward", forward)
    train("--max_iters=6", "--eval_iters=1")
    for steps in (6, 8):
        best = checkpoint.load("out/best.pt")
        assert (best["step"], best["best_val_loss"]) == (4, 1.0) and checkpoint.load("out/ckpt.pt")["step"] == steps
        if steps == 6:
            script("train.py", "--init_from=resume", "--max_iters=8")


def test_an_evaluation_that_dies_costs_no_training(train, monkeypatch):
    def forward(self, ids, rows, inv, targets=None, cache=None, real=GPT.forward):
        if not self.training:
            raise torch.OutOfMemoryError("no memory")
        return real(self, ids, rows, inv, targets, cache)

    monkeypatch.setattr(GPT, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError):
        train("--eval_interval=0")
    assert checkpoint.load("out/ckpt.pt")["step"] == 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("where", ["weight", "row"])
def test_nan_stops_the_run_at_once_and_spoils_no_checkpoint(train, monkeypatch, where, dtype):
    """In float16, too, where nan in a gradient alone would be an overflow to get over."""
    steps = iter(range(100))
    fetch = StemTables.fetch

    def poisoned(self, plan):
        rows = fetch(self, plan)
        if rows.requires_grad and next(steps) == 3:
            rows.data[0] = math.nan if where == "row" else rows.data[0]
            if where == "weight":
                GPT.poison.wte.weight.data[:] = math.nan
        return rows

    init = GPT.__init__
    monkeypatch.setattr(GPT, "__init__", lambda self, *a: (init(self, *a), setattr(GPT, "poison", self))[0])
    monkeypatch.setattr(StemTables, "fetch", poisoned)
    with pytest.raises(SystemExit, match="step 4: the loss is nan, the gradient norm nan; out keeps what was saved"):
        train("--max_iters=10", f"--dtype={dtype}")
    c = checkpoint.load("out/ckpt.pt")
    assert (
        c["step"] == 2
        and all(v.isfinite().all() for v in c["model"].values())
        and c["tables"]["weight"].isfinite().all()
    )


@pytest.mark.parametrize("where", ["dense", "row"])
def test_an_overflow_in_float16_skips_both_updates_and_halves_the_scale_once(train, monkeypatch, where):
    """inf in a dense or in a row gradient: weights, rows, moments and counts stay, the next step goes on."""
    reduce, calls, states, scales = StemTables.reduce, iter(range(100)), [], []

    def snapshot(self):
        return [t.clone() for t in (*self.state_dict().values(), *GPT.last.parameters())]

    def overflow(self, plan, rows):
        states.append(snapshot(self))
        step = next(calls)
        if step == 1 and where == "row":
            rows.grad[0, 0, 0] = math.inf
        return reduce(self, plan, rows)

    total = torch.nn.utils.get_total_norm
    monkeypatch.setattr(
        torch.nn.utils,
        "get_total_norm",
        lambda g: total(g) + (math.inf if where == "dense" and len(states) == 1 else 0),
    )
    init = GPT.__init__
    monkeypatch.setattr(GPT, "__init__", lambda self, *a: (init(self, *a), setattr(GPT, "last", self))[0])
    monkeypatch.setattr(StemTables, "reduce", overflow)
    update = torch.amp.GradScaler.update
    monkeypatch.setattr(
        torch.amp.GradScaler, "update", lambda self, *a: (update(self, *a), scales.append(self.get_scale()))[0]
    )
    train("--dtype=float16")
    assert scales == [65536.0, 32768.0, 32768.0, 32768.0]
    assert equal(states[1], states[2]) and not equal(states[0], states[1]) and not equal(states[2], states[3])
    assert checkpoint.load("out/ckpt.pt")["scaler"]["scale"] == 32768.0


def test_float16_clips_what_float32_clips(train):
    """Gradients are unscaled once, rows included, before the norm: it is that of an unscaled run."""
    train("--dtype=float16", "--out_dir=half")
    train("--out_dir=full")
    for half, full in zip(log("half"), log("full")):
        assert float(half["norm"]) == pytest.approx(float(full["norm"]), rel=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Stopping.


@pytest.mark.parametrize("stop, offload", [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_an_interrupt_saves_a_whole_step_and_can_be_resumed(facts, tmp_path, stop, offload, script):
    """Rows, too, have been updated once for every step they were drawn in; no thread keeps the process alive."""
    args = [
        "--device=cpu",
        f"--dataset={facts}",
        "--max_iters=100000",
        "--batch_size=2",
        "--block_size=16",
        "--n_layer=2",
        "--eval_interval=0",
        "--log_interval=5",
        "--eval_iters=2",
        "--stem_every=1",
        f"--offload={offload}",
    ]
    run = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *args],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    for line in run.stdout:
        if line.startswith("step"):
            break
    time.sleep(0.2)
    run.send_signal(stop)
    out = run.communicate(timeout=60)[0]
    assert run.returncode == 130 and "Traceback" not in out and "--init_from=resume" in out.splitlines()[-1]
    c, data_ = checkpoint.load(tmp_path / "out" / "ckpt.pt"), data.loader.Dataset(facts, 16, 1)
    step = c["step"]
    assert c["tables"]["count"].sum() == sum(len(data_.get_batch("train", s, 2)[0].unique()) for s in range(step))
    assert step == len(log(tmp_path / "out")) >= 5 and not (tmp_path / "out" / "summary.json").exists()
    script("train.py", "--init_from=resume", f"--max_iters={step + 2}")
    assert [int(r["step"]) for r in log()] == list(range(1, step + 3))


# ---------------------------------------------------------------------------------------------------------------------
# Accounting without a run, and compiling.


def test_dry_run_accounts_for_a_model_too_large_to_build(script):
    """The paper's 1B shape, in no time and memory, touching no data and writing nothing."""
    out = script(
        "train.py",
        "--dry_run=True",
        "--vocab_size=128256",
        "--n_layer=16",
        "--n_embd=2048",
        "--n_head=32",
        "--n_kv_head=8",
        "--d_ff=8192",
        "--stem_every=3",
        "--dataset=nosuch",
        "--block_size=2048",
    )
    assert "STEM: 2, 5, 8, 11, 14" in out and "1,414,596,608 a token, 2.829 GFLOPs" in out and "2.997" in out
    assert "stored 6,667,962,368" in out and "6,751,848,448" in out and "rows 67,800.0 MiB" in out
    assert "with --offload=True 12,800.0 MiB" in out
    assert not os.listdir(".")


def test_compiled_training_equals_eager_and_its_checkpoints_load_either_way(train, script):
    out = train("--compile=True", "--out_dir=compiled")
    if "compile off" in out:
        pytest.skip("torch.compile finds no C++ compiler here")
    train("--compile=False", "--out_dir=eager")
    for a, b in zip(log("compiled"), log("eager")):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-4)
    assert not any("_orig_mod" in k for k in checkpoint.load("compiled/ckpt.pt")["model"])
    script("train.py", "--init_from=resume", "--out_dir=compiled", "--compile=False", "--max_iters=5")
    script("train.py", "--init_from=resume", "--out_dir=eager", "--compile=True", "--max_iters=5")


def test_without_a_compiler_training_goes_on(train, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_: (_ for _ in ()).throw(RuntimeError("no compiler")))
    assert "torch.compile does not work here (RuntimeError)" in train("--compile=True")


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: one line, nothing written.


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--batch_size=0"], "batch_size must be at least 1"),
        (["--eval_iters=0"], "eval_iters must be at least 1"),
        (["--max_iters=-5"], "max_iters must be at least 0"),
        (["--eval_interval=-1"], "eval_interval"),
        (["--seed=-1"], "seed"),
        (["--min_lr=1.0"], "min_lr"),
        (["--beta2=1.0"], "beta1 and beta2"),
        (["--stem_every=3"], "no STEM layer"),
        (["--n_head=3"], "n_embd 16"),
        (["--block_size=100000"], "too few for block_size"),
        (["--dataset=nosuch"], "data/ has facts"),
        (["--vocab_size=10"], "vocab_size 10 is below"),
        (["--device=cuda:99"], "device cuda:99 is not available"),
        (["--device=cpu:x"], "device cpu:x is not available"),
        (["--device=True"], "device"),
        (["--dtype=float8"], "dtype must be"),
        (["--compile=Maybe"], "compile"),
        (["--init_from=resume"], "there is no checkpoint"),
        (["--eval_only=True"], "eval_only needs"),
        (["--out_dir="], "out_dir is empty"),
        (["--init_from=nosuch.pt"], "there is no checkpoint"),
        (["--dry_run=True", "--dataset=nosuch"], "data/ has facts"),
        (["--stem_variant=down"], "up, gate, add"),
        (["--dense_adamw=True", "--offload=True"], "dense_adamw takes all rows"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(train, flags, words):
    with pytest.raises((SystemExit, ValueError), match=words) as e:
        train(*flags)
    assert "\n" not in str(e.value) and not os.listdir(".")


def test_bad_ids_are_found_before_training(train, facts, tmp_path):
    folder = tmp_path / "bad"
    folder.mkdir()
    for p in facts.iterdir():
        (folder / p.name).write_bytes(p.read_bytes())
    ids = np.fromfile(folder / "train.bin", np.uint16)
    ids[77] = 50300
    ids.tofile(folder / "train.bin")
    with pytest.raises(ValueError, match="token id 50300"):
        train(f"--dataset={folder}")


def test_a_checkpoint_that_does_not_fit_is_refused(train, script, facts, tmp_path):
    train("--out_dir=a")
    with pytest.raises(ValueError, match="n_layer is 3 here and 2 in the checkpoint: leave"):
        script("train.py", "--init_from=resume", "--out_dir=a", "--n_layer=3")
    (tmp_path / "t.txt").write_text("to be or not to be\n" * 50)
    script("data/shakespeare_char/prepare.py", "--input=t.txt", f"--folder={tmp_path / 'chars'}")
    with pytest.raises(ValueError, match="another vocabulary|vocab_size"):
        script("train.py", "--init_from=a/best.pt", "--out_dir=b", f"--dataset={tmp_path / 'chars'}")
    weights = checkpoint.load("a/ckpt.pt")
    del weights["optimizer"]
    Path("c").mkdir()
    torch.save(weights, "c/ckpt.pt")
    with pytest.raises(ValueError, match="lacks optimizer; --init_from=PATH"):
        script("train.py", "--init_from=resume", "--out_dir=c")


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(optimizer={}), "lacks moments of some weights; --init_from=PATH"),
        (dict(optimizer=3), "lacks optimizer; --init_from=PATH"),
        (dict(settings=[1]), "lacks settings"),
        (dict(step="five"), "lacks step"),
    ],
)
def test_a_run_that_cannot_go_on_as_it_was_is_not_resumed(train, script, change, words):
    train("--max_iters=1")
    torch.save(checkpoint.load("out/ckpt.pt") | change, "out/ckpt.pt.new")
    os.replace("out/ckpt.pt.new", "out/ckpt.pt")
    with pytest.raises((ValueError, SystemExit), match=words):
        script("train.py", "--init_from=resume", "--device=cpu")


def test_an_out_dir_that_cannot_be_written_is_refused_before_training(train, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot write into out_dir file/out"):
        train("--out_dir=file/out")


def test_the_loss_scale_survives_a_resume(train, script):
    """From its default several steps would overflow and be skipped."""
    train("--max_iters=2", "--dtype=float16")
    c = checkpoint.load("out/ckpt.pt")
    c["scaler"]["scale"] = 512.0
    checkpoint.save("out/ckpt.pt", c)
    script("train.py", "--init_from=resume", "--max_iters=3")
    assert checkpoint.load("out/ckpt.pt")["scaler"]["scale"] == 512.0


def test_without_a_terminal_nothing_is_written_to_stderr(train, script):
    """No bar, no carriage returns in logs."""
    out = train("--max_iters=2")
    assert script.err == "" and "\r" not in out


@pytest.mark.parametrize("seed", [0, 2**62])
def test_any_seed_trains(train, seed):
    train(f"--seed={seed}", "--max_iters=1")
    assert checkpoint.load("out/ckpt.pt")["settings"]["seed"] == seed


def test_tables_do_not_repeat_the_weights_numbers(train):
    """torch's CPU generator takes the low 32 bits of a seed."""
    train("--max_iters=0")
    c = checkpoint.load("out/ckpt.pt")
    numbers = c["model"]["wte.weight"].flatten()[:8]
    windows = c["tables"]["weight"].flatten().unfold(0, 8, 1)
    assert torch.nn.functional.cosine_similarity(windows, numbers[None]).max() < 0.999


def test_each_earlier_run_is_kept_apart(train):
    """Also one of which only best.pt is left."""
    train("--max_iters=1")
    Path("out/ckpt.pt").unlink()
    for seed in (2, 3):
        train("--max_iters=1", f"--seed={seed}")
    kept = [checkpoint.load(p)["settings"]["seed"] for p in sorted(Path("out").glob("earlier*"))]
    assert kept == [1, 2] and checkpoint.load("out")["settings"]["seed"] == 3


def test_moments_of_another_shape_are_refused(train, script):
    """torch's fused AdamW does not look, and reads beyond them."""
    train("--max_iters=2")
    c = checkpoint.load("out/ckpt.pt")
    c["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    checkpoint.save("out/ckpt.pt", c)
    with pytest.raises(SystemExit, match="lacks moments"):
        script("train.py", "--init_from=resume", "--max_iters=2")  # no step, so that a failure is no crash


def test_a_clock_that_stands_still_stops_nothing(train, monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 5.0)
    train("--max_iters=1")
