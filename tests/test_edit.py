"""edit.py: an edit moves the rows it names and no others, both ways agree, what is measured can come out either way."""

import json
import os

import pytest
import torch
from conftest import tiny_model

import checkpoint
import edit
from data.loader import Dataset, recall
from data.tokenizer import END, Tokenizer
from data.writer import write_dataset
from edit import Exam, Mapped, edited, fit, make_edit, write_edit
from offload import HostTables

WORDS = [END, *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"]
PROMPT = [5, 1, 2, 3, 9]
CASES = [  # source, target, how, layers
    ([1], [7], "left", [0, 1]),
    ([1], [7], "left", [1]),
    ([1, 2], [7], "left", [0, 1]),
    ([1, 2], [7], "right", [0]),
    ([1, 2, 3], [7, 8], "copy", [0, 1]),
    ([1], [7, 8], "left", [0, 1]),
    ([2], [7, 8], "subset", [0, 1]),
    ([1, 2], [2, 9], "left", [0, 1]),  # a token is in both names: what it reads is what was there before
]


@pytest.fixture
def tiny():
    return tiny_model(n_layer=3, stem_every=1)


def hosted(tables):
    host = HostTables(*tables.weight.shape, std=None, max_rows=20)
    host.load_state_dict(tables.state_dict())
    return host


@torch.no_grad()
def logits(model, tables, ids=PROMPT):
    plan = tables.plan(torch.tensor([ids]))
    return model(torch.tensor([ids]), tables.fetch(plan), plan.inv)


def text(model, tables, ids=PROMPT):
    return torch.stack(list(model.generate(tables, torch.tensor([ids]), 30, temperature=0))).flatten().tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The edit.


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("source, target, how, layers", CASES)
def test_rows_written_and_ids_mapped_give_the_same_bits(tiny, source, target, how, layers, offload):
    """The model sees the same numbers either way, in the prompt and in what it makes of it."""
    model, tables = tiny
    tables = hosted(tables) if offload else tables
    before = logits(model, tables)
    mapped = Mapped(tables, make_edit(tables, source, target, how, 0, layers=layers))
    by_ids, text_by_ids = logits(model, mapped), text(model, mapped)
    with edited(tables, source, target, how, 0, layers=layers):
        assert torch.equal(logits(model, tables), by_ids) and text(model, tables) == text_by_ids
    assert torch.equal(logits(model, tables), before) and not torch.equal(by_ids, before)


def test_an_edit_is_the_model_of_the_mapped_text_when_embeddings_are_blind(tiny):
    """With all token embeddings equal only rows tell tokens apart, so reading c's rows at b is having c for b."""
    model, tables = tiny
    model.wte.weight.data[:] = model.wte.weight.data[0].clone()
    with edited(tables, [1, 2], [7], how="left", pad=0):
        got = logits(model, tables)
    assert torch.equal(got, logits(model, tables, [5, 0, 7, 3, 9]))


def test_a_batch_may_have_an_edit_for_each_sequence(tiny):
    model, tables = tiny
    edits = [make_edit(tables, s, t, "left", 0) for s, t in (([1], [7]), ([1, 2], [8]), ([9], [4, 3]))]
    plan = Mapped(tables, edits).plan(torch.tensor([PROMPT] * 3))
    with torch.no_grad():
        together = model(torch.tensor([PROMPT] * 3), Mapped(tables, edits).fetch(plan), plan.inv)
    for got, one in zip(together, edits):
        assert torch.allclose(got, logits(model, Mapped(tables, one))[0], atol=1e-5)


@pytest.mark.parametrize("offload", [False, True])
def test_only_the_named_rows_of_the_chosen_layers_change_and_come_back_after_an_exception(tiny, offload):
    _, tables = tiny
    expected = tables.weight.clone()
    expected[[1, 2], 1] = expected[[7, 8], 1]
    before, tables = tables.weight.clone(), hosted(tables) if offload else tables
    with pytest.raises(KeyError), edited(tables, [1, 2], [7, 8], layers=[1]):
        assert torch.equal(tables.state_dict()["weight"], expected)
        raise KeyError
    assert torch.equal(tables.state_dict()["weight"], before)


def test_edits_nest_and_undo_in_turn(tiny):
    model, tables = tiny
    states = [logits(model, tables)]
    with edited(tables, [1], [7]):
        states.append(logits(model, tables))
        with edited(tables, [7], [1]):  # reads what was written: no change
            assert torch.equal(logits(model, tables), states[1])
    assert torch.equal(logits(model, tables), states[0])


def test_a_swap_goes_both_ways_and_twice_is_none(tiny):
    _, tables = tiny
    before = tables.weight.clone()
    write_edit(tables, make_edit(tables, [1, 2], [7, 8], swap=True))
    assert torch.equal(tables.weight[[1, 2, 7, 8]], before[[7, 8, 1, 2]]) and not torch.equal(tables.weight, before)
    write_edit(tables, make_edit(tables, [1, 2], [7, 8], swap=True))
    assert torch.equal(tables.weight, before)


def test_replacing_there_and_back_is_not_a_swap(tiny):
    _, tables = tiny
    before = tables.weight.clone()
    for source, target in (([1], [7]), ([7], [1])):
        write_edit(tables, make_edit(tables, source, target))
    assert torch.equal(tables.weight[1], before[7]) and torch.equal(tables.weight[7], before[7])


def test_a_row_that_was_prefetched_arrives_as_edited(tiny):
    model, tables = tiny
    host = hosted(tables)
    plan = host.plan(torch.tensor([PROMPT]))
    host.prefetch(plan)
    with edited(host, [1], [7]):
        assert torch.equal(host.fetch(plan)[plan.ids.tolist().index(1)], tables.weight[7])


@pytest.mark.parametrize(
    "n, target, how, reads",
    [
        (2, [7], "left", [0, 7]),
        (2, [7], "right", [7, 0]),
        (2, [7], "copy", [7, 7]),
        (3, [7, 8], "copy", [7, 8, 7]),
        (3, [7, 8], "left", [0, 7, 8]),
        (1, [7, 8], "left", [8]),
        (1, [7, 8], "right", [7]),
        (1, [7, 8], "copy", [7]),
        (1, [7, 8], "subset", [7]),  # 7 is met less often than 8
        (2, [8, 7, 9], "subset", [7, 9]),
        *((2, [7, 8], how, [7, 8]) for how in ("left", "right", "copy", "subset", "average")),
    ],
)
def test_what_each_token_reads(n, target, how, reads):
    assert fit(n, target, how, 0, [0, 0, 0, 0, 0, 0, 0, 10, 99, 5]) == reads


def test_an_average_is_the_mean_of_the_rows(tiny):
    _, tables = tiny
    mean = tables.weight[[7, 8]].mean(dim=0)
    with edited(tables, [1], [7, 8], how="average"):
        assert torch.equal(tables.weight[1], mean)
    with edited(tables, [1, 2, 3], [7, 8], how="average"):
        assert all(torch.equal(tables.weight[i], mean) for i in (1, 2, 3))
    with edited(tables, [1, 2], [8, 7], how="average") as e:  # of equal length: one to one
        assert e.target.tolist() == [[8], [7]]
    with pytest.raises(ValueError, match="an average is the row of no id"):
        Mapped(tables, make_edit(tables, [1], [7, 8], how="average"))


@pytest.mark.parametrize(
    "args, words",
    [
        (([1], [1]), "the same"),
        (([], [1]), "empty"),
        (([1], []), "empty"),
        (([1, 1], [2]), "repeats"),
        (([1], [2], "best"), "how must be one of left, right"),
        (([1, 2], [3], "left"), "no <|endoftext|> to pad with"),
        (([1, 2], [3], "subset", 0), "too few"),
        (([1, 2], [3], "left", 0, True), "equally many tokens"),
        (([1, 2], [2, 3], "left", 0, True), "its places in the names differ"),
    ],
)
def test_an_edit_that_cannot_be_says_why(tiny, args, words):
    with pytest.raises(ValueError, match=words.replace("|", r"\|")):
        make_edit(tiny[1], *args)


def test_a_dense_model_has_no_rows_to_move():
    with pytest.raises(ValueError, match="dense"), edited(tiny_model(stem_every=0)[1], [1], [2]):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# As a user runs it.


def save(folder, model, tables, words=WORDS, **more):
    folder.mkdir(exist_ok=True)
    state = {"model_config": vars(model.config), "model": model.state_dict(), "tables": tables.state_dict()}
    checkpoint.save(folder / "best.pt", state | {"meta": {"tokenizer": "word", "vocab": words}} | more)


@pytest.fixture
def run(script, tmp_path, tiny):
    """run("--source=a", ..) edits a random model of 50 one-letter words and three layers, two of them STEM."""
    tiny[1].count[:] = torch.arange(50) + 1
    save(tmp_path / "run", *tiny, step=3)
    return lambda *args: script("edit.py", "--device=cpu", "--out_dir=run", *args)


def test_both_ways_and_offloaded_tables_print_the_same(run, tmp_path):
    bytes_before = (tmp_path / "run/best.pt").read_bytes()
    args = ("--source=a", "--target=g h", "--prompt=x {} y")
    outs = [run(*args, f"--way={way}", f"--offload={offload}") for way in ("rows", "ids") for offload in (False, True)]
    assert len({out.replace("by ids", "by rows") for out in outs}) == 1
    assert "prompt: x a y" in outs[0] and "'a' reads 'h'; left, by rows, layers all of 1, 2" in outs[0]
    assert "%" in outs[0] and "KL(before, after)" in outs[0] and "KL(before, after) 0.000" not in outs[0]
    assert (tmp_path / "run/best.pt").read_bytes() == bytes_before and os.listdir(tmp_path) == ["run"]


def test_what_is_printed_after_is_what_the_saved_checkpoint_says(run, script):
    """Nothing but the edit is between the two: the continuation after it, and sample.py on the saved file."""
    out = run("--source=a", "--target=g", "--prompt=x y {}", "--save=new", "--max_new_tokens=6")
    after = out.split("after:  ")[1].splitlines()[0]
    sampled = script("sample.py", "--device=cpu", "--out_dir=new", "--start=x y a", "--temperature=0",
                     "--max_new_tokens=6")
    assert sampled.splitlines()[1] == after != out.split("before: ")[1].splitlines()[0]


@pytest.mark.parametrize(
    "more", [[], ["--offload=True"], ["--prompt={}", "--way=ids"], ["--layers=2"], ["--swap=True"]]
)
def test_a_saved_checkpoint_differs_in_the_edited_rows_alone(run, tmp_path, more):
    old = checkpoint.load(tmp_path / "run")
    run("--source=a b", "--target=g h", "--save=some/new", *more)
    new = checkpoint.load(tmp_path / "some/new")
    expected, layers = old["tables"]["weight"].clone(), [1] if "--layers=2" in more else [0, 1]
    to = {1: 7, 2: 8} | ({7: 1, 8: 2} if "--swap=True" in more else {})
    for s, t in to.items():
        expected[s, layers] = old["tables"]["weight"][t, layers]
    assert torch.equal(new["tables"]["weight"], expected) and not torch.equal(expected, old["tables"]["weight"])
    for part in ("model", "tables"):
        same = [torch.equal(old[part][key], new[part][key]) for key in old[part] if (part, key) != ("tables", "weight")]
        assert all(same) and old[part].keys() == new[part].keys()
    rest = old.keys() - {"model", "tables"}
    assert new.keys() == old.keys() and all(old[key] == new[key] for key in rest)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--source=a", "--target=b"], "name a --prompt"),
        (["--source=a", "--target=b", "--prompt=x y"], "not in the prompt, which is 'x' . 'y'; source: 'a', target"),
        (["--source=a b", "--target=b", "--prompt=x a"], "not in the prompt"),
        (["--source=Spain", "--target=b", "--prompt={}"], "the word 'Spain' is not among the 50"),
        (["--source=a a", "--target=b", "--prompt={}"], "repeats.*; source: 'a' . 'a'"),
        (["--source=a", "--target=", "--prompt={}"], "a name is empty; source: 'a', target: nothing"),
        (["--source=a", "--target=b", "--prompt={}", "--layers=0,1"], "layers must be all or some of 1,2, got 0"),
        (["--source=a", "--target=b", "--prompt={}", "--layers="], "layers must be all"),
        (["--source=a", "--target=b c", "--prompt={}", "--how=average", "--way=ids"], "it has to be written"),
        (["--source=a", "--target=b", "--prompt={}", "--way=both"], "way must be rows or ids, got 'both'"),
        (["--source=a", "--target=b", "--save=run"], "run holds a checkpoint, which is never overwritten"),
        (["--source=a a", "--target=b", "--save=new"], "repeats"),
        (["--eval=True", "--split=val"], "split must be dev or test"),
        (["--eval=True", "--dataset=nosuch"], "there is no dataset"),
        (["--eval=True"], "does not say what it was trained on"),
        (["--out_dir=nosuch"], "there is no checkpoint"),
        (["--inspect=Spain"], "'Spain' is not among"),
        (["--inspect=a", "--twin=run"], "run is no dense model"),
    ],
)
def test_bad_input_gets_one_line_and_writes_nothing(run, tmp_path, args, words):
    before = (tmp_path / "run/best.pt").read_bytes()
    with pytest.raises((SystemExit, ValueError), match=words) as e:
        run(*args)
    assert "\n" not in str(e.value)
    assert os.listdir(tmp_path) == ["run"] and (tmp_path / "run/best.pt").read_bytes() == before


