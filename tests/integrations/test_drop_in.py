"""drop_in replaces third-party rotary functions with our kernel. Outputs, dtypes and gradients stay the same."""

import copy
import functools
import inspect
import threading
import time
import types
import warnings

import pytest
import rotary_functions as rf
import torch
from parametrizing import slow_except
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lrpe_md.integrations import drop_in, drop_ins, plans
from lrpe_md.integrations.drop_ins import _Probed

NAMES = list(rf.calls())
SOME = [
    "hf_llama",
    "hf_sections",
    "deepseek",
    "meta_llama",
    "dinov3 with prefix",
    "flux",
    "split_heads",
    "flash_attn, offset",
]
H, N, D = rf.H, rf.N, rf.D


@pytest.fixture
def launches(monkeypatch):
    """Return the list of calls of rotate so far."""
    found = []
    rotate = plans.rotate

    def counted(*args, **kwargs):
        found.append(kwargs)
        return rotate(*args, **kwargs)

    monkeypatch.setattr(plans, "rotate", counted)
    return found


def tensors(value):
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def cast(value, dtype):
    return pytree.tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, value)


def run_both(function, ours, args, kwargs, launches):
    """Return the outputs of the original and of the drop-in. Check that the drop-in has launched our kernel."""
    expected = function(*copy.deepcopy(args), **kwargs)
    ours(*args, **kwargs)  # probes
    launches.clear()
    found = ours(*args, **kwargs)
    assert launches, "went to the original"
    assert type(found) is type(expected)
    return tensors(expected), tensors(found)


def check_equal(function, ours, args, kwargs, launches):
    expected, found = run_both(function, ours, args, kwargs, launches)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=0, atol=2e-6 * (1 + float(a.detach().abs().max())) if a.numel() else 0)


@functools.cache
def drop(name):
    return drop_in(rf.calls()[name].function)


def call_of(name):
    """Return a function and the arguments of a call. All tests reuse the function's drop-in."""
    call = rf.calls()[name]
    return drop(name).original, call.args, call.kwargs


@pytest.mark.parametrize("name", NAMES)
def test_outputs(name, launches):
    function, args, kwargs = call_of(name)
    check_equal(function, drop(name), args, kwargs, launches)


@pytest.mark.parametrize("name", NAMES)
def test_one_launch(name, launches):
    function, args, kwargs = call_of(name)
    run_both(function, drop(name), args, kwargs, launches)
    assert len(launches) == (2 if name == "wan" else 1), "q and k share a launch; Wan's samples have grids of their own"


def gradients(function, args, kwargs, of_module):
    args = pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, args)
    inputs = [t for t in (*tensors((args, kwargs)), *of_module) if t.is_floating_point() or t.is_complex()]
    for t in inputs:
        t.requires_grad_()
    outs = tensors(function(*args, **kwargs))
    loss = sum((o.double() * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() for o in outs)
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    for t in of_module:
        t.requires_grad_(False)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    function, args, kwargs = call_of(name)
    of_module = list(function.buffers()) if isinstance(function, nn.Module) else []
    expected = gradients(function, args, kwargs, of_module)
    found = gradients(drop(name), args, kwargs, of_module)
    assert len(expected) > 1
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=0, atol=2e-5 * float(a.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_low_precision(name, launches):
    """Results have the original's dtype, and are at least as close to the exact result."""
    function, args, kwargs = call_of(name)
    low = cast(args, torch.bfloat16)
    expected, found = run_both(function, drop(name), low, kwargs, launches)
    exact = tensors(function(*cast(cast(low, torch.float32), torch.float64), **kwargs))
    for a, b, e in zip(expected, found, exact, strict=True):
        assert a.dtype == b.dtype
        assert (b - e).abs().max() <= (a - e).abs().max() * 1.001 + 1e-6


@pytest.mark.parametrize("name", SOME)
def test_triton(name, launches):
    function, args, kwargs = call_of(name)
    ours = drop_in(function, impl="triton")
    check_equal(function, ours, args, kwargs, launches)
    assert launches[0]["impl"] == "triton"


# --- kinds of arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_strides(name, launches):
    """Slices of a projection and expanded tables work."""
    function, args, kwargs = call_of(name)

    def stride(t):
        if not isinstance(t, Tensor):
            return t
        return torch.stack((t, t), -1)[..., 0] if t.is_complex() else torch.cat((t, t), -1)[..., : t.shape[-1]]

    check_equal(function, drop(name), pytree.tree_map(stride, args), kwargs, launches)


@pytest.mark.parametrize("sizes", [(1, 4, 2, 6), (2, 1, 1, 6), (3, 6, 2, 1), (1, 1, 1, 1), (4, 4, 4, 4), (2, 8, 8, 0)])
def test_sizes(sizes, launches):
    batch, heads, key_heads, tokens = sizes
    args = (torch.randn(batch, heads, tokens, D), torch.randn(batch, key_heads, tokens, D))
    for rows in {1, batch}:
        cos, sin = torch.randn(rows, tokens, D), torch.randn(rows, tokens, D)
        check_equal(rf.hf_llama, drop("hf_llama"), (*args, cos, sin), {}, launches)


@pytest.mark.parametrize("sizes", [((2, 4, 6), (1, 2, 6)), ((2, 3, 6), (2, 2, 6)), ((2, 2, 6), (2, 4, 6))])
def test_q_and_k_that_cannot_share_a_launch(sizes, launches):
    q, k = (torch.randn(*s, D) for s in sizes)
    check_equal(rf.hf_llama, drop("hf_llama"), (q, k, torch.randn(1, 6, D), torch.randn(1, 6, D)), {}, launches)
    assert len(launches) == 2


def test_a_kind_is_probed_once(monkeypatch):
    calls = []
    real = _Probed.call
    monkeypatch.setattr(_Probed, "call", lambda *args: calls.append(1) or real(*args))
    ours = drop_in(rf.hf_llama)
    q, cos = torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8)
    for expect_calls, x in (
        (True, q),
        (False, q),
        (False, torch.randn(3, 4, 7, 8)),
        (True, q[..., :4]),
        (True, q.half()),
    ):
        calls.clear()
        table = cos[..., : x.shape[-1]] if x.shape[2] == 5 else torch.randn(3, 7, 8)
        ours(x, x, table, table)
        assert bool(calls) == expect_calls


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.randn(2, 6, 4, 32), torch.randn(9, 16), torch.randn(9, 16)), {"seqlen_offsets": 5}),  # beyond the rows
        ((torch.randn(2, 6, 4, 32), torch.randn(9, 16), torch.randn(9, 16)), {"seqlen_offsets": -2}),
        ((torch.randn(2, 6, 4, 32), torch.randn(6, 16), torch.randn(6, 16)), {"cu_seqlens": torch.tensor([0, 6])}),
        ((torch.randn(2, 6, 4, 32), torch.randn(5, 16), torch.randn(5, 16)), {}),  # fewer rows than tokens
        ((torch.randn(2, 6, 4, 32),), {}),
        ((torch.randn(2, 6, 4, 32), torch.randn(6, 16), torch.randn(6, 16)), {"unknown": 1}),
        ((torch.randn(2, 6, 4, 32), torch.randn(6, 15), torch.randn(6, 16)), {}),
    ],
)
def test_errors_are_the_original_s(args, kwargs):
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        rf.flash_attn(*args, **kwargs)
    with pytest.raises(theirs.type) as ours:
        drop("flash_attn")(*args, **kwargs)
    assert str(ours.value) == str(theirs.value)


