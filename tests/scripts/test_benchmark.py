"""The operator benchmark at tiny sizes: rows, checks before timing, helpers and the report."""

import time
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pandas as pd
import pytest
import torch
from lrpe_md.scripts.bench import counters as benchmark_counters
from lrpe_md.scripts.bench import front
from lrpe_md.scripts.bench import modes as benchmark_modes
from lrpe_md.scripts.bench import operators as benchmark
from lrpe_md.scripts.bench import report as benchmark_report
from lrpe_md.scripts.bench.app import COMMANDS, app
from lrpe_md.scripts.bench.layers import Workload
from lrpe_md.scripts.bench.measure import (
    COLUMNS,
    COPY,
    HERE,
    Judge,
    Session,
    describe_error,
    floor_bytes,
    make_pass,
    scratch,
    time_peer,
)
from lrpe_md.scripts.bench.modes import custom_op, raw_launch
from lrpe_md.scripts.bench.peers import CACHED, OURS, PEERS, Peer, cached, kernels, large_inputs, load_file, tables
from lrpe_md.scripts.common.cases import bind
from lrpe_md.scripts.common.markdown import PAGES
from rich.console import Console
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = Workload(2, 2, (3, 4), 1, 16)
SMOKE = ["--device", "cpu", "--smoke", "--commit", "abc"]


