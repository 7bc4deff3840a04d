"""Train your own vision transformer with the cosine map and learned per-head frequencies.

    python docs/examples/vit_cosine.py

Each pixel of scikit-learn's digits is a token. At other sizes, positions are mapped onto the training grid.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md import CosineMd, Grid


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, encoding: nn.Module, positions: Grid) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k = encoding(q, k, positions=positions)  # twice as wide: [cos, sin]
        y = F.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim: int = 48, depth: int = 3, num_heads: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        # Dense frequencies: each channel of each head learns its own direction and length.
        kind = {"frequencies": "mixed", "num_heads": num_heads, "learnable": True, "base": 10.0}
        self.encoding = CosineMd(dim // num_heads, 2, act="softplus", **kind)
        self.embed, self.cls = nn.Linear(1, dim), nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, images: Tensor, trained: tuple[int, int] = (8, 8)) -> Tensor:
        x = torch.cat([self.cls.expand(len(images), -1, -1), self.embed(images.flatten(1).unsqueeze(-1))], dim=1)
        positions = Grid(tuple(images.shape[1:]), prefix=1).interpolate(trained)  # the class token is not rotated
        for block in self.blocks:
            x = block(x, self.encoding, positions)
        return self.head(self.norm(x[:, 0]))


def main(argv: list[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = (torch.tensor(values, device=device) for values in load_digits(return_X_y=True))
    images = images.float().unflatten(1, (8, 8)) / 8 - 1
    train, test = torch.randperm(len(images)).split(1347)
    model = ViT().to(device)
    learned, others = model.encoding.parameters(), (p for n, p in model.named_parameters() if "encoding" not in n)
    groups = [{"params": others}, {"params": learned, "lr": 1e-3, "weight_decay": 0.0}]  # no decay for frequencies
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.05)
    for _ in range(args.epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    accuracy = {}
    for size in (8, 12):
        with torch.no_grad():
            resized = F.interpolate(images[test].unsqueeze(1), (size, size), mode="bilinear").squeeze(1)
            accuracy[size] = (model(resized).argmax(-1) == labels[test]).float().mean().item()
            print(f"{size}×{size}: {accuracy[size]:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