def test_only_questions_in_the_models_own_words_are_asked(script, tmp_path):
    model, tables, _ = rigged(True, tmp_path / "pets")
    args = ("edit.py", "--device=cpu", "--out_dir=run", "--eval=True", f"--dataset={tmp_path / 'pets'}")
    save(tmp_path / "run", model, tables, VOCAB[::-1])
    with pytest.raises(ValueError, match="another vocabulary"):
        script(*args)
    save(tmp_path / "run", model, tables, VOCAB)
    (tmp_path / "pets/questions.json").unlink()
    with pytest.raises(SystemExit, match="pets has no questions.json"):
        script(*args)


def test_a_dense_checkpoint_is_refused(script, tmp_path):
    save(tmp_path / "run", *tiny_model(stem_every=0))
    with pytest.raises(SystemExit, match="run is a dense model"):
        script("edit.py", "--device=cpu", "--out_dir=run", "--source=a", "--target=b", "--prompt={}")


def test_in_byte_pairs_a_leading_space_is_part_of_the_name(script, tmp_path):
    try:
        Tokenizer({"tokenizer": "gpt2"})
    except ValueError as e:
        pytest.skip(f"GPT-2's byte pairs are not here: {e}")
    model, tables = tiny_model(vocab_size=50257, n_layer=2, n_embd=8)
    save(tmp_path / "run", model, tables)
    loaded = checkpoint.load(tmp_path / "run")
    checkpoint.save(tmp_path / "run/best.pt", loaded | {"meta": {"tokenizer": "gpt2"}})
    args = ("edit.py", "--device=cpu", "--out_dir=run", "--target= Germany", "--prompt=The capital of {} is")
    assert "prompt: The capital of Spain is\n" in (out := script(*args, "--source= Spain"))
    assert "' Spain' reads ' Germany'" in out
    assert "' Liechtenstein'" not in (out := script(*args, "--source= Liechtenstein")) and "'<|endoftext|>'" in out
    with pytest.raises(SystemExit, match="not in the prompt, which is 'The'.* ' Spain'.*; source: 'Spain'"):
        script(*args, "--source=Spain")


