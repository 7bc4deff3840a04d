"""What pip gives users: a wheel and an editable install, each in an environment of its own and outside the checkout."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDING = ("hatchling", "editables")
COPIED = ("lrpe_md", "models", "scripts", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")


def run(python: Path | str, *args: str, cwd: Path, fails: bool = False) -> str:
    """What a command prints, without anything of this checkout on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(python), *args], capture_output=True, text=True, cwd=cwd, env=env, timeout=300)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def pip(*args: str, cwd: Path) -> None:
    """With the build's requirements as they are installed, or in an environment that pip makes."""
    options = ["--no-deps", "--quiet", "--disable-pip-version-check"]
    if all(importlib.util.find_spec(name) for name in BUILDING):
        options.append("--no-build-isolation")
    run(sys.executable, "-m", "pip", *args, *options, cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The checkout as it is, without what lies about in it."""
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


def environment(folder: Path, *, without: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """A Python that has the packages of this one but lrpe_md, and its site-packages."""
    venv.create(folder, with_pip=False)
    (own,) = folder.glob("lib/python*/site-packages")
    links = folder / "others"
    links.mkdir()
    for place in {Path(p) for p in sys.path if p.endswith("site-packages")}:
        for found in place.iterdir():
            ours = found.name.lower().lstrip("_").startswith(("lrpe_md", "lrpe-md", "editable_impl_lrpe"))
            if not ours and found.suffix != ".pth" and found.name.split("-")[0] not in without:
                (links / found.name).symlink_to(found)
    (own / "others.pth").write_text(f"{links}\n")
    return folder / "bin" / "python", own


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A Python with the wheel, and an empty folder but for a decoy of the same names as our folders."""
    python, place = environment(tmp_path_factory.mktemp("venv"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return python, decoy(tmp_path_factory.mktemp("user"))


def decoy(folder: Path) -> Path:
    """A user's own models/, scripts/ and tests/."""
    for name in ("models", "scripts", "tests"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"mine = {name!r}\n")
    return folder


def test_the_wheel_has_the_programs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lrpe_md"}
    for folder, place in (("models", "lrpe_md/models"), ("scripts", "lrpe_md/scripts"), ("lrpe_md", "lrpe_md")):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{place}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert {name.rsplit(".", 1)[-1] for name in names if ".dist-info/" not in name} == {"py", "typed"}
    extras = {line.removeprefix("Provides-Extra: ") for line in metadata.splitlines() if "Provides-Extra" in line}
    assert {"timm", "diffusers", "transformers", "scripts"} <= extras


def test_readme_snippets_run_beside_a_users_own_models(installed):
    python, user = installed
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = [part.split("```")[0] for part in readme.split("```python\n")[1:]]
    assert any("import adapt\n" in code for code in snippets)
    shown = "import models, lrpe_md\nprint(models.mine, lrpe_md.__file__)"
    for code in snippets:
        found = run(python, "-W", "ignore", "-c", f"{code}\n{shown}", cwd=user)
        mine, place = found.splitlines()[-1].split()
        assert mine == "models"
        assert "site-packages" in place


def test_no_name_of_ours_but_the_package(installed, tmp_path):
    python, _ = installed
    for name in ("models", "scripts", "tests"):
        assert f"No module named '{name}'" in run(python, "-c", f"import {name}", cwd=tmp_path, fails=True)
    backbones = ", ".join(f"lrpe_md.models.{name}" for name in ("vit", "video", "dit", "flow", "lm_decode"))
    assert run(python, "-W", "ignore", "-c", f"import {backbones}", cwd=tmp_path) == ""


def test_an_editable_install_has_the_same_names(source, tmp_path_factory, tmp_path):
    python, place = environment(tmp_path_factory.mktemp("editable"))
    pip("install", "--editable", str(source), "editables", "--target", str(place), cwd=tmp_path)
    user = decoy(tmp_path_factory.mktemp("user"))
    code = """
        import timm, lrpe_md, lrpe_md.models.vit, models
        from lrpe_md import adapt
        print(lrpe_md.__file__, lrpe_md.models.vit.__file__, models.mine)
    """
    ours, vit, mine = run(python, "-W", "ignore", "-c", textwrap.dedent(code), cwd=user).split()
    assert [Path(ours), Path(vit), mine] == [source / "lrpe_md/__init__.py", source / "models/vit.py", "models"]
    for name in ("models", "scripts", "tests"):
        assert f"No module named '{name}'" in run(python, "-c", f"import {name}", cwd=tmp_path, fails=True)
    shown = "import models; print(models.__file__)"  # where the folder itself is the place to import from
    assert Path(run(python, "-W", "ignore", "-c", shown, cwd=source).strip()) == source / "models/__init__.py"


MISSING = [
    ("timm", "from lrpe_md import adapt"),
    ("timm", "from lrpe_md.integrations.timm import LrpeAttention"),
    ("timm", "import lrpe_md.integrations.timm_rotary"),
    ("timm", "import lrpe_md.models.dit"),
    ("diffusers", "import lrpe_md.integrations.diffusers"),
    ("transformers", "import lrpe_md.integrations.transformers"),
    ("transformers", "import lrpe_md.integrations.transformers"),
]


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """A Python with the wheel and without any of its extras."""
    python, place = environment(
        tmp_path_factory.mktemp("bare"), without=("timm", "diffusers", "transformers", "triton")
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return python


@pytest.mark.parametrize(("extra", "code"), MISSING)
def test_a_missing_extra_is_named(bare, extra, code, tmp_path):
    error = run(bare, "-c", code, cwd=tmp_path, fails=True)
    assert error.splitlines()[-1] == (
        f"ModuleNotFoundError: {extra}: expected it to be installed; pip install 'lrpe-md[{extra}]'"
    )


def test_without_extras_the_library_runs_and_knows_no_model(bare, tmp_path):
    code = """
        import torch, lrpe_md
        q, k = lrpe_md.RotateMd(8)(*torch.randn(2, 1, 2, 12, 8), positions=lrpe_md.Grid((3, 4)))
        try:
            lrpe_md.adapt_rotary(torch.nn.Linear(2, 2))
        except TypeError as error:
            print(error)
    """
    assert run(bare, "-c", textwrap.dedent(code), cwd=tmp_path).startswith("model: expected one with a rotary encoding")


def test_importing_costs_little_more_than_torch(bare, tmp_path):
    """Both in processes of their own, in turn, the least of several."""
    code = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"
    least = {"torch": float("inf"), "lrpe_md": float("inf")}
    for _ in range(5):
        for name in least:
            least[name] = min(least[name], float(run(bare, "-c", code.format(name), cwd=tmp_path)))
    assert least["lrpe_md"] < 1.5 * least["torch"]