def test_in_place_goes_to_the_original(launches):
    x, cos, sin = torch.randn(2, 6, 4, 32), torch.randn(6, 16), torch.randn(6, 16)
    expected = rf.flash_attn(x, cos, sin)
    launches.clear()
    out = drop("flash_attn")(x, cos, sin, inplace=True)
    assert out is x
    torch.testing.assert_close(x, expected)


def test_offsets_share_one_plan(launches):
    """Decoding increases the offset at each step without probing again."""
    ours = drop_in(rf.flash_attn)
    x, cos, sin = torch.randn(2, 1, 4, 32), torch.randn(40, 16), torch.randn(40, 16)
    for offset in range(1, 8):
        check_equal(rf.flash_attn, ours, (x, cos, sin), {"seqlen_offsets": offset}, launches)
    assert sum(("offset",) in key for key, _ in ours.probed.plans) == 1


def from_start_pos(x, cos, sin, start_pos):
    return rf.flash_attn(x, cos, sin, seqlen_offsets=start_pos)


def after_past_length(x, cos, sin, past_length=0):
    return rf.flash_attn(x, cos, sin, seqlen_offsets=past_length)


@pytest.mark.parametrize("function", [from_start_pos, after_past_length])
def test_other_names_of_an_offset(function, launches):
    ours = drop_in(function)
    x, cos, sin = torch.randn(2, 1, 4, 32), torch.randn(40, 16), torch.randn(40, 16)
    for offset in (0, 1, 7, 39):
        check_equal(function, ours, (x, cos, sin, offset), {}, launches)
    assert sum(("offset",) in key for key, _ in ours.probed.plans) == 1
    with pytest.raises(RuntimeError):  # beyond the tables, the original's error
        ours(x, cos, sin, 40)


def with_short_names(q, k, c, s, ids):
    return rf.with_position_ids(q, k, c, s, ids)


def with_rows_of_tables(x, c, s, idx):
    return rf.hf_llama(x, x, c[idx], s[idx])[0]


@pytest.mark.parametrize(("function", "num_xs"), [(with_short_names, 2), (with_rows_of_tables, 1)])
def test_positions_beside_tables_with_unusual_names(function, num_xs, launches):
    xs = torch.randn(num_xs, 2, 3, 5, 32).unbind()
    args = (*xs, torch.randn(40, 32), torch.randn(40, 32), torch.randint(40, (2, 5)))
    check_equal(function, drop_in(function), args, {}, launches)


def scaled_by_tensor(x, cos, sin, scale):
    return (x * cos + rf.quarter_turn(x) * sin) * scale


def shifted_by_tensor(x, cos, sin, start=None):
    start = 0 if start is None else int(start)
    cos, sin = (t.roll(start, 0) for t in (cos, sin))
    return x * cos + rf.quarter_turn(x) * sin


def masked(x, cos, sin, mask=None):
    y = x * cos + rf.quarter_turn(x) * sin
    return y if mask is None else torch.where(mask, y, x)


def by_number(x, cos, sin, power=1):
    return x * cos**power + rf.quarter_turn(x) * sin


def by_type(x, cos, sin, setting=1):
    y = x * cos + rf.quarter_turn(x) * sin
    return -y if isinstance(setting, float) else 2 * y if isinstance(setting, bool) else y


