"""Load a vision transformer that `lrpe-md train image` or `lrpe-md train digits` has trained.

    python docs/examples/load_trained.py runs/digits

`load_run` returns the model of any run of `lrpe-md train`, also a video, diffusion or language model.
"""

import argparse
from pathlib import Path

import torch
from lrpe_md.scripts.train.runs import load_run


@torch.no_grad()
def main(argv: list[str] | None = None) -> torch.Tensor:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Folder of the training")
    model = load_run(parser.parse_args(argv).run)
    size = model.patch_embed.img_size
    logits = model(torch.zeros(1, model.patch_embed.proj.in_channels, *size))
    print(f"{len(model.blocks)} layers, images of {size[0]}x{size[1]}, {logits.shape[1]} classes")
    return logits


if __name__ == "__main__":
    main()
