"""The patched interpreter (tests/interpreting.py) gives the same results as Triton's."""

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import triton
import triton.language as tl
from interpreting import OWN, PatchOnce, quicken
from lrpe_md.scripts.common.cases import Case, LinearCase, make_inputs, make_linear_inputs, run, run_linear
from triton.runtime import interpreter

from lrpe_md import Grid, linear_attention, rotate
from lrpe_md.engine.core import operator
from lrpe_md.engine.core.operator import warn_of_interpreter

WARN = warn_of_interpreter
pytestmark = pytest.mark.skipif(not operator.INTERPRETING, reason="needs the interpreter")


@triton.jit
def _largest(x):
    return tl.max(x, axis=0)


@triton.jit
def _inner(x):
    return _largest(x * 2) + tl.sum(x, axis=0)


@triton.jit
def _kernel(p_x, p_out, BLOCK: tl.constexpr):
    x = tl.load(p_x + tl.arange(0, BLOCK))
    tl.store(p_out, _inner(x))


def launch(x):
    out = torch.empty(1)
    _kernel[(1,)](x, out, BLOCK=x.numel())
    return out.item()


@pytest.fixture
def patches(monkeypatch):
    """Return the modules that Triton patches, in order, without those of the session's interpreter."""
    seen = []
    real = interpreter._patch_lang.patch

    def patch(fn):
        seen.append(fn.__module__)
        return real(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", patch)
    return seen


def test_a_launch_patches_once(patches, monkeypatch):
    x = torch.tensor([1.0, 5.0, 2.0, 4.0])
    assert launch(x) == 22
    assert len(patches) > 3  # otherwise Triton has changed, and the patched interpreter is obsolete
    patches.clear()
    monkeypatch.setattr(interpreter, "_patch_lang", PatchOnce(interpreter._patch_lang))
    assert launch(x) == 22
    # tl.sum and tl.max are kernels of a module that imports the language under another name
    assert patches == [__name__, "triton.language.standard"]


def test_the_language_is_restored():
    before = [dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype)]
    assert tl.core.is_builtin(tl.load)
    launch(torch.ones(4))
    with pytest.raises(interpreter.InterpreterError):
        _kernel[(1,)](None, torch.empty(1), BLOCK=4)
    assert [dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype)] == before


@pytest.fixture
def unpatched():
    """Return a context in which the interpreter is Triton's own."""

    @contextmanager
    def undo():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.patch)
            patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
            for owner, name, own in OWN:
                assert getattr(owner, name) is not own, name
                patch.setattr(owner, name, own)
            yield

    return undo


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(act="softmax", dim=-2), Case("rotate", coords="by_sample", phase=True)], ids=str)
def test_patched_interpreter_gives_the_same_bits(case, unpatched):
    inputs = make_inputs(case)
    quick = run(inputs, "triton")
    with unpatched():
        expected = run(inputs, "triton")
    for name, tensor in quick.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_patched_interpreter_gives_the_same_bits_for_linear_attention(unpatched):
    inputs = make_linear_inputs(LinearCase("rotate", dtype=torch.float16, mask="causal", act="softplus", phase="both"))
    quick = run_linear(inputs, "triton")
    with unpatched():
        expected = run_linear(inputs, "triton")
    for name, tensor in quick.items():
        assert torch.equal(tensor, expected[name]), name


