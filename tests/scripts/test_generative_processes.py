"""Diffusion on each kind of data, and a VAE, on two processes with both kinds of sharding."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generative_data import KINDS, SMALL, write_all
from lrpe_md.scripts.train.tasks import diffusion
from lrpe_md.scripts.train.tasks.diffusion import DiffusionTraining
from lrpe_md.scripts.train.vae import load_vae
from test_train_processes import SHARDINGS, on_two_processes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return write_all(tmp_path_factory.mktemp("data"))


def flags(options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        option = name.replace("_", "-")
        found += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    return found


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_diffusion_on_two_processes(kind: str, sharding: str, data: dict[str, Any], tmp_path: Path) -> None:
    """Sampling in training, the distance and accumulation work. A single process resumes with the same weights."""
    options = {
        **SMALL, **data[kind], "accumulate": 2, "sample_every": 2, "distance_samples": 4, "validate_every": 2,
        "out": tmp_path / "run",
    }  # fmt: skip
    assert on_two_processes(["diffusion", *flags({**options, "sharding": sharding})]) == [0, 0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["processes"] == 2
    assert np.isfinite(result["frechet_random_features"])
    assert (tmp_path / "run" / "samples-0000002.png").exists()
    if sharding == "ddp":
        again = diffusion.run(DiffusionTraining(**options))
        for name, found in result["held_out"].items():
            if name != "test_pairs":
                assert again["held_out"][name]["loss"] == pytest.approx(found["loss"], rel=1e-4)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_vae_on_two_processes(sharding: str, data: dict[str, Any], tmp_path: Path) -> None:
    model = {"dim", "depth", "heads", "text_dim", "text_depth", "sample_steps"}
    options = {name: value for name, value in SMALL.items() if name not in model}
    options |= {"data": data["labels"]["data"], "size": 8, "widths": "8,16", "out": tmp_path / "run"}
    assert on_two_processes(["vae", *flags({**options, "sharding": sharding})]) == [0, 0]
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    saved = load_vae(str(tmp_path / "run")).state_dict()
    assert all(torch.equal(saved[name.removeprefix("vae.")], value) for name, value in state["average"].items())
