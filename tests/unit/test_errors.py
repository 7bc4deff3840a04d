"""User errors. Each one raises a clear message before anything is launched."""

import math

import pytest
import torch

import lrpe_md
from lrpe_md import (
    Coordinates,
    CosineMd,
    Grid,
    LinearAttention,
    PresetMd,
    Rotate1d,
    RotateMd,
    axial_omega,
    cosine,
    rotate,
)
from lrpe_md.engine.core import operator
from lrpe_md.engine.encode import launch
from lrpe_md.xpos import scale_xpos

x = torch.randn(2, 4, 12, 8)
omega = torch.rand(1, 8, 2)
pairs = torch.rand(1, 4, 2)
grid = Grid((3, 4))
theta = torch.rand(4)
GRID_HINT = r"positions: expected .*, got [([]3, 4[)\]]; for a grid of this size, pass Grid\(\(3, 4\)\), or "
PAIR = r"positions: expected a Grid, .*, got a list; .* pad\(\.\.\.\) or pack\(\.\.\.\), and for q and k, a tuple$"
ODD = r"head_dim: expected an even number, got 7. Channels .*rotary_dim="


def scheme_of(frequencies):
    return PresetMd(lrpe_md.Scheme("x", 8, frequencies))


BAD = {
    "shape product is not N": (ValueError, r"12 tokens.*3 x 5", lambda: cosine(x, omega=omega, positions=Grid((3, 5)))),
    "prefix is not counted": (ValueError, r"prefix 1", lambda: cosine(x, omega=omega, positions=Grid((3, 4), 1))),
    "shard of a different length": (
        ValueError, r"shard has 5", lambda: cosine(x, omega=omega, positions=Grid((3, 4), start=2, length=5)),
    ),
    "k·e < d": (ValueError, r"theta.*at least 4", lambda: lrpe_md.lrpe_cosine_md(x, theta[:3], shape=(3, 4))),
    "theta of no shape": (ValueError, r"theta", lambda: axial_omega(torch.rand(1, 2, 3), 8, 2)),
    "integer theta": (ValueError, r"theta", lambda: axial_omega(torch.ones(4, dtype=torch.int64), 8, 2)),
    "theta of rotate 1d": (
        ValueError, r"\(4,\), \(4,\) or \(4, 4\).*got \(3,\)", lambda: lrpe_md.lrpe_rotate_1d(x, torch.rand(3)),
    ),
    "odd rotary width": (
        ValueError, r"rotary_dim: expected an even", lambda: rotate(x, omega=pairs, positions=grid, rotary_dim=5),
    ),
    "rotary width beyond head_dim": (
        ValueError, r"rotary_dim", lambda: rotate(x, omega=pairs, positions=grid, rotary_dim=10),
    ),
    "rotary slice with a step": (
        ValueError, r"step 1", lambda: rotate(x, omega=pairs, positions=grid, rotary_dim=slice(0, 8, 2)),
    ),
    "odd rotary width of a module": (ValueError, r"rotary_dim", lambda: RotateMd(8, 2, rotary_dim=3)),
    "odd head_dim": (ValueError, ODD, lambda: rotate(x[..., :7], omega=pairs, positions=grid)),
    "odd head_dim of rotate 1d": (ValueError, ODD, lambda: lrpe_md.lrpe_rotate_1d(x[..., :7], torch.rand(3))),
    "odd head_dim of rotate md": (ValueError, ODD, lambda: lrpe_md.lrpe_rotate_md(x[..., :7], theta, shape=(3, 4))),
    "odd head_dim of Rotate1d": (ValueError, ODD, lambda: lrpe_md.Rotate1d(7)),
    "odd head_dim of RotateMd": (ValueError, ODD, lambda: RotateMd(7, 2)),
    "unknown act": (ValueError, r"act: .*'gelu'", lambda: cosine(x, omega=omega, positions=grid, act="gelu")),
    "unknown pairs": (ValueError, r"pairs", lambda: rotate(x, omega=pairs, positions=grid, pairs="third")),
    "blocks of pairs that are too few": (
        ValueError, r"pairs: .*add up to 4, got \(1, 2\)",
        lambda: rotate(x, omega=pairs, positions=grid, pairs=(1, 2)),
    ),
    "no pairs in a block": (
        ValueError, r"pairs: .*positive numbers of pairs", lambda: rotate(x, omega=pairs, positions=grid, pairs=(4, 0)),
    ),
    "pairs of a number": (ValueError, r"pairs: .*got 4", lambda: rotate(x, omega=pairs, positions=grid, pairs=4)),
    "unknown order": (ValueError, r"order: .*'sin'", lambda: cosine(x, omega=omega, positions=grid, order="sin")),
    "amplitude of another width": (
        ValueError, r"amplitude: .*\(H or 1, 8\).*got \(1, 4\)",
        lambda: cosine(x, omega=omega, positions=grid, amplitude=torch.ones(4)),
    ),
    "amplitude of other heads": (
        ValueError, r"amplitude: expected 1 head, or 2 like omega, got 4",
        lambda: cosine(x, omega=torch.rand(2, 8, 2), positions=grid, amplitude=torch.ones(4, 8)),
    ),
    "amplitude in bfloat16": (
        TypeError, r"amplitude: expected float32 or float64",
        lambda: cosine(x, omega=omega, positions=grid, amplitude=torch.ones(8, dtype=torch.bfloat16)),
    ),
    "amplitude of text": (
        TypeError, r"amplitude: expected a number or a tensor, got str",
        lambda: cosine(x, omega=omega, positions=grid, amplitude="1"),
    ),
    "positions of three tensors": (
        ValueError, r"positions: expected a pair \(for q, for k\), got 3 values",
        lambda: cosine(x, x, omega=omega, positions=(grid, grid, grid)),
    ),
    "no omega": (
        TypeError, r"omega: expected frequencies .*, got None", lambda: cosine(x, omega=None, positions=grid),
    ),
    "no x": (TypeError, r"x: expected a tensor.*NoneType", lambda: cosine(None, omega=omega, positions=grid)),
    "position ids (B, N)": (
        ValueError, r"positions: .*12 tokens.*position ids \(B, N\).*pass positions\[..., None\]",
        lambda: rotate(x, omega=torch.rand(1, 4, 1), positions=torch.arange(12).expand(2, 12)),
    ),
    "position ids (1, N)": (
        ValueError, r"positions: .*1 axis for this module, got 12.*pass positions\[..., None\]",
        lambda: Rotate1d(8)(x, positions=torch.arange(12)[None]),
    ),
    "positions of another batch": (
        ValueError, r"positions: expected coords \(B, N, K\) with B = 2 or 1, got \(3, 12, 1\)",
        lambda: Rotate1d(8)(x, positions=torch.zeros(3, 12, 1)),
    ),
    "no positions on one axis": (
        TypeError, r"positions: .* got None; for N tokens, pass positions=Grid\(\(N,\)\)$",
        lambda: RotateMd(8, 1)(x),
    ),
    "no positions on three axes": (
        TypeError, r"got None; for T x H x W patches, pass positions=Grid\(\(T, H, W\)\), or tables=",
        lambda: rotate(x, omega=torch.rand(1, 4, 3)),
    ),
    "no positions in linear attention": (
        ValueError, r"positions: .* got None; for N tokens, pass positions=Grid\(\(N,\)\)$",
        lambda: LinearAttention(RotateMd(8, 1, act="relu"))(x, x, x),
    ),
    "position ids (B, N) of a module": (
        ValueError, r"positions: .*1 axis for this module, got 12.*pass positions\[..., None\]",
        lambda: Rotate1d(8)(x, positions=torch.arange(12).expand(2, 12)),
    ),
    "as many samples as tokens": (
        ValueError, r"1 axis for this module, got 4.*pass positions\[..., None\]",
        lambda: Rotate1d(8)(torch.randn(4, 1, 4, 8), positions=torch.arange(4).expand(4, 4)),
    ),
    "positions (N,)": (
        ValueError, r"coords: .*got \(12,\); .*pass coords\[:, None\]",
        lambda: Rotate1d(8)(x, positions=torch.arange(12)),
    ),
    "tokens before heads": (
        ValueError, r"positions: expected 4 tokens .* = 12; x looks like \(B, N, H, D\), so pass x.transpose\(1, 2\)",
        lambda: cosine(x.transpose(1, 2), omega=omega, positions=grid),
    ),
    "tokens before heads, coordinates": (
        ValueError, r"positions: expected 4 tokens .* = 12; x looks like \(B, N, H, D\)",
        lambda: cosine(x.transpose(1, 2), omega=omega, positions=grid.coordinates()),
    ),
    "tokens before heads in a module": (
        ValueError, r"q: expected a number of heads divisible by num_heads=8 .*pass x.transpose\(1, 2\)",
        lambda: RotateMd(8, num_heads=8)(*2 * [torch.randn(2, 12, 8, 8)], positions=grid),
    ),
    "tokens before heads, tables": (
        ValueError, r"tables: expected at most 4 tokens .*pass x.transpose\(1, 2\)",
        lambda: rotate(x.transpose(1, 2), tables=(torch.rand(12, 4), torch.rand(12, 4))),
    ),
    "positions forgotten": (TypeError, r"positions: .*got None; .*pass positions=Grid", lambda: rotate(x, omega=pairs)),
    "positions of a module forgotten": (
        TypeError, r"positions: .*got None; .*pass positions=Grid\(\(H, W\)\)", lambda: RotateMd(8)(x, x),
    ),
    "positions of a preset forgotten": (TypeError, r"positions: .*got None", lambda: PresetMd("eva02", head_dim=8)(x)),
    "shape of a grid": (TypeError, GRID_HINT, lambda: rotate(x, x, omega=pairs, positions=(3, 4))),
    "shape of a grid, for one tensor": (TypeError, GRID_HINT, lambda: cosine(x, omega=omega, positions=[3, 4])),
    "shape of a grid in a module": (TypeError, GRID_HINT, lambda: RotateMd(8)(x, x, positions=(3, 4))),
    "shape of a grid in a preset's module": (
        TypeError, GRID_HINT, lambda: PresetMd("eva02", head_dim=8)(x, x, positions=(3, 4)),
    ),
    "shape of a grid in linear attention": (
        TypeError, GRID_HINT,
        lambda: lrpe_md.linear_attention(
            x, x, x, map="rotate", omega=pairs, positions=(3, 4), act="relu", normalizer="unrotated"
        ),
    ),
    "shape of a grid in xPos": (
        TypeError, r"pass Grid\(\(12,\)\)", lambda: Rotate1d(8, scale_base=512.0)(x, x, positions=(12,)),
    ),
    "shape of a grid in a pack": (
        TypeError, r"samples: .* at index 0, got \(3, 4\); .*pass Grid\(\(3, 4\)\)", lambda: lrpe_md.pack([(3, 4)]),
    ),
    "length as positions": (TypeError, r"got 12; .*Grid\(\(12,\)\)", lambda: Rotate1d(8)(x, positions=12)),
    "positions of nothing": (TypeError, r"positions: .*tuple", lambda: cosine(x, omega=omega, positions=())),
    "heads of k in a pair": (
        ValueError, r"omega: .*2 heads", lambda: rotate(x, x[:, :2], omega=torch.rand(4, 4, 2), positions=(grid, grid)),
    ),
    "k of another batch in a pair": (
        ValueError, r"k: expected q's batch size",
        lambda: rotate(x, x[:1], omega=pairs, positions=(grid, grid)),
    ),
    "a phase for k without k": (
        ValueError, r"phase: expected one value for one tensor, got 2 values",
        lambda: cosine(x, omega=omega, positions=grid, phase=(None, torch.zeros(1, 8))),
    ),
    "unknown impl": (ValueError, r"impl", lambda: cosine(x, omega=omega, positions=grid, impl="cuda")),
    "unknown axis order": (ValueError, r"axis_order", lambda: axial_omega(theta, 8, 2, axis_order="xy")),
    "unknown frequencies": (ValueError, r"frequencies", lambda: CosineMd(8, 2, frequencies="random")),
    "softmax without dim": (
        ValueError, r"dim: expected -1 .*softmax.*, got None",
        lambda: cosine(x, omega=omega, positions=grid, act="softmax"),
    ),
    "dim = 1": (
        ValueError, r"dim: expected -1", lambda: cosine(x, omega=omega, positions=grid, act="softmax", dim=1),
    ),
    "dim without softmax": (
        ValueError, r"dim: expected None", lambda: cosine(x, omega=omega, positions=grid, act="silu", dim=-1),
    ),
    "softmax over a shard": (
        ValueError, r"whole sequence",
        lambda: cosine(
            x[:, :, :5], omega=omega, positions=Grid((3, 4), start=2, length=5), act="softmax", dim=-2
        ),
    ),
    "theta on a different device": (
        ValueError, r"omega: expected a tensor on x's device cpu, got meta",
        lambda: cosine(x, omega=omega.to("meta"), positions=grid),
    ),
    "coords on a different device": (
        ValueError, r"coords on x's device cpu, got meta; .* device=x.device \(pack, pad, compose\), .* \.to\(\)$",
        lambda: cosine(x, omega=omega, positions=torch.empty(12, 2, device="meta")),
    ),
    "fewer tokens on the grid": (
        ValueError, r"3 x 3 \+ suffix 0 = 9; count tokens that are not on the grid in prefix= or suffix=$",
        lambda: cosine(x, omega=omega, positions=Grid((3, 3))),
    ),
    "integer x": (TypeError, r"x: expected float16.*int64", lambda: cosine(x.long(), omega=omega, positions=grid)),
    "x of three dimensions": (
        ValueError, r"\(B, H, N, D\), got \(4, 12, 8\)",
        lambda: cosine(x[0], omega=omega, positions=grid),
    ),
    "x no tensor": (TypeError, r"x: expected a tensor", lambda: cosine([1.0], omega=omega, positions=grid)),
    "three tensors": (TypeError, r"one tensor or two", lambda: cosine(x, x, x, omega=omega, positions=grid)),
    "no tensor": (TypeError, r"one tensor or two", lambda: cosine(omega=omega, positions=grid)),
    "k of a different dtype": (
        ValueError, r"k: expected q's dtype",
        lambda: cosine(x, x.half(), omega=omega, positions=grid),
    ),
    "k of a different length": (
        ValueError, r"k: expected q's batch size",
        lambda: cosine(x, x[:, :, :5], omega=omega, positions=grid),
    ),
    "omega in bfloat16": (TypeError, r"omega: .*16 bits", lambda: cosine(x, omega=omega.bfloat16(), positions=grid)),
    "omega of another width": (
        ValueError, r"omega: expected shape",
        lambda: cosine(x, omega=omega[:, :5], positions=grid),
    ),
    "omega without the axis of heads": (
        ValueError, r"omega: expected shape .*; pass omega\[None\]$",
        lambda: cosine(x, omega=omega[0], positions=grid),
    ),
    "omega of another number of axes": (ValueError, r"omega", lambda: cosine(x, omega=omega[..., :1], positions=grid)),
    "omega of 3 heads for 4": (
        ValueError, r"omega: .*divisor of x's 4 heads", lambda: cosine(x, omega=torch.rand(3, 8, 2), positions=grid),
    ),
    "omega no tensor": (TypeError, r"omega", lambda: cosine(x, omega=0.1, positions=grid)),
    "phase of another width": (
        ValueError, r"phase", lambda: cosine(x, omega=omega, positions=grid, phase=torch.rand(1, 4)),
    ),
    "phase of other heads": (
        ValueError, r"phase: expected 1 head, or 4 like omega",
        lambda: cosine(x, omega=torch.rand(4, 8, 2), positions=grid, phase=torch.rand(2, 8)),
    ),
    "positions no positions": (
        TypeError, r"positions: expected a Grid",
        lambda: cosine(x, omega=omega, positions=(3, 4)),
    ),
    "positions without their keyword": (
        TypeError,
        r"positions: expected a keyword argument, got Grid without a keyword after q and k; pass positions=\.\.\.",
        lambda: rotate(x, x, grid, omega=pairs),
    ),
    "positions without their keyword, one tensor": (
        TypeError, r"positions: expected a keyword argument, got Grid without a keyword after x;",
        lambda: cosine(x, grid, omega=omega),
    ),
    "coords without their keyword": (
        TypeError, r"positions: expected a keyword argument, got Tensor without a keyword after q and k;",
        lambda: cosine(x, x, torch.rand(12, 2), omega=omega),
    ),
    "omega without its keyword": (
        TypeError, r"omega: expected a keyword argument, got Tensor without a keyword after q and k; pass omega=",
        lambda: rotate(x, x, pairs, positions=grid),
    ),
    "both without their keywords": (
        TypeError,
        r"omega, positions: expected keyword arguments, got Tensor, Grid without .* omega=\.\.\., positions=",
        lambda: rotate(x, x, pairs, grid),
    ),
    "positions of a module without their keyword": (
        TypeError, r"positions: expected a keyword argument, got Grid without a keyword after q and k",
        lambda: RotateMd(8, 2)(x, x, grid),
    ),
    "a list as a pair of positions": (
        TypeError, PAIR, lambda: rotate(x, x, omega=pairs, positions=[grid, torch.rand(12, 2)]),
    ),
    "a list as a pair of positions of a module": (
        TypeError, PAIR, lambda: RotateMd(8, 2)(x, x, positions=[grid, grid]),
    ),
    "a list as a pair of positions of xPos": (
        TypeError, PAIR, lambda: scale_xpos(x, x, positions=[Grid((12,))] * 2, scale_base=512),
    ),
    "a list of coordinates": (
        TypeError, r"got list; for coordinates \(N, K\), pass Coordinates\(torch\.tensor\(\.\.\.\)\)$",
        lambda: rotate(x, x, omega=pairs, positions=[[0, 0], [0, 1]]),
    ),
    "an array of coordinates": (
        TypeError, r"positions: .*, got ndarray; pass Coordinates\(torch\.as_tensor\(\.\.\.\)\)$",
        lambda: rotate(x, x, omega=pairs, positions=torch.rand(12, 2).numpy()),
    ),
    "cu_seqlens for a module": (
        TypeError, r"^cu_seqlens: RotateMd doesn't accept .* it; for packed tokens, pass the whole result of .*pack as",
        lambda: RotateMd(8, 2)(x, x, positions=grid, cu_seqlens=torch.tensor([0, 12])),
    ),
    "an offset for a module": (
        TypeError, r"^offset: CosineMd doesn't accept .* it; to start a grid elsewhere, pass positions=Grid\(shape",
        lambda: CosineMd(8, 2)(x, x, positions=grid, offset=3),
    ),
    "a misspelt argument of a module": (
        TypeError, r"^position: PresetMd doesn't accept this argument when you call it \(did you mean 'positions'\?\)$",
        lambda: PresetMd("eva02", head_dim=8)(x, x, position=grid),
    ),
    "a causal mask for a linear attention module": (
        TypeError, r"^causal: LinearAttention doesn't accept .* when you build it; pass is_causal when you call it$",
        lambda: LinearAttention(causal=True),
    ),
    "a misspelt argument of a linear attention module": (
        TypeError, r"^causal: LinearAttention doesn't accept .* when you call it \(did you mean 'is_causal'\?\)$",
        lambda: LinearAttention()(x, x, x, causal=True),
    ),
    "a rule for a call of linear attention": (
        TypeError, r"^rule: LinearAttention doesn't accept .* when you call it; pass rule when you build it$",
        lambda: LinearAttention()(x, x, x, rule="delta"),
    ),
    "a bool as a number of tokens": (
        ValueError, "prefix: expected a non-negative integer, got True", lambda: Grid((3, 4), True),
    ),
    "a scale of a grid that is not finite": (
        ValueError, "scale: expected finite numbers, got nan", lambda: Grid((3, 4), scale=math.nan),
    ),
    "a shift of a grid that is not finite": (
        ValueError, "shift: expected finite numbers, got inf", lambda: grid.offset(math.inf),
    ),
    "an amplitude of a module that is not finite": (
        ValueError, "amplitude: expected finite numbers, got NaN", lambda: RotateMd(8, amplitude=math.nan),
    ),
    "a number of phase groups that is not an integer": (
        ValueError, "phase_groups: expected a positive integer, got nan", lambda: CosineMd(8, phase_groups=math.nan),
    ),
    "a number of frequencies that is not an integer": (
        ValueError, r"num: expected a positive integer, got 2\.5", lambda: lrpe_md.geometric_theta(2.5),
    ),
    "a sequence length that is not an integer": (
        ValueError, "seq_len: expected a positive integer, got '64'",
        lambda: lrpe_md.rope_frequencies({"rope_theta": 1e4}, 8, seq_len="64"),
    ),
    "a head_dim of a config that is not an integer": (
        ValueError, r"head_dim: expected a positive integer, got 8\.0",
        lambda: lrpe_md.rope_frequencies({"rope_theta": 1e4}, 8.0),
    ),
    "a tuple as the head_dim of a preset": (
        ValueError, r"head_dim: expected a positive integer, got \(64,\)", lambda: PresetMd("eva02", head_dim=(64,)),
    ),
    "a tuple as the number of heads of a preset": (
        ValueError, r"num_heads: expected a positive integer, got \(2,\)", lambda: lrpe_md.preset("eva02", 64, (2,)),
    ),
    "a layer instead of its weight": (
        TypeError, r"weight: expected a tensor of shape .*, got Linear",
        lambda: lrpe_md.convert_pairs(torch.nn.Linear(8, 8), "half", "interleaved", head_dim=8),
    ),
    "parameters instead of a model": (
        TypeError, "model: expected a module, got generator; pass the model itself",
        lambda: lrpe_md.parameter_groups(torch.nn.Linear(8, 8).parameters(), 1e-3),
    ),
    "a number as the samples of a batch": (
        TypeError, "samples: expected a list with one layout per sample", lambda: lrpe_md.pack(4),
    ),
    "a tuple as the number of padded tokens": (
        ValueError, r"num_tokens: expected at least 12, .* got \(12,\)", lambda: lrpe_md.pad([grid], (12,)),
    ),
    "a number as the grid of windows": (
        ValueError, r"window: expected a positive size for each of the 1 axes, got \[2, 2\]",
        lambda: lrpe_md.window_order(4, [2, 2]),
    ),
    "a seed that is not an integer": (
        ValueError, r"seed: expected an integer, got 0\.5", lambda: RotateMd(8, seed=0.5),
    ),
    "a mask as is_causal": (
        TypeError, "is_causal: expected True or False, got a Tensor; for a mask of blocks, such as frames, pass block=",
        lambda: LinearAttention()(x, x, x, is_causal=torch.ones(12, 12, dtype=torch.bool)),
    ),
    "a name as is_causal": (
        TypeError, "is_causal: expected True or False, got 'frames'; for",
        lambda: lrpe_md.linear_attention(x, x, x, map=None, is_causal="frames"),
    ),
    "a name as return_state": (
        TypeError, "return_state: expected True or False, got 'no'",
        lambda: lrpe_md.linear_attention(x, x, x, map=None, return_state="no"),
    ),
    "a tensor as return_state": (
        TypeError, "return_state: expected True or False, got a Tensor",
        lambda: LinearAttention()(x, x, x, return_state=torch.tensor(True)),
    ),
    "a name as inverse": (
        TypeError, "inverse: expected True or False, got 'no'", lambda: RotateMd(8)(x, positions=grid, inverse="no"),
    ),
    "a tensor as inverse": (
        TypeError, "inverse: expected True or False, got a Tensor",
        lambda: RotateMd(8)(x, positions=grid, inverse=torch.tensor(True)),
    ),
    "a list of tokens to take": (
        TypeError, r"index: expected a tensor of shape \(n,\) or \(B, n\), got list", lambda: grid.take([0, 1]),
    ),
    "q and k for a function of one tensor": (
        TypeError, r"x: expected a tensor of shape \(B, H, N, D\), got tuple",
        lambda: lrpe_md.lrpe_rotate_md((x, x), theta, shape=(3, 4)),
    ),
    "names as axes of a segment": (
        ValueError, r"segments: expected axes from 0 to 1, got \('h', 'w'\) at index 0",
        lambda: lrpe_md.compose(lrpe_md.After(grid, axes="hw")),
    ),
    "a float as a window": (
        ValueError, "window: expected a positive size for each of the 2 axes, got 2.0",
        lambda: lrpe_md.window_order((4, 4), 2.0),
    ),
    "positions of a module on one axis": (
        ValueError, r"positions: expected 2 axes for this module, got 1; build the module with num_axes=1$",
        lambda: RotateMd(8, 2)(x, positions=Grid((12,))),
    ),
    "positions of a module on one axis and without the prefix": (
        ValueError, r"2 axes for this module, got 1; build the module with num_axes=1$",
        lambda: RotateMd(8, 2)(x, positions=Grid((10,))),
    ),
    "positions of a module with axes first": (
        ValueError, r"2 axes for this module, got 12; for coordinates \(K, N\), pass positions.mT$",
        lambda: RotateMd(8, 2)(x[:1], positions=torch.rand(2, 12)),
    ),
    "query heads as num_heads, without the prefix": (
        ValueError, r"x: expected a number of heads divisible by num_heads=3 .*; build the module with num_heads=4$",
        lambda: RotateMd(8, 2, num_heads=3)(x, positions=Grid((2, 5))),
    ),
    "positions of Rotate1d on two axes": (
        ValueError, r"1 axis for this module, got 2; use RotateMd\(head_dim, num_axes=2\)$",
        lambda: Rotate1d(8)(x, positions=grid),
    ),
    "positions of a module in linear attention": (
        ValueError, r"positions: expected 2 axes for this module, got 1; build the module with num_axes=1$",
        lambda: LinearAttention(RotateMd(8, 2, act="relu"))(x, x, x, positions=Grid((12,))),
    ),
    "packed positions of Rotate1d in linear attention": (
        ValueError, r"1 axis for this module, got 2; use RotateMd",
        lambda: LinearAttention(Rotate1d(8, act="relu"))(*3 * [x[:1]], positions=lrpe_md.pack([grid])),
    ),
    "head_dim of a module in linear attention": (
        ValueError, r"q: expected head_dim=6, got 8 .*; build the module with head_dim=8$",
        lambda: LinearAttention(RotateMd(6, 2, act="relu"))(x, x, x, positions=grid),
    ),
    "positions of a scheme on another number of axes": (
        ValueError, r"2 axes for this module, got 1; use a scheme with 1 axis$",
        lambda: PresetMd("eva02", head_dim=8)(x, positions=Grid((12,))),
    ),
    "positions of an image for a video scheme": (
        ValueError, r"3 axes for this module, got 2; pass module.positions\(2, \(2, 5\)\)$",
        lambda: PresetMd("flux1", head_dim=32)(torch.rand(1, 1, 12, 32), positions=Grid((2, 5), prefix=2)),
    ),
    "coordinates of an image for a video scheme": (
        ValueError, r"3 axes for this module, got 2; pass coordinates on 3 axes, or module.positions\(\.\.\.\)$",
        lambda: PresetMd("flux1", head_dim=32)(torch.rand(1, 1, 12, 32), positions=torch.rand(12, 2)),
    ),
    "a list as positions for different lengths": (
        ValueError, r"k: .*different lengths, pass a tuple of positions \(for q, for k\)$",
        lambda: RotateMd(8, 2)(x, x[:, :, :6], positions=[grid, Grid((2, 3))]),
    ),
    "a function of omega with too few arguments": (
        TypeError, r"frequencies: expected a function \(channels, heads, seed\), got <function .* takes 1 pos",
        lambda: RotateMd(8, 2, frequencies=lambda channels: pairs),
    ),
    "omega of a function with one axis": (
        ValueError, r"frequencies: expected a function that returns a tensor of shape \(1, 4, 2\), got \(1, 4, 1\)",
        lambda: RotateMd(8, 2, frequencies=lambda channels, heads, seed: torch.zeros(1, channels, 1)),
    ),
    "omega of a function with heads and one axis": (
        ValueError, r"frequencies: .* returns a tensor of shape \(1, 4, 2\) or \(3, 4, 2\), got \(1, 4, 1\)",
        lambda: RotateMd(8, 2, num_heads=3, frequencies=lambda channels, heads, seed: torch.zeros(1, channels, 1)),
    ),
    "omega of a function in 16 bits": (
        TypeError, r"frequencies: expected float32 or float64 .*, got torch.bfloat16$",
        lambda: RotateMd(8, 2, frequencies=lambda channels, heads, seed: pairs.bfloat16()),
    ),
    "omega of a function with NaN": (
        ValueError, r"frequencies: expected finite numbers, got NaN or infinity$",
        lambda: RotateMd(8, 2, frequencies=lambda channels, heads, seed: pairs * math.nan),
    ),
    "omega of a function with a gradient": (
        ValueError, r"frequencies: expected a tensor that doesn't require gradients.* To learn the frequencies, pass",
        lambda: RotateMd(8, 2, frequencies=lambda channels, heads, seed: pairs.clone().requires_grad_()),
    ),
    "omega of a function as an array": (
        TypeError, r"frequencies: expected a function that returns a tensor, got ndarray from <function",
        lambda: RotateMd(8, 2, frequencies=lambda channels, heads, seed: pairs.numpy()),
    ),
    "a tensor instead of a function": (
        ValueError, r"frequencies: .*, got a Tensor; pass a function that returns this tensor$",
        lambda: RotateMd(8, 2, frequencies=pairs),
    ),
    "theta of Rotate1d in 16 bits": (
        TypeError, r"theta: expected float32 or float64 .*, got torch.float16$",
        lambda: Rotate1d(8, theta=theta.half()),
    ),
    "theta of Rotate1d with infinity": (
        ValueError, r"theta: expected finite numbers, got NaN or infinity$",
        lambda: Rotate1d(8, theta=theta / 0),
    ),
    "a scheme's series with NaN": (
        ValueError, r"^frequencies: expected finite numbers, got NaN or infinity$",
        lambda: scheme_of(lrpe_md.Axial((1, 1), series=lambda num, base, heads: torch.full((num,), math.nan))),
    ),
    "a scheme's series with a gradient": (
        ValueError, r"^frequencies: expected a tensor that doesn't require gradients",
        lambda: scheme_of(lrpe_md.Axial((1, 1), series=lambda num, base, heads: torch.ones(num, requires_grad=True))),
    ),
    "a scheme's series of two arguments": (
        TypeError, r"series: expected a function \(num, base, num_heads\), got .* takes 2 positional arguments but 3",
        lambda: scheme_of(lrpe_md.Axial((1, 1), series=lambda num, base: torch.ones(num))),
    ),
    "a geometric series without a base": (
        ValueError, r"^base: expected a positive number for a geometric series, got None$",
        lambda: lrpe_md.Axial((1, 1), base=None),
    ),
    "a scheme's series in 16 bits": (
        TypeError, r"series: expected float32 or float64 .*, got torch.bfloat16$",
        lambda: scheme_of(lrpe_md.Axial((1, 1), series=lambda num, base, heads: torch.ones(num).bfloat16())),
    ),
    "a longer series of a scheme": (
        ValueError, r"^series: expected a function that returns a tensor of shape \(2,\) or \(1, 2\), got \(3,\)$",
        lambda: scheme_of(lrpe_md.Axial((1, 1), series=lambda num, base, heads: torch.ones(num + 1))),
    ),
    "a scheme's omega in 16 bits": (
        TypeError, r"omega: expected float32 or float64 .*, got torch.float16$",
        lambda: scheme_of(lrpe_md.Dense(2, lambda channels, heads, base, generator: pairs.half(), 10.0)),
    ),
    "a scheme's omega without heads": (
        ValueError, r"^omega: expected a function that returns a tensor of shape \(1, 4, 2\), got \(4, 2\)$",
        lambda: scheme_of(lrpe_md.Dense(2, lambda channels, heads, base, generator: pairs[0], 10.0)),
    ),
    "a tensor instead of a series": (
        ValueError, r"series: expected a function, got a Tensor$", lambda: lrpe_md.Axial((1, 1), series=theta),
    ),
    "a scheme instead of head_dim": (
        ValueError, r"head_dim: expected a positive integer, got a Scheme$",
        lambda: RotateMd(lrpe_md.Scheme("x", 8, lrpe_md.Axial((1, 1)))),
    ),
    "coords of a different length": (
        ValueError, r"positions: expected 12 tokens.* = 11; .*without coordinates .*Coordinates\(coords, prefix=1\)$",
        lambda: cosine(x, omega=omega, positions=torch.rand(11, 2)),
    ),
    "coords of too many tokens": (
        ValueError, r"positions: expected 12 tokens.* = 13$",
        lambda: cosine(x, omega=omega, positions=torch.rand(13, 2)),
    ),
    "coords with rows for the prefix": (
        ValueError, r"prefix 1 \+ coords \(12, 2\) .* = 13; prefix and suffix tokens have no coordinates, so leave out",
        lambda: cosine(x, omega=omega, positions=Coordinates(torch.rand(12, 2), prefix=1)),
    ),
    "axes before tokens": (
        ValueError, r"coords \(3, 12\) .* = 3; for coordinates \(K, N\), pass positions.mT$",
        lambda: rotate(x, omega=torch.rand(1, 4, 3), positions=torch.rand(3, 12)),
    ),
    "axes before tokens in a module": (
        ValueError, r"3 axes for this module, got 12; for coordinates \(K, N\), pass positions.mT$",
        lambda: RotateMd(16, 3)(torch.randn(2, 4, 12, 16), positions=torch.rand(2, 3, 12)),
    ),
    "a tensor in a pack": (
        TypeError, r"samples: .* at index 0, got a Tensor; pass Coordinates\(tensor\)$",
        lambda: lrpe_md.pack([torch.rand(3, 2)]),
    ),
    "a tensor in a composition": (
        TypeError, r"segments: .* at index 1, got a Tensor; pass Coordinates\(tensor\)$",
        lambda: lrpe_md.compose(lrpe_md.Tokens(1), torch.rand(3, 2)),
    ),
    "a number in a composition": (
        TypeError, r"segments: .* at index 0, got 3; pass Tokens\(3\)$", lambda: lrpe_md.compose(3, grid),
    ),
    "a flat projection": (
        ValueError, r"qkv: .*, got \(2, 12, 96\); .* pass qkv.unflatten\(-1, \(3, H, D\)\)$",
        lambda: RotateMd(8)(qkv=torch.rand(2, 12, 96), positions=grid),
    ),
    "a flat projection with key heads": (
        ValueError, r"num_key_heads: .*, got 5; .* pass qkv.unflatten\(-1, \(-1, D\)\)$",
        lambda: RotateMd(8)(qkv=torch.rand(2, 12, 96), num_key_heads=5, positions=grid),
    ),
    "coords of another batch": (
        ValueError, r"B = 2", lambda: cosine(x, omega=omega, positions=torch.rand(3, 12, 2)),
    ),
    "coords of one dimension": (ValueError, r"coords", lambda: Coordinates(torch.rand(12))),
    "coords of bools": (TypeError, r"coords", lambda: Coordinates(torch.ones(12, 2, dtype=torch.bool))),
    "negative size": (ValueError, r"shape", lambda: Grid((3, -1))),
    "negative prefix": (ValueError, r"prefix", lambda: Grid((3, 4), prefix=-1)),
    "scale of a different length": (
        ValueError, r"scale: expected a number for each of the 2",
        lambda: Grid((3, 4), scale=(1, 2, 3)),
    ),
    "shard beyond the end": (ValueError, r"start, length", lambda: Grid((3, 4), start=5, length=8)),
    "sizes of a grid as arguments": (
        TypeError, r"shape: expected a tuple of sizes, got 3 with prefix=4, .*pass Grid\(\(3, 4\)\) for several axes",
        lambda: Grid(3, 4),
    ),
    "three sizes of a grid as arguments": (TypeError, r"pass Grid\(\(2, 3, 4\)\)", lambda: Grid(2, 3, 4)),
    "float size": (ValueError, r"shape: expected a non-negative integer", lambda: Grid((2.0, 2.0))),
    "no axis": (ValueError, r"at least one axis", lambda: cosine(x, omega=omega[..., :0], positions=torch.rand(12, 0))),
    "cache of a different shape": (
        ValueError, r"theta_cache: expected shape \(1, 12, 8\)",
        lambda: lrpe_md.lrpe_cosine_md_cache_bwd_triton(
            torch.cat([x, x], -1), x, theta, torch.zeros(1, 1, 1), shape=(3, 4)
        ),
    ),
    "unknown act of a module": (ValueError, r"act: .*'gelu'", lambda: CosineMd(8, 2, act="gelu")),
    "unknown act of a rotating module": (ValueError, r"act: .*'gelu'", lambda: lrpe_md.Rotate1d(8, act="gelu")),
    "softmax of a module without dim": (ValueError, r"dim: expected -1", lambda: RotateMd(8, 2, act="softmax")),
    "dim of a module without softmax": (
        ValueError, r"dim: expected None for act='silu'", lambda: CosineMd(8, 2, act="silu", dim=-1),
    ),
    "pairs of a module": (ValueError, r"pairs: .*'third'", lambda: RotateMd(8, 2, pairs="third")),
    "blocks of pairs of a module": (
        ValueError, r"pairs: .*add up to 2, got \(3,\)", lambda: RotateMd(8, 2, pairs=(3,), rotary_dim=4),
    ),
    "impl of a module": (ValueError, r"impl: .*'cuda'", lambda: CosineMd(8, 2, impl="cuda")),
    "act of a preset's module": (
        ValueError, r"act: .*'gelu'", lambda: lrpe_md.PresetMd(lrpe_md.preset("wan"), act="gelu"),
    ),
    "frequencies instead of a preset": (
        TypeError, r"preset: expected a name, a Scheme or the result of lrpe_md.preset\(name, head_dim\), got Axial",
        lambda: lrpe_md.PresetMd(lrpe_md.preset("wan").scheme.frequencies),
    ),
    "a module instead of a preset": (
        ValueError, r"got 'rotate'; for 'rotate', use RotateMd or CosineMd$", lambda: lrpe_md.preset("rotate", 64),
    ),
    "axis order of a module": (ValueError, r"axis_order", lambda: CosineMd(8, 2, axis_order="xy", learnable=True)),
    "rotary width beyond a module's head_dim": (ValueError, r"rotary_dim", lambda: RotateMd(8, 2, rotary_dim=100)),
    "base of a module": (ValueError, r"base: .*number, got '100'", lambda: RotateMd(32, 2, base="100")),
    "base of mixed frequencies": (
        ValueError, r"base: .*number, got 'x'", lambda: RotateMd(32, 2, base="x", frequencies="mixed"),
    ),
    "reference grid": (
        TypeError, r"reference: expected a size, or one for each of the 2 axes, got a Grid; pass its shape",
        lambda: grid.interpolate(Grid((14, 14))),
    ),
    "reference of text": (TypeError, r"reference: .* got str$", lambda: grid.interpolate("14")),
    "a scheme's grid": (
        TypeError, r"grid: expected a function that returns a Grid or Coordinates, got tuple from ",
        lambda: lrpe_md.preset(lrpe_md.Scheme("x", 64, lrpe_md.Axial((1, 1)), grid=lambda s: s)).positions((3, 4)),
    ),
    "no heads": (ValueError, r"num_heads", lambda: CosineMd(8, 2, num_heads=0)),
    "tokens before heads in q and k": (
        ValueError, r"got shape \(2, 12, 2, 8\); for \(B, N, H, D\), pass q\.transpose\(1, 2\)",
        lambda: lrpe_md.Rotate1d(8)(torch.rand(2, 12, 4, 8), torch.rand(2, 12, 2, 8)),
    ),
    "offset of a float": (ValueError, r"offset", lambda: lrpe_md.lrpe_rotate_1d(x, theta, offset=1.5)),
    "float offset": (ValueError, r"offset", lambda: lrpe_md.lrpe_rotate_1d(x, theta, offset=torch.rand(2))),
    "frequencies in bfloat16": (TypeError, r"dtype", lambda: CosineMd(8, 2, dtype=torch.bfloat16)),
    "dO of a different shape": (
        ValueError, r"do: expected shape \(2, 4, 12, 16\)",
        lambda: lrpe_md.lrpe_cosine_md_bwd_triton(x, x, theta, shape=(3, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_clear_error(name, monkeypatch):
    kind, message, call = BAD[name]

    def launched(*args, **kwargs):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(launch, "run_launch", launched)
    with pytest.raises(kind, match=message) as error:
        call()
    assert type(error.value) is kind


def test_triton_on_a_cpu_tensor_without_the_interpreter(monkeypatch):
    monkeypatch.setattr(operator, "INTERPRETING", False)
    with pytest.raises(ValueError, match=r"impl: 'triton' needs tensors on a GPU.*cpu"):
        cosine(x, omega=omega, positions=grid, impl="triton")
    with pytest.raises(ValueError, match="'triton' needs tensors on a GPU"):
        lrpe_md.lrpe_cosine_md_fwd_triton(x, theta, shape=(3, 4))


def test_auto_warns_once_without_triton(monkeypatch):
    """On a GPU without triton, the reference runs after one warning."""
    monkeypatch.setattr(operator, "HAS_TRITON", False)

    class OnGpu:
        is_cuda = True

    with pytest.warns(RuntimeWarning, match="triton is not installed"):
        assert not operator.use_triton("auto", OnGpu(), ())
    with pytest.raises(ValueError, match="triton package"):
        operator.use_triton("triton", OnGpu(), ())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: RotateMd(8)(x, positions=grid, norm=lrpe_md.Norm(t)),
            "norm.kind: .*, got a Tensor; pass Norm(kind, weight)",
        ),
        (lambda t: RotateMd(8)(x, positions=grid, norm=lrpe_md.Norm(over=t)), "norm.over: .*, got a Tensor"),
        (lambda t: RotateMd(8, axis_order=t), "axis_order: .*, got a Tensor"),
        (lambda t: RotateMd(8, act=t), "act: .*, got a Tensor"),
        (lambda t: RotateMd(8)(x, positions=grid, num_key_heads=t), "num_key_heads: .*, got a Tensor"),
        (lambda t: RotateMd(8, rotary_dim=t), "rotary_dim: .*, got a Tensor"),
        (lambda t: LinearAttention(t), "encoding: .*, got a Tensor; pass a module such as "),
        (lambda t: LinearAttention(RotateMd(8, act="relu"), eps=t), "eps: .*, got a Tensor"),
        (lambda t: Grid(t), "shape: .*, got a Tensor; pass Coordinates"),
        (lambda t: Grid((2, 3), prefix=t), "prefix: .*, got a Tensor"),
        (lambda t: Grid((2, 3)).interpolate(t), "reference: .*, got a Tensor"),
        (lambda t: Coordinates(t, suffix=t), "suffix: .*, got a Tensor"),
    ],
)
def test_errors_do_not_print_tensors(call, message):
    with pytest.raises((ValueError, TypeError), match=message.replace("(", r"\(").replace(")", r"\)")) as info:
        call(torch.rand(64, 2))
    assert "\n" not in str(info.value)
