"""Load a vision transformer that `lrpe-md train image` or `lrpe-md train digits` has trained.

    python docs/examples/load_trained.py runs/digits

`model.safetensors` holds the weights to evaluate (averaged, if you trained with --ema) and, as metadata, the options of
the training. `options["model"]` are the arguments of the model.
"""

import argparse
import json
from pathlib import Path

import torch
from lrpe_md.models.vit import LrpeVisionTransformer
from safetensors import safe_open


def load(run: Path) -> LrpeVisionTransformer:
    with safe_open(run / "model.safetensors", framework="pt") as file:
        options = json.loads(file.metadata()["settings"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    model = LrpeVisionTransformer(**options["model"])
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def main(argv: list[str] | None = None) -> torch.Tensor:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Folder of the training")
    model = load(parser.parse_args(argv).run)
    size = model.patch_embed.img_size
    logits = model(torch.zeros(1, model.patch_embed.proj.in_channels, *size))
    print(f"{len(model.blocks)} layers, images of {size[0]}x{size[1]}, {logits.shape[1]} classes")
    return logits


if __name__ == "__main__":
    main()
