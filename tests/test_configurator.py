"""configurator.py: what is applied, in which order, and what is refused, with which words."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

import configurator

SOURCE = '''"""A script."""
steps = 10  # how many
rate = 0.1  # how fast
name = "a"  # which
flag = False
mode = "auto"  # auto, True or False
'''


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """configure(args, {file: text}) runs a script with SOURCE's settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (tmp_path / "script.py").write_text(SOURCE)

    def run(*args, **files):
        for file, text in files.items():
            (tmp_path / f"{file}.py").write_text(text)
        g = {"__file__": str(tmp_path / "script.py"), "__doc__": "A script.", "sys": sys, "_own": 1}
        exec(SOURCE, g)
        monkeypatch.setattr(sys, "argv", ["script.py", *args])
        config = configurator.configure(g, minimum={"steps": -1})
        assert all(g[name] == value for name, value in config.items())
        return config

    return run


DEFAULTS = {"steps": 10, "rate": 0.1, "name": "a", "flag": False, "mode": "auto"}


def test_order_is_default_file_flag_wherever_the_flag_stands(configure):
    assert configure() == DEFAULTS
    assert configure("a.py", a="steps = 4") == DEFAULTS | {"steps": 4}
    assert configure("--steps=8", "a.py", a="steps = 4") == DEFAULTS | {"steps": 8}
    assert configure("a.py", "b.py", a="steps = 4\nrate = 1", b="steps = 5") == DEFAULTS | {"steps": 5, "rate": 1.0}


def test_a_file_may_use_loops_functions_and_comprehensions(configure):
    text = "_k = 2\ndef f(n): return n if n < 2 else f(n - 1)\nrate = f(5)\n"
    text += "for _i in range(3): steps = _i + sum([_k for _ in range(2)])"
    assert configure("a.py", a=text) == DEFAULTS | {"steps": 6, "rate": 1.0}


def test_a_later_file_can_restore_a_default_and_build_on_an_earlier_one(configure):
    assert configure("a.py", "b.py", a="steps = 4\nflag = True", b="steps = 10\nflag = False") == DEFAULTS
    assert configure("a.py", "b.py", a="steps = 4", b="steps = steps * 2")["steps"] == 8


def test_values_keep_their_type(configure):
    config = configure("--steps=-1", "--rate=1", "--name=x=--y=[1,3]", "--flag=True", "--mode=False")
    assert config == {"steps": -1, "rate": 1.0, "name": "x=--y=[1,3]", "flag": True, "mode": False}
    assert type(config["rate"]) is float and configure("--rate=1e-3")["rate"] == 1e-3
    assert configure("--name=1,3,5")["name"] == "1,3,5" and configure("--name=")["name"] == ""


def test_a_file_is_python_and_sees_the_settings(configure):
    assert configure(
        "a.py", a="import math\n_k = 3\nsteps = steps * _k\ndef f(): pass\nrate = math.sqrt(4)\nmode = True"
    ) == DEFAULTS | {"steps": 30, "rate": 2.0, "mode": True}


@pytest.mark.parametrize(
    "arg, words",
    [
        ("--stepz=1", ["stepz", "did you mean 'steps'"]),
        ("--steps=1.5", ["steps", "a whole number", "1.5"]),
        ("--steps=None", ["steps", "None"]),
        ("--rate=fast", ["rate", "a number"]),
        ("--rate=nan", ["rate", "at least 0"]),
        ("--rate=-0.5", ["rate must be at least 0"]),
        ("--steps=-2", ["steps must be at least -1"]),
        ("--flag=false", ["flag", "True or False"]),
        ("--flag=1", ["flag", "True or False"]),
        ("--steps", ["--steps", "--name=value"]),
        ("-steps=1", ["-steps=1", "--name=value"]),
        ("steps=5", ["steps=5", "--name=value"]),
        ("–-steps=5", ["–-steps=5"]),
        ("nosuch.py", ["nosuch.py", "no such file"]),
        ("--=1", ["no setting"]),
        ("--_own=2", ["_own"]),
    ],
)
def test_a_wrong_flag_stops_with_one_line(configure, arg, words):
    with pytest.raises(SystemExit) as e:
        configure(arg)
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("stepz = 1", ["stepz", "'steps'"]),
        ("steps = 1.0", ["steps", "1.0"]),
        ("steps = True", ["steps", "True"]),
        ("flag = 1", ["flag"]),
        ("name = None", ["name", "None"]),
        ("rate = [1]", ["rate"]),
        ("steps = ", ["a.py", "SyntaxError"]),
        ("steps = 1 / 0", ["ZeroDivisionError"]),
        ("mode = 3", ["mode"]),
    ],
)
def test_a_wrong_file_stops_with_one_line(configure, text, words):
    with pytest.raises(SystemExit) as e:
        configure("a.py", a=text)
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value)


def test_a_file_may_begin_with_a_byte_order_mark(configure):
    assert configure("a.py", a="\ufeffsteps = 3")["steps"] == 3


def test_help_lists_settings_defaults_and_comments(configure, capsys):
    with pytest.raises(SystemExit) as e:
        configure("--help")
    out = capsys.readouterr().out
    assert (
        e.value.code == 0 and "--steps=10" in out and "how many" in out and "--flag=False" in out and "--sys" not in out
    )


def test_the_real_script_says_it_in_one_line_also_without_asserts(tmp_path, script):
    args = [sys.executable, "-O", ROOT / "train.py", "--learning_rat=1e-3"]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "learning_rate" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    with pytest.raises(SystemExit, match="max_iters=5"):
        script("train.py", "max_iters=5")
    assert "--stem_every=" in script("train.py", "-h") and not list(tmp_path.iterdir())


def test_only_our_own_value_errors_become_one_line(tmp_path):
    """A bug that surfaces as a ValueError inside a library keeps its traceback."""
    for line, has_traceback in (
        ("from data.tokenizer import Tokenizer; Tokenizer({})", False),
        ("import json; json.loads('{')", True),
    ):
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['x']; import configurator; "
            f"configurator.configure({{'__file__': 'x'}}); {line}"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and ("Traceback" in done.stderr) == has_traceback


def test_a_pipe_that_closes_and_a_full_disk_leave_no_traceback(tmp_path):
    """As in `python train.py --help | head -1`, and where log.csv cannot grow."""
    setup = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['x']; import configurator; "
    setup += "configurator.configure({'__file__': 'x'}); "
    for line, said in (
        ("import os; os.close(1); os.dup2(os.pipe()[1], 1); print('x' * 10**6)", ""),
        ("print('x', file=open('/dev/full', 'w', buffering=1))", "No space left on device\n"),
    ):
        if "/dev/full" in line and not os.path.exists("/dev/full"):
            pytest.skip("no /dev/full on this system")
        done = subprocess.run([sys.executable, "-c", setup + line], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (1, said)
