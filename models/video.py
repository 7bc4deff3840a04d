"""Video transformers with relative positions in space and time, on timm's VisionTransformer.

``timm.create_model("lrpe_video_tiny_patch16_224", encoding="rotate")`` builds one; the default is that of the image
models. Blocks, head and the names of the weights are theirs, too; the patch embedding takes tubelets, and the grid has
three axes, (T, H, W). The video models of diffusion, with text and time, are ``lrpe_md.models.dit.DiT(num_axes=3)``.

Number of frames and resolution are free at run time, and so is where the positions are: one unit a token, as in
training, or laid over a grid of another size (``model.reference``).

Shapes: B batch, T, H, W the grid of tubelets, S = H W places, P prefix tokens (class, registers), C embed_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from timm.layers.helpers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md import Coordinates, CosineMd, Grid, Tokens
from lrpe_md.engine.linear.call import NormalizerName
from lrpe_md.integrations.attention import AttentionKind, Carried, Context
from lrpe_md.integrations.encoding import Encoding, EncodingStack
from lrpe_md.integrations.timm import LrpeAttention, LrpeVisionTransformer, adapt, with_own_frequencies
from lrpe_md.modules.linear import Memory

from .dit import check_input, patchify
from .vit import timm_cfg, with_positions

__all__ = ["LrpeVideoTransformer", "TubeletEmbed", "VideoState", "inflate"]

SpaceTime = Literal["joint", "factorised"]
Reference = Sequence[int | None] | None


class TubeletEmbed(nn.Module):
    """x (B, in_chans, frames, height, width) → tokens (B, T H W, C), one a tubelet (ViViT, arXiv 2103.15691).

    The weight is that of a Conv3d, (C, in_chans, tubelet, patch, patch). Any size that the tubelet divides.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        *,
        num_frames: int = 16,
        tubelet_size: int = 2,
        bias: bool = True,
        norm_layer: Any = None,
        device: Any = None,
        dtype: Any = None,
        **unused: Any,  # of images: timm's options for padding and for the layout
    ) -> None:
        super().__init__()
        self.patch_size: Any = (tubelet_size, *to_2tuple(patch_size))
        sizes: Any = (num_frames, *to_2tuple(img_size))
        self.set_input_size(sizes)
        dd = {"device": device, "dtype": dtype}
        self.proj = nn.Conv3d(in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias, **dd)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(embed_dim, **dd)

    def set_input_size(self, img_size: tuple[int, ...]) -> None:
        """Frames, height and width of the training: what ``grid_size`` and a learned table belong to."""
        self.img_size = tuple(img_size)
        self.grid_size = self.dynamic_feat_size(self.img_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1] * self.grid_size[2]

    def dynamic_feat_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """(T, H, W) of a video of (frames, height, width)."""
        if len(size) != 3 or any(n % p for n, p in zip(size, self.patch_size, strict=True)):
            raise ValueError(
                f"x: expected a video of frames, height and width in multiples of {self.patch_size} "
                f"(tubelet_size, patch_size), got {tuple(size)}; crop or pad it"
            )
        return tuple(n // p for n, p in zip(size, self.patch_size, strict=True))

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, ...]:
        return max(self.patch_size) if as_scalar else self.patch_size

    def forward(self, x: Tensor) -> Tensor:
        # A convolution without overlap is a product of matrices; cuDNN's own in 3-D and 16 bits is slower.
        return self.norm(F.linear(patchify(x, self.patch_size), self.proj.weight.flatten(1), self.proj.bias))


class Layout(NamedTuple):
    """Positions of the tokens, for the blocks of one forward."""

    joint: Grid | Coordinates | None  # None: factorised
    space: Grid | Coordinates | None = None
    time: Grid | None = None
    block: int | None = None  # tokens of a frame, where it sees none that is later or a memory needs frames
    carried: Carried | None = None


@dataclass(frozen=True)
class VideoState:
    """State that :meth:`LrpeVideoTransformer.stream` passes from frames to later frames.

    num_frames: of the grid, T. frame: height and width of its frames, in tokens. layers: of each attention, with linear
    attention its ``state``, see :func:`lrpe_md.linear_attention`; with softmax attention keys and values
    (B, H, P + T S, D), of the prefix and of as many frames as those behind see. The keys are not encoded: positions are
    those of the window that sees them.
    """

    num_frames: int
    layers: tuple[Any, ...]
    frame: tuple[int, ...]