def by_width_of_ids(x, cos, sin, ids):
    blocks = ids.shape[-1]
    parts = (zip(*(t.chunk(blocks, -1) for t in (x, cos, sin)), strict=True)) if blocks < 3 else [(x, cos, sin)]
    return torch.cat([a * c + rf.quarter_turn(a) * s for a, c, s in parts], -1)


def guessing_layout(x, cos, sin):
    """Guess the token axis from the sizes."""
    cos, sin = (t if t.shape[0] == x.shape[2] else t[:, None] for t in (cos, sin))
    return x * cos + rf.quarter_turn(x) * sin


def one_row(x, cos, sin):
    """Rotate all tokens by the first row."""
    return x * cos[..., :1, :] + rf.quarter_turn(x) * sin[..., :1, :]


def from_the_third_row(x, cos, sin):
    """Rotate by rows that are neither the first nor the last ones of longer tables."""
    start, tokens = min(2, len(cos) - x.shape[-2]), x.shape[-2]
    return x * cos[start : start + tokens] + rf.quarter_turn(x) * sin[start : start + tokens]


def by_key_length(q, k, cos, sin):
    """Give q the last positions of k, with longer tables, as when decoding with a cache of unrotated keys."""
    end, start = k.shape[-2], k.shape[-2] - q.shape[-2]
    q = q * cos[start:end] + rf.quarter_turn(q) * sin[start:end]
    return q, k * cos[:end] + rf.quarter_turn(k) * sin[:end]


def from_the_start(q, k, cos, sin):
    """Rotate q and k by the first rows of longer tables, each by its own length."""
    return tuple(x * cos[: x.shape[-2]] + rf.quarter_turn(x) * sin[: x.shape[-2]] for x in (q, k))


def after_two_tokens(x, cos, sin):
    """Leave at most two tokens unrotated at the start, although the tables may lack rows for more tokens."""
    start = min(2, x.shape[-2] - len(cos))
    part = x[..., start : start + len(cos), :]
    part = part * cos + rf.quarter_turn(part) * sin
    return torch.cat((x[..., :start, :], part, x[..., start + len(cos) :, :]), -2)


def complex_rows(x, grid_ids, freqs_cis):
    """Rotate with arguments that look like those of a function that rotates samples by their grids."""
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * freqs_cis[grid_ids].unsqueeze(2)).flatten(3).type_as(x)


X, COS, SIN = torch.randn(2, 6, 6, 32), torch.randn(6, 32), torch.randn(6, 32)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (masked, [(X, COS, SIN, *m) for m in ((), (torch.rand(6, 1) > 0.5,), (torch.zeros((), dtype=torch.bool),))]),
        (by_number, [(X, COS, SIN, *n) for n in ((), (1,), (2,), (1.0,), (True,), (3.0,))]),
        (by_type, [(X, COS, SIN, n) for n in (1, 1.0, True, 1)]),
        (shifted_by_tensor, [(X, COS, SIN, *t) for t in ((), (torch.tensor(0),), (torch.tensor(2),))]),
        (by_width_of_ids, [(X, COS, SIN, torch.zeros(2, 6, n, dtype=torch.long)) for n in (1, 2, 3, 4)]),
        (by_width_of_ids, [(X, COS, SIN, torch.zeros(2, n, dtype=torch.long)) for n in (1, 2, 3, 4)]),
        (guessing_layout, [(X, COS, SIN), (X[:, :, :3], COS, SIN), (X[:, :3], COS, SIN)]),
        (one_row, [(X, COS, SIN), (X, COS[:1], SIN[:1]), (X, COS[:, None], SIN[:, None])]),
        (from_the_third_row, [(X, torch.randn(n, 32), torch.randn(n, 32)) for n in (6, 7, 8, 9, 11)]),
        (after_two_tokens, [(X, torch.randn(n, 32), torch.randn(n, 32)) for n in (6, 5, 4, 3, 1)]),
        (by_key_length, [
            (X[:, :, :n], X, torch.randn(rows, 32), torch.randn(rows, 32)) for n in (1, 6, 4) for rows in (6, 9)
        ]),
        (complex_rows, [
            (X[:, :n], torch.randint(0, 9, (2, n)), torch.randn(9, 16, dtype=torch.complex64)) for n in (6, 3, 1)
        ]),
        (rf.dinov3, [(X, SIN, COS), (X, SIN[:1], COS), (X[:, :1], SIN[:, None], COS[:, None])]),
        (rf.torchtitan_cos_sin, [
            (X, X, torch.randn(9, 64), t) for t in (None, torch.arange(6).expand(2, 6), torch.arange(3, 9)[None])
        ]),
    ],
)  # fmt: skip
def test_never_different(function, calls):
    ours = drop_in(function)
    for args in calls:
        try:
            expected = tensors(function(*args))
        except Exception as error:
            with pytest.raises(type(error)):
                ours(*args)
            continue
        for a, b in zip(expected, tensors(ours(*args)), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(1, 6), (6, 4), (6, 6)])
def test_different_lengths_with_longer_tables(lengths, launches):
    q, k = (X[:, :, :n] for n in lengths)
    check_equal(from_the_start, drop_in(from_the_start), (q, k, torch.randn(9, 32), torch.randn(9, 32)), {}, launches)


