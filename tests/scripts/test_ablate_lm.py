"""The ablation of a tiny language model: shards, resuming, the report and its page."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from lrpe_md.scripts.ablate import app as ablate
from lrpe_md.scripts.ablate import report, report_lengths
from lrpe_md.scripts.common.folder import parse_shard
from lrpe_md.scripts.train.tasks.lm import SCALINGS
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(ablate.app, list(args), env={"COLUMNS": "400", "NO_COLOR": "1"})


@pytest.mark.slow
def test_shards_resume_and_report(tmp_path: Path, monkeypatch) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("Now is the winter of our discontent " * 60)
    command = ["run", "lm", str(text), "--smoke", "--device", "cpu", "--seeds", "2", "-e", "rotate", "-e", "none"]
    command += ["--out", str(out), "--workers", "1"]
    started, train = [], ablate.train

    def counted(comparison, file, job, *more) -> dict:
        started.append((job[0], job[2]))
        return train(comparison, file, job, *more)

    monkeypatch.setattr(ablate, "train", counted)
    first = invoke(*command, "--shard", "0/2")
    assert first.exit_code == 0, first.output
    assert started == [("rotate", 0), ("rotate", 1)]
    assert "not finished yet" in first.output
    assert not (out / "results.csv").exists()
    (out / "runs" / "none-softmax-1.json.77.part").write_text('{"enc')  # left by a killed process
    second = invoke(*command, "--shard", "1/2")
    assert second.exit_code == 0, second.output
    assert started[2:] == [("none", 0), ("none", 1)]

    results = report_lengths.parse(pd.read_csv(out / "results.csv"))
    variants = {("rotate", "none"), ("none", "none"), *(("rotate", s) for s in SCALINGS)}
    assert set(zip(results.encoding, results.positions, strict=True)) == variants
    whole = results[(results["first"] == 0) & (results["last"] == results.length)]
    assert len(whole) == len(variants) * 2 * 3
    assert results.value.between(3, 9).all()
    longest = results[results.length == 64]
    assert set(longest[longest["last"] < 64]["first"]) == {0, 1, 2, 4, 8, 16}
    table = (out / "table.md").read_text()
    assert table in second.output
    # 5% of the text is held out: 111 bytes, of which the last is only a target.
    assert "adjacent windows at the start of the held-out text, 64 to 96 bytes in total." in table
    assert "| rotate + yarn | " in table
    values, _, differences = table.partition("**Difference from")
    assert values.count("±") == 1 + len(variants) * 3
    assert "| rotate + yarn | +0.000 | " in differences  # scaling has no effect at the training length
    (none,) = (line for line in differences.splitlines() if line.startswith("| none |"))
    assert none.count("±") == 3
    assert 5_000 < (out / "lengths.png").stat().st_size < 300_000

    # If a result is lost, only that run is repeated, with the same result.
    lost = out / "runs" / "none-softmax-1.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    started.clear()
    assert invoke(*command).exit_code == 0
    assert started == [("none", 1)]
    after = json.loads(lost.read_text())
    assert all(before[key] == after[key] for key in ("values", "evaluation", "loss", "params", "tokens"))

    refused = invoke(*command, "--set", "length=32")
    assert refused.exit_code == 2
    assert "(--set length: 16 in the folder, 32 requested)" in refused.output

    lost.unlink()  # the report uses the remaining results
    assert invoke("report", "lm", "--folder", str(out)).exit_code == 0
    assert len(pd.read_csv(out / "results.csv").drop_duplicates(["encoding", "seed"])) == 3


def test_numbers_of_the_table(tmp_path: Path) -> None:
    same = {"attention": "softmax", "params": 1000, "train_seconds": 30.0, "tokens": 32768}
    rows = [
        {**same, "encoding": "rotate", "positions": scaling, "seed": seed, "size": size, "value": bits}
        for scaling, seed, size, bits in (
            ("none", 0, "512", 2.0), ("none", 1, "512", 2.2), ("none", 0, "1024", 5.0), ("none", 1, "1024", 7.0),
            ("yarn", 0, "512", 2.0), ("yarn", 1, "512", 2.2), ("yarn", 0, "1024", 2.5), ("yarn", 1, "1024", 2.5),
        )
    ]  # fmt: skip
    rows.append({**rows[2], "size": "1024:512-1024", "value": 9.0})  # results by position are not in the table
    training: dict[str, Any] = {"length": 512, "steps": 2000, "batch": 64, "lr": 1e-3, "test_bytes": 1024}
    training |= {"precision": "bf16", "compile": False, "size": "small"}
    here = {"gpu": "A GPU", "cpu": "", "torch": "2.11", "commit": "0123456789abcdef"}
    config = {"settings": {"task": "lm", "seeds": 2, "training": training}, "environments": [here]}
    lines = report_lengths.markdown(pd.DataFrame(rows), config, "rotate").splitlines()
    untimed = report_lengths.markdown(pd.DataFrame(rows).assign(train_seconds=None), config, "rotate")
    assert "each run took 30 to 30 s." in lines[-1]
    assert "each run took" not in untimed
    assert "Each length is evaluated on the same 1,024 bytes." in lines[0]
    assert "Lengths without results, because they are too long for the held-out text: 2,048, 4,096, 8,192." in lines[0]
    assert "The model has 6 layers with 6 heads and 384 channels. Each run trained for 2,000 steps, at" in lines[0]
    assert "at batch size 64 (32,768 tokens) and learning rate 0.001, in bf16." in lines[0]
    assert lines[2:6] == [
        "| encoding | parameters | 512 | 1,024 |",
        "| --- | ---: | ---: | ---: |",
        "| rotate + yarn | 1,000 | 2.100 ± 0.141 | 2.500 ± 0.000 |",
        "| rotate | 1,000 | 2.100 ± 0.141 | 6.000 ± 1.414 |",
    ]
    assert "Measured on A GPU, torch 2.11, commit 0123456789ab; each run took 30 to 30 s." in lines
    (start,) = (i for i, line in enumerate(lines) if line.startswith("**Difference from rotate.** Results are paired"))
    assert lines[start + 2 : start + 6] == [
        "| encoding | 512 | 1,024 |",
        "| --- | ---: | ---: |",
        "| rotate + yarn | +0.000 | -3.500 ± 12.706 |",
        "",
    ]

    # An encoding with a single seed so far has no standard deviation.
    single = [{**row, "encoding": "cosine"} for row in rows if row["seed"] == 0 and row["positions"] == "none"]
    partial = report_lengths.markdown(pd.DataFrame([*rows, *single]), config, "rotate").splitlines()
    assert "| cosine | 1,000 | 2.000 | 5.000 |" in partial

    # Kinds of attention are not averaged, and each is compared with its own baseline.
    linear = [{**row, "attention": "linear", "value": row["value"] + 1} for row in rows]
    both = report_lengths.markdown(pd.DataFrame([*rows, *linear]), config, "rotate").splitlines()
    assert "| softmax/rotate | 1,000 | 2.100 ± 0.141 | 6.000 ± 1.414 |" in both
    assert "| linear/rotate | 1,000 | 3.100 ± 0.141 | 7.000 ± 1.414 |" in both
    assert "| linear/rotate + yarn | +0.000 | -3.500 ± 12.706 |" in both
    across = report_lengths.markdown(pd.DataFrame([*rows, *linear]), config, "softmax/rotate").splitlines()
    assert "| linear/rotate | +1.000 | +1.000 |" in across


@pytest.mark.parametrize(("low", "high"), [(2.1, 2.4), (1.95, 2.05), (3.05, 3.9), (1.8, 4.2)])
def test_the_plot_has_at_least_two_ticks(tmp_path: Path, monkeypatch, low: float, high: float) -> None:
    rows = [
        {"encoding": name, "attention": "softmax", "positions": "none", "seed": 0, "size": size, "value": value}
        for name, value in (("rotate", low), ("cosine", high))
        for size in ("512", "1024", "1024:0-512", "1024:512-1024")
    ]
    figures = []
    monkeypatch.setattr(report_lengths, "save", lambda figure, path: figures.append(figure))
    config = {"settings": {"training": {"length": 512}}}
    report_lengths.plot_lengths(pd.DataFrame(rows), config, tmp_path / "lengths.png")
    axis = figures[0].axes[0]
    bottom, top = axis.get_ylim()
    assert bottom < low < high < top
    assert sum(bottom <= tick <= top for tick in axis.get_yticks()) >= 2


@pytest.mark.parametrize("shard", ["1/1", "a/2", "2", "-1/2", "0/0"])
def test_shard_errors(shard: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected i/n"):
        parse_shard(shard)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    refused = invoke("report", "lm", "--folder", str(tmp_path))
    assert refused.exit_code == 2
    assert "found neither" in refused.output


def test_the_page_shows_the_plot_and_the_table() -> None:
    page = report.render(report.committed("lm"))
    assert "![Bits per byte by length and by position](../../scripts/results/ablate-lm/lengths.png)\n\n" in page
    assert (report.committed("lm") / "table.md").read_text(encoding="utf-8") in page
