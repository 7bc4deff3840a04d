"""Tests of the wheel and of an editable install, each in its own environment outside the checkout."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest
from installed import make_environment

ROOT = Path(__file__).parents[2]
BUILDING = ("hatchling",)
COPIED = ("lrpe_md", "models", "scripts", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")


def run(python: Path | str, *args: str, cwd: Path, fails: bool = False) -> str:
    """Return the output of a command that can't import anything from this checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(python), *args], capture_output=True, text=True, cwd=cwd, env=env, timeout=300)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def pip(*args: str, cwd: Path) -> None:
    """Run pip with the installed build requirements, or in an environment that pip creates."""
    options = ["--no-deps", "--quiet", "--disable-pip-version-check"]
    if all(importlib.util.find_spec(name) for name in BUILDING):
        options.append("--no-build-isolation")
    run(sys.executable, "-m", "pip", *args, *options, cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Copy the files of the checkout that a build needs."""
    folder = tmp_path_factory.mktemp("source")
    for name in COPIED:
        ignore = shutil.ignore_patterns("__pycache__", "*.png")
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(
            ROOT / name, folder / name, **({"ignore": ignore} if (ROOT / name).is_dir() else {})
        )
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", str(source), "--wheel-dir", str(folder), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return a Python with the wheel installed, and a folder that only contains decoys named like our folders."""
    python, place = make_environment(tmp_path_factory.mktemp("venv"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return python, decoy(tmp_path_factory.mktemp("user"))


def decoy(folder: Path) -> Path:
    """Create a user's own models/, scripts/ and tests/."""
    for name in ("models", "scripts", "tests"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"mine = {name!r}\n")
    return folder


CHECKOUT_ONLY = {"bench", "fuzz", "adapters", "host_tests.py", "host_plugin.py", "kernel_hub.py"}


def test_the_wheel_has_the_programs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lrpe_md"}
    for folder, place in (("models", "lrpe_md/models"), ("scripts", "lrpe_md/scripts"), ("lrpe_md", "lrpe_md")):
        for path in (ROOT / folder).rglob("*.py"):
            inner = path.relative_to(ROOT / folder)
            left_out = folder == "scripts" and inner.parts[0] in CHECKOUT_ONLY
            assert (f"{place}/{inner.as_posix()}" in names) != left_out, inner
    assert {name.rsplit(".", 1)[-1] for name in names if ".dist-info/" not in name} == {"py", "typed"}
    text = metadata.partition("\n\n")[2]
    assert text.startswith("# lrpe-md")
    assert not re.search(r"\]\((?!https?:)|<img|<picture", text)  # a package index doesn't have our files
    extras = {line.removeprefix("Provides-Extra: ") for line in metadata.splitlines() if "Provides-Extra" in line}
    assert {"timm", "diffusers", "transformers", "scripts"} <= extras


def test_the_sdist_has_all_that_a_wheel_is_built_of(wheel, tmp_path):
    """A wheel built from the sdist has the same files. The sdist also contains tests and pages."""
    builders = pytest.importorskip("hatchling.builders.sdist"), pytest.importorskip("hatchling.builders.wheel")
    (sdist,) = builders[0].SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    (again,) = builders[1].WheelBuilder(str(source)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(again) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())
        for name in ours.namelist():
            assert ours.read(name) == theirs.read(name), name
    for path in ("tests/conftest.py", "docs/architecture.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "LICENSE"):
        assert (source / path).is_file(), path


# The types that a checker reveals in a user's code, none of them unknown.
REVEALED = {
    "cosine(q, omega=omega, positions=grid)": "Tensor",
    "cosine(q, k, omega=omega, positions=grid)": "tuple[Tensor, Tensor]",
    "rotate(q, omega=omega, positions=grid, pairs='interleaved')": "Tensor",
    "rotate(q, k, omega=omega, positions=(grid, grid))": "tuple[Tensor, Tensor]",
    "rotate(qkv=q, omega=omega, positions=grid)": "tuple[Tensor, Tensor, Tensor]",
    "linear_attention(q, k, v, omega=omega, positions=grid)": "Tensor",
    "linear_attention(q, k, v, omega=omega, positions=grid, return_state=True)":
        "tuple[Tensor, tuple[Tensor, Tensor | None]]",
    "lrpe_md.adapt(model, 'rotate', encoding_kwargs={'learnable': True})": "LrpeVisionTransformer",
    "lrpe_md.adapt_rotary(model)": "Identity",
    "lrpe_md.lrpe_rotate_1d(q, omega[0])": "Tensor",
    "preset('wan', head_dim=64)": "Preset",
    "preset('wan').omega": "Tensor",
    "preset('wan').positions((2, 3, 4))": "Grid | Coordinates",
    "preset('wan').scheme": "Scheme",
    "list_presets()": "list[str]",
    "grid.rescale((2, 2)).num_tokens": "int",
    "RotateMd(8, 2).omega": "Tensor",
    "axial_omega(geometric_theta(4), 8, 2)": "Tensor",
    "compose(lrpe_md.Tokens(3), grid)": "Coordinates",
}  # fmt: skip


def test_a_users_types_are_known(installed, tmp_path):
    """The installed package is typed, and no public function returns Any."""
    pytest.importorskip("pyright")
    python, _ = installed
    lines = "\n".join(f"reveal_type({call})" for call in REVEALED)
    (tmp_path / "mine.py").write_text(
        "import torch\nimport lrpe_md\nfrom lrpe_md import Grid, RotateMd, axial_omega, compose, cosine\n"
        "from lrpe_md import geometric_theta, linear_attention, list_presets, preset, rotate\n\n"
        "model: torch.nn.Module = torch.nn.Identity()\nq = k = v = omega = torch.zeros(1)\ngrid = Grid((3, 4))\n"
        f"{lines}\n"
        "rotate(q, k, omega=omega, positions=grid, pairs='thirds')\ncosine(q, omega=omega, norms=None)\n"
    )
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), "mine.py"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    said = json.loads(done.stdout)["generalDiagnostics"]
    found = [each["message"].split(' is "')[1][:-1] for each in said if each["severity"] == "information"]
    assert dict(zip(REVEALED, found, strict=True)) == REVEALED
    wrong = [each["range"]["start"]["line"] for each in said if each["severity"] == "error"]
    last = len((tmp_path / "mine.py").read_text().splitlines()) - 1
    assert set(wrong) == {last - 1, last}, [each for each in said if each["severity"] == "error"]


def test_readme_snippets_run_beside_a_users_own_models(installed):
    python, user = installed
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = [part.split("```")[0] for part in readme.split("```python\n")[1:]]
    snippets = [code for code in snippets if "transformers" not in code and "diffusers" not in code]  # slow to import
    assert any("import adapt\n" in code for code in snippets)
    shown = "import models, lrpe_md\nprint(models.mine, lrpe_md.__file__)"
    code = "\n".join([f"exec({each!r}, {{'__name__': '__main__'}})" for each in snippets] + [shown])
    mine, place = run(python, "-W", "ignore", "-c", code, cwd=user).splitlines()[-1].split()
    assert mine == "models"
    assert "site-packages" in place


def test_programs_of_a_checkout_say_so_in_a_wheel(installed, tmp_path):
    python, _ = installed
    code = "import sys; from lrpe_md.scripts.cli import main; sys.argv = ['lrpe-md', {!r}]; main()"
    for name in ("bench", "fuzz", "adapters"):
        error = run(python, "-c", code.format(name), cwd=tmp_path, fails=True)
        assert error.strip() == f"lrpe-md {name}: only works in a checkout of lrpe-md, but this is an installed wheel"
    shown = run(python, "-c", code.format("--help"), cwd=tmp_path)
    assert "train" in shown
    assert "bench" not in shown.replace("benchmark", "")
    assert "Development" not in shown


def test_no_name_of_ours_but_the_package(installed, tmp_path):
    python, _ = installed
    for name in ("models", "scripts", "tests"):
        assert f"No module named '{name}'" in run(python, "-c", f"import {name}", cwd=tmp_path, fails=True)
    backbones = ", ".join(f"lrpe_md.models.{name}" for name in ("vit", "video", "dit", "flow", "lm_decode"))
    assert run(python, "-W", "ignore", "-c", f"import {backbones}", cwd=tmp_path) == ""


def test_an_editable_install_has_the_same_names(source, tmp_path_factory, tmp_path):
    python, place = make_environment(tmp_path_factory.mktemp("editable"))
    pip("install", "--editable", str(source), "--target", str(place), cwd=tmp_path)
    user = decoy(tmp_path_factory.mktemp("user"))
    code = """
        import timm, lrpe_md, lrpe_md.models.vit, models
        from lrpe_md import adapt
        print(lrpe_md.__file__, lrpe_md.models.vit.__file__, models.mine)
    """
    ours, vit, mine = run(python, "-W", "ignore", "-c", textwrap.dedent(code), cwd=user).split()
    assert [Path(ours).resolve(), Path(vit), mine] == [
        source / "lrpe_md/__init__.py",
        source / "models/vit.py",
        "models",
    ]
    for name in ("models", "scripts", "tests"):
        assert f"No module named '{name}'" in run(python, "-c", f"import {name}", cwd=tmp_path, fails=True)
    shown = "import models; print(models.__file__)"  # where imports come from the folder itself
    assert Path(run(python, "-W", "ignore", "-c", shown, cwd=source).strip()) == source / "models/__init__.py"

    assert check_types(python, tmp_path, "import lrpe_md\nreveal_type(lrpe_md.Grid((2, 3)).num_tokens)\n") == ["int"]


def check_types(python: Path, folder: Path, code: str) -> list[str]:
    """Return the types that pyright reveals in user code for this Python."""
    pytest.importorskip("pyright")
    (folder / "mine.py").write_text(code)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), "mine.py"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    said = json.loads(done.stdout)["generalDiagnostics"]
    assert not [each for each in said if each["severity"] == "error"]
    return [each["message"].split(' is "')[1][:-1] for each in said if each["severity"] == "information"]


MISSING = [
    ("timm", "from lrpe_md import adapt"),
    ("timm", "from lrpe_md.integrations.timm import LrpeAttention"),
    ("timm", "import lrpe_md.models.dit"),
]


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Return a Python with the wheel but none of its extras."""
    python, place = make_environment(
        tmp_path_factory.mktemp("bare"), without=("timm", "diffusers", "transformers", "triton")
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return python


def test_a_missing_extra_is_named(bare, tmp_path):
    """Each case runs in a fork that has not imported our package."""
    code = f"""
        import os, torch
        for _, code in {MISSING!r}:
            child = os.fork()
            if not child:
                try:
                    exec(code)
                except ModuleNotFoundError as error:
                    print(f"{{type(error).__name__}}: {{error}}", flush=True)
                os._exit(0)
            os.waitpid(child, 0)
    """
    said = run(bare, "-c", textwrap.dedent(code), cwd=tmp_path).splitlines()
    assert said == [
        f"ModuleNotFoundError: {extra} is not installed; run pip install 'lrpe-md[{extra}]'" for extra, _ in MISSING
    ]


def test_without_extras_the_library_runs_and_knows_no_model(bare, tmp_path):
    code = """
        import torch, lrpe_md
        q, k = lrpe_md.RotateMd(8)(*torch.randn(2, 1, 2, 12, 8), positions=lrpe_md.Grid((3, 4)))
        try:
            lrpe_md.adapt_rotary(torch.nn.Linear(2, 2))
        except TypeError as error:
            print(error)
    """
    assert run(bare, "-c", textwrap.dedent(code), cwd=tmp_path).startswith(
        "model: expected a model that calls a function to rotate q"
    )


def test_importing_costs_little_more_than_torch(bare, tmp_path):
    """Time both imports in separate processes, in turns, and take the minimum of several runs."""
    code = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"
    least = {"torch": float("inf"), "lrpe_md": float("inf")}
    for _ in range(3):
        for name in least:
            least[name] = min(least[name], float(run(bare, "-c", code.format(name), cwd=tmp_path)))
    assert least["lrpe_md"] < 1.5 * least["torch"]
