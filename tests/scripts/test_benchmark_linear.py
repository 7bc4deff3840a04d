"""scripts.bench linear at tiny sizes on a CPU: implementations, rows, errors."""

import csv
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from lrpe_md.scripts.bench import linear, linear_counters, linear_measure, linear_peers
from lrpe_md.scripts.bench.app import app
from typer.testing import CliRunner

from lrpe_md.testing import Violation

SMOKE = ("linear", "--device", "cpu", "--smoke")


def run(*args):
    return CliRunner().invoke(app, [*SMOKE, *map(str, args)])


class Libraries:
    """Fakes of fla and flash_bla. The functions and the memory layout are the same, and plain formulas compute them."""

    @staticmethod
    def chunk(q, k, v, scale, normalize):
        assert (scale, normalize) == (1.0, False)
        weights = torch.einsum("bnhd,bmhd->bhnm", q, k).tril()
        return torch.einsum("bhnm,bmhe->bnhe", weights, v), None

    @staticmethod
    def bidirectional(q, k, v):
        weights = q @ k.mT
        return weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-6)


@pytest.fixture
def libraries(monkeypatch):
    fla, bla = (ModuleType(name) for name in (linear_peers.FLA, linear_peers.FLASH_BLA))
    fla.fused_chunk_linear_attn = fla.chunk_linear_attn = Libraries.chunk
    bla.linear_attention = Libraries.bidirectional
    for module in (fla, bla):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fla, bla


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_implementation_is_a_row(tmp_path):
    out = tmp_path / "linear.csv"
    done = run("--impl", "lrpe-md;SDPA;unfused", "--out", out, "--commit", "abc")
    assert done.exit_code == 0, done.output
    rows = read(out)
    assert tuple(rows[0]) == linear_measure.COLUMNS
    assert not [row for row in rows if row["note"] and row["workload"] not in linear.SANA_WORKLOADS]
    assert all(row["note"].startswith("relative") for row in rows if row["workload"] in linear.SANA_WORKLOADS)
    assert all(float(row["ms"]) > 0 and float(row["share"]) > 0 and row["commit"] == "abc" for row in rows)
    found = {(row["workload"], row["map"], row["pass"]) for row in rows if row["impl"] == "lrpe-md"}
    works = [name for name in linear.DEFAULT if name in linear.WORKLOADS and not name.startswith("frames")]
    mapped = {(w, m, p) for w in works for m in ("cosine", "rotate") for p in linear.PASSES}
    mapped |= {(w, "rotate", p) for w in linear.WORKLOADS if w.startswith("frames") for p in linear.PASSES}
    compared = linear.SANA_WORKLOADS if find_spec("diffusers") else ()
    sana = {(w, "rotate", p) for w in compared for p in ("forward", "backward")}
    assert found == mapped | sana | {(w, "none", p) for w in works for p in ("forward", "backward")}
    assert {row["mask"] for row in rows if row["impl"] == "unfused"} == {"full"}
    assert {row["map"] for row in rows if row["impl"] == "SDPA"} == {"none"}


def test_another_checkout_is_timed_beside_this_one(tmp_path):
    out = tmp_path / "linear.csv"
    args = ("--impl", "lrpe-md", "--workload", "width72", "--map", "rotate", "--out", out)
    done = run(*args, "--other", Path(__file__).parents[2])
    assert done.exit_code == 0, done.output
    found = [(row["impl"], row["pass"]) for row in read(out)]
    assert found == [(impl, which) for which in linear.PASSES for impl in ("lrpe-md", "lrpe-md, other")]
    assert linear.OtherCheckout.package is sys.modules["lrpe_md_other"]
    assert run(*args).exit_code == 0
    assert {row["impl"] for row in read(out)} == {"lrpe-md"}, "a later run must not keep the other checkout"


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    wrong = Violation("dq", 2.0, 1.0, 2.0, 1.0, linear.WORKLOADS["vit224"])
    monkeypatch.setattr(linear, "check_linear", lambda *args: [wrong])
    out = tmp_path / "linear.csv"
    assert run("--impl", "lrpe-md", "--workload", "vit224", "--map", "cosine", "--out", out).exit_code == 0
    (row,) = read(out)
    assert row["ms"] == ""
    assert "outside the budget: dq" in row["note"]


