"""Published schemes as data, with frequencies, positions and pairs in the common form Θ = Σ_j s_j ω_j.

    wan = preset("wan", head_dim=128)
    q, k = rotate(q, k, omega=wan.omega.to(q.device), positions=wan.positions((21, 30, 52)), **wan.options)

The ``doc`` of each entry in ``SCHEMES`` describes its source and peculiarities. No other module in the library refers
to a scheme by name. Each preset is tested against the original code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..checks import check_at_least, join_names, suggest
from ..frequencies.axial import check_split
from ..frequencies.scalings import ntk_scaling
from ..positions.sequences import Tokens
from . import functions as f
from .scheme import Axial, Dense, Preset, Scaling, Scheme, make_preset

__all__ = ["SCHEMES", "Axial", "Dense", "Preset", "Scheme", "list_presets", "preset", "register_scheme"]

# --- the schemes -----------------------------------------------------------------------------------------

SKIP, DIAGONAL, LINE = Tokens(0, "skip"), Tokens(0, "diagonal"), Tokens(0, "axis")

SCHEMES: dict[str, Scheme] = {
    "eva02": Scheme(
        """EVA-02 and timm's other RoPE ViTs (arXiv 2303.11331; timm ``RotaryEmbeddingCat``).

        h and w are scaled to a 16×16 grid, the size used in pre-training. Class and register tokens are not rotated.
        """,
        64, Axial((1, 1)), reference=(16, 16), tokens=SKIP,
    ),
    "rope_vit_axial": Scheme(
        """RoPE-Axial of RoPE-ViT (arXiv 2403.13298; timm ``vit_*_patch16_rope_224``).

        Positions are (x, y), so the first block of channels encodes the column. The base is 100. Positions are not
        rescaled when the image size changes.
        """,
        64, Axial((1, 1), 100.0, axis_order="minor_first"), tokens=SKIP,
    ),
    "rope_vit_mixed": Scheme(
        """RoPE-Mixed of RoPE-ViT (arXiv 2403.13298; timm ``RotaryEmbeddingMixed``), learned per layer and head.

        Each head starts with one random direction: half of its pairs point along it, half across it. Frequencies have
        no weight decay. timm's parameter (2, depth, H, C) has the order (x, y). To convert it to "omega" in the
        state_dict of layer i, use ``freqs[:, i].flip(0).permute(1, 2, 0)``.
        """,
        64, Dense(2, f.random_plane, base=10.0), tokens=SKIP, learned=True,
    ),
    "dinov3": Scheme(
        """DINOv3 (arXiv 2508.10104; timm ``RotaryEmbeddingDinoV3``).

        Positions are cell centres in [-1, 1], and each axis is scaled by its own size. To scale by one side instead,
        set the option ``by`` to "shorter" or "longer". Periods are 100^(i/n), so ω = 2π / period. One class token and
        four register tokens are not rotated. The model was trained with random rescaling. The published weights store
        the periods in bfloat16, but timm and this preset do not round them. To match the published weights, round the
        periods yourself: with ``made = preset("dinov3")`` and ``periods = (2 * math.pi /
        made.omega).bfloat16().double()``, use ``PresetMd(dataclasses.replace(made, omega=2 * math.pi / periods))``.
        """,
        64, Axial((1, 1), 100.0, series=f.periods),
        pairs="half", grid=f.cells, tokens=SKIP, augment={"rescale": 2.0},
    ),
    "perception_encoder": Scheme(
        """Perception Encoder (arXiv 2504.13181; timm ``vit_pe_*``).

        x and y are counted from 1, then scaled to the pre-training grid: 24×24, for patches of 16 pixels at 384 pixels.
        The class token is not rotated. The gigantic model counts from 0. For it, use ``offset=0`` and ``reference=(32,
        32)``.
        """,
        64, Axial((1, 1), axis_order="minor_first"), grid=f.counted, reference=(24, 24), tokens=SKIP,
    ),
    "pixtral": Scheme(
        """Pixtral's vision tower (arXiv 2410.07073; transformers ``PixtralVisionRotaryEmbedding``).

        Rows use the even frequencies of one series, and columns use the odd ones. Images are packed, and each image
        attends only to itself.
        """,
        64, Axial((1, 1), axis_map="even_odd"), pairs="half",
    ),
    "qwen2_vl_vision": Scheme(
        """The vision tower of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (arXiv 2409.12191; transformers).

        Positions are (h, w), the same in every frame. Tokens are ordered in blocks of 2×2 that are merged later, so
        positions are a table. The option ``merge`` sets the block size. Shapes are in patches. Qwen2.5-VL also sorts
        the blocks by window (:func:`window_order`).
        """,
        80, Axial((1, 1)), pairs="half", grid=f.merged, row_major=False,
    ),
    "qwen2_vl": Scheme(
        """M-RoPE of Qwen2-VL's language model (arXiv 2409.12191; transformers ``Qwen2VLRotaryEmbedding``).

        One series is split into sections: t gets the first quarter, and h and w get three eighths each. Text has the
        same position on all axes. An image or video starts after the tokens before it, and the next segment starts
        after its largest position. This rule follows the paper. transformers 5 advances by the height or width
        instead, so long videos differ. Shapes (T, H, W) count merged tokens. The base is 1e6. With head_dim 128, the
        axes have 16, 24 and 24 pairs.
        """,
        128, Axial((2, 3, 3), 1e6, axis_map="chunk"), pairs="half", grid=f.video, tokens=DIAGONAL, after=(0, 1, 2),
    ),
    "qwen3_vl": Scheme(
        """Interleaved M-RoPE of Qwen3-VL (arXiv 2511.21631; transformers ``Qwen3VLTextRotaryEmbedding``).

        The pairs of one series are assigned in turn, t h w t h w ..., and the remaining pairs go to t. Of 64 pairs, t,
        h and w get 24, 20 and 20. The rest is like ``qwen2_vl``, except that each frame is a separate grid, preceded by
        its timestamp as text.
        """,
        128, Axial((6, 5, 5), 5e6, axis_map="stride"), pairs="half", grid=f.video, tokens=DIAGONAL, after=(0, 1, 2),
    ),
    "flux1": Scheme(
        """FLUX.1 (diffusers ``FluxPosEmbed``), float64.

        Image positions are (0, h, w). Text is at zero and comes before the image. For FLUX.1 Kontext's reference image,
        the first coordinate is 1.
        """,
        128, Axial((2, 7, 7)), grid=f.video, tokens=Tokens(0, "zero"), apart=(1, 0, 0),
    ),
    "flux2": Scheme(
        """FLUX.2 (diffusers ``Flux2PosEmbed``), float64.

        Image positions are (0, h, w, 0). Text is at (0, 0, 0, l) and comes before the image. The base is 2000.
        Reference images are 10 apart on axis 0.
        """,
        128, Axial((1, 1, 1, 1), 2000.0), grid=f.layered, tokens=Tokens(0, "axis", 3),
        apart=(10, 0, 0, 0),
    ),
    "lumina2": Scheme(
        """Lumina-Image 2.0 (arXiv 2503.21758; diffusers ``Lumina2RotaryPosEmbed``), float64.

        Text is at (i, 0, 0), and the image after it is at (L, h, w).
        """,
        96, Axial((1, 1, 1)), grid=f.video, tokens=Tokens(0, "axis", 0), after=(0,),
    ),
    "qwen_image": Scheme(
        """Qwen-Image (arXiv 2508.02324; diffusers ``QwenEmbedRope``).

        Positions are (frame, h - (H - H//2), w - (W - W//2)). Text lies on the diagonal, starting at max(H//2, W//2),
        and comes before the images. Reference images count as additional frames.
        """,
        128, Axial((2, 7, 7)), grid=f.centred, tokens=DIAGONAL,
        tokens_start=f.behind_centred, apart=(1, 0, 0),
    ),
    "cogvideox": Scheme(
        """CogVideoX (arXiv 2408.06072; diffusers ``get_3d_rotary_pos_embed``).

        Positions are (t, h, w). h and w cover the largest crop of the training grid that has the same aspect ratio. The
        option ``size`` sets that grid: 30×45 for the 5B model. With ``size=None``, h and w are plain indices, as in
        CogVideoX 1.5. Text comes first and is not rotated.
        """,
        64, Axial((2, 3, 3)), grid=f.crop, tokens=SKIP,
    ),
    "hunyuan_video": Scheme(
        """HunyuanVideo (arXiv 2412.03603; diffusers ``HunyuanVideoRotaryPosEmbed``).

        The base is 256. Text comes after the video and is not rotated.
        """,
        128, Axial((2, 7, 7), 256.0), grid=f.video, tokens=SKIP,
    ),
    "wan": Scheme(
        """Wan 2.1 and 2.2 (arXiv 2503.20314; diffusers ``WanRotaryPosEmbed``), float64.

        Each axis has a third of the pairs, and t also gets the remainder: 22, 21, 21. Text enters through
        cross-attention and is not rotated.
        """,
        128, Axial((1, 1, 1), remainder=0), grid=f.video,
    ),
    "mochi": Scheme(
        """Mochi 1 (genmo 2024; diffusers ``MochiRoPE``): frequencies are learned per head and shared by all layers.

        t counts frames. h and w are centred, and scaled so that the area is 192² (option ``area``). Text is not
        rotated. To convert a checkpoint's parameter (3, H, C) to "omega" in the state_dict, use
        ``pos_frequencies.permute(1, 2, 0)``. diffusers initialises it with zeros, and this preset uses
        random directions.
        """,
        128, Dense(3, f.random_frames, base=1e4), grid=f.same_area, tokens=SKIP, learned=True,
        shared=True,
    ),
    "cosmos": Scheme(
        """Cosmos-Predict (arXiv 2501.03575; diffusers ``CosmosRotaryPosEmbed``).

        Each axis has a third of the pairs, and t also gets the remainder: 22, 21, 21. The base for t is stretched by a
        factor of 2 (NTK). t counts 24ths of a second if you pass ``fps``, and frames otherwise. Text enters through
        cross-attention and is not rotated. The learned absolute positions of the 14B models are not included.
        """,
        128, Axial((1, 1, 1), remainder=0, scaling=(partial(ntk_scaling, factor=2.0), None, None)), pairs="half",
        grid=f.seconds,
    ),
    "transnormer": Scheme(
        """LRPE in TransNormerLLM (arXiv 2307.14995): the cosine map, one series over all heads, learnable.

        ω[h, c] = 10000^(-2 (h d + c) / (H d)). silu is applied to q and k.
        """,
        128, Axial((1,), 1e4, series=f.head_bands), map="cosine",
        act="silu", tokens=Tokens(0, "axis"), after=(0,), learned=True,
    ),
    "cosformer": Scheme(
        """cosFormer (arXiv 2202.08791): one frequency, π/2 over the whole length.

        Θ = π (i + 1) / (2 M) for token i. M is the longer of the query and key lengths, unless you set the option
        ``longest``. The two halves of the output are [sin, cos]. relu is applied to q and k.
        """,
        64, Axial((1,), None, series=f.quarter_turn),
        map="cosine", act="relu", order="sin_cos", grid=f.portion,
    ),
    "pope": Scheme(
        """PoPE (arXiv 2509.10534): the cosine map with softplus, and a phase on the keys.

        Each channel has one frequency, 10000^(-c/d). The phase is learned per head and channel, and kept in [-2π, 0].
        """,
        64, Axial((1,)), map="cosine", act="softplus", tokens=Tokens(0, "axis"), after=(0,),
        phase="k", phase_range=(-2 * math.pi, 0.0),
    ),
    "gemma4_vision": Scheme(
        """The vision tower of Gemma 4 (transformers ``Gemma4VisionRotaryEmbedding``).

        Positions are (x, y), so the first half of a head encodes the column. The base is 100. Within each half, pairs
        use the half layout.
        """,
        64, Axial((1, 1), 100.0, axis_order="minor_first"), pairs="blocks",
    ),
    "llama4_vision": Scheme(
        """The vision tower of Llama 4 (transformers ``Llama4VisionRotaryEmbedding``).

        Positions are (x, y), counted from 1. The class token comes last and is not rotated.
        """,
        88, Axial((1, 1), axis_order="minor_first"), grid=f.counted, tokens=SKIP,
    ),
    "minimax_m3_vl": Scheme(
        """The vision tower of MiniMax-M3-VL (transformers ``MiniMaxM3VLVisionRotaryEmbedding``).

        t, h and w each have a third of the pairs. Channels after 6⌊D/6⌋ are not rotated, and the others (78 of 80) use
        the half layout. Tokens are ordered in blocks of 2×2, as in Qwen2-VL (option ``merge``).
        """,
        80, Axial((1, 1, 1), remainder="cut"), pairs="half", grid=f.merged_video, row_major=False,
    ),
    "qwen2_5_omni": Scheme(
        """TMRoPE of Qwen2.5-Omni's thinker (arXiv 2503.20215; transformers ``Qwen2_5OmniRotaryEmbedding``).

        It is like ``qwen2_vl``, but t is time: ⌊i · interval · 25⌋ for frames ``interval`` seconds apart (options
        ``interval`` and ``rate``). Audio is treated as text with 25 tokens per second.
        """,
        128, Axial((2, 3, 3), 1e6, axis_map="chunk"), pairs="half", grid=f.whole_seconds, tokens=DIAGONAL,
        after=(0, 1, 2),
    ),
    "qwen3_5": Scheme(
        """Interleaved M-RoPE of Qwen3.5 (transformers ``Qwen3_5TextRotaryEmbedding``).

        Only the first quarter of a head is rotated. Its 32 pairs are assigned in turn to t, h and w, which get 11, 11
        and 10 pairs. The base is 1e7. After an image, positions continue from the larger of its height and width.
        """,
        256, Axial((11, 11, 10), 1e7, axis_map="stride"), pairs="half", rotary=(0, 0.25), grid=f.video,
        tokens=DIAGONAL, after=(0, 1, 2), advance=(1, 2),
    ),
    "ernie4_5_vl": Scheme(
        """ERNIE-4.5-VL's language model (transformers ``Ernie4_5_VLMoeTextRotaryEmbedding``).

        All axes share one series of frequencies. h and w alternate on the first 44 pairs, and t has the last 20. After
        an image or video, positions continue from the larger of the height and width.
        """,
        128, Axial((10, 11, 11), 5e5, axis_map=((1, 2), (0,))), grid=f.video, tokens=DIAGONAL, after=(0, 1, 2),
        advance=(1, 2),
    ),
    "glm4v": Scheme(
        """GLM-4.1V's language model (arXiv 2507.01006; transformers ``Glm4vTextRotaryEmbedding``).

        It is like ``qwen2_vl``, but with interleaved pairs. By default, this preset rotates the whole head, like the
        model's default configuration. Published checkpoints rotate only the first half of a head. For them, pass
        ``rotary_dim=64`` with head_dim 128, which gives the axes 8, 12 and 12 pairs.
        """,
        128, Axial((2, 3, 3), axis_map="chunk"), grid=f.video, tokens=DIAGONAL, after=(0, 1, 2), advance=(1, 2),
    ),
    "z_image": Scheme(
        """Z-Image (arXiv 2511.22699; diffusers ``transformer_z_image.RopeEmbedder``), float64.

        The image comes first, followed by its text at (1 + i, 0, 0). The image is at (1 + L, h, w), where L is the
        length of the text. The base is 256. Text and image are padded to multiples of 32. Text padding continues the
        text's count, and image padding is at zero.
        """,
        128, Axial((2, 7, 7), 256.0), grid=f.video, tokens=Tokens(0, "axis", 0, 1), tokens_first=True, after=(0,),
    ),
    "hidream": Scheme(
        """HiDream-I1 (arXiv 2505.22705; diffusers ``HiDreamImageEmbedND``), float64.

        Positions are (0, h, w). The first axis has half of the pairs, and h and w each have a quarter. Text is at zero
        and comes after the image.
        """,
        128, Axial((2, 1, 1)), grid=f.video, tokens=Tokens(0, "zero"),
    ),
    "cogview4": Scheme(
        """CogView4 (diffusers ``CogView4RotaryPosEmbed``).

        h and w are the integers ⌊i · 256 / n⌋ (the option ``size`` replaces 256). Text comes first and is not
        rotated.
        """,
        128, Axial((1, 1)), pairs="half", grid=f.rounded_down, tokens=SKIP,
    ),
    "glm_image": Scheme(
        """GLM-Image (diffusers ``GlmImageRotaryPosEmbed``).

        Positions are (h, w), and pairs use the half layout. Text comes first and is not rotated.
        """,
        128, Axial((1, 1)), pairs="half", tokens=SKIP,
    ),
    "hunyuan_image": Scheme(
        """HunyuanImage 2.1 (diffusers ``HunyuanImageRotaryPosEmbed``).

        Positions are (h, w). The base is 256. Text comes after the image and is not rotated.
        """,
        128, Axial((1, 1), 256.0), tokens=SKIP,
    ),
    "hunyuan_video15": Scheme(
        """HunyuanVideo-1.5 (arXiv 2511.18870; diffusers ``HunyuanVideo15RotaryPosEmbed``).

        It is like HunyuanVideo: the base is 256, and unrotated text comes after the video.
        """,
        128, Axial((2, 7, 7), 256.0), grid=f.video, tokens=SKIP,
    ),
    "allegro": Scheme(
        """Allegro (arXiv 2410.15458; diffusers ``get_3d_rotary_pos_embed_allegro``).

        Each axis is divided by a factor (option ``by``). Within each axis's third of the channels, pairs use the half
        layout. Text enters through cross-attention and is not rotated.
        """,
        96, Axial((1, 1, 1)), pairs="blocks", grid=partial(f.divided, by=(2.2, 2.0, 2.0)),
    ),
    "kandinsky5": Scheme(
        """Kandinsky 5 (arXiv 2511.14993; diffusers ``Kandinsky5RoPE3D``).

        Each axis is divided by a factor (option ``by``): (1, 2, 2) for videos of 512 pixels. Text enters through
        cross-attention.
        """,
        64, Axial((2, 3, 3)), grid=f.divided,
    ),
    "sana_video": Scheme(
        """SANA-Video (arXiv 2509.24695; diffusers ``transformer_sana_video.WanRotaryPosEmbed``), float64.

        It is like Wan, but for linear attention. relu is applied to q and k before the rotation, and the normaliser
        uses the unrotated q and k.
        """,
        112, Axial((1, 1, 1), remainder=0), act="relu", grid=f.video,
    ),
    "chronoedit": Scheme(
        """ChronoEdit (arXiv 2510.04290; diffusers ``ChronoEditRotaryPosEmbed``), float64.

        It is like Wan, but with two frames, the image and its edit. They have the positions of the first and last of 8
        frames (option ``skip``).
        """,
        128, Axial((1, 1, 1), remainder=0), grid=f.two_apart,
    ),
    "ltx": Scheme(
        """LTX-Video (arXiv 2501.00103; diffusers ``LTXVideoRotaryPosEmbed``).

        The channels of all heads are treated as one vector. t, h and w alternate, each with frequencies from π/2 up to
        10000 π/2. The remaining pairs, at the front, are not rotated. Spans of 20 seconds and 2048
        pixels map to [-1, 1]. Options: ``fps``, ``steps`` and ``trained``. Text enters through cross-attention.
        """,
        64, Axial((1, 1, 1), series=f.rising, axis_map="alternate", remainder="front", across_heads=True),
        num_heads=32, grid=f.of_trained_video,
    ),
    "ltx2": Scheme(
        """LTX-2's video (arXiv 2601.03233; diffusers ``LTX2AudioVideoRotaryPosEmbed``).

        It is like LTX, but with the half layout within each head (``rope_type="split"``). Each position is the centre
        of the interval that a latent covers. The first latent covers a single frame. Options: ``fps``, ``steps``
        and ``trained``. Text enters through cross-attention.
        """,
        128, Axial((1, 1, 1), series=f.rising, axis_map="alternate", remainder="front", across_heads=True),
        pairs="half", num_heads=32, grid=f.causal_video,
    ),
    "ltx2_audio": Scheme(
        """LTX-2's audio (arXiv 2601.03233; diffusers ``LTX2AudioVideoRotaryPosEmbed``).

        The only axis is time. A span of 20 seconds maps to [-1, 1]. Each position is the centre of the interval that a
        latent covers: 4 frames of a spectrogram with 100 frames per second.
        """,
        64, Axial((1,), series=f.rising, remainder="front", across_heads=True), pairs="half", num_heads=32,
        grid=f.causal_audio,
    ),
    "ltx2_cross": Scheme(
        """LTX-2's attention between video and audio (arXiv 2601.03233; diffusers ``LTX2AudioVideoRotaryPosEmbed``).

        The only axis is time, in seconds. A shape (T, H, W) is a video, and (N,) is audio. Queries and keys have
        separate positions.
        """,
        64, Axial((1,), series=f.rising, remainder="front", across_heads=True), pairs="half", num_heads=32,
        grid=f.causal_time,
    ),
    "minimax_h3": Scheme(
        """MiniMax-H3 (diffusers ``MiniMaxH3RotaryPosEmbed``).

        The first three quarters of a head are rotated. Each axis has a third of them, and the half layout spans all
        three.
        """,
        128, Axial((1, 1, 1)), pairs="half", rotary=(0, 0.75), grid=f.video,
    ),
    "rope_1d": Scheme(
        """RoPE (arXiv 2104.09864): one axis for any shape, in the half layout, as in Llama (transformers).

        A video or image is read row by row, like text. Papers that compare encodings call this "vanilla RoPE".
        """,
        128, Axial((1,)), pairs="half", grid=f.sequence, tokens=LINE, after=(0,),
    ),
    "v2pe": Scheme(
        """V2PE (arXiv 2412.09616): one axis, on which an image is at most as long as ``stride`` text tokens.

        The tokens of an image are stride / n apart, and the next segment starts at the next whole number.
        """,
        128, Axial((1,)), pairs="half", grid=f.flattened, tokens=LINE, after=(0,), whole=True,
    ),
    "mrope_interleave": Scheme(
        """MRoPE-I (arXiv 2510.23095): frequencies as in ``qwen3_vl``, but an image's h and w start at zero.

        t continues from the tokens that precede the image. The next segment starts where it would start if h and w
        also continued from these tokens. The option ``stride`` scales t.
        """,
        128, Axial((6, 5, 5), 5e6, axis_map="stride"), pairs="half", grid=f.strided, tokens=DIAGONAL, after=(0,),
        advance=(0, 1, 2),
    ),
    "mhrope": Scheme(
        """MHRoPE (arXiv 2510.23095): each key head encodes one axis with all frequencies.

        Of 8 heads, 2, 3 and 3 encode t, h and w. Positions are the same as in ``mrope_interleave``.
        """,
        128, Axial((2, 3, 3), 5e6, axis_map="head"), pairs="half", num_heads=8, grid=f.strided, tokens=DIAGONAL,
        after=(0,), advance=(0, 1, 2),
    ),
    "videorope": Scheme(
        """VideoRoPE (arXiv 2502.05173; Wiselnn570/VideoRoPE): h and w alternate on the fast pairs; t has the slow ones.

        Frames lie on the diagonal: t = stride · i, and h and w are centred around t. The next segment starts after the
        last t.
        """,
        128, Axial((2, 3, 3), 1e6, axis_map=((1, 2), (0,))), pairs="half", grid=f.diagonal, tokens=DIAGONAL,
        after=(0, 1, 2), advance=(0,),
    ),
    "hope": Scheme(
        """HoPE (arXiv 2505.20444; hrlics/HoPE): VideoRoPE with all temporal frequencies set to zero.

        In training, each video had a random ``stride`` between 0.5 and 1.5.
        """,
        128,
        Axial((2, 3, 3), 1e6, axis_map=((1, 2), (0,)), scaling=(f.no_turn, None, None)), pairs="half",
        grid=partial(f.diagonal, stride=1), tokens=DIAGONAL, after=(0, 1, 2), advance=(0,),
    ),
    "circle_rope": Scheme(
        """Circle-RoPE (arXiv 2505.16416; lose4578/CircleRoPE): an image lies on a circle around the text's diagonal.

        All image tokens are at the same distance from a text token. The options are ``radius``, ``alpha`` (the weight
        of the angle, relative to the token's index), ``mix`` (the weight of the plane) and ``stride`` (between frames).
        """,
        128, Axial((2, 3, 3), 1e6, axis_map="chunk"), pairs="half", grid=f.circle, tokens=DIAGONAL, after=(0, 1, 2),
    ),
    "ilrope": Scheme(
        """Mogao's IL-RoPE (arXiv 2505.05472): frequencies as in ``qwen3_vl``, positions as in ``mrope_interleave``.

        Frame positions continue from the preceding tokens. h and w restart at zero in each frame.
        """,
        128, Axial((6, 5, 5), 1e4, axis_map="stride"), pairs="half", grid=f.strided, tokens=DIAGONAL, after=(0,),
        advance=(0, 1, 2),
    ),
    "omnirope": Scheme(
        """OmniGen2's Omni-RoPE (arXiv 2506.18871): sections as in ``qwen2_vl``.

        Positions are the same as in ``mrope_interleave``.
        """,
        128, Axial((2, 3, 3), 1e4, axis_map="chunk"), pairs="half", grid=f.strided, tokens=DIAGONAL, after=(0,),
        advance=(0, 1, 2),
    ),
    "mm_rope": Scheme(
        """MM-RoPE of Lumos-1 (arXiv 2507.08801): pairs of one series encode t t h w h w h w, repeatedly.

        The rest is like ``qwen2_vl``. Set ``scale=(4, 8, 8)`` if positions are counted in pixels.
        """,
        128, Axial((2, 3, 3), 1e4, axis_map=((0, 0, 1, 2, 1, 2, 1, 2),)), pairs="half", grid=f.scaled,
        tokens=DIAGONAL, after=(0, 1, 2),
    ),
}  # fmt: skip


# --- by name --------------------------------------------------------------------------------------------

REGISTERED: dict[str, Scheme] = {}  # registered by the user
RESERVED = ("cosine", "rotate", "mixed", "none")  # names of encodings in the backbones


def list_presets() -> list[str]:
    """Return the names that :func:`preset` accepts, including the schemes that you registered."""
    return [*SCHEMES, *REGISTERED]


def register_scheme(name: str, scheme: Scheme, *, overwrite: bool = False) -> None:
    """Register your own scheme, so that :func:`preset`, PresetMd and ``encoding=`` accept its name in this process.

    Args:
        name: any name except "cosine", "rotate", "mixed", "none" and the names of published schemes.
        scheme: scheme to register, which must be valid for its own head_dim.
        overwrite: whether to replace a scheme that you registered under the same name.

    Raises:
        TypeError: for an invalid name, or a value that is not a :class:`Scheme`.
        ValueError: for a name in use, or an invalid scheme. After an error, the scheme is not registered.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected a non-empty string, got {name!r}")
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme: expected an lrpe_md.Scheme, got {type(scheme).__name__}")
    if name in SCHEMES or name in RESERVED:
        raise ValueError(f"name: expected a name that is not used by a published preset or an encoding, got {name!r}")
    if name in REGISTERED and not overwrite:
        raise ValueError(f"name: expected an unregistered name, or overwrite=True, got {name!r}")
    make_preset(name, scheme, scheme.head_dim, scheme.num_heads)
    REGISTERED[name] = scheme


def find_scheme(scheme: str | Scheme) -> tuple[str, Scheme]:
    """Return the name and the scheme, given either of the two."""
    if isinstance(scheme, Scheme):
        names = (name for name, known in (*SCHEMES.items(), *REGISTERED.items()) if known is scheme)
        return next(names, "this scheme"), scheme
    known = {**SCHEMES, **REGISTERED}
    if not isinstance(scheme, str) or scheme not in known:
        found = repr(scheme) if isinstance(scheme, str) else type(scheme).__name__
        is_module = found in ("'rotate'", "'cosine'", "'mixed'")
        hint = f"; for {found}, use RotateMd or CosineMd" if is_module else suggest(scheme, known)
        raise ValueError(f"name: expected one of list_presets(), or an lrpe_md.Scheme, got {found}{hint}")
    return scheme, known[scheme]


def preset(
    scheme: str | Scheme,
    head_dim: int | None = None,
    num_heads: int | None = None,
    *,
    base: float | None = None,
    split: Sequence[int] | None = None,
    scaling: Scaling | Sequence[Scaling | None] | None = None,
    rotary_dim: int | slice | None = None,
    seed: int | None = None,
) -> Preset:
    """Build a scheme for a given head_dim.

    Args:
        scheme: a name from :func:`list_presets`, or a :class:`Scheme`.
        head_dim: number of channels per head, D. The default is the original model's.
        num_heads: number of key heads. The default is the original model's, or 1 if heads share ω. num_heads is
            required for rope_vit_mixed, mochi, transnormer and pope, whose frequencies or phases differ across heads.
        base, split, scaling: base of the series, each axis's share of the channels, and scaling to longer sequences or
            larger grids. The defaults are the scheme's. A scaling such as ``partial(yarn_scaling, factor=4,
            original_length=32768)`` applies to all axes. You can also pass one scaling per axis.
        rotary_dim: channels of a head to rotate, as a slice or as an int R for the first R channels. The default is the
            scheme's.
        seed: seed for random frequencies. The default is 0.

    Raises:
        ValueError: if a name is unknown, head_dim cannot be split among the axes, the scheme does not support an
            argument, or num_heads is missing.
    """
    name, scheme = find_scheme(scheme)
    head_dim = scheme.head_dim if head_dim is None else head_dim
    given, num_heads = num_heads, scheme.num_heads if num_heads is None else num_heads
    check_at_least(1, head_dim=head_dim, num_heads=num_heads)
    frequencies = scheme.frequencies
    changes: dict[str, Any] = {"base": base, "split": split, "scaling": scaling, "seed": seed}
    changes = {key: value for key, value in changes.items() if value is not None}
    for key in sorted(changes.keys() - frequencies.takes):
        raise ValueError(
            f"{key}: expected None, because {name} only accepts {join_names(sorted(frequencies.takes), 'and')}, "
            f"got {changes[key]!r}"
        )
    changes.pop("seed", None)
    if split is not None:
        check_split(split, frequencies.num_axes, f"{name}'s ")
        changes["split"] = tuple(split)
        frequencies = replace(frequencies, split=changes["split"])
    made = make_preset(name, scheme, head_dim, num_heads, changes=changes, rotary_dim=rotary_dim, seed=seed or 0)
    if given is None and num_heads == 1 and (made.phase or len(frequencies.build(made.omega.shape[1], 2, 0)[0]) > 1):
        raise ValueError(
            f"num_heads: expected the number of key heads, got None. Each head of {name} has its own "
            f"{'phase' if made.phase else 'frequencies'}, so pass num_heads= (1 is allowed)"
        )
    return made
