"""The comparison on associative recall: runs, resuming, and the report's numbers, plot and page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lrpe_md.scripts.ablate import app as ablate
from lrpe_md.scripts.ablate import report, report_recall
from lrpe_md.scripts.ablate import tasks as ablate_tasks
from lrpe_md.scripts.ablate.tasks import TASKS
from lrpe_md.scripts.common import plots
from scipy.stats import t as student
from scipy.stats import ttest_rel
from train_commands import die_after
from typer.testing import CliRunner, Result

SIZES = ("8x4x4", "16x4x4", "64x4x4", "8x8x8")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(ablate.app, list(args), env={"COLUMNS": "400", "NO_COLOR": "1"})


def command(out: Path, *more: str) -> list[str]:
    named = ["-e", "none", "-e", "rotate", "--attention", "add", "--attention", "delta", "--seeds", "2"]
    few = ["--set", "depth=1", "--set", "dim=8", "--set", "sizes=16x4x4"]
    return ["run", "recall", "--out", str(out), "--smoke", "--device", "cpu", "--workers", "1", *named, *few, *more]


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    done = invoke(*command(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    results = pd.read_csv(tmp_path / "out" / "results.csv")
    assert len(results) == 2 * 2 * 2 * 2 * 2  # memories, positions, seeds, kinds of questions, sizes
    assert set(ablate_tasks.COLUMNS) | {"question"} <= set(results)
    assert set(results.question) == {"by key", "by place"}
    assert list(dict.fromkeys(results["size"])) == ["8x4x4", "16x4x4"]
    assert results.value.between(0, 100).all()
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in done.output
    for name in ("frames.png", "frames-dark.png"):
        assert 5_000 < (tmp_path / "out" / name).stat().st_size < 300_000
    page = report.render(tmp_path / "out")
    assert (
        "![Accuracy of key lookups and place lookups, by number of frames](../../scripts/results/out/frames.png)"
        in page
    )


@pytest.mark.slow
def test_smoke_of_the_longer_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hybrids need four layers. The smoke test doesn't touch the folder of a real run."""
    monkeypatch.chdir(tmp_path)
    alone = ["-e", "decay,decay,decay,softmax/rotate-numerator", "-e", "softmax/rotate:base=100,learnable=true"]
    few = ["--device", "cpu", "--workers", "1", "--seeds", "1", "--set", "sizes=16x4x4"]
    done = invoke("run", "recall", "--full", "--smoke", *alone, *few)
    assert done.exit_code == 0, done.output
    assert [file.name for file in Path("runs").iterdir()] == ["ablate-recall-smoke"]
    assert "rotate-numerator        decay,decay,decay,softmax seed 0" in done.output
    assert "rotate:base=100,learnable=true softmax   seed 0" in done.output


@pytest.mark.slow
def test_a_killed_comparison_resumes_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--set", "steps=5", "--set", "save_every=2"]
    assert invoke(*command(tmp_path / "whole", *few)).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(ablate_tasks.recall, "batch", die_after(8, ablate_tasks.recall.batch, KeyboardInterrupt))
        assert invoke(*command(tmp_path / "out", *few)).exit_code == 130
    assert torch.load(tmp_path / "out" / "trainings" / "rotate-add-0" / "checkpoint.pt")["step"] == 2
    assert [file.name for file in (tmp_path / "out" / "runs").glob("*")] == ["none-add-0.json"]
    assert invoke(*command(tmp_path / "out", *few)).exit_code == 0
    for name in ("none-add-0.json", "rotate-add-0.json", "rotate-delta-1.json"):
        one, two = (json.loads((tmp_path / folder / "runs" / name).read_text()) for folder in ("whole", "out"))
        assert (one["values"], one["loss"]) == (two["values"], two["loss"])


