"""Stream a video of any length at constant memory.

    python docs/examples/stream_video.py                                1,000 frames of a moving square
    python docs/examples/stream_video.py --video clip.mp4 --size 224 --patch-size 16 --rule add

Three of four layers are linear attention with a memory that forgets: the gated delta rule, or a sum with a decay. The
others are softmax attention over a moving window of frames. Both keep a state of constant size. The model here has
random weights; train one with `lrpe-md train video --causal`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from lrpe_md.models.video import LrpeVideoTransformer, VideoState
from torch import Tensor

from lrpe_md import Memory


def read_frames(path: Path, size: int) -> Iterator[Tensor]:
    """Yield the frames of a video, (1, 3, 1, size, size), from -1 to 1."""
    import av

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            x = torch.from_numpy(frame.reformat(size, size, format="rgb24").to_ndarray())
            yield x.permute(2, 0, 1)[None, :, None] / 127.5 - 1


def draw_frames(number: int, size: int) -> Iterator[Tensor]:
    """Yield frames of a square that moves to the right."""
    for t in range(number):
        frame = torch.full((1, 3, 1, size, size), -1.0)
        frame[..., size // 4 : size // 2, t % (size // 2) : t % (size // 2) + size // 4] = 1
        yield frame


def count_bytes(state: VideoState) -> int:
    return sum(t.numel() * t.element_size() for layer in state.layers for t in layer if t is not None)


@torch.no_grad()
def main(argv: list[str] | None = None) -> list[int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--video", type=Path, help="Video file (default: a moving square)")
    parser.add_argument("--frames", type=int, default=1000, help="Number of frames of the moving square")
    parser.add_argument("--window", type=int, default=4, help="Frames that softmax attention sees, itself included")
    parser.add_argument("--rule", choices=("delta", "add"), default="delta", help="How a frame enters the memory")
    parser.add_argument("--size", type=int, default=32, help="Height and width of a frame, pixels")
    parser.add_argument("--patch-size", type=int, default=8, help="Height and width of a patch, pixels")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LrpeVideoTransformer(
        img_size=args.size, patch_size=args.patch_size, tubelet_size=1, embed_dim=64, depth=4, num_heads=2,
        qk_norm=True, class_token=False, global_pool="avg", encoding="rotate", causal="frames", window=args.window,
        attention=("linear", "linear", "linear", "softmax"), memory=Memory(args.rule, decay="retnet"),
    ).to(device).eval()  # fmt: skip

    state, sizes = None, []
    frames = draw_frames(args.frames, args.size) if args.video is None else read_frames(args.video, args.size)
    for number, frame in enumerate(frames, 1):
        tokens, state = model.stream(frame.to(device), state)  # (1, patches, 64): features of this frame
        sizes.append(count_bytes(state))
        if number in (10, 100, 1000):
            cached = number * 2 * len(model.blocks) * tokens.numel() * tokens.element_size()
            print(
                f"after {number} frames: the state takes {sizes[-1] / 1024:.0f} KiB; keys and values of all frames "
                f"would take {cached / 1024:.0f} KiB"
            )
    return sizes


if __name__ == "__main__":
    main()
