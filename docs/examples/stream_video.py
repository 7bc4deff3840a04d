"""Stream a video of any length at constant memory.

    python docs/examples/stream_video.py                                1,000 frames of a moving square
    python docs/examples/stream_video.py --run runs/stream --video clip.mp4

With `--run`, it prints the class of each frame, averaged over the number of frames in a training clip. Without `--run`,
the model has random weights. Three of its four layers have linear attention with a memory that forgets: the gated delta
rule, or a sum with a decay. The other has softmax attention over a moving window. Both keep a state of constant size.
"""

import argparse
import json
from collections import deque
from pathlib import Path

import torch
from lrpe_md.models.video import LrpeVideoTransformer, VideoState
from lrpe_md.scripts.train.data.videos import VideoError
from lrpe_md.scripts.train.runs import load_frames, load_run
from torch import Tensor

from lrpe_md import Memory


def draw_frames(number: int, size: int) -> Tensor:
    """Return frames (1, 3, number, size, size) of a square that moves to the right."""
    video = torch.full((1, 3, number, size, size), -1.0)
    for t in range(number):
        video[:, :, t, size // 4 : size // 2, t % (size // 2) : t % (size // 2) + size // 4] = 1
    return video


def count_bytes(state: VideoState) -> int:
    return sum(t.numel() * t.element_size() for layer in state.layers for t in layer if t is not None)


@torch.no_grad()
def main(argv: list[str] | None = None) -> list[int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="Folder of a run of `lrpe-md train video --causal`")
    parser.add_argument("--video", type=Path, help="Video file, with --run")
    parser.add_argument("--frames", type=int, default=1000, help="Number of frames of the moving square")
    parser.add_argument("--window", type=int, default=4, help="Window of softmax attention, in frames")
    parser.add_argument("--rule", choices=("delta", "add"), default="delta", help="How a frame enters the memory")
    args = parser.parse_args(argv)
    if (args.run is None) != (args.video is None):
        parser.error("--run, --video: expected both, to classify a video, or neither, for the moving square")
    model = LrpeVideoTransformer(
        img_size=32, patch_size=8, tubelet_size=1, embed_dim=64, depth=4, num_heads=2, qk_norm=True, class_token=False,
        global_pool="avg", encoding="rotate", causal="frames", window=args.window,
        attention=("linear", "linear", "linear", "softmax"), memory=Memory(args.rule, decay="retnet"),
    ).eval()  # fmt: skip
    classes, video = [], draw_frames(args.frames, 32)
    if args.run is not None:
        try:
            model, video = load_run(args.run), load_frames(args.run, args.video)
            classes = json.loads((args.run / "result.json").read_text(encoding="utf-8"))["classes"]
        except (FileNotFoundError, ValueError, VideoError) as error:
            parser.error(f"--run {args.run}, --video {args.video}: {error}")
        if model.causal is None:
            parser.error(f"--run {args.run}: expected a streaming model; train it with --causal")

    device, tubelet = "cuda" if torch.cuda.is_available() else "cpu", model.patch_embed.patch_size[0]
    model, state, sizes = model.to(device), None, []
    recent: deque[Tensor] = deque(maxlen=model.patch_embed.grid_size[0])  # tokens of the latest frames
    for number, frames in enumerate(video.split(tubelet, dim=2), 1):
        tokens, state = model.stream(frames.to(device), state)  # (1, patches, channels): features of these frames
        sizes.append(count_bytes(state))
        recent.append(tokens)
        if classes:
            print(f"frame {number * tubelet}: {classes[model.forward_head(torch.cat([*recent], dim=1)).argmax()]}")
        elif number in (10, 100, 1000):
            cached = number * 2 * len(model.blocks) * tokens.numel() * tokens.element_size() / 1024
            print(f"after {number} frames: the state takes {sizes[-1] / 1024:.0f} KiB; keys and values of all frames "
                  f"would take {cached:.0f} KiB")  # fmt: skip
    return sizes


if __name__ == "__main__":
    main()
