"""Train a text-conditioned diffusion transformer on your captioned images, then sample your prompts.

    python docs/examples/text_to_image.py --data FOLDER --prompt "a red circle" --prompt "a blue square" --out sheet.png

FOLDER contains NAME.txt next to each NAME.png. `lrpe-md train diffusion` adds checkpoints, EMA, multi-GPU training
and evaluation. `lrpe-md train sample` generates images from its checkpoint.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from lrpe_md.models.dit import DiT
from lrpe_md.models.flow import draw_times, flow_matching_loss, sample
from lrpe_md.models.text import TextEncoder, tokenize
from PIL import Image


def read_pairs(folder: Path, size: int) -> tuple[torch.Tensor, list[str]]:
    """Read images (N, 3, size, size) in [-1, 1] and their captions."""
    files = sorted(folder.glob("*.png"))
    bare = [f"{file.name} without a caption" for file in files if not file.with_suffix(".txt").is_file()]
    if bare or not files:
        raise SystemExit(f"--data {folder}: expected NAME.png and NAME.txt, got {bare[0] if bare else 'no images'}")
    images = [np.asarray(Image.open(file).convert("RGB").resize((size, size))) for file in files]
    captions = [file.with_suffix(".txt").read_text(encoding="utf-8").strip() for file in files]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 127.5 - 1, captions


def write_images(path: Path, images: torch.Tensor, columns: int) -> None:
    """Write images (N, 3, H, W) side by side."""
    rows = images.clamp(-1, 1).unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    Image.fromarray(((rows + 1) * 127.5).byte().cpu().numpy()).save(path)


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=4, help="Number of images per prompt")
    parser.add_argument("--sample-steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("sheet.png"))
    args, device = parser.parse_args(argv), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    images, captions = read_pairs(args.data, args.size)
    images, tokens = images.to(device), tokenize(captions, device=device)
    # Rotate on (height, width). The bytes of the caption lie on the diagonal before the image.
    model = DiT(
        encoding="rotate", text_positions="diagonal", text_encoder=TextEncoder(96),
        patch_size=2, embed_dim=args.dim, depth=args.depth, num_heads=args.dim // 32,
    ).to(device)  # fmt: skip
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=args.steps)
    for step in range(args.steps):
        chosen = torch.randint(len(images), (args.batch,), device=device)
        x, noise = images[chosen], torch.randn_like(images[chosen])
        t, drop = draw_times(args.batch, device=device), torch.rand(args.batch, device=device) < 0.1  # for guidance
        loss = flow_matching_loss(model, x, tokens[chosen], t, noise, drop=drop).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    prompts = tokenize(args.prompt, device=device).repeat_interleave(args.images, 0)
    noise = torch.randn(len(prompts), 3, args.size, args.size, device=device)
    write_images(args.out, sample(model.eval(), noise, prompts, scale=3, steps=args.sample_steps), args.images)
    return losses


if __name__ == "__main__":
    main()
