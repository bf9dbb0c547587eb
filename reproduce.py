"""
The tables and figures of "Scaling Transformers with Embedding Modules" (arXiv 2601.10639) at laptop size.

    python reproduce.py                                # one seed; stop it when you like, the next call goes on
    python reproduce.py --seeds=3 --full=True          # a spread over seeds, and up to 10,000 facts: hours
    python reproduce.py --claims=1,5 --train=False     # a report on some claims, from the runs that there are

Asks paper.py which runs each claim needs, and runs train.py for those, two at a time with one thread each, but for
those that have finished. Writes REPORT.md, report/report.json and, with matplotlib, report/*.png: what is claimed, what
was measured, and what verdict() says to it. Exit code 1 if a run fails, or a claim that the report beside this script
has as holding: by more than the deviation over seeds it comes out the other way, that report's if there is one seed.

All variants train with the learning rate of RATES that is best for the dense model: lowest val loss at seed 1, which is
not reported. These models have 0.1 M parameters: they can show the sign of an effect, not its size at 350 M.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev, variance

import paper
from configurator import configure
from data.writer import replace

# ---------------------------------------------------------------------------------------------------------------------
seeds = 1  # that are reported: 2, 3, ...; seed 1 chooses the learning rate
full = False  # more facts, too
claims = "8,5,2,1,3,9,6,7,4"  # in the order in which they run
train = True  # False = write the report from the runs that have finished
jobs = 2  # runs at a time, of one thread each
out_dir = "out/reproduce"  # of runs and made data
report = ""  # where REPORT.md and report/ go, empty = out_dir

HERE = Path(__file__).resolve().parent
TRAIN = HERE / "train.py"
SHAPE = {"n_layer": 4, "n_head": 2, "n_embd": 32, "d_ff": 96, "batch_size": 16, "block_size": 32, "max_iters": 2000,
         "eval_interval": 0, "device": "cpu"}
SETTINGS = {"facts": SHAPE, "plays": SHAPE | {"max_iters": 800},
            "needle": SHAPE | {"max_iters": 800, "batch_size": 1, "block_size": 1024}}
VARIANTS = {"dense": {"stem_every": 0}, "Hash-MoE": {"stem_every": 3, "stem_variant": "hash"},
            "STEM-1/3": {"stem_every": 3}, "STEM-1/2": {"stem_every": 2}, "STEM-full": {"stem_every": 1},
            "gate": {"stem_every": 3, "stem_variant": "gate"}, "add": {"stem_every": 3, "stem_variant": "add"},
            "hybrid": {"stem_every": 3, "stem_variant": "hybrid"}, "every layer": {"stem_every": 1, "stem_first": 0}}
ALL = "123456789"  # claims
RATES = (3e-3, 6e-3, 1.2e-2, 2.4e-2)  # learning rates to choose from: on plays for plays, on facts for all else

# ---------------------------------------------------------------------------------------------------------------------
# Runs. A claim asks for those that it needs by runs(); what is missing is run, and the claim asked again.

wanted, failed = {}, {}  # folder -> flags of train.py; folder -> why it failed
rates = {}  # data -> learning rate


def get(data, variant, seed, **more):
    """A run's summary, with its folder; None if it has yet to run, or cannot. data: a folder of data/ and a size."""
    rate = more.get("learning_rate") or chosen(data)
    if not rate or not (dataset := made(data)):
        return None
    flags = SETTINGS[data.rstrip("0123456789")] | VARIANTS[variant] | {"dataset": str(dataset), "seed": seed}
    flags |= {"learning_rate": rate} | more
    name = "-".join([data, variant.replace("/", "_"), *(f"{k}{v:g}" for k, v in more.items()), f"seed{seed}"])
    folder = Path(out_dir, "runs", name)
    if has(folder, flags) and (folder / "summary.json").is_file():
        return json.loads((folder / "summary.json").read_text(encoding="utf-8")) | {"folder": folder}
    if folder not in failed:
        wanted[folder] = flags
    return None


def runs(data, variant, **more):
    """The summaries of the reported seeds, as far as there are any: what claims ask for."""
    return [s for i in range(seeds) if (s := get(data, variant, 2 + i, **more))]