def test_a_tensor_that_scales_is_refused():
    with pytest.raises(TypeError, match="scaled_by_tensor"):
        drop_in(scaled_by_tensor)


def einsum_rotation(x, matrices):
    """Rotate by a product with 2 × 2 matrices, which autocast computes in bfloat16."""
    return torch.einsum("nrij,bhnrj->bhnri", matrices, x.unflatten(-1, (-1, 2))).flatten(-2)


def einsum_in_the_dtype_of_x(x, matrices):
    return einsum_rotation(x, matrices).to(x.dtype)


@pytest.mark.parametrize("function", [einsum_rotation, einsum_in_the_dtype_of_x])
def test_autocast_that_changes_the_result(function, launches):
    ours, args = drop_in(function), (torch.randn(2, 3, 6, 8), torch.randn(6, 4, 2, 2))
    check_equal(function, ours, args, {}, launches)
    launches.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = function(*args), ours(*args)
    assert not launches
    assert torch.equal(found, expected)


def test_autocast_that_does_not_matter(launches):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        function, args, kwargs = call_of("hf_llama")
        check_equal(function, drop("hf_llama"), args, kwargs, launches)


def detached_tables(x, cos, sin):
    return x * cos.detach() + rf.quarter_turn(x) * sin.detach()


def test_tables_without_gradient():
    args = [torch.randn(2, 3, 6, 8, requires_grad=True), *(torch.randn(6, 8, requires_grad=True) for _ in range(2))]
    drop_in(detached_tables)(*args).sum().backward()
    assert args[0].grad is not None
    assert args[1].grad is None
    assert args[2].grad is None


# --- modules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["in_place", "replaced", "learned", "dtype", "resized"])
def test_tables_of_a_module_are_read_at_each_call(change, launches):
    module = rf.LightningRotary()
    ours = drop_in(module)
    if change == "in_place":
        module.freqs_cos.mul_(0.5)
    elif change == "replaced":
        module.freqs_sin = torch.randn(9, D)
    elif change == "learned":
        del module.freqs_cos
        module.freqs_cos = nn.Parameter(torch.randn(9, D))
    elif change == "dtype":
        module.double()
    else:
        module.freqs_cos, module.freqs_sin = torch.randn(12, D), torch.randn(12, D)
    tokens = 12 if change == "resized" else 9
    check_equal(module, ours, (torch.randn(2, 3, tokens, D),), {}, launches)
    if change == "learned":
        ours(torch.randn(2, 3, 9, D)).sum().backward()
        assert module.freqs_cos.grad is not None


@pytest.mark.parametrize("change", ["hook", "pre_hook", "forward"])
def test_a_changed_module_runs_itself(change, launches):
    module = rf.LightningRotary()
    ours = drop_in(module)
    if change == "hook":
        module.register_forward_hook(lambda module, args, y: 2 * y)
    elif change == "pre_hook":
        module.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    else:
        module.forward = lambda t: t
    x = torch.randn(2, 3, 9, D)
    launches.clear()
    assert torch.equal(ours(x), module(x))
    assert not launches


class WithSettings(nn.Module):
    """Module whose own numbers and flags change what it computes."""

    def __init__(self):
        super().__init__()
        self.scale, self.interleaved = 1.0, False

    def turn(self, x, cos, sin):
        return (x * cos + (rf.quarter_turn_pairs if self.interleaved else rf.quarter_turn)(x) * sin) * self.scale


def test_settings_of_an_object(launches):
    module = WithSettings()
    ours = drop_in(module.turn)
    args = torch.randn(2, 3, 5, D), torch.randn(5, D), torch.randn(5, D)
    for module.interleaved, module.scale, uses_kernel in ((False, 1.0, True), (True, 1.0, True), (True, 0.5, False)):
        expected, found = module.turn(*args), ours(*args)
        launches.clear()
        ours(*args)
        assert bool(launches) == uses_kernel
        torch.testing.assert_close(found, expected)


ONE, FLAG, SWAP = torch.ones(1), torch.tensor(False), torch.tensor([1, 0])
LAYOUT = types.SimpleNamespace(scales=[torch.ones(())])


def scale_by_global(x):
    return x * ONE


def by_global_tensor(x, cos, sin):
    return x * cos + scale_by_global(rf.quarter_turn(x)) * sin


def by_global_number(x, cos, sin):
    return (x * cos + rf.quarter_turn(x) * sin) * float(ONE.numpy()[0])


def by_global_flag(x, cos, sin):
    return x * cos + (rf.quarter_turn_pairs if FLAG else rf.quarter_turn)(x) * sin


def by_global_index(x, cos, sin):
    a, b = x.unflatten(-1, (2, -1))[..., SWAP, :].unbind(-2)
    return x * cos + torch.cat((-a, b), -1) * sin


def by_global_object(x, cos, sin):
    return (x * cos + rf.quarter_turn(x) * sin) * LAYOUT.scales[0]


def by_closure():
    scale = torch.ones(())

    def turn(x, cos, sin):
        return (x * cos + rf.quarter_turn(x) * sin) * scale

    return turn


