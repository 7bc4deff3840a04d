"""Measure the structure of a checkout with ``python tests/structure_limits.py [ROOT]``.

It reads the files of ``lrpe_md``, ``models`` and ``scripts``, and runs calls in Triton's interpreter.
test_structure.py compares the measurements with limits.

- kernel arguments: the number of arguments of ``lrpe_kernel``.
- arguments of another GPU function: the largest number of arguments of the other GPU functions, which are decorated
  with ``triton.jit`` or ``@kernel``.
- positional parameters: the number of Python functions with more than 8 of them, besides self and cls. Commands
  (``@app.command``, or with a typer ``Option`` or ``Argument`` as a parameter) and overrides of other libraries'
  methods (OVERRIDES) are exempt.
- long functions: the numbers of functions with more than 60 and 80 lines of code, without docstrings, comments and
  blank lines. The kernel is exempt.
- constexprs by position: the number of arguments that calls between GPU functions pass by position to a
  ``tl.constexpr``.
- import cycles: the number of groups of modules that import each other, including imports inside functions.
- file changes: how often a warm call of ``cosine``, ``rotate`` or ``linear_attention`` enters a Python function of
  ``lrpe_md`` in a different file from the previous one. Functions of the kernels, which run on a GPU, do not count.
"""

from __future__ import annotations

import ast
import io
import os
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

