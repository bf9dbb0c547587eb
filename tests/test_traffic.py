"""traffic.py: what it counts is what a case by hand gives; tests/test_shard.py has what two processes really send."""

import torch
from conftest import tiny_config

import traffic
from model import GPT


def test_caches_hit_what_they_say():
    """Two slots. Of the tokens 1 to 3, 1 is in every step; a cache that takes in each row it misses loses it to 3."""
    steps = [torch.tensor(ids) for ids in ([1, 2], [1, 2], [1, 3], [2, 3], [1])]
    assert traffic.lru(steps, 2) == [(0, 2, 48), (2, 0, 0), (1, 1, 24), (1, 1, 24), (0, 1, 24)]
    top = traffic.top(steps, torch.tensor([0, 4, 3, 2]), 2)
    assert top == [(2, 0, 0), (2, 0, 0), (1, 0, 8), (1, 0, 8), (1, 0, 0)]
    assert traffic.lfu(steps * 100, 4, 2) == top * 100


def test_the_bytes_of_a_step_are_those_of_a_case_by_hand():
    """Ranks 0 and 1 own even and odd ids. Each lacks one id of its own two or three; there are four in all."""
    config = tiny_config(n_layer=2)
    row = 4 * config.d_ff
    sent = traffic.step_bytes(config, torch.tensor([[[0, 1, 2]], [[2, 2, 3]]]))
    assert (sent["here"], sent["replicas"], sent["split"]) == (2 * row, 4 * row, 3 * row)
    assert sent["dense"] == 4 * GPT(config).active_parameters()


def test_it_counts_any_dataset(script, facts):
    """In hindsight no choice that stays is better, and the caches that are asked are the ones that are named."""
    lines = [line.rsplit(maxsplit=3) for line in script("traffic.py", f"--datasets={facts}", "--steps=9").splitlines()]
    hits = {name: [float(x[1].strip("%")) for x in lines if x[0].endswith(name)] for name in ("lru", "text", "steps")}
    assert len(hits["steps"]) == 3 and all(0 < a <= b < 100 for a, b in zip(hits["text"], hits["steps"]))
    assert hits["lru"][0] < hits["text"][0] and hits["steps"] == sorted(hits["steps"])
    assert lines[0][0].startswith(f"{facts}: ") and [x[0].split()[0] for x in lines[-3:]] == ["16", "32", "64"]
