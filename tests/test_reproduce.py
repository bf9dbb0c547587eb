"""reproduce.py and paper.py: the rules by hand, the queue with a train.py that only pretends, one run that does not."""

import json
import sys

import numpy as np
import pytest

import paper
import reproduce

FAKE = """
import json, pathlib, signal, sys, time
flags = dict(arg[2:].split("=", 1) for arg in sys.argv[1:])
out = pathlib.Path(flags["out_dir"])
print(flags["seed"], flags.get("init_from"), file=open(out.parent / "calls", "a"))
if flags["seed"] == BAD_SEED:
    sys.exit("the last line of a run that failed")
if SLOW:
    def stop(*args):
        (out / "ckpt.pt").touch()
        sys.exit(130)
    signal.signal(signal.SIGTERM, stop)
    (out / "started").touch()
    time.sleep(30)
better = SIGN * [0, 3, 2, 1][int(flags["stem_every"])] * (flags.get("stem_variant", "up") == "up")
loss = 2 - 0.1 * better + abs(float(flags["learning_rate"]) - 2) + 0.001 * int(flags["seed"])
(out / "log.csv").write_text("step,loss\\n" + "".join(f"{i},{loss + i % 7}\\n" for i in range(130)))
summary = {"val_loss": loss, "recall": 0.5 + 0.1 * better + 0.001 * int(flags["seed"]), "active_parameters": 100,
           "parameters": {"tables": 10}, "tokens_per_second": 1, "settings": {"seed": int(flags["seed"]),
           "learning_rate": float(flags["learning_rate"])}}
(out / "ckpt.pt").touch()
(out / "summary.json").write_text(json.dumps(summary))
print("done")
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """fake(SIGN=-1) puts a train.py in place whose models get better, or worse, by the number of their tables."""

    def install(BAD_SEED="none", SLOW=False, SIGN=1):
        values = f"BAD_SEED, SLOW, SIGN = {str(BAD_SEED)!r}, {SLOW}, {SIGN}\n"
        (tmp_path / "train.py").write_text(values + FAKE)

    monkeypatch.setattr(reproduce, "TRAIN", tmp_path / "train.py")
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    monkeypatch.setattr(reproduce, "out_dir", str(tmp_path / "out"))
    monkeypatch.setattr(reproduce, "RATES", (1, 2))
    monkeypatch.setattr(reproduce, "claims", "1")
    monkeypatch.setattr(reproduce, "made", lambda data: data)
    monkeypatch.setattr(reproduce, "wanted", {})
    monkeypatch.setattr(reproduce, "failed", {})
    monkeypatch.setattr(reproduce, "rates", {})
    install()
    return install


# ---------------------------------------------------------------------------------------------------------------------
# Rules.


@pytest.mark.parametrize(
    "a, b, word",
    [
        ([3.0, 3.2, 3.1], [1.0, 1.1, 1.2], "holds"),
        ([1.0, 1.1, 1.2], [3.0, 3.2, 3.1], "does not hold"),
        ([1.0, 3.0], [0.9, 3.2], "not decided"),
        ([1.0, 3.0], [1.0, 3.0], "not decided"),
        ([2.0], [1.0, 1.1], "one seed: as claimed"),
        ([1.0], [1.0], "one seed: not as claimed"),
        ([], [1.0], "not run"),
    ],
)
def test_the_rule_of_the_verdict(a, b, word):
    assert reproduce.verdict(a, b) == word


def test_one_seed_is_judged_by_a_known_deviation():
    for a, word in ((1.6, "holds"), (1.4, "not decided"), (0.6, "not decided"), (0.4, "does not hold")):
        assert reproduce.verdict([a], [1.0], 0.5) == word
    assert reproduce.verdict([1.0, 1.2], [1.3, 1.5], 0.5) == "does not hold"  # several have their own


def test_spikes_are_counted_by_the_window_before():
    losses = np.array([1.0, 1.2] * 300)  # mean 1.1, deviation 0.1: over 1.3 is a spike
    assert paper.spikes(losses) == 0
    losses[[250, 400]] = 1.5, 9.0
    assert paper.spikes(losses) == 2 / 500 * 1000
    noise = np.random.default_rng(0).normal(size=100_000)
    assert paper.spikes(noise) == pytest.approx(23, abs=3)


def test_roi_is_score_over_active_parameters_beside_the_dense_model():
    """The paper's row of STEM-full: 53.43 at 0.30 B against 49.72 at 0.37 B."""
    run, twin = ({"recall": a, "active_parameters": b} for a, b in ((53.43, 0.30e9), (49.72, 0.37e9)))
    assert paper.roi(run, twin) == pytest.approx(1.33, abs=0.01) and paper.roi(twin, twin) == 1