def chosen(data):
    """The learning rate: that of the lowest val loss of the dense model at seed 1; None until all RATES have run."""
    data = "plays" if data == "plays" else paper.FACTS
    found = {rate: get(data, paper.DENSE, 1, learning_rate=rate) for rate in RATES}
    if all(found.values()):
        rates[data] = min(RATES, key=lambda rate: found[rate]["val_loss"])
    return rates.get(data)


def made(data):
    """The folder of data, such as facts300 about 300 towns, made if it is not there yet; None if it cannot be."""
    folder, (name, towns) = Path(out_dir, "data", data), re.fullmatch(r"(\D+)(\d*)", data).groups()
    if not (folder / "meta.json").is_file() and folder not in failed:
        flags = ["--countries=0", f"--towns={towns}"] if towns else []
        prepare = HERE / "data" / name / "prepare.py"
        if subprocess.run([sys.executable, prepare, f"--folder={folder}", *flags]).returncode:
            failed[folder] = "could not be made, for the reason above"
    return None if folder in failed else folder


def has(folder, flags):
    """Whether what is in folder came of these very flags."""
    path = folder / "flags.json"
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")) == flags


def start_run(folder, flags):
    """Start train.py, or let it go on. In a session of its own: a Ctrl-C that reached it twice would kill it."""
    resume = has(folder, flags) and (folder / "ckpt.pt").is_file()
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)  # what was measured of another run there
    replace(folder / "flags.json", json.dumps(flags).encode())
    args = [f"--{name}={value}" for name, value in (flags | {"out_dir": folder}).items()]
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        return subprocess.Popen([sys.executable, TRAIN, *args, *["--init_from=resume"] * resume], stdout=log,
                                stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)


def run_wanted(label):
    """Run what is wanted, `jobs` at a time. One that fails is noted, the others go on; Ctrl-C leaves all to resume."""
    queue, running, total, t0 = list(wanted.items()), {}, len(wanted), time.time()
    try:
        while queue or running:
            while queue and len(running) < jobs:
                folder, flags = queue.pop(0)
                running[folder] = start_run(folder, flags)
            time.sleep(0.1)
            for folder in [f for f, process in running.items() if process.poll() is not None]:
                said = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
                last = said[-1] if said else "it printed nothing"
                if running.pop(folder).returncode:
                    failed[folder] = last
                else:
                    (folder / "ckpt.pt").unlink(missing_ok=True)  # best.pt is of the same step
                done = total - len(queue) - len(running)
                left = (time.time() - t0) / done * (total - done) / 60
                print(f"{label}, run {done}/{total}, {left:.0f} min left  {folder.name}: {last}", flush=True)
    finally:  # nothing is running but after a Ctrl-C
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# The report.


def pooled(a, b):
    """The deviation over seeds of lists a and b, None if there is one seed."""
    return math.sqrt((variance(a) + variance(b)) / 2) if min(len(a), len(b)) > 1 else None


def verdict(a, b, known=None):
    """Is list a, over seeds, above list b by more than the pooled deviation, or with one seed by one that is known?"""
    if not a or not b:
        return "not run"
    difference, deviation = mean(a) - mean(b), pooled(a, b)
    deviation = known if deviation is None else deviation
    if deviation is None:
        return f"one seed: {'as' if difference > 0 else 'not as'} claimed"
    return "holds" if difference > deviation else "does not hold" if difference < -deviation else "not decided"


def show(values, form=""):
    """Mean ± standard deviation, if there is one."""
    form = form or (",.0f" if values and abs(mean(values)) >= 100 else ".4g")
    return " ± ".join(format(f(values), form) for f in (mean, stdev)[: len(set(values))]) or "-"


