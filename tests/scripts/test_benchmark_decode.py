"""scripts.bench decode at tiny sizes on a CPU: implementations, rows, errors."""

import csv
import sys
import types

import pytest
import torch
from lrpe_md.scripts.bench import decode
from lrpe_md.scripts.bench.app import app
from typer.testing import CliRunner

SMOKE = ("decode", "--device", "cpu", "--smoke")
HERE = (decode.INTO, decode.COPIED, decode.THEIRS)


def run(*args):
    return CliRunner().invoke(app, [*SMOKE, *map(str, args)])


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_workload_and_implementation_is_a_row(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "decode.csv"
    done = run("--impl", ";".join(HERE), "--out", out, "--commit", "abc")
    assert done.exit_code == 0, done.output
    rows = read(out)
    assert tuple(rows[0]) == decode.COLUMNS
    assert not [row for row in rows if row["note"]]
    assert all(float(row["ms"]) > 0 and row["commit"] == "abc" for row in rows)
    assert all((row["share"] == "") == (row["measure"] == "host") for row in rows)
    found = [(row["workload"], row["measure"], row["impl"]) for row in rows]
    # "gpu" and "host"; a CPU has no CUDA graphs
    assert len(set(found)) == len(found) == len(decode.WORKLOADS) * 2 * len(HERE)


def test_missing_packages_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "decode.csv"
    wanted = (decode.LIGER, decode.HUB, decode.THEIRS)
    assert run("--impl", ";".join(wanted), "--workload", "decode-1", "--out", out).exit_code == 0
    assert [(row["impl"], row["note"]) for row in read(out)] == [
        (decode.THEIRS, "not installed: transformers"),
        (decode.LIGER, "not installed: liger_kernel"),
        (decode.HUB, "not installed: kernels"),
    ]


def test_a_kernel_from_the_hub(tmp_path, monkeypatch):
    """Cover success, a missing network, and a missing partial rotation."""
    hub = types.ModuleType("kernels")

    def apply(q, k, cos, sin):
        half = q.shape[-1] // 2
        cos, sin = cos[:, None], sin[:, None]
        return tuple(x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))

    hub.get_kernel = lambda name: types.SimpleNamespace(apply_rotary_transformers=apply)
    hub.__spec__ = types.SimpleNamespace(name="kernels", loader=None)
    monkeypatch.setitem(sys.modules, "kernels", hub)
    out = tmp_path / "decode.csv"
    args = ("--impl", decode.HUB, "--workload", "decode-4;decode-1-half", "--out", out)
    assert run(*args).exit_code == 0
    rows = read(out)
    assert [(row["workload"], row["measure"], row["note"]) for row in rows] == [
        ("decode-4", "gpu", ""), ("decode-4", "host", ""), ("decode-1-half", "", "has no partial rotation")
    ]  # fmt: skip

    def unreachable(name):
        raise OSError("no network: https://huggingface.co")

    hub.get_kernel = unreachable
    assert run(*args).exit_code == 0
    assert read(out)[0]["note"].startswith("OSError: no network")


@pytest.mark.parametrize("fault", ["q", "k", "elsewhere"])
def test_a_wrong_result_is_not_timed(fault, tmp_path, monkeypatch):
    real = decode.build_into

    def build(inputs):
        step = real(inputs)

        def wrong():
            q = step()
            if fault == "k":
                inputs.cache[:, :, inputs.shape.start] *= 1.1
            if fault == "elsewhere":
                inputs.cache[:, :, inputs.shape.start + inputs.shape.tokens] = 1
            return q * 1.1 if fault == "q" else q

        return wrong

    monkeypatch.setitem(decode.IMPLS, decode.INTO, build)
    out = tmp_path / "decode.csv"
    assert run("--impl", decode.INTO, "--workload", "decode-1", "--out", out).exit_code == 0
    (row,) = read(out)
    assert row["ms"] == ""
    assert row["note"].startswith(
        {"q": "q: off by 0.", "k": "k: off by 0.", "elsewhere": "other rows of the cache"}[fault]
    )


@pytest.mark.parametrize("name", ["decode-4", "decode-16-half", "prefill-4"])
def test_compiled_implementations_agree(name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "compile", lambda f: f)
    for impl in decode.IMPLS:
        if impl.endswith("compiled"):
            with torch.no_grad():
                inputs = decode.make_inputs(decode.shrink(decode.WORKLOADS[name]), torch.device("cpu"))
                assert not decode.find_wrong(decode.IMPLS[impl], inputs), impl


@pytest.mark.parametrize("args", [("--workload", "sora"), ("--impl", "vllm")])
def test_wrong_names_are_refused(args, tmp_path):
    done = run(*args, "--out", tmp_path / "decode.csv")
    assert done.exit_code != 0
    assert args[1] in done.output
    assert not (tmp_path / "decode.csv").exists()
