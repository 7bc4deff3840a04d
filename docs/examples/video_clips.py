"""Train a video transformer on your own clips: FOLDER/CLASS/*.mp4, one folder per class.

    python docs/examples/video_clips.py --data FOLDER --frames 16 --size 112

The model uses two-frame tubelets and Wan's axial rotation on (time, height, width). The script also tests the model on
twice as many frames, with time mapped onto the training length.
"""

import argparse
from pathlib import Path

import lrpe_md.models.video  # noqa: F401  registers models with timm
import timm
import torch
from lrpe_md.scripts.train.data.videos import VideoError, decode, find_videos
from timm.optim import create_optimizer_v2


def read_clip(path: Path, num_frames: int, size: int) -> torch.Tensor:
    """Read evenly spaced frames from a file, cropped to their central square: (3, frames, size, size) in [-1, 1]."""
    frames = decode(path, size)
    chosen = torch.linspace(0, len(frames) - 1, num_frames).round().long()
    return frames[chosen].transpose(0, 1).float() / 127.5 - 1


def read_folder(folder: Path, num_frames: int, size: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Read clips (N, 3, frames, size, size), their class indices (N,), and the class names."""
    classes = sorted(path.name for path in folder.glob("*") if path.is_dir())
    files = [(path, i) for i, name in enumerate(classes) for path in find_videos([folder / name])]
    if not files:
        raise VideoError(f"--data {folder}: expected CLASS/*.mp4, found none")
    clips = torch.stack([read_clip(path, num_frames, size) for path, _ in files])
    return clips, torch.tensor([label for _, label in files]), classes


def main(argv: list[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--encoding", default="wan", help="wan, rotate, cosine, mixed, or a preset with three axes")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    args, device = parser.parse_args(argv), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.size % 16 or args.frames % 2:
        parser.error(f"--size, --frames: expected multiples of 16 and 2, got {args.size}, {args.frames}")
    torch.manual_seed(0)
    try:
        clips, labels, classes = read_folder(args.data, 2 * args.frames, args.size)
    except VideoError as error:
        raise SystemExit(str(error)) from error
    order = torch.randperm(len(clips), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 4], order[len(order) // 4 :]
    model = timm.create_model(
        "lrpe_video_tiny_patch16_224", encoding=args.encoding, depth=args.depth, num_frames=args.frames,
        tubelet_size=2, img_size=args.size, num_classes=len(classes), global_pool="avg",
    ).to(device)  # fmt: skip
    optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-4, weight_decay=0.05)  # no weight decay for frequencies
    for epoch in range(args.epochs):
        for batch in train[torch.randperm(len(train))].split(args.batch):
            x = clips[batch, :, ::2].to(device)  # every other frame
            loss = torch.nn.functional.cross_entropy(model(x), labels[batch].to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    model.eval()
    model.reference = model.patch_embed.grid_size  # map positions onto the training range, for any length
    accuracy = {}
    for step in (2, 1):
        with torch.no_grad():
            found = torch.cat([model(x.to(device)).argmax(-1).cpu() for x in clips[test, :, ::step].split(args.batch)])
        accuracy[2 * args.frames // step] = (found == labels[test]).float().mean().item()
    print({f"{frames} frames": f"{value:.1%}" for frames, value in accuracy.items()})
    return accuracy


if __name__ == "__main__":
    main()
