"""Find the fastest tiles for this GPU, and print ``TILES`` of engine/encode/plan.py and engine/linear/plan.py.

    lrpe-md bench tune                                    every row, in the format of plan.py
    lrpe-md bench tune --only "2 rotate" --only "4 cosine forward"
    lrpe-md bench tune --only "linear keys" --only "linear queries"
    lrpe-md bench tune --check                            check that each tile of the table is within 3% of the best

A row of the table is keyed by bytes per element, map, pass, and kind (plain, with an activation, or with the caller's
cos and sin tables). Each row has a tile for up to 16 channels, a tile for up to 64, and a tile for more. Tiles for up
to 16 channels are timed on 64×64 tokens with head_dim 72 and 80, where channels are processed in blocks. Tiles for up
to 64 are timed on 14×14 and 64×64 tokens with head_dim 64, and tiles for more channels on 21×30×52 tokens with head_dim
128. Each tile is timed with shared and with per-head frequencies or tables. A row of linear attention ("linear ...") is
keyed by pass and has tiles for seven state sizes. Tiles of linear attention are timed in a complete forward or backward
pass: causal kernels on causal workloads, the delta rule on frames-delta, kernels that handle an entire head on vit224
or windows, and all other kernels on img64 and video64. Times are medians of GPU time with a cold L2 cache.

A tile's score is its time relative to the fastest tile, on the problem where this ratio is largest. The lowest score is
best. The search first tries all shapes with the table's registers and stages. The search then varies the registers and
stages of the three best shapes. Finally, the best tiles and the table's tile take turns in another timing. The CSV
contains every measured time.
"""

from __future__ import annotations

import csv
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lrpe_md.engine.core.operator import call_cache
from lrpe_md.engine.encode.plan import TILES, Pass, Tile
from lrpe_md.engine.linear.plan import LinearTile

from ..common.cases import Case, Inputs, bind
from ..common.devices import gpu_name
from ..common.options import LIMIT, OUT
from ..common.provenance import git_commit, versions
from . import linear_tune
from .layers import WORKLOADS, Workload
from .linear_tune import LinearPlace
from .measure import TURNS, OutOfTime, cold_times, describe_error, make_pass, quantiles
from .peers import large_inputs

WIDTHS = ("up to 16", "up to 64", "more")  # numbers of channels; each row of TILES has one tile for each
BLOCKS = {f"img64, head_dim {d}": replace(WORKLOADS["img64"], head_dim=d) for d in (72, 80)}
PROBLEMS = (BLOCKS, {name: WORKLOADS[name] for name in ("vit224", "img64")}, {"video": WORKLOADS["video"]})
MODES = {Pass.FORWARD: "fwd", Pass.BACKWARD: "bwd", Pass.DOMEGA: "bwd_omega"}
DTYPES = {2: torch.bfloat16, 4: torch.float32}
WITHIN = 1.03  # largest time relative to the best that --check accepts
FINALISTS = 3
FIELDS = dict.fromkeys((*Tile._fields, *LinearTile._fields))
KEY = ("row", "channels", *FIELDS, "problem", "round")
COLUMNS = (*KEY, "p20", "p50", "p80", "min", "note", "gpu", "python", "torch", "triton", "commit", "date")


