"""The report of linear attention from synthetic CSVs: tables and plots."""

import itertools
from unittest import mock

import pandas as pd
import pytest
from lrpe_md.scripts.bench import linear_measure, linear_report, linear_scaling, report
from lrpe_md.scripts.bench.app import app
from typer.testing import CliRunner

HERE = {"gpu": "made up", "versions": "torch 0", "commit": "0123"}


def make_row(workload, map, which, impl, share):
    return {"workload": workload, "map": map, "pass": which, "impl": impl, "ms": 1 / share, "share": share, **HERE}


def write_linear(folder):
    works = [*(w for w in linear_measure.WORKLOADS if not w.endswith(("-b2", "-as-64"))), "sana", "sana-module"]
    rows = []
    for n, (work, which) in enumerate(itertools.product(works, ("forward", "backward"))):
        rows += [make_row(work, map, which, "lrpe-md", 0.9 - 0.1 * i - 0.01 * n)
                 for i, map in enumerate(("rotate", "cosine", "none"))]  # fmt: skip
        rows += [make_row(work, "none", which, impl, 0.2 - 0.002 * n) for impl in ("SDPA", "unfused", "fla chunk")]
        rows.append(make_row(work, "cosine", which, "unfused, compiled", 0.15))
    rows.append({**make_row("sana", "rotate", "", "diffusers", 1.0), "ms": None, "share": None, "note": "no room"})
    pd.DataFrame(rows, columns=linear_measure.COLUMNS).to_csv(folder / linear_report.LINEAR, index=False)


def write_scaling(folder):
    rows = []
    for backbone, kind, tokens in itertools.product(
        linear_scaling.BACKBONES, linear_scaling.ATTENTIONS.values(), linear_scaling.TOKENS
    ):
        attention, map = kind
        ms = 20 + (tokens / 4096 if attention == "softmax" else 0) * 10
        row = {"backbone": backbone, "tokens": tokens, "attention": attention, "map": map, "mode": "eager", **HERE}
        numbers = {"ms": ms, "tokens_per_s": 65536e3 / ms, "peak_gib": 4 + tokens / 10000}
        left_out = attention == "softmax" and tokens == 262144
        rows.append({**row, **({"note": "left out: a step is expected to take 70 s"} if left_out else numbers)})
    rows[3]["note"] = linear_scaling.RECOMPUTED
    pd.DataFrame(rows, columns=linear_scaling.COLUMNS).to_csv(folder / linear_report.SCALING, index=False)


@pytest.fixture
def folder(tmp_path):
    write_linear(tmp_path)
    write_scaling(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_tables_and_plots(folder):
    done = CliRunner().invoke(app, ["report", str(folder), "--pages", str(folder)])
    assert done.exit_code == 0, (done.output, done.exception)
    text = (folder / "linear-attention.md").read_text(encoding="utf-8")
    assert "| **lrpe-md, rotate** | 0.90 (1.111) |" in text
    assert "| **lrpe-md, no positions** |" in text
    assert "* diffusers, sana, rotate: no room" in text
    assert "| **sana-module** | 21 × 30 × 52 | 0 | 1 | 20 | 112 | relu | unrotated | full |" in text
    assert "sana-module includes the norms" in text
    assert "| **causal128-long** | 32768 | 0 | 1 | 16 | 128 | relu | unrotated | causal |" in text
    assert "A batch has 65,536 tokens, or a single sample if that is longer" in text
    assert "the optimiser, in eager mode." in text
    assert "| vit | 256 | " in text
    assert f"({linear_scaling.RECOMPUTED})" in text
    assert "| vit | 262,144 | left out | " in text
    for name in (linear_report.BARS, linear_report.LINES):
        assert 10_000 < (folder / name).stat().st_size < 300_000
        assert f"scripts/results/{name}" in text
    assert "made up, torch 0, commit 0123" in text


def test_each_series_has_its_own_color():
    rows = linear_report.read_linear(report.PAGES.parents[1] / "scripts" / "results")
    series = linear_report.names(rows[rows.impl != "unfused"])
    assert len({linear_report.choose_color(*one) for one in series}) == len(series)


def test_maps_of_equal_speed_are_both_visible(folder):
    rows, drawn = linear_report.read_scaling(folder), []
    with mock.patch.object(linear_report, "save", lambda figure, path: drawn.append(figure)):
        assert linear_report.plot_scaling(rows, folder / linear_report.LINES)
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    below, above = lines["linear attention, cosine"], lines["linear attention, rotate"]
    assert below.get_ydata().tolist() == above.get_ydata().tolist()
    assert below.get_linewidth() > above.get_linewidth()
    assert below.get_markersize() > above.get_markersize()


def test_last_row_of_a_measurement_counts(tmp_path):
    rows = [make_row("vit224", "cosine", "forward", "lrpe-md", share) for share in (0.5, 0.7)]
    pd.DataFrame(rows, columns=linear_measure.COLUMNS).to_csv(tmp_path / linear_report.LINEAR, index=False)
    text = linear_report.section(tmp_path)
    assert "0.70 (" in text
    assert "0.50 (" not in text


def test_report_names_work_that_is_not_timed(tmp_path):
    rows = [make_row("causal", "none", "forward", impl, 0.5) for impl in ("fla", "SanaWM", "SanaWM, compiled", "bla")]
    for row, note in zip(rows, ("features", "angles", "angles", "features"), strict=True):
        row["note"] = f"{note} formed beforehand; relative error 0.1"
    pd.DataFrame(rows, columns=linear_measure.COLUMNS).to_csv(tmp_path / linear_report.LINEAR, index=False)
    text = linear_report.section(tmp_path)
    assert "The times of fla and bla exclude the activation. The times of SanaWM exclude the angles." in text


def test_steps_measured_again_replace_older_ones():
    """The front pages and both pages of results show the same cost of a model."""
    pages = {
        name: (report.PAGES / name).read_text(encoding="utf-8") for name in ("training-steps.md", "linear-attention.md")
    }
    rows = [next(line for line in text.splitlines() if line.startswith("| **axial**")) for text in pages.values()]
    first, second = (row.split(" | ")[1] for row in rows)
    assert first == second


def test_report_without_measurements_is_empty(tmp_path):
    assert linear_report.section(tmp_path) == ""
    assert linear_report.plots(tmp_path) == []


def test_operator_report_ignores_these_files(folder):
    assert not len(report.read(folder))
