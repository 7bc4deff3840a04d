"""ViTs, a video transformer layer, and the training commands' models, for ``scripts.bench training``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import timm
import torch
from timm.layers.attention import Attention
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md import CosineMd, Grid, RotateMd
from lrpe_md.integrations.attention import Context
from lrpe_md.integrations.timm import LrpeAttention, adapt

from ...models.blocks import DiTBlock
from ..common.devices import sent
from ..train.conditions import Captions
from ..train.config import Training
from ..train.data.images import Images, Labelled
from ..train.data.source import Source
from ..train.data.values import Pixels
from ..train.data.videos import Footage, Segment
from ..train.order import shuffle
from ..train.tasks import diffusion as train_diffusion
from ..train.tasks import image as train_image
from ..train.tasks import video as train_video


@dataclass(frozen=True)
class ViT:
    """A timm ViT in three variants: without RoPE, with axial RoPE and with mixed RoPE."""

    plain: str
    rope: str
    mixed: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: int = 128
    baselines: ClassVar = {
        "none": "none", "learned": "none", "timm-none": "none", "timm-axial": "timm-none", "timm-mixed": "timm-none",
        "axial": "none", "mixed": "none", "cosine": "none", "linear-axial": "none", "linear-cosine": "none",
        "axial-again": "none", "mixed-again": "none", "cosine-again": "none",
    }  # fmt: skip
    default: tuple[str, ...] = ("none", "timm-none", "timm-axial", "timm-mixed", "axial", "mixed")

    def build(self, encoding: str) -> nn.Module:
        if encoding.startswith("timm-"):
            name = self.mixed if encoding == "timm-mixed" else self.rope
            return timm.create_model(name, use_rot_pos_emb=encoding != "timm-none", **self.kwargs)
        if encoding == "learned":
            return timm.create_model(self.plain, **self.kwargs)
        model = timm.create_model(self.plain, pos_embed="none", **self.kwargs)
        if encoding == "none":
            return model
        keep_encoded, name = not encoding.endswith("-again"), encoding.removesuffix("-again")
        if name == "mixed":
            return adapt(model, "mixed", keep_encoded=keep_encoded)
        attention = "linear" if name.startswith("linear-") else "softmax"
        kind = "cosine" if name.endswith("cosine") else "rotate"
        return adapt(model, kind, attention=attention, keep_encoded=keep_encoded)

    def inputs(self, model: Any, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        generator = torch.Generator(device).manual_seed(0)
        size = model.patch_embed.img_size
        images = torch.randn(batch, 3, *size, generator=generator, device=device)
        return images, torch.randint(model.num_classes, (batch,), generator=generator, device=device)

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        images, labels = inputs
        return F.cross_entropy(model(images), labels)

    def tokens(self, model: Any, batch: int) -> int:
        """Return the number of patches in a step, without class and text tokens."""
        return batch * model.patch_embed.num_patches


class TimmRotary(nn.Module):
    """RoPE as in timm: with sine and cosine tables, and with prefix tokens split off and concatenated again."""

    table: Tensor

    def __init__(self, omega: Tensor, grid: Grid) -> None:
        super().__init__()
        theta = Grid(grid.shape).coordinates() @ omega[0].double().T
        theta = theta.float().repeat_interleave(2, -1)
        self.register_buffer("table", torch.cat([theta.sin(), theta.cos()], -1), persistent=False)

    def forward(self, *xs: Tensor, positions: Grid) -> tuple[Tensor, ...]:
        n = positions.prefix
        return tuple(
            torch.cat([x[:, :, :n], apply_rot_embed_cat(x[:, :, n:], self.table)], dim=2).type_as(x) for x in xs
        )


class VideoLayer(nn.Module):
    """Layer of a video transformer: timm's block, applied to the tokens (B, N, C) of a video."""

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, encoding: nn.Module | None) -> None:
        super().__init__()
        self.grid = grid
        attention = Attention if encoding is None else LrpeAttention
        self.block = Block(num_heads * head_dim, num_heads, qkv_bias=True, attn_layer=attention)
        self.encoding = encoding

    def forward(self, x: Tensor) -> Tensor:
        if self.encoding is None:
            return self.block(x)
        context: Any = Context(self.encoding, self.grid, None)
        return self.block(x, context)