class Place(NamedTuple):
    """Table entry that holds one tile."""

    key: tuple[int, Any, Pass, str]
    width: int  # index into WIDTHS

    @property
    def row(self) -> str:
        itemsize, map, stage, kind = self.key
        return f"{itemsize} {map} {stage.value}" + (f" {kind}" if kind != "plain" else "")

    def __str__(self) -> str:
        return f"{self.row}, {self.name}"

    @property
    def name(self) -> str:
        """Name of the width."""
        return WIDTHS[self.width]

    @property
    def stage(self) -> Pass:
        return self.key[2]

    @property
    def act(self) -> str:
        return "silu" if self.key[3] == "activated" else "none"

    @property
    def tile(self) -> Tile:
        return TILES[self.key][self.width]

    def cases(self, small: bool = False) -> dict[str, Case]:
        """Return the problems to time, by name. With ``small``, return faster problems that use the same kernels."""
        found = {}
        for name, work in PROBLEMS[self.width].items():
            for per_head in (False, True):
                heads = "by head" if per_head else "shared"
                found[f"{name}, {heads}"] = self.case(shrink(work) if small else work, per_head)
        return found

    def case(self, work: Workload, per_head: bool) -> Case:
        options: dict[str, Any] = {"act": self.act, "dtype": DTYPES[self.key[0]]}
        options |= {"tables": "full"} if self.key[3] == "tables" else {}
        return work.case(self.key[1], per_head=per_head, **options)

    def shapes(self) -> list[Tile]:
        """Return candidates that vary rows, elements and warps, with the table's registers and stages."""
        found = []
        most = 64 if self.key[0] == 2 else 16  # maximum number of elements per thread, over all rows
        for rows in (1, 2, 4):
            for elements in (128, 256, 512, 1024, 2048):
                for num_warps in (1, 2, 4):
                    held = elements // (32 * num_warps)
                    if 4 <= held <= 16 and 8 <= rows * held <= most:
                        found.append(self.tile._replace(rows=rows, elements=elements, num_warps=num_warps))
        return found

    def refinements(self, tile: Tile) -> list[Tile]:
        """Return candidates with the same shape but different registers and stages, or with all rows loaded first."""
        if self.stage is not Pass.DOMEGA:
            return [tile._replace(rows_first=not tile.rows_first)]
        options = [(registers, stages) for registers in (128, 168, 255) for stages in (1, 2, 3)]
        found = [tile._replace(max_registers=registers, stages=stages) for registers, stages in options]
        return [other for other in found if other != tile]

    @contextmanager
    def in_table(self, tile: Tile) -> Iterator[None]:
        """Put a tile into the table, and remove the tiles for other widths, so that calls with other widths fail."""
        kept = TILES[self.key]
        tiles: list[Any] = [None] * len(kept)
        tiles[self.width] = tile
        try:
            TILES[self.key] = tuple(tiles)
            call_cache.clear()  # contains launches that were planned with another table
            yield
        finally:
            TILES[self.key] = kept
            call_cache.clear()

    def passes(self, inputs: Sequence[Inputs], impl: str = "triton") -> list[Callable[[], Any]]:
        return [make_pass(MODES[self.stage], bind(each, impl), each) for each in inputs]

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        return large_inputs(case, device)


def shrink(work: Workload) -> Workload:
    return replace(work, batch=1, heads=2, shape=tuple(min(n, 4) for n in work.shape), prefix=min(work.prefix, 1))


# --- scoring and search ----------------------------------------------------------------------------------------------

AnyPlace: TypeAlias = Place | LinearPlace
AnyTile: TypeAlias = Tile | LinearTile
Times: TypeAlias = dict[Any, dict[str, float]]  # milliseconds by tile and problem, infinite if the tile can't run
Measure = Callable[[Any, str], float]