def frame(values: dict[tuple[str, str], dict[str, list[list[float]]]]) -> pd.DataFrame:
    """Return a table of results. ``values`` maps (attention, encoding) to kinds, sizes, and accuracies by seed."""
    same = {"params": 1000, "loss": 0.5, "loss_rise": 0.01, "train_seconds": 30.0, "step_ms": 4.0, "tokens": 8000}
    rows = [
        {
            **same, "peak_mib": np.nan, "attention": attention, "encoding": encoding, "seed": seed,
            "question": f"by {kind}", "size": size, "value": value,
        }
        for (attention, encoding), kinds in values.items()
        for kind, sizes in kinds.items()
        for size, seeds in zip(SIZES, sizes, strict=True)
        for seed, value in enumerate(seeds)
    ]  # fmt: skip
    return pd.DataFrame(rows)


TRAINING = {
    "precision": "no", "compile": False, "values": 8, "keys": 9, "writes": 4, "questions": 2, "depth": 3, "heads": 5,
    "dim": 30, "batch": 32, "steps": 300, "lr": 2e-3,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "settings": {"task": "recall", "training": TRAINING},
    "environments": [{"gpu": "", "cpu": "A CPU", "torch": "2.11", "commit": "0123456789abcdef"}],
}
ADD = [[90.0, 91.0, 92.0], [70.0, 71.0, 72.0], [20.0, 22.0, 27.0], [80.0, 81.0, 82.0]]
DELTA = [[99.0, 99.5, 99.0], [98.0, 97.0, 99.0], [90.0, 95.0, 94.0], [79.0, 82.0, 84.0]]
PLACE = [[30.0, 31.0, 32.0]] * 4
RESULTS = frame({
    ("add", "none"): {"key": ADD, "place": PLACE}, ("delta", "none"): {"key": DELTA, "place": PLACE},
    ("add", "rotate"): {"key": PLACE, "place": ADD}, ("delta", "rotate"): {"key": ADD, "place": DELTA},
})  # fmt: skip


