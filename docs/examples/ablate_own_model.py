"""Compare encodings in your own network, with the same seeds for each encoding.

    python docs/examples/ablate_own_model.py --encoding rotate --encoding cosine --encoding dinov3 --seeds 3

The choices are none, rotate, cosine, mixed and all two-axis presets; `import my_schemes` adds your registered schemes.
Replace Net and the digits with your own. `lrpe-md ablate` can also train in parallel, resume, and pair results by seed.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lrpe_md.integrations.encoding import EncodingStack, build_encoding

OPTIONS = {"rotate": {}, "cosine": {"act": "softplus"}}


class Net(nn.Module):
    """A network with two convolutions, then attention between all pixels."""

    def __init__(self, encoding: str, dim: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.stem = nn.Sequential(nn.Conv2d(1, dim, 3, padding=1), nn.GELU(), nn.Conv2d(dim, dim, 1))
        self.encoding = build_encoding(encoding, OPTIONS.get(encoding, {}), self.head_dim, num_heads, 1, 2)
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.unsqueeze(1)).flatten(2).mT
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if self.encoding is not None:
            stack = EncodingStack(self.encoding)  # also handles per-layer encodings and presets
            q, k = stack[0](q, k, positions=stack.lay_out(images.shape[1:]))
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return self.head(x.amax(1))  # max pooling over positions


def train(encoding: str, seed: int, epochs: int) -> float:
    """Train with an encoding and a seed, and return the accuracy on the held-out last third of the data."""
    torch.manual_seed(seed)
    images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    images, cut = images.float().unflatten(1, (8, 8)) / 8 - 1, 1200
    model = Net(encoding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(seed)  # the same for every encoding
    for _ in range(epochs):
        for batch in torch.randperm(cut, generator=order).split(64):
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return (model(images[cut:]).argmax(-1) == labels[cut:]).float().mean().item()


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoding", action="append", help="Encoding to compare; repeat for several")
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds per encoding")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("ablation.csv"))
    args = parser.parse_args(argv)
    names, found = args.encoding or ["none", "rotate", "cosine", "mixed"], {}
    list(map(Net, names))  # a wrong name fails before the first training
    for encoding in names:
        values = found[encoding] = [train(encoding, seed, args.epochs) for seed in range(args.seeds)]
        print(f"{encoding:<10} {100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f} %")
        with args.out.open("w", newline="") as file:
            csv.writer(file).writerows([("encoding", *range(args.seeds)), *((e, *row) for e, row in found.items())])
    return found


if __name__ == "__main__":
    main()
