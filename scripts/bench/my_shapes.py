"""What would I gain, on my GPU, at my sizes? In about a minute, beside torch.compile, timm and what else is installed.

    python -m scripts.bench my-shapes --batch 8 --heads 24 --grid 21x45x80 --head-dim 128
    python -m scripts.bench my-shapes --batch 8 --heads 32 --kv-heads 8 --grid 8192 --pairs interleaved
    python -m scripts.bench my-shapes --batch 64 --heads 12 --grid 14x14 --prefix 1 --learned --linear --layers 12

It measures as `bench operators` and `bench linear` do, see there: each result is held against float64 before it is
timed, times are medians on the GPU's clock with a cold L2 cache. Peers that rotate by tables have them made beforehand.
Writes a CSV (with --linear a second one), with versions, GPU and commit in each row, and a plot.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch._functorch.config as functorch_config
import typer
from rich.console import Console
from rich.table import Column, Table

from lrpe_md.testing import Case, LinearCase, Workload

from ..common.devices import choose_device
from ..common.folder import save_whole
from ..common.options import LIMIT, choose
from ..common.plots import OKABE_ITO, STYLE, plt
from ..common.provenance import measured_on
from . import linear
from .linear_measure import Run
from .measure import COPY, TURNS, OutOfTime, Session, in_words, release_memory
from .operators import environment, load_peers, run_passes
from .peers import OURS, Peer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PACKAGES = {"liger": "liger_kernel", "flash-attn": "flash_attn", "xopes": "xopes"}
PASS_NAMES = {
    "fwd": "forward", "bwd": "backward", "bwd_omega": "backward with ω", "forward": "forward", "backward": "backward",
    "backward_omega": "backward with ω",
}  # fmt: skip
COLD = 2**30  # bytes of a call's tensors beyond which no cache keeps anything for the next
SOFTMAX = 1e14  # operations of a forward beyond which softmax attention would take most of the minute
STAND_IN = "lrpe-md's reference in torch"
FLOOR = "a copy of as many bytes"
NAMES = {  # of the ways of linear attention
    linear.SDPA: "softmax attention, no positions", linear.UNFUSED: "the map by lrpe-md, products by torch",
    linear.COMPILED: "the same, torch.compile",
}  # fmt: skip


@dataclass(frozen=True)
class Shapes(Workload):
    """A layer of the user's: q and k go in, for either map."""

    pairs: str = "half"
    dtype: torch.dtype = torch.bfloat16

    def case(self, map: Any, *, per_head: bool = False, **changes: Any) -> Case:
        both = super().case("rotate", per_head=per_head, dtype=self.dtype, **changes)
        return replace(both, map=map, pairs=self.pairs if map == "rotate" else "half")

    def linear_case(self, map: Any) -> LinearCase:
        return LinearCase(
            map, self.shape, self.prefix, batch=self.batch, heads=(self.heads, self.heads), head_dim=self.head_dim,
            dtype=self.dtype, layout="packed",
        )  # fmt: skip

    def bytes_needed(self, map: str) -> tuple[int, int]:
        """Of one call's inputs, outputs and their gradients; and of one tensor q."""
        case = self.case(map)
        token = self.batch * self.num_tokens * torch.empty(0, dtype=self.dtype).element_size()
        wide = 2 * sum(case.heads) * case.out_dim  # y and its gradient
        packed = 3 * self.heads if case.layout == "packed" else sum(case.heads)
        return token * (wide + (packed + sum(case.heads)) * self.head_dim), token * self.heads * self.head_dim

    def __str__(self) -> str:
        grid, kv = "x".join(map(str, self.shape)), f", kv heads {self.key_heads}" if self.key_heads else ""
        prefix = f", prefix {self.prefix}" if self.prefix else ""
        return f"batch {self.batch}, heads {self.heads}{kv}, grid {grid}{prefix}, {self.pairs}"


class Time(NamedTuple):
    """A line of the CSV, as table and plot want it; ms None: not measured."""

    what: str
    peer: str
    which: str
    ms: float | None
    note: str


@dataclass
class Found:
    times: list[Time] = field(default_factory=list)

    @property
    def whats(self) -> list[str]:
        return list(dict.fromkeys(each.what for each in self.times))

    def passes(self, what: str) -> list[str]:
        return list(dict.fromkeys(each.which for each in self.times if each.what == what))

    def of(self, what: str) -> dict[str, dict[str, Time]]:
        """By peer and pass, ours first, then the fastest."""
        peers: dict[str, dict[str, Time]] = {}
        for each in self.times:
            if each.what == what:
                peers.setdefault(each.peer, {})[each.which] = each
        passes = self.passes(what)
        return dict(sorted(peers.items(), key=lambda item: (item[0] not in (OURS, STAND_IN), total(item[1], passes))))


