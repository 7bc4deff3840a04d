"""Fine-tune a timm RoPE ViT on a folder of images at a different resolution, with the fused kernels.

    python docs/examples/finetune_timm.py --data FOLDER --pretrained --size 384x288

FOLDER contains one folder of images per class; one image in 5 is held out. timm can load the saved weights.
"""

import argparse
from pathlib import Path

import timm
import torch
from timm.data import ImageDataset, create_transform
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from lrpe_md import adapt_rotary


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="vit_small_patch16_rope_mixed_224", help="eva02_*, vit_*_rope_*, *_dinov3*")
    parser.add_argument("--pretrained", action="store_true", help="Load timm's pretrained weights")
    parser.add_argument("--model-kwargs", nargs="*", default=[], help="Options for timm.create_model, such as depth=6")
    parser.add_argument("--size", default="384", help="Side or HEIGHTxWIDTH in pixels, multiples of the patch size")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--head-only", action="store_true", help="Train only the head, and freeze the blocks")
    parser.add_argument("--out", type=Path, default=Path("finetuned.pt"))
    args, device = parser.parse_args(argv), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        height, width = map(int, args.size.split("x") * (1 if "x" in args.size else 2))
    except ValueError:
        parser.error(f"--size: expected a side or HEIGHTxWIDTH, got {args.size!r}")
    classes = sorted(path.name for path in args.data.glob("*") if path.is_dir())
    if not classes or {"train", "val"} <= set(classes):
        advice = f"train/ and val/; pass --data {args.data / 'train'}" if classes else "none"
        parser.error(f"--data {args.data}: expected a folder for each class, got {advice}")
    if not all(each.partition("=")[2].isdecimal() for each in args.model_kwargs):
        parser.error(f"--model-kwargs: expected NAME=INTEGER, such as depth=6, got {' '.join(args.model_kwargs)}")
    kwargs = {name: int(value) for name, value in (each.split("=") for each in args.model_kwargs)}
    kwargs |= {"num_classes": len(classes), "dynamic_img_size": True}
    try:
        model = adapt_rotary(timm.create_model(args.model, args.pretrained, **kwargs)).to(device)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        remedy = "leave out --pretrained" if isinstance(error, OSError) else "pass a RoPE ViT, or follow docs/recipe.md"
        parser.error(f"--model {args.model}: {error}; {remedy}")
    if height % model.patch_embed.patch_size[0] or width % model.patch_embed.patch_size[1]:
        parser.error(f"--size: expected multiples of {model.patch_embed.patch_size}, the patch size, got {args.size}")
    model.blocks.requires_grad_(not args.head_only)
    data = timm.data.resolve_model_data_config(model)
    crops = (create_transform((3, height, width), part, mean=data["mean"], std=data["std"]) for part in (True, False))
    seen, held_out = (ImageDataset(str(args.data), transform=crop) for crop in crops)
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(0)).tolist()
    train, test = Subset(seen, order[len(seen) // 5 :]), Subset(held_out, order[: len(seen) // 5])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr, weight_decay=0.05)
    cast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for epoch in range(args.epochs):
        model.train()
        for images, labels in DataLoader(train, args.batch, shuffle=True, drop_last=len(train) > args.batch):
            with cast:
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), cast:
            right = torch.cat([model(x.to(device)).argmax(-1).cpu() == y for x, y in DataLoader(test, args.batch)])
        accuracy = right.float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, held-out accuracy {accuracy:.1%} at {height}×{width}")
    torch.save(model.state_dict(), args.out)
    return accuracy


if __name__ == "__main__":
    main()
