"""data/: batches, the facts and what can be wrong with a folder."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_model

from data.loader import Dataset, recall
from data.tokenizer import END, Tokenizer
from data.writer import write_dataset


def char_dataset(folder, text="abcdefgh" * 10):
    tokenizer = Tokenizer({"tokenizer": "char", "vocab": sorted(set(text))})
    write_dataset(folder, tokenizer, tokenizer.encode(text), tokenizer.encode(text))
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers.


@pytest.mark.parametrize(
    "meta, text",
    [
        ({"tokenizer": "word", "vocab": [END, "New", "Zealand", "."]}, f"{END} New Zealand ."),
        ({"tokenizer": "char", "vocab": sorted("naïve — “x” 日本 😀\n")}, "naïve — “x”\n日本 😀"),
    ],
)
def test_text_survives_the_round_trip(meta, text):
    tokenizer = Tokenizer(json.loads(json.dumps(meta)))
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.encode("") == []
    assert tokenizer.end_id == (0 if END in meta["vocab"] else None)


def test_what_a_tokenizer_does_not_know_is_named():
    tokenizer = Tokenizer({"tokenizer": "word", "vocab": [END, "Spain", "France"]})
    with pytest.raises(ValueError, match="word 'Spian' is not among the 3 .* near it: Spain"):
        tokenizer.encode("Spain Spian")
    for bad in (-9223372034707292160, 3):
        with pytest.raises(ValueError, match="outside the tokenizer's 0 to 2"):
            tokenizer.decode([0, bad])
    with pytest.raises(ValueError, match="word, char or gpt2, got None"):
        Tokenizer({})


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="GPT-2's byte pairs would have to be downloaded")
def test_gpt2_tokenizer():
    tokenizer = Tokenizer({"tokenizer": "gpt2"})
    assert tokenizer.encode(f"hello world{END}") == [31373, 995, 50256] and tokenizer.end_id == 50256
    assert tokenizer.decode(tokenizer.encode("naïve 日本 😀")) == "naïve 日本 😀"


def test_gpt2_without_network_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(ValueError, match="set TIKTOKEN_CACHE_DIR"):
        Tokenizer({"tokenizer": "gpt2"})


# ---------------------------------------------------------------------------------------------------------------------
# Batches.


def test_every_window_is_drawn_and_none_overruns(tmp_path):
    """block_size + 2 tokens hold exactly two windows with a target: at 0 and 1."""
    data = Dataset(char_dataset(tmp_path, "abcdefghij"), block_size=8)
    x, y = data.get_batch("train", 0, 1000)
    assert x[:, 0].unique().tolist() == [0, 1] and torch.equal(y[:, :-1], x[:, 1:]) and torch.equal(y, x + 1)


def test_a_batch_is_a_function_of_seed_split_and_step(tmp_path):
    def draw(seed, split, step):
        return Dataset(char_dataset(tmp_path, "abcdefgh" * 50), 8, seed).get_batch(split, step, 16)[0].tolist()

    assert draw(1, "train", 5) == draw(1, "train", 5)
    assert len({str(draw(*k)) for k in ((1, "train", 5), (2, "train", 5), (1, "val", 5), (1, "train", 6))}) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Some of the tokens.


def test_the_most_frequent_tokens_are_those_of_a_count(facts):
    """Whatever the order among equals: none left out is more frequent."""
    data = Dataset(facts, 8)
    count = np.bincount(data.tokens("train"), minlength=data.tokenizer.vocab_size)
    for n in (1, 7, len(count)):
        ids = data.choose(f"frequent:{n}").numpy()
        assert len(set(ids)) == n and (np.diff(ids) > 0).all()
        assert count[ids].min() >= np.delete(count, ids).max(initial=0)
    assert torch.equal(data.choose("all"), torch.arange(len(count)))


def test_a_file_of_words_names_all_their_tokens(facts, tmp_path):
    data = Dataset(facts, 8)
    (tmp_path / "w.txt").write_bytes("\ufeffNew Zealand\r\n\r\n  Spain \nNew Zealand".encode())
    assert data.choose(str(tmp_path / "w.txt")).tolist() == sorted(data.tokenizer.encode("New Zealand Spain"))


@pytest.mark.parametrize(
    "which, words",
    [
        ("frequent:0", "an N from 1 to"),
        ("frequent:9999", "an N from 1 to"),
        ("frequent:x", "got 'frequent:x'"),
        ("frequent", "got 'frequent'"),
        ("nosuch", "all, frequent:N or a file of words, one a line; 'nosuch' is no file"),
        ("", "'' is no file"),
        (b" \n\n", "w.txt has no words$"),
        (b"Spain\nSpian\n\xff" + b"\nz" * 5,
         "has words that the data do not: 'Spian', '\ufffd', 'z', 'z', 'z' and 2 more$"),
    ],
)
def test_tokens_that_are_none_are_refused(facts, tmp_path, which, words):
    if isinstance(which, bytes):
        (tmp_path / "w.txt").write_bytes(which)
    with pytest.raises(ValueError, match=words) as e:
        Dataset(facts, 8).choose(which if isinstance(which, str) else str(tmp_path / "w.txt"))
    assert "\n" not in str(e.value)


# ---------------------------------------------------------------------------------------------------------------------
# Folders that are not as they should be.


def break_meta(folder, **change):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: (f / "meta.json").unlink(), "data/ has facts, needle, openwebtext, plays, shakespeare"),
        (lambda f: (f / "meta.json").write_text("{"), "damaged or foreign json"),
        (lambda f: (f / "meta.json").write_text("[]"), "damaged or foreign json"),
        (lambda f: (f / "meta.json").write_text("{}"), "damaged or foreign json"),
        (
            lambda f: (f / "train.bin").write_bytes((f / "train.bin").read_bytes()[:-1]),
            "train.bin has 159 bytes, meta.json says 80",
        ),
        (lambda f: (f / "val.bin").unlink(), "val.bin has 0 bytes"),
        (lambda f: np.full(80, 8, np.uint16).tofile(f / "train.bin"), "holds token id 8, meta.json has vocab_size 8"),
        (lambda f: break_meta(f, vocab=["a"]), "a tokenizer of 1"),
        (lambda f: break_meta(f, tokenizer="bpe"), "tokenizer must be"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage, words):
    damage(char_dataset(tmp_path))
    with pytest.raises(ValueError, match=words):
        Dataset(tmp_path, 8)


def test_a_split_too_short_is_refused(tmp_path):
    char_dataset(tmp_path)
    Dataset(tmp_path, 79).get_batch("train", 0, 2)
    with pytest.raises(ValueError, match="80 tokens, too few for block_size 80"):
        Dataset(tmp_path, 80)


def test_a_known_dataset_that_is_not_prepared_names_its_command(tmp_path):
    for name, command in (("a", "a/prepare.py"), ("my data", "my data/prepare.py'")):  # to be pasted into a shell
        (tmp_path / name).mkdir()
        (tmp_path / name / "prepare.py").touch()
        with pytest.raises(ValueError, match=rf"run python .*{command} first"):
            Dataset(tmp_path / name, 8)


def test_a_planted_pickle_is_never_read(train, facts, tmp_path):
    """It would create a file where it is loaded."""
    shutil.copytree(facts, tmp_path / "planted")
    (tmp_path / "planted/meta.pkl").write_bytes(b"cbuiltins\nopen\n(S'" + bytes(tmp_path / "pwned") + b"'\nS'w'\ntR.")
    train(f"--dataset={tmp_path / 'planted'}", "--max_iters=1")
    assert not (tmp_path / "pwned").exists()


def test_questions_of_other_data_do_not_stay(script, tmp_path):
    (tmp_path / "questions.json").write_text("[{}]")
    assert Dataset(char_dataset(tmp_path), 8).questions == []
    for bad in ("[{", "5", '["a"]', '[{"prompt": "a"}]', '[{"prompt": "", "answer": "a", "template_seen": true}]'):
        (tmp_path / "questions.json").write_text(bad)
        with pytest.raises(ValueError, match="damaged|without words"):
            Dataset(tmp_path, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Facts.


def documents(folder, split):
    meta = json.loads((folder / "meta.json").read_text())
    ids = np.fromfile(folder / f"{split}.bin", meta["dtype"])
    return Tokenizer(meta).decode(ids.tolist()).split(END)[1:]


def test_facts_are_the_same_bytes_each_time(script, all_facts, tmp_path):
    script("data/facts/prepare.py", "--towns=3", "--repeats=2", f"--folder={tmp_path / 'again'}")
    for name in ("train.bin", "val.bin", "meta.json", "questions.json"):
        assert (all_facts / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_every_fact_is_stated_and_its_held_out_wording_never(all_facts):
    """Sentences of trained wordings are there, those of the held-out ones are not."""
    questions = json.loads((all_facts / "questions.json").read_text())
    text = "".join(documents(all_facts, "train") + documents(all_facts, "val"))
    sentences = Counter(sentence.strip() for sentence in text.split(" ."))
    stated = {(q["entity"], q["attribute"]): 0 for q in questions}
    for q in questions:
        hits = sentences[f"{q['prompt']} {q['answer']}"]
        if not q["template_seen"]:
            assert hits == 0, q
        stated[q["entity"], q["attribute"]] += hits
    assert len(stated) == 139 * 6 + 3 * 8 and sum(q["template_seen"] for q in questions) == 2 * len(stated)
    assert sum(n > 0 for n in stated.values()) > 0.85 * len(stated)  # the fourth wording names the answer first


def test_every_fact_is_in_train_at_least_repeats_times(all_facts):
    """Two repeats of 142 entities in documents of four sentences: 6 attributes fill two documents, 8 fill two."""
    docs = documents(all_facts, "train")
    assert len(docs) == 2 * 2 * 142 and sum(d.count(" .") for d in docs) == 2 * (139 * 6 + 3 * 8)


def test_train_and_val_share_no_document(all_facts):
    train, val = documents(all_facts, "train"), documents(all_facts, "val")
    assert val and not set(train) & set(val)


def test_spain_is_asked(all_facts):
    questions = json.loads((all_facts / "questions.json").read_text())
    assert any(q["prompt"] == "The capital of Spain is" and q["answer"] == "Madrid" for q in questions)
    assert any(q["answer"] == "Buenos Aires" for q in questions)  # answers of several words


def test_documents_have_as_many_sentences_as_set(script, tmp_path):
    script("data/facts/prepare.py", "--towns=1", "--repeats=1", "--sentences=2", "--seed=3", f"--folder={tmp_path}")
    assert {d.count(" .") for d in documents(tmp_path, "train")} == {2}


def test_skew_makes_some_entities_frequent(script, tmp_path):
    script("data/facts/prepare.py", "--towns=3", "--repeats=1", "--skew=1.0", f"--folder={tmp_path}")
    counts = sorted(
        sum(f" {name} " in d for d in documents(tmp_path, "train"))
        for name in ("Spain", "Chad", "Peru", "Mali", "Cuba")
    )
    assert counts[0] >= 1 and len(documents(tmp_path, "train")) > 3 * 2 * 142


def test_new_facts_are_further_ones_of_the_same_towns_in_the_same_words(script, all_facts, tmp_path):
    script("data/facts/prepare.py", "--towns=3", "--repeats=2", "--new_facts=True", f"--folder={tmp_path}")
    old, new = Dataset(all_facts, 8), Dataset(tmp_path, 8)
    assert new.tokenizer.meta["vocab"] == old.tokenizer.meta["vocab"]
    known, learnt = ({(q["entity"], q["attribute"]): q["answer"] for q in d.questions} for d in (old, new))
    assert {e for e, _ in learnt} == {e for e, attribute in known if attribute == "river"}
    assert len(learnt) == 3 * 6 and not learnt.keys() & known.keys()
    assert {(k, a) for (_, k), a in learnt.items()} < {(k, a) for (_, k), a in known.items()}
    docs = documents(tmp_path, "train")
    assert sum(d.count(" .") for d in docs) == 2 * len(learnt) and not set(docs) & set(documents(all_facts, "train"))


def test_new_facts_do_not_take_the_place_of_the_first(script):
    with pytest.raises(SystemExit, match="folder of their own"):
        script("data/facts/prepare.py", "--new_facts=True")


def test_facts_about_towns_alone(script, tmp_path):
    script("data/facts/prepare.py", "--countries=0", "--towns=12", "--repeats=1", f"--folder={tmp_path}")
    data = Dataset(tmp_path, 8)
    assert len({(q["entity"], q["attribute"]) for q in data.questions}) == 12 * 8
    assert "Spain" not in data.meta["vocab"] and data.tokenizer.vocab_size < 200


@pytest.mark.parametrize(
    "flag",
    ["--towns=0", "--countries=-2", "--new_facts=True --countries=0", "--skew=-1.0", "--towns=99999", "--sentences=0"],
)
def test_facts_that_cannot_be_made_are_refused(script, tmp_path, flag):
    with pytest.raises(SystemExit, match="at least|at most"):
        script("data/facts/prepare.py", *flag.split(), f"--folder={tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()


def test_recall_counts_whole_answers(all_facts):
    """A model that always says what an oracle knows recalls everything; one that errs in a last word does not."""
    tokenizer = Dataset(all_facts, 8).tokenizer
    questions = [
        {"prompt": f"The capital of {e} is", "answer": a, "template_seen": s}
        for e, a, s in (
            ("Spain", "Madrid", True),
            ("Argentina", "Buenos Aires", True),
            ("Peru", "Lima", False),
            ("Cuba", "Havana", False),
        )
    ]

    class Oracle:
        def __init__(self, **wrong):
            self.answers = {
                tuple(tokenizer.encode(q["prompt"])): tokenizer.encode(wrong.get(q["answer"].split()[0], q["answer"]))
                for q in questions
            }

        def generate(self, tables, ids, n, temperature):
            assert temperature == 0
            yield from torch.tensor([self.answers[tuple(prompt)][:n] for prompt in ids.tolist()]).T

    assert recall(Oracle(), None, tokenizer, questions) == {"recall": 1.0, "recall_unseen": 1.0}
    assert recall(Oracle(Buenos="Buenos Madrid"), None, tokenizer, questions) == {"recall": 0.5, "recall_unseen": 1.0}
    assert recall(Oracle(Lima="Madrid"), None, tokenizer, questions) == {"recall": 1.0, "recall_unseen": 0.5}


def test_recall_of_a_real_model_is_a_share(all_facts):
    data = Dataset(all_facts, 16)
    model, tables = tiny_model(vocab_size=data.tokenizer.vocab_size)
    assert 0 <= recall(model, tables, data.tokenizer, data.questions[:100])["recall"] < 0.5


def test_characters_need_no_tiktoken():
    """Only GPT-2's byte pairs do, and say so."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['tiktoken'] = None\n"
        "from data.tokenizer import Tokenizer\n"
        "assert Tokenizer({'tokenizer': 'char', 'vocab': ['a']}).encode('aa') == [0, 0]\n"
        "Tokenizer({'tokenizer': 'gpt2'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].endswith("pip install tiktoken")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write .*file/d.*: Not a directory") as e:
        write_dataset(tmp_path / "file/d", Tokenizer({"tokenizer": "char", "vocab": list("abcd")}), [1, 2], [3])
    assert "\n" not in str(e.value)


def test_no_memory_map_outlives_its_batch(tmp_path):
    """One that lives on keeps every page it ever read resident."""
    write_dataset(tmp_path, Tokenizer({"tokenizer": "char", "vocab": list("abc")}), [1] * 40, [2] * 40)
    data = Dataset(tmp_path, 8)
    x, _ = data.get_batch("train", 0, 2)
    assert x.untyped_storage().nbytes() == 2 * 8 * 8  # a copy of the batch, no view into the file
    assert data.tokens("train") is not data.tokens("train")


SCRIPTS = sorted(str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.py"), *ROOT.glob("data/**/*.py")))


@pytest.mark.parametrize("file", SCRIPTS)
def test_every_text_file_is_opened_with_an_encoding(file):
    """Else it is the console's, which on Windows is not UTF-8."""
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", "open" if getattr(node.func, "id", "") == "open" else "")
            binary = any(isinstance(a, ast.Constant) and "b" in str(a.value) for a in node.args[1:2])
            if name in ("open", "read_text", "write_text") and not binary and ast.unparse(node.func) != "os.open":
                assert "encoding" in {k.arg for k in node.keywords}, f"{file}:{node.lineno}"