def total(times: dict[str, Time], passes: list[str]) -> float:
    """Milliseconds of all passes; infinite where one is missing."""
    found = [times[which].ms if which in times else None for which in passes]
    return math.inf if None in found else sum(ms for ms in found if ms is not None)


# --- measuring -------------------------------------------------------------------------------------------------------


def installed() -> dict[str, Path]:
    """The folders that hold other libraries' packages."""
    found = {}
    for name, package in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            found[name] = Path(next(iter(spec.submodule_search_locations))).parent
    return found


def choose_peers(shapes: Shapes, device: torch.device) -> tuple[dict[str, Peer], list[str]]:
    """Who can be compared, and what is to be said of the others. On a CPU what is ours is the reference."""
    known, broken = load_peers(dict(installed()))
    said = [f"without {name}: {why}" for name, why in broken.items()]
    said += [f"without {name}: not installed" for name in PACKAGES if name not in installed()]
    wrong = [name for name, peer in known.items() if shapes.pairs not in peer.pairs]
    said += [f"without {name}: it has no {shapes.pairs} pairs" for name in wrong]
    chosen = {name: replace(peer, text=False) for name, peer in known.items() if name not in wrong}
    if len(shapes.shape) > 1:
        chosen = {name: peer for name, peer in chosen.items() if not known[name].text}
    if device.type == "cuda":
        return chosen, said
    said.append(
        "There is no GPU here: the kernels can't be measured. What follows times the reference in torch that stands in "
        "for them on a CPU, and the others on the same CPU; it says nothing about a GPU. torch.compile is left out"
    )
    ours = {STAND_IN: chosen[OURS]}
    return ours | {n: p for n, p in chosen.items() if n not in (OURS, "torch, eager") and not p.compiled}, said


def check_memory(shapes: Shapes, maps: list[str], free: int) -> int:
    """How many copies of the inputs calls take in turns; refuses what can't fit."""
    needed, one = max(shapes.bytes_needed(each) for each in maps)
    if needed > free:
        fits = shapes.batch * free // needed
        raise typer.BadParameter(
            f"--batch {shapes.batch}: q, k and their gradients take {needed / 2**30:,.1f} GiB ({one / 2**30:,.1f} GiB "
            f"each of them), {free / 2**30:,.1f} GiB are free; "
            + (f"--batch {fits} fits, and times grow with the batch" if fits else "make the grid smaller")
        )
    return 1 if needed > COLD else TURNS


def free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_operators(session: Session, shapes: Shapes, maps: list[str], learned: bool, peers: dict[str, Peer]) -> None:
    """Ours for each map, then the others: the time may be up before all are done."""
    passes, kind = (["fwd", "bwd_omega"], "per-head") if learned else (["fwd", "bwd"], "shared")
    ours = {name: peer for name, peer in peers.items() if name in (OURS, STAND_IN)}
    for group in (ours, {name: peer for name, peer in peers.items() if name not in ours}):
        for op in maps:
            run_passes(session, passes, str(shapes), shapes, op, kind, group)


def measure_linear(run: Run, shapes: Shapes, maps: list[str]) -> None:
    """Linear attention with each map, ours and in torch; and softmax attention, which has none."""
    cases = [(impl, shapes.linear_case(op)) for impl in (linear.OURS, linear.UNFUSED, linear.COMPILED) for op in maps]
    cases.append((linear.SDPA, shapes.linear_case(None)))
    operations = 4 * shapes.batch * shapes.heads * shapes.num_tokens**2 * shapes.head_dim
    for impl, case in cases:
        key = {"workload": str(shapes), "map": case.map or "none", "mask": case.mask, "impl": impl}
        if run.device.type == "cpu" and impl == linear.COMPILED:
            continue
        if time.monotonic() > run.deadline:
            raise OutOfTime
        if impl == linear.SDPA and operations > SOFTMAX:
            run.add(**key, note=f"left out: {operations:.1e} operations a forward; a smaller --batch shows it")
            continue
        try:
            linear.measure(run, str(shapes), case, impl)
        except Exception as error:  # out of memory: the next can be measured
            run.add(**key, note=in_words(error))
        release_memory(run.device)