def rows_of(text: str, after: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of the first table behind a line, by memory and positions."""
    lines = text[text.index(after) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| memory"))
    assert lines[start] == f"| memory | positions | {' | '.join(SIZES)} |"
    found = {}
    for line in lines[start + 2 :]:
        if not line:
            break
        memory, positions, *cells = line.strip("| ").split(" | ")
        found[memory, positions] = cells
    return found


def test_numbers_of_the_tables() -> None:
    text = report_recall.markdown(RESULTS, CONFIG, "rotate")
    by_key, by_place = (rows_of(text, f"\n{kind} lookups:") for kind in ("Key", "Place"))
    assert list(by_key) == [("delta", "none"), ("add", "rotate"), ("add", "none"), ("delta", "rotate")]
    half = student.ppf(0.975, 2) * np.std(ADD[2], ddof=1) / np.sqrt(3)
    assert by_key["add", "none"][2] == f"23.0 ± {half:.1f}"
    assert by_key["add", "none"][0] == "91.0 ± 2.5"
    assert by_place["add", "rotate"] == by_key["add", "none"]

    differences = text[text.index("difference from add with the same positions") :]
    memories = rows_of(differences, "Key lookups")
    assert list(memories) == [("delta", "none"), ("delta", "rotate")]
    interval = ttest_rel(DELTA[2], ADD[2]).confidence_interval(0.95)
    mean, half = (interval.low + interval.high) / 2, (interval.high - interval.low) / 2
    assert memories["delta", "none"][2] == f"**{mean:+.1f} ± {half:.1f}**"
    assert memories["delta", "none"][3] == "+0.7 ± 3.8"  # it includes zero
    positions = rows_of(text[text.index("difference from rotate with the same memory") :], "Key lookups")
    assert list(positions) == [("add", "none"), ("delta", "none")]
    assert positions["add", "none"][0] == "+60.0"  # the same for all seeds
    other = report_recall.markdown(RESULTS, CONFIG, "delta/none")
    assert list(rows_of(other[other.index("difference from delta with") :], "Key")) == [
        ("add", "none"), ("add", "rotate")
    ]  # fmt: skip
    assert "difference from none with the same memory" in other

    assert "mean ± half-width of the 95% confidence interval (Student's t) over 3 seeds. Chance is 12.5%" in text
    assert "only questions in the last 8 frames count. The model has " in text
    assert "channels. Each run trained for 300 steps, at batch size 32 (" in text
    assert "learning rate 0.002, in float32. Settings that differ from the task's defaults: " in text
    assert "4 tokens each write one of 8 values under one of 9 keys" in text
    assert text.endswith("A CPU, torch 2.11, commit 0123456789ab.\n")
    single = report_recall.markdown(RESULTS[RESULTS.seed == 0], CONFIG, "rotate")
    assert "±" not in single
    assert "in bold if the interval excludes zero" in text
    assert "Bold" not in single
    assert "**" not in single
    assert "Difference" not in report_recall.markdown(RESULTS[RESULTS.attention == "delta"], CONFIG, "cosine")


def test_lines_of_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [("delta", "none"), ("add", "rotate"), ("add", "none"), ("delta", "rotate")]
    assert report_recall.select_lines(RESULTS, "by key") == every
    names = ["softmax", "add", "decay", "delta", "add,softmax", "decay,softmax", "delta,softmax"]
    many = frame({(name, "none"): {"key": ADD, "place": PLACE} for name in names})
    many = pd.concat([many, RESULTS[RESULTS.encoding == "rotate"]])
    best = report_recall.select_lines(many, "by key")
    assert len(best) == report_recall.LINES < len(names)
    assert best[0] == ("add", "rotate")  # 31 against 23
    assert ("add", "none") not in best
    assert report_recall.describe_lines(RESULTS) == ""
    assert report_recall.describe_lines(many).endswith(" on the longest clips. It only shows the best 6 memories.")
    few = many[many.attention.isin(names[:5]) | (many.encoding == "rotate")]
    assert report_recall.describe_lines(few).endswith(" on the longest clips.")
    assert report_recall.describe_lines(many) in report_recall.markdown(many, CONFIG, "rotate")
    figures: list[Any] = []
    monkeypatch.setattr(report_recall, "save", lambda figure, path: figures.append(figure))
    for results in (RESULTS, many, RESULTS[RESULTS.seed == 0]):
        report_recall.plot_recall(results, CONFIG, tmp_path / "frames.png")
    figure = figures[0]
    assert [axis.get_title() for axis in figure.axes] == ["Key lookups", "Place lookups"]
    texts = [label.get_text() for label in figure.axes[0].texts]
    assert texts == [*(", ".join(line) for line in every), "chance"]
    seeds, line, *_ = figure.axes[0].lines
    by_frames = [(8, 0), (16, 1), (64, 2)]
    assert sorted(zip(*seeds.get_data(), strict=True)) == sorted((n, x) for n, i in by_frames for x in DELTA[i])
    assert line.get_xdata().tolist() == [8, 16, 64]  # without the larger frames
    assert line.get_ydata().tolist() == pytest.approx([np.mean(each) for each in DELTA[:3]])
    labels = {label.get_text() for label in figures[1].axes[0].texts}
    assert {"add, rotate", "delta + softmax, none"} < labels
    plots.plt.close("all")


def test_labels_are_spread() -> None:
    assert report_recall.spread([10.0, 50.0, 11.0, 12.0], 6.0, 100.0) == [10.0, 50.0, 16.0, 22.0]
    assert report_recall.spread([99.0, 98.0, 50.0], 6.0, 100.0) == [100.0, 94.0, 50.0]
    assert report_recall.spread([], 6.0, 100.0) == []


def test_the_longer_comparison() -> None:
    select = ablate.select_encodings
    full = select(TASKS["recall"], None, None, True)
    mixed = [f"{name},{name},{name},softmax" for name in ("add", "decay", "delta")]
    assert list(full) == ["softmax", "add", "decay", "delta", *mixed]
    assert set(full["delta"]) == {"none", "rotate", "rotate-numerator", "rotate-both", "cosine-silu"}
    assert list(select(TASKS["recall"], None, None, False)) == ["softmax", "add", "decay", "delta"]
    assert select(TASKS["recall"], None, ["delta,softmax"], False) == {
        "delta,softmax": ["none", "rotate", "rotate-numerator"]
    }
    training = ablate.training_fields(TASKS["recall"], None, "cuda", True, False)
    config = TASKS["recall"].config(out=Path("out"), data="8x4x4", attention=mixed[2], device="cpu", **training)
    assert config.depth == 4