def test_inspecting_names_the_nearest_row_and_the_spread(run, tiny, tmp_path):
    model, tables = tiny
    tables.weight[3] = 2 * tables.weight[1] + 1e-3 * tables.weight[4]
    tables.count[9] = 0  # never trained, so no neighbour
    tables.weight[9] = tables.weight[1]
    save(tmp_path / "run", model, tables)
    save(tmp_path / "dense", *tiny_model(stem_every=0))
    out = run("--inspect=a", "--twin=dense")
    assert "'a', 2 updates" in out and out.count("nearest 'c' 1.00") == 2 and "'i' 1.00" not in out
    assert out.count("table of layer") == out.count("of dense layer") == 2 and out.count("random rows") == 1


# ---------------------------------------------------------------------------------------------------------------------
# The exam, by models that are rigged.

ENTITIES = dict(zip(["A", "B", "C", "D", "E", "F", "G", "H", "P Z", "Q Z", "New X", "New Y"],
                    ["a", "b", "c c2", "d", "a", "f", "g", "h", "z", "z", "x", "y"]))
VOCAB = [END, "pet", "of", *"ABCDEFGHPQZXY", "New", *"abcdfghzxy", "c2", "rest", "rest2"]


def rigged(in_rows, folder):
    """(model, tables, data): each token says what comes next, by its row or else its embedding, blind to others."""
    V = len(VOCAB)
    model, tables = tiny_model(vocab_size=V, n_layer=2, stem_every=2, n_embd=V, d_ff=V, n_head=1)
    for name, p in model.named_parameters():
        if "norm" not in name:
            p.data.zero_()
    last = model.blocks[1].ffn
    for matrix, scale in ((last.w_gate, 1), (last.w_down, 50), (model.lm_head, 1)):
        matrix.weight.data = scale * torch.eye(V)
    after = torch.zeros(V, V)
    for name, answer in ENTITIES.items():
        ids = [VOCAB.index(word) for word in (*name.split()[-1:], *answer.split())]
        after[ids[:-1], ids[1:]] = 1
    model.wte.weight.data = torch.ones(V, V) if in_rows else torch.ones(V, V) + 50 * after
    tables.weight[:, 0] = after if in_rows else 0
    questions = [dict(prompt=f"pet of {name}", answer=answer, entity=name, attribute="pet", template_seen=seen)
                 for name, answer in ENTITIES.items() for seen in (True, False)]
    tokenizer = Tokenizer({"tokenizer": "word", "vocab": VOCAB})
    write_dataset(folder, tokenizer, list(range(V)) * 2, list(range(V)) * 2, questions)
    return model, tables, Dataset(folder, 16)


