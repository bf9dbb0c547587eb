"""
Settings are the plain globals at the top of a script. configure(globals()) lets config files and flags change them:

    python train.py config/stem_small.py --batch_size=32 --learning_rate=1e-3

A config file is Python that assigns the same names. Files apply from left to right, then flags, wherever they stand, then
nothing: a name that the script does not have, or a value of another type than its default, stops with one line. An int is
taken where a float is wanted, and a setting whose default is "auto" also takes True or False; nothing else is converted.
Lists are strings ("1,3,5"). --help prints every setting with its default and comment.

It also makes one line of the mistakes that surface later: a ValueError raised by this project's own code is a message to
the user and is printed as one; from anywhere else it is a bug and keeps its traceback.
"""

import difflib
import math
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def configure(g):
    """Apply sys.argv to the settings in g, a script's globals(); returns them all as a dict. SystemExit for what is wrong."""
    sys.excepthook = one_line
    settings = {name: value for name, value in g.items() if name[0] != "_" and type(value) in (bool, int, float, str)}
    if {"-h", "--help"} & set(sys.argv[1:]):
        print_help(g, settings)
        raise SystemExit(0)
    from_files, from_flags = {}, {}
    for arg in sys.argv[1:]:
        if not arg.startswith("-"):
            from_files |= read_file(arg, settings)
            continue
        name, equals, text = arg.removeprefix("--").partition("=")  # only the first = separates
        if not (arg.startswith("--") and equals):
            raise SystemExit(f"cannot read {arg!r}: settings are written --name=value")
        from_flags[name] = parse(name, text, settings)
    changed = from_files | from_flags
    g.update(changed)
    return settings | changed


def parse(name, text, settings):
    """A flag's text as a value of its setting's type."""
    default = known(name, settings, "flag")
    try:
        if type(default) is bool or (default == "auto" and text in ("True", "False")):
            return {"True": True, "False": False}[text]
        return checked(name, type(default)(text), default, "flag")
    except (ValueError, KeyError):
        raise SystemExit(f"--{name} must be {KIND[type(default)]} like {default!r}, got {text!r}") from None


def read_file(path, settings):
    """The settings that a config file assigns; it may use those of the script. Names with _, modules, functions are its own."""
    file = next((p for p in (Path(path), HERE / path) if p.is_file()), None)
    if file is None:
        there = ", ".join(sorted(p.stem for p in (HERE / "config").glob("*.py")))
        raise SystemExit(f"cannot read {path!r}: no such config file, and flags are written --name=value; config/ has {there}")
    names = dict(settings)
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    except Exception as e:
        raise SystemExit(f"config file {path}: {type(e).__name__}: {e}") from None
    assigned = {n: v for n, v in names.items() if n[0] != "_" and isinstance(v, (bool, int, float, str, list, tuple, dict, type(None)))}
    return {n: checked(n, v, known(n, settings, path), path) for n, v in assigned.items() if n not in settings or v is not settings[n]}


def known(name, settings, where):
    if name in settings:
        return settings[name]
    near = difflib.get_close_matches(name, settings, n=1)
    raise SystemExit(f"{where}: there is no setting {name!r}" + (f", did you mean {near[0]!r}?" if near else "; see --help"))


KIND = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}


def checked(name, value, default, where):
    if type(value) is int and type(default) is float:
        value = float(value)
    if type(value) is not type(default) and not (type(value) is bool and default == "auto"):
        raise SystemExit(f"{where}: {name} must be {KIND[type(default)]} like {default!r}, got {value!r}")
    if type(value) is float and not math.isfinite(value):
        raise SystemExit(f"{where}: {name} must be finite, got {value}")
    return value


def print_help(g, settings):
    print((g.get("__doc__") or "").strip(), "\n\nSettings, as --name=value:")
    source = Path(g["__file__"]).read_text(encoding="utf-8")
    for name, default in settings.items():
        comment = re.search(rf"^{name} = .*?  # (.*)$", source, re.MULTILINE)
        print(f"  --{name}={default}".ljust(38), comment[1] if comment else "")


def one_line(kind, error, traceback):
    """sys.excepthook: see the top of the file."""
    last = traceback
    while last and last.tb_next:
        last = last.tb_next
    ours = last and Path(last.tb_frame.f_code.co_filename).resolve().is_relative_to(HERE)
    if issubclass(kind, ValueError) and ours and "site-packages" not in last.tb_frame.f_code.co_filename:
        print(error, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
