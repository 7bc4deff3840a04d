"""An activation only needs a table entry and a branch in the kernels.

The tests add one to a copy of the library.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lrpe_md

PACKAGE = Path(lrpe_md.__file__).parent
TESTS = Path(__file__).parents[1]

ENTRY = """
    "square": ActivationFunction(lambda x, dim: x * x, never_negative=True),
    "softmax": ActivationFunction("""
FORWARD = """
    elif V.act == "square":
        return x * x
    else:
        tl.static_assert(False, "this activation has no branch in kernels/activations.py: activate")"""
BACKWARD = """
    elif V.act == "square":
        return 2.0 * x * dx_bar
    else:
        tl.static_assert(False, "this activation has no branch in kernels/activations.py: activate_backward")"""

USE = """
import pytest
from interpreting import quicken

quicken(pytest.MonkeyPatch())
import torch
from lrpe_md.scripts.common.cases import Case, check
found = [*check(Case(act="square")), *check(Case("rotate", act="square", rotary_dim=8))]
assert not found, found
try:
    check(Case(act="cube"))
except ValueError as error:
    print(error)
"""


def copy_with(tmp_path: Path, *branches: str) -> Path:
    """Copy the library, with an entry added to the table and these branches to the kernels."""
    root = tmp_path / "lrpe_md"
    ignore = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(PACKAGE, root, ignore=ignore)
    project = PACKAGE.parent / "pyproject.toml"
    if project.is_file():  # in a checkout, these folders are next to the package
        for folder in ("models", "scripts"):
            shutil.copytree(PACKAGE.parent / folder, tmp_path / folder, ignore=ignore)
        shutil.copy(project, tmp_path)
    table = root / "reference.py"
    text = table.read_text(encoding="utf-8")
    assert text.count('\n    "softmax": ActivationFunction(') == 1
    table.write_text(text.replace('\n    "softmax": ActivationFunction(', ENTRY), encoding="utf-8")
    kernels = root / "engine" / "kernels" / "activations.py"
    text = kernels.read_text(encoding="utf-8")
    for branch in branches:
        last = branch[branch.index("\n    else:") :]
        assert text.count(last) == 1
        text = text.replace(last, branch)
    kernels.write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    env |= {"PYTHONPATH": os.pathsep.join((str(folder), str(TESTS))), **environment}
    script = folder / "script.py"  # Triton reads the kernel's source file
    script.write_text(code, encoding="utf-8")
    return subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=folder, env=env, timeout=300)


@pytest.mark.slow
def test_entry_and_branch_suffice(tmp_path):
    done = run(copy_with(tmp_path, FORWARD, BACKWARD), USE, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "'square', 'softmax'), got 'cube'" in done.stdout


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lrpe_md.engine.encode import launch
from lrpe_md.engine.core.call import Options, Variant
from lrpe_md.engine.kernels.activations import activate, activate_backward
import triton.language as tl

@triton.jit
def both(p, V: tl.constexpr):
    x = tl.load(p + tl.arange(0, 32))
    tl.store(p + tl.arange(0, 32), activate_backward(x, activate(x, V), x, V))

for act in ("relu", "square"):
    source = ASTSource(both, {"p": "*fp32", "V": "constexpr"}, {(1,): Variant(act=act)})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(act)
"""


@pytest.mark.slow
def test_missing_branch_does_not_compile(tmp_path):
    for i, (branches, where) in enumerate([((), "activate"), ((FORWARD,), "activate_backward")]):
        done = run(copy_with(tmp_path / str(i), *branches), COMPILE)
        assert done.stdout.split() == ["relu"]
        assert "this activation has no branch" in done.stderr
        assert f"{where}(" in done.stderr
    done = run(copy_with(tmp_path / "all", FORWARD, BACKWARD), COMPILE)
    assert done.stdout.split() == ["relu", "square"], done.stderr