def test_a_model_that_knows_by_its_rows_passes(tmp_path):
    model, tables, data = rigged(True, tmp_path)
    exam = Exam(model, tables, data)
    assert exam.recall == recall(model, tables, data.tokenizer, data.questions)["recall"] == 1
    assert exam.grade([("A", "B"), ("B", "C"), ("C", "A"), ("A", "E")]) == {  # A and E have one answer: no question
        "success": 1, "changed": 1, "locality": 1, "shared": None, "pairs": 4, "questions": 3}
    assert exam.grade([("A", "B")], layers=[])["success"] == 0


def test_a_model_that_knows_by_its_embeddings_fails(tmp_path):
    exam = Exam(*rigged(False, tmp_path))
    figures = exam.grade([("A", "B"), ("B", "C")])
    assert exam.recall == 1 and figures["success"] == figures["changed"] == 0 and figures["locality"] == 1


def test_a_shared_token_costs_locality_and_the_rule_decides(tmp_path):
    """The last token answers: Z of both P Z and Q Z, but not New. 22 questions are about the other 11 entities."""
    exam = Exam(*rigged(True, tmp_path))
    both = exam.grade([("P Z", "A")])
    assert (both["success"], both["shared"], both["locality"]) == (1, 0, 1 - 2 / 22)
    assert exam.grade([("New X", "A")])["shared"] == 1
    success = {how: exam.grade([("New X", "A")], how)["success"] for how in ("left", "right", "copy")}
    assert success == {"left": 1, "right": 0, "copy": 1}
    success = {how: exam.grade([("A", "New X")], how)["success"] for how in ("left", "right", "average")}
    assert success == {"left": 1, "right": 0, "average": 1}  # New says nothing: the mean still points at x


