"""bench.py: the contenders are what they say, at a size that takes no time; no time is asserted."""

import pytest
import torch
import torch.nn as nn

import bench
from model import GPT
from stem import Linear


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(bench, "device", "cpu")
    monkeypatch.setattr(bench, "dtype", torch.float32)


def test_the_plain_model_has_the_dense_twins_matmuls():
    config = bench.shape(64, 2, 50, 0)
    plain, dense = bench.PlainGPT(config), GPT(config)
    shapes = [
        sorted(tuple(m.weight.shape) for m in model.modules() if isinstance(m, kind))
        for model, kind in ((plain, nn.Linear), (dense, Linear))
    ]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 2 * 5 + 1


def test_embedding_tables_train_as_the_model_expects():
    """Every row of theirs moves, since its AdamW decays all; of ours those of the batch do."""
    made = {}

    def keep(kind):
        return lambda *shape: made.setdefault(kind, kind(*shape))

    for kind in (bench.EmbeddingTables, bench.trained_tables, bench.host_tables):
        step = bench.training_step(bench.shape(64, 2, 500, 1), 256, GPT, keep(kind))
        weight = made[kind].weights[0] if kind is bench.EmbeddingTables else made[kind].read(torch.arange(500))[:, 0]
        before = weight.detach().clone()
        step()
        after = weight if kind is bench.EmbeddingTables else made[kind].read(torch.arange(500))[:, 0]
        moved = (before != after).any(dim=1).sum()
        assert moved == 500 if kind is bench.EmbeddingTables else 50 < moved < 256


def test_random_ids_are_as_frequent_as_words_or_equally():
    config = bench.shape(64, 2, 1000, 1)
    words, uniform = (bench.random_batch(config, 40, 0, exponent)[0].flatten().bincount() for exponent in (1.0, 0.0))
    assert words[0] > 3 * uniform[0] and uniform.max() < 30


def test_a_section_that_is_none_is_refused(script):
    with pytest.raises(SystemExit, match="no section nosuch; there are training, memory"):
        script("bench.py", "--only=nosuch")
