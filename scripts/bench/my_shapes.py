"""Compare lrpe-md with torch.compile, timm and other libraries that you have installed, on your GPU at your sizes.

    lrpe-md bench my-shapes --batch 8 --heads 24 --grid 21x45x80 --head-dim 128
    lrpe-md bench my-shapes --batch 8 --heads 32 --kv-heads 8 --grid 8192 --pairs interleaved
    lrpe-md bench my-shapes --batch 64 --heads 12 --grid 14x14 --prefix 1 --learned --linear --layers 12

The comparison takes about a minute, and works like `bench operators` and `bench linear`. Each result is checked against
float64 before it is timed, and times are medians of GPU time with a cold L2 cache. Peers that use tables get
precomputed tables. The results are written to a CSV (two with --linear), with versions, GPU and commit in each row, and
to a plot.
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

from ..common.cases import Case, LinearCase
from ..common.devices import choose_device
from ..common.folder import save_whole, unused_path
from ..common.options import LIMIT, choose, group_options
from ..common.plots import OKABE_ITO, STYLE, plt
from ..common.provenance import measured_on
from . import linear
from .layers import Workload
from .linear_measure import Run
from .measure import COPY, TURNS, OutOfTime, Session, describe_error, release_memory
from .operators import environment, load_peers, run_passes
from .peers import OURS, Peer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PACKAGES = {"liger": "liger_kernel", "flash-attn": "flash_attn", "xopes": "xopes"}
PASS_NAMES = {
    "fwd": "forward", "bwd": "backward", "bwd_omega": "backward with ω", "forward": "forward", "backward": "backward",
    "backward_omega": "backward with ω",
}  # fmt: skip
COLD = 2**30  # bytes; a call with tensors of this size evicts everything else from the caches
SOFTMAX = 1e14  # softmax attention is only timed if its forward pass needs at most this many operations
STAND_IN = "lrpe-md's reference in torch"
FLOOR = "same-size copy"
NAMES = {  # display names of implementations
    linear.SDPA: "softmax attention, no positions", linear.UNFUSED: "the map by lrpe-md, products by torch",
    linear.COMPILED: "the same, torch.compile",
}  # fmt: skip


@dataclass(frozen=True)
class Shapes(Workload):
    """Shapes of q and k in a layer of the user's model."""

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
        """Return the total size of a call's inputs, outputs and gradients, and the size of q, in bytes."""
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
    """Measurement for the table and the plot. ``ms`` is None if the time was not measured."""

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

    def by_peer(self, what: str) -> dict[str, dict[str, Time]]:
        """Return the times of an operation by peer and pass. lrpe-md comes first, then the peers by speed."""
        peers: dict[str, dict[str, Time]] = {}
        for each in self.times:
            if each.what == what:
                peers.setdefault(each.peer, {})[each.which] = each
        passes = self.passes(what)
        return dict(sorted(peers.items(), key=lambda item: (item[0] not in (OURS, STAND_IN), total(item[1], passes))))


def total(times: dict[str, Time], passes: list[str]) -> float:
    """Return the total milliseconds of all passes, or infinity if one is missing."""
    found = [times[which].ms if which in times else None for which in passes]
    return math.inf if None in found else sum(ms for ms in found if ms is not None)


# --- measuring -------------------------------------------------------------------------------------------------------


def installed() -> dict[str, Path]:
    """Return the folders of the other libraries that are installed, by name."""
    found = {}
    for name, package in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            found[name] = Path(next(iter(spec.submodule_search_locations))).parent
    return found


def choose_peers(shapes: Shapes, device: torch.device) -> tuple[dict[str, Peer], list[str]]:
    """Return the peers that support these shapes, and notes about the other peers.

    On a CPU, the PyTorch reference replaces lrpe-md's kernels.
    """
    known, broken = load_peers(dict(installed()))
    messages = [f"skipping {name}: {why}" for name, why in broken.items()]
    messages += [f"skipping {name}: not installed" for name in PACKAGES if name not in installed()]
    wrong = [name for name, peer in known.items() if shapes.pairs not in peer.pairs]
    messages += [f"skipping {name}: it does not support {shapes.pairs} pairs" for name in wrong]
    chosen = {name: replace(peer, text=False) for name, peer in known.items() if name not in wrong}
    if len(shapes.shape) > 1:
        chosen = {name: peer for name, peer in chosen.items() if not known[name].text}
    if device.type == "cuda":
        return chosen, messages
    messages.append(
        "PyTorch finds no GPU, so the kernels can't be measured. The times below are CPU times, with the PyTorch "
        "reference instead of the kernels; they say nothing about a GPU. torch.compile is left out"
    )
    ours = {STAND_IN: chosen[OURS]}
    return ours | {n: p for n, p in chosen.items() if n not in (OURS, "torch, eager") and not p.compiled}, messages


