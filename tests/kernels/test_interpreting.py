"""The quick interpreter (tests/interpreting.py) computes what Triton's does."""

import pytest
import torch
import triton
import triton.language as tl
from interpreting import PatchOnce, quicken
from triton.runtime import interpreter

from lrpe_md.engine import dispatch
from lrpe_md.testing import Case, make_inputs, run

pytestmark = pytest.mark.skipif(not dispatch.INTERPRETING, reason="needs the interpreter")


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
    """Modules that Triton patches, in order; those of the session's interpreter are not counted."""
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
    assert len(patches) > 3  # else Triton has changed, and the quick interpreter can go
    patches.clear()
    monkeypatch.setattr(interpreter, "_patch_lang", PatchOnce(interpreter._patch_lang))
    assert launch(x) == 22
    # tl.sum and tl.max are kernels of a module that calls the language by another name
    assert patches == [__name__, "triton.language.standard"]


def test_the_language_is_restored():
    before = [dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype)]
    assert tl.core.is_builtin(tl.load)
    launch(torch.ones(4))
    with pytest.raises(interpreter.InterpreterError):
        _kernel[(1,)](None, torch.empty(1), BLOCK=4)
    assert [dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype)] == before


@pytest.mark.parametrize("case", [Case(act="softmax", dim=-2), Case("rotate", coords="by_sample", phase=True)], ids=str)
def test_the_same_bits(case, monkeypatch):
    inputs = make_inputs(case)
    quick = run(inputs, "triton")
    with monkeypatch.context() as slow:
        slow.setattr(interpreter, "_patch_lang", interpreter._patch_lang.patch)
        slow.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
        expected = run(inputs, "triton")
    for name, tensor in quick.items():
        assert torch.equal(tensor, expected[name]), name


def test_another_triton_is_told(monkeypatch):
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
    """Of Triton's own interpreter from 3.9 on."""
    x, y = torch.rand(2, 64)
    out = torch.full((64,), float("nan"))
    _residues[(1,)](x, y, out, torch.tensor(1, dtype=torch.int32), BLOCK=64)
    exact = x.double() * y.double() - (x * y).double()
    assert exact.count_nonzero() > 32
    assert torch.equal(out.double(), exact)
