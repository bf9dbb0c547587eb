"""sample.py as a user runs it, from a checkpoint alone."""

import pytest
import torch
from conftest import tiny_model

import checkpoint

WORDS = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"]


@pytest.fixture
def sample(script, tmp_path):
    """sample("--start=a b") continues with a random model of 50 one-letter words, written as a checkpoint."""
    model, tables = tiny_model(dropout=0.5)
    write(tmp_path / "run", model, tables, {"tokenizer": "word", "vocab": WORDS})
    return lambda *args: script("sample.py", "--device=cpu", "--out_dir=run", *args)


def write(folder, model, tables, meta):
    folder.mkdir(exist_ok=True)
    checkpoint.save(
        folder / "best.pt",
        {"model_config": vars(model.config), "meta": meta, "model": model.state_dict(), "tables": tables.state_dict()},
    )


def text_of(out):
    return out.split("\n", 1)[1]  # behind the line about the device


def test_a_prompt_is_continued_by_the_number_of_tokens_asked_for(sample):
    out = text_of(sample("--start=a b c", "--max_new_tokens=7", "--stop=False"))
    assert out.startswith("a b c ") and len(out.split()) == 10
    assert text_of(sample("--start=a b c", "--max_new_tokens=0")) == "a b c\n"
    assert len(text_of(sample("--start=a", "--max_new_tokens=40", "--stop=False")).split()) == 41  # beyond block_size


def test_the_seed_decides_and_dropout_is_off(sample):
    a, b, c = (text_of(sample("--start=a", "--stop=False", f"--seed={s}")) for s in (1, 1, 2))
    assert a == b != c
    greedy = {text_of(sample("--start=a", "--temperature=0", f"--seed={s}")) for s in (1, 2)}
    assert len(greedy) == 1
    assert {text_of(sample("--start=a", "--top_k=1", f"--seed={s}")) for s in (1, 2)} == greedy


def test_several_samples_differ_and_stop_at_the_documents_end(sample):
    lines = text_of(sample("--start=a", "--num_samples=5", "--temperature=2.0", "--max_new_tokens=200")).splitlines()
    assert len(set(lines)) == 5 and any(line.endswith(WORDS[0]) for line in lines)
    assert all(WORDS[0] not in line[: -len(WORDS[0])] for line in lines)


def test_an_empty_prompt_starts_a_document(sample):
    assert text_of(sample("--max_new_tokens=3", "--stop=False")).startswith(WORDS[0])


def test_a_prompt_from_a_file(sample, tmp_path):
    (tmp_path / "my prompt.txt").write_text("a b", encoding="utf-8")
    assert text_of(sample("--start=FILE:my prompt.txt", "--max_new_tokens=0")) == "a b\n"


def test_a_prompt_longer_than_the_context_is_cropped_and_said_so(script, sample):
    out = text_of(sample("--start=" + " ".join("ab" * 20), "--max_new_tokens=3", "--stop=False"))
    assert len(out.split()) == 43 and "the prompt has 40 tokens, the model reads the last 16" in script.err


@pytest.mark.parametrize(
    "args, words",
    [
        (["--start=a Spain"], "the word 'Spain' is not among the 50"),
        (["--out_dir=nosuch"], "there is no checkpoint"),
        (["--start=FILE:nosuch.txt"], "cannot read the prompt"),
        (["--top_k=-1"], "top_k must be at least 0"),
        (["--device=tpu"], "device tpu is not available"),
        (["--dtype=int8"], "dtype must be auto"),
        (["--temperature=-1.0"], "temperature"),
    ],
)
def test_bad_input_gets_one_line(sample, args, words):
    with pytest.raises((SystemExit, ValueError), match=words) as e:
        sample(*args)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_with_its_cache(sample, dtype):
    assert text_of(sample("--start=a", f"--dtype={dtype}", "--stop=False", "--max_new_tokens=30"))


def test_ids_beyond_the_tokenizer_are_not_drawn(script, tmp_path):
    """A model padded to 50 rows over a vocabulary of 3: of 60 tokens one would else be none of those."""
    torch.manual_seed(0)
    write(tmp_path / "padded", *tiny_model(), {"tokenizer": "word", "vocab": WORDS[:3]})
    out = script("sample.py", "--device=cpu", "--out_dir=padded", "--start=a", "--stop=False", "--max_new_tokens=60")
    assert set(text_of(out).split()) == set(WORDS[:3])


def test_an_unknown_character_of_the_console_costs_no_crash(script, tmp_path, monkeypatch):
    import io
    import sys

    letters = [chr(0x65E5 + i) for i in range(50)]
    write(tmp_path / "han", *tiny_model(), {"tokenizer": "char", "vocab": letters})
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", console)
    script("sample.py", "--device=cpu", "--out_dir=han", f"--start={letters[0]}", "--max_new_tokens=3")
    console.flush()
    assert console.buffer.getvalue().count(b"?") == 4


def test_a_model_of_nan_says_so(script, tmp_path):
    model, tables = tiny_model(vocab_size=3)
    tables.weight[:] = torch.nan
    write(tmp_path / "nan", model, tables, {"tokenizer": "word", "vocab": WORDS[:3]})
    with pytest.raises(ValueError, match="logits are nan"):
        script("sample.py", "--device=cpu", "--out_dir=nan", "--start=a")


def test_offloaded_tables_sample_the_same_text(sample):
    args = ("--start=a", "--stop=False", "--max_new_tokens=40")
    for more in ([], ["--cache_rows=2"], ["--cache_rows=-1"]):
        assert sample(*args, "--offload=True", *more).splitlines()[-1] == sample(*args).splitlines()[-1]


def test_int8_tables_are_rounded_unless_they_are_hot(script, tmp_path):
    """One large number makes its row's steps too large for the others."""
    model, tables = tiny_model()
    tables.weight[..., 0] *= 300
    write(tmp_path / "run", model, tables, {"tokenizer": "word", "vocab": WORDS})
    args = ("--out_dir=run", "--device=cpu", "--start=a", "--stop=False", "--max_new_tokens=40")
    full, hot, rounded = (
        script("sample.py", *args, *more)
        for more in (
            [],
            ["--offload=True", "--table_dtype=int8", "--cache_rows=50"],
            ["--offload=True", "--table_dtype=int8", "--cache_rows=3"],
        )
    )
    assert full == hot != rounded


def test_a_cache_and_int8_need_offload_and_a_dtype_that_is_one(sample):
    for flag, why in (("--table_dtype=int8", "need --offload"), ("--cache_rows=2", "need --offload"),
                      ("--table_dtype=int4", "float32 or int8, got 'int4'")):
        with pytest.raises(SystemExit, match=why):
            sample(flag)
