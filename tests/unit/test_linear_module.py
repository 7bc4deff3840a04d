"""LinearAttention with an encoding's map, frequencies and activation, and with third-party encodings."""

import copy

import pytest
import torch
from torch import nn

from lrpe_md import CosineMd, Grid, LinearAttention, PresetMd, Rotate1d, RotateMd, linear_attention, list_presets, pack
from lrpe_md.integrations.encoding import Activation
from lrpe_md.integrations.run_time import set_scaling
from lrpe_md.reference import activate

GRID = Grid((3, 4), prefix=1)
TEXT = Grid((13,))


def qkv(dtype=torch.float64, heads=(4, 2), num_tokens=13, dim=8, v_dim=6):
    torch.manual_seed(0)
    q, k = (torch.randn(2, h, num_tokens, dim, dtype=dtype, requires_grad=True) for h in heads)
    return q, k, torch.randn(2, heads[1], num_tokens, v_dim, dtype=dtype, requires_grad=True)


class Foreign(nn.Module):
    """The same encoding, without a description of its parts."""

    def __init__(self, encoding):
        super().__init__()
        self.encoding, self.act, self.dim = encoding, encoding.act, encoding.dim

    def forward(self, q, k, *, positions):
        return self.encoding(q, k, positions=positions)


ENCODINGS = {
    "cosine": lambda: CosineMd(8, 2, act="relu", learnable=True),
    "cosine with phase": lambda: CosineMd(8, 2, act="softplus", phase=True, num_heads=2, learnable=True),
    "phase on keys": lambda: CosineMd(8, 2, act="softmax", dim=-1, phase="k"),
    "cosine of some channels": lambda: CosineMd(8, 2, act="relu", rotary_dim=slice(2, 7), learnable=True),
    "softmax and cosine of some channels": lambda: CosineMd(8, 2, act="softmax", dim=-1, rotary_dim=3),
    "rotate": lambda: RotateMd(8, 2, act="relu", pairs="interleaved", rotary_dim=4, amplitude=1.5, learnable=True),
    "mixed": lambda: RotateMd(8, 2, act="sigmoid", frequencies="mixed", base=10.0, num_heads=2, learnable=True),
    "preset": lambda: PresetMd("pope", head_dim=8, num_heads=1),
    "text": lambda: Rotate1d(8, act="relu"),
    "scaled": lambda: Rotate1d(8, act="relu", learnable=True),
    "sequence": lambda: CosineMd(8, 2, act="softmax", dim=-2),
}


def made(name):
    encoding = ENCODINGS[name]()
    if name == "scaled":
        set_scaling(encoding, lambda theta: (theta / 4, 1.2))
    torch.manual_seed(1)
    for parameter in encoding.parameters():
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoding, Grid((13,)) if encoding.num_axes == 1 else GRID


@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_described_encodings_equal_their_features(name, normalizer):
    """Compare values and all gradients with the q̂ and k̂ that the encoding itself computes."""
    encoding, positions = made(name)
    whole, foreign = (LinearAttention(e, normalizer=normalizer) for e in (encoding, Foreign(encoding)))
    tensors = [*qkv(), *encoding.parameters()]
    found = []
    for module in (whole, foreign):
        o = module(*tensors[:3], positions)
        assert o.shape == (2, 4, 13, 6)
        found.append((o, *torch.autograd.grad((o.sin()).sum(), tensors)))
    for a, b in zip(*found, strict=True):
        scale = max(1, b.abs().max().item())  # "encoded" divides by values close to 0
        torch.testing.assert_close(a / scale, b / scale, rtol=1e-6, atol=1e-6)


def test_options_reach_the_function():
    encoding, _ = made("cosine")
    q, k, v = qkv()
    module = LinearAttention(encoding, normalizer="none", eps=0.1)
    gate = torch.rand(2, 1, 13)
    options = {"gate": gate, "block": 4, "return_state": True}
    o, state = module(q, k, v, GRID, **options)
    own = {"omega": encoding.get_omega(), "act": "relu", "normalizer": "none", "eps": 0.1}
    right, right_state = linear_attention(q, k, v, positions=GRID, **own, **options)
    assert torch.equal(o, right)
    assert torch.equal(state[0], right_state[0])
    assert state[1] is right_state[1] is None
    later = module(q, k, v, GRID, state=state, is_causal=True)
    assert torch.equal(later, linear_attention(q, k, v, positions=GRID, **own, state=state, is_causal=True))
    packed = torch.tensor([0, 5, 13])
    one = [t[:1] for t in (q, k, v)]
    assert torch.equal(
        module(*one, GRID, cu_seqlens=packed), linear_attention(*one, positions=GRID, **own, cu_seqlens=packed)
    )