class WithTensors(nn.Module):
    """Module that scales by one of its tensors."""

    def __init__(self, read):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.ones(())), nn.Buffer(torch.ones(1))
        self.is_off, self.count = nn.Buffer(torch.tensor(False)), torch.tensor(1)
        self.config, self.read = types.SimpleNamespace(scale=torch.ones(())), read

    def forward(self, x, cos, sin):
        return (x * cos + rf.quarter_turn(x) * sin) * self.read(self)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (by_global_tensor, r"\(1,\)"), (by_global_number, r"\(1,\)"), (by_global_flag, r"\(\)"),
        (by_global_index, r"\(2,\)"), (by_global_object, r"\(\)"), (by_closure(), r"\(\)"),
        (WithTensors(lambda module: module.gain), r"\(\) or \(1,\)"),  # as it has a counter of shape ()
        (WithTensors(lambda module: module.weight), r"\(\)"), (WithTensors(lambda module: ~module.is_off), r"\(\)"),
        (WithTensors(lambda module: module.count), r"\(\)"), (WithTensors(lambda module: module.config.scale), r"\(\)"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_arguments_are_refused(function, shape):
    """They would get no gradient, and would have to be read at each call."""
    with pytest.raises(TypeError, match=f"depends on a tensor of shape {shape} that is neither an argument nor"):
        drop_in(function)
    assert (ONE.item(), FLAG.item(), SWAP.tolist(), LAYOUT.scales[0].item()) == (1.0, False, [1, 0], 1.0)


def by_constants(x, cos, sin):
    """Use tensors that are made in each call, and only the dtype of a global variable."""
    swapped = x.to(ONE).unflatten(-1, (2, -1))[..., [1, 0], :]
    return x.to(ONE) * cos + (swapped * torch.tensor([[-1.0], [1.0]])).flatten(-2) * sin


def without_effect(x, cos, sin):
    return torch.where(ONE > 5, x, x * cos + rf.quarter_turn(x) * sin)


@pytest.mark.parametrize("function", [by_constants, without_effect, WithTensors(lambda module: 1)])
def test_tensors_that_do_not_matter(function, launches):
    args = torch.randn(2, 3, 5, D), torch.randn(5, D), torch.randn(5, D)
    check_equal(function, drop_in(function), args, {}, launches)


class Storing:
    """Module that stores its arguments."""

    def __init__(self):
        self.seen, self.sizes, self.last = [], {}, None

    def turn(self, x, cos, sin):
        self.seen.append(x)
        self.sizes[x.shape] = self.last = x
        return x * cos + rf.quarter_turn(x) * sin


def test_a_probe_leaves_nothing_in_an_object():
    owner = Storing()
    drop_in(owner.turn)
    assert (owner.seen, owner.sizes, owner.last) == ([], {}, None)


class Counting(nn.Module):
    """Module that rotates from the row ``start`` on. It can continue there at the next call."""

    def __init__(self, start, counts):
        super().__init__()
        self.cos, self.sin, self.start, self.counts = torch.randn(40, D), torch.randn(40, D), start, counts

    def forward(self, x):
        rows = self.start + torch.arange(x.shape[-2])
        if self.counts == "in place":
            self.start += x.shape[-2]
        elif self.counts:
            self.start = self.start + x.shape[-2]
        return x * self.cos[rows] + rf.quarter_turn(x) * self.sin[rows]


@pytest.mark.parametrize("counts", [True, "in place"])
@pytest.mark.parametrize("start", [0, torch.tensor(0)])
def test_an_object_that_counts_tokens_is_refused(start, counts):
    module = Counting(copy.copy(start), counts)
    with pytest.raises(TypeError, match="Counting, which changes the attribute start of its object"):
        drop_in(module)
    assert module.start == 0


def test_the_first_row_may_change(launches):
    """A number is read at each call. A tensor would have to be read from the GPU, so the function is refused."""
    module, x = Counting(0, False), torch.randn(2, 3, 5, D)
    ours = drop_in(module)
    for module.start in (0, 3, 0):
        torch.testing.assert_close(ours(x), module(x))
    with pytest.raises(TypeError, match=r"Counting, which depends on a tensor of shape \(\) that is neither"):
        drop_in(Counting(torch.tensor(0), False))


def test_functions_for_gpus_alone_are_probed_there(monkeypatch, launches):
    """Here the other device is the CPU under another name."""
    call = _Probed.call

    def on_gpu_alone(self, *args):
        if self.device == "cpu":
            raise RuntimeError("expected CUDA tensors")
        return call(self, *args)

    monkeypatch.setattr(_Probed, "call", on_gpu_alone)
    with pytest.raises(TypeError, match="expected CUDA tensors"):
        drop_in(rf.flash_attn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(drop_ins, "_GPU", "cpu:0")
    args = torch.randn(2, 6, 4, 32), torch.randn(6, 16), torch.randn(6, 16)
    check_equal(rf.flash_attn, drop_in(rf.flash_attn), args, {}, launches)
    with pytest.raises(TypeError, match="uses other angles"):
        drop_in(own_angles)


def clamp_positions(q, k, cos, sin, position_ids):
    """Give padding tokens, whose position is -1, the first row."""
    return rf.with_position_ids(q, k, cos, sin, position_ids.clamp(min=0))


@pytest.mark.slow
def test_negative_positions(launches):
    q, k, cos, sin = (torch.randn(*s) for s in ((2, 4, 6, 8), (2, 2, 6, 8), (9, 8), (9, 8)))
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    check_equal(rf.with_position_ids, drop_in(rf.with_position_ids), (q, k, cos, sin, positions), {}, launches)
    with pytest.raises(TypeError, match="got clamp_positions, which is a rotation for some sizes and values"):
        drop_in(clamp_positions)


def test_no_tokens_and_one_row(launches):
    x, cos, sin = torch.randn(2, 4, 0, 8), torch.randn(1, 8), torch.randn(1, 8)
    check_equal(rf.dinov3, drop_in(rf.dinov3), (x, sin, cos), {}, launches)


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_signature():
    ours = drop_in(rf.flash_attn)
    assert inspect.signature(ours) == inspect.signature(rf.flash_attn)
    assert ours.__name__ == "flash_attn"
    assert ours.original is rf.flash_attn
    x, cos, sin = torch.randn(2, 6, 4, 32), torch.randn(6, 16), torch.randn(6, 16)
    expected = rf.flash_attn(x, cos, sin, True)
    for found in (
        ours(x, cos, sin, True),
        ours(sin=sin, x=x, interleaved=True, cos=cos),
        ours(x, cos, sin=sin, interleaved=True),
    ):
        torch.testing.assert_close(found, expected)


def test_optional_tensors():
    """k may be None, and tables may have defaults."""

    def function(q, k=None, cos=None, sin=None):
        q = q * cos + rf.quarter_turn(q) * sin
        return q, (None if k is None else k * cos + rf.quarter_turn(k) * sin)

    ours = drop_in(function)
    q, cos, sin = torch.randn(2, 3, 6, 8), torch.randn(6, 8), torch.randn(6, 8)
    out, none = ours(q, None, cos, sin)
    assert none is None
    torch.testing.assert_close(out, function(q, None, cos, sin)[0])
    torch.testing.assert_close(ours(q, q, cos, sin)[1], out)


@pytest.mark.parametrize("context", ["bfloat16", "float64", "meta", "no_grad", "inference", "autocast"])
def test_the_surroundings_do_not_matter(context, launches):
    q, k, cos, sin = (torch.randn(*s) for s in ((2, 4, 6, 8), (2, 2, 6, 8), (2, 6, 8), (2, 6, 8)))
    expected = rf.hf_llama(q, k, cos, sin)
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    contexts = {
        "meta": lambda: torch.device("meta"), "no_grad": torch.no_grad, "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }  # fmt: skip
    default = torch.get_default_dtype()
    try:
        if context in contexts:
            with contexts[context]():
                ours = drop_in(rf.hf_llama)
                found = ours(q, k, cos, sin)
        else:
            torch.set_default_dtype(getattr(torch, context))
            ours = drop_in(rf.hf_llama)
            found = ours(q, k, cos, sin)
            assert torch.get_default_dtype() == getattr(torch, context)
    finally:
        torch.set_default_dtype(default)
    assert launches
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == grad
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a)


def drawing(x, cos, sin):
    torch.rand(3)
    return rf.dinov3(x, sin, cos)


def test_the_random_state_is_left(launches):
    state = torch.get_rng_state()
    drop_in(drawing)(X, COS, SIN)
    assert torch.equal(torch.get_rng_state(), state)
    assert launches


@pytest.mark.slow
def test_probes_in_two_threads_restore_the_settings():
    """Without a lock, the second probe would start during the first one, and end after it."""
    started, ended = threading.Event(), threading.Event()

    def first(x, cos, sin, wait=False):
        if wait:
            started.wait(0.2)
        return rf.dinov3(x, sin, cos)

    def second(x, cos, sin, wait=False):
        if wait:
            started.set()
            ended.wait(5)
        return rf.dinov3(x, sin, cos)

    def run(function, delay):
        time.sleep(delay)
        function(X, COS, SIN, wait=True)
        ended.set()

    default, filters = torch.get_default_dtype(), [*warnings.filters]
    threads = [threading.Thread(target=run, args=(drop_in(f), i / 20)) for i, f in enumerate((first, second))]
    torch.set_default_dtype(torch.float64)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_default_dtype() == torch.float64
        assert warnings.filters == filters
    finally:
        torch.set_default_dtype(default)
        warnings.filters[:] = filters


def test_a_probe_inside_a_probe():
    inner = drop_in(lambda x, cos, sin: rf.dinov3(x, sin, cos))
    ours = drop_in(lambda q, k, cos, sin: (inner(q, cos, sin), inner(k, cos, sin)))
    assert torch.equal(ours(X, X, COS, SIN)[1], inner(X, COS, SIN))


def test_another_thread_may_clear_the_cache():
    class Cleared(dict):
        def __setitem__(self, key, value):
            """Lose the value at once, as if another thread had cleared the cache."""

    ours = drop_in(rf.hf_llama)
    dict(zip(ours.__code__.co_freevars, ours.__closure__, strict=True))["recipes"].cell_contents = Cleared()
    args = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    torch.testing.assert_close(ours(*args), rf.hf_llama(*args))


# --- compilers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow_except(["hf_llama", "torchtune, positions"], [*SOME, "torchtune, positions", "lightning", "timm, half"]),
)
def test_compile(name, launches):
    """The drop-in compiles to one graph, even for new kinds of arguments."""
    torch._dynamo.reset()
    function, args, kwargs = call_of(name)
    compiled = torch.compile(drop_in(function), fullgraph=True, backend="aot_eager")
    expected = gradients(function, args, kwargs, [])
    launches.clear()
    found = gradients(compiled, args, kwargs, [])
    for a, b in zip(tensors(function(*args, **kwargs)), tensors(compiled(*args, **kwargs)), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-4)
    assert launches


@pytest.mark.slow
def test_compile_with_dynamic_sizes():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(drop_in(rf.hf_llama), fullgraph=True, backend=backend, dynamic=True)
    for batch, tokens in ((3, 6), (5, 11), (7, 9)):
        q, k = torch.randn(batch, 4, tokens, 8), torch.randn(batch, 2, tokens, 8)
        cos, sin = torch.randn(batch, tokens, 8), torch.randn(batch, tokens, 8)
        for a, b in zip(compiled(q, k, cos, sin), rf.hf_llama(q, k, cos, sin), strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict, launches):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = drop_in(rf.hf_partial)

        def forward(self, q, k, cos, sin):
            return self.turn(q, k, cos, sin)

    args = (torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16), torch.randn(2, 6, 8), torch.randn(2, 6, 8))
    program = torch.export.export(Model(), args, strict=strict)
    assert launches
    for a, b in zip(program.module()(*args), rf.hf_partial(*args), strict=True):
        torch.testing.assert_close(a, b)
    # The original negates half of x; ours subtracts.
    assert not any("neg" in str(node.target) for node in program.graph.nodes), "the original was traced"