@triton.jit
def _operators(p_a, p_b, p_out, BLOCK: tl.constexpr, IS_INTEGER: tl.constexpr):
    o = tl.arange(0, BLOCK)
    blocks = tl.load(p_a + o)[:, None], tl.load(p_b + o)[None, :]
    scalars = tl.load(p_a + 1), tl.load(p_b + 1)
    p_out += (o[:, None] * BLOCK + o[None, :]).to(tl.int64)
    for i in tl.static_range(4):
        a, b = (blocks if i % 2 else scalars)[0], (blocks if i // 2 else scalars)[1]
        a = a if i else tl.broadcast_to(a, BLOCK, BLOCK)
        found = [a + b, a - b, a * b, 3 + a, 3 - a, 3 * a, a + 2, a - 2, a * 2]
        less, more = a < b, a > b
        masks = [less, a <= b, more, a >= b, a == b, a != b, less & more, less | more, less ^ more]
        if IS_INTEGER:
            found = [*found, a & b, a | b, a ^ b, a & 1, a << b, a >> b, a << 2, a >> 1]
        for each in [*found, *masks]:
            tl.store(p_out, each.to(tl.float64))
            p_out += BLOCK * BLOCK


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        *((dtype, dtype) for dtype in (torch.int32, torch.uint32, torch.int64, torch.float32, torch.float64)),
        (torch.int32, torch.int64), (torch.int64, torch.int32),
    ],
    ids=str,
)  # fmt: skip
def test_operators_give_the_same_bits(dtype, other, unpatched):
    """Operands are blocks, scalars and numbers. Blocks are broadcast."""
    a, b = torch.tensor([5, -7, 2**30, 1]).to(dtype), torch.tensor([3, 2, 0, 1]).to(other)
    said = []
    for context in (nullcontext, unpatched):
        out = torch.full((4 * 26, 4, 4), float("nan"), dtype=torch.float64)
        with context():
            _operators[(1,)](a, b, out, BLOCK=4, IS_INTEGER=not dtype.is_floating_point)
        said.append(out)
    torch.testing.assert_close(*said, rtol=0, atol=0, equal_nan=True)
    written = 4 * (18 if dtype.is_floating_point else 26)
    assert said[0][:written].isfinite().all()


@triton.jit
def _join(p_x, p_out, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(p_x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(p_out + tl.arange(0, M)[:, None], x)


def test_patched_interpreter_raises_the_same_errors(unpatched):
    """Both raise errors for mismatched sizes and for invalid block sizes."""
    for sizes in ((4, 2), (3, 2)):
        said = []
        for context in (nullcontext, unpatched):
            with context(), pytest.raises(interpreter.InterpreterError) as error:
                _join[(1,)](torch.ones(8), torch.empty(8), *sizes)
            said.append(str(error.value))
        assert said[0] == said[1]


def test_unsupported_triton_raises(monkeypatch):
    with monkeypatch.context() as changed:
        changed.delattr(interpreter, "_patch_lang")
        with pytest.raises(AttributeError, match="_patch_lang"):
            quicken(changed)


@triton.jit
def _residues(p_x, p_y, p_out, p_count, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x, y = tl.load(p_x + o), tl.load(p_y + o)
    for _ in range(tl.load(p_count)):
        tl.store(p_out + o, tl.fma(x, y, -(x * y)))


def test_an_fma_rounds_once_and_a_tensor_can_bound_a_loop():
    """Triton's own interpreter does both since version 3.9."""
    x, y = torch.rand(2, 64)
    out = torch.full((64,), float("nan"))
    _residues[(1,)](x, y, out, torch.tensor(1, dtype=torch.int32), BLOCK=64)
    exact = x.double() * y.double() - (x * y).double()
    assert exact.count_nonzero() > 32
    assert torch.equal(out.double(), exact)


@pytest.mark.parametrize(("version", "warned"), [("3.6.0", 1), ("3.8.0+git1", 1), ("3.9.0", 0), ("4.0", 0)])
def test_users_of_an_old_interpreter_are_warned_once(version, warned, monkeypatch):
    """The first call that uses it warns, but not with the reference or under a compiler."""
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(operator, "warn_of_interpreter", WARN)
    WARN.cache_clear()
    q, omega = torch.randn(1, 1, 4, 8), torch.rand(1, 4, 1)

    def call(impl):
        return rotate(q, omega=omega, positions=Grid((4,)), impl=impl)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call("reference"), torch.compile(call, backend="eager")("triton")
        assert not seen
        for _ in range(2):
            call("triton")
            linear_attention(q, q, q, map=None, impl="triton")
    found = [str(each.message) for each in seen if issubclass(each.category, RuntimeWarning)]
    assert len(found) == warned
    assert all(f"Triton {version} (TRITON_INTERPRET=1)" in text and "impl='reference'" in text for text in found)
    assert all(each.filename == __file__ for each in seen), "the warning does not point to the caller"
