"""Published schemes as data: frequencies, positions, pairs, in the one form Θ = Σ_j s_j ω_j.

    wan = preset("wan", head_dim=128)
    q, k = rotate(q, k, omega=wan.omega.to(q.device), positions=wan.positions((21, 30, 52)), **wan.options)

Each entry of ``SCHEMES`` is a few lines and a docstring with its source and its quirks; nothing else in the library
knows a scheme's name. Every preset is tested against the original code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor

from ..frequencies.dense import dense_omega, mixed_omega, plane_directions
from ..frequencies.scalings import ntk_scaling
from ..frequencies.series import geometric_theta, head_bands_theta, period_theta
from ..positions.grid import Coordinates, Grid, window_order
from ..positions.sequences import Tokens
from .scheme import Axial, Dense, Preset, Scaling, Scheme

__all__ = ["SCHEMES", "Axial", "Dense", "Preset", "Scheme", "list_presets", "preset"]

# --- series: (number, base, heads) → theta, and dense frequencies: (channels, heads, base, generator) → omega -------


def _periods(num: int, base: float, heads: int) -> Tensor:
    return period_theta(1 / geometric_theta(num, base))


def _bands(num: int, base: float, heads: int) -> Tensor:
    return head_bands_theta(num, heads, base**2)


def _quarter_turn(num: int, base: None, heads: int) -> Tensor:
    return torch.full((num,), math.pi / 2, dtype=torch.float64)


def _rope_mixed(channels: int, heads: int, base: float, generator: torch.Generator) -> Tensor:
    """Angles from the column's axis, U(0, 2π) a head."""
    angles = 2 * math.pi * torch.rand(heads, dtype=torch.float64, generator=generator)
    theta = geometric_theta(-(-channels // 2), base).repeat(2)[:channels]
    return dense_omega(theta, plane_directions(channels, angles).flip(-1))


def _random_frames(channels: int, heads: int, base: float, generator: torch.Generator) -> Tensor:
    return mixed_omega(channels, 3, heads, base=base, generator=generator)


# --- grids -----------------------------------------------------------------------------------------------


def _frames(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(H, W) as one frame."""
    return (1, *shape) if len(shape) == 2 else shape


def _video(shape: tuple[int, ...]) -> Grid:
    return Grid(_frames(shape))


def _merged(shape: tuple[int, ...], merge: int = 2) -> Coordinates:
    shape = _frames(shape)
    if shape[1] % merge or shape[2] % merge:
        raise ValueError(f"segments: expected height and width in multiples of {merge}, got {shape[1:]}")
    return Grid(shape).take(window_order(shape, (1, merge, merge))).select((1, 2))


def _layered(shape: tuple[int, ...]) -> Grid:
    return Grid((*_frames(shape), 1))


def _counted(shape: tuple[int, ...], offset: float = 1) -> Grid:
    return Grid(shape).offset(offset)


def _centred(shape: tuple[int, ...]) -> Grid:
    return _video(shape).centre((1, 2), whole=True)


def _behind_centred(shapes: list[tuple[int, ...]]) -> float:
    halves: Any = [n // 2 for shape in shapes for n in shape[-2:]]
    return reduce(torch.sym_max, halves) if halves else 0


def _cells(shape: tuple[int, ...], by: Literal["axis", "shorter", "longer"] = "axis") -> Grid:
    return Grid(shape).cells(by)


def _crop(shape: tuple[int, ...], size: tuple[int, int] | None = (30, 45)) -> Grid:
    """The largest crop of the grid's aspect from the middle of a grid of the trained size."""
    frames, height, width = shape = _frames(shape)
    if size is None:
        return Grid(shape)
    tall = height / width > size[0] / size[1]
    rows = size[0] if tall else round(size[1] / width * height)
    columns = round(size[0] / height * width) if tall else size[1]
    top, left = round((size[0] - rows) / 2), round((size[1] - columns) / 2)
    return Grid(shape).crop((0, top, left), (frames, top + rows, left + columns))


def _same_area(shape: tuple[int, ...], area: float = 192 * 192) -> Grid:
    shape = _frames(shape)
    scale = (area / (shape[1] * shape[2])) ** 0.5
    return Grid(shape).centre((1, 2)).rescale((1, scale, scale))


def _seconds(shape: tuple[int, ...], fps: float | None = None, base_fps: float = 24) -> Grid:
    return _video(shape).rescale((1 if fps is None else base_fps / fps, 1, 1))


def _portion(shape: tuple[int, ...], longest: int | None = None) -> Grid:
    """(i + 1) / M."""
    return Grid(shape).offset(1).rescale(1 / (longest or max(shape[0], 1)))


# --- the schemes -----------------------------------------------------------------------------------------

SKIP, DIAGONAL = Tokens(0, "skip"), Tokens(0, "diagonal")

SCHEMES: dict[str, Scheme] = {
    "eva02": Scheme(
        """EVA-02 and timm's other rope ViTs (arXiv 2303.11331; timm ``RotaryEmbeddingCat``).

        (h, w) scaled to a grid of 16×16, the size of the pre-training; class token and registers are not rotated.
        """,
        64, Axial((1, 1)), reference=(16, 16), tokens=SKIP,
    ),
    "rope_vit_axial": Scheme(
        """RoPE-Axial of RoPE-ViT (arXiv 2403.13298; timm ``vit_*_patch16_rope_224``).

        (x, y): the first block is the column's. Base 100; positions are not scaled when the size changes.
        """,
        64, Axial((1, 1), 100.0, axis_order="minor_first"), tokens=SKIP,
    ),
    "rope_vit_mixed": Scheme(
        """RoPE-Mixed of RoPE-ViT (arXiv 2403.13298; timm ``RotaryEmbeddingMixed``), learned by layer and head.

        Initially one random angle a head, half of its pairs along it and half across. No weight decay. timm's
        parameter (2, depth, H, C) is omega of layer i by ``freqs[:, i].flip(0).permute(1, 2, 0)``: it is (x, y).
        """,
        64, Dense(2, _rope_mixed, base=10.0), tokens=SKIP, learned=True,
    ),
    "dinov3": Scheme(
        """DINOv3 (arXiv 2508.10104; timm ``RotaryEmbeddingDinoV3``).

        Cell centres in [-1, 1], each axis by its own size; option ``by="shorter"`` or ``"longer"``. Periods
        100^(i/n), so ω = 2π / period. One class token and four registers are not rotated. Trained with a random
        rescaling. The published weights hold the periods in bfloat16; timm and this preset do not round them.
        """,
        64, Axial((1, 1), 100.0, series=_periods),
        pairs="half", grid=_cells, tokens=SKIP, augment={"rescale": 2.0},
    ),
    "perception_encoder": Scheme(
        """Perception Encoder (arXiv 2504.13181; timm ``vit_pe_*``).

        (x, y), counted from 1 and then scaled to the grid of the pre-training, 24×24 for patches of 16 at 384. The
        class token is not rotated. The gigantic model counts from 0: option ``offset=0``, with ``reference=(32, 32)``.
        """,
        64, Axial((1, 1), axis_order="minor_first"), grid=_counted, reference=(24, 24), tokens=SKIP,
    ),
    "pixtral": Scheme(
        """Pixtral's vision tower (arXiv 2410.07073; transformers ``PixtralVisionRotaryEmbedding``).

        One series: the rows get its even members, the columns its odd ones. Images are packed, each attends to itself.
        """,
        64, Axial((1, 1), axis_map="even_odd"), pairs="half",
    ),
    "qwen2_vl_vision": Scheme(
        """The vision tower of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (arXiv 2409.12191; transformers).

        (h, w), the same in every frame. Tokens come in blocks of 2×2, which are merged later, so positions are a table;
        option ``merge``. Shapes in patches. Qwen2.5-VL also orders the blocks by windows (:func:`window_order`).
        """,
        80, Axial((1, 1)), pairs="half", grid=_merged,
    ),
    "qwen2_vl": Scheme(
        """M-RoPE of Qwen2-VL's language model (arXiv 2409.12191; transformers ``Qwen2VLRotaryEmbedding``).

        Sections of one series: t the first quarter, h and w three eighths each. Text has the same number on all
        axes; an image or video starts behind what precedes it, and what follows starts behind its largest number (as
        in the paper; transformers 5 advances by its height or width, so that long videos differ). Shapes (T, H, W)
        in merged tokens. Base 1e6, head_dim 128: 16, 24 and 24 pairs.
        """,
        128, Axial((2, 3, 3), 1e6, axis_map="chunk"), pairs="half", grid=_video, tokens=DIAGONAL, after=(0, 1, 2),
    ),
    "qwen3_vl": Scheme(
        """Interleaved M-RoPE of Qwen3-VL (arXiv 2511.21631; transformers ``Qwen3VLTextRotaryEmbedding``).

        One series dealt out t h w t h w .., the end of it to t: 24, 20 and 20 pairs of 64. Otherwise as ``qwen2_vl``,
        but each frame is a grid of its own, with its time as text before it.
        """,
        128, Axial((6, 5, 5), 5e6, axis_map="stride"), pairs="half", grid=_video, tokens=DIAGONAL, after=(0, 1, 2),
    ),
    "flux1": Scheme(
        """FLUX.1 (diffusers ``FluxPosEmbed``), float64.

        (0, h, w); text is at zero, before the image. FLUX.1 Kontext's reference image has a 1 on the first axis.
        """,
        128, Axial((2, 7, 7)), grid=_video, tokens=Tokens(0, "zero"), apart=(1, 0, 0),
    ),
    "flux2": Scheme(
        """FLUX.2 (diffusers ``Flux2PosEmbed``), float64.

        (0, h, w, 0); text is (0, 0, 0, l), before the image. Base 2000. Reference images are 10 apart on axis 0.
        """,
        128, Axial((1, 1, 1, 1), 2000.0), grid=_layered, tokens=Tokens(0, "axis", 3),
        apart=(10, 0, 0, 0),
    ),
    "lumina2": Scheme(
        """Lumina-Image 2.0 (arXiv 2503.21758; diffusers ``Lumina2RotaryPosEmbed``), float64.

        Text is (i, 0, 0), the image behind it (L, h, w).
        """,
        96, Axial((1, 1, 1)), grid=_video, tokens=Tokens(0, "axis", 0), after=(0,),
    ),
    "qwen_image": Scheme(
        """Qwen-Image (arXiv 2508.02324; diffusers ``QwenEmbedRope``).

        (frame, h - (H - H//2), w - (W - W//2)); text is on the diagonal from max(H//2, W//2) on, and comes before the
        images. Reference images count on as frames.
        """,
        128, Axial((2, 7, 7)), grid=_centred, tokens=DIAGONAL,
        tokens_start=_behind_centred, apart=(1, 0, 0),
    ),
    "cogvideox": Scheme(
        """CogVideoX (arXiv 2408.06072; diffusers ``get_3d_rotary_pos_embed``).

        (t, h, w), h and w over the largest crop of their aspect in the grid of the training, ``size``: 30×45 for the
        5B model; ``size=None``: plain indices, as in CogVideoX 1.5. Text comes first and is not rotated.
        """,
        64, Axial((2, 3, 3)), grid=_crop, tokens=SKIP,
    ),
    "hunyuan_video": Scheme(
        """HunyuanVideo (arXiv 2412.03603; diffusers ``HunyuanVideoRotaryPosEmbed``).

        Base 256. Text comes behind the video and is not rotated.
        """,
        128, Axial((2, 7, 7), 256.0), grid=_video, tokens=SKIP,
    ),
    "wan": Scheme(
        """Wan 2.1 and 2.2 (arXiv 2503.20314; diffusers ``WanRotaryPosEmbed``), float64.

        A third of the pairs an axis, t takes the remainder: 22, 21, 21. Text by cross-attention, not rotated.
        """,
        128, Axial((1, 1, 1), remainder=0), grid=_video,
    ),
    "mochi": Scheme(
        """Mochi 1 (genmo 2024; diffusers ``MochiRoPE``): frequencies learned by head, shared by all layers.

        t counts frames; h and w are centred and scaled so that the area is 192², option ``area``. Text is not rotated.
        The parameter (3, H, C) of a checkpoint is omega by ``pos_frequencies.permute(1, 2, 0)``; diffusers starts
        from zeros, this preset from random directions.
        """,
        128, Dense(3, _random_frames, base=1e4), grid=_same_area, tokens=SKIP, learned=True,
        shared=True,
    ),
    "cosmos": Scheme(
        """Cosmos-Predict (arXiv 2501.03575; diffusers ``CosmosRotaryPosEmbed``).

        t takes the remainder of thirds, 22, 21, 21, and its base is stretched by a factor of 2 (NTK). With ``fps``, t
        counts 24ths of a second, else frames. Text by cross-attention, not rotated. The learned absolute positions
        of the 14B models are not part of this.
        """,
        128, Axial((1, 1, 1), remainder=0, scaling=(partial(ntk_scaling, factor=2.0), None, None)), pairs="half",
        grid=_seconds,
    ),
    "transnormer": Scheme(
        """LRPE in TransNormerLLM (arXiv 2307.14995): the cosine map, one series over all heads, learnable.

        ω[h, c] = 10000^(-2 (h d + c) / (H d)); silu on q and k.
        """,
        128, Axial((1,), 1e4, series=_bands), map="cosine",
        act="silu", tokens=Tokens(0, "axis"), after=(0,), learned=True,
    ),
    "cosformer": Scheme(
        """cosFormer (arXiv 2202.08791): one frequency, π/2 over the whole length, counted from 1.

        Θ = π (i + 1) / (2 M), M the longer of queries and keys: option ``longest``, by default this one. The
        output's halves are [sin, cos]; relu on q and k.
        """,
        64, Axial((1,), None, series=_quarter_turn),
        map="cosine", act="relu", order="sin_cos", grid=_portion,
    ),
    "pope": Scheme(
        """PoPE (arXiv 2509.10534): the cosine map with softplus, and a phase on the keys.

        One frequency a channel, 10000^(-c/d). The phase is learned by head and channel, kept in [-2π, 0].
        """,
        64, Axial((1,)), map="cosine", act="softplus", tokens=Tokens(0, "axis"), after=(0,),
        phase="k", phase_range=(-2 * math.pi, 0.0),
    ),
}  # fmt: skip


# --- by name --------------------------------------------------------------------------------------------


def list_presets() -> list[str]:
    """The names that :func:`preset` takes."""
    return list(SCHEMES)


def preset(
    name: str,
    head_dim: int | None = None,
    num_heads: int = 1,
    *,
    base: float | None = None,
    split: Sequence[int] | None = None,
    scaling: Scaling | Sequence[Scaling | None] | None = None,
    seed: int | None = None,
) -> Preset:
    """A published scheme for a given head_dim.

    Args:
        name: one of :func:`list_presets`.
        head_dim: D; default: the original's.
        num_heads: key heads, for schemes whose frequencies or phase are learned by head; others share ω.
        base, split, scaling: instead of the scheme's own: the base of the series, the axes' shares of the channels,
            and an edit for longer sequences or larger grids, e.g. ``partial(yarn_scaling, factor=4,
            original_length=32768)`` for all axes or one an axis.
        seed: of random frequencies, default 0.

    Raises:
        ValueError: an unknown name, a head_dim that the scheme can't share among its axes, an argument that it does
            not take.
    """
    if name not in SCHEMES:
        raise ValueError(f"name: expected one of {list_presets()}, got {name!r}")
    scheme = SCHEMES[name]
    head_dim = scheme.head_dim if head_dim is None else head_dim
    if head_dim < 1 or (scheme.map == "rotate" and head_dim % 2):
        raise ValueError(f"head_dim: expected {'an even' if head_dim > 0 else 'a positive'} number, got {head_dim}")
    if num_heads < 1:
        raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
    frequencies = scheme.frequencies
    changes = {"base": base, "split": None if split is None else tuple(split), "scaling": scaling, "seed": seed}
    changes = {key: value for key, value in changes.items() if value is not None}
    for key in sorted(changes.keys() - frequencies.takes):
        raise ValueError(
            f"{key}: expected it to be left out, since {name} has none (it takes "
            f"{' and '.join(sorted(frequencies.takes))}), got {changes[key]!r}"
        )
    changes.pop("seed", None)
    if split is not None and len(split) != frequencies.num_axes:
        raise ValueError(f"split: expected a share for each of {name}'s {frequencies.num_axes} axes, got {split}")
    frequencies = replace(frequencies, **changes)
    channels = head_dim if scheme.map == "cosine" else head_dim // 2
    with torch.device("cpu"):
        if isinstance(frequencies, Axial):
            _fitting(name, head_dim, partial(frequencies.sections, channels))
        build = partial(frequencies.build, channels, num_heads, seed or 0)
        omega, amplitude = build() if changes else _fitting(name, head_dim, build)
    phase = None if scheme.phase is None else (num_heads, channels)
    return Preset(name, scheme, head_dim, num_heads, omega, amplitude, phase)


def _fitting(name: str, head_dim: int, make: Callable[[], Any]) -> Any:
    """What only head_dim can prevent."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"head_dim: {name} can't have {head_dim}: {error}") from error