def test_unfused_equals_fused():
    """The unfused baseline computes the same as lrpe-md."""
    for name in ("cosine", "rotate", None):
        case = linear.replace(linear.shrink(linear.WORKLOADS["img64"]), map=name, dtype=linear.torch.float32)
        inputs = linear.make_inputs(case, linear.torch.device("cpu"))
        args = (inputs, inputs.q, inputs.k, inputs.v, inputs.omega)
        linear.torch.testing.assert_close(linear.attend_unfused(*args), linear.attend_fused(*args))


@pytest.mark.parametrize("args", [("--map", "cosin"), ("--workload", "img"), ("--impl", "sdpa")])
def test_wrong_names_are_refused(args, tmp_path):
    done = run(*args, "--out", tmp_path / "linear.csv")
    assert done.exit_code != 0
    assert args[1] in done.output
    assert not (tmp_path / "linear.csv").exists()


@pytest.mark.skipif(not find_spec("diffusers"), reason="needs diffusers")
def test_the_delta_rule_of_diffusers_is_a_row(tmp_path):
    """It must compute the same function as lrpe-md in both directions. Otherwise, it would not be timed."""
    out = tmp_path / "linear.csv"
    works = ("frames", "frames-delta", "frames-delta-both")
    done = run("--impl", "SanaWM", "--workload", ",".join(works), "--out", out)
    assert done.exit_code == 0, done.output
    rows = read(out)
    assert [(row["workload"], row["pass"]) for row in rows] == [
        (work, which) for work in works[1:] for which in ("forward", "backward")
    ]
    assert all(row["note"].startswith("angles formed beforehand; relative error 0.00") for row in rows)


def test_installed_libraries_are_rows(tmp_path, libraries):
    out = tmp_path / "linear.csv"
    assert run("--impl", "fla chunk;fla fused_chunk;flash_bla", "--out", out).exit_code == 0
    rows = read(out)
    found = {(row["impl"], row["workload"], row["map"], row["pass"]) for row in rows}
    passes = ("forward", "backward")
    causal = {(f"fla {f}", w, "none", p) for f in ("chunk", "fused_chunk") for w in ("causal", "causal-plain")
              for p in passes}  # fmt: skip
    lengths = [f"bidirectional-{num}" for num in (1024, 4096, 16384, 32768)]
    assert found == causal | {("flash_bla", name, "none", p) for name in lengths for p in passes}
    assert all(float(row["ms"]) > 0 and float(row["share"]) > 0 for row in rows)
    assert all("relative error" in row["note"] for row in rows)


def test_wrong_peer_result_is_not_timed(tmp_path, libraries, monkeypatch):
    _, bla = libraries
    monkeypatch.setattr(bla, "linear_attention", lambda q, k, v: q @ (k.mT @ v))
    out = tmp_path / "linear.csv"
    run("--impl", "flash_bla", "--workload", "bidirectional-1024-b2", "--out", out)
    (row,) = read(out)
    assert (row["ms"], row["pass"]) == ("", "")
    assert "outside the budget" in row["note"]


def test_missing_libraries_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, linear_peers.FLA, None)
    out = tmp_path / "linear.csv"
    done = run("--impl", "fla chunk;lrpe-md", "--workload", "causal-plain", "--map", "none", "--out", out)
    assert done.exit_code == 0, done.output
    assert "without fla chunk: ModuleNotFoundError" in done.output
    assert {row["impl"] for row in read(out)} == {"lrpe-md"}


