"""``lrpe-md bench compare OLD [NEW]``, which finds measurements that became slower between two commits."""

from __future__ import annotations

import io
import subprocess
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from ..common.folder import ROOT
from ..common.options import finite
from .measure import KEY

FOLDER = "scripts/results"


@dataclass(frozen=True)
class Kind:
    """Kind of results file, with its key columns and the column to compare, where smaller values are better."""

    key: tuple[str, ...]
    value: str


KINDS = {  # by file name pattern; the first match applies
    "benchmark-linear.csv": Kind(("workload", "map", "act", "normalizer", "mask", "pass", "impl", "gpu"), "ms"),
    "linear-widths.csv": Kind(("workload", "map", "pass", "impl", "commit", "gpu"), "ms"),
    "benchmark-norm.csv": Kind(("workload", "over", "pass", "impl", "gpu"), "ms"),
    "benchmark-tables.csv": Kind(("workload", "form", "pass", "gpu"), "ms"),
    "benchmark-decode.csv": Kind(("workload", "measure", "impl", "gpu"), "ms"),
    "benchmark-compiled.csv": Kind(("map", "pass", "impl", "gpu"), "p50"),
    "adapted-training.csv": Kind(("model", "mode", "encoding", "gpu"), "ratio_p50"),
    "linear-scaling.csv": Kind(("backbone", "tokens", "attention", "map", "mode", "gpu"), "ms"),
    "linear-training.csv": Kind(("model", "mode", "encoding", "gpu"), "ratio_p50"),
    "benchmark-train-loop.csv": Kind(("model", "batch", "gpu"), "train_ms"),
    "training.csv": Kind(("model", "mode", "encoding", "gpu"), "ratio_p50"),
    "backbones.csv": Kind(("model", "mode", "encoding", "gpu"), "ratio_p50"),
    "benchmark-*.csv": Kind((*KEY, "gpu"), "p50"),
}


def read(commit: str | None, root: Path = ROOT) -> dict[str, str]:
    """Return the content of each results CSV by name, from a commit or from the working tree.

    Raises:
        ValueError: if git does not know the commit.
    """
    if commit is None:
        return {path.name: path.read_text(encoding="utf-8") for path in sorted((root / FOLDER).glob("*.csv"))}
    return {
        Path(name).name: git(root, "show", f"{commit}:{name}")
        for name in git(root, "ls-tree", "--name-only", commit, f"{FOLDER}/").split("\n")
        if name.endswith(".csv")
    }


def git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().split("\n")[0])
    return done.stdout


def load(text: str, kind: Kind) -> Any:
    """Return the last value for each key, or an empty table if the file is of a different kind."""
    rows: Any = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
    if not {*kind.key, kind.value} <= set(rows):
        return pd.Series(dtype=float)
    rows[kind.value] = pd.to_numeric(rows[kind.value], errors="coerce")
    rows = rows.dropna(subset=[kind.value]).drop_duplicates(list(kind.key), keep="last")
    return rows.set_index(list(kind.key))[kind.value]


def find_changes(old: dict[str, str], new: dict[str, str]) -> pd.DataFrame:
    """Find lrpe-md's rows that are in both commits with different values."""
    found: list[tuple[str, str, float, float]] = []
    for name in old.keys() & new.keys():
        kind = next((kind for pattern, kind in KINDS.items() if fnmatch(name, pattern)), None)
        if kind is None:
            continue
        before, after = load(old[name], kind), load(new[name], kind)
        for key in before.index.intersection(after.index):
            ours = dict(zip(kind.key, key, strict=True))
            if "lrpe-md" not in ours.get("peer", ours.get("impl", "lrpe-md")):
                continue
            if after[key] != before[key]:
                row = ", ".join(str(part) for part in key if part)
                found.append((name, row, float(before[key]), float(after[key])))
    return pd.DataFrame(sorted(found), columns=["file", "row", "before", "after"])


def find_regressions(changes: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Select the changes whose value grew by more than the tolerance."""
    return changes.loc[changes["after"] > (1 + tolerance) * changes["before"], :]


def main(
    old: Annotated[str, typer.Argument(help="Commit to compare with.")],
    new: Annotated[str | None, typer.Argument(help="Newer commit. (default: the working tree)")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, callback=finite, help="Largest allowed increase in time, as a fraction.")
    ] = 0.03,
) -> None:
    """List lrpe-md's measurements that became slower between two commits, and exit with status 1 if there are any."""
    try:
        changes = find_changes(read(old), read(new))
    except ValueError as error:
        raise typer.BadParameter(f"OLD, NEW: expected commits: {error}") from None
    rows = find_regressions(changes, tolerance)
    table = Table("file", "measurement", "before", "after", "")
    for row in rows.itertuples():
        _, name, what, before, after = row
        table.add_row(name, what, f"{before:.4g}", f"{after:.4g}", f"{100 * after / before - 100:+.1f}%")
    console = Console()
    if len(rows):
        console.print(table)
    elif len(changes):
        console.print(f"Measurements that changed: {len(changes)}. None is slower by more than {tolerance:.0%}.")
    else:
        console.print("Nothing to compare: no measurement was repeated on the same GPU.")
    raise typer.Exit(int(len(rows) > 0))
