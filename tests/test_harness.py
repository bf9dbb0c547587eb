"""harness.py: its arithmetic against the model's own loss and a loop over tokens; with lm_eval, a task of one's own."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model

import checkpoint
from data.tokenizer import Tokenizer
from harness import Scorer

WORDS = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"]  # 50


@pytest.fixture
def scorer():
    model, tables = tiny_model()  # block_size 16
    return Scorer(model.eval(), tables, Tokenizer({"tokenizer": "word", "vocab": WORDS}), 3)


def asked(*args):
    return [SimpleNamespace(args=a) for a in args]


@torch.no_grad()
def direct(scorer, ids, n):
    """The sum of the last n tokens' log-probabilities, one forward pass a token, each with the context before it."""
    total, greedy = 0.0, True
    for end in range(len(ids) - n, len(ids)):
        x = torch.tensor([ids[max(0, end - 16) : end]])
        plan = scorer.tables.plan(x)
        logp = scorer.model(x, scorer.tables.fetch(plan), plan.inv)[0, -1].double().log_softmax(-1)
        total, greedy = total + logp[ids[end]].item(), greedy and logp.argmax().item() == ids[end]
    return total, greedy


PAIRS = [("a b c", " d"), ("a b c", " d e"), ("", "f g"), ("h ", "i"), ("A B C D E F G H I J K L", " M N O P")]


def test_loglikelihood_is_the_sum_of_the_continuations_log_probabilities(scorer):
    got = scorer.loglikelihood(asked(*PAIRS))
    for (context, continuation), (total, greedy) in zip(PAIRS, got):
        ids = scorer.tokenizer.encode(context + continuation)
        n = len(continuation.split())
        expected, likeliest = direct(scorer, ids if context else [0, *ids], n)
        assert total == pytest.approx(expected, rel=1e-5) and greedy is likeliest


def test_greedy_is_what_generation_says(scorer):
    (text,) = scorer.generate_until(asked(("a b c", {"max_gen_toks": 3})))
    pairs = ("a b c", " " + text), ("a b c", " x y z" if text != "x y z" else " x y a")
    assert [greedy for _, greedy in scorer.loglikelihood(asked(*pairs))] == [True, False]


@torch.no_grad()
def test_greedy_means_every_window(scorer):
    """A text whose last window is greedy from token 17 on, given its own context, while the 16 before it are not."""
    ids = [0, *torch.randint(1, 50, (16,), generator=torch.Generator().manual_seed(0)).tolist()]
    while len(ids) < 21:
        x = torch.tensor([ids[4:]])  # where the last window of 17 will begin
        plan = scorer.tables.plan(x)
        ids.append(scorer.model(x, scorer.tables.fetch(plan), plan.inv)[0, -1].argmax().item())
    assert [greedy for _, greedy in scorer.score([(ids, 4), (ids, 20)])] == [True, False]


def test_a_space_is_scored_with_what_follows_it(scorer):
    """As in byte pairs, where " b" is one token: a space at a context's end is part of the continuation."""
    scorer.tokenizer = Tokenizer({"tokenizer": "char", "vocab": [" ", *WORDS[1:]]})
    with_space, without = scorer.loglikelihood(asked(("a ", "b"), ("a", " b")))
    assert with_space == without and with_space[0] == pytest.approx(direct(scorer, [1, 0, 2], 2)[0], rel=1e-5)