def collect(session: Session, run: Run | None) -> Found:
    """The rows of both, as times."""
    found = Found()
    for row in session.rows:
        if row.get("op"):
            note = "" if row.get("in_budget", True) else "less exact than float32 allows; "
            note += row.get("note", "").partition(": RMS")[0]
            peer = FLOOR if row["peer"] == COPY else row["peer"]
            found.times.append(Time(row["op"], peer, row["mode"], row.get("p50"), note))
    rows = run.rows if run else []
    mapped = dict.fromkeys(row["map"] for row in rows if row["map"] != "none")
    for row in rows:
        which, impl = row.get("pass") or "forward", row["impl"]
        if which == "backward_omega":  # ours alone has it
            continue
        peer = STAND_IN if impl == OURS and session.device.type == "cpu" else NAMES.get(impl, impl)
        for each in mapped if row["map"] == "none" else [row["map"]]:  # what has no map stands beside every one
            what = f"linear attention, {each}"
            found.times.append(Time(what, peer, which, row.get("ms"), row.get("note", "")))
    return found


# --- what is shown ---------------------------------------------------------------------------------------------------


def show(found: Found, console: Console, layers: int) -> None:
    """A table for each operation: milliseconds, how many times ours that is, what a step saves."""
    for what in found.whats:
        peers, passes = found.of(what), found.passes(what)
        first, ours = next(iter(peers.items()))
        compared = first == OURS
        saved = [f"saved by {layers} layer{'s' * (layers > 1)}"] if compared else []
        caption = f"×: as long as {OURS} takes; both passes are what a layer costs a step" if compared else None
        columns = *(PASS_NAMES[which] for which in passes), "both", *saved, ""
        table = Table(Column(no_wrap=True), *columns, title=f"{what}, milliseconds", box=None, caption=caption)
        for name, times in peers.items():
            cells = [
                in_text(times.get(which), ours.get(which) if compared and name != first else None) for which in passes
            ]
            both, own = total(times, passes), total(ours, passes)
            gain = f"{layers * (both - own):.3g}" if name not in (first, FLOOR) and max(both, own) < math.inf else ""
            notes = "; ".join(dict.fromkeys(each.note for each in times.values() if each.note))
            sums = f"{both:.3g}" if both < math.inf else "-"
            table.add_row(name, *cells, sums, *([gain] if compared else []), notes)
        console.print(table)
        console.print()


def in_text(one: Time | None, ours: Time | None) -> str:
    if one is None or one.ms is None:
        return "-"
    return f"{one.ms:.3g}" + (f" (×{one.ms / ours.ms:.2f})" if ours is not None and ours.ms else "")


def plot(found: Found, path: Path, title: str) -> bool:
    """A panel for each operation: a bar for each peer, the backward behind the forward."""
    panels: dict[str, dict[str, dict[str, Time]]] = {}
    for what in found.whats:
        whole = {n: times for n, times in found.of(what).items() if total(times, found.passes(what)) < math.inf}
        panels |= {what: whole} if whole else {}
    if not panels:
        return False
    counts, colours = [len(peers) for peers in panels.values()], (OKABE_ITO["blue"], OKABE_ITO["orange"])
    size = 8, 0.8 + 0.75 * len(panels) + 0.3 * sum(counts)
    with plt.rc_context({**STYLE, "axes.grid.axis": "x", "axes.axisbelow": True}):
        figure, axes = plt.subplots(
            len(panels), figsize=size, squeeze=False, layout="constrained", height_ratios=counts
        )  # fmt: skip
        for axis, (what, peers) in zip(axes[:, 0], panels.items(), strict=True):
            left = np.zeros(len(peers))
            for which, colour in zip(found.passes(what), colours, strict=True):
                widths = np.array([times[which].ms for times in peers.values()], dtype=float)
                axis.barh(list(peers), widths, left=left, color=colour, label=PASS_NAMES[which], height=0.6)
                left += widths
            axis.invert_yaxis()
            axis.set_title(what, fontsize=10, loc="left")
        handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower right", ncols=2, frameon=False, fontsize=8)
        axes[-1, 0].set_xlabel("milliseconds a layer")
        figure.suptitle(title, fontsize=9)
        save_whole(path, lambda part: figure.savefig(part, dpi=120, format="png"))
        plt.close(figure)
    return True


# --- command line ----------------------------------------------------------------------------------------------------


