"""``scripts.bench compare``: measurements that became slower between two commits."""

import subprocess
from fnmatch import fnmatch

import pytest
from lrpe_md.scripts.bench import compare
from lrpe_md.scripts.bench.app import app
from typer.testing import CliRunner

TRAINING = "model,mode,encoding,gpu,ratio_p50\n"
OPERATORS = "mode,op,workload,omega,peer,variant,dtype,head_dim,num_tokens,num_axes,gpu,p50\n"
ROW = "fwd,rotate,img64,shared,{peer},,bfloat16,64,4096,2,G,{p50}\n"


def test_regressions_are_listed():
    old = {"training.csv": f"{TRAINING}vit,eager,axial,G,1.02\nvit,eager,mixed,G,1.05\nvit,eager,other,G,1\n"}
    new = {"training.csv": f"{TRAINING}vit,eager,axial,G,1.06\nvit,eager,mixed,G,1.07\nvit,eager,other,H,9\n"}
    for name, times in (("old", (1.0, 1.0)), ("new", (1.04, 5.0))):
        rows = ROW.format(peer="lrpe-md", p50=times[0]) + ROW.format(peer="timm", p50=times[1])
        (old if name == "old" else new)["benchmark-img64.csv"] = OPERATORS + rows
    changes = compare.find_changes(old, new)
    assert len(changes) == 3  # timm and the row of another GPU don't count
    found = compare.find_regressions(changes, 0.03)
    assert list(found.file) == ["benchmark-img64.csv", "training.csv"]
    assert "rotate, img64, shared, lrpe-md" in found.row[0]
    assert found.row[1] == "vit, eager, axial, G"
    assert compare.find_regressions(changes, 0.05).empty
    assert compare.find_regressions(compare.find_changes(new, old), 0.03).empty


def test_last_value_of_a_key_counts():
    text = f"{TRAINING}vit,eager,axial,G,1.5\nvit,eager,axial,G,1.02\nvit,eager,axial,G,\n"
    assert compare.load(text, compare.KINDS["training.csv"]).tolist() == [1.02]


@pytest.mark.parametrize("name", sorted(compare.read(None)))
def test_committed_files_have_a_kind(name):
    if name.startswith("counters"):
        return  # a list of kernels, without measurements to compare
    kind = next(kind for pattern, kind in compare.KINDS.items() if fnmatch(name, pattern))
    assert len(compare.load(compare.read(None)[name], kind)), name


def test_two_commits(tmp_path, monkeypatch):
    folder = tmp_path / compare.FOLDER
    folder.mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    for ratio in (1.0, 1.2):
        (folder / "training.csv").write_text(f"{TRAINING}vit,eager,axial,G,{ratio}\n")
        subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
        subprocess.run([*git, "commit", "-qm", "x"], cwd=tmp_path, check=True)
    commits = subprocess.run(["git", "log", "--format=%h"], cwd=tmp_path, capture_output=True, text=True).stdout.split()
    monkeypatch.setattr(compare, "read", lambda commit, read=compare.read: read(commit, tmp_path))
    done = CliRunner().invoke(app, ["compare", commits[1], commits[0]], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert "+20.0%" in done.output
    done = CliRunner().invoke(app, ["compare", commits[1], commits[0], "--tolerance", "0.3"])
    assert (done.exit_code, done.output) == (0, "Measurements that changed: 1. None is slower by more than 30%.\n")
    done = CliRunner().invoke(app, ["compare", commits[0]])
    assert (done.exit_code, done.output) == (0, "Nothing to compare: no measurement was repeated on the same GPU.\n")
    assert CliRunner().invoke(app, ["compare", "nothing"]).exit_code == 2
