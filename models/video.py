"""Video transformers with relative position encodings in space and time, built on timm's VisionTransformer.

Build a model with ``timm.create_model("lrpe_video_tiny_patch16_224", encoding="rotate")``. The default encoding,
blocks, head and weight names are the same as in the image models. However, the patch embedding embeds tubelets, and the
grid has three axes (T, H, W). For video diffusion models with text and time, see
``lrpe_md.models.dit.DiT(num_axes=3)``.

The number of frames and the resolution may change from call to call. Positions increase by one unit per token, as in
training, or are interpolated to the grid size ``model.reference``.

Shapes: B batch, T, H, W grid of tubelets, S = H W tokens per frame, P prefix tokens (class, registers), C embed_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from .frames import FrameAttention
from .vit import rename_final_norm, timm_cfg, with_positions

__all__ = ["LrpeVideoTransformer", "TubeletEmbed", "VideoState", "inflate"]

SpaceTime = Literal["joint", "factorised"]
Reference = Sequence[int | None] | None


class TubeletEmbed(nn.Module):
    """Embed videos (B, in_chans, frames, height, width) as tubelets (B, T H W, C) (ViViT, arXiv 2103.15691).

    The weight has the shape (C, in_chans, tubelet, patch, patch), as in a Conv3d. Any input size that the tubelet size
    divides is accepted.
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
        **unused: Any,  # timm's options for image padding and layout
    ) -> None:
        super().__init__()
        self.in_chans = in_chans
        self.patch_size: Any = (tubelet_size, *to_2tuple(patch_size))
        sizes: Any = (num_frames, *to_2tuple(img_size))
        self.set_input_size(sizes)
        dd = {"device": device, "dtype": dtype}
        self.proj = nn.Conv3d(in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias, **dd)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(embed_dim, **dd)

    def set_input_size(self, img_size: tuple[int, ...]) -> None:
        """Set the training size (frames, height, width) and ``grid_size``."""
        self.img_size = tuple(img_size)
        self.grid_size = self._divide(self.img_size, "num_frames, img_size: expected", "pass other sizes")
        self.num_patches = self.grid_size[0] * self.grid_size[1] * self.grid_size[2]

    def dynamic_feat_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the grid size (T, H, W) for a video of size (frames, height, width)."""
        return self._divide(size, "x: expected frames, height and width to be", "crop or pad x")

    def _divide(self, size: Sequence[int], expected: str, remedy: str) -> tuple[int, ...]:
        if len(size) != 3 or any(n < p or n % p for n, p in zip(size, self.patch_size, strict=True)):
            raise ValueError(
                f"{expected} multiples of tubelet_size and patch_size, {self.patch_size}, got {tuple(size)}; {remedy}"
            )
        return tuple(n // p for n, p in zip(size, self.patch_size, strict=True))

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, ...]:
        return max(self.patch_size) if as_scalar else self.patch_size

    def forward(self, x: Tensor) -> Tensor:
        if type(self.proj) is not nn.Conv3d:  # a wrapper, such as LoRA
            return self.norm(self.proj(x).flatten(2).transpose(1, 2))
        # A convolution without overlap is a matrix product, which is faster than cuDNN's 3D convolution in 16 bits.
        return self.norm(F.linear(patchify(x, self.patch_size), self.proj.weight.flatten(1), self.proj.bias))


class Layout(NamedTuple):
    """Positions of the tokens in a forward pass."""

    joint: Grid | Coordinates | None  # None for factorised attention
    space: Grid | Coordinates | None = None
    time: Grid | None = None
    block: int | None = None  # tokens per frame, if frames are causal or a memory needs them
    carried: Carried | None = None


@dataclass(frozen=True)
class VideoState:
    """State that :meth:`LrpeVideoTransformer.stream` returns. Pass this state to the next call to continue the video.

    ``num_frames`` is the number of grid frames so far, and ``frame`` is the height and width of a frame in tokens.
    ``layers`` has one entry per attention layer. For linear attention, the entry is the ``state`` of
    :func:`lrpe_md.linear_attention`. For softmax attention, the entry contains the keys and values (B, H, P + T S, D)
    of the prefix and of the frames to which later frames can attend. These keys are not encoded, because their
    positions change when the window moves.
    """

    num_frames: int
    layers: tuple[Any, ...]
    frame: tuple[int, ...]


class LrpeVideoTransformer(LrpeVisionTransformer):
    """timm's VisionTransformer for videos (B, in_chans, frames, height, width), with an encoding of q and k.

    Args:
        img_size, patch_size: height and width of an image and of a patch, in pixels.
        num_frames, tubelet_size: number of frames in training, and number of frames per token.
        encoding, encoding_kwargs: see :class:`LrpeVisionTransformer`. The encoding has three axes, so a preset must
            also have three axes, like "wan" or "cosmos".
        absolute: absolute position embedding. "learned" is a table (T, H, W) that is resampled to the input's grid.
            "sincos" uses a third of the channels per axis, with the same positions as the encoding. "none" disables it.
        attention, normalizer, keep_encoded: see :class:`LrpeVisionTransformer`.
        memory: a :class:`lrpe_md.Memory` to define how linear layers forget other frames. A memory requires joint
            attention. Use directions="forward" with causal="frames", and directions="both" for other models. Class and
            register tokens are added to the state before the first frame, so they also decay.
        space_time: with "joint", every token attends to all tokens. With "factorised", blocks 0, 2, ... attend within
            each frame, and blocks 1, 3, ... attend along time at each location (Latte, arXiv 2401.03048, variant 1).
            Each frame or location then gets its own copy of the prefix tokens, and the copies are averaged afterwards
            (TimeSformer, arXiv 2102.05095).
        causal: with "frames", tokens attend to their own and earlier frames, and prefix tokens only attend to the
            prefix, so you can process a video frame by frame with :meth:`stream`. This requires joint attention.
            Use ``global_pool="avg"``, because a class token does not attend to any frame.
        window: number of grid frames that a token attends to in causal softmax attention, including its own frame. None
            means all earlier frames. The first frame of the window has time 0, so a stream of any length has the
            same positions as a video of ``window`` frames (∞-RoPE, arXiv 2511.20649). Linear layers always attend to
            all earlier frames, through a state of constant size.
        temporal: if False, positions don't include time, but the parameters stay the same. With ``temporal=False``,
            ``tubelet_size=1`` and joint or factorised attention, the output does not depend on the order of frames.
        patch_drop_rate: fraction of tokens to drop in training. The remaining tokens keep their positions.
        drop_unit: "token" to drop individual tokens, or "tube" to drop the same locations in all frames (VideoMAE,
            arXiv 2203.12602). Factorised attention, causal attention and a memory require "tube".
        args, kwargs: arguments of timm's class, such as reg_tokens, qk_norm, mlp_ratio or mlp_layer=SwiGLU.

    Attributes:
        reference: size of the grid to which positions are interpolated: None, one number, or one entry per axis. None
            extrapolates with one unit per token. ``model.patch_embed.grid_size`` keeps positions in the trained range,
            and ``(None, 14, 14)`` does so in space only. You can change the reference at any time. A learned table is
            always resampled to the grid.
        window: see above. You can change the window at any time.

    Raises:
        ValueError, TypeError: for an invalid argument.
    """

    attention_class = FrameAttention
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
                "drop_unit: 'token' drops different patches in each frame, but factorised attention, causal attention "
                "and a memory need drop_unit='tube'"
            )
        kwargs.setdefault("embed_layer", partial(TubeletEmbed, num_frames=num_frames, tubelet_size=tubelet_size))
        super().__init__(*args, absolute=absolute, attention=attention, normalizer=normalizer, **kwargs)
        self.sincos = CosineMd(self.embed_dim // 2, 3) if absolute == "sincos" else None
        if causal and self.global_pool == "token":
            raise ValueError(
                "global_pool: expected 'avg' with causal='frames', got 'token'; class tokens don't attend to frames"
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
        if space_time == "factorised":
            _as_grid("space_time='factorised'", self.positions(self.patch_embed.grid_size))

    def check_memory(self, memory: Memory) -> None:
        """Check that the model's attention is compatible with a memory.

        Raises:
            ValueError: if attention is factorised, or ``directions`` don't match ``causal``.
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
                f"Memory(directions={expected!r}), or causal={None if self.causal else 'frames'!r}"
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
                    f"window: expected None with absolute={self.absolute!r}, got {frames}; absolute positions do not "
                    "move with the window"
                )
        self._window = frames

    def _check_window(self, frames: int | None) -> None:
        """Check that the attention supports a window. :func:`adapt` can change it, so forward passes check again."""
        if frames is not None:
            attentions = {m.attention for m in self.blocks.modules() if isinstance(m, LrpeAttention)}
            if self.causal is None or "softmax" not in attentions:
                raise ValueError(
                    f"window: expected None unless causal='frames' and a layer has attention='softmax', got {frames} "
                    f"with causal={self.causal!r}, attention={', '.join(sorted(attentions))!r}"
                )

    def positions(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Grid | Coordinates:
        """Return the positions of the prefix and of a grid (T, H, W)."""
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
        """Compute features (B, P + T H W, C) of videos x (B, in_chans, frames, height, width), ordered frame by frame.

        ``keep`` contains indices (n,) or (B, n) of the tokens to keep, instead of a random choice. With
        ``drop_unit="token"``, the indices refer to the T H W tokens, and the result is (B, P + n, C). With "tube", the
        indices refer to the H W locations, and the result is (B, P + T n, C).
        """
        self._check_window(self.window)
        x, layout = self._embed(x, keep)
        for i in range(len(self.blocks)):
            x = self._block(i, x, layout, attn_mask, is_causal)
        return self.norm(x)

    def stream(self, x: Tensor, state: VideoState | None = None) -> tuple[Tensor, VideoState]:
        """Compute a causal model's features for the next frames. Features are the same as for the whole video at once.

        Pass the next frames x (B, in_chans, frames, height, width) and the state from the previous call, or None to
        start a video. The results are the tokens (B, T H W, C) and the state for the next call. In the first call, the
        prefix precedes these tokens. No tokens are dropped. Nothing is recomputed, except that softmax attention
        re-encodes keys when the window moves. The state has a constant size if all layers are linear, or if softmax
        layers have a ``window``.

        Features are differentiable, including through the state.

        Raises:
            ValueError: if the model can't stream; see :meth:`check_stream`.
        """
        shape = self._shape(x)
        self._check_state(state, shape[1:])
        seen = 0 if state is None else state.num_frames
        whole = self._lay_out_stream((seen + shape[0], *shape[1:]))
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

    def check_stream(self) -> None:
        """Check that the model can read a video with :meth:`stream`.

        Raises:
            ValueError: if frames attend to later frames, or if positions in time, or a learned table, depend on the
                length of the whole video.
        """
        self._lay_out_stream((1, 1, 1))

    def _lay_out_stream(self, shape: tuple[int, ...]) -> Grid:
        """Return the positions of a stream's grid (T, H, W), which must not depend on the number of later frames."""
        if self.causal is None:
            raise ValueError("stream: expected a model with causal='frames', got causal=None")
        self._check_window(self.window)
        grid = _as_grid("stream", self.positions(shape))
        longer = _as_grid("stream", self.positions((shape[0] + 1, *shape[1:])))
        if (grid.scale, grid.shift) != (longer.scale, longer.shift):
            raise ValueError(
                "stream: expected time positions that do not depend on the number of frames, but with this encoding "
                f"and reference={self.reference}, they do; pass reference=(None, H, W)"
            )
        if self.pos_embed is not None and self.temporal:
            raise ValueError(
                "stream: absolute='learned' is stretched over the whole video; use 'sincos', an encoding or "
                "temporal=False"
            )
        return grid

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        check_input(x, self.patch_embed.in_chans, 3)
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
            if self.causal and keep is None:  # a frame's position differs from window to window
                return x, Layout(grid, block=places)
            grid = stack.locate(grid)
            where = grid if keep is None else grid.take(self._tokens(keep, shape))
            return x, Layout(where, block=places if self.causal or self.memory else None)
        if stack.locate(grid) is not grid:
            raise ValueError("places: expected None with space_time='factorised', whose grids have one or two axes")
        grid = _as_grid("space_time='factorised'", grid)
        # Relative positions within a frame do not depend on time, and relative positions in time do not depend on
        # location.
        space = replace(grid, shape=(1, *shape[1:])).rescale((0, 1, 1))
        time = replace(grid, shape=(shape[0], 1, 1)).rescale((1, 0, 0))
        if keep is None:
            return x, Layout(None, space, time)
        return x, Layout(None, space.take(keep if keep.ndim == 1 else keep.repeat_interleave(shape[0], 0)), time)

    def _begin(self, x: Tensor, prefix: bool = True) -> Tensor:
        """Embed x, and return the input of the first block."""
        if prefix:
            x = torch.cat([self._prefix(x), x], dim=1)
        return self.norm_pre(x if self.absolute == "none" else self.pos_drop(x))

    def _absolute(self, x: Tensor, shape: Sequence[int], positions: Grid | Coordinates) -> Tensor:
        """Add the absolute position embedding to the tokens (B, T H W, C) of a grid."""
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
        """Return the class and register tokens (B, P, C), including the learned position embedding if there is one."""
        tokens = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        prefix = torch.cat(tokens, dim=1) if tokens else x[:, :0]
        if self.pos_embed is not None and not self.no_embed_class:
            prefix = prefix + self.pos_embed[:, : self.num_prefix_tokens]
        return prefix

    def _choose(self, shape: Sequence[int], x: Tensor) -> Tensor | None:
        """Choose at random which tokens or locations to keep. Return sorted indices (B, n), or None to keep all."""
        if not self.training or not self.patch_drop_rate:
            return None
        num = x.shape[1] if self.drop_unit == "token" else shape[1] * shape[2]
        kept = max(1, int(num * (1 - self.patch_drop_rate)))
        return torch.rand(x.shape[0], num, device=x.device).argsort(-1)[:, :kept].sort(-1).values

    def _tokens(self, keep: Tensor, shape: Sequence[int]) -> Tensor:
        """Convert indices of tubes to indices of tokens."""
        if self.drop_unit == "token":
            return keep
        frames = torch.arange(shape[0], device=keep.device) * (shape[1] * shape[2])
        return (frames[:, None] + keep[..., None, :]).flatten(-2)

    def _keep(self, x: Tensor, shape: Sequence[int], keep: Tensor) -> Tensor:
        if (self.causal or self.memory or self.space_time == "factorised") and self.drop_unit == "token":
            raise ValueError(
                "keep: dropping single tokens removes different patches from each frame, but factorised attention, "
                "causal attention and a memory need whole tubes; build the model with drop_unit='tube'"
            )
        if keep.ndim not in (1, 2) or keep.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"keep: expected an integer tensor of shape (n,) or (B, n), got {keep.dtype} {tuple(keep.shape)}"
            )
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
        """Set the training size (frames, height, width), ``grid_size`` and the size of a learned table."""
        if patch_size is not None:
            raise ValueError(f"patch_size: expected None, got {patch_size}; the size of the tubelets is fixed")
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
        """Return the learned position table (1, C, T, H, W), or None if there is none."""
        if self.pos_embed is None:
            return None
        first = 0 if self.no_embed_class else self.num_prefix_tokens
        return self.pos_embed[:, first:].transpose(-2, -1).unflatten(-1, self.patch_embed.grid_size)