def test_heaps_exponent_of_a_power_law():
    lengths = [2**i for i in range(5, 12)]
    assert paper.heaps(lengths, [3 * n**0.7 for n in lengths]) == pytest.approx(0.7)


def test_the_1b_accounting_is_the_papers():
    cells, orders, _ = paper.claim_8(None)
    assert all(reproduce.verdict(a, b) == "holds" for _, a, b in orders) and len(orders) == 5
    assert cells["dense, GFLOPs a token"]["here"][0] == pytest.approx(2.997, abs=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Runs and report.


def calls(tmp_path):
    return (tmp_path / "out/runs/calls").read_text().splitlines()


def test_the_rate_is_chosen_at_seed_1_and_finished_runs_skipped(fake, tmp_path, capsys):
    assert reproduce.main() == 0
    n = 2 * (2 + 7)  # datasets; two rates of the dense model, and all variants at one reported seed
    assert len(calls(tmp_path)) == n and "min left" in capsys.readouterr().out
    assert reproduce.chosen("facts12") == 2
    assert reproduce.main() == 0 and len(calls(tmp_path)) == n
    text = (tmp_path / "out/REPORT.md").read_text()
    assert "model at seed 1: {'facts200': 2, 'plays': 2}." in text
    assert "STEM-full has more recall than STEM-1/3 | 0.802 | 0.602 | one seed: as claimed" in text
    report = json.loads((tmp_path / "out/report/report.json").read_text())
    assert report["verdicts"]["1. STEM-1/2 has more ROI than STEM-1/3"] == "one seed: as claimed"
    assert not list(tmp_path.rglob("ckpt.pt"))


def test_other_settings_are_another_run_of_which_nothing_was_measured(fake, tmp_path, monkeypatch):
    reproduce.main()
    n = len(calls(tmp_path))
    for data in ("plays", "facts200"):
        (tmp_path / f"out/runs/{data}-dense-seed2/edit.json").write_text("of the run before")
    monkeypatch.setitem(reproduce.SETTINGS, "plays", reproduce.SETTINGS["plays"] | {"max_iters": 7})
    reproduce.main()
    assert len(calls(tmp_path)) == n + n // 2
    assert not (tmp_path / "out/runs/plays-dense-seed2/edit.json").exists()
    assert (tmp_path / "out/runs/facts200-dense-seed2/edit.json").exists()


@pytest.mark.parametrize("sign, code", [(1, 0), (-1, 1)])
def test_a_claim_that_held_and_fails_is_an_error(fake, tmp_path, monkeypatch, capsys, sign, code):
    claim = "5. of 1,600 facts STEM-full recalls more than dense"
    monkeypatch.setattr(paper, "TOWNS", [200])
    monkeypatch.setattr(reproduce, "claims", "5")
    monkeypatch.setattr(reproduce, "seeds", 2)
    monkeypatch.setattr(reproduce, "report", str(tmp_path))
    assert reproduce.main() == 0
    assert f'"{claim}": "holds"' in (tmp_path / "report/report.json").read_text()
    fake(SIGN=sign)
    monkeypatch.setattr(reproduce, "out_dir", str(tmp_path / "new"))
    monkeypatch.setattr(reproduce, "report", str(tmp_path / "new"))
    assert reproduce.main() == code
    assert (f"held before: {claim}" in capsys.readouterr().err) == code


def test_a_run_that_fails_is_reported_and_the_others_finish(fake, tmp_path, monkeypatch, capsys):
    fake(BAD_SEED=3)
    monkeypatch.setattr(paper, "TOWNS", [200])
    monkeypatch.setattr(reproduce, "claims", "5")
    monkeypatch.setattr(reproduce, "seeds", 2)
    assert reproduce.main() == 1
    assert "facts200-dense-seed3: the last line of a run that failed" in capsys.readouterr().err
    text = (tmp_path / "out/REPORT.md").read_text()
    assert "## Failed" in text and "| of 1,600 facts STEM-full recalls more than dense | 0.802 | 0.502 |" in text


def test_ctrl_c_stops_the_runs_and_the_next_call_resumes_them(fake, tmp_path, monkeypatch):
    fake(SLOW=True)
    sleep, folder = reproduce.time.sleep, tmp_path / "out/runs/facts200-dense-seed2"

    def interrupt(seconds):
        sleep(seconds)
        if (folder / "started").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "chosen", lambda data: 1.0)
    reproduce.get("facts200", "dense", 2)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(reproduce.time, "sleep", interrupt)
        reproduce.run_wanted("")
    assert (folder / "ckpt.pt").exists() and not (folder / "summary.json").exists()
    fake()
    reproduce.run_wanted("")
    assert calls(tmp_path) == ["2 None", "2 resume"] and reproduce.get("facts200", "dense", 2)["val_loss"]


