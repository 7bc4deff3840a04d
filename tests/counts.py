"""How a checkout is built, in numbers: ``python tests/counts.py [ROOT]``.

Reads the files of ``lrpe_md``, ``models`` and ``scripts``, and runs one thing, in a process of its own: a call of
``cosine`` in Triton's interpreter. test_structure.py holds the numbers against its bars.

- kernel arguments: of ``lrpe_kernel``.
- arguments of another GPU function: the largest number; a GPU function is decorated with ``triton.jit`` or ``@kernel``.
- positional parameters: Python functions with more than 8, self and cls aside. Commands (``@app.command``, or
  parameters that are a typer ``Option`` or ``Argument``) and overrides of other libraries' methods (OVERRIDES) may.
- long functions: with more than 80 lines of code; docstrings, comments and blank lines aside; the kernel may.
- constexprs by position: arguments, in calls between GPU functions, that bind by position to a ``tl.constexpr``.
- circles: groups of modules that import each other; imports inside functions count.
- changes of file: among the Python functions of ``lrpe_md`` that a warm call of ``cosine`` enters, in their order,
  those whose file is not that of the one entered before. Functions of the kernels, which a GPU runs, are left out.
"""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

FOLDERS = ("lrpe_md", "models", "scripts")
KERNEL = "lrpe_kernel"
MOST_POSITIONAL, MOST_LINES = 8, 80
OVERRIDES = {  # of ours, and whose parameters they take
    "LrpeVisionTransformer.forward_intermediates": "timm's VisionTransformer",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """A function, and where it is."""

    name: str  # of methods and nested functions with what they are in
    node: Function
    is_method: bool

    @property
    def parameters(self) -> list[ast.arg]:
        """Those that can be given by position."""
        arguments = self.node.args
        found = [*arguments.posonlyargs, *arguments.args]
        decorators = {decorator_name(d) for d in self.node.decorator_list}
        return found[1:] if self.is_method and "staticmethod" not in decorators else found

    @property
    def arguments(self) -> list[ast.arg]:
        return [*self.parameters, *self.node.args.kwonlyargs]

    @property
    def for_gpu(self) -> bool:
        return bool({decorator_name(d) for d in self.node.decorator_list} & {"triton.jit", "jit", "kernel"})

    @property
    def is_command(self) -> bool:
        if any(decorator_name(d).endswith(".command") for d in self.node.decorator_list):
            return True
        return any(
            isinstance(part, ast.Call) and decorator_name(part).startswith("typer.")
            for arg in self.arguments
            if arg.annotation is not None
            for part in ast.walk(arg.annotation)
        )


def decorator_name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


@dataclass
class Module:
    path: Path
    name: str  # as lrpe_md.engine.plan, models.vit
    package: tuple[str, ...]  # what relative imports are relative to
    source: str = field(init=False)

    def __post_init__(self) -> None:
        self.source = self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def functions(self) -> list[Place]:
        return list(places(self.tree))

    @cached_property
    def code_lines(self) -> set[int]:
        """Lines with something on them beside a comment."""
        idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        found: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type not in idle:
                found |= set(range(token.start[0], token.end[0] + 1))
        return found

    def lines(self, node: Function) -> int:
        """Of code, from ``def`` on."""
        found = self.code_lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for part in ast.walk(node):
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(part):
                docstring = part.body[0]
                found -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        return len(found)


def places(tree: ast.AST, inside: str = "", in_class: bool = False) -> Iterator[Place]:
    """All functions in the tree."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Place(inside + node.name, node, in_class)
            yield from places(node, f"{inside}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from places(node, f"{inside}{node.name}.", True)
        else:
            yield from places(node, inside, in_class)


class Checkout:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        self.imported: dict[str, dict[str, str]] = {}
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                whole = parts if folder == "lrpe_md" else ("lrpe_md", *parts)  # where a wheel has it
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                self.modules[".".join(parts)] = Module(path, ".".join(parts), whole[:-1])
        if not self.modules:
            raise SystemExit(f"ROOT: expected a checkout with {', '.join(FOLDERS)}, found none of them in {root}")

    @cached_property
    def functions(self) -> list[tuple[str, Module, Place]]:
        """All, each by its file and name."""
        return [
            (f"{module.path.relative_to(self.root)}::{place.name}", module, place)
            for module in self.modules.values()
            for place in module.functions
        ]

    # --- arguments, lines

    def kernel_arguments(self) -> int:
        (found,) = (len(place.arguments) for _, _, place in self.functions if place.name == KERNEL and place.for_gpu)
        return found

    def largest_gpu_function(self) -> tuple[int, str]:
        """Its arguments and its name; the kernel aside."""
        others = [(name, place) for name, _, place in self.functions if place.for_gpu and place.name != KERNEL]
        return max((len(place.arguments), name) for name, place in others)

    def many_positional(self) -> dict[str, int]:
        """Python functions with too many parameters that can be given by position."""
        return {
            name: len(place.parameters)
            for name, _, place in self.functions
            if len(place.parameters) > MOST_POSITIONAL
            and not (place.for_gpu or place.is_command or place.name in OVERRIDES)
        }

    def long_functions(self) -> dict[str, int]:
        counted = {name: module.lines(place.node) for name, module, place in self.functions if place.name != KERNEL}
        return {name: number for name, number in counted.items() if number > MOST_LINES}

    # --- imports

    def find(self, parts: tuple[str, ...]) -> str | None:
        """The module of that name; models and scripts go by two."""
        parts = parts[1:] if parts[:1] == ("lrpe_md",) and parts[1:2] in (("models",), ("scripts",)) else parts
        name = ".".join(parts)
        return name if name in self.modules else None

    def imports(self, module: Module) -> dict[str, str]:
        """What the file's imports bind, anywhere in it: name -> module, or module:name of something in it."""
        if module.name in self.imported:
            return self.imported[module.name]
        found = self.imported[module.name] = {}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                base = module.package[: len(module.package) - node.level + 1] if node.level else ()
                base = (*base, *(node.module or "").split(".")) if node.module else base
                for alias in node.names:
                    inner = self.find((*base, alias.name))
                    outer = self.find(base)
                    if inner or outer:
                        found[alias.asname or alias.name] = inner or f"{outer}:{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if name := self.find(tuple(alias.name.split("."))):
                        found[alias.asname or alias.name] = name
        return found

    def circles(self) -> list[list[str]]:
        """Groups of modules from each of which every other of the group is reached."""
        graph = {
            name: {other.split(":")[0] for other in self.imports(module).values()} - {name}
            for name, module in self.modules.items()
        }
        reached = {name: reachable(graph, name) for name in graph}
        groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
        return sorted(map(sorted, groups))

    # --- constexprs

    def constexprs_by_position(self) -> dict[str, int]:
        """For each GPU function that calls another: how many constexprs it hands on by position."""
        known = {f"{module.name}:{place.name}": place for _, module, place in self.functions if place.for_gpu}
        found: dict[str, int] = {}
        for name, module, place in self.functions:
            if not place.for_gpu:
                continue
            bound = self.imports(module)
            for call in (node for node in ast.walk(place.node) if isinstance(node, ast.Call)):
                callee = known.get(called(call.func, module.name, bound))
                if callee is not None:
                    pairs = zip(call.args, callee.parameters, strict=False)
                    number = sum(is_constexpr(parameter) for _, parameter in pairs)
                    found[name] = found.get(name, 0) + number
        return found

    # --- a call

    @cached_property
    def files_of_calls(self) -> dict[str, list[str]]:
        """For each kind of call, the files entered one after another: the first is no change."""
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(self.root)}
        command = [sys.executable, __file__, "--trace", str(self.root)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=self.root, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{self.root}: a call of cosine failed:\n{done.stderr[-2000:]}")
        return ast.literal_eval(done.stdout.splitlines()[-1])


def called(function: ast.expr, module: str, bound: dict[str, str]) -> str:
    """The module:name that is called; what is not ours has no module."""
    if isinstance(function, ast.Name):
        return bound.get(function.id, f"{module}:{function.id}")
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{bound.get(function.value.id, '')}:{function.attr}"
    return ""


def is_constexpr(parameter: ast.arg) -> bool:
    return parameter.annotation is not None and "constexpr" in ast.unparse(parameter.annotation)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def trace(root: Path) -> dict[str, list[str]]:
    """In a process with Triton's interpreter: the files of lrpe_md that calls go through."""
    import torch

    import lrpe_md
    from lrpe_md import CosineMd, Grid, cosine

    package = root / "lrpe_md"
    assert Path(lrpe_md.__file__).parent == package, f"{lrpe_md.__file__} is not of {root}"
    x, grid = torch.randn(1, 2, 12, 8), Grid((3, 4))
    omega = torch.rand(1, 8, 2)
    learned = omega.clone().requires_grad_()
    module = CosineMd(8, 2, impl="triton")

    @cache
    def name_of(file: str) -> str:
        """In the package, but for what runs on a GPU."""
        path = Path(file)
        inside = package in path.parents and "kernels" not in path.relative_to(package).parts
        return str(path.relative_to(package)) if inside else ""

    def files(call: Any) -> list[str]:
        entered: list[str] = []

        def enter(frame: Any, event: str, _: Any) -> None:
            name = name_of(frame.f_code.co_filename) if event == "call" else ""
            if name and entered[-1:] != [name]:
                entered.append(name)

        sys.setprofile(enter)
        try:
            call()
        finally:
            sys.setprofile(None)
        assert entered, "nothing of lrpe_md was entered"
        return entered

    def forward(omega: torch.Tensor) -> Any:
        return cosine(x, omega=omega, positions=grid, impl="triton")

    found = {"first": files(lambda: forward(omega))}
    forward(learned)
    module(x, positions=grid)
    found["warm"] = files(lambda: forward(omega))
    found["warm, with gradient"] = files(lambda: forward(learned))
    found["warm, of a module"] = files(lambda: module(x, positions=grid))
    return found


def counts(checkout: Checkout) -> dict[str, int]:
    """Each count by its name."""
    return {
        "kernel arguments": checkout.kernel_arguments(),
        "arguments of another GPU function": checkout.largest_gpu_function()[0],
        "functions with more than 8 positional parameters": len(checkout.many_positional()),
        "functions over 80 lines of code": len(checkout.long_functions()),
        "constexprs by position": sum(checkout.constexprs_by_position().values()),
        "circles of imports": len(checkout.circles()),
        "changes of file in a warm forward": len(checkout.files_of_calls["warm"]) - 1,
    }


def report(root: Path) -> None:
    checkout = Checkout(root)
    for name, number in counts(checkout).items():
        print(f"{number:6}  {name}")
    print(f"\nthe GPU function with most arguments but the kernel: {checkout.largest_gpu_function()[1]}")
    for title, found in (
        ("positional parameters", checkout.many_positional()),
        ("lines of code", checkout.long_functions()),
        ("constexprs handed on by position", checkout.constexprs_by_position()),
    ):
        print(f"\n{title}:")
        for name, number in sorted(found.items(), key=lambda item: -item[1]):
            print(f"{number:6}  {name}")
    print("\nmodules that import each other:")
    for group in checkout.circles():
        print(f"        {', '.join(group)}")
    print("\nchanges of file:")
    for kind, files in checkout.files_of_calls.items():
        print(f"{len(files) - 1:6}  {kind}: {' > '.join(files)}")


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--trace"]:
        print(trace(Path(arguments[1])))
        return
    report(Path(arguments[0]).resolve() if arguments else Path(__file__).resolve().parents[1])


if __name__ == "__main__":
    main()