def test_a_compiled_function_can_be_dropped_in():
    torch._dynamo.reset()
    compiled = torch.compile(rf.dinov3, backend="eager")
    x, cos, sin = torch.randn(2, 3, 6, 8), torch.randn(6, 8), torch.randn(6, 8)
    found = torch.compile(drop_in(compiled), backend="eager")(x, sin, cos)
    torch.testing.assert_close(found, rf.dinov3(x, sin, cos))


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(reason):
    def decorate(function):
        function.reason = reason
        REFUSED.append(function)
        return function

    return decorate


REFUSED = []


@refused("x unchanged")
def identity(x, cos, sin):
    return x


@refused("opposite")
def sine_of_one_output_flipped(x, cos, sin):
    a, b = x.chunk(2, -1)
    c, s = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    return torch.cat((a * c - b * s, b * c - a * s), -1)


@refused("negates cos")
def pair_swapped(x, cos, sin):
    a, b = x.chunk(2, -1)
    c, s = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    return torch.cat((a * s + b * c, a * c - b * s), -1)


@refused("opposite angles")
def q_and_k_opposite(q, k, cos, sin):
    return q * cos + rf.quarter_turn(q) * sin, k * cos - rf.quarter_turn(k) * sin


@refused("computes output 2 from tensor 1 instead of only tensor 2; check whether it uses q in place of k")
def k_from_q(q, k, cos, sin):
    return q * cos + rf.quarter_turn(q) * sin, k * cos + rf.quarter_turn(q) * sin


