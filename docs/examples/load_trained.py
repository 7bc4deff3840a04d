"""Load a vision transformer trained with `lrpe-md train image` or `lrpe-md train digits`.

    python docs/examples/load_trained.py runs/digits
    python docs/examples/load_trained.py runs/mine --picture cat.png

`load_run` returns the model of any run of `lrpe-md train`, including video, diffusion and language models.
"""

import argparse
import json
from pathlib import Path

import torch
from lrpe_md.scripts.train.data.images import read_image, resized
from lrpe_md.scripts.train.runs import load_run


@torch.no_grad()
def main(argv: list[str] | None = None) -> torch.Tensor:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Folder of a training run")
    parser.add_argument("--picture", type=Path, help="Picture to classify, if you trained on a folder CLASS/*.png")
    args = parser.parse_args(argv)
    if args.picture and not args.picture.is_file():
        parser.error(f"--picture {args.picture}: no such file")
    try:
        model = load_run(args.run)
    except (FileNotFoundError, ValueError) as error:
        parser.error(f"run: {error}")
    if not hasattr(model, "patch_embed") or len(model.patch_embed.img_size) != 2:
        parser.error(
            f"run {args.run}: expected a run of `lrpe-md train image` or `digits`, got a {type(model).__name__}"
        )
    size = model.patch_embed.img_size
    logits = model(torch.zeros(1, model.patch_embed.proj.in_channels, *size))
    print(f"{len(model.blocks)} layers, images of {size[0]}x{size[1]}, {logits.shape[1]} classes")
    if args.picture:
        file = args.run / "result.json"  # exists when the run has finished
        result = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if "classes" not in result:
            parser.error(f"--picture: expected a finished run of `lrpe-md train image`, got {args.run}")
        x = resized(read_image(args.picture, size)[None], size)  # as in the tests during training
        logits = model(x)
        print(result["classes"][logits.argmax()])
    return logits


if __name__ == "__main__":
    main()