def test_without_matplotlib_the_report_has_tables(fake, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # import raises ImportError
    monkeypatch.setattr(reproduce, "claims", "5")
    assert reproduce.main() == 0
    text = (tmp_path / "out/REPORT.md").read_text()
    assert "matplotlib is not installed" in text and "| 3,200 facts | 50.2% | 60.2% | 80.2% |" in text


def test_unknown_claims_are_refused(monkeypatch):
    for claims in ("1,10", "12", ""):
        monkeypatch.setattr(reproduce, "claims", claims)
        with pytest.raises(SystemExit, match="some of 1,2,3"):
            reproduce.main()


def test_a_claim_without_its_data_is_a_failure(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "claims", "3")
    monkeypatch.setattr(paper, "HERE", tmp_path)
    assert reproduce.main() == 1
    assert "failed: claim 3: there is no dataset" in capsys.readouterr().err


def test_real_runs_have_what_claims_look_at(facts, monkeypatch, tmp_path):
    """A few steps on small facts, and every column but those that take longer: by train.py, edit.py and the log."""
    monkeypatch.setattr(reproduce, "out_dir", str(tmp_path))
    monkeypatch.setattr(reproduce, "made", lambda data: facts)
    monkeypatch.setattr(reproduce, "chosen", lambda data: 1e-2)
    few = {"max_iters": 3, "warmup_iters": 1, "eval_iters": 1, "n_layer": 3}
    monkeypatch.setitem(reproduce.SETTINGS, "facts", reproduce.SETTINGS["facts"] | few)
    monkeypatch.setattr(paper, "WINDOW", 2)
    for variant in ("dense", "STEM-1/3"):
        reproduce.get(paper.FACTS, variant, 2)
    reproduce.run_wanted("")
    assert not reproduce.failed
    longer = {"success", "changed", "locality", *paper.NEEDLES, *paper.COPIES}
    columns = [c for c in paper.COLUMNS if c not in longer]
    cells = paper.measure(reproduce.runs, {"x": (paper.FACTS, "STEM-1/3", {})}, columns)["x"]
    assert all(len(values) == 1 for values in cells.values())
    assert 0 < cells["P95 of rows"][0] < 1 and cells["MFLOP a token"][0] == 2 * cells["active M"][0]


# ---------------------------------------------------------------------------------------------------------------------
# Data.


def test_needles_are_told_in_the_prompt(script, tmp_path):
    script("data/facts/prepare.py", "--towns=40", "--repeats=1", f"--folder={tmp_path / 'hay'}")

    def prepare(name):
        few = "--documents=20", "--asked=2", f"--source={tmp_path / 'hay'}"
        script("data/needle/prepare.py", *few, f"--folder={tmp_path / name}")
        return {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}

    files = prepare("a")
    assert files == prepare("b") and sorted(files) == ["asked.json", "meta.json", "train.bin", "val.bin"]
    for q in json.loads(files["asked.json"]):
        kind, size = q["kind"].split()
        words = q["prompt"].split()
        if kind == "needle":
            asking = " ".join(words[-6:])
            assert len(words) == int(size) - 1 and asking.endswith("is the")
            assert f"{asking} {q['answer']} ." in q["prompt"]
        else:
            assert f"{words[-1]} {q['answer']} ." in q["prompt"] and len(words) == 3 * int(size) + 1


@pytest.mark.parametrize(
    "flag, why",
    [
        ("--pairs=999", "pairs must be numbers from 1 to"),
        ("--lengths=x", "lengths must be numbers from 32 to"),
        ("--depths=3", "depths must be numbers from 0 to 1, with commas between; got '3'"),
        ("--countries=0", "no facts about countries and towns"),
        ("--countries=3", "too few countries or rivers"),
    ],
)
def test_needles_that_cannot_be_are_refused(script, tmp_path, flag, why):
    countries = flag if flag.startswith("--countries") else "--countries=4"
    script("data/facts/prepare.py", countries, "--towns=12", "--repeats=1", f"--folder={tmp_path / 'hay'}")
    with pytest.raises(SystemExit, match=why):
        flags = [flag] if flag != countries else []
        script("data/needle/prepare.py", f"--source={tmp_path / 'hay'}", *flags, f"--folder={tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()


def test_plays_are_numbered_by_frequency(script, facts, tmp_path):
    script("data/plays/prepare.py", "--pieces=20", f"--source={facts}", f"--folder={tmp_path / 'p'}")
    ids, old = (np.fromfile(folder / "train.bin", np.uint16) for folder in (tmp_path / "p", facts))
    counts = np.bincount(ids, minlength=21)
    assert (np.diff(counts[:20].astype(int)) <= 0).all() and counts[20] == len(ids) - counts[:20].sum() > 0
    vocab = json.loads((tmp_path / "p/meta.json").read_text())["vocab"]
    assert [int(vocab[i]) for i in ids[ids < 20]] == old[ids < 20].tolist()