def check_memory(shapes: Shapes, maps: list[str], free: int) -> int:
    """Return the number of input copies for calls to cycle through, and reject sizes that don't fit into memory."""
    needed, one = max(shapes.bytes_needed(each) for each in maps)
    if needed > free:
        fits = shapes.batch * free // needed
        raise typer.BadParameter(
            f"--batch {shapes.batch}: q, k and their gradients need {needed / 2**30:,.1f} GiB ({one / 2**30:,.1f} GiB "
            f"each), but only {free / 2**30:,.1f} GiB are free; "
            + (f"use --batch {fits} and scale the times by the batch" if fits else "use a smaller grid")
        )
    return 1 if needed > COLD else TURNS


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_operators(session: Session, shapes: Shapes, maps: list[str], learned: bool, peers: dict[str, Peer]) -> None:
    """Measure lrpe-md with each map, and then the peers. lrpe-md comes first in case the time runs out."""
    passes, kind = (["fwd", "bwd_omega"], "per-head") if learned else (["fwd", "bwd"], "shared")
    ours = {name: peer for name, peer in peers.items() if name in (OURS, STAND_IN)}
    for group in (ours, {name: peer for name, peer in peers.items() if name not in ours}):
        for op in maps:
            run_passes(session, passes, str(shapes), shapes, op, kind, group)


def measure_linear(run: Run, shapes: Shapes, maps: list[str], copied: int) -> None:
    """Measure a copy, lrpe-md's and PyTorch's linear attention with each map, and softmax attention."""
    run.begin()
    run.measure_copy(copied)
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
            run.add(**key, note=f"left out: a forward pass has {operations:.1e} operations; use a smaller --batch")
            continue
        try:
            linear.measure(run, str(shapes), case, impl)
        except Exception as error:  # for example, out of memory; continue with the next
            run.add(**key, note=describe_error(error))
        release_memory(run.device)


def collect(session: Session, run: Run | None) -> Found:
    """Convert the rows of both CSVs to measurements."""
    found = Found()
    for row in session.rows:
        if row.get("op"):
            note = "" if row.get("in_budget", True) else "outside the float32 error budget; "
            note += row.get("note", "").partition(": RMS")[0]
            peer = FLOOR if row["peer"] == COPY else row["peer"]
            found.times.append(Time(row["op"], peer, row["mode"], row.get("p50"), note))
    rows = run.rows if run else []
    mapped = dict.fromkeys(row["map"] for row in rows if row["map"] != "none")
    for row in rows:
        which, impl = row.get("pass") or "forward", row["impl"]
        if which == "backward_omega":  # only lrpe-md has this pass
            continue
        peer = STAND_IN if impl == OURS and session.device.type == "cpu" else NAMES.get(impl, impl)
        # Implementations without a map are compared with every map.
        for each in mapped if row["map"] == "none" else [row["map"]]:
            what = f"linear attention, {each}"
            found.times.append(Time(what, peer, which, row.get("ms"), row.get("note", "")))
    return found


# --- output ----------------------------------------------------------------------------------------------------------


def show(found: Found, console: Console, layers: int) -> None:
    """Print a table for each operation, with milliseconds, the ratio to lrpe-md, and the time saved per step."""
    for what in found.whats:
        peers, passes = found.by_peer(what), found.passes(what)
        first, ours = next(iter(peers.items()))
        compared = first == OURS
        saved = [f"saved by {layers} layer{'s' * (layers > 1)}"] if compared else []
        caption = f"×: time relative to {OURS}; both passes together are a layer's time per step" if compared else None
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
    """Plot a panel per operation with one bar per peer. The backward pass is stacked on the forward pass."""
    panels: dict[str, dict[str, dict[str, Time]]] = {}
    for what in found.whats:
        whole = {n: times for n, times in found.by_peer(what).items() if total(times, found.passes(what)) < math.inf}
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
        axes[-1, 0].set_xlabel("milliseconds per layer")
        figure.suptitle(title, fontsize=9)
        save_whole(path, lambda part: figure.savefig(part, dpi=120, format="png"))
        plt.close(figure)
    return True


# --- command line ----------------------------------------------------------------------------------------------------


