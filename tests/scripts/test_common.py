"""Helpers shared by the scripts: option values and provenance."""

import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import typer
from lrpe_md.scripts.common import devices, folder, options, provenance


def test_choose_keeps_the_order_and_removes_duplicates():
    assert options.choose("--modes", ["b", "a", "b"], "abc") == ["b", "a"]
    with pytest.raises(typer.BadParameter, match=r"--modes: unknown 'd'\. Choose from: a; b; c"):
        options.choose("--modes", ["a", "d"], "abc")


@pytest.mark.parametrize(("there", "wanted", "found"), [
    (False, "auto", "cpu"), (False, "cpu", "cpu"), (True, "auto", "cuda"), (True, "cuda", "cuda"), (True, "cpu", "cpu")
])  # fmt: skip
def test_device(there, wanted, found, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert devices.choose_device(wanted) == torch.device(found)


def test_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="cuda needs a GPU"):
        devices.choose_device("cuda")
    with pytest.raises(typer.BadParameter, match="unknown 'tpu'"):
        devices.choose_device("tpu")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_its_mark_for_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def git(*args: str) -> str:
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *args]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "common.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_commit() == ""
    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "a")
    git("tag", "-a", "v1", "-m", "a")
    head = git("rev-parse", "HEAD")
    assert provenance.git_commit() == head
    (tmp_path / "file").write_text("b")
    assert provenance.git_commit(12) == head[:12] + "+"
    monkeypatch.setenv("PATH", "")
    assert provenance.git_commit() == ""


def test_reports_tell_commits_from_checkouts_with_local_changes():
    found = [{"gpu": "G", "torch": "2", "commit": commit} for commit in ("a" * 40, "a" * 40 + "+", "b" * 7, None)]
    text = provenance.describe_environments(found)
    assert text == f"G, torch 2, commits {'a' * 12}, {'a' * 12} with local changes, bbbbbbb and unknown"


def test_versions():
    assert provenance.versions("torch", "no-such-package") == {"torch": version("torch"), "no-such-package": ""}


@pytest.mark.parametrize("command", [["ablate", "report"], ["bench", "report"]])
def test_reports_of_a_wheel_do_not_write_into_it(command, tmp_path, monkeypatch):
    from importlib import import_module

    from typer.testing import CliRunner

    app = import_module(f"lrpe_md.scripts.{command[0]}.app").app
    monkeypatch.setattr(folder, "ROOT", tmp_path)  # a wheel has no pyproject.toml
    refused = CliRunner().invoke(app, command[1:], env={"COLUMNS": "300"})
    assert refused.exit_code == 2, refused.output
    assert "only a checkout contains results" in refused.output
    assert not list(tmp_path.iterdir())
