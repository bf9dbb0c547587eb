"""data/*/prepare.py on real text: downloads that fail, documents by the stream, what a kill leaves."""

import hashlib
import json
import os
import re
import select
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from conftest import ROOT

import data.writer
from data.loader import Dataset
from data.tokenizer import END, Tokenizer
from data.writer import write_dataset

NEEDS_BYTE_PAIRS = pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ, reason="GPT-2's byte pairs would have to be downloaded"
)


@pytest.fixture
def words(tmp_path):
    """A dataset folder whose vocabulary is the words w0 to w99."""
    tokenizer = Tokenizer({"tokenizer": "word", "vocab": [END, *(f"w{i}" for i in range(100))]})
    write_dataset(tmp_path / "words", tokenizer, [1] * 20, [1] * 20)
    return tmp_path / "words"


@pytest.fixture
def server(monkeypatch):
    """server(status, body): what the text's address answers from then on; returns the address."""
    answer = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answer["status"])
            self.send_header("Content-Length", answer.get("length", len(answer["body"])))
            self.end_headers()
            self.wfile.write(answer["body"])

        def log_message(self, *args):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setattr(data.writer, "URL", f"http://127.0.0.1:{http.server_port}/input.txt")
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield lambda **what: answer.update(what) or data.writer.URL
    http.shutdown()
    http.server_close()


def decoded(folder, split):
    meta = json.loads((folder / "meta.json").read_text())
    return Tokenizer(meta).decode(np.fromfile(folder / f"{split}.bin", meta["dtype"]).tolist())


# ---------------------------------------------------------------------------------------------------------------------
# One text.


def test_any_text_becomes_characters(script, tmp_path):
    text = "naïve — “x” 日本 😀\r\n" * 20
    (tmp_path / "my text.txt").write_bytes(text.encode())
    script("data/shakespeare_char/prepare.py", f"--input={tmp_path / 'my text.txt'}", f"--folder={tmp_path / 'd'}")
    val = decoded(tmp_path / "d", "val")
    assert decoded(tmp_path / "d", "train") + val == text and len(val) == len(text) // 10


@NEEDS_BYTE_PAIRS
def test_any_text_becomes_byte_pairs(script, tmp_path):
    text = "naïve — “x” 日本 😀\n" * 20
    (tmp_path / "input.txt").write_text(text, encoding="utf-8", newline="")
    script("data/shakespeare/prepare.py", f"--folder={tmp_path}")  # an input.txt that lies there is taken
    assert decoded(tmp_path, "train") + decoded(tmp_path, "val") == text