def draw(path, figure):
    """A figure's lines over seeds, with their deviation; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    x_label, y_label, lines = figure
    axes = (fig := Figure(figsize=(5, 3.2), layout="constrained")).subplots()
    for label, points in lines.items():
        xs = [x for x in points if points[x]]
        axes.errorbar(xs, [mean(points[x]) for x in xs], [stdev(points[x]) if len(points[x]) > 1 else 0 for x in xs],
                      marker="o", capsize=3, label=label)
    every = [x for points in lines.values() for x in points]
    axes.set(xlabel=x_label, ylabel=y_label, xscale="log" if max(every) > 2 * min(every) else "linear")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=80)
    return True


def table(head, rows):
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def write_report(results, into):
    """REPORT.md and what belongs to it, from {number: what its claim returned}. Returns {ordering: (a, b)}."""
    sections, found, summary = [], {}, []
    for number, (cells, orders, figure) in sorted(results.items()):
        title, claim = getattr(paper, f"claim_{number}").__doc__.split("\n", 1)
        columns = list(dict.fromkeys(c for row in cells.values() for c in row))
        form = {c: paper.COLUMNS.get(c, [".1%" if c.endswith("recalls") else ""])[0] for c in columns}
        rows = [[label, *(show(row.get(c, []), form[c]) for c in columns)]
                for label, row in cells.items() if any(row.values())]
        sections += [f"## {number}. {title}", re.sub(r"\s+", " ", claim).strip(), table(["", *columns], rows)]
        name = f"report/claim_{number}.png"
        if figure and any(any(points.values()) for points in figure[2].values()):
            drawn = draw(into / name, figure)
            sections.append(f"![{title}]({name})" if drawn else "(No figure: matplotlib is not installed.)")
        for text, a, b in orders:
            found[f"{number}. {text}"] = a, b
            summary.append([number, text, *(show([abs(x) for x in values]) for values in (a, b)), verdict(a, b)])
    missing = ", ".join(n for n in ALL if n not in results)
    how = (f"By `python reproduce.py --seeds={seeds}{' --full=True' * full}`, seeds {[*range(2, 2 + seeds)]}; sizes "
           f"and steps are at its top. Learning rates, the best of the dense model at seed 1: {rates}. A claim holds, "
           "or not, where two means differ by more than their pooled standard deviation over seeds; else it is not "
           "decided.")
    lines = ["# Report", __doc__.split("\n\n")[0].strip(), how + f" Not asked for: claims {missing}." * bool(missing),
             table(["claim", "that", "measured", "against", "verdict"], summary), *sections]
    lines += ["## Failed\n\n" + "\n".join(f"- {name}: {why}" for name, why in failed.items())] * bool(failed)
    replace(into / "REPORT.md", ("\n\n".join(lines) + "\n").encode())
    content = {"seeds": seeds, "full": full, "verdicts": {text: verdict(a, b) for text, (a, b) in found.items()},
               "deviations": {text: pooled(a, b) for text, (a, b) in found.items()},
               "claims": {n: r[0] for n, r in results.items()}}
    replace(into / "report/report.json", json.dumps(content, indent=1).encode())
    return found


# ---------------------------------------------------------------------------------------------------------------------


def main():
    """Runs and report; returns the exit code."""
    numbers, results, t0 = claims.split(","), {}, time.time()
    if unknown := [n for n in numbers if n not in [*ALL]]:
        raise SystemExit(f"claims must be some of {','.join(ALL)}, got {','.join(unknown) or 'none'}")
    if not out_dir:
        raise SystemExit("out_dir is empty: name a folder")
    paper.TOWNS += [1250] * full
    before, into = HERE / "report/report.json", Path(report or out_dir)
    before = json.loads(before.read_text(encoding="utf-8")) if before.is_file() else {"verdicts": {}}
    for n in numbers:
        while True:
            wanted.clear()
            try:
                results[n] = getattr(paper, f"claim_{n}")(runs)
            except ValueError as e:  # data that are not there
                results[n], failed[f"claim {n}"] = ({}, [], None), e
            if not (train and wanted):
                break
            run_wanted(f"claim {n}")
        found = write_report(results, into)  # after each claim, so that there is something to read
    print(table(["that", "verdict"], [(text, verdict(a, b)) for text, (a, b) in found.items()]))
    print(f"{into / 'REPORT.md'}, in {(time.time() - t0) / 60:.1f} min")
    lost = [text for text, word in before["verdicts"].items()
            if word == "holds" and text in found
            and verdict(*found[text], before["deviations"][text]) == "does not hold"]
    for problem in [f"held before: {text}" for text in lost] + [f"failed: {name}: {failed[name]}" for name in failed]:
        print(problem, file=sys.stderr)
    return 1 if lost or failed else 0


if __name__ == "__main__":
    configure(globals(), minimum={"seeds": 1, "jobs": 1})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
