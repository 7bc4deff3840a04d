"""The program ``lrpe-md fuzz``, which compares random configurations with the formula."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..common.options import Command, group_options

app = typer.Typer(add_completion=False)
TESTS = Path(__file__).resolve().parents[2] / "tests"
PANELS = {"What is checked": "impl only device", "How much": "count seed seconds processes repeat"}
KINDS = {"all": ("linear", "maps"), "linear": ("linear",), "maps": ("maps",)}
SLOWEST = 120.0  # seconds after which a configuration counts as hanging
SHRUNK = 1  # number of failures per job to reduce to a smaller configuration


class GPUError(RuntimeError):
    """Error after which the process can't use the GPU. The message names the seed that caused it, or a later seed."""


class Job(NamedTuple):
    """Seeds for one kind of configuration, to be checked by one process."""

    kind: str
    seeds: range
    impl: str
    device: str
    repeat: int


class Result(NamedTuple):
    """Outcome of a job."""

    job: Job
    done: int
    reports: list[str]
    largest: tuple[float, str] = (0.0, "")  # error relative to rounding, and the seed
    mean: tuple[float, str] = (0.0, "")


@app.command(cls=Command, epilog="Example: lrpe-md fuzz --impl reference --count 100")
@group_options(PANELS)
def main(
    impl: Annotated[str, typer.Option(help="Implementation to check: reference or triton.")] = "triton",
    only: Annotated[
        str, typer.Option(help="What to check: all, linear (linear attention) or maps (cosine and rotate).")
    ] = "all",
    device: Annotated[
        str, typer.Option(help="Device: cpu, cuda or auto. On a CPU, kernels run in Triton's interpreter.")
    ] = "auto",
    count: Annotated[int, typer.Option(min=1, help="Number of configurations.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="First seed. Each configuration uses the next seed.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Time budget in seconds; 0 sets no limit.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    repeat: Annotated[
        int,
        typer.Option(
            min=0, help="Number of consecutive seeds per compiled variant; 0 means 20 on a GPU and 1 on a CPU."
        ),
    ] = 0,
) -> None:
    """Compare outputs and gradients of random configurations with the formula. The exit code is 1 on a mismatch."""
    from ..common.devices import choose_device
    from ..common.options import choose

    choose("--impl", [impl], ("reference", "triton"))
    choose("--only", [only], tuple(KINDS))
    kind = choose_device(device).type
    interpreting = impl == "triton" and kind == "cpu"
    if interpreting and not (TESTS / "interpreting.py").is_file():
        raise typer.BadParameter(
            "--impl triton: expected a GPU, or a checkout of the repository, which Triton's interpreter needs"
        )
    if interpreting:
        os.environ["TRITON_INTERPRET"] = "1"  # new processes inherit this before they import triton
    repeat = repeat or (20 if kind == "cuda" else 1)
    size = -(-max(repeat, 10) // repeat) * repeat
    starts = range(seed // repeat * repeat, seed + count, size)
    jobs = [
        Job(each, range(max(seed, n), min(n + size, seed + count))[i :: len(KINDS[only])], impl, kind, repeat)
        for n in starts
        for i, each in enumerate(KINDS[only])
    ]
    begun = time.monotonic()
    results = run_jobs([job for job in jobs if job.seeds], processes, begun + seconds if seconds else None)
    if not any(r.done or r.reports for r in results):
        raise typer.BadParameter(f"--seconds: expected enough time for at least one configuration, got {seconds:g}")
    done, failed = sum(r.done for r in results), sum(len(r.reports) for r in results)
    (largest, at), (mean, mean_at) = (max(getattr(r, name) for r in results) for name in ("largest", "mean"))
    print(
        f"{done} configurations, {failed} mismatches, {time.monotonic() - begun:.0f} s. Largest error {largest:.2f} "
        f"({at}), RMS {mean:.2f} ({mean_at}) times the error that rounding explains"
    )
    if failed:
        raise typer.Exit(1)


def run_jobs(jobs: list[Job], processes: int, end: float | None) -> list[Result]:
    """Run jobs in new processes, and print each report immediately."""
    results: list[Result] = []
    waiting = iter(jobs)
    running: dict[Future[Result], Job] = {}
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=prepare) as pool:
        while True:
            while len(running) < 2 * processes and (end is None or time.monotonic() < end):
                job = next(waiting, None)
                if job is None:
                    break
                running[pool.submit(run_job, job, end)] = job
            if not running:
                return results
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    seeds = [f"{each.kind} {each.seeds}" for each in (job, *running.values())]
                    print(f"A process died while it ran one of these seeds: {'; '.join(seeds)}")
                    return [*results, Result(job, 0, ["died"])]
                except GPUError as error:
                    print(error, flush=True)
                    return [*results, Result(job, 0, ["GPU error"])]
                results.append(result)
                print(*result.reports, sep="\n", end="\n" if result.reports else "", flush=True)


def prepare() -> None:
    """Set up a new process."""
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*(deterministic|CuBLAS|overflow).*")
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("pytest"):
        sys.path.append(str(TESTS))
        import pytest

        interpreting = importlib.import_module("interpreting")
        interpreting.quicken(pytest.MonkeyPatch())
        interpreting.check_bounds(pytest.MonkeyPatch())


def run_job(job: Job, end: float | None) -> Result:
    """Check each seed of a job until the time ``end``."""
    from .check import check, shrink
    from .draw import Limits, draw

    limits = Limits(repeat=job.repeat)
    if job.device == "cuda":
        limits = Limits(300, 1500, job.repeat, compiled=True)
    elif job.impl == "triton":  # the interpreter takes milliseconds per program
        limits = Limits(24, 100, job.repeat, copies=2)
    reports: list[str] = []
    done, largest, mean = 0, (0.0, ""), (0.0, "")
    for seed in job.seeds:
        if end is not None and time.monotonic() > end:
            break
        config, done = draw(seed, job.kind, limits), done + 1
        try:
            with limit_time(seed, config):
                verdict = check(config, job.impl, job.device)
        except Exception as error:
            if "CUDA error" in str(error):  # later CUDA calls of this process would also fail
                raise GPUError(f"seed {seed}: {config!r}\n    {describe(error)}") from None
            reports.append(f"seed {seed}: {config!r}\n    {describe(error)}")
            continue
        if not verdict.mismatches:
            at = f"{job.kind}, seed {seed}"
            largest, mean = max(largest, (verdict.largest, at)), max(mean, (verdict.mean, at))
            continue
        smaller: Any = shrink(config, job.impl, job.device) if len(reports) < SHRUNK else config
        lines = [f"seed {seed}: {config!r}", *(f"    {m}" for m in verdict.mismatches)]
        reports.append("\n".join([*lines, f"    smaller: {smaller!r}"] if smaller != config else lines))
    return Result(job, done, reports, largest, mean)


@contextmanager
def limit_time(seed: int, config: Any) -> Iterator[None]:
    """If a configuration takes longer than SLOWEST, print it and each thread's stack, and end the process."""

    def stop() -> None:
        print(f"seed {seed} takes longer than {SLOWEST:g} s: {config!r}", flush=True)
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(SLOWEST, stop)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(SLOWEST + 5, exit=True)  # in case native code holds the interpreter's lock
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def describe(error: BaseException) -> str:
    """Describe the first error in a chain, including where it was raised."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # pyright: ignore[reportAssignmentType]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {str(error)[:500]}"
