"""scripts.bench my-shapes at tiny sizes on a CPU: peers, messages, errors, output."""

import csv
import io

import pytest
import torch
from lrpe_md.scripts.bench import my_shapes, peers
from lrpe_md.scripts.bench.app import app
from lrpe_md.scripts.bench.my_shapes import Found, Shapes, Time
from lrpe_md.scripts.bench.peers import OURS, PEERS
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import lrpe_md
from lrpe_md import Grid

SMALL = ("--batch", "1", "--heads", "2", "--grid", "3x4", "--head-dim", "16", "--device", "cpu", "--commit", "abc")


def invoke_small(*args):
    """Run the command with SMALL, except for options in args."""
    pairs = zip(SMALL[::2], SMALL[1::2], strict=True)
    return invoke(*(part for pair in pairs if pair[0] not in args for part in pair), *args)


def invoke(*args):
    return CliRunner().invoke(app, ["my-shapes", *map(str, args)], env={"COLUMNS": "200"})


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_cpu_times_the_reference_under_its_name(tmp_path):
    out = tmp_path / "mine.csv"
    done = invoke_small("--map", "both", "--prefix", 1, "--linear", "--out", out)
    assert done.exit_code == 0, done.output
    assert "PyTorch finds no GPU, so the kernels can't be measured" in done.output
    assert "they say nothing about a GPU" in done.output
    assert "saved by" not in done.output
    rows = [row for row in read(out) if row["mode"] != "copy"]
    assert {row["peer"] for row in rows} == {my_shapes.STAND_IN, "timm, eager"}
    assert {(row["op"], row["mode"]) for row in rows} == {(a, b) for a in ("rotate", "cosine") for b in ("fwd", "bwd")}
    for row in rows:
        assert row["workload"] == "batch 1, heads 2, grid 3x4, prefix 1, half"
        assert float(row["p50"]) > 0
        assert (row["num_tokens"], row["gpu"], row["commit"]) == ("13", "cpu", "abc")
        assert row["torch"]
        assert row["date"]
    linear = read(tmp_path / "mine-linear.csv")
    assert {(row["map"], row["impl"]) for row in linear} == {
        ("rotate", "lrpe-md"), ("cosine", "lrpe-md"), ("rotate", "unfused"), ("cosine", "unfused"), ("none", "SDPA")
    }  # fmt: skip
    assert not [row["note"] for row in linear if row["note"]]
    for what in ("rotate", "cosine", "linear attention, rotate", "linear attention, cosine"):
        assert f" {what}, milliseconds " in done.output
    with Image.open(tmp_path / "mine.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300


def test_other_layouts_are_measured(tmp_path):
    out = tmp_path / "mine.csv"
    options = ("--heads", 4, "--kv-heads", 2, "--pairs", "interleaved", "--dtype", "float32", "--learned")
    assert invoke_small(*options, "--out", out).exit_code == 0
    rows = [row for row in read(out) if row["mode"] != "copy"]
    assert {(row["mode"], row["peer"]) for row in rows} == {
        ("fwd", my_shapes.STAND_IN), ("bwd_omega", my_shapes.STAND_IN), ("fwd", "timm, eager")
    }  # fmt: skip
    assert {(row["omega"], row["dtype"], row["note"].partition(";")[0]) for row in rows} == {
        ("per-head", "float32", ""), ("per-head", "float32", "tables")
    }  # fmt: skip
    assert {row["workload"] for row in rows} == {"batch 1, heads 4, kv heads 2, grid 3x4, interleaved"}


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
@pytest.mark.parametrize("keys", [None, 1])
@pytest.mark.parametrize("op", ["rotate", "cosine"])
def test_peers_compute_the_same(op, keys, pairs):
    shapes = Shapes(1, 2, (3, 4), 1, 16, keys, pairs, torch.float32)
    inputs = peers.large_inputs(shapes.case(op), torch.device("cpu"))
    expected = peers.kernels(inputs)(tuple(inputs.xs), inputs.omega)
    q, k = inputs.xs
    options = {"pairs": pairs} if op == "rotate" else {}
    call = lrpe_md.rotate if op == "rotate" else lrpe_md.cosine
    for found, y in zip(expected, call(q, k, omega=inputs.omega, positions=Grid((3, 4), 1), **options), strict=True):
        assert torch.equal(found, y)
    assert [x.shape[1] for x in inputs.xs] == [2, keys or 2]
    for name, build in {"torch tables": peers.torch_tables, "timm": peers.timm}.items():
        if name == "timm" and op == "cosine":
            continue
        for found, y in zip(build(inputs)(tuple(inputs.xs), inputs.omega), expected, strict=True):
            torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5)