def test_batches_of_different_lengths_equal_single_ones(scorer):
    together = scorer.loglikelihood(asked(*PAIRS))
    alone = [scorer.loglikelihood(asked(pair))[0] for pair in PAIRS]
    for (a, greedy_a), (b, greedy_b) in zip(together, alone):
        assert a == pytest.approx(b, rel=1e-5) and greedy_a is greedy_b


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 33, 40])
def test_rolling_windows_score_each_token_once(scorer, length):
    """By windows written down here: full ones side by side, the last with all the context that fits."""
    ids = torch.randint(1, 50, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    text, ids = scorer.tokenizer.decode(ids), [0, *ids]
    expected = 0.0
    for begin in range(1, length + 1, 16):
        end = min(begin + 16, length + 1)
        window = torch.tensor([ids[max(0, end - 17) : end]])
        x, y = window[:, :-1], window[:, 1:].clone()
        plan = scorer.tables.plan(x)
        y[:, : begin - end] = -100  # seen before
        with torch.no_grad():
            logits = scorer.model(x, scorer.tables.fetch(plan), plan.inv)
        expected -= torch.nn.functional.cross_entropy(logits[0], y[0], reduction="sum").item()
    got = scorer.loglikelihood_rolling(asked((text,), ("a",)))
    assert len(got) == 2 and got[0] == pytest.approx(expected, rel=1e-5)


def test_a_continuation_longer_than_the_context_is_scored_whole(scorer):
    ids = torch.randint(1, 50, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    text = scorer.tokenizer.decode(ids)
    (rolling,) = scorer.loglikelihood_rolling(asked((text,)))
    assert scorer.loglikelihood(asked(("", text)))[0][0] == pytest.approx(rolling)


def test_generation_stops_at_the_first_stop_string(scorer):
    (whole,) = scorer.generate_until(asked(("a b", {"max_gen_toks": 12})))
    words = whole.split()
    assert len(words) == 12
    for until in ([words[5], words[3]], words[3]):
        (text,) = scorer.generate_until(asked(("a b", {"until": until, "max_gen_toks": 12})))
        assert text == whole[: min(whole.index(w) for w in until)]
    (text,) = scorer.generate_until(asked(("a b", {"until": [words[3], f" {words[3]}"], "max_gen_toks": 12})))
    assert text == whole[: whole.index(words[3])].rstrip()  # both are there at once, one begins earlier
    assert scorer.generate_until(asked(("a b", {"until": ["nowhere"], "max_gen_toks": 2}))) == [" ".join(words[:2])]


def test_generation_ends_with_the_document(scorer):
    scorer.model.generate = lambda *args, **kwargs: (torch.tensor([i]) for i in (5, 6, 0, 7))
    assert scorer.generate_until(asked(("a b", {}))) == ["e f"]


def test_sampling_is_asked_for(scorer):
    torch.manual_seed(0)
    for sampled in (False, True):
        how = {"max_gen_toks": 5, "temperature": 1.5, "do_sample": sampled}
        assert (len(set(scorer.generate_until(asked(*[("a", how)] * 5)))) > 1) is sampled


# ---------------------------------------------------------------------------------------------------------------------
# With the harness itself.


def write(folder, scorer):
    folder.mkdir()
    checkpoint.save(folder / "best.pt", {
        "model_config": vars(scorer.model.config), "meta": scorer.tokenizer.meta,
        "model": scorer.model.state_dict(), "tables": scorer.tables.state_dict()})


def test_without_the_package_one_line_says_so(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match="pip install lm_eval"):
        script("harness.py", "--tasks=x")


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{target}"
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
generation_kwargs: {{until: ["<|endoftext|>"], max_gen_toks: 1}}
"""


@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm_eval is not installed")
def test_a_task_made_of_questions(script, scorer, tmp_path, monkeypatch):
    """Half of the questions have the model's own greedy word for an answer: both ways of asking must say 0.5."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write(tmp_path / "run", scorer)
    questions = []
    for i, prompt in enumerate(("a b", "c d e", "f", "g h i j")):
        (answer,) = scorer.generate_until(asked((prompt, {"max_gen_toks": 1})))
        questions.append({"prompt": prompt, "answer": answer if i % 2 else "W" if answer != "W" else "V"})
    (tmp_path / "questions.json").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "tasks").mkdir()
    for name, kind, target, metric in (("facts_likely", "loglikelihood", " {{answer}}", "acc"),
                                       ("facts_said", "generate_until", "{{answer}}", "exact_match")):
        (tmp_path / f"tasks/{name}.yaml").write_text(
            TASK.format(name=name, kind=kind, target=target, metric=metric, file=tmp_path / "questions.json"))
    out = script("harness.py", "--out_dir=run", "--include_path=tasks", "--tasks=facts_likely,facts_said")
    rows = [line for line in out.splitlines() if "|facts" in line]
    assert len(rows) == 2 and all("0.5" in row for row in rows), out
    with pytest.raises(SystemExit, match="there is no .'arc_hard'. in tasks"):
        script("harness.py", "--out_dir=run", "--include_path=tasks", "--tasks=facts_said,arc_hard")