@refused("known layout|entries of its tables")
def three_channels_mixed(x, cos, sin):
    return x * cos + rf.quarter_turn(x) * sin + x.roll(1, -1) * sin


@refused("different order from the tokens")
def channels_of_a_table_by_token(x, cos, sin):
    place = (torch.arange(x.shape[-2])[:, None] + torch.arange(x.shape[-1])) % x.shape[-1]
    return x * cos.gather(-1, place) + rf.quarter_turn(x) * sin.gather(-1, place)


@refused("does not depend on x")
def added_bias(x, cos, sin):
    return x * cos + rf.quarter_turn(x) * sin + sin


@refused("does not depend on x|not a rotation|entries")
def alibi(x, slopes, freqs):
    return x + slopes * torch.arange(x.shape[-2])[:, None]


_WEIGHT = torch.randn(24, 24, generator=torch.manual_seed(0))


@refused("mixes|known layout|pairs|sizes")
def learned_map(x, cos, sin):
    return x @ _WEIGHT[: x.shape[-1], : x.shape[-1]]


@refused("reads|rotates|sizes|entries")
def tokens_mixed(x, cos, sin):
    y = x * cos + rf.quarter_turn(x) * sin
    return y + 0.1 * y.mean(-2, keepdim=True)


@refused("scales")
def scaling(x, cos, sin):
    return x * cos


@refused("depend on x|linear")
def softmax(x, cos, sin):
    return (x * cos + rf.quarter_turn(x) * sin).softmax(-1)


@refused("linear|values")
def clamped(x, cos, sin):
    return (x * cos + rf.quarter_turn(x) * sin).clamp(-20, 20)


@refused("in place")
def in_place(x, cos, sin):
    return x.copy_(x * cos + rf.quarter_turn(x) * sin)


@refused("random")
def noise(x, cos, sin):
    return x * cos + rf.quarter_turn(x) * sin + torch.randn_like(x)


@refused("random|entries")
def dropout(x, cos, sin):
    return nn.functional.dropout(x * cos + rf.quarter_turn(x) * sin, 0.5)


@refused("uses other angles")
def own_angles(x, pos):
    angles = torch.arange(x.shape[-2])[:, None] * 0.8 ** torch.arange(x.shape[-1])
    return x * angles.cos() + rf.quarter_turn(x) * angles.sin()


@refused(r"uses other angles than those in the argument or tensor where drop_in looks .* recognise\(\)")
def without_tables(q, k):
    return own_angles(q, None), own_angles(k, None)


@refused(r"skips tokens between them; if it computes its own tables from positions, use recognise\(\)")
def tables_from_positions(x, positions):
    angles = positions[..., None] * 0.8 ** torch.arange(x.shape[-1])
    return x * angles.cos() + rf.quarter_turn(x) * angles.sin()