class LrpeVideoTransformer(LrpeVisionTransformer):
    """timm's VisionTransformer on videos (B, in_chans, frames, height, width), with an encoding of q and k.

    Args:
        img_size, patch_size: height and width, pixels.
        num_frames, tubelet_size: frames of the training, frames a token.
        encoding, encoding_kwargs: as for :class:`LrpeVisionTransformer`, on three axes, with presets of three axes
            (wan, cosmos, ..).
        absolute: "none"; "learned", a table (T, H, W), resampled to the grid of the input; "sincos", a third of the
            channels an axis, from the same positions as the encoding.
        attention, normalizer, keep_encoded: see :class:`LrpeVisionTransformer`.
        memory: a :class:`lrpe_md.Memory`: how linear layers forget earlier frames. Of joint attention;
            causal="frames" expects directions="forward", other models expect "both". Class and register tokens enter
            the memory before the first frame, and fade like it.
        space_time: "joint": every token attends to all. "factorised": blocks 0, 2, .. within each frame, blocks
            1, 3, .. along time at each place, with the same weights (Latte, arXiv 2401.03048, variant 1). Prefix
            tokens take part in every group, and the mean over the groups goes on (TimeSformer, arXiv 2102.05095).
        causal: "frames": tokens attend to their frame and to those before it, prefix tokens to themselves, so that a
            video can be read frame by frame (:meth:`stream`). Of joint attention; pool the patches
            (``global_pool="avg"``), since a class token sees no frame.
        window: with causal, the frames (of the grid) that a token sees in softmax attention, its own among them; None:
            all. Positions in time are then those in this window, whose first frame is at 0: a stream of any length has
            no others than those of a video of ``window`` frames (∞-RoPE, arXiv 2511.20649). Linear layers see all
            frames through their state, whose size is constant.
        temporal: False leaves time out of all positions. Parameters stay; with ``tubelet_size=1`` and joint or
            factorised attention the output does not depend on the order of the frames.
        patch_drop_rate: share of the tokens to drop in training; the others keep their positions.
        drop_unit: "token", or "tube": the same places in all frames (VideoMAE, arXiv 2203.12602), which factorised
            attention needs.
        args, kwargs: timm's, as reg_tokens, qk_norm, mlp_ratio, mlp_layer=SwiGLU or block_fn=ParallelThingsBlock.

    Attributes:
        reference: may be set at any time. None: one unit a token, beyond the trained size extrapolated. One size an
            axis, or None for one: positions of that axis are laid over a grid of this size, whatever its number of
            tokens. ``model.reference = model.patch_embed.grid_size`` keeps them in the trained range,
            ``(None, 14, 14)`` those of space alone. A learned table is always laid over the grid.
        window: may be set at any time, too.

    Raises:
        ValueError, TypeError: an argument that does not fit.
    """

    num_axes = preset_axes = 3

    def __init__(
        self,
        *args: Any,
        num_frames: int = 16,
        tubelet_size: int = 2,
        encoding: Encoding = None,
        encoding_kwargs: dict[str, Any] | None = None,
        absolute: Literal["none", "learned", "sincos"] = "none",
        attention: AttentionKind | Sequence[AttentionKind] = "softmax",
        normalizer: NormalizerName = "unrotated",
        memory: Memory | None = None,
        keep_encoded: bool = True,
        space_time: SpaceTime = "joint",
        causal: Literal["frames"] | None = None,
        window: int | None = None,
        temporal: bool = True,
        patch_drop_rate: float = 0.0,
        drop_unit: Literal["token", "tube"] = "token",
        **kwargs: Any,
    ) -> None:
        if space_time not in ("joint", "factorised"):
            raise ValueError(f"space_time: expected 'joint' or 'factorised', got {space_time!r}")
        if drop_unit not in ("token", "tube"):
            raise ValueError(f"drop_unit: expected 'token' or 'tube', got {drop_unit!r}")
        if not 0 <= patch_drop_rate < 1:
            raise ValueError(f"patch_drop_rate: expected at least 0 and less than 1, got {patch_drop_rate}")
        if causal not in ("frames", None):
            raise ValueError(f"causal: expected 'frames' or None, got {causal!r}")
        if causal and space_time != "joint":
            raise ValueError(f"causal: 'frames' needs space_time='joint', got {space_time!r}")
        if (causal or memory or space_time == "factorised") and patch_drop_rate and drop_unit == "token":
            raise ValueError(
                "drop_unit: 'token' drops different patches in each frame, but factorised and causal attention and a "
                "memory need drop_unit='tube'"
            )
        kwargs.setdefault("embed_layer", partial(TubeletEmbed, num_frames=num_frames, tubelet_size=tubelet_size))
        super().__init__(*args, absolute=absolute, attention=attention, normalizer=normalizer, **kwargs)
        self.sincos = CosineMd(self.embed_dim // 2, 3) if absolute == "sincos" else None
        if causal and self.global_pool == "token":
            raise ValueError(
                "global_pool: expected 'avg' with causal='frames', because a class token sees no frame, got 'token'"
            )
        self.space_time: SpaceTime = space_time
        self.causal: Literal["frames"] | None = causal
        self.temporal, self.patch_drop_rate, self.drop_unit = temporal, patch_drop_rate, drop_unit
        self._reference: Reference = None
        adapt(
            self, encoding, encoding_kwargs=encoding_kwargs, attention=attention, normalizer=normalizer, memory=memory,
            keep_encoded=keep_encoded,
        )  # fmt: skip
        self.window = window

    def check_memory(self, memory: Memory) -> None:
        """Check that a memory has the order of frames that it needs.

        Raises:
            ValueError: factorised attention, or directions that don't match ``causal``.
        """
        if self.space_time != "joint":
            raise ValueError(
                f"memory: expected None with space_time={self.space_time!r}, whose blocks attend within one frame or "
                f"along time, got {memory}; use space_time='joint'"
            )
        expected = "forward" if self.causal else "both"
        if memory.directions != expected:
            raise ValueError(
                f"directions: expected {expected!r} with causal={self.causal!r}, got {memory.directions!r}; pass "
                f"Memory(directions={expected!r}), or change causal"
            )

    @property
    def window(self) -> int | None:
        return self._window

    @window.setter
    def window(self, frames: int | None) -> None:
        if frames is not None:
            if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
                raise ValueError(f"window: expected at least 1 frame, or None, got {frames!r}")
            self._check_window(frames)
            if self.temporal and (self.sincos is not None or self.pos_embed is not None):
                raise ValueError(
                    f"window: expected None with absolute={self.absolute!r}, because its positions do not move with "
                    f"the window, got {frames}"
                )
        self._window = frames

    def _check_window(self, frames: int | None) -> None:
        """Again before each use: :func:`adapt` may have changed the attention."""
        if frames is not None:
            attentions = {m.attention for m in self.blocks.modules() if isinstance(m, LrpeAttention)}
            if self.causal is None or "softmax" not in attentions:
                raise ValueError(
                    f"window: expected None unless causal='frames' and attention='softmax' in a layer, got {frames} "
                    f"with {self.causal!r}, {', '.join(sorted(attentions))!r}"
                )

    def positions(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Grid | Coordinates:
        """Return the positions of the tokens of a grid (T, H, W), with the prefix in front."""
        prefix, stack = Tokens(self.num_prefix_tokens), EncodingStack(self.encoding)
        grid = stack.lay_out(shape, prefix, reference=self.reference, device=device)
        return grid if self.temporal else grid.rescale((0, 1, 1))

    def forward_features(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        keep: Tensor | None = None,
    ) -> Tensor:
        """x (B, in_chans, frames, height, width) → tokens (B, P + T H W, C), time slowest.

        keep: indices of the tokens that are not dropped, (n,) or (B, n), in place of a random choice: of T H W with
            ``drop_unit="token"``, → (B, P + n, C); of the places H W with "tube", → (B, P + T n, C).
        """
        self._check_window(self.window)
        x, layout = self._embed(x, keep)
        for i in range(len(self.blocks)):
            x = self._block(i, x, layout, attn_mask, is_causal)
        return self.norm(x)

    def stream(self, x: Tensor, state: VideoState | None = None) -> tuple[Tensor, VideoState]:
        """The next frames of a video, read piece by piece with causal="frames": the same as read at once.

        x (B, in_chans, frames, height, width) → tokens (B, T H W, C), those of the first piece behind the prefix, and
        the state that the next call takes; None begins a video. No tokens are dropped, nothing is recomputed but, with
        softmax attention, the encoding of the keys in the window, which moves. The state's size is constant if all
        layers are linear, or softmax layers have a ``window``.

        Differentiable, also through the state.

        Raises:
            ValueError: positions, or a learned table, that are laid over the whole video in time.
        """
        if self.causal is None:
            raise ValueError("stream: expected a model with causal='frames', got causal=None")
        self._check_window(self.window)
        shape = self._shape(x)
        self._check_state(state, shape[1:])
        seen = 0 if state is None else state.num_frames
        whole = _as_grid("stream", self.positions((seen + shape[0], *shape[1:])))
        self._check_growing(whole)
        first, size = seen * shape[1] * shape[2], shape[0] * shape[1] * shape[2]
        x = self._absolute(self.patch_embed(x), shape, replace(whole, prefix=0, start=first, length=size))
        start = 0 if state is None else self.num_prefix_tokens + first
        x = self._begin(x, prefix=state is None)
        carried = Carried(() if state is None else state.layers)
        layout = Layout(replace(whole, start=start), block=shape[1] * shape[2], carried=carried)
        for i in range(len(self.blocks)):
            x = self._block(i, x, layout, None, False)
        return self.norm(x), VideoState(seen + shape[0], tuple(carried.after), tuple(shape[1:]))

    def _check_state(self, state: Any, frame: tuple[int, ...]) -> None:
        if state is None:
            return
        if not isinstance(state, VideoState):
            raise TypeError(
                f"state: expected the state that stream returned for the previous frames, got {type(state).__name__}"
            )
        number = sum(isinstance(part, LrpeAttention) for part in self.blocks.modules())
        if len(state.layers) != number:
            raise ValueError(
                f"state: expected the state of a model with {number} attention layers, got {len(state.layers)}"
            )
        if state.frame != tuple(frame):
            raise ValueError(f"state: expected frames of {frame} tokens, as in x, got {state.frame}")

    def _check_growing(self, grid: Grid) -> None:
        """A frame must stay where it is when others follow."""
        longer = _as_grid("stream", self.positions((grid.shape[0] + 1, *grid.shape[1:])))
        if (grid.scale, grid.shift) != (longer.scale, longer.shift):
            raise ValueError(
                "stream: expected time positions that do not depend on the number of frames, such as one unit per "
                f"frame, but with reference={self.reference} and this encoding they do; pass reference=(None, H, W)"
            )
        if self.pos_embed is not None and self.temporal:
            raise ValueError(
                "stream: absolute='learned' is stretched over the whole video; use 'sincos', an encoding or "
                "temporal=False"
            )

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        check_input(x, self.patch_embed.proj.in_channels, 3)
        return self.patch_embed.dynamic_feat_size(x.shape[2:])

    def _embed(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape = self._shape(x)
        grid = self.positions(shape, x.device)
        x = self._absolute(self.patch_embed(x), shape, replace(grid, prefix=0))
        keep = self._choose(shape, x) if keep is None else keep
        if keep is not None:
            x = self._keep(x, shape, keep)
        x = self._begin(x)
        stack = EncodingStack(self.encoding)
        if self.space_time == "joint":
            places = shape[1] * shape[2] if keep is None else keep.shape[-1]
            if self.causal and keep is None:  # where frames are depends on the window that holds them
                return x, Layout(grid, block=places)
            grid = stack.locate(grid)
            where = grid if keep is None else grid.take(self._tokens(keep, shape))
            return x, Layout(where, block=places if self.causal or self.memory else None)
        if stack.locate(grid) is not grid:
            raise ValueError("places: expected None with space_time='factorised', whose grids have one or two axes")
        grid = _as_grid("space_time='factorised'", grid)
        # Relative positions within a frame do not depend on its time, nor those along time on the place.
        space = replace(grid, shape=(1, *shape[1:])).rescale((0, 1, 1))
        time = replace(grid, shape=(shape[0], 1, 1)).rescale((1, 0, 0))
        if keep is None:
            return x, Layout(None, space, time)
        return x, Layout(None, space.take(keep if keep.ndim == 1 else keep.repeat_interleave(shape[0], 0)), time)

    def _begin(self, x: Tensor, prefix: bool = True) -> Tensor:
        """Return the input of the first block."""
        if prefix:
            x = torch.cat([self._prefix(x), x], dim=1)
        return self.norm_pre(x if self.absolute == "none" else self.pos_drop(x))

    def _absolute(self, x: Tensor, shape: Sequence[int], positions: Grid | Coordinates) -> Tensor:
        """Tokens (B, T H W, C) of a grid of this shape with their absolute positions."""
        if self.sincos is not None:
            ones = torch.ones((1, 1, x.shape[1], x.shape[2] // 2), dtype=x.dtype, device=x.device)
            return x + self.sincos(ones, positions=positions)[:, 0]  # [cos Θ, sin Θ]
        table = self._table()
        if table is None:
            return x
        if not self.temporal:
            table = table.mean(2, keepdim=True)
        return x + _resample(table, shape).flatten(2).transpose(-2, -1)

    def _prefix(self, x: Tensor) -> Tensor:
        """Class and register tokens (B, P, C), with their part of a learned table."""
        tokens = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        prefix = torch.cat(tokens, dim=1) if tokens else x[:, :0]
        if self.pos_embed is not None and not self.no_embed_class:
            prefix = prefix + self.pos_embed[:, : self.num_prefix_tokens]
        return prefix

    def _choose(self, shape: Sequence[int], x: Tensor) -> Tensor | None:
        """A random choice of tokens or places, (B, n), in their order."""
        if not self.training or not self.patch_drop_rate:
            return None
        num = x.shape[1] if self.drop_unit == "token" else shape[1] * shape[2]
        kept = max(1, int(num * (1 - self.patch_drop_rate)))
        return torch.rand(x.shape[0], num, device=x.device).argsort(-1)[:, :kept].sort(-1).values

    def _tokens(self, keep: Tensor, shape: Sequence[int]) -> Tensor:
        """Indices of places as indices of tokens, where tubes are kept."""
        if self.drop_unit == "token":
            return keep
        frames = torch.arange(shape[0], device=keep.device) * (shape[1] * shape[2])
        return (frames[:, None] + keep[..., None, :]).flatten(-2)

    def _keep(self, x: Tensor, shape: Sequence[int], keep: Tensor) -> Tensor:
        if (self.causal or self.memory or self.space_time == "factorised") and self.drop_unit == "token":
            raise ValueError(
                "keep: single tokens drop different patches in each frame, but factorised and causal attention and a "
                "memory need drop_unit='tube'"
            )
        if keep.ndim not in (1, 2) or keep.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"keep: expected integers (n,) or (B, n), got {keep.dtype} {tuple(keep.shape)}")
        index = self._tokens(keep, shape).expand(x.shape[0], -1)
        return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))

    def _block(self, i: int, x: Tensor, layout: Any, attn_mask: Tensor | None, is_causal: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if layout.joint is not None:
            encoding = EncodingStack(self.encoding)[i]
            context = Context(
                encoding, layout.joint, attn_mask, block=layout.block, carried=layout.carried, window=self.window,
                bidirectional=self.causal is None,
            )  # fmt: skip
            return self._run(i, x, context, is_causal)
        if attn_mask is not None or is_causal:
            raise ValueError("attn_mask, is_causal: factorised attention supports neither; use space_time='joint'")
        frames, prefix = layout.time.shape[0], self.num_prefix_tokens
        where, apart, together = (
            (layout.time, "b (t s) c -> (b s) t c", "(b s) t c -> b (t s) c")
            if i % 2
            else (layout.space, "b (t s) c -> (b t) s c", "(b t) s c -> b (t s) c")
        )
        groups = rearrange(x[:, prefix:], apart, t=frames)
        num = groups.shape[0] // x.shape[0]
        groups = torch.cat([x[:, :prefix].repeat_interleave(num, 0), groups], dim=1)
        groups = super()._block(i, groups, where, None, False)
        first = groups[:, :prefix].unflatten(0, (-1, num)).mean(1)
        return torch.cat([first, rearrange(groups[:, prefix:], together, b=x.shape[0])], dim=1)

    def set_input_size(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, img_size: tuple[int, int, int] | None = None, patch_size: None = None
    ) -> None:
        """Frames, height and width that count as trained: ``grid_size``, and the size of a learned table."""
        if patch_size is not None:
            raise ValueError(f"patch_size: expected None, because the size of the tubelets is fixed, got {patch_size}")
        if img_size is None:
            return
        table = self._table()
        self.patch_embed.set_input_size(img_size)
        if self.pos_embed is not None and table is not None:
            with torch.no_grad():
                first = self.pos_embed[:, : 0 if self.no_embed_class else self.num_prefix_tokens]
                table = _resample(table, self.patch_embed.grid_size).flatten(2).transpose(-2, -1)
                self.pos_embed = nn.Parameter(torch.cat([first, table], dim=1), self.pos_embed.requires_grad)

    def _table(self) -> Tensor | None:
        """The learned table (1, C, T, H, W)."""
        if self.pos_embed is None:
            return None
        first = 0 if self.no_embed_class else self.num_prefix_tokens
        return self.pos_embed[:, first:].transpose(-2, -1).unflatten(-1, self.patch_embed.grid_size)


def _as_grid(what: str, positions: Grid | Coordinates) -> Grid:
    if not isinstance(positions, Grid):
        raise ValueError(f"{what}: expected an encoding with positions on a grid, got one with a table of positions")
    return positions


def _resample(table: Tensor, size: Sequence[int]) -> Tensor:
    """A table (1, C, T, H, W) on a grid of another size."""
    if tuple(table.shape[2:]) == tuple(size):
        return table
    return F.interpolate(table.float(), size=tuple(size), mode="trilinear").to(table.dtype)


def inflate(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Convert weights of an image model, or of a video model with other absolute positions, for a video model.

    A patch embedding (C, in_chans, p, p) is divided among the frames of a tubelet, and a learned table is repeated over
    time (I3D, arXiv 1705.07750; ViViT). A video without motion then yields the features of its image, except for the
    effect of prefix tokens, which weigh less among more tokens. A table that the model lacks is dropped, and
    frequencies that the weights lack stay as they are.
    """
    video: Any = model
    state_dict = dict(state_dict)
    weight, table = state_dict.get("patch_embed.proj.weight"), state_dict.get("pos_embed")
    if weight is not None and weight.ndim == 4:
        frames = video.patch_embed.patch_size[0]
        state_dict["patch_embed.proj.weight"] = weight[:, :, None].repeat(1, 1, frames, 1, 1) / frames
    if table is not None and video.pos_embed is None:
        del state_dict["pos_embed"]
    elif table is not None and table.shape != video.pos_embed.shape:
        frames, places = (
            video.patch_embed.grid_size[0],
            table.shape[1] - (0 if video.no_embed_class else video.num_prefix_tokens),
        )
        first = table.shape[1] - places
        state_dict["pos_embed"] = torch.cat([table[:, :first], table[:, first:].repeat(1, frames, 1)], dim=1)
    return with_own_frequencies(state_dict, model)


SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}

default_cfgs = generate_default_cfgs({f"lrpe_video_{size}_patch16_224.untrained": timm_cfg() for size in SIZES})


def _create(size: str, pretrained: bool, **kwargs: Any) -> LrpeVideoTransformer:
    embed_dim, depth, num_heads = SIZES[size]
    out_indices: int | Sequence[int] = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        LrpeVideoTransformer,
        f"lrpe_video_{size}_patch16_224",
        pretrained,
        pretrained_filter_fn=inflate,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **{"patch_size": 16, "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, **with_positions(kwargs)},
    )


@register_model
def lrpe_video_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVideoTransformer:
    """ViT-Ti/16 on 16 frames, tubelets of 2."""
    return _create("tiny", pretrained, **kwargs)


@register_model
def lrpe_video_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVideoTransformer:
    """ViT-S/16 on 16 frames, tubelets of 2."""
    return _create("small", pretrained, **kwargs)


@register_model
def lrpe_video_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVideoTransformer:
    """ViT-B/16 on 16 frames, tubelets of 2."""
    return _create("base", pretrained, **kwargs)


@register_model
def lrpe_video_large_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVideoTransformer:
    """ViT-L/16 on 16 frames, tubelets of 2."""
    return _create("large", pretrained, **kwargs)