def parse_grid(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", text) or not math.prod(map(int, text.split("x"))):
        raise typer.BadParameter(
            f"--grid: expected one size per axis, slowest axis first, such as 21x45x80 or 4096, got {text!r}"
        )
    return tuple(map(int, text.split("x")))


def make_shapes(
    batch: int, heads: int, kv_heads: int | None, grid: str, prefix: int, head_dim: int, pairs: str, dtype: str
) -> Shapes:
    """Validate the options and return the shapes."""
    choose("--pairs", [pairs], ("half", "interleaved"))
    choose("--dtype", [dtype], DTYPES)
    if kv_heads is not None and heads % kv_heads:
        raise typer.BadParameter(f"--kv-heads: expected a divisor of --heads {heads}, got {kv_heads}")
    if head_dim % 2:
        raise typer.BadParameter(f"--head-dim: expected an even number, got {head_dim}")
    keys = None if kv_heads == heads else kv_heads
    return Shapes(batch, heads, parse_grid(grid), prefix, head_dim, keys, pairs, DTYPES[dtype])


PANELS = {"Shape": "heads grid head_dim batch kv_heads prefix", "Encoding": "map pairs dtype learned linear_too layers"}


def choose_maps(map: str, pairs: str, linear_too: bool, shapes: Shapes) -> list[str]:
    """Return the maps to measure, or raise an error if they don't support the other options."""
    choose("--map", [map], ("rotate", "cosine", "both"))
    if map == "cosine" and pairs != "half":
        raise typer.BadParameter(f"--pairs {pairs}: only works with --map rotate; leave out --pairs")
    if linear_too and (shapes.key_heads or pairs != "half"):
        raise typer.BadParameter("--linear: only supports --pairs half and no --kv-heads; leave out both options")
    return ["rotate", "cosine"] if map == "both" else [map]


@group_options(PANELS)
def main(
    heads: Annotated[int, typer.Option(min=1, help="Number of query heads.")],
    grid: Annotated[str, typer.Option(help="Tokens per axis, slowest axis first, such as 21x45x80, 14x14 or 8192.")],
    head_dim: Annotated[int, typer.Option(min=2, help="Channels per head, an even number.")],
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Number of key heads, if fewer than --heads (GQA).")
    ] = None,
    prefix: Annotated[int, typer.Option(min=0, help="Number of class, register or text tokens before the grid.")] = 0,
    map: Annotated[str, typer.Option(help="Map: rotate, cosine or both.")] = "rotate",
    pairs: Annotated[str, typer.Option(help="Layout of the channel pairs for rotate: half or interleaved.")] = "half",
    dtype: Annotated[str, typer.Option(help=f"Data type: {', '.join(DTYPES)}.")] = "bfloat16",
    learned: Annotated[
        bool, typer.Option("--learned", help="Use learned frequencies per head, and time their gradient.")
    ] = False,
    linear_too: Annotated[bool, typer.Option("--linear", help="Also measure linear attention with this map.")] = False,
    layers: Annotated[
        int, typer.Option(min=1, help="Number of layers in your model, to show the time saved per step.")
    ] = 1,
    limit: Annotated[float, LIMIT] = 60.0,
    rep: Annotated[int, typer.Option(min=1, help="GPU time per measurement, in milliseconds.")] = 60,
    out: Annotated[
        Path | None,
        typer.Option(help="Output CSV; the plot is saved next to it. (default: my-shapes.csv, my-shapes-2.csv, ...)"),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto (cuda if available).")] = "auto",
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:  # fmt: skip
    """Compare lrpe-md's kernels with torch.compile, timm and other installed libraries at your sizes."""
    start, where = time.monotonic(), choose_device(device)
    shapes = make_shapes(batch, heads, kv_heads, grid, prefix, head_dim, pairs, dtype)
    maps = choose_maps(map, pairs, linear_too, shapes)
    free = free_memory(where)
    turns = check_memory(shapes, maps, free)
    copied = 2**20 if where.type == "cpu" else 2**30 if free > 2**33 else 2**26  # elements
    peers, messages = choose_peers(shapes, where)
    console, progress = Console(highlight=False), Console(stderr=True, width=160, soft_wrap=True)
    for text in messages:
        console.print(text, markup=False, soft_wrap=True)
    functorch_config.donated_buffer = False  # a graph is differentiated many times
    out = out or unused_path(Path("my-shapes.csv"))
    session = Session(out, where, start + limit, rep, True, environment(where, commit), progress, turns)
    run = None
    try:
        session.measure_copy(copied)
        measure_operators(session, shapes, maps, learned, peers)
        if linear_too:
            file = out.with_name(f"{out.stem}-linear.csv")
            run = Run(file, where, rep, start + limit, measured_on(where, commit), progress)
            measure_linear(run, shapes, maps, copied)
    except OutOfTime:
        console.print(f"Stopped after {limit:g} s before everything was measured; raise --limit for the rest")
    found = collect(session, run)
    gpu = session.here["gpu"]
    title = f"{shapes}, head_dim {head_dim}, {dtype}; {gpu}, torch {session.here['torch']}"
    console.print(f"\n{title}\n", markup=False, soft_wrap=True)
    show(found, console, layers)
    picture = out.with_suffix(".png")
    files = [out, *([run.out] if run else []), *([picture] if plot(found, picture, title) else [])]
    console.print(f"{', '.join(str(file) for file in files)}: {time.monotonic() - start:.0f} s", markup=False)
