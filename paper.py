"""
What "Scaling Transformers with Embedding Modules" (arXiv 2601.10639) and the articles on it claim, as functions that
look at runs of train.py. reproduce.py makes the runs and the report.

    cells, orders, figure = claim_1(runs)
runs(data, variant, **flags) gives the summaries of finished runs, one for each seed, each with its folder. cells are a
table, {row: {column: values over seeds}}; orders are (text, a, b), where values a are to be above values b; figure is
None or (label of x, label of y, {line: {x: values over seeds}}). A claim's docstring is its title and what is claimed.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import numpy as np

import checkpoint
from data.loader import Dataset, recall
from data.writer import replace

HERE = Path(__file__).resolve().parent
DENSE, HASH, GATE, ADD, HYBRID = "dense", "Hash-MoE", "gate", "add", "hybrid"
THIRD, HALF, FULL, EVERY = "STEM-1/3", "STEM-1/2", "STEM-full", "every layer"  # full leaves layer 0 dense
FACTS = "facts200"  # 8 facts about each of 200 invented towns
TOWNS = [12, 50, 100, 200, 400]
WINDOW = 100  # steps before, whose mean and deviation say what a spike is
NEEDLES, COPIES = [f"needle {n}" for n in (128, 256, 512, 1024)], [f"copy {n}" for n in (4, 8, 16)]

# ---------------------------------------------------------------------------------------------------------------------
# Measures.


def spikes(losses):
    """Of 1,000 steps, those whose loss is 2 deviations above the mean of the WINDOW before; of mere noise 23 are."""
    before = np.lib.stride_tricks.sliding_window_view(losses, WINDOW)[:-1]
    return 1000 * float((losses[WINDOW:] > before.mean(axis=1) + 2 * before.std(axis=1)).mean())


def roi(run, twin):
    """The paper's: score over GFLOPs a token (twice the active parameters), relative to the dense model's."""
    return run["recall"] / run["active_parameters"] / max(1e-9, twin["recall"] / twin["active_parameters"])


def heaps(lengths, distinct):
    """The exponent of distinct = K length^exponent, by least squares in logarithms."""
    return float(np.polyfit(np.log(lengths), np.log(distinct), 1)[0])


def edit_py(run, name, *args):
    """What edit.py says of a run; asked once and kept in its folder."""
    if not (path := run["folder"] / name).is_file():
        command = [sys.executable, HERE / "edit.py", f"--out_dir={run['folder']}", "--device=cpu", *args]
        replace(path, subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return path.read_text(encoding="utf-8")


def spread(run, twin, which):
    """P95 of |cos|, mean over the layers."""
    town = json.loads(Path(run["settings"]["dataset"], "questions.json").read_text(encoding="utf-8"))[0]["entity"]
    text = edit_py(run, "spread.txt", f"--inspect={town}", f"--twin={twin['folder']}")
    return mean(float(x) for x in re.findall(rf"{which}.*?(\d\.\d+)  \|", text))


def edits(run, figure):
    """A figure of edit.py --eval."""
    path = run["folder"] / "edit.json"
    edit_py(run, "edit.txt", "--eval=True", "--pairs=20", f"--json={path}")
    return json.loads(path.read_text(encoding="utf-8"))[figure]


def answers(run, kind):
    """Recall of data/needle's questions of a kind; of all kinds once, kept in the run's folder."""
    if not (path := run["folder"] / "asked.json").is_file():
        loaded, kinds = checkpoint.rebuild(checkpoint.load(run["folder"])), {}
        for q in json.loads(Path(run["settings"]["dataset"], "asked.json").read_text(encoding="utf-8")):
            kinds.setdefault(q["kind"], []).append(q)
        replace(path, json.dumps({kind: recall(*loaded, qs)["recall"] for kind, qs in kinds.items()}).encode())
    return json.loads(path.read_text(encoding="utf-8"))[kind]


COLUMNS = {  # how to print a number, how to get it from a run and, for those of TWINS, its dense twin
    "total M": (".3f", lambda run: 1e-6 * sum(run["parameters"].values())),
    "active M": (".3f", lambda run: 1e-6 * run["active_parameters"]),
    "MFLOP a token": (".3f", lambda run: 2e-6 * run["active_parameters"]),
    "val loss": (".3f", lambda run: run["val_loss"]),
    "recall": (".1%", lambda run: run["recall"]),
    "ROI": (".2f", roi),
    "spikes": (".0f", lambda run: spikes(np.loadtxt(run["folder"] / "log.csv", delimiter=",", skiprows=1, usecols=1))),
    "tokens a second": (",.0f", lambda run: run["tokens_per_second"]),
    "P95 of rows": (".3f", lambda run, twin: spread(run, twin, "table of layer")),
    "of the twin's W_u x": (".3f", lambda run, twin: spread(run, twin, "W_u x")),
    "of random rows": (".3f", lambda run, twin: spread(run, twin, "random rows")),
    "success": (".1%", lambda run: edits(run, "success")),
    "changed": (".1%", lambda run: edits(run, "changed")),
    "locality": (".1%", lambda run: edits(run, "locality")),
} | {kind: (".1%", lambda run, kind=kind: answers(run, kind)) for kind in NEEDLES + COPIES}
TWINS = {"ROI", "P95 of rows", "of the twin's W_u x", "of random rows"}


def measure(runs, settings, columns):
    """{label: {column: values over seeds}} of settings {label: (data, variant, more flags)}."""
    found = {label: runs(data, variant, **more) for label, (data, variant, more) in settings.items()}
    twins = {run["settings"]["seed"]: run for run in (runs(FACTS, DENSE) if TWINS & {*columns} else ())}

    def value(run, column):
        return COLUMNS[column][1](run, *[twins.get(run["settings"]["seed"])] * (column in TWINS))

    return {label: {c: [value(run, c) for run in group if c not in TWINS or run["settings"]["seed"] in twins]
                    for c in columns} for label, group in found.items()}


def order(cells, column, a, b, sign=1):
    """The claim that row a has more of a column than row b, or with sign = -1 less."""
    x, y = ([sign * value for value in cells[row][column]] for row in (a, b))
    return f"{a} has {'more' if sign > 0 else 'less'} {column} than {b}", x, y


# ---------------------------------------------------------------------------------------------------------------------
# Claims.


def claim_1(runs):
    """Variants at matched steps
    Paper, 350 M, mean of 8 tasks: dense 49.72, Hash-MoE 50.58, STEM-1/3 50.90, 1/2 54.20, full 53.43, gate 49.10, add
    50.60; ROI 1, 1.02, 1.08, 1.20, 1.33; no more loss spikes in STEM than in dense, unlike Hash-MoE. Hash-MoE, gate and
    add are in the layers of STEM-1/3. The plays are Shakespeare's, in 4,095 byte pairs and one for all the rarer.
    Tokens a second are those of runs side by side, and of whatever else there was to do; bench.py compares speed.
    """
    columns = ["total M", "active M", "MFLOP a token", "val loss", "spikes", "tokens a second"]
    names = (DENSE, HASH, THIRD, HALF, FULL, GATE, ADD)
    facts = measure(runs, {v: (FACTS, v, {}) for v in names}, [*columns, "recall", "ROI"])
    plays = measure(runs, {f"{v}, plays": ("plays", v, {}) for v in names}, columns)
    orders = []
    for a, b in ((HALF, THIRD), (FULL, THIRD), (THIRD, DENSE), (DENSE, GATE), (THIRD, ADD), (THIRD, HASH)):
        orders.append(order(facts, "recall", a, b))
        orders.append(order(plays, "val loss", f"{a}, plays", f"{b}, plays", -1))
    orders += [order(facts, "ROI", a, b) for a, b in ((HALF, THIRD), (FULL, HALF))]
    orders += [order(facts, "spikes", a, THIRD) for a in (DENSE, HASH)]
    worth = {v: {x["MFLOP a token"][0]: x["recall"]} for v, x in facts.items() if x["recall"]}
    return facts | plays, orders, ("MFLOP a token", "recall of facts", worth)


def claim_2(runs):
    """Angular spread of tables
    P95 of abs(cos) over pairs of a table's trained rows is 0.026 to 0.033: they spread more widely than up-projections.
    Of rows of M random numbers it is 1.96 / sqrt(M), and M is 96 here.
    """
    columns = ["P95 of rows", "of the twin's W_u x", "of random rows"]
    cells = measure(runs, {v: (FACTS, v, {}) for v in (THIRD, HALF, FULL)}, columns)
    return cells, [(f"{v}: cosines of the dense twin's W_u x are above those of rows", x["of the twin's W_u x"],
                    x["P95 of rows"]) for v, x in cells.items()], None


def claim_3(runs):
    """Capacity that grows with the context
    By Heaps' law the distinct tokens of a context, and with them the parameters in use, |S| d_ff L_uniq, grow less than
    linearly; FLOPs a token stay. Measured on Shakespeare in all of GPT-2's byte pairs; eighths of it stand for seeds,
    and S d_ff is the 96 of STEM-1/3 above.
    """
    parts = np.array_split(Dataset(HERE / "data/shakespeare", 1).tokens("train"), 8)
    counts = {n: [float(mean(len(np.unique(part[i : i + n])) for i in range(0, len(part) - n, max(n, 2048))))
                  for part in parts] for n in (2**i for i in range(5, 16))}
    exponents = [heaps(list(counts), distinct) for distinct in zip(*counts.values())]
    cells = {f"L = {n:,}": {"distinct tokens": c, "parameters in use": [96 * x for x in c]} for n, c in counts.items()}
    return (cells | {"Heaps exponent": {"distinct tokens": exponents}},
            [("capacity grows: the exponent is above 0", exponents, [0.0] * 8),
             ("less than linearly: 1 is above the exponent", [1.0] * 8, exponents)],
            ("context", "distinct tokens", {"Shakespeare": counts}))


def claim_4(runs):
    """Long contexts
    STEM's lead over dense in finding a needle grows from 8.4 to 13 % as contexts grow from 8k to 32k; pure STEM gives
    up a little in-context learning. Answers are one of 40 rivers; the learning rate is that chosen on facts.
    """
    cells = measure(runs, {v: ("needle", v, {}) for v in (DENSE, THIRD)}, NEEDLES + COPIES)
    needles, copies = ({v: [mean(x) for x in zip(*(cells[v][kind] for kind in kinds))] for v in cells}
                       for kinds in (NEEDLES, COPIES))
    lead = [[a - b for a, b in zip(cells[THIRD][kind], cells[DENSE][kind])] for kind in NEEDLES]
    return (cells, [(f"{THIRD} finds more needles than dense", needles[THIRD], needles[DENSE]),
                    ("its lead is larger at 1,024 than at 128", lead[-1], lead[0]),
                    (f"dense copies more than {THIRD}", copies[DENSE], copies[THIRD])],
            ("context", "needles found", {v: {int(k.split()[1]): cells[v][k] for k in NEEDLES} for v in cells}))


def claim_5(runs):
    """Knowledge capacity
    Knowledge gains most. Recall by the number of facts, at the steps of claim 1.
    """
    sizes = {8 * n: f"facts{n}" for n in TOWNS}
    found = {v: {n: [run["recall"] for run in runs(data, v)] for n, data in sizes.items()}
             for v in (DENSE, THIRD, FULL)}
    return ({f"{n:,} facts": {f"{v} recalls": found[v][n] for v in found} for n in sizes},
            [(f"of {n:,} facts {v} recalls more than dense", found[v][n], found[DENSE][n])
             for v in (THIRD, FULL) for n in sizes], (FACTS, "recall", found))


def claim_6(runs):
    """Learning rate and optimizer of tables
    The articles: 1.5 to 2 times the dense learning rate is best, and only rows of a batch's tokens need an update. With
    dense AdamW all rows are updated at every step. The runs are STEM-1/3's.
    """
    settings = {"1 times": (FACTS, THIRD, {"stem_lr_scale": 1.0}), "1.5 times, as elsewhere": (FACTS, THIRD, {}),
                "2 times": (FACTS, THIRD, {"stem_lr_scale": 2.0}),
                "1.5 times, dense AdamW": (FACTS, THIRD, {"dense_adamw": True})}
    cells = measure(runs, settings, ["val loss", "recall", "tokens a second"])
    one, half, two, dense = settings
    return cells, [order(cells, "val loss", a, b, -1) for a, b in ((half, one), (two, one), (half, dense))], None


def claim_7(runs):
    """Edits
    With swapped rows the model answers as of the other entity; the articles say in over 92 % of edits. By placement,
    and by the share of token embeddings that training hides.
    """
    settings = {f"{v}, {p:g} hidden": (FACTS, v, {"wte_dropout": p} if p else {}) for v in (THIRD, FULL, EVERY)
                for p in (0, 0.5)}
    cells = measure(runs, settings, ["success", "changed", "locality", "recall"])
    best = cells[f"{EVERY}, 0.5 hidden"]["success"]
    orders = [order(cells, "success", f"{v}, 0.5 hidden", f"{v}, 0 hidden") for v in (THIRD, FULL, EVERY)]
    return cells, [*orders, (f"{EVERY}, 0.5 hidden: success is above 92 %", best, [0.92] * len(best))], None


def claim_8(runs):
    """Accounting at 1B
    From config/stem_1b.py alone. The shape at 350 M is not published; the paper's rows are dense 0.37 B parameters in
    all and 0.74 GFLOPs a token, Hash-MoE 1.22 and 0.74, STEM-1/3 1.14 and 0.70, 1/2 1.85 and 0.67, full 3.25 and 0.60.
    """
    command = [sys.executable, HERE / "train.py", HERE / "config/stem_1b.py", "--dry_run=True"]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    active, dense, total = (1e-9 * float(re.search(rf"{name} +([\d,]+)", text)[1].replace(",", ""))
                            for name in ("active", "dense twin", r"twin \+ tables,"))
    pairs = {"dense, GFLOPs a token": (2 * dense, 3.00), f"{THIRD}, GFLOPs a token": (2 * active, 2.83),
             "dense, B parameters": (dense, 1.50), f"{THIRD}, B active": (active, 1.41),
             f"{THIRD}, B in all, with the W_u that it replaces": (total, 6.75)}
    return ({name: {"here": [a], "paper": [b]} for name, (a, b) in pairs.items()},
            [(f"{name}: half the last digit, 0.005, is above what it is off by", [0.005] * 2, [abs(a - b)] * 2)
             for name, (a, b) in pairs.items()], None)


def claim_9(runs):
    """Hybrid
    The articles: tables for frequent tokens, a matmul for rare ones. On plays, where the 512 most frequent read rows.
    """
    cells = measure(runs, {v: ("plays", v, {}) for v in (DENSE, THIRD, HYBRID)}, ["val loss"])
    return cells, [order(cells, "val loss", HYBRID, v, -1) for v in (DENSE, THIRD)], None
