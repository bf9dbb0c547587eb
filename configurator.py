"""
Settings are the plain globals at the top of a script. configure(globals()) lets config files and flags change them:

    python train.py config/stem_small.py --batch_size=32 --learning_rate=1e-3

A config file is Python that assigns the same names and may compute with them. Files apply from left to right, then
flags, wherever they stand. A name that the script does not have, or a value of another type than its default, stops
with one line; only an int does for a float, and True or False for "auto". Numbers are not negative unless the script
says so. Lists are strings ("1,3,5"). --help prints every setting with its default and comment.

A ValueError raised in this project's own files, and any OSError, is a message to the user and printed as one line,
whenever it comes.
"""

import ast
import difflib
import io
import os
import re
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
KIND = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
READ = {bool: {"True": True, "False": False}.__getitem__, int: int, float: float, str: str}


def configure(g, minimum=None):
    """Apply sys.argv to the settings in g, a script's globals(); returns all of them. SystemExit if one is wrong.

    minimum: {name: least value} of numbers for which it is not 0.
    """
    g.update(arguments(g, minimum))
    return settings_of(g)


def settings_of(g):
    """The settings in a script's globals: public names of plain values."""
    return {name: value for name, value in g.items() if name[0] != "_" and type(value) in KIND}


def arguments(g, minimum=None):
    """The settings that the command line's files and flags name, checked against those in g, which stay as they are."""
    sys.excepthook = one_line
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console that lacks a character shows ? for it
    settings, files, flags = settings_of(g), {}, {}
    if {"-h", "--help"} & set(sys.argv[1:]):
        print_help(g, settings)
        raise SystemExit(0)
    for arg in sys.argv[1:]:
        name, equals, text = arg.removeprefix("--").partition("=")  # only the first = separates
        if not arg.startswith("-"):
            files |= read_file(arg, settings | files)
        elif arg.startswith("--") and equals:
            flags[name] = value_of(text, settings.get(name))
        else:
            raise SystemExit(f"cannot read {arg!r}: settings are written --name=value")
    return {name: checked(name, value, settings, minimum or {}) for name, value in (files | flags).items()}


def read_file(path, settings):
    """What a config file, found from here or beside the scripts, assigns, be it what the setting was already."""
    file, names = next((p for p in (Path(path), HERE / path) if p.is_file()), None), dict(settings)
    if file is None:
        there = ", ".join(sorted(p.stem for p in (HERE / "config").glob("*.py")))
        raise SystemExit(f"cannot read {path!r}: no such file (config/ has {there}); flags are written --name=value")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8-sig"), str(file))
        exec(compile(tree, str(file), "exec"), names)
    except Exception as e:
        raise SystemExit(f"config file {path}: {type(e).__name__}: {e}") from None
    assigned = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name: names[name] for name in sorted(assigned) if name in names and name[0] != "_"}


def value_of(text, default):
    """A flag's text as a value of its setting's type; where it is none, as it stands, for checked() to refuse."""
    try:
        return READ[bool if default == "auto" else type(default)](text)
    except (KeyError, ValueError):
        return text


def checked(name, value, settings, minimum):
    """The value, if the setting exists and may have it."""
    if name not in settings:
        near = [f", did you mean {n!r}?" for n in difflib.get_close_matches(name, settings, n=1)]
        raise SystemExit(f"there is no setting {name!r}{near[0] if near else '; --help lists them, _names are free'}")
    default, least = settings[name], minimum.get(name, 0)
    if type(value) is int and type(default) is float:
        value = float(value)
    if type(value) is not type(default) and not (type(value) is bool and default == "auto"):
        raise SystemExit(f"{name} must be {KIND[type(default)]} like {default!r}, got {value!r}")
    if type(value) in (int, float) and not least <= value < 2**63:  # false for nan, too
        raise SystemExit(f"{name} must be at least {least} and below 2**63, got {value}")
    return value


def print_help(g, settings):
    """The script's docstring and every setting as --name=default, with the comment behind it in the source."""
    print((g.get("__doc__") or "").strip(), "\n\nSettings, as --name=value:")
    source = Path(g["__file__"]).read_text(encoding="utf-8")
    for name, default in settings.items():
        comment = re.search(rf"^{name} = .*?  # (.*)$", source, re.MULTILINE)
        print(f"  --{name}={default}".ljust(38), comment[1] if comment else "")


def one_line(kind, error, tb):
    """sys.excepthook: see the top of the file."""
    file = Path(traceback.extract_tb(tb)[-1].filename).resolve()
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif issubclass(kind, BrokenPipeError):  # | head has read enough; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    elif issubclass(kind, OSError) and error.strerror:  # a full disk, a file that may not be read
        print(": ".join(str(part) for part in (error.filename, error.strerror) if part), file=sys.stderr)
    elif issubclass(kind, ValueError) and HERE in file.parents and "site-packages" not in file.parts:
        print(error, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, tb)