FOLDERS = ("lrpe_md", "models", "scripts")
KERNEL = "lrpe_kernel"
MOST_POSITIONAL, MOST_LINES, LONG = 8, 80, 60
OVERRIDES = {  # our methods, and the class that defines their parameters
    "LrpeVisionTransformer.forward_intermediates": "timm's VisionTransformer",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """A function and its qualified name."""

    name: str  # including enclosing classes and functions
    node: Function
    is_method: bool

    @property
    def parameters(self) -> list[ast.arg]:
        """Parameters that can be passed by position."""
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
    name: str  # such as lrpe_md.engine.encode.plan or models.vit
    package: tuple[str, ...]  # base of relative imports
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
        """Numbers of the lines that contain code."""
        idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        found: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type not in idle:
                found |= set(range(token.start[0], token.end[0] + 1))
        return found

    def lines(self, node: Function) -> int:
        """Count the lines of code, from ``def`` on."""
        found = self.code_lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for part in ast.walk(node):
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(part):
                docstring = part.body[0]
                found -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        return len(found)


def child_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements, handlers and cases directly inside a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child


def walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it at any depth, but no expressions."""
    yield node
    for child in child_statements(node):
        yield from walk_statements(child)


def places(tree: ast.AST, inside: str = "", in_class: bool = False) -> Iterator[Place]:
    """Yield all functions in a syntax tree."""
    for node in child_statements(tree):
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
                whole = parts if folder == "lrpe_md" else ("lrpe_md", *parts)  # its place in a wheel
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                self.modules[".".join(parts)] = Module(path, ".".join(parts), whole[:-1])
        if not self.modules:
            raise SystemExit(f"ROOT: expected a checkout with {', '.join(FOLDERS)}, found none of them in {root}")

    @cached_property
    def functions(self) -> list[tuple[str, Module, Place]]:
        """List all functions as (file::name, module, place)."""
        return [
            (f"{module.path.relative_to(self.root)}::{place.name}", module, place)
            for module in self.modules.values()
            for place in module.functions
        ]

    # --- names

    def repeated_names(self) -> dict[str, list[str]]:
        """Return the names of module-level functions and classes that several files define, with these files."""
        files: dict[str, list[str]] = {}
        for module in self.modules.values():
            if module.path.relative_to(self.root).parts[0] == "lrpe_md":
                names = {node.name for node in module.tree.body if isinstance(node, Function | ast.ClassDef)}
                for name in names:
                    files.setdefault(name, []).append(str(module.path.relative_to(self.root)))
        return {name: paths for name, paths in files.items() if len(paths) > 1 and not name.startswith("__")}

    # --- arguments, lines

    def kernel_arguments(self) -> int:
        (found,) = (len(place.arguments) for _, _, place in self.functions if place.name == KERNEL and place.for_gpu)
        return found

    def largest_gpu_function(self) -> tuple[int, str]:
        """Return the largest number of arguments of a GPU function except the kernel, and the function's name."""
        others = [(name, place) for name, _, place in self.functions if place.for_gpu and place.name != KERNEL]
        return max((len(place.arguments), name) for name, place in others)

    def many_positional(self) -> dict[str, int]:
        """Return the number of positional parameters of each Python function that has too many."""
        return {
            name: len(place.parameters)
            for name, _, place in self.functions
            if len(place.parameters) > MOST_POSITIONAL
            and not (place.for_gpu or place.is_command or place.name in OVERRIDES)
        }

    def long_functions(self, most: int = MOST_LINES) -> dict[str, int]:
        found = {
            name: module.lines(place.node)
            for name, module, place in self.functions
            if place.name != KERNEL and (place.node.end_lineno or 0) - place.node.lineno >= most
        }
        return {name: number for name, number in found.items() if number > most}

    # --- imports

    def find(self, parts: tuple[str, ...]) -> str | None:
        """Return a module's name in ``modules``, or None. Models and scripts can be imported under two names."""
        parts = parts[1:] if parts[:1] == ("lrpe_md",) and parts[1:2] in (("models",), ("scripts",)) else parts
        name = ".".join(parts)
        return name if name in self.modules else None

    def imports(self, module: Module) -> dict[str, str]:
        """Map each name that a module imports, at any level, to its module or module:name."""
        if module.name in self.imported:
            return self.imported[module.name]
        found = self.imported[module.name] = {}
        for node in walk_statements(module.tree):
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

    def import_cycles(self) -> list[list[str]]:
        """Return the groups of modules that import each other, directly or indirectly."""
        graph = {
            name: {other.split(":")[0] for other in self.imports(module).values()} - {name}
            for name, module in self.modules.items()
        }
        reached = {name: reachable(graph, name) for name in graph}
        groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
        return sorted(map(sorted, groups))

    # --- constexprs

    def constexprs_by_position(self) -> dict[str, int]:
        """Count the constexprs that each GPU function passes to others by position."""
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
        """Return the files that each kind of call enters, in order."""
        return trace(self.root)


def called(function: ast.expr, module: str, bound: dict[str, str]) -> str:
    """Return a called function as module:name, with an empty module for names outside of the package."""
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


class IdleKernel:
    """Replacement for a kernel that launches nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def trace(root: Path) -> dict[str, list[str]]:
    """Return the files of lrpe_md that calls enter. The process must use Triton's interpreter."""
    from lrpe_md.engine import kernels
    from lrpe_md.engine.core.operator import call_cache

    # Triton 3.6 can't interpret these with every version of NumPy
    idle = {name: IdleKernel() for name in kernels.__all__ if name.startswith("linear")}
    with mock.patch.multiple(kernels, **idle):
        call_cache.clear()  # so that the first call is validated
        return trace_calls(root / "lrpe_md")


def trace_calls(package: Path) -> dict[str, list[str]]:
    import torch

    import lrpe_md
    from lrpe_md import CosineMd, Grid, cosine, linear_attention, rotate

    assert Path(lrpe_md.__file__).parent == package, f"{lrpe_md.__file__} is not in {package}"
    x, grid = torch.randn(1, 2, 12, 8), Grid((3, 4))
    omega = torch.rand(1, 8, 2)
    learned = omega.clone().requires_grad_()
    module = CosineMd(8, 2, impl="triton")

    @cache
    def name_of(file: str) -> str:
        """Return a file's name in the package, or "" for kernels."""
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
        assert entered, "the call entered no function of lrpe_md"
        return entered

    def forward(omega: torch.Tensor) -> Any:
        return cosine(x, omega=omega, positions=grid, impl="triton")

    found = {"first": files(lambda: forward(omega))}
    forward(learned)
    module(x, positions=grid)
    found["warm"] = files(lambda: forward(omega))
    found["warm, with gradient"] = files(lambda: forward(learned))
    pairs = omega[:, ::2].clone()
    rotate(x, x, omega=pairs, positions=grid, impl="triton")
    linear_attention(x, x, x, omega=omega, positions=grid, impl="triton")
    found["warm rotate"] = files(lambda: rotate(x, x, omega=pairs, positions=grid, impl="triton"))
    found["warm linear_attention"] = files(
        lambda: linear_attention(x, x, x, omega=omega, positions=grid, impl="triton")
    )
    found["warm, of a module"] = files(lambda: module(x, positions=grid))
    return found


def measure(checkout: Checkout) -> dict[str, int]:
    """Return all measurements by name."""
    return {
        "kernel arguments": checkout.kernel_arguments(),
        "arguments of another GPU function": checkout.largest_gpu_function()[0],
        "functions with more than 8 positional parameters": len(checkout.many_positional()),
        "functions over 80 lines of code": len(checkout.long_functions()),
        "functions over 60 lines of code": len(checkout.long_functions(LONG)),
        "constexprs by position": sum(checkout.constexprs_by_position().values()),
        "import cycles": len(checkout.import_cycles()),
        "file changes in a warm forward": len(checkout.files_of_calls["warm"]) - 1,
        "file changes in a warm rotate": len(checkout.files_of_calls["warm rotate"]) - 1,
        "file changes in a warm linear_attention": len(checkout.files_of_calls["warm linear_attention"]) - 1,
    }


def report(root: Path) -> None:
    checkout = Checkout(root)
    for name, number in measure(checkout).items():
        print(f"{number:6}  {name}")
    print(f"\nGPU function with the most arguments, except the kernel: {checkout.largest_gpu_function()[1]}")
    for title, found in (
        ("positional parameters", checkout.many_positional()),
        ("lines of code", checkout.long_functions(LONG)),
        ("constexprs passed by position", checkout.constexprs_by_position()),
    ):
        print(f"\n{title}:")
        for name, number in sorted(found.items(), key=lambda item: -item[1]):
            print(f"{number:6}  {name}")
    print("\nmodules that import each other:")
    for group in checkout.import_cycles():
        print(f"        {', '.join(group)}")
    print("\nfile changes:")
    for kind, files in checkout.files_of_calls.items():
        print(f"{len(files) - 1:6}  {kind}: {' > '.join(files)}")


def main() -> None:
    root = Path(sys.argv[1]).resolve() if sys.argv[1:] else Path(__file__).resolve().parents[1]
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(root))
    report(root)


if __name__ == "__main__":
    main()
