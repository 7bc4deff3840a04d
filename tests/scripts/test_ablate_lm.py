"""The ablation of the language model end to end on a tiny one: shards, resuming, the report, the README."""

import json
from pathlib import Path

import pandas as pd
import pytest
from lrpe_md.scripts.ablate import lm as ablate_lm
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(ablate_lm.app, list(args), env={"COLUMNS": "400", "NO_COLOR": "1"})


def test_shards_resume_and_report(tmp_path: Path, monkeypatch) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("Now is the winter of our discontent " * 60)
    command = ["run", str(text), "--smoke", "--device", "cpu", "--seeds", "2", "-e", "rotate", "-e", "none"]
    command += ["--out", str(out)]
    started, run_one = [], ablate_lm.run_one

    def counted(name: str, seed: int, *args) -> dict:
        started.append((name, seed))
        return run_one(name, seed, *args)

    monkeypatch.setattr(ablate_lm, "run_one", counted)
    first = invoke(*command, "--shard", "0/2")
    assert first.exit_code == 0, first.output
    assert started == [("rotate", 0), ("rotate", 1)]
    assert "still to come" in first.output
    assert not (out / "results.csv").exists()
    (out / "runs" / "none-1.json.77.part").write_text('{"enc')  # of a process that was killed
    second = invoke(*command, "--shard", "1/2")
    assert second.exit_code == 0, second.output
    assert started[2:] == [("none", 0), ("none", 1)]

    results = pd.read_csv(out / "results.csv")
    variants = {("rotate", "none"), ("none", "none"), *(("rotate", s) for s in ablate_lm.SCALINGS)}
    assert set(zip(results.encoding, results.scaling, strict=True)) == variants
    whole = results[(results["first"] == 0) & (results["last"] == results.length)]
    assert len(whole) == len(variants) * 2 * len(ablate_lm.SMOKE_LENGTHS)
    assert results.bits_per_byte.between(3, 9).all()
    table = (out / "table.md").read_text()
    assert table in second.output
    assert "| rotate + yarn | " in table
    assert table.count("±") == 1 + len(variants) * len(ablate_lm.SMOKE_LENGTHS)
    assert 5_000 < (out / "lengths.png").stat().st_size < 300_000

    # One run lost: that alone is repeated, to the same end.
    lost = out / "runs" / "none-1.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    started.clear()
    assert invoke(*command).exit_code == 0
    assert started == [("none", 1)]
    assert {**before, "train_seconds": 0} == {**json.loads(lost.read_text()), "train_seconds": 0}

    refused = invoke(*command, "--seeds", "3")
    assert refused.exit_code == 2
    assert "seeds: 2 there, 3 now" in refused.output

    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{ablate_lm.BEGIN}\nold\n{ablate_lm.END}\nb\n")
    assert invoke("report", str(out), "--readme", str(readme)).exit_code == 0
    assert table in readme.read_text()
    assert "old" not in readme.read_text()


def test_numbers_of_the_table(tmp_path: Path) -> None:
    same = {"params": 1000, "train_seconds": 30.0, "first": 0}
    rows = [
        {**same, "encoding": "rotate", "scaling": scaling, "seed": seed, "length": n, "last": n, "bits_per_byte": bits}
        for scaling, seed, n, bits in (
            ("none", 0, 512, 2.0), ("none", 1, 512, 2.2), ("none", 0, 1024, 5.0), ("none", 1, 1024, 7.0),
            ("yarn", 0, 512, 2.0), ("yarn", 1, 512, 2.2), ("yarn", 0, 1024, 2.5), ("yarn", 1, 1024, 2.5),
        )
    ]  # fmt: skip
    rows.append({**rows[2], "first": 512, "bits_per_byte": 9.0})  # a part is not in the table
    training = {"length": 512, "steps": 2000, "batch": 64}
    here = {"gpu": "A GPU", "cpu": "", "torch": "2.11", "commit": "0123456789abcdef"}
    config = {"settings": {"seeds": 2, "limit": 1024, "training": training}, "environments": [here]}
    lines = ablate_lm.markdown(pd.DataFrame(rows), config).splitlines()
    assert lines[2:6] == [
        "| encoding | parameters | 512 | 1,024 |",
        "| --- | ---: | ---: | ---: |",
        "| rotate + yarn | 1,000 | 2.100 ± 0.141 | 2.500 ± 0.000 |",
        "| rotate | 1,000 | 2.100 ± 0.141 | 6.000 ± 1.414 |",
    ]
    assert "A GPU, torch 2.11, commit 0123456789ab; 30 to 30 s a training." in lines


@pytest.mark.parametrize("shard", ["1/1", "a/2", "2", "-1/2", "0/0"])
def test_shard_errors(shard: str) -> None:
    with pytest.raises(ablate_lm.typer.BadParameter, match="expected i/n"):
        ablate_lm.parse_shard(shard)


def test_a_folder_of_nothing_is_refused(tmp_path: Path) -> None:
    refused = invoke("report", str(tmp_path))
    assert refused.exit_code == 2
    assert "found neither" in refused.output


def test_the_readme_shows_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = ablate_lm.section(ablate_lm.RESULTS)
    assert ablate_lm.fill(readme, ablate_lm.BEGIN, ablate_lm.END, section) == readme