@pytest.mark.parametrize("make", [lambda e: e, Foreign, lambda e: None], ids=["own", "foreign", "none"])
def test_the_result_of_pack(make):
    """The result of pack sets positions and cu_seqlens, in the module and in the function."""
    q, k, v = (t[:1] for t in qkv())
    packed = pack([Grid((2, 3)), Grid((2, 2), prefix=3)])
    encoding = make(CosineMd(8, 2, act="relu"))
    module = LinearAttention(encoding)
    expected = module(q, k, v, packed.positions, cu_seqlens=packed.cu_seqlens)
    assert not torch.allclose(expected, module(q, k, v, packed.positions))
    assert torch.equal(module(q, k, v, packed), expected)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected None with positions from lrpe_md\.pack"):
        module(q, k, v, packed, cu_seqlens=packed.cu_seqlens)
    if isinstance(encoding, CosineMd):
        found = linear_attention(q, k, v, omega=encoding.get_omega(), positions=packed, is_causal=True)
        assert torch.equal(found, module(q, k, v, packed, is_causal=True))


def test_eps_and_impl_are_passed_on():
    q, k, v = qkv()
    low, high = (LinearAttention(eps=eps)(q, k, v) for eps in (1e-6, 1e6))
    assert not torch.allclose(low, high)
    module = LinearAttention(CosineMd(8, 2, act="relu", impl="triton"))
    coords = torch.randn(13, 2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="coords"):
        module(q, k, v, coords)


def test_without_an_encoding():
    q, k, v = qkv()
    assert torch.equal(LinearAttention()(q, k, v), linear_attention(q, k, v, map=None))
    activation = LinearAttention(Activation("softplus"))
    assert torch.equal(activation(q, k, v, GRID), linear_attention(q, k, v, map=None, act="softplus"))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"block": 4}, {}])
@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
def test_foreign_encodings(normalizer, options):
    """Any callable works with a gate, masks and a state. A gate of 0 removes NaN."""
    encoding, positions = made("cosine")

    def function(q, k, *, positions):
        return encoding(q, k, positions=positions)

    function.act = "relu"
    q, k, v = qkv()
    gate = torch.rand(2, 2, 13, dtype=torch.float64).sub_(0.3).clamp_min_(0)
    k, v = (t.detach().masked_fill((gate == 0)[..., None], float("nan")).requires_grad_() for t in (k, v))
    torch.manual_seed(2)
    state = [torch.rand(2, 2, 16, 6, dtype=torch.float64)]
    state += [] if normalizer == "none" else [torch.rand(2, 2, 8 if normalizer == "unrotated" else 16).double()]
    found = []
    for encode in (encoding, function):
        module = LinearAttention(encode, normalizer=normalizer)
        o, after = module(q, k, v, positions, gate=gate, state=(*state, None)[:2], return_state=True, **options)
        dv = torch.autograd.grad(o.sum(), [q, v], retain_graph=True)
        found.append((o, *(t for t in after if t is not None), *dv))
    for a, b in zip(*found, strict=True):
        assert b.isfinite().all()
        scale = max(1, b.abs().max().item())
        torch.testing.assert_close(a / scale, b / scale, rtol=1e-6, atol=1e-6)
    if normalizer == "unrotated":
        with pytest.raises(ValueError, match=r"state: expected \(S, Σ\) with Σ of shape \(2, 2, 8\)"):
            LinearAttention(function)(q, k, v, positions, state=(state[0], state[0][..., 0]))


def test_xpos_scales_are_kept():
    """Linear attention keeps xPos's scales of q and k, which a description would lose."""
    encoding = Rotate1d(8, act="relu", scale_base=4.0)
    q, k, v = qkv()
    q_hat, k_hat = encoding(q, k, positions=TEXT)
    expected = (q_hat @ k_hat.repeat_interleave(2, 1).mT).tril() @ v.repeat_interleave(2, 1)
    o = LinearAttention(encoding, normalizer="none")(q, k, v, TEXT, is_causal=True)
    torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("name", ENCODINGS)
def test_hooks_of_the_encoding_run(name):
    encoding, positions = made(name)
    seen = []
    encoding.register_forward_pre_hook(lambda _, xs, kwargs: seen.append((xs, kwargs["positions"])), with_kwargs=True)
    q, k, v = qkv()
    LinearAttention(encoding)(q, k, v, positions)
    ((xs, where),) = seen
    assert xs[0] is q
    assert xs[1] is k
    assert where is positions


