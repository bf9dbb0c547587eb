"""What all tests share: few threads, a tiny model and dataset, and scripts run in this process."""

import os

os.environ["OMP_WAIT_POLICY"] = "passive"  # beside another busy process, threads that spin make a step 30 times slower

import json
import runpy
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
torch.set_num_threads(2)

from model import GPT, GPTConfig
from stem import StemTables


def tiny_config(**overrides):
    shape = dict(
        block_size=16,
        vocab_size=50,
        n_layer=3,
        n_head=4,
        n_kv_head=0,
        n_embd=16,
        d_ff=24,
        dropout=0.0,
        wte_dropout=0.0,
        rope_base=10000.0,
        tie_head=False,
        stem_every=1,
        stem_first=1,
        stem_variant="up",
    )
    return GPTConfig(**shape | overrides)


def tiny_model(dtype=torch.float32, seed=0, **overrides):
    """A model with weights large enough that its outputs depend on everything, and its tables."""
    torch.manual_seed(seed)
    config = tiny_config(**overrides)
    model, tables = GPT(config, dtype), StemTables(*config.table_shape, std=0.5, seed=seed)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    return model.to(dtype), tables


@pytest.fixture
def script(monkeypatch, tmp_path, capsys):
    """script("train.py", "--max_iters=2") runs it here, in an empty current directory; returns what it printed,
    with what it said on stderr as script.err.

    A mistake ends it as it would the real one: SystemExit with a message, or a ValueError, both raised to the test.
    """
    monkeypatch.chdir(tmp_path)

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}, sys.excepthook
        try:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        except SystemExit as e:
            if e.code not in (None, 0):
                raise
        finally:
            sys.excepthook = before[1]
            for s, handler in before[0].items():
                signal.signal(s, handler)
        out, run.err = capsys.readouterr()
        return out

    return run


@pytest.fixture(scope="session")
def all_facts(tmp_path_factory):
    """A folder with a small facts dataset."""
    folder = tmp_path_factory.mktemp("facts")
    argv, hook = sys.argv, sys.excepthook
    sys.argv = ["prepare.py", "--towns=3", "--repeats=2", f"--folder={folder}"]
    runpy.run_path(str(ROOT / "data/facts/prepare.py"), run_name="__main__")
    sys.argv, sys.excepthook = argv, hook
    return folder


@pytest.fixture(scope="session")
def facts(all_facts, tmp_path_factory):
    """A copy with a few of its questions, in all wordings: asking all would take longer than a tiny training."""
    folder = shutil.copytree(all_facts, tmp_path_factory.mktemp("few") / "facts")
    questions = json.loads((folder / "questions.json").read_text())
    (folder / "questions.json").write_text(json.dumps(questions[::97]))
    return folder


@pytest.fixture
def train(script, facts):
    """train("--max_iters=3") trains a tiny model on the small facts dataset."""
    small = (
        "--device=cpu",
        f"--dataset={facts}",
        "--batch_size=2",
        "--block_size=16",
        "--n_layer=2",
        "--n_embd=16",
        "--n_head=2",
        "--max_iters=4",
        "--eval_iters=2",
        "--eval_interval=2",
        "--log_interval=1",
        "--warmup_iters=2",
        "--stem_every=1",
    )
    return lambda *args: script("train.py", *small, *args)