def test_on_a_gpu_all_fitting_peers_are_chosen():
    gpu = torch.device("cuda")
    grid = Shapes(1, 2, (3, 4), 0, 16)
    chosen, said = my_shapes.choose_peers(grid, gpu)
    assert set(chosen) == {name for name, peer in PEERS.items() if not peer.text}
    assert not any("GPU" in text for text in said)
    text, said = my_shapes.choose_peers(Shapes(1, 2, (12,), 0, 16), gpu)
    assert set(text) == set(PEERS)
    neighbours, said = my_shapes.choose_peers(Shapes(1, 2, (12,), 0, 16, pairs="interleaved"), gpu)
    assert set(PEERS) - set(neighbours) == {"torch.compile, rotate_half"}
    assert "skipping torch.compile, rotate_half: it does not support interleaved pairs" in said


def test_installed_packages_are_found(tmp_path, monkeypatch):
    (tmp_path / "liger_kernel").mkdir()
    # finding the package must not import it
    (tmp_path / "liger_kernel" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert my_shapes.installed()["liger"] == tmp_path
    _, said = my_shapes.choose_peers(Shapes(1, 2, (3, 4), 0, 16), torch.device("cuda"))
    assert any(text.startswith("skipping liger: FileNotFoundError") for text in said)


def test_the_table_compares_with_ours():
    ours = [Time("rotate", OURS, "fwd", 1.0, ""), Time("rotate", OURS, "bwd", 1.0, "")]
    slow = [Time("rotate", "slow", "fwd", 2.0, "tables"), Time("rotate", "slow", "bwd", 4.0, "tables")]
    half = [Time("rotate", "half", "fwd", 1.5, ""), Time("rotate", "half", "bwd", None, "out of memory")]
    text = io.StringIO()
    copy = [Time("rotate", my_shapes.FLOOR, which, 0.8, "") for which in ("fwd", "bwd")]
    found = Found([*half, *slow, *copy, *ours])
    my_shapes.show(found, Console(file=text, width=160), layers=10)
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert lines[2:6] == [
        "lrpe-md 1 1 2",
        "same-size copy 0.8 (×0.80) 0.8 (×0.80) 1.6",
        "slow 2 (×2.00) 4 (×4.00) 6 40 tables",
        "half 1.5 (×1.50) - - out of memory",
    ]
    assert "saved by 10 layers" in lines[1]


def test_nothing_measured_leaves_no_plot(tmp_path):
    found = Found([Time("rotate", OURS, "fwd", None, "out of memory")])
    assert not my_shapes.plot(found, tmp_path / "mine.png", "")
    assert not (tmp_path / "mine.png").exists()


def test_earlier_results_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my-shapes.csv", "my-shapes-2.csv"):
        assert f"\n{name}" in invoke_small("--limit", 1e-9).output
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == ["my-shapes-2.csv", "my-shapes.csv"]


def test_exhausted_limit_is_reported(tmp_path):
    done = invoke_small("--limit", 1e-9, "--out", tmp_path / "mine.csv")
    assert done.exit_code == 0, done.output
    assert "Stopped after 1e-09 s before everything was measured" in done.output


REFUSED = {
    "grid": (
        ("--grid", "3by4"),
        "--grid: expected one size per axis, slowest axis first, such as 21x45x80 or 4096, got '3by4'",
    ),
    "empty": (("--grid", "3x0"), "--grid: expected one size"),
    "kv heads": (("--kv-heads", "3"), "--kv-heads: expected a divisor of --heads 2, got 3"),
    "head_dim": (("--head-dim", "15"), "--head-dim: expected an even number, got 15"),
    "map": (("--map", "turn"), "--map: unknown 'turn'"),
    "dtype": (("--dtype", "int8"), "--dtype: unknown 'int8'"),
    "pairs": (("--pairs", "thirds"), "--pairs: unknown 'thirds'"),
    "pairs of cosine": (
        ("--map", "cosine", "--pairs", "interleaved"),
        "--pairs interleaved: only works with --map rotate; leave out --pairs",
    ),
    "linear": (("--linear", "--kv-heads", "1"), "--linear: only supports --pairs half and no --kv-heads"),
    "memory": (("--batch", "1000000", "--grid", "512x512"), "GiB are free; use --batch"),
    "one is too large": (("--grid", "100000x100000x1000"), "use a smaller grid"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, tmp_path):
    args, message = REFUSED[name]
    done = invoke_small(*args, "--out", tmp_path / "mine.csv")
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "mine.csv").exists()


@pytest.mark.gpu
def test_kernels_and_peers_are_timed_on_a_gpu(tmp_path):
    out = tmp_path / "mine.csv"
    args = ["--batch", 2, "--heads", 4, "--grid", "4x16x16", "--head-dim", 64, "--map", "both", "--linear", "--rep", 5]
    done = invoke(*args, "--limit", 600, "--out", out)
    assert done.exit_code == 0, done.output
    rows = [row for row in read(out) if row["mode"] != "copy"]
    assert not [row for row in rows if row["in_budget"] != "True" or not row["p50"]]
    assert {name for name, peer in PEERS.items() if not peer.text} <= {row["peer"] for row in rows}
    assert not [row for row in read(tmp_path / "mine-linear.csv") if row["note"]]