@pytest.mark.parametrize(
    "content, words", [(None, "cannot read the text"), (b"abc", "too few"), (b"\xff\xfe\x00" * 9, "not UTF-8")]
)
def test_text_that_is_none_is_refused(script, tmp_path, content, words):
    if content:
        (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        script("data/shakespeare_char/prepare.py", f"--input={tmp_path / 't.txt'}", f"--folder={tmp_path / 'd'}")
    assert not (tmp_path / "d").exists()


def test_the_text_is_fetched_once(script, server, monkeypatch, tmp_path):
    text = b"To be, or not to be\n" * 9
    monkeypatch.setattr(data.writer, "SHA256", hashlib.sha256(text).hexdigest())
    server(status=200, body=text)
    script("data/shakespeare_char/prepare.py", f"--folder={tmp_path / 'd'}")
    server(status=404, body=b"")
    script("data/shakespeare_char/prepare.py", f"--folder={tmp_path / 'd'}")
    assert sorted(os.listdir(tmp_path / "d")) == ["input.txt", "meta.json", "train.bin", "val.bin"]


@pytest.mark.parametrize(
    "answer, words",
    [
        (dict(status=404, body=b"<html>no such page</html>"), "404.*--input=FILE"),
        (dict(status=200, body=b"<html>please log in</html>"), "another file, 26 bytes"),
        (dict(status=200, body=b"To be, or", length=100), "IncompleteRead"),
    ],
)
def test_an_answer_that_is_not_the_text_is_refused(script, server, tmp_path, answer, words):
    """The line names the address and what came, and nothing is left behind."""
    url = server(**answer)
    with pytest.raises(ValueError, match=words) as e:
        script("data/shakespeare_char/prepare.py", f"--folder={tmp_path / 'd'}")
    assert url in str(e.value) and not (tmp_path / "d").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Documents. Their ids are made by other processes, so these run the real script.


def prepare(tmp_path, *args, script="data/openwebtext/prepare.py", **popen):
    return subprocess.run([sys.executable, ROOT / script, *args], cwd=tmp_path, capture_output=True, text=True, **popen)


def texts(n=1000):
    """n documents, all different."""
    return [" ".join(f"w{d}" for d in (i // 100, i // 10 % 10 + 10, i % 10 + 20, *range(30, 40))) for i in range(n)]


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def test_documents_are_split_by_their_text_and_none_is_lost(tmp_path, words):
    """Both forms of file and any number of processes give the same bytes; a copy falls on its original's side."""
    documents = texts()
    write_jsonl(tmp_path / "a.jsonl", documents + ["", "  "] + documents[:300])
    (tmp_path / "b.txt").write_text("\n--\n".join(documents + documents[:300]), encoding="utf-8")
    for name, *args in (("a.jsonl", "--num_proc=1"), ("b.txt", "--num_proc=2", "--separator=\n--\n")):
        common = (f"--input={name}", "--vocabulary=words", "--val_share=0.1", f"--folder=from {name}")
        done = prepare(tmp_path, *common, *args)
        assert done.returncode == 0, done.stderr
        assert "\r" not in done.stderr  # no bar in a file
    train, val = ([d.strip() for d in decoded(tmp_path / "from a.jsonl", s).split(END)[1:]] for s in ("train", "val"))
    assert sorted(train + val) == sorted(documents + documents[:300])
    assert not set(train) & set(val) and 50 < len(set(val)) < 150
    assert train == [d for d in documents + documents[:300] if d in set(train)]  # in the source's order
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "from a.jsonl" / name).read_bytes() == (tmp_path / "from b.txt" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "from b.txt")) == ["meta.json", "train.bin", "val.bin"]
    assert Dataset(tmp_path / "from b.txt", 8).tokenizer.end_id == 0


def test_a_stopped_preparation_goes_on_and_gives_the_same_bytes(tmp_path, words):
    """It stops at a bad line, with pieces done; a kill may leave more behind the last one than was recorded."""
    write_jsonl(tmp_path / "a.jsonl", texts())
    args = ("--vocabulary=words", "--val_share=0.1", "--num_proc=1", "--input=a.jsonl", "--folder=stopped")
    assert prepare(tmp_path, *args[:-1], "--folder=whole").returncode == 0
    good, time = (tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.jsonl").stat().st_mtime_ns
    lines = good.splitlines(keepends=True)
    lines[700] = lines[700].replace(b'"text"', b'"tixt"')

    def write(content):  # as if it had not been touched: a file that has is another, and begun anew
        (tmp_path / "a.jsonl").write_bytes(content)
        os.utime(tmp_path / "a.jsonl", ns=(time, time))

    write(b"".join(lines))
    stopped = prepare(tmp_path, *args)
    assert stopped.returncode == 1 and stopped.stderr == 'a.jsonl line 701 is not {"text": "..."}\n'
    documents = json.loads((tmp_path / "stopped" / "progress.json").read_text())["documents"]
    assert 0 < documents < 700 and not (tmp_path / "stopped" / "meta.json").exists()
    with open(tmp_path / "stopped" / "train.part", "ab") as part:
        part.write(b"half a piece")
    write(good)
    done = prepare(tmp_path, *args)
    assert done.returncode == 0 and f"going on after {documents} documents" in done.stdout
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_file_that_has_changed_is_begun_anew(tmp_path, words):
    """Documents of the old one must not be mixed with those of the new."""
    args = ("--vocabulary=words", "--val_share=0.000001", "--num_proc=1", "--input=a.jsonl", "--folder=d")
    for documents in (texts(150), texts(300)[150:]):
        write_jsonl(tmp_path / "a.jsonl", documents)
        done = prepare(tmp_path, *args)
        assert "going on" not in done.stdout and done.stderr.startswith("of 150 documents none fell to val")


@pytest.mark.skipif(sys.platform == "win32", reason="signals and processes are others there")
def test_a_killed_preparation_leaves_no_process(tmp_path, words):
    write_jsonl(tmp_path / "a.jsonl", texts() * 200)
    command = [sys.executable, ROOT / "data/openwebtext/prepare.py", "--input=a.jsonl", "--vocabulary=words"]
    read, write = os.pipe()  # held open by whoever is left of them
    run = subprocess.Popen([*command, "--num_proc=2", "--folder=d"], cwd=tmp_path, pass_fds=[write], stdout=write)
    os.close(write)
    while not (tmp_path / "d" / "progress.json").exists():
        assert run.poll() is None
    run.kill()
    run.wait()
    assert select.select([read], [], [], 20)[0] and os.read(read, 1000) == b""  # the end of the pipe
    os.close(read)


def test_two_at_once_do_not_mix(tmp_path, words):
    fcntl = pytest.importorskip("fcntl")
    write_jsonl(tmp_path / "a.jsonl", texts(10))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "progress.json").write_text("[]")  # damaged: begin anew
    args = ("--input=a.jsonl", "--vocabulary=words", "--val_share=0.5", "--num_proc=1", "--folder=d")
    with open(tmp_path / "d" / "train.part", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert prepare(tmp_path, *args).stderr == "another process is writing into d: wait for it, or set --folder\n"
    assert prepare(tmp_path, *args).returncode == 0


def test_memory_does_not_grow_with_the_corpus(tmp_path, words):
    """19 MB without a separator, which fill the queue, and 57 MB: the peak of the largest process hardly differs."""
    def peak(copies):
        (tmp_path / "big.txt").write_text((" ".join(texts(100)) + " ") * copies)
        argv = [sys.executable, str(ROOT / "data/openwebtext/prepare.py"), "--input=big.txt", "--vocabulary=words"]
        argv += ["--val_share=0.5", "--num_proc=1", f"--folder=big{copies}"]
        code = f"import resource, subprocess; subprocess.run({argv}, check=True); "
        code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.splitlines()[-1])

    assert (tmp_path / "words").exists() and peak(12_000) < peak(4_000) + 15_000  # KiB


@pytest.mark.parametrize(
    "args, line",
    [
        (["--input=nosuch.txt"], "nosuch.txt: No such file"),
        (["--input=bad.txt"], "bad.txt is not UTF-8"),
        (["--input=bad.jsonl"], "bad.jsonl line 2 is not"),
        (["--input=foreign.jsonl"], "'Spain' is not among the 101"),
        (["--input=one.jsonl"], "of 1 documents none fell to val: set --val_share"),
        (["--input=nested.jsonl"], "nested.jsonl line 1 is not"),
        (["--input=empty.txt"], "of 0 documents none fell to train: there is none in empty.txt"),
        (["--input=one.jsonl", "--val_share=1.0"], "val_share must lie between 0 and 1, got 1.0"),
        (["--input=one.jsonl", "--separator="], "separator is empty"),
        (["--input=one.jsonl", "--folder="], "folder is empty"),
        ([], "pip install datasets|cannot stream"),
    ],
)
def test_documents_that_are_none_are_refused_in_one_line(tmp_path, words, args, line):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n{"text": 5}\n')
    write_jsonl(tmp_path / "foreign.jsonl", ["w1 Spain"])
    write_jsonl(tmp_path / "one.jsonl", ["w1"])
    (tmp_path / "nested.jsonl").write_text('{"text":' + "[" * 200_000)
    (tmp_path / "empty.txt").write_text(" \n")
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = prepare(tmp_path, "--folder=d", *args, "--vocabulary=words", "--num_proc=1", env=offline)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert re.search(line, done.stderr) and not (tmp_path / "d" / "meta.json").exists()


def test_nothing_happens_at_import(tmp_path):
    """As in a spawned process, which imports the script under this name."""
    code = f"import runpy; runpy.run_path({str(ROOT / 'data/openwebtext/prepare.py')!r}, run_name='__mp_main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not os.listdir(tmp_path)


@NEEDS_BYTE_PAIRS
def test_a_million_equal_characters_are_encoded(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a" * 1_000_000, " " * 1_000_000 + "b", "other words"])
    done = prepare(tmp_path, "--input=a.jsonl", "--val_share=0.5", "--num_proc=1", "--folder=d", timeout=60)
    assert done.returncode == 0, done.stderr
    text = decoded(tmp_path / "d", "train") + decoded(tmp_path / "d", "val")
    assert text.count("a") == 1_000_000 and len(text.split(END)) == 1 + 8 + 2