@refused(r"uses other angles; if it computes its own tables from positions, use recognise\(\)")
def tables_from_frequencies(x, freqs):
    angles = torch.arange(x.shape[-2])[:, None] * torch.cat((freqs, freqs), -1)
    return x * angles.cos() + rf.quarter_turn(x) * angles.sin()


@refused("moves channels")
def helper_without_tables(x):
    return rf.quarter_turn(x)


@refused("gradient")
def without_gradient(x, cos, sin):
    with torch.no_grad():
        return x * cos + rf.quarter_turn(x) * sin


@refused("returns")
def logits(q, k, cos, sin):
    return (q * cos + rf.quarter_turn(q) * sin) @ (k * cos + rf.quarter_turn(k) * sin).mT


@refused("values")
def positive_tables(x, cos, sin):
    return x * cos.abs() + rf.quarter_turn(x) * sin


@refused(r"raises ValueError with all kinds of tables that drop_in knows: no; .* from positions, use recognise\(\)")
def broken(x, cos, sin):
    raise ValueError("no")


@refused("has no tensor arguments")
def without_arguments():
    return torch.zeros(3)


def test_parameters_annotated_as_numbers_are_not_tried_as_tensors():
    """Otherwise, drop_in would call ERNIE-Image's ``rope(pos, dim, theta)`` tens of thousands of times."""
    tried = []

    def rope(pos, dim: int, theta: "float"):
        tried.extend((dim, theta))
        raise RuntimeError("rejects every call")

    with pytest.raises(TypeError, match="rope"):
        drop_in(rope)
    assert tried
    assert not any(isinstance(value, torch.Tensor) for value in tried)


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_refusals(function):
    with pytest.raises(TypeError, match=f"{function.__name__}, which .*({function.reason})"):
        drop_in(function)


@pytest.mark.parametrize("value", [3, None, "rotate", torch.zeros(3)])
def test_only_functions(value):
    with pytest.raises(TypeError, match="function"):
        drop_in(value)


# --- of installed libraries ------------------------------------------------------------------------------------------


def test_of_transformers(launches):
    pytest.importorskip("transformers")
    from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
    from transformers.models.glm4 import modeling_glm4 as glm
    from transformers.models.llama4 import modeling_llama4 as llama4
    from transformers.models.nemotron import modeling_nemotron as nemotron
    from transformers.models.phi import modeling_phi as phi
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    q, k = torch.randn(2, 4, 6, 32), torch.randn(2, 2, 6, 32)
    cos, sin = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    for function, args in (
        (phi.apply_rotary_pos_emb, (q, k, cos, sin)),
        (nemotron.apply_rotary_pos_emb, (q, k, cos[..., :16], sin[..., :16])),
        (glm.apply_rotary_pos_emb, (q, k, cos[..., :16], sin[..., :16])),
        (dinov3.apply_rotary_pos_emb, (q, q, cos[0, :4], sin[0, :4])),
        (llama4.apply_rotary_emb, (q.transpose(1, 2), k.transpose(1, 2), torch.randn(2, 6, 16, dtype=torch.complex64))),
        (qwen.apply_rotary_pos_emb_vision, (q[0].transpose(0, 1), q[0].transpose(0, 1), cos[0], sin[0])),
    ):
        check_equal(function, drop_in(function), args, {}, launches)


def test_of_diffusers(launches):
    pytest.importorskip("diffusers")
    from diffusers.models.embeddings import apply_rotary_emb, apply_rotary_emb_allegro
    from diffusers.models.transformers.transformer_ltx import apply_rotary_emb as ltx

    x, cos, sin = torch.randn(2, 4, 6, 48), torch.randn(6, 48), torch.randn(6, 48)
    ours = drop_in(apply_rotary_emb)
    check_equal(apply_rotary_emb, ours, (x, (cos, sin)), {}, launches)
    check_equal(apply_rotary_emb, ours, (x, (cos, sin)), {"use_real_unbind_dim": -2}, launches)
    check_equal(apply_rotary_emb, ours, (x.transpose(1, 2), (cos, sin)), {"sequence_dim": 1}, launches)
    ids = torch.randint(0, 6, (3, 2, 6))
    tables = tuple((torch.randn(6, 16), torch.randn(6, 16)) for _ in range(3))
    check_equal(apply_rotary_emb_allegro, drop_in(apply_rotary_emb_allegro), (x, tables, tuple(ids)), {}, launches)
    wide = torch.randn(2, 6, 192), (torch.randn(2, 6, 192), torch.randn(2, 6, 192))
    check_equal(ltx, drop_in(ltx), wide, {}, launches)


def test_of_timm(launches):
    pytest.importorskip("timm")
    from timm.layers.pos_embed_sincos import apply_rot_embed, apply_rot_embed_cat, apply_rot_embed_list

    x, sin, cos = torch.randn(2, 4, 6, 32), torch.randn(6, 32), torch.randn(6, 32)
    for half in (False, True):
        check_equal(apply_rot_embed, drop_in(apply_rot_embed), (x, sin, cos), {"half": half}, launches)
        check_equal(
            apply_rot_embed_cat, drop_in(apply_rot_embed_cat), (x, torch.cat((sin, cos), -1)), {"half": half}, launches
        )
        check_equal(
            apply_rot_embed_list, drop_in(apply_rot_embed_list), ([x, 2 * x], sin, cos), {"half": half}, launches
        )
