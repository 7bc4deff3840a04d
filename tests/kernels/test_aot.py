"""The kernels compile for real targets, without a GPU. The interpreter accepts code that the compiler rejects."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

kernels = pytest.importorskip("lrpe_md.engine.kernels")

AOT = Path(__file__).parent / "aot.py"
LINEAR = Path(__file__).parent / "aot_linear.py"
TARGETS = ["sm_80", "sm_90", "gfx942"]
READ = ("wide", "causal", "raw")  # labels of aot_linear.py
PARTS = {"gfx942": "0/2"}  # part of the cases to compile


def start(*args: str, script: Path = AOT) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, str(script), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def finish(process: subprocess.Popen) -> list[dict]:
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target):
    rows = finish(start(target, "--part", PARTS.get(target, "0/1")))
    failed = [f"{row['kernel']} {row['case']}: {row['error']}" for row in rows if row["error"]]
    assert not failed, "\n".join(failed)
    assert 30 <= len(rows) <= 80  # includes the last cases: grids with an origin, norms, and output offsets
    assert target in PARTS or sum("start" in row["case"] for row in rows) == 3
    for row in rows:
        early = []
        if target == "sm_90" and row["case"]["run"] == "backward omega":
            early = ["wait"] if row["kernel"] == "reduce_partial_kernel" else ["launch_dependents"] * row["sums"]
            assert (
                row["sums"] == (row["kernel"] in ("lrpe_kernel", "heads_kernel")) or "of heads" in row["case"]["norm"]
            )
        assert row["early"] == early, row
        assert not row["contracted"], f"the compiler fuses products into sums: {row}"
        assert row["resident"] <= 100 * 1024, "programs planned to run at once need more shared memory than an SM has"
    if target.startswith("sm"):
        angles = [row for row in rows if row["kernel"] == "lrpe_kernel" and "float64" not in row["case"]["dtype"]]
        tables = [row for row in angles if row["case"]["tables"] != "none"]
        assert len(tables) > 10
        assert not any(row["remainders"] or row["counted"] for row in tables), "computes angles despite given tables"
        angles = [row for row in angles if row["case"]["tables"] == "none"]
        assert len(angles) > 10
        ordered = [row for row in angles if row["rows_first"] and row["case"]["rotary"] == "all"]
        assert len(ordered) >= 4
        assert all(min(row["split"]) > 0 for row in ordered), "frequencies are read before the rows"
        integers = 0
        for row in angles:
            case = row["case"]
            exact = case["dtype"] == "torch.float32" or case["run"] == "backward omega"
            exact = exact or (case["run"] == "backward" and "of heads" in case["norm"])  # dx̄ is stored in float32
            if case["positions"] == "grid" and exact:
                assert (row["counted"], row["remainders"]) == (True, 0), row
                integers += 1
            else:
                assert row["remainders"] >= int(case["axes"]), row
                assert not row["counted"], row
            assert row["counted_twice"] == 0, row
        assert integers >= 2
        plain = {"head_dim": "64", "rotary": "all", "long": "False"}
        wide = [row for row in angles if plain.items() <= row["case"].items() and "16" in row["case"]["dtype"]]
        assert {row["case"]["run"] for row in wide} >= {"forward", "backward"}
        assert not any(row["narrow"] for row in wide), "16-bit elements are moved one by one"


@pytest.mark.parametrize("target", TARGETS)
def test_linear_attention_compiles(target):
    rows = finish(start(target, script=LINEAR))
    failed = [f"{row['kernel']} {row['case']}: {row['error']}" for row in rows if row["error"]]
    assert not failed, "\n".join(failed)
    assert {row["kernel"] for row in rows} == {name for name in kernels.__all__ if name.startswith("linear")}
    for row in rows:
        assert not row["contracted"], f"the compiler fuses products into sums: {row}"
        overlaps = target == "sm_90" and "mask=causal" not in row["case"]
        expected = {"linear_query_gradient_kernel": ["launch_dependents"], "linear_query_state_kernel": ["wait"]}
        assert row["early"] == (expected.get(row["kernel"], []) if overlaps else []), row
    if target == "sm_90":
        assert all(row["shared"] <= 227 * 1024 for row in rows), "more shared memory than a program can have"
        by_label = {label: {row["kernel"]: row for row in rows if row["label"] == label} for label in READ}
        shuffles = {name: row["shuffles"] for name, row in by_label["wide"].items()}
        assert shuffles["linear_output_kernel"] < 64, "row sums without a map cross warps"
        assert shuffles["linear_query_gradient_kernel"] < 128
        loads = {name: row["loads"] for name, row in by_label["causal"].items()}
        assert {"linear_causal_query_kernel", "linear_causal_key_kernel"} <= loads.keys()
        assert not any(each["b16"] for each in loads.values()), "threads exchange halves of a channel"
        assert loads["linear_causal_key_kernel"]["v2.b32"] < 16, "operands are read 8 bytes at a time"
        raw = by_label["raw"]["linear_causal_forward_kernel"]["loads"]
        assert not any(raw.values()), "unchanged features pass through threads"


def test_the_checks_of_products_can_fail():
    (found,) = finish(start("wrong"))
    assert (found["remainders"], found["counted_twice"]) == (1, 1)
    assert found["contracted"] == 3


def test_cases_cover_every_pair():
    assert finish(start("coverage")) == [[]]
