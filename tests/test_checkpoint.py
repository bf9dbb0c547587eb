"""checkpoint.py: a file is whole or the old one, holds nothing but data, and is refused in one line when foreign."""

import os
import signal
import sys
import time

import pytest
import torch
from conftest import tiny_model

import checkpoint


def some(step=0, **more):
    model, tables = tiny_model()
    return {
        "model_config": vars(model.config),
        "meta": {"tokenizer": "char", "vocab": [chr(65 + i) for i in range(50)]},
        "model": model.state_dict(),
        "tables": tables.state_dict(),
        "step": step,
        **more,
    }


def test_what_is_saved_is_rebuilt_bit_for_bit(tmp_path):
    model, tables = tiny_model()
    tables.count[3] = 7
    checkpoint.save(tmp_path / "best.pt", some() | {"tables": tables.state_dict()})
    model2, tables2, tokenizer = checkpoint.rebuild(checkpoint.load(tmp_path))  # by folder
    assert model2.config == model.config and not model2.training and tokenizer.decode([0, 2]) == "AC"
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), model2.state_dict().values(), strict=True)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(tables.state_dict().values(), tables2.state_dict().values(), strict=True)
    )
    assert os.listdir(tmp_path) == ["best.pt"]


def test_best_is_preferred_and_latest_taken_without_it(tmp_path):
    checkpoint.save(tmp_path / "ckpt.pt", some(step=2))
    assert checkpoint.load(tmp_path)["step"] == 2
    checkpoint.save(tmp_path / "best.pt", some(step=1))
    assert checkpoint.load(tmp_path)["step"] == 1 and checkpoint.load(tmp_path / "ckpt.pt")["step"] == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path):
    """20 savers are killed in the midst of writing; each leaves its own file or an older one, whole."""
    content, last, steps = some(ballast=torch.zeros(2_000_000)), -1, set()
    start = time.perf_counter()
    checkpoint.save(tmp_path / "ckpt.pt", content)
    took = time.perf_counter() - start
    for kill in range(20):
        pid = os.fork()
        if pid == 0:
            step = last
            while True:
                step += 1
                checkpoint.save(tmp_path / "ckpt.pt", content | {"step": step})
        time.sleep(took * (0.5 + kill / 4))  # from within the first save to behind several
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        loaded = checkpoint.load(tmp_path / "ckpt.pt")
        assert loaded["step"] >= last and loaded["ballast"].shape == (2_000_000,)
        last = loaded["step"]
        steps.add(last)
    assert len(steps) > 5, f"the savers hardly got to write: {steps}"


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "ckpt.pt", some(step=1))
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match="No space left on device.*still does"):
        checkpoint.save(tmp_path / "ckpt.pt", some(step=2))
    assert checkpoint.load(tmp_path)["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


class Malicious:
    def __reduce__(self):
        return (open, ("pwned.txt", "w"))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: None, "there is no checkpoint"),
        (lambda p: p.write_bytes(b""), "not a checkpoint of this project, or damaged"),
        (lambda p: p.write_bytes(b"hello"), "damaged"),
        (lambda p: (checkpoint.save(p, some()), p.write_bytes(p.read_bytes()[:-2000])), "damaged"),
        (lambda p: torch.save({"weights": 1}, p), "damaged .KeyError"),
        (lambda p: torch.save([1], p), "damaged"),
        (lambda p: torch.save({"format": 1, "x": Malicious()}, p), "damaged .UnpicklingError"),
        (lambda p: torch.save({"format": checkpoint.FORMAT + 1, "model": {}}, p), "update it"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path, monkeypatch, make, words):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=words) as e:
        checkpoint.load(tmp_path / "ckpt.pt")
    assert "\n" not in str(e.value) and not (tmp_path / "pwned.txt").exists()


def test_two_runs_that_save_at_once_do_not_take_each_others_file(tmp_path, monkeypatch):
    fsync = os.fsync

    def meanwhile(fd):
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "getpid", lambda: 7)
        checkpoint.save(tmp_path / "ckpt.pt", some(step=2))

    monkeypatch.setattr(os, "fsync", meanwhile)
    checkpoint.save(tmp_path / "ckpt.pt", some(step=1))
    assert checkpoint.load(tmp_path)["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


def test_weights_in_bfloat16_become_fp32_masters(tmp_path):
    """A checkpoint of another tool; model, tables and moments compute as ever."""
    c = some(step=1)
    for part in ("model", "tables"):
        c[part] = {k: v.bfloat16() if v.is_floating_point() else v for k, v in c[part].items()}
    checkpoint.save(tmp_path / "ckpt.pt", c)
    model, tables, _ = checkpoint.rebuild(checkpoint.load(tmp_path))
    state = [*model.parameters(), tables.weight, tables.exp_avg, tables.exp_avg_sq]
    assert all(t.dtype == torch.float32 for t in state)


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be replaced there")
def test_tables_are_mapped_from_the_file_not_copied(tmp_path):
    """Otherwise a table near the size of memory could not be opened; nor is there memory made only to be replaced."""
    checkpoint.save(tmp_path / "best.pt", some())
    for offload in (False, True):
        c = checkpoint.load(tmp_path)
        tables = checkpoint.rebuild(c, offload=offload)[1]
        assert tables.state_dict()["weight"].data_ptr() == c["tables"]["weight"].data_ptr()