def parse_grid(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", text) or not math.prod(map(int, text.split("x"))):
        raise typer.BadParameter(
            f"--grid: expected sizes by axis, the slowest first, as 21x45x80 or 4096, got {text!r}"
        )
    return tuple(map(int, text.split("x")))


def make_shapes(
    batch: int, heads: int, kv_heads: int | None, grid: str, prefix: int, head_dim: int, pairs: str, dtype: str
) -> Shapes:
    """What the options say, checked."""
    choose("--pairs", [pairs], ("half", "interleaved"))
    choose("--dtype", [dtype], DTYPES)
    if kv_heads is not None and heads % kv_heads:
        raise typer.BadParameter(f"--kv-heads: expected a divisor of --heads {heads}, got {kv_heads}")
    if head_dim % 2:
        raise typer.BadParameter(f"--head-dim: expected an even number, got {head_dim}")
    keys = None if kv_heads == heads else kv_heads
    return Shapes(batch, heads, parse_grid(grid), prefix, head_dim, keys, pairs, DTYPES[dtype])


def main(
    heads: Annotated[int, typer.Option(min=1, help="Of q.")],
    grid: Annotated[str, typer.Option(help="Tokens by axis, the slowest first: 21x45x80, 14x14, 8192.")],
    head_dim: Annotated[int, typer.Option(min=2)],
    batch: Annotated[int, typer.Option(min=1)] = 1,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Of k, where they are fewer (GQA).")] = None,
    prefix: Annotated[int, typer.Option(min=0, help="Class, register or text tokens in front.")] = 0,
    map: Annotated[str, typer.Option(help="rotate, cosine or both.")] = "rotate",
    pairs: Annotated[str, typer.Option(help="Of rotate: half or interleaved.")] = "half",
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "bfloat16",
    learned: Annotated[bool, typer.Option("--learned", help="Frequencies by head, and their gradient.")] = False,
    linear_too: Annotated[bool, typer.Option("--linear", help="Linear attention with the map in it, too.")] = False,
    layers: Annotated[int, typer.Option(min=1, help="Of your model: what a step saves.")] = 1,
    limit: Annotated[float, LIMIT] = 60.0,
    rep: Annotated[int, typer.Option(min=1, help="Milliseconds of GPU time a measurement.")] = 60,
    out: Annotated[Path, typer.Option(help="The CSV; the plot lies beside it.")] = Path("my-shapes.csv"),
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    commit: Annotated[str | None, typer.Option(help="To record where the files are without their history.")] = None,
) -> None:  # fmt: skip
    """Measure your own sizes: our kernels beside torch.compile, timm and the peers that are installed."""
    start, where = time.monotonic(), choose_device(device)
    shapes = make_shapes(batch, heads, kv_heads, grid, prefix, head_dim, pairs, dtype)
    choose("--map", [map], ("rotate", "cosine", "both"))
    maps = ["rotate", "cosine"] if map == "both" else [map]
    if linear_too and (shapes.key_heads or pairs != "half"):
        raise typer.BadParameter("--linear: measured with as many kv heads as heads and half pairs; leave those out")
    free = free_memory(where)
    turns = check_memory(shapes, maps, free)
    copied = 2**20 if where.type == "cpu" else 2**30 if free > 2**33 else 2**26  # elements
    peers, said = choose_peers(shapes, where)
    console, progress = Console(highlight=False), Console(stderr=True, width=160, soft_wrap=True)
    for text in said:
        console.print(text, markup=False, soft_wrap=True)
    functorch_config.donated_buffer = False  # graphs are kept, and differentiated again and again
    session = Session(out, where, start + limit, rep, True, environment(where, commit), progress, turns)
    run = None
    try:
        session.measure_copy(copied)
        measure_operators(session, shapes, maps, learned, peers)
        if linear_too:
            file = out.with_name(f"{out.stem}-linear.csv")
            run = Run(file, where, rep, start + limit, measured_on(where, commit), progress)
            run.begin()
            run.measure_copy(copied)
            measure_linear(run, shapes, maps)
    except OutOfTime:
        console.print(f"Stopped after {limit:g} s, what is missing was not measured; --limit gives it longer")
    found = collect(session, run)
    gpu = session.here["gpu"]
    title = f"{shapes}, head_dim {head_dim}, {dtype}; {gpu}, torch {session.here['torch']}"
    console.print(f"\n{title}\n", markup=False, soft_wrap=True)
    show(found, console, layers)
    picture = out.with_suffix(".png")
    files = [out, *([run.out] if run else []), *([picture] if plot(found, picture, title) else [])]
    console.print(f"{', '.join(str(file) for file in files)}: {time.monotonic() - start:.0f} s", markup=False)