@dataclass(frozen=True)
class Video:
    """Workload with one layer of a video transformer. The layer's input requires a gradient, as inside a model."""

    shape: tuple[int, int, int] = (21, 30, 52)
    prefix: int = 512
    num_heads: int = 24
    head_dim: int = 128
    batch: int = 2
    baselines: ClassVar = {"none": "none", "timm-axial": "none", "axial": "none", "mixed": "none", "cosine": "none"}
    default = ("none", "timm-axial", "axial", "mixed")

    def build(self, encoding: str) -> nn.Module:
        grid, head_dim = Grid(self.shape, prefix=self.prefix), self.head_dim
        module: nn.Module | None = None
        if encoding == "timm-axial":
            module = TimmRotary(RotateMd(head_dim, 3).get_omega(), grid)
        elif encoding == "axial":
            module = RotateMd(head_dim, 3)
        elif encoding == "mixed":
            module = RotateMd(head_dim, 3, frequencies="mixed", num_heads=self.num_heads, learnable=True)
        elif encoding == "cosine":
            module = CosineMd(head_dim, 3)
        return VideoLayer(grid, self.num_heads, head_dim, module)

    def inputs(self, model: Any, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        generator = torch.Generator(device).manual_seed(0)
        size = batch, model.grid.num_tokens, self.num_heads * self.head_dim
        return (torch.randn(size, generator=generator, device=device).requires_grad_(),)

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        return model(*inputs).float().square().mean()

    def tokens(self, model: Any, batch: int) -> int:
        return batch * math.prod(self.shape)


def random_bytes(*size: int) -> Tensor:
    return torch.randint(256, size, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@dataclass(frozen=True)
class Backbone:
    """Workload with a training command's model and loss, at the command's default sizes."""

    script: Any
    training: type[Training]
    default: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)  # override the command's defaults

    @cached_property
    def config(self) -> Any:
        return self.training(**{"out": Path(), "data": Path("unused"), **self.options})

    @property
    def baselines(self) -> dict[str, str]:
        return dict.fromkeys(self.training.backbone.names, "none")

    @property
    def batch(self) -> int:
        """Return eight times the command's batch size. With smaller batches, the GPU would wait for the host."""
        return 8 * self.config.batch

    def build(self, encoding: str) -> nn.Module:
        return self.script.build(replace(self.config, encoding=encoding))

    def inputs(self, model: Any, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        return self.script.batch(self.config, *self.data(batch, device), *next(shuffle(batch, batch, seed=0)))

    def data(self, num: int, device: torch.device) -> tuple[Any, ...]:
        """Return ``num`` random samples in the format of the command's batches."""
        raise NotImplementedError  # subclasses define it

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        return self.script.loss(model, inputs)

    def tokens(self, model: Any, batch: int) -> int:
        return self.script.patches(replace(self.config, batch=batch))


class ImageBackbone(Backbone):
    """The `train image` model, with the image size and number of classes of Fashion-MNIST."""

    def build(self, encoding: str) -> nn.Module:
        config, images = replace(self.config, encoding=encoding), self.images(1)
        return self.script.build(config, self.script.model_arguments(config, Labelled(images, images, 10)))

    def images(self, num: int) -> Images:
        return Images(random_bytes(num, 1, *self.config.shape), torch.arange(num) % 10)

    def data(self, num: int, device: torch.device) -> tuple[Any, ...]:
        images = self.images(num).to(device)
        buckets = self.script.sort_images(self.config, images)
        return (({self.config.shape: images}, buckets),)

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        return self.script.loss(self.config, model, inputs)


class VideoBackbone(Backbone):
    def data(self, num: int, device: torch.device) -> tuple[Any, ...]:
        config = self.config
        span = config.frames * config.every
        frames = random_bytes(num + span - 1, 3, config.size, config.size).to(device)
        footage = Footage(frames, (Segment(0, len(frames), False),))
        return footage, sent(footage.starts(span, held_out=False), device)


NORMS_FIRST = "-norms-first"  # normalises q and k in separate launches before encoding them


class DiffusionBackbone(Backbone):
    """The `train diffusion` model, with captions of at least half the command's maximum length."""

    @property
    def baselines(self) -> dict[str, str]:
        return {**super().baselines, f"rotate{NORMS_FIRST}": "none"}

    def build(self, encoding: str) -> nn.Module:
        model = super().build(encoding.removesuffix(NORMS_FIRST))
        for block in model.modules() if encoding.endswith(NORMS_FIRST) else ():
            if isinstance(block, DiTBlock):
                block.norm = lambda context, length, dtype: None
        return model

    def data(self, num: int, device: torch.device) -> tuple[Any, ...]:
        size, length = self.config.size, self.config.text_length
        captions = ["x" * (length - i % (1 + length // 2)) for i in range(num)]
        values = Pixels({size: random_bytes(num, 3, size, size).to(device)})
        condition = Captions(captions, self.config.text_encoder)
        return (Source(values, condition, np.arange(num), np.arange(0), 0),)

    def loss(self, model: Any, *inputs: Any) -> Tensor:
        return self.script.loss(self.config, model, inputs)


Workload = ViT | Video | Backbone
MODELS: dict[str, Workload] = {
    "vit_b": ViT("vit_base_patch16_224", "vit_base_patch16_rope_224", "vit_base_patch16_rope_mixed_224"),
    "vit_b_1024": ViT(
        "vit_base_patch16_224", "vit_base_patch16_rope_224", "vit_base_patch16_rope_mixed_224", {"img_size": 1024}, 8,
        ("none", "axial", "linear-axial", "linear-cosine"),
    ),
    "vit_s": ViT("vit_small_patch16_224", "vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224"),
    "video": Video(),
    "image": ImageBackbone(
        train_image, train_image.ImageTraining,
        ("none", "learned", "rotate", "rotate-mixed", "cosine", "cosine-softplus"),
    ),
    "video_model": VideoBackbone(
        train_video, train_video.VideoTraining, ("none", "learned", "rotate", "rotate-mixed", "cosine-softplus")
    ),
    "dit": DiffusionBackbone(
        train_diffusion, train_diffusion.DiffusionTraining,
        ("none", "sincos", "rotate", "rotate-mixed", "cosine-softplus"),
    ),
}  # fmt: skip
