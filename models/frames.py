"""Softmax attention between the frames of a video. When the window moves, the keys are re-encoded.

Shapes: B batch, N tokens, C embed_dim, H heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lrpe_md import Grid
from lrpe_md.engine.encode.views import split_qkv
from lrpe_md.integrations.attention import Context, attend_softmax, check_causal
from lrpe_md.integrations.timm import LrpeAttention

__all__ = ["FrameAttention", "attend_frames"]


class FrameAttention(LrpeAttention):
    """Attention in which each token attends to its own and earlier frames, if the :class:`Context` has frames."""

    def forward(self, x: Tensor, attn_mask: Context | Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Compute attention for x (B, N, C)."""
        context = attn_mask if isinstance(attn_mask, Context) else Context(None, None)
        if self.attention == "linear" or context.block_for(self.memory) is None:
            return super().forward(x, attn_mask, is_causal)
        gate = None if self.gate is None else self.gate(x).sigmoid()
        q, k, v = split_qkv(self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)))
        return self._project(attend_frames(self, self.q_norm(q), self.k_norm(k), v, context, is_causal), gate)


def attend_frames(attn: Any, q: Tensor, k: Tensor, v: Tensor, context: Context, is_causal: bool = False) -> Tensor:
    """Encode q and k (B, H, N, D), and compute softmax attention of each token to its own frame and to earlier frames.

    Frames have ``context.block`` tokens each and follow the prefix. All tokens attend to the prefix, and prefix tokens
    only attend to the prefix. Keys of earlier frames are stored unencoded, so they can be encoded again when the
    window moves. The first frame in the window is always at position 0, so positions never exceed the window
    (block-relativistic RoPE, arXiv 2511.20649).
    """
    grid, size, window = context.positions, context.block, context.window
    assert grid is not None
    assert size is not None
    if context.attn_mask is not None:
        raise ValueError("attn_mask: expected None with causal='frames', got a mask")
    if is_causal:
        raise ValueError(
            "is_causal: expected False with causal='frames', which is already causal between frames, got True"
        )
    before = None if context.carried is None else context.carried.take()
    prefix = grid.prefix
    new = (q.shape[2] - (prefix if before is None else 0)) // size
    if before is not None:
        _check_kept(before, k, v, prefix, size)
        k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
    frames = (k.shape[2] - prefix) // size
    if window is not None and isinstance(frames, torch.SymInt):  # the branches below would be fixed
        raise ValueError(
            "window: expected None in a program exported for any number of frames, got "
            f"{window}; export the model for a fixed number of frames"
        )
    if context.carried is not None:
        kept = frames if window is None else min(frames, window - 1)
        parts = (_take_frames(t, prefix, frames - kept, frames, size) for t in (k, v))
        # Clone slices, because a view would keep the entire projection (or dropped frames) in memory.
        whole = before is not None and kept == frames
        context.carried.after.append(tuple(t if prefix or whole else t.clone() for t in parts))
    if not isinstance(grid, Grid) and (window is not None or before is not None):
        raise ValueError("window: expected None if tokens are dropped, because a window needs positions on a grid")
    if window is None or frames <= window:
        mask = _mask_frames(q.shape[2], k.shape[2], prefix, size, k.device) if before is None or new > 1 else None
        return _attend_window(attn, q, k, v, context, (frames, new if before is not None else None), mask)
    found = []
    if before is None and prefix:
        first_q, first_k, first_v = (t[:, :, :prefix] for t in (q, k, v))
        found.append(_attend_window(attn, first_q, first_k, first_v, context, (0, None)))
    for i in range(new):
        last = frames - new + i + 1
        first, end = max(0, last - window), q.shape[2] - (new - i - 1) * size
        keys, values = (_take_frames(t, prefix, first, last, size) for t in (k, v))
        found.append(_attend_window(attn, q[:, :, end - size : end], keys, values, context, (last - first, 1)))
    return torch.cat(found, dim=2)


def _check_kept(before: Any, k: Tensor, v: Tensor, prefix: int, size: int) -> None:
    """Check that the stored keys and values of earlier frames match the new keys and values."""
    fits = type(before) is tuple and len(before) == 2 and all(isinstance(t, Tensor) and t.ndim == 4 for t in before)
    if fits:
        fits = all(
            (t.shape[0], t.shape[1], t.shape[3], t.dtype, t.device)
            == (new.shape[0], new.shape[1], new.shape[3], new.dtype, new.device)
            and t.shape[2] >= prefix
            and (t.shape[2] - prefix) % size == 0
            for t, new in zip(before, (k, v), strict=True)
        )
    if not fits:
        found = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in before]
        raise ValueError(
            f"state: expected keys and values of shape ({k.shape[0]}, {k.shape[1]}, {prefix} + a multiple of {size}, "
            f"{k.shape[3]}) in {k.dtype} on {k.device}, got {found}"
        )


def _take_frames(t: Tensor, prefix: int, first: int, last: int, size: int) -> Tensor:
    """Return the prefix tokens and the frames from ``first`` to ``last``."""
    frames = t[:, :, prefix + first * size : prefix + last * size]
    return torch.cat([t[:, :, :prefix], frames], dim=2) if prefix else frames


def _mask_frames(num_queries: int, num_keys: int, prefix: int, size: int, device: torch.device) -> Tensor:
    """Return a mask (queries, keys) that is True where a query attends to a key. The queries are the last tokens."""
    frame = ((torch.arange(num_keys, device=device) - prefix) // size).clamp_min(-1)
    return frame[num_keys - num_queries :, None] >= frame


def _attend_window(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, context: Context, frames: tuple[int, int | None],
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Encode the q and k of a window, and compute attention within the window.

    frames: number of frames in k, and number of frames in q. The frames in q are the last frames in k. None means that
    q has the same tokens as k.
    """
    encoding, grid, size = context.encoding, context.positions, context.block
    if encoding is not None:
        check_causal(encoding)
        where: Any = grid
        if isinstance(grid, Grid):
            where = replace(grid, shape=(frames[0], *grid.shape[1:]), start=0, length=None)
            if frames[1] is not None:
                assert size is not None
                where = replace(where, start=where.total - frames[1] * size), where
        q, k = encoding(q, k, positions=where)
    return attend_softmax(attn, q, k, v, mask, False)