def test_dev_and_test_pairs_share_no_entity(tmp_path, monkeypatch):
    exam, drawn = Exam(*rigged(True, tmp_path)), {}
    for split in ("dev", "test"):
        monkeypatch.setattr(edit, "split", split)
        found = exam.draw_pairs()
        assert found == exam.draw_pairs()
        drawn[split] = {name for couples in found.values() for couple in couples for name in couple}
    assert drawn["dev"] and drawn["test"] and not drawn["dev"] & drawn["test"]
    monkeypatch.setattr(edit, "pairs", 2)
    assert all(len(couples) <= 2 for couples in exam.draw_pairs().values())


def test_the_evaluation_is_printed_and_written(script, tmp_path):
    model, tables, data = rigged(True, tmp_path / "pets")
    save(tmp_path / "run", model, tables, VOCAB, settings={"dataset": str(tmp_path / "pets")})
    args = ("edit.py", "--device=cpu", "--out_dir=run", "--eval=True")
    script(*args, "--json=figures.json")
    out = script(*args)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["success"] == figures["changed"] == figures["locality"] == figures["recall"] == 1
    assert figures["split"] == "test" and figures["seed"] == 1 and figures["pairs"] > 2 and figures["strategies"]
    assert "single tokens              100.00 %" in out and "recall 100.00%" in out
    assert script(*args, "--offload=True") == out
