"""device.py on machines this one is not, by pretending."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from device import choose_device, compiled, peak_memory, rows_that_fit


@pytest.fixture
def machine(monkeypatch):
    """machine(cuda=True, bf16=False, mps=False) makes torch say so; every device can be allocated on."""

    def pretend(cuda=False, bf16=False, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch, "empty", lambda *_, device: None)

    return pretend


@pytest.mark.parametrize(
    "has, chosen",
    [
        (dict(), ("cpu", torch.float32)),
        (dict(mps=True), ("mps", torch.float32)),
        (dict(cuda=True, bf16=True, mps=True), ("cuda", torch.bfloat16)),
        (dict(cuda=True), ("cuda", torch.float16)),
    ],
)
def test_auto_takes_the_best_there_is_and_says_why(machine, capsys, has, chosen):
    machine(**has)
    assert choose_device("auto", "auto") == chosen
    out = capsys.readouterr().out
    assert out.count("(") == 2 and chosen[0] in out and str(chosen[1]).removeprefix("torch.") in out


def test_what_is_set_wins_and_cpu_asks_nothing_of_cuda(machine, monkeypatch):
    machine(cuda=True, bf16=False)
    assert choose_device("cuda:1", "bfloat16") == ("cuda:1", torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("cuda was touched"))
    assert choose_device("cpu", "auto") == ("cpu", torch.float32)


@pytest.mark.parametrize(
    "device, dtype", [("tpu", "auto"), ("meta", "auto"), ("cpu:x", "auto"), (True, "auto"), ("", "auto"), ("cpu", "i8")]
)
def test_what_is_not_here_is_refused(device, dtype):
    with pytest.raises(ValueError, match="^device|^dtype"):
        choose_device(device, dtype)


def test_mps_does_not_train_in_float16(machine):
    machine(mps=True)
    with pytest.raises(ValueError, match="except on mps"):
        choose_device("mps", "float16")


def test_compile_is_on_where_it_pays_or_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda f: f if f is torch.neg else "compiled")
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(2))
    for wish, device, model in (("auto", "cpu", "plain"), (False, "cuda", "plain"), (True, "cpu", "compiled")):
        assert compiled("plain", wish, device) == model
    assert compiled("plain", "auto", "cuda:1") == "compiled"
    assert capsys.readouterr().out.count("compile o") == 4


def test_cache_rows_are_as_set_or_half_the_free_memory(monkeypatch, capsys):
    """100,000 bytes free, rows of 2 layers of 10 numbers with moments: 240 bytes, so 208 of them in half of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000, 200_000))
    assert rows_that_fit(7, (50, 2, 10), 12, "cuda") == 7 and rows_that_fit(-1, (50, 2, 10), 12, "cpu") == 0
    assert rows_that_fit(-1, (999, 2, 10), 12, "cuda") == 208 and rows_that_fit(-1, (50, 2, 10), 12, "cuda:1") == 50
    assert rows_that_fit(-1, (50, 0, 10), 12, "cuda") == 50  # of a dense model
    assert capsys.readouterr().out.count("cache_rows ") == 4


def test_peak_memory_is_the_process_s_own():
    """A large parent's peak is none of a child's, and what a process has freed still counts."""
    parent = torch.ones(100_000_000)  # 400 MB
    code = "import torch; from device import peak_memory; torch.ones(50_000_000); print(peak_memory('cpu'))"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert peak_memory("cpu") > 4 * parent.numel()
    if sys.platform == "linux":
        assert 200_000_000 < int(child.stdout) < peak_memory("cpu") - 100_000_000
