"""Reading files never runs code, as .github/SECURITY.md promises."""

import ast
import io
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from lrpe_md.scripts.train import loop, samples, weights

import lrpe_md

ROOT = Path(__file__).parents[2]


class Runs:
    """An object whose unpickling calls a function."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["checkpoint.pt", "weights.pth", "weights.safetensors"])
def test_a_checkpoint_that_would_run_code_is_refused(name, zipped, tmp_path):
    file, ran = tmp_path / name, tmp_path / "ran"
    torch.save({"model": Runs(ran)}, file, _use_new_zipfile_serialization=zipped)
    if name == "checkpoint.pt":
        with pytest.raises(typer.BadParameter, match="can't be read"):
            loop.read_checkpoint(file)
    with pytest.raises(typer.BadParameter, match="can't be read"):
        weights._read(file)
    assert not ran.exists()
    torch.load(io.BytesIO(file.read_bytes()), weights_only=False)
    assert ran.exists()  # shows that the file would run code if it were unpickled


def test_samples_that_would_run_code_are_refused(tmp_path):
    held = io.BytesIO()
    np.savez(held, captions=np.array([Runs(tmp_path / "ran")], dtype=object))
    (tmp_path / "samples.npz").write_bytes(held.getvalue())
    with pytest.raises(typer.BadParameter, match="ValueError") as raised:
        samples.load(tmp_path / "samples.npz")
    assert "allow_pickle" in str(raised.value.__cause__)
    assert not (tmp_path / "ran").exists()


def calls(source: str) -> set[str]:
    """Return the calls in the source that can execute a file or string, with the arguments that determine it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in ("eval", "exec", "__import__") or name.split(".")[0] in ("pickle", "marshal", "dill", "joblib"):
            found.add(name)
        if name == "torch.load" and given.get("weights_only") != "True":
            found.add(f"{name} without weights_only=True")
        if name.endswith("load_state_dict") and node.args and "str(" in ast.unparse(node.args[0]):
            found |= set() if given.get("weights_only") == "True" else {f"{name} of a file without weights_only=True"}
        found |= {name for each, value in given.items() if each == "allow_pickle" and value != "False"}
    return found


@pytest.mark.slow
def test_no_other_code_can_execute_files():
    folders = ROOT / "lrpe_md", ROOT / "models", ROOT / "scripts"
    found = {
        (path.relative_to(ROOT).as_posix(), call)
        for folder in folders
        for path in folder.rglob("*.py")
        for call in calls(path.read_text(encoding="utf-8"))
    }
    assert found == {
        ("lrpe_md/engine/kernels/fixed.py", "exec"),  # a kernel's name and arguments
        ("scripts/adapters/sweep.py", "pickle.dumps"), ("scripts/adapters/sweep.py", "pickle.loads"),  # its models
        ("scripts/adapters/sweep.py", "torch.load without weights_only=True"),
        ("scripts/ablate/app.py", "joblib.cpu_count"), ("scripts/ablate/app.py", "joblib.Parallel"),
        ("scripts/ablate/app.py", "joblib.delayed"), ("scripts/ablate/app.py", "joblib.delayed(train)"),
    }  # fmt: skip
    assert calls("torch.load(path)") == {"torch.load without weights_only=True"}
    assert calls("load_state_dict(str(file))") == {"load_state_dict of a file without weights_only=True"}
    assert calls("np.load(path, allow_pickle=True)\npickle.load(file)\neval(text)") == {
        "np.load",
        "pickle.load",
        "eval",
    }


def test_a_scheme_imports_nothing():
    data = lrpe_md.preset("wan").scheme.to_dict()
    data["grid"] = "os.system"
    with pytest.raises(ValueError, match="expected"):
        lrpe_md.Scheme.from_dict(data)