def test_unsuitable_normalizers_are_refused():
    for encoding in (
        CosineMd(8, 2),
        RotateMd(8, 2, act="silu"),
        Foreign(CosineMd(8, 2)),
        lambda q, k, positions: (q, k),
    ):
        with pytest.raises(ValueError, match=r"normalizer: 'unrotated' .* needs"):
            LinearAttention(encoding)
        LinearAttention(encoding, normalizer="none")
    with pytest.raises(ValueError, match="normalizer: expected one of"):
        LinearAttention(normalizer="l2")
    for eps in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="eps: expected a finite positive number"):
            LinearAttention(eps=eps)
    q, k, v = qkv()
    groups = LinearAttention(CosineMd(8, 2, act="relu", phase=True, phase_groups=2))
    with pytest.raises(ValueError, match="phase: expected one group"):
        groups(q, k, v, GRID)
    with pytest.raises(ValueError, match="positions: expected a Grid"):
        LinearAttention(CosineMd(8, 2, act="relu"))(q, k, v)


@pytest.mark.parametrize("encoding", ["rotate", 3, CosineMd])
def test_an_encoding_of_another_type_is_refused(encoding):
    with pytest.raises(
        TypeError, match=r"encoding: expected a module, .* got ('rotate'|3|<class .*); pass .* RotateMd"
    ):
        LinearAttention(encoding)


def test_module_interface():
    module = LinearAttention(CosineMd(8, 2, act="relu", learnable=True))
    assert [name for name, _ in module.named_parameters()] == ["encoding.log_theta"]
    assert "CosineMd" in repr(module)
    assert "normalizer='unrotated', eps=1e-06" in repr(module)
    again = copy.deepcopy(module)
    again.load_state_dict(module.state_dict())
    q, k, v = qkv(torch.float32)
    assert torch.equal(again(q, k, v, GRID), module(q, k, v, GRID))
    half = module.to(torch.bfloat16)
    assert half.encoding.log_theta.dtype == torch.float32
    assert half(q.bfloat16(), k.bfloat16(), v.bfloat16(), GRID).dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(list_presets()))
def test_presets_describe_themselves(name):
    encoding = PresetMd(name, num_heads=8 if name == "mhrope" else 2, head_dim=None)
    own = encoding.describe()
    assert own.map == encoding.map
    assert torch.equal(own.omega, encoding.get_omega())
    assert (own.act, own.pairs, own.order) == (encoding.act, encoding.pairs, encoding.order)


def test_activation_of_the_plain_path():
    """For a third-party encoding, q̄ is the activation of q, not q̂."""
    q, k, v = qkv()
    found = LinearAttention(Foreign(CosineMd(8, 2, act="softplus")))(q, k, v, GRID)
    q_bar, k_bar = (activate(t, "softplus") for t in (q, k))
    q_hat, k_hat = CosineMd(8, 2, act="softplus")(q, k, positions=GRID)
    k_bar, k_hat, wide = (t.repeat_interleave(2, 1) for t in (k_bar, k_hat, v))
    right = (q_hat @ k_hat.mT) @ wide / (q_bar @ k_bar.mT).sum(-1, keepdim=True)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("scale_base", [None, 4.0])
def test_text_needs_no_positions(scale_base):
    encoding = Rotate1d(8, act="relu", scale_base=scale_base)
    module = LinearAttention(encoding, normalizer="encoded")
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    assert torch.equal(module(q, k, v), module(q, k, v, Grid((6,))))
    packed, where = torch.tensor([0, 2, 6]), pack([Grid((2,)), Grid((4,))])
    torch.testing.assert_close(module(q, k, v, cu_seqlens=packed), module(q, k, v, where))
    whole = module(q, k, v, is_causal=True)
    first, state = module(*(x[:, :, :4] for x in (q, k, v)), is_causal=True, return_state=True)
    rest = [x[:, :, 4:] for x in (q, k, v)]
    second = module(*rest, Grid((2,)).offset(4), is_causal=True, state=state)
    torch.testing.assert_close(torch.cat([first, second], 2), whole)
    with pytest.raises(
        ValueError,
        match=r"positions: expected the positions of the new tokens when a state is passed, got None; .*offset",
    ):
        module(*rest, is_causal=True, state=state)


def test_patches_need_positions():
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    with pytest.raises(ValueError, match=r"positions: .* got None; for H x W patches, pass positions=Grid\(\(H, W\)\)"):
        LinearAttention(RotateMd(8, 2, act="relu"))(q, k, v)
