"""Invalid arguments of :func:`lrpe_md.linear_attention`. Each one raises a clear error before anything runs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lrpe_md import Coordinates, Grid, linear_attention
from lrpe_md.engine.linear.operator import ATTEND

Q = torch.randn(2, 4, 7, 8)
K = torch.randn(2, 2, 7, 8)
OMEGA = torch.rand(1, 8, 2)
S, SUMS = torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 8)
GRID = Grid((2, 3), prefix=1)
VIDEO = Grid((3, 2), prefix=1)
ONE = {"q": Q[:1], "k": K[:1], "v": K[:1]}
TEXT = Grid((7,))
CU = torch.tensor([0, 3, 7])


def call(**changes):
    options = {"q": Q, "k": K, "v": K, "omega": OMEGA, "positions": GRID, **changes}
    q, k, v = (options.pop(name) for name in ("q", "k", "v"))
    return linear_attention(q, k, v, **options)


ERRORS = {
    # q, k and v
    r"q: expected a tensor of shape \(B, H, N, D\), got list": {"q": [1.0]},
    r"q: expected shape \(B, H, N, D\), got \(2, 4, 7\)": {"q": Q[..., 0]},
    r"q: expected float16, .*, got torch.int64": {"q": Q.long()},
    r"k: expected q's dtype and device, torch.float32 on cpu, got torch.float64": {"k": K.double()},
    r"k: expected q's batch size, number of tokens and head_dim, \(2, 7, 8\), got shape \(2, 2, 6": {"k": K[:, :, :6]},
    r"k: expected a number of heads that divides q's 4 \(GQA\), got 3": {
        "k": K[:, [0, 1, 1]], "v": K[:, [0, 1, 1]],
    },
    r"v: expected k's batch, heads and tokens, \(2, 2, 7\), .* got \(2, 4, 7, 8\)": {"v": Q},
    r"v: expected k's batch, heads and tokens, \(2, 2, 7\), .* got \(2, 2, 6, 8\)": {"v": K[:, :, :6]},
    r"v: expected a tensor of shape \(B, H, N, D_v\), got NoneType": {"v": None},
    r"v: expected a positive head_dim, got \(2, 2, 7, 0\)": {"v": K[..., :0]},
    r"v: expected q's dtype and device, torch.float32 on cpu, got torch.bfloat16": {"v": K.bfloat16()},
    # the map
    r"map: expected 'cosine', 'rotate' or None, got 'none'": {"map": "none"},
    r"omega: expected a tensor of shape \(H or 1, channels or pairs, axes\) with map=.*, got None": {"omega": None},
    r"omega: expected shape .* = \(H or 1, 4, 2\), got \(1, 8, 2\)": {"map": "rotate"},
    r"omega: expected None with map=None, which has no angles, got Tensor": {"map": None},
    r"phase: expected None with map=None": {"map": None, "omega": None, "phase": OMEGA[..., 0]},
    r"positions: expected a Grid, Coordinates or coordinates with map='cosine', got None": {"positions": None},
    r"positions: expected 7 tokens \(x's N\), got .* = 6": {"positions": Grid((2, 3))},
    r"positions: expected 7 tokens \(x's N\), got prefix 0 \+ coords \(6, 2\)": {"positions": torch.zeros(6, 2)},
    r"positions: expected a pair \(for q, for k\), got 1 values": {"positions": (GRID,)},
    r"phase: expected a pair \(for q, for k\), got 3 values": {"phase": (None, None, None)},
    r"phase: expected one group, shape \(H or 1, channels or pairs\), got \(2, 1": {"phase": torch.zeros(2, 1, 8)},
    r"act: expected one of \('none', 'relu', .*, got 'gelu'": {"act": "gelu"},
    r"dim: expected -1 \(features\) or -2 \(sequence\) for act='softmax', got None": {"act": "softmax"},
    r"order: expected one of .*, got 'sin'": {"order": "sin"},
    r"rotary_dim: expected a width from 1 to head_dim = 8, got 999": {"rotary_dim": 999},
    r"rotary_dim: expected a number of channels, a slice or None, got 'x'": {"rotary_dim": "x"},
    r"rotary_dim: expected a number of channels, a slice or None, got True": {"rotary_dim": True},
    r"rotary_dim: expected a number of channels, a slice or None, got 4.0": {"rotary_dim": 4.0},
    r"omega: expected shape .* = \(H or 1, 5, 2\), got \(1, 8, 2\)": {"rotary_dim": 5},
    r"state: expected \(S, Σ\) of shapes \[\(2, 2, 12, 8\), \(2, 2, 8\)\], .*, got": {
        "rotary_dim": 4, "omega": OMEGA[:, :4], "state": (S, SUMS),
    },
    # options that have no meaning here
    r"pairs: expected the default, 'half', because map='cosine' .*, got 'interleaved'; leave out pairs": {
        "pairs": "interleaved",
    },
    r"pairs: expected the default, 'half', because map='cosine' .*, got \(8,\)": {"pairs": (8,)},
    r"order: expected the default, 'cos_sin', because map='rotate' .*, got 'sin_cos'": {
        "map": "rotate", "omega": OMEGA[:, :4], "order": "sin_cos",
    },
    **{
        rf"{name}: expected the default, .*, because map=None .*, got {value!r}": {
            "map": None, "omega": None, name: value,
        }
        for name, value in (("pairs", "third"), ("order", "sin_cos"), ("rotary_dim", 8), ("rotary_dim", "x"))
    },
    # normaliser
    r"normalizer: expected one of \('unrotated', 'encoded', 'none'\), got 'l2'": {"normalizer": "l2"},
    r"normalizer: 'unrotated' .* needs .* never negative, one of \('relu', .*\), got act='silu'": {"act": "silu"},
    r"normalizer: 'unrotated' .* needs .*, got act='none'": {"act": "none"},
    r"eps: expected a finite positive number, got 0": {"eps": 0},
    r"eps: expected a finite positive number, got nan": {"eps": float("nan")},
    r"eps: expected a finite positive number, got inf": {"eps": float("inf")},
    r"amplitude: expected a finite number, got inf": {"amplitude": float("inf")},
    r"impl: expected one of .*, got 'cuda'": {"impl": "cuda"},
    # gate
    r"gate: expected a boolean or floating-point tensor, got torch.int64": {"gate": torch.ones(2, 1, 7).long()},
    r"gate: expected shape \(B, H_k or 1, N\) = \(2, 2 or 1, 7\), .*, got \(2, 7\)": {"gate": torch.ones(2, 7)},
    r"gate: expected shape \(B, H_k or 1, N\) = \(2, 1, 7\), .*, got \(2, 2, 7\)": {
        "k": K[:, :1], "v": K[:, :1], "gate": torch.ones(2, 2, 7),
    },
    r"gate: expected .*, got \(2, 4, 7\)": {"gate": torch.ones(2, 4, 7)},
    r"gate: expected .*, got \(1, 1, 7\)": {"gate": torch.ones(1, 1, 7)},
    r"gate: expected a tensor of shape \(B, H_k or 1, N\), got float": {"gate": 0.5},
    r"gate: expected a tensor on k's device cpu, got meta": {"gate": torch.ones(2, 1, 7, device="meta")},
    # masks
    r"block: expected a divisor of 6, the number of tokens between prefix and suffix, got 4; for a video": {"block": 4},
    r"block: .*, got 4; .*, and for tokens before the first block, pass Coordinates\(\.\.\., prefix=\)": {
        "block": 4, "positions": torch.zeros(7, 2),
    },
    r"block: expected a positive integer, .*, got 0": {"block": 0},
    r"block: expected a positive integer, .*, got True": {"block": True},
    r"block: expected a positive integer, .*, got 2.0": {"block": 2.0},
    r"is_causal: expected False with block=, .*, got True": {"block": 3, "is_causal": True},
    r"block: expected each shard to contain whole blocks of 3 tokens .*, got tokens 2 to 7 after a prefix of 1": {
        "q": Q[:, :, :5], "k": K[:, :, :5], "v": K[:, :, :5], "positions": Grid((2, 3), prefix=1, start=2), "block": 3,
    },
    r"block: expected each shard to contain whole blocks of 3 tokens .*, got tokens 0 to 6": {
        "q": Q[:, :, :6], "k": K[:, :, :6], "v": K[:, :, :6], "positions": Grid((2, 3), prefix=1, length=6), "block": 3,
    },
    r"block: expected each shard to contain whole blocks of 3 tokens .*, got tokens 1 to 8": {
        "positions": Grid((2, 3), prefix=1, suffix=2, start=1, length=7), "block": 3,
    },
    r"block: expected each shard to contain whole blocks of 3 tokens .*, got tokens 1 to 8 after a prefix of 2": {
        "positions": Grid((2, 3), prefix=2, start=1, length=7), "block": 3,
    },
    r"positions: expected the same positions for q and k with block, got a pair": {
        "positions": (GRID, GRID), "block": 3,
    },
    r"positions: expected the same positions for q and k with is_causal, got a pair": {
        "positions": (GRID, GRID), "is_causal": True,
    },
    r"k: expected the same number of tokens as q \(7\) with a causal or block mask, got 5": {
        "map": None, "omega": None, "positions": None, "k": K[:, :, :5], "v": K[:, :, :5], "is_causal": True,
    },
    # softmax over the sequence
    **{
        rf"{name}: a softmax over the sequence \(dim=-2\) .*; use dim=-1": {
            "act": "softmax", "dim": -2, **ONE, name: value, **more,
        }
        for name, value, more in (
            ("is_causal", True, {}), ("block", 3, {}), ("cu_seqlens", CU, {}), ("gate", torch.ones(1, 1, 7), {}),
            ("state", (S[:1], SUMS[:1]), {}),
        )
    },
    r"dim: softmax over the sequence \(-2\) needs the whole sequence, got a shard": {
        "act": "softmax", "dim": -2, "positions": Grid((2, 3), prefix=2, start=1),
    },
    # several sequences
    r"cu_seqlens: expected a tensor of shape \(num_seqs \+ 1,\), got list": {**ONE, "cu_seqlens": [0, 7]},
    r"cu_seqlens: expected an int32 or int64 tensor of shape \(num_seqs \+ 1,\), got torch.float32": {
        **ONE,
        "cu_seqlens": CU.float(),
    },
    r"cu_seqlens: expected an int32 or int64 tensor of shape \(num_seqs \+ 1,\), got torch.int64 \(1,\)": {
        **ONE,
        "cu_seqlens": CU[:1],
    },
    r"cu_seqlens: expected packed sequences in q of shape \(1, H, N, D\), got \(2, 4, 7, 8\)": {"cu_seqlens": CU},
    r"cu_seqlens: expected a tensor on q's device cpu, got meta": {**ONE, "cu_seqlens": CU.to("meta")},
    **{
        rf"cu_seqlens: expected non-decreasing offsets from 0 to 7 .*, got \[{shown}\]": {
            **ONE, "cu_seqlens": torch.tensor(values),
        }
        for shown, values in (
            ("0, 5", [0, 5]), ("0, 9", [0, 9]), ("0, 4, 2, 7", [0, 4, 2, 7]), ("1, 7", [1, 7]), ("7, 0", [7, 0]),
            ("-1, 7", [-1, 7]), (f"0, {2**32 + 7}", [0, 2**32 + 7]), (f"{2**32}, 7", [2**32, 7]),
            ("0, 1, 2, 3, 4, 5, 6, 7, ...", [0, 1, 2, 3, 4, 5, 6, 7, 7, 8]),
        )
    },
    r"block: expected None with cu_seqlens, got both": {**ONE, "cu_seqlens": CU, "block": 3},
    r"positions: expected the same positions for q and k with cu_seqlens, got a pair": {
        **ONE, "cu_seqlens": CU, "positions": (GRID, GRID),
    },
    # state
    r"state: expected \(S, Σ\), or \(S, None\) .*, got Tensor": {"state": S},
    r"state: expected \(S, Σ\), or \(S, None\) .*, got tuple": {"state": (None, SUMS)},
    r"state: expected \(S, Σ\) of shapes \[\(2, 2, 16, 8\), \(2, 2, 8\)\] .*, got 1 tensor$": {"state": (S, None)},
    r"state: expected \(S, Σ\) of shapes .*, got \[\(2, 2, 8, 8\), \(2, 2, 8\)\]": {"state": (S[:, :, :8], SUMS)},
    r"state: expected \(S, Σ\) of shapes .*, got \[\(2, 2, 16, 8\), \(2, 2, 16\)\]": {"state": (S, S[..., 0])},
    r"state: expected \(S, Σ\) of shapes \[\(2, 2, 16, 8\), \(2, 2, 16\)\], .*, got": {
        "normalizer": "encoded", "state": (S, SUMS),
    },
    r"state: expected \(S, None\) of shapes \[\(2, 2, 16, 8\)\] with normalizer='none', got 2": {
        "normalizer": "none", "state": (S, SUMS),
    },
    r"state: expected torch.float32 on cpu, got torch.bfloat16": {"state": (S.bfloat16(), SUMS)},
    r"state: expected torch.float64 on cpu, got torch.float32": {
        "q": Q.double(), "k": K.double(), "v": K.double(), "state": (S, SUMS),
    },
    r"state: expected \(S, Σ\) of shapes \[\(3, 2, 16, 8\), \(3, 2, 8\)\], .*, got": {
        "q": Q[:1], "k": K[:1], "v": K[:1], "cu_seqlens": torch.tensor([0, 3, 3, 7]), "state": (S, SUMS),
    },
}  # fmt: skip


@pytest.mark.parametrize(("message", "changes"), ERRORS.items(), ids=[m[:60] for m in ERRORS])
def test_errors(message, changes, monkeypatch):
    monkeypatch.setattr(ATTEND, "run_reference", None)  # nothing runs
    with pytest.raises((ValueError, TypeError), match="^" + message):
        call(**changes)


def test_valid_edge_cases():
    """Valid calls that are close to the errors."""
    assert call().shape == Q.shape
    assert call(act="silu", normalizer="none").shape == Q.shape
    assert call(act="none", normalizer="encoded").shape == Q.shape
    assert (
        call(positions=(GRID, Grid((5,)).explicit().coords.expand(-1, 2).float()), k=K[:, :, :5], v=K[:, :, :5]).shape
        == Q.shape
    )
    assert (
        call(
            block=3,
            positions=Grid((2, 3), prefix=2, suffix=2, start=2, length=6),
            q=Q[:, :, :6],
            k=K[:, :, :6],
            v=K[:, :, :6],
        ).shape[2]
        == 6
    )
    assert call(block=2, positions=Coordinates(torch.zeros(4, 2), prefix=1, suffix=2)).shape == Q.shape
    assert call(map=None, omega=None, positions=None, k=K[:, :, :5], v=K[:, :, :5, :3]).shape == (2, 4, 7, 3)
    assert call(map=None, omega=None, block=3).shape == Q.shape
    assert call(normalizer="none", state=[S, None], return_state=True)[1][1] is None
    assert call(act="softmax", dim=-2).shape == Q.shape
    assert call(**ONE, cu_seqlens=CU.int()).shape == (1, 4, 7, 8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_values_are_checked_at_every_call(dtype):
    """This includes cached calls, but not values that are unknown to the host."""
    options = {**ONE, "impl": "auto"}
    expected = call(**options, cu_seqlens=CU.to(dtype))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cu_seqlens: expected non-decreasing offsets .*, got \[1, 3, 7\]"):
            call(**options, cu_seqlens=torch.tensor([1, 3, 7], dtype=dtype))
    assert torch.equal(call(**options, cu_seqlens=CU.to(dtype)), expected)
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(t) for name, t in {**ONE, "omega": OMEGA, "cu_seqlens": CU}.items()}
        assert call(**given).shape == (1, 4, 7, 8)
    compiled = torch.compile(lambda cu_seqlens: call(**ONE, cu_seqlens=cu_seqlens), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(CU), expected)


def test_triton_without_a_gpu(monkeypatch):
    from lrpe_md.engine.core import operator

    monkeypatch.setattr(operator, "INTERPRETING", False)
    with pytest.raises(ValueError, match="impl: 'triton' needs tensors on a GPU"):
        call(impl="triton")
