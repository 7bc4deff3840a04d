"""List the rotary functions of installed libraries that ``drop_in`` supports.

    python -m scripts.adapters.functions > scripts/results/adapters/functions.csv

The script tests functions and static methods in the libraries' model files if their names suggest a rotary encoding.
Each supported function is called with every kind of argument that it supports, at new sizes, in float32 and bfloat16.
The results are compared with those of the original function.
"""

from __future__ import annotations

import csv
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lrpe_md.integrations import drop_in, plans, probing

__all__ = ["Row", "functions", "try_function"]

FILES = {"timm": "[lm]*/**/*.py", "diffusers": "models/**/*.py", "transformers": "models/*/modeling_*.py"}
ROTARY = re.compile(r"rotary|rope|rot_e|rotate")
OTHERS = re.compile(  # functions that build tables, read settings or rotate half of the channels, and models
    r"get_|compute_|rotate_(half|every|pair)|create_|build_|update|validate|init|params|_prepare|_pad_|"
    r"_layout|_rotary_freqs|^rope$|store_|set_|_slice_|_vit_|^vit_|interleaved_mrope|half$"
)
SIZES = {2: (4, 9), 3: (3, 4, 9), 1: (9,)}


class Row(NamedTuple):
    """Result for a function: taken (supported), refused (with the reason), or wrong (taken, but results differ)."""

    library: str
    module: str
    function: str
    outcome: str
    reason: str


def functions(library: str) -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    """Yield the module, name and code of each library function whose name suggests a rotary encoding."""
    root = Path(inspect.getfile(import_module(library))).parent
    for path in sorted(root.glob(FILES[library])):
        if not re.search(rf"def \w*({ROTARY.pattern})", path.read_text(encoding="utf-8")):
            continue
        name = ".".join([library, *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        module = import_module(name)
        for key, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__ == name:
                inner = [(f"{key}.{k}", v.__func__) for k, v in vars(value).items() if isinstance(v, staticmethod)]
            else:
                inner = [(key, value)]
            for each, function in inner:
                own = isinstance(function, FunctionType) and function.__module__ == name
                if own and ROTARY.search(each) and not OTHERS.search(each.rpartition(".")[2]):
                    yield module, each, function


def try_function(library: str, module: ModuleType, name: str, function: Callable[..., Any]) -> Row:
    """Test one function with the kinds of arguments that it supports."""
    row = Row(library, module.__name__, name, "taken", "")
    try:
        ours = drop_in(function)
    except TypeError as error:
        return row._replace(outcome="refused", reason=str(error).partition("which ")[2])
    difference = _difference(function, ours)
    return row._replace(outcome="wrong", reason=difference) if difference else row


def _difference(function: Callable[..., Any], ours: Any) -> str:
    launches: list[int] = []
    rotate = plans.rotate

    def counted(*args: Any, **kwargs: Any) -> Any:
        launches.append(1)
        return rotate(*args, **kwargs)

    probed = ours.probed
    if any(
        isinstance(plan, plans.RotationPlan) and plan.grids for plan in probed.plans.values()
    ):  # drop_in has verified these arguments
        return ""
    probe = probing.Probe(probed.call, probed.key)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for layout in probing.layouts(probe, plans.EQUAL * len(probe.data)):
            xs, leaves = probe.inputs(layout.shapes(SIZES[len(probe.axes)]), 5)
            xs = [x.to(dtype) for x in xs]
            try:
                expected = probe.run(xs, leaves)
            except Exception:  # the function does not support these sizes
                continue
            launches.clear()
            plans.rotate = counted
            found = pytree.tree_leaves(ours(*probe.arguments(xs, leaves)))
            plans.rotate = rotate
            if any(a.dtype != b.dtype for a, b in zip(found, expected, strict=True)):
                return f"a different dtype for {dtype}"
            if not probing.are_close(found, expected, bound):
                return f"other numbers for {dtype}"
            if launches:
                break
        else:
            return f"goes to the original for {dtype}"
    return ""


def main() -> None:
    warnings.simplefilter("ignore")
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(Row._fields)
    counts: dict[tuple[str, str], int] = {}
    for library in sys.argv[1:] or FILES:
        for module, name, function in functions(library):
            row = try_function(library, module, name, function)
            counts[library, row.outcome] = counts.get((library, row.outcome), 0) + 1
            rows.writerow(row)
            sys.stdout.flush()
    for (library, outcome), number in sorted(counts.items()):
        print(f"{library}: {number} {outcome}", file=sys.stderr)


if __name__ == "__main__":
    main()
