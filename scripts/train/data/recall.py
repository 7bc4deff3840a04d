"""Clips of symbols with questions about the contents of earlier frames, generated from random numbers.

A clip is a grid of F frames with H × W tokens each. In each frame, some tokens **write**: they contain a key and a
value. Other tokens **ask** a question. The remaining tokens are blank. There are two kinds of questions:

- **key lookup** ("by key"): the token contains a key, and the answer is the value that was last written with this key,
  in this frame or an earlier frame, at any place. A frame writes each key at most once.
- **place lookup** ("by place"): the token contains one of :data:`OFFSETS` (Δt, Δh, Δw), and the answer is the value
  written Δt frames earlier, Δh tokens further down and Δw tokens further right.

No answer depends on a later frame. The numbers of writes and questions per frame are the same for all sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

OFFSETS = ((1, 0, 0), (3, 0, 0), (1, 0, -2), (2, 1, 0))  # for example, one frame ago and two tokens to the left
KINDS = ("by key", "by place")
NO_ANSWER = -100  # the label that cross_entropy ignores
DRAWS = 4  # random numbers per token, for its role, its key, its value (or the key to ask for) and its offset


@dataclass(frozen=True)
class Symbols:
    """Number of different symbols, and number of tokens per frame that write or ask.

    Args:
        keys, values: number of different keys and number of different values.
        writes: number of tokens per frame that write, at most ``keys``.
        questions: number of questions of each kind per frame. There are fewer place lookups if fewer tokens have
            an answer, and no key lookups before the first write.
    """

    keys: int
    values: int
    writes: int
    questions: int

    @property
    def channels(self) -> int:
        return self.keys + self.values + len(OFFSETS)


class Clips(NamedTuple):
    """Clips of symbols. All tensors are int64 (B, F, H, W). -1 means that a token has no such entry.

    Args:
        keys: key that each token writes or asks for.
        values: value that each token writes.
        offsets: index into :data:`OFFSETS` that each token asks for.
        answers: value that answers each token's question.
    """

    keys: np.ndarray
    values: np.ndarray
    offsets: np.ndarray
    answers: np.ndarray

    def kind(self, number: int) -> np.ndarray:
        """Return a mask (B, F, H, W) of the questions of kind ``KINDS[number]``."""
        return (self.answers >= 0) & ((self.offsets >= 0) == (number == 1))


def draw_clips(symbols: Symbols, size: tuple[int, int, int], draws: np.ndarray) -> Clips:
    """Generate a clip of size (frames, height, width) from each random number in ``draws`` (B,).

    The same number generates the same clip in any batch.
    """
    frames, height, width = size
    shape = len(draws), frames, height * width
    random = np.stack([np.random.default_rng(int(draw)).random((DRAWS, *shape[1:])) for draw in draws], axis=1)
    role, key, value, offset = random
    order = role.argsort(-1).argsort(-1)  # (B, F, H W): the first tokens of a frame write, the next look up keys
    writes = order < symbols.writes
    asks = (order >= symbols.writes) & (order < symbols.writes + symbols.questions)
    values = np.where(writes, (value * symbols.values).astype(np.int64), -1)
    keys = np.full(shape, -1)
    keys[writes] = _distinct(symbols, key, shape[:2])[(*np.nonzero(writes)[:2], order[writes])]
    latest = _latest(symbols, keys, values)
    keys[asks] = _choose(latest[np.nonzero(asks)[:2]] >= 0, value[asks])  # reuses the number drawn for the value
    answers = np.full(shape, -1)
    known = asks & (keys >= 0)
    answers[known] = latest[(*np.nonzero(known)[:2], keys[known])]

    targets = _targets(values.reshape(len(draws), *size)).reshape(len(OFFSETS), *shape)
    free = order >= symbols.writes + symbols.questions
    able = free & (targets >= 0).any(0)
    rank = np.where(able, order, math.prod(shape)).argsort(-1).argsort(-1)
    chosen = able & (rank < symbols.questions)
    offsets = np.full(shape, -1)
    offsets[chosen] = _choose((targets >= 0)[:, chosen].T, offset[chosen])
    answers[chosen] = targets[(offsets[chosen], *np.nonzero(chosen))]
    return Clips(*(each.reshape(len(draws), *size) for each in (keys, values, offsets, answers)))


def _distinct(symbols: Symbols, random: np.ndarray, frames: tuple[int, int]) -> np.ndarray:
    """Choose distinct keys (B, F, writes) for the tokens that write in each frame."""
    seeds = random[..., : symbols.writes]
    keys = np.arange(symbols.keys)[None, None].repeat(frames[0], 0).repeat(frames[1], 1)
    for i in range(symbols.writes):  # the first steps of a Fisher-Yates shuffle
        j = i + (seeds[..., i : i + 1] * (symbols.keys - i)).astype(np.int64)
        other = np.take_along_axis(keys, j, -1)
        np.put_along_axis(keys, j, keys[..., i : i + 1], -1)
        keys[..., i : i + 1] = other
    return keys[..., : symbols.writes]


def _latest(symbols: Symbols, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the value (B, F, K) of each key after each frame, or -1 if the key has not been written yet."""
    latest = np.full((*keys.shape[:2], symbols.keys), -1)
    sample, frame, place = np.nonzero(values >= 0)
    latest[sample, frame, keys[sample, frame, place]] = values[sample, frame, place]
    for t in range(1, keys.shape[1]):
        latest[:, t] = np.where(latest[:, t] < 0, latest[:, t - 1], latest[:, t])
    return latest


def _targets(values: np.ndarray) -> np.ndarray:
    """Return the answers (O, B, F, H, W) for each offset and token, or -1 if nothing was written at that place."""
    found = np.full((len(OFFSETS), *values.shape), -1)
    for each, (t, h, w) in zip(found, OFFSETS, strict=True):
        shifts = (-t, h, w)
        to = tuple(slice(max(-s, 0), n - max(s, 0)) for s, n in zip(shifts, values.shape[1:], strict=True))
        source = tuple(slice(max(s, 0), n - max(-s, 0)) for s, n in zip(shifts, values.shape[1:], strict=True))
        if all(n > abs(s) for s, n in zip(shifts, values.shape[1:], strict=True)):
            each[(slice(None), *to)] = values[(slice(None), *source)]
    return found


def _choose(possible: np.ndarray, random: np.ndarray) -> np.ndarray:
    """For each row of ``possible`` (n, columns), return the index of a random True column, or -1 if there is none."""
    number = possible.sum(-1)
    wanted = (random * number).astype(np.int64)[:, None]
    return np.where(number > 0, (possible & (possible.cumsum(-1) == wanted + 1)).argmax(-1), -1)


def encode_clips(symbols: Symbols, clips: Clips) -> tuple[Tensor, Tensor]:
    """Return one-hot inputs (B, keys + values + offsets, F, H, W) in float32, and labels (B, F H W)."""
    parts = zip(clips[:3], (symbols.keys, symbols.values, len(OFFSETS)), strict=True)
    planes = [F.one_hot(torch.from_numpy(each) + 1, number + 1)[..., 1:] for each, number in parts]
    labels = torch.from_numpy(np.where(clips.answers >= 0, clips.answers, NO_ANSWER))
    return torch.cat(planes, dim=-1).movedim(-1, 1).float(), labels.flatten(1)