def test_candidates_of_the_peers_autotuner_are_compiled_first(libraries):
    """Both kernels' configurations are compiled with the inputs' strides. The peer handles failures."""
    _, bla = libraries
    calls = []

    def warmup(*args, **options):
        calls.append((len(args), options["BL"], options["L"]))
        raise RuntimeError("no GPU")

    configs = [SimpleNamespace(all_kwargs=lambda n=n: {"BL": n}) for n in (32, 64)]
    kernel = SimpleNamespace(configs=configs, cache={1024: "of another batch"}, fn=SimpleNamespace(warmup=warmup))
    bla.fused_fwd_kernel_s_km, bla.fused_fwd_kernel_o = kernel, kernel
    inputs = linear.make_inputs(linear.shrink(linear.WORKLOADS["img64"]), torch.device("cpu"))
    linear_peers.compile_bidirectional(bla, inputs)
    assert sorted(calls) == [(15, 32, 12), (15, 32, 12), (15, 64, 12), (15, 64, 12)]
    assert not kernel.cache
    assert kernel.do_bench.keywords == {"warmup": 5, "rep": 20}


def test_sana_stock_and_ours(tmp_path):
    pytest.importorskip("diffusers")
    out = tmp_path / "linear.csv"
    done = run("--workload", "sana,sana-module", "--out", out)
    assert done.exit_code == 0, done.output
    rows = read(out)
    found = {(row["workload"], row["impl"], row["pass"]) for row in rows}
    assert found == {
        (w, i, p) for w in ("sana", "sana-module") for i in ("lrpe-md", "diffusers") for p in ("forward", "backward")
    }
    assert all(float(row["ms"]) > 0 for row in rows)


def test_processor_equals_stock():
    """Compare float32 values and gradients. With another frequency, they would differ."""
    pytest.importorskip("diffusers")
    case = linear.replace(linear.shrink(linear_peers.SANA), head_dim=24, dtype=torch.float32)
    block = linear_peers.make_block("sana-module", "ours", case, torch.device("cpu"))
    stock, ours = (block.make_pass(impl, "backward", block.turns[0])() for impl in ("diffusers", "ours"))
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    values = [block.make_pass(impl, "forward", block.turns[0])() for impl in ("diffusers", "ours")]
    torch.testing.assert_close(*values)
    block.processors["ours"].omega *= 1.5
    assert not torch.allclose(values[0], block.make_pass("ours", "forward", block.turns[0])(), rtol=1e-2)


def test_append_keeps_earlier_rows(tmp_path):
    out = tmp_path / "linear.csv"
    for options in ((), ("--append",)):
        run("--impl", "lrpe-md", "--workload", "vit224", "--map", "none", "--out", out, *options)
    assert [row["pass"] for row in read(out)] == ["forward", "backward"] * 2


def test_each_pass_of_linear_attention_is_profiled():
    """A mark comes before the kernels of each pass."""
    names = [linear_counters.MARK, "linear_state_kernel", "linear_output_kernel", linear_counters.MARK, "linear_x"]
    first, second = linear_counters.split([{"kernel": name} for name in names])
    assert [row["kernel"] for row in first] == ["linear_state_kernel", "linear_output_kernel"]
    assert [row["kernel"] for row in second] == ["linear_x"]
    with pytest.raises(ValueError, match="before the first pass, got linear_x"):
        linear_counters.split([{"kernel": "linear_x"}])


def test_passes_to_profile(monkeypatch):
    case = linear_measure.shrink(linear_measure.WORKLOADS["width72"])
    monkeypatch.setattr(linear_counters, "WORKLOADS", {"a": case})
    found = list(linear_counters.passes(["a"], ["rotate", "none"], torch.device("cpu")))
    assert [tuple(key.values()) for key, _ in found] == [
        ("a", map, which) for map in ("rotate", "none") for which in ("forward", "backward")
    ]
    for key, fn in found:
        _, result = fn()
        assert len(result) == 3 if key["pass"] == "backward" else result.shape == (1, 2, 12, 16)
