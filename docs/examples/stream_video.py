"""Stream a video with a moving window: frames arrive one by one, and each attends to the last few.

    python docs/examples/stream_video.py --video clip.mp4 --window 8 --pretrained

Each key is rotated once, at the time of its own frame, and then cached. Scores depend only on the offset in time, so
cached keys stay valid when the window moves. The kernel reads times on the device, so all frames run the same kernel.
"""

import argparse
from pathlib import Path

import av
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md import Grid, RotateMd


class WindowAttention(nn.Module):
    """timm's attention with a cache of keys and values for the last few frames."""

    def __init__(self, attention: nn.Module, window: int) -> None:
        super().__init__()
        self.attention, self.window = attention, window
        self.rope = RotateMd(attention.head_dim, 3, base=100.0)
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.positions: Grid | None = None  # positions of the current frame

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        own = self.attention
        q, k, v = own.qkv(x).unflatten(-1, (3, own.num_heads, own.head_dim)).permute(2, 0, 3, 1, 4)
        q, k = self.rope(q, k, positions=self.positions)
        self.kept = [*self.kept, (k, v)][-self.window :]
        k, v = (torch.cat(parts, dim=2) for parts in zip(*self.kept, strict=True))
        y = F.scaled_dot_product_attention(q, k, v)
        return own.proj(y.transpose(1, 2).flatten(2))


class Stream:
    """An image ViT that reads a video frame by frame and returns features (C,) for each frame."""

    def __init__(self, model: nn.Module, window: int) -> None:
        self.model, self.time = model, 0
        for block in model.blocks:
            block.attn = WindowAttention(block.attn, window).to(next(model.parameters()).device)

    @torch.no_grad()
    def step(self, frame: Tensor) -> Tensor:
        shape = 1, *self.model.patch_embed.dynamic_feat_size(frame.shape[-2:])
        origin = torch.tensor([self.time, 0, 0], device=frame.device)
        for block in self.model.blocks:
            block.attn.positions = Grid(shape, prefix=self.model.num_prefix_tokens, origin=origin)
        self.time += 1
        return self.model.forward_features(frame)[0, self.model.num_prefix_tokens :].mean(0)


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--video", type=Path, required=True)
    parser.add_argument("--window", type=int, default=8, help="Frames that each frame attends to, itself included")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--size", type=int, default=224)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = timm.create_model(args.model, args.pretrained, dynamic_img_size=True, num_classes=0).to(device)
    stream, features, changes = Stream(model.eval(), args.window), None, []
    with av.open(str(args.video)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            x = torch.from_numpy(frame.reformat(args.size, args.size, format="rgb24").to_ndarray()).to(device)
            before, features = features, stream.step(x.permute(2, 0, 1)[None] / 127.5 - 1)
            changes.append(0.0 if before is None else 1 - F.cosine_similarity(features, before, dim=0).item())
            print(f"frame {number}: change {changes[-1]:.4f}")
    return changes


if __name__ == "__main__":
    main()
