"""Run the library's tests against a wheel with ``python tests/installed.py WHEEL [--all] [PYTEST OPTIONS]``.

The tests run in a new environment, which has the packages of the current one except lrpe_md. They are copied to a
temporary folder, so that they import nothing from the checkout. By default, only the tests in QUICK run, which cover
the public API. With ``--all``, all tests in tests/unit run, except those that read files of the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TESTS = Path(__file__).resolve().parent
OF_A_CHECKOUT = ("test_language.py", "test_package.py", "test_structure.py")
READS_A_CHECKOUT = "not test_no_scheme_is_named_elsewhere"
QUICK = (
    "accuracy", "errors", "invalid_inputs", "linear_errors", "linear_module", "modules", "norm", "packed", "positions",
    "preset_modules", "rope_parameters", "schemes", "text",
)  # fmt: skip

RUN = """
import sys
from pathlib import Path
import lrpe_md, pytest

assert Path(lrpe_md.__file__).is_relative_to(sys.prefix), lrpe_md.__file__
found = pytest.main(sys.argv[1:])
foreign = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "lrpe_md" and m.__file__]
assert all(Path(file).is_relative_to(sys.prefix) for file in foreign)
sys.exit(found)
"""


def make_environment(folder: Path, *, without: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Create an environment with the current packages except lrpe_md. Return its Python and its site-packages."""
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


def main(wheel: Path, options: list[str]) -> int:
    every, options = "--all" in options, [option for option in options if option != "--all"]
    with tempfile.TemporaryDirectory(prefix="lrpe-md-") as place:
        python, _ = make_environment(Path(place) / "venv")
        install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
        copied = Path(place) / "tests"
        left_out = shutil.ignore_patterns("__pycache__", *OF_A_CHECKOUT)
        shutil.copytree(TESTS / "unit", copied / "unit", ignore=left_out)
        shutil.copytree(TESTS / "golden", copied / "golden", ignore=left_out)
        shutil.copytree(TESTS.parent / "docs", Path(place) / "docs")  # tests run the code in the pages
        for helper in TESTS.glob("*.py"):
            shutil.copy(helper, copied)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        chosen = [copied / "unit"] if every else [copied / "unit" / f"test_{name}.py" for name in QUICK]
        settings = ["-q", "-p", "no:cacheprovider", "-k", READS_A_CHECKOUT, "-o", "markers=gpu: needs a GPU"]
        given = [*settings, *options, *map(str, chosen)]
        return subprocess.run([str(python), "-c", RUN, *given], cwd=place, env=env).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".whl"):
        raise SystemExit(
            f"expected a wheel, got {' '.join(sys.argv[1:]) or 'nothing'}; usage: {__doc__.splitlines()[0]}"
        )
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