def invoke(out: Path, *args: str, workload: str = "vit224"):
    command = ["operators", *SMOKE, "--workload", workload, "--out", str(out), *args]
    result = CliRunner().invoke(app, command, env={"NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    rows = pd.read_csv(out)
    assert list(rows) == [*COLUMNS, *HERE]
    return rows


@pytest.mark.parametrize(
    "command", ["operators", "linear", "norm", "tables", "decode", "compiled", "train-loop", "linear-scaling"]
)
def test_without_a_gpu(command, monkeypatch):
    """The error says how to check that a benchmark runs on a CPU. On a CPU, it needs --smoke."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for args, message in (
        ([], "cuda needs a GPU, but PyTorch finds none. To check that everything runs on a CPU, add --device cpu "),
        (["--device", "cpu"], "CPU times say nothing about a GPU. To check that everything runs on a CPU, add --smoke"),
        (["--device", "mps"], "--device: unknown 'mps'. Choose from: cuda; cpu"),
    ):
        done = CliRunner().invoke(app, [command, *args], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert done.exit_code == 2, done.output
        assert message in done.output


def test_every_pass_of_every_peer_is_a_row(tmp_path):
    passes = ["fwd", "bwd", "bwd_omega", "fwdbwd"]
    peers = "lrpe-md;torch, eager;timm, eager"
    rows = invoke(tmp_path / "new" / "all.csv", "--modes", ",".join(passes), "--peers", peers)
    keys = ["mode", "op", "omega", "peer"]
    found = rows[rows["mode"] != "copy"]
    expected = {
        (mode, op, omega, peer)
        for mode in passes
        for op in ("cosine", "rotate")
        for omega in ("shared", "per-head")
        for peer in ("lrpe-md", "torch, eager", "timm, eager")
        if peer != "timm, eager" or (op == "rotate" and mode != "bwd_omega")
    }
    expected |= {(mode, op, "shared", COPY) for mode in passes[:3] for op in ("cosine", "rotate")}
    assert sorted(found[keys].itertuples(index=False, name=None)) == sorted(expected)
    assert (found.p50 > 0).all()
    assert (found.p20 <= found.p50).all()
    assert (found.p50 <= found.p80).all()
    assert found.in_budget.all()
    assert (rows.copy_gbps.dropna() > 0).all()
    share = found.floor_bytes / found.p50 / 1e6 / found.copy_gbps
    assert share.to_numpy() == pytest.approx(found.share.to_numpy())
    assert not rows[["gpu", "python", "torch", "date"]].isna().any().any()
    assert (rows.commit == "abc").all()


def test_other_modes(tmp_path):
    rows = invoke(tmp_path / "a.csv", "--modes", "accuracy,scaling,host", "--peers", OURS, "--op", "rotate")
    error = rows[rows["mode"] == "accuracy"].set_index(["peer", "num_axes"]).p50
    for axes in (1, 2, 3, 4):
        assert error["lrpe-md, float32 omega", axes] < 1e-6
        assert error["bfloat16 tables from exact angles", axes] > 1e-3
        assert error["float32 tables from float32 angles", axes] > 1e-3
    assert set(rows[rows["mode"] == "scaling"].num_tokens) == {64, 128}
    host = rows[rows["mode"] == "host"]
    assert set(host.peer) == {"lrpe-md", "lrpe-md module"}
    assert (host.unit == "us").all()
    assert (host.p50 > 0).all()


def test_text(tmp_path):
    """Measure grouped queries, and a peer that only supports these."""
    half = "torch.compile, rotate_half"
    args = ["--op", "rotate", "--modes", "fwd,bwd_omega", "--peers", f"lrpe-md;timm, eager;{half}"]
    rows = invoke(tmp_path / "a.csv", *args, workload="text")
    found = rows[rows.workload == "text"].set_index(["mode", "omega", "peer"])
    assert found.in_budget.all()
    assert (found.p50 > 0).all()
    assert set(found.index) == {
        (mode, omega, peer)
        for mode in ("fwd", "bwd_omega")
        for omega in ("shared", "per-head")
        for peer in (OURS, "timm, eager", half, COPY)
        if (mode == "fwd" or peer in (OURS, COPY)) and not (peer == COPY and omega == "per-head")
    }
    assert (found.floor_bytes.loc["fwd"] == 2 * 2 * 2 * (4 + 2) * 12 * 16).all()
    assert [benchmark.takes(PEERS[half], "rotate", name) for name in ("vit224", "text")] == [False, True]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_keep_the_committed_results(name):
    """An example measures only a part, and must not replace the results of all measurements."""
    out = signature(COMMANDS[name].run).parameters.get("out")
    replaces = out is not None and out.default is not None and (ROOT / out.default).is_file()
    assert not replaces or "--out " in COMMANDS[name].example


def test_overwriting_peers_do_not_modify_grouped_inputs():
    inputs = large_inputs(Workload(2, 4, (12,), 0, 16, key_heads=2).case("rotate"), CPU)
    assert [x.shape[1] for x in inputs.xs] == [x.shape[1] for x in inputs.grads] == [4, 2]
    for overwrites in ("grads", "all"):
        mine = scratch(Peer(kernels, overwrites=overwrites), inputs)
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(mine.xs, inputs.xs, strict=True))


def test_variants(tmp_path):
    rows = invoke(tmp_path / "v.csv", "--modes", "bwd", "--peers", OURS, "--op", "rotate", "--variants")
    found = rows[rows.variant.notna()].set_index("variant")
    assert {"act softmax", "float16", "head_dim 72", "interleaved pairs", "coordinates (N, K)"} <= set(found.index)
    assert found.in_budget.all()
    assert found.loc["act silu"].floor_bytes == found.loc["interleaved pairs"].floor_bytes * 3 / 2
    assert found.loc["float32"]["dtype"] == "float32"
    assert found.loc["head_dim 72"].head_dim == 72


def wrong(inputs):
    forward = kernels(inputs)
    return lambda xs, omega: tuple(1.05 * y for y in forward(xs, omega))


def failing(inputs):
    raise RuntimeError("no such thing in /some/where/file.py\nand more")


def test_wrong_results_are_listed_and_not_timed(tmp_path, monkeypatch):
    monkeypatch.setitem(benchmark.PEERS, "wrong", Peer(wrong))
    args = ["--modes", "fwd,bwd", "--op", "cosine", "--omega", "shared", "--peers", "lrpe-md;wrong"]
    rows = invoke(tmp_path / "a.csv", *args).set_index("peer")
    for row in rows.loc["wrong"].itertuples():
        assert not row.in_budget
        assert pd.isna(row.p50)
        assert "RMS error" in row.note
    assert rows.loc[OURS].in_budget.all()
    rows = invoke(tmp_path / "b.csv", *args, "--time-inexact").set_index("peer")
    assert (rows.loc["wrong"].p50 > 0).all()
    assert not rows.loc["wrong"].in_budget.any()


def test_our_own_wrong_results_are_never_timed(tmp_path, monkeypatch):
    monkeypatch.setitem(benchmark.PEERS, OURS, Peer(wrong))
    rows = invoke(tmp_path / "a.csv", "--modes", "fwd", "--op", "rotate", "--peers", OURS, "--time-inexact")
    assert rows[rows.peer == OURS].p50.isna().all()


def test_a_failure_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setitem(benchmark.PEERS, "failing", Peer(failing))
    args = ["--modes", "fwd", "--op", "cosine", "--omega", "shared", "--peers", "failing;torch, eager"]
    rows = invoke(tmp_path / "a.csv", *args, "--liger", str(tmp_path)).set_index("peer")
    assert rows.loc["failing"].note == "RuntimeError: no such thing in file.py"
    assert rows.loc["torch, eager"].p50 > 0
    assert rows.loc["liger"].note.startswith("FileNotFoundError")


def test_limit_stops_and_keeps_finished_rows(tmp_path):
    rows = invoke(tmp_path / "a.csv", "--limit", "1e-9")
    assert list(rows["mode"]) == ["copy"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((command, "--limit") for command in ("my-shapes", "operators", "linear", "norm", "decode", "training")),
        ("tune", "--limit"), ("linear-scaling", "--limit"), ("linear-scaling", "--cap"),
    ],
)  # fmt: skip
def test_limit_of_zero_is_refused(command, option):
    """A limit of 0 seconds would measure nothing, without a message."""
    for seconds in ("0", "-1", "nan"):
        refused = CliRunner().invoke(app, [command, option, seconds], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert refused.exit_code == 2
        assert f"Invalid value for '{option}': expected a positive number, got {seconds}" in refused.output


def test_names_with_commas():
    assert benchmark.choose_in_order("--peers", "torch, eager;lrpe-md", PEERS, ()) == [OURS, "torch, eager"]
    assert benchmark.choose_in_order("--modes", "bwd, fwd", benchmark.MODES, ()) == ["fwd", "bwd"]
    with pytest.raises(Exception, match="unknown 'fw'"):
        benchmark.choose_in_order("--modes", "fw", benchmark.MODES, ())


def test_errors_name_files_only():
    assert describe_error(ValueError("in /a/b/c.py, 1 / 2")) == "ValueError: in c.py, 1 / 2"
    assert describe_error(ValueError()) == "ValueError: no message"
    with pytest.raises(FileNotFoundError):
        load_file("nothing", ROOT, "nowhere.py")


def test_host_times_take_turns():
    calls = []
    times = benchmark_modes.host_times(
        [lambda: calls.append("a"), lambda: calls.append("b")], 3, 2, lambda: calls.append("-")
    )
    assert "".join(calls) == "-aa-bb" * 3 + "-"
    assert [len(own) for own in times] == [3, 3]
    assert all(us > 0 for own in times for us in own)


@pytest.mark.parametrize("overwrites", ["nothing", "all"])
def test_calls_cycle_through_copies_of_the_inputs(tmp_path, monkeypatch, overwrites):
    """An evict-last load keeps its tensor in the cache. The next call must not find it there."""
    timed = []

    def gpu_time(self, *fns):
        seen.clear()  # calls of the accuracy check
        timed.append([fn() for fn in fns])
        return {"p50": 1.0, "unit": "ms"}

    seen: list[torch.Tensor] = []

    def build(inputs):
        forward = kernels(inputs)
        return lambda xs, omega: seen.extend(xs) or forward(xs, omega)

    monkeypatch.setattr(Session, "gpu_time", gpu_time)
    session = Session(tmp_path / "a.csv", CPU, time.monotonic() + 60, 1, False, {"copy_gbps": 1.0}, Console(quiet=True))
    inputs = large_inputs(TINY.case("rotate"), CPU)
    time_peer(session, ["fwd"], "tiny", "peer", Peer(build, overwrites=overwrites), inputs)
    (results,) = timed
    assert len(results) >= 3
    assert len({x.data_ptr() for x in seen}) == 2 * len(results)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.slow
def test_first_calls_run_in_a_fresh_process(monkeypatch):
    code = "import lrpe_md, os, sys\nprint(len(os.listdir(os.environ['TRITON_CACHE_DIR'])), *range(1, len(sys.argv)))"
    monkeypatch.setattr(benchmark_modes, "FIRST_CALLS", code)
    assert benchmark_modes.first_calls("cosine", "rotate") == [0, 1, 2]
    monkeypatch.setattr(benchmark_modes, "FIRST_CALLS", "raise ValueError('no such op')")
    with pytest.raises(RuntimeError, match=r"^ValueError: no such op\n(.|\n)*Traceback"):
        benchmark_modes.first_calls("cosine")


@pytest.mark.parametrize("op", ["cosine", "rotate"])
def test_host_variants_compute_the_same(op):
    """The direct launch, the custom_op and saved angles agree with the public call, in the interpreter."""
    inputs = large_inputs(TINY.case(op, dtype=torch.float16), CPU)
    expected = bind(inputs, "triton")(inputs.xs, inputs.omega)
    raw = raw_launch(inputs)
    found, again = raw(), raw()
    assert all(torch.equal(a, b) for a, b in zip(found + again, expected * 2, strict=True))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(found, again, strict=True))
    judge = Judge(inputs)
    forward = custom_op(inputs)
    assert not judge.violations(Peer(custom_op), forward, "fwd")
    assert not judge.violations(Peer(custom_op), forward, "bwd")
    if op == "cosine":
        assert not [v for mode in ("fwd", "bwd", "bwd_omega") for v in judge.violations(CACHED, cached(inputs), mode)]
    ours = bind(inputs, "triton")
    assert not [v for mode in ("fwd", "bwd", "bwd_omega") for v in judge.violations(Peer(kernels), ours, mode)]


def test_the_judge_sees_the_last_token_and_the_frequencies():
    inputs = large_inputs(TINY.case("cosine", per_head=True), CPU)
    forward, judge = kernels(inputs), Judge(inputs)

    def last_token(xs, omega):
        (y,) = forward(xs, omega)
        return (torch.cat([y[:, :, :-1], 2 * y[:, :, -1:]], dim=2),)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, omega):
            return omega.clone()

        @staticmethod
        def backward(ctx, *grads):
            return 2 * grads[0]

    assert judge.violations(Peer(kernels), last_token, "fwd")
    assert judge.violations(Peer(kernels), last_token, "bwd")
    doubled: list[str] = judge.violations(
        Peer(kernels), lambda xs, omega: forward(xs, Doubled.apply(omega)), "bwd_omega"
    )
    assert len(doubled) == 1
    assert doubled[0].startswith("domega")


@pytest.mark.parametrize(("overwrites", "same_x", "same_grad"), [
    ("nothing", True, True), ("grads", True, False), ("all", False, False)
])  # fmt: skip
def test_peers_overwrite_copies(overwrites, same_x, same_grad):
    for op in ("cosine", "rotate"):
        inputs = large_inputs(TINY.case(op), CPU)
        mine = scratch(Peer(kernels, overwrites=overwrites), inputs)
        for a, b in zip(mine.xs, inputs.xs, strict=True):
            assert (a.data_ptr() == b.data_ptr()) == same_x
            assert torch.equal(a, b)
        for a, b in zip(mine.grads, inputs.grads, strict=True):
            assert (a.data_ptr() == b.data_ptr()) == same_grad
            assert torch.equal(a, b)


def test_inputs():
    cosine, rotate = (large_inputs(TINY.case(op), CPU) for op in ("cosine", "rotate"))
    q, k = rotate.xs
    assert q.stride() == (13 * 3 * 2 * 16, 16, 3 * 2 * 16, 1)
    assert k.data_ptr() - q.data_ptr() == 2 * 16 * q.element_size()
    assert rotate.grads[0].transpose(1, 2).is_contiguous()
    elements = 2 * 2 * 13 * 16 * 2
    assert [floor_bytes(m, cosine) / elements for m in ("fwd", "bwd", "bwd_omega", "fwdbwd")] == [3, 3, 4, 6]
    assert [floor_bytes(m, rotate) / elements for m in ("fwd", "bwd", "bwd_omega", "fwdbwd")] == [4, 4, 6, 8]
    relu = replace(cosine, case=replace(cosine.case, act="relu"))
    assert [floor_bytes(m, relu) / elements for m in ("fwd", "bwd", "bwd_omega")] == [3, 4, 4]
    cos, sin = tables(cosine)
    assert cos.shape == (1, 13, 16)
    assert torch.equal(cos[:, 0], torch.ones(1, 16))
    assert torch.equal(sin[:, 0], torch.zeros(1, 16))
    backward = make_pass("bwd", kernels(cosine), cosine)
    assert torch.equal(backward()[0], backward()[0])


# --- report ----------------------------------------------------------------------------------------------------------


def write_measurements(folder: Path) -> None:
    """Write two files, of which the later one repeats a measurement, and a file of a different benchmark."""
    where = {"gpu": "G", "torch": "2", "triton": "3", "commit": "c", "copy_gbps": 1000}

    def row(mode, op, workload, peer, share, date="2020-01-01 00:00", **more):
        some = {"omega": "shared", "dtype": "bfloat16", "p50": 1.5, "unit": "ms", "in_budget": True, "share": share}
        return {"mode": mode, "op": op, "workload": workload, "peer": peer, "date": date, **some, **where, **more}

    rows = [
        row("copy", "", "", "copy", 1, floor_bytes=2**32, omega="", p50=4.0),
        row("fwd", "cosine", "img64", OURS, 0.11), row("fwd", "cosine", "img64", "slow", 0.25),
        row("fwd", "cosine", "video", OURS, 0.93), row("bwd", "cosine", "video", OURS, 0.94),
        row("fwd", "cosine", "video", "slow", None, p50=None, in_budget=False, note="y0: RMS error"),
        row("fwd", "cosine", "video", OURS, 0.95, variant="act silu"),
        row("scaling", "cosine", "1 axis", OURS, 0.5, num_tokens=256, floor_bytes=1e6),
        row("scaling", "cosine", "1 axis", OURS, 0.6, num_tokens=512, floor_bytes=2e6),
        row("host", "cosine", "small", OURS, None, variant="forward, no gradient", p50=17.25, num_tokens=9, head_dim=8),
        row("compile", "cosine", "", OURS, None, variant="first kernel", p50=1.25, unit="s"),
        row("memory", "cosine", "video", OURS, None, variant="peak", p50=300, floor_bytes=200 * 2**20),
        row("memory", "cosine", "video", OURS, None, variant="kept", p50=7, floor_bytes=0),
        row("accuracy", "rotate", "", OURS, None, p50=4e-7, num_axes=2),
        row("fwd", "cosine", "video", "broken", None, p50=None, in_budget=None, note="RuntimeError: no"),
        row("fwd", "cosine", "video", "elsewhere", 0.77, gpu="other"),
    ]  # fmt: skip
    columns = [*COLUMNS, *HERE]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "benchmark-b.csv", index=False)
    again = [row("fwd", "cosine", "img64", OURS, 0.91, date="2020-01-02 00:00")]
    pd.DataFrame(again, columns=columns).to_csv(folder / "benchmark-a.csv", index=False)
    tables = {"workload": "wan", "form": "angles", "pass": "forward", "ms": 1.0, "gpu": "G"}
    pd.DataFrame([tables] * 99).to_csv(folder / "benchmark-tables.csv", index=False)  # has no table in the report


@pytest.mark.slow
def test_report_on_made_numbers(tmp_path):
    write_measurements(tmp_path)
    pages = tmp_path / "pages"
    benchmark_report.main(tmp_path, pages, None)
    assert [path.name for path in pages.iterdir()] == ["performance.md"]
    text = (pages / "performance.md").read_text()
    lines = text.splitlines()
    assert lines[0] == "# Encoding speed"
    assert "Copying 2 GiB of bfloat16 reads and writes memory at 1,000 GB/s." in text
    assert "| forward | img64 | video |" in lines
    assert "| **lrpe-md** | 0.91 | 0.93 |" in lines
    assert "| slow | 0.25 | ✗ |" in lines
    assert "| act silu |  | 0.95 |" in lines
    backward = lines.index("| backward | video |")
    assert lines[backward + 2] == "| **lrpe-md** | 0.94 |"
    assert "| **lrpe-md** | 17.2 |  |  |" in lines
    assert "the first call takes 1.2 s for cosine (first kernel)" in text
    assert "| **lrpe-md** | 1.50×, 7 |" in lines
    assert "| lrpe-md | 4.0e-07 |" in lines
    assert "* slow, cosine, fwd, video, shared: y0: RMS error" in lines
    assert "* broken, cosine, fwd, video, shared: RuntimeError: no" in lines
    assert "elsewhere" not in text
    for name in ("performance-passes.png", "performance-scaling.png"):
        assert 5_000 < (tmp_path / name).stat().st_size < 300_000
    benchmark_report.main(tmp_path, pages, None)
    assert (pages / "performance.md").read_text() == text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none"], "FOLDER: expected a folder with results of `lrpe-md bench`, got none"),
        ([".", "--gpu", "H"], "--gpu: unknown 'H'. Choose from: G; other"),
    ],
)
def test_report_refuses_what_it_cannot_find(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    write_measurements(tmp_path)
    done = CliRunner().invoke(app, ["report", *args, "--pages", "pages"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not list(tmp_path.rglob("*.md"))


NCU = """==PROF== Connected to process 1
"ID","Kernel Name","{names}"
"","","{units}"
"0","lrpe_kernel","57,632","77,477,888","129276672","74.6","86.7","74.1","43.0","64"
"1","lrpe_kernel","57152","77479424","128897536","75.1","86.2","55.1","43.7","51"
"""


def test_parsing_ncu_reports():
    names = list(benchmark_counters.METRICS.values())
    text = NCU.format(names='","'.join(names), units='","'.join(["x"] * len(names)))
    first, second = benchmark_counters.parse(text, benchmark_counters.METRICS)
    assert first == {
        "kernel": "lrpe_kernel", "ns": 57632, "bytes_read": 77477888, "bytes_written": 129276672, "dram": 74.6,
        "l2": 86.7, "issue": 74.1, "warps": 43, "registers": 64,
    }  # fmt: skip
    assert second["registers"] == 51
    with pytest.raises(ValueError, match="lacks lts__throughput"):
        benchmark_counters.parse(text.replace("lts__throughput", "lts"), benchmark_counters.METRICS)
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        benchmark_counters.parse("==ERROR== ERR_NVGPUCTRPERM\n", benchmark_counters.METRICS)


def test_every_pass_is_profiled(tmp_path, monkeypatch):
    """Run the passes on tiny inputs, and check the page."""
    monkeypatch.setattr(benchmark_counters, "WORKLOADS", {"vit224": TINY, "img64": TINY})
    monkeypatch.setattr(benchmark_counters, "PEERS", dict.fromkeys((OURS, benchmark_counters.TABLES), PEERS[OURS]))
    found = [(key, fn()) for key, fn in benchmark_counters.passes(CPU)]
    keys = [key for key, _ in found]
    assert len({tuple(key.values()) for key in keys}) == len(keys) == 2 * 2 * 3 + 2 + 2
    file = tmp_path / "counters.csv"
    metrics = dict.fromkeys(benchmark_counters.METRICS, 50.0)
    metrics |= {"ns": 2500.0}
    where = {"gpu": "G", "versions": "torch 2", "commit": "c"}
    pd.DataFrame([{**key, **metrics, **where} for key in keys]).to_csv(file, index=False)
    text = benchmark_report.counters(file)
    assert text.count("| 2.5 |") == len(keys)
    assert "| **img64: rotate, backward with ω** | 2.5 |" in text
    assert f"| vit224: cosine, forward: {benchmark_counters.ELEMENTWISE} | 2.5 |" in text
    assert benchmark_report.counters(tmp_path / "none.csv") == ""


def test_report_without_measurements(tmp_path):
    assert benchmark_report.pages(benchmark_report.read(tmp_path), tmp_path) == {}


def test_pages_are_current():
    """The pages are current. If they are not, run `make results`."""
    folder = benchmark_report.RESULTS
    pages = benchmark_report.pages(benchmark_report.read(folder), folder)
    assert set(pages) == {"performance.md", "training-steps.md", "linear-attention.md", "adapted-models.md"}
    for name, text in pages.items():
        assert (PAGES / name).read_text(encoding="utf-8") == text, name


def test_the_front_page_shows_the_fastest_peer_with_a_label():
    peers = ["torch.compile, tables", "torch.compile, rotate_half", "timm, eager", OURS]
    rows = pd.DataFrame({"peer": peers, "workload": "text", "share": [0.7, 0.8, 0.9, 0.6]})
    shares = front.fastest_shares(rows)
    assert shares.to_dict() == {("PyTorch, compiled", "text"): 0.8, ("lrpe-md", "text"): 0.6}