def scores(times: Times) -> dict[Any, float]:
    """Return each tile's score, lowest first: its time relative to the fastest tile, on its worst problem."""
    problems = next(iter(times.values())).keys()
    fastest = {p: min(each[p] for each in times.values()) for p in problems}
    found = {
        tile: max(each[p] / fastest[p] if each[p] < math.inf else math.inf for p in problems)
        for tile, each in times.items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


class Found(NamedTuple):
    place: AnyPlace
    best: AnyTile
    score: float
    table_score: float  # score of the table's tile

    @property
    def ratio(self) -> float:
        """Time of the table's tile relative to the best tile."""
        return self.table_score / self.score if self.score < math.inf else math.inf


def search(
    place: Any, measure: Measure, rounds: int, prepare: Callable[[list[Any]], Any] = lambda tiles: None
) -> Found:
    """Find the best tile. ``prepare`` is called with the tiles that will be measured next."""
    problems, times = list(place.cases()), {}

    def attempt(tiles: Iterable[AnyTile]) -> None:
        new = [tile for tile in dict.fromkeys(tiles) if tile not in times]
        prepare(new)
        for tile in new:
            times[tile] = {problem: measure(tile, problem) for problem in problems}

    attempt([place.tile, *place.shapes()])
    attempt(other for tile in list(scores(times))[:FINALISTS] for other in place.refinements(tile))
    finalists = dict.fromkeys([*list(scores(times))[:FINALISTS], place.tile])
    again: dict[Any, dict[str, list[float]]] = {tile: {p: [] for p in problems} for tile in finalists}
    for _ in range(rounds):
        for tile, problem in ((t, p) for p in problems for t in finalists):
            again[tile][problem].append(measure(tile, problem))
    final = scores({t: {p: statistics.median(each) for p, each in of.items()} for t, of in again.items()})
    best = next(iter(final))
    return Found(place, best, final[best], final[place.tile])


# --- measuring -------------------------------------------------------------------------------------------------------


def compile_small(place: Any, tile: Any) -> None:
    """Compile a tile's kernels in a separate process, to fill the compiler's cache before timing."""
    for case in place.cases(small=True).values():
        with place.in_table(tile):
            place.passes([place.inputs(case, torch.device("cuda"))])[0]()
    torch.cuda.synchronize()


@dataclass
class Session:
    """State shared by all measurements. Each measured time is appended to the CSV immediately."""

    out: Path
    device: torch.device
    rep: int
    deadline: float
    here: dict[str, Any]
    pool: ProcessPoolExecutor | None = None
    inputs: dict[str, list[Any]] = field(default_factory=dict)  # inputs of the current place

    def __post_init__(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writeheader()

    def measure(self, place: Any, counted: dict[tuple[AnyTile, str], int], tile: Any, problem: str) -> float:
        """Return the median time in milliseconds, or infinity if the tile can't be compiled or launched."""
        if time.monotonic() > self.deadline:
            raise OutOfTime
        row = {"row": place.row, "channels": place.name, **tile._asdict(), "problem": problem}
        row["round"] = counted[tile, problem] = counted.get((tile, problem), -1) + 1
        try:
            found = quantiles(self.time(place, tile, problem))
        except Exception as error:  # for example, too many registers or too much shared memory
            found = {"p50": math.inf, "note": describe_error(error)}
        with self.out.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow({**row, **found, **self.here})
        return found["p50"]

    def time(self, place: Any, tile: Any, problem: str) -> list[float]:
        if problem not in self.inputs:
            case = place.cases()[problem]
            self.inputs[problem] = [place.inputs(case, self.device) for _ in range(TURNS)]
        with place.in_table(tile):
            return cold_times(place.passes(self.inputs[problem]), self.rep)

    def compile(self, place: AnyPlace, tiles: list[AnyTile]) -> None:
        """Compile the tiles in parallel before timing any of them."""
        if self.pool is None:
            return
        if time.monotonic() > self.deadline:
            raise OutOfTime
        for job in [self.pool.submit(compile_small, place, tile) for tile in tiles]:
            job.exception()  # a failure is reported when the tile is timed

    def tune(self, place: AnyPlace, rounds: int) -> Found:
        self.inputs.clear()
        torch.cuda.empty_cache()
        return search(place, partial(self.measure, place, {}), rounds, partial(self.compile, place))


# --- the table -------------------------------------------------------------------------------------------------------


def write_tile(tile: AnyTile) -> str:
    """Format a tile as in plan.py, omitting default values. Arguments after an omitted one are passed by name."""
    defaults, given, named = tile._field_defaults, [], False
    for name, value in tile._asdict().items():
        if name in defaults and value == defaults[name]:
            named = True
        else:
            given.append(f"{name}={value!r}" if named else repr(value))
    return f"{type(tile).__name__}({', '.join(given)})"


def write_key(key: tuple[int, Any, Pass, str]) -> str:
    itemsize, map, stage, kind = key
    return f'({itemsize}, "{map}", {stage}, "{kind}")'


def write_table(tiles: dict[tuple[int, Any, Pass, str], tuple[Tile, ...]]) -> str:
    lines = ["TILES = {"]
    for key, row in tiles.items():
        written = list(map(write_tile, row))
        line = f"    {write_key(key)}: ({', '.join(written)}),"
        if len(line) > 120:
            line = "\n        ".join([f"    {write_key(key)}: (", *(f"{tile}," for tile in written)]) + "\n    ),"
        lines.append(line)
    return "\n".join([*lines, "}  # fmt: skip"])


def write_tables(found: list[Found]) -> list[str]:
    """Format the tables with the best tiles that were found."""
    encode: Any = {key: list(row) for key, row in TILES.items()}
    linear: Any = {stage: dict(row) for stage, row in linear_tune.TILES.items()}
    for place, best, *_ in found:
        if isinstance(place, LinearPlace):
            linear[place.stage][place.width] = best
        else:
            encode[place.key][place.width] = best
    which = {isinstance(each.place, LinearPlace) for each in found}
    texts = [] if which == {True} else [write_table(encode)]
    return texts + [linear_tune.write_table(linear, write_tile)] * (True in which)


def summarise(found: list[Found]) -> Table:
    table = Table("row", "channels", "table", "best", "table over best", box=None)
    for each in found:
        text = f"{each.ratio:.3f}" + ("" if each.ratio <= WITHIN else " !")
        place = each.place
        table.add_row(place.row, place.name, write_tile(place.tile), write_tile(each.best), text)
    return table


# --- the command -----------------------------------------------------------------------------------------------------


def choose_places(only: Sequence[str]) -> list[AnyPlace]:
    """Return the places whose names contain one of the strings, or all places if no string is passed."""
    places: list[AnyPlace] = [Place(key, width) for key in TILES for width in range(len(WIDTHS))]
    places += linear_tune.choose_places()
    for text in only:
        if not any(text in str(place) for place in places):
            known = "; ".join(dict.fromkeys(place.row for place in places))
            raise typer.BadParameter(f"--only: no tile has {text!r} in its name; choose from: {known}")
    return [place for place in places if not only or any(text in str(place) for text in only)]


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    return {
        "gpu": gpu_name(device),
        "python": platform.python_version(),
        **versions("torch", "triton"),
        "commit": commit or git_commit(12),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def open_pool(jobs: int) -> ProcessPoolExecutor | None:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) if jobs else None


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Only tune tiles whose names contain this text; repeatable.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail if a tile in the table is more than 3% slower than the best one.")
    ] = False,
    out: Annotated[Path, OUT] = Path("scripts/results/tune.csv"),
    rep: Annotated[int, typer.Option(min=1, help="GPU time per measurement, in milliseconds.")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times to re-time the best tiles.")] = 3,
    limit: Annotated[float, LIMIT] = 3600.0,
    jobs: Annotated[int | None, typer.Option(min=0, help="Number of compiler processes. (default: up to 12)")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:
    """Find the fastest tiles for this GPU."""
    places = choose_places(only or [])
    if not torch.cuda.is_available():
        raise typer.BadParameter("tuning needs the target GPU, but PyTorch finds none")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise typer.BadParameter("tiles are timed on the GPU, but TRITON_INTERPRET is set; unset it")
    device = torch.device("cuda", torch.cuda.current_device())
    started, console = time.monotonic(), Console(width=160, soft_wrap=True)
    pool = open_pool(min(12, os.cpu_count() or 1) if jobs is None else jobs)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    found: list[Found] = []
    with Progress(*columns, console=console) as progress:
        session = Session(out, device, rep, started + limit, environment(device, commit), pool)
        task = progress.add_task("", total=len(places))
        try:
            for place in places:
                progress.update(task, description=str(place))
                found.append(session.tune(place, rounds))
                progress.advance(task)
        except OutOfTime:
            console.print(
                f"stopped after {limit:g} s: {len(places) - len(found)} of {len(places)} tiles were not tuned"
            )
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
    finish(console, found, len(places), check, out)


def finish(console: Console, found: list[Found], wanted: int, check: bool, out: Path) -> None:
    """Print the results, and fail if --check finds a slow tile."""
    console.print(summarise(found))
    if not check:
        for text in write_tables(found):
            console.print(text, highlight=False, markup=False)
    console.print(f"all times are in {out}", highlight=False)
    slow = [each for each in found if each.ratio > WITHIN]
    if check:
        text = f"{len(slow)} of {len(found)} tiles take more than {WITHIN:g} times the best"
        console.print(text + ("" if len(found) == wanted else f"; {wanted - len(found)} were not timed"))
        if slow or len(found) < wanted:
            raise typer.Exit(1)
