"""Imports: what is public, what stays out, who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lrpe_md
from lrpe_md import frequencies, scalings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lrpe_md"

LAYERS = {  # each file and what of ours it may import
    "kernels": set(),
    "reference": set(),
    "coordinates": set(),
    "positions": {"coordinates"},
    "frequencies": set(),
    "scalings": set(),
    "ops": {"reference", "positions", "launch"},
    "plans": set(),
    "launch": {"kernels", "ops", "plans", "positions"},
    "arguments": {"ops", "positions"},
    "sharding": {"ops"},
    "functional": {"arguments", "ops", "positions", "sharding"},
    "lrpe": {"arguments", "functional", "frequencies", "ops", "positions", "sequences"},
    "pairs": {"arguments", "reference"},
    "rope_parameters": {"frequencies", "scalings"},
    "augment": {"positions"},
    "sequences": {"coordinates", "positions"},
    "schemes": {"frequencies", "positions", "sequences"},
    "presets": {"frequencies", "positions", "scalings", "schemes", "sequences"},
    "module_base": {"arguments", "frequencies", "functional"},
    "modules": {"arguments", "coordinates", "frequencies", "module_base", "positions", "schemes", "sequences"},
    "testing": {"arguments", "functional", "positions"},
}


def imports(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("lrpe_md")):
            module = (node.module or "").removeprefix("lrpe_md").strip(".")
            found |= {module} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("lrpe_md.") for a in node.names if a.name.startswith("lrpe_md")}
    return found


@pytest.mark.parametrize("name", sorted(p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__"))
def test_layers(name):
    assert imports((PACKAGE / f"{name}.py").read_text()) <= LAYERS[name]


def test_the_layer_test_can_fail():
    assert imports("from .kernels import x") == {"kernels"}
    assert imports("from . import launch") == {"launch"}
    assert imports("def f():\n    import lrpe_md.ops") == {"ops"}


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_cold_import():
    """The library is light: no triton, timm, plotting or learning toolkits behind `import lrpe_md`."""
    heavy = ["triton", "timm", "matplotlib", "sklearn", "pandas", "torchvision", "accelerate"]
    code = "import sys, torch; before = set(sys.modules); import lrpe_md; print(*set(sys.modules) - before)"
    loaded = {module.split(".")[0] for module in run(code).split()}
    assert "lrpe_md" in loaded
    assert not loaded & set(heavy)


def test_without_triton():
    """Everything public imports, the reference runs and learns, "triton" says what is missing."""
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
assert module.theta.grad is not None
try:
    lrpe_md.lrpe_cosine_md_triton(x, module.theta[0], shape=(3, 4))
except ValueError as e:
    print(e)
"""
    assert "triton" in run(code)


def test_public_names():
    public = {name for name in vars(lrpe_md) if not name.startswith("_")}
    expected = {"Grid", "Coordinates", "cosine", "rotate", "CosineMd", "RotateMd", "Rotate1d"}
    expected |= {"geometric_theta", "axial_omega", "mixed_omega", "preset", "list_presets", "Preset", "PresetMd"}
    expected |= {"rope_frequencies", "convert_pairs", "packed_positions"}
    expected |= {"compose", "pack", "pad", "Tokens", "After", "window_order", "AugmentPositions"}
    expected |= {name for name in (*frequencies.__all__, *scalings.__all__) if name.islower()}
    for name in ("lrpe_cosine_md", "lrpe_rotate_1d"):
        expected |= {name, *(f"{name}_{s}" for s in ("torch", "triton", "fwd_triton", "bwd_triton"))}
    expected |= {f"lrpe_cosine_md_cache_{s}" for s in ("triton", "fwd_triton", "bwd_triton")} | {"lrpe_rotate_md"}
    assert expected <= public
    for name in expected:
        assert getattr(lrpe_md, name).__doc__, name


def test_readme_shows_the_table_that_the_run_wrote():
    table = (ROOT / "scripts/results/ablate-digits/table.md").read_text(encoding="utf-8").strip()
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_snippets_run():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = [part.split("```")[0] for part in readme.split("```python\n")[1:]]
    video, diffusion = ["torch.Size([1, 10])", "torch.Size([1, 10])"], ["torch.Size([2, 3, 24, 16])"]
    image = ["torch.Size([2, 281, 192])", "torch.Size([2, 1000])"]
    printed = [image, ["577"], ["True"], ["True"], video, diffusion]
    assert [run(code).splitlines() for code in snippets] == printed


def test_readme_names_every_preset():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = readme.split("The names: ")[1].split(".\n")[0]
    assert [name.strip(" `\n") for name in names.split(",")] == lrpe_md.list_presets()