def _as_grid(what: str, positions: Grid | Coordinates) -> Grid:
    if not isinstance(positions, Grid):
        raise ValueError(f"{what}: expected an encoding with positions on a grid, got one with a table of positions")
    return positions


def _resample(table: Tensor, size: Sequence[int]) -> Tensor:
    """Resample a position table (1, C, T, H, W) to a different grid size."""
    if tuple(table.shape[2:]) == tuple(size):
        return table
    return F.interpolate(table.float(), size=tuple(size), mode="trilinear").to(table.dtype)


def inflate(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Convert weights of an image model, or of a video model with a different position embedding, for use in ``model``.

    The patch embedding (C, in_chans, p, p) is divided among the frames of a tubelet, and a learned table is repeated
    over time (I3D, arXiv 1705.07750; ViViT). With joint attention, a video without motion thus has the same features as
    its image, except that prefix tokens carry less weight among the larger number of tokens. With factorised attention,
    every second block attends along time, so features differ. If the model has no position table, the table in the
    weights is dropped. Frequencies that are missing from the weights stay as they are in the model, and so does the
    head if the number of classes differs. If ``model`` averages tokens and the weights come from a model with a class
    token, the model applies their final norm to the average.

    A learned table must have the same height and width in both models, and the same number of frames if the weights
    come from a video model. If the sizes differ, first call ``set_input_size`` of the other model, which resamples its
    table.

    Raises:
        TypeError: if the weights are not a state_dict, or the model is not a :class:`LrpeVideoTransformer`.
        ValueError: if the weights belong to a model of a different size.
    """
    if not isinstance(model, LrpeVideoTransformer):
        raise TypeError(f"model: expected an LrpeVideoTransformer, got {type(model).__name__}")
    if not isinstance(state_dict, Mapping):
        kind = type(state_dict).__name__
        advice = "; pass its state_dict()" if isinstance(state_dict, nn.Module) else ""
        raise TypeError(f"state_dict: expected a dict of weights, got {kind}{advice}")
    inflated = inflate_unchecked(state_dict, model)
    own = model.state_dict()
    _check_sizes(state_dict, inflated, own)
    heads = [{name: each[name] for name in each if name.startswith("head.")} for each in (inflated, own)]
    shapes = [{name: value.shape for name, value in head.items()} for head in heads]
    if shapes[0] != shapes[1]:
        inflated = {**{name: value for name, value in inflated.items() if name not in heads[0]}, **heads[1]}
    return inflated


def _check_sizes(given: Mapping[str, Any], inflated: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Check that the inflated weights have the same shapes as the model's own weights, except for the head."""
    if not given.keys() & own.keys():
        raise ValueError(
            f"state_dict: expected the weights of a ViT, such as patch_embed.proj.weight, got {list(given)[:3]}; if "
            "one of these entries contains the weights, pass that entry"
        )
    expected, found = _read_sizes(own), _read_sizes(inflated)
    wrong = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
    if wrong:
        wanted, got = (", ".join(f"{name}={sizes[name]}" for name in sorted(wrong)) for sizes in (expected, found))
        raise ValueError(
            f"state_dict: expected weights of a model with {wanted}, got {got}; create both models with the same "
            "arguments"
        )
    for name in own:
        if name in inflated and not name.startswith("head.") and inflated[name].shape != own[name].shape:
            advice = ""
            if name == "pos_embed":
                advice = (
                    "; use the same img_size, number of frames, class_token and no_embed_class, or resample the table "
                    "of the other model with its set_input_size(img_size)"
                )
            elif "encoding" in name.split("."):
                advice = "; to keep the model's own frequencies, remove the entries of encoding modules from state_dict"
            raise ValueError(
                f"state_dict: expected {name} of shape {tuple(own[name].shape)}, got {tuple(inflated[name].shape)} "
                f"after inflating {tuple(given[name].shape)}{advice}"
            )


def _read_sizes(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Infer a model's arguments from the shapes of its weights."""
    kernel = weights.get("patch_embed.proj.weight")
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    sizes: dict[str, Any] = {}
    if blocks:
        registers = weights.get("reg_token")
        sizes |= {"depth": len(blocks), "class_token": "cls_token" in weights}
        sizes |= {"reg_tokens": 0 if registers is None else registers.shape[1]}
    if kernel is not None and kernel.ndim == 5:
        embed_dim, in_chans, tubelet_size, *patch_size = kernel.shape
        sizes |= {"embed_dim": embed_dim, "in_chans": in_chans, "patch_size": tuple(patch_size)}
        sizes |= {"tubelet_size": tubelet_size}
    return sizes


def inflate_unchecked(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Run :func:`inflate` without checking sizes, for callers that only pass weights of the right size."""
    video: Any = model
    state_dict = rename_final_norm(state_dict, model)
    weight, table = state_dict.get("patch_embed.proj.weight"), state_dict.get("pos_embed")
    image = weight if weight is not None and weight.ndim == 4 else None
    if image is not None:
        frames = video.patch_embed.patch_size[0]
        state_dict["patch_embed.proj.weight"] = image[:, :, None].repeat(1, 1, frames, 1, 1) / frames
    if table is not None and video.pos_embed is None:
        del state_dict["pos_embed"]
    elif table is not None and (image is not None or (weight is None and table.shape != video.pos_embed.shape)):
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
        pretrained_filter_fn=inflate_unchecked,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **{"patch_size": 16, "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, **with_positions(kwargs)},
    )


@register_model
def lrpe_video_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVideoTransformer:
    """Build a ViT-Ti/16 for 16 frames, with tubelets of 2 frames."""
    return _create("tiny", pretrained, **kwargs)


@register_model
def lrpe_video_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVideoTransformer:
    """Build a ViT-S/16 for 16 frames, with tubelets of 2 frames."""
    return _create("small", pretrained, **kwargs)


@register_model
def lrpe_video_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVideoTransformer:
    """Build a ViT-B/16 for 16 frames, with tubelets of 2 frames."""
    return _create("base", pretrained, **kwargs)


@register_model
def lrpe_video_large_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVideoTransformer:
    """Build a ViT-L/16 for 16 frames, with tubelets of 2 frames."""
    return _create("large", pretrained, **kwargs)
