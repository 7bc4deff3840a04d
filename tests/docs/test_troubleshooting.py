"""The library raises the errors on the troubleshooting page."""

import re
from pathlib import Path

import pytest
import torch

from lrpe_md import Grid, RotateMd, adapt, adapt_rotary, linear_attention, preset, rotate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SYMPTOMS = re.findall(r"^\*\*(.+)\*\*$", PAGE, re.M)
GRID = Grid((14, 14), prefix=1)


def inputs():
    return torch.randn(2, 1, 4, 197, 64).unbind()


def call(**options):
    q, k = inputs()
    return rotate(q, k, **{"omega": RotateMd(64, 2).omega, "positions": GRID, **options})


def encode(positions=GRID, swap=False):
    q, k = (x.transpose(1, 2) if swap else x for x in inputs())
    return RotateMd(64, 2)(q, k, positions=positions)


def timm_vit(**options):
    return pytest.importorskip("timm").create_model("vit_tiny_patch16_224", depth=1, **options)


def record_gradient():
    q, k = inputs()
    rotate(q.requires_grad_(), k, omega=RotateMd(64, 2).omega, positions=GRID, out=(torch.empty_like(q), None))


def different_dtypes():
    q, k = inputs()
    RotateMd(64, 2)(q, k.half(), positions=GRID)


def blocks_that_do_not_fit():
    q, k = inputs()
    linear_attention(
        q, k, q, omega=RotateMd(64, 2).omega, positions=GRID, map="rotate", act="silu", normalizer="none", block=5
    )  # fmt: skip


def too_many_graphs():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        encode = torch.compile(RotateMd(64, 2), fullgraph=True, backend="eager")
        for shape in ((4, 6), (1, 6)):
            q, k = torch.randn(2, 1, 2, shape[0] * shape[1], 64)
            encode(q, k, positions=Grid(shape))


CASES = {  # beginning of a symptom: how to reproduce it
    "positions: expected 197 tokens": lambda: encode(Grid((14, 14))),
    "positions: expected 4 tokens": lambda: encode(swap=True),
    "positions: expected 2 axes for this module, got 3": lambda: encode(Grid((1, 14, 14), prefix=1)),
    "positions: expected a Grid": lambda: encode(None),
    "positions: expected coords": lambda: encode(torch.empty(197, 2, device="meta")),
    "cu_seqlens: RotateMd": lambda: RotateMd(64, 2)(inputs()[0], positions=GRID, cu_seqlens=torch.tensor([0, 197])),
    "AssertionError: Input height": lambda: adapt(timm_vit(), "rotate")(torch.randn(1, 3, 256, 256)),
    "omega: expected frequencies": lambda: call(omega=None),
    "omega: expected shape": lambda: call(omega=torch.randn(1, 64, 2)),
    "omega: expected float32": lambda: call(omega=torch.randn(1, 32, 2).half()),
    "num_heads: expected": lambda: preset("rope_vit_mixed", 64),
    "name: expected one of": lambda: preset("wann"),
    "k: expected q's dtype": different_dtypes,
    "k: expected a number of heads divisible": lambda: RotateMd(64, num_heads=4)(
        inputs()[0], inputs()[1][:, :1], positions=GRID
    ),
    "head_dim: expected": lambda: RotateMd(63),
    "tables[0] (cos): expected": lambda: call(omega=None, positions=None, tables=(torch.randn(197, 16),) * 2),
    "out: expected gradients to be disabled": record_gradient,
    "act: expected": lambda: RotateMd(64, act="gelu"),
    "block: expected": blocks_that_do_not_fit,
    "FailOnRecompileLimitHit: Hard": too_many_graphs,
    "model: expected a timm": lambda: adapt(torch.nn.Linear(2, 2), "rotate"),
    "model: expected a model that calls": lambda: adapt_rotary(torch.nn.Linear(2, 2)),
    "encoding: unknown": lambda: adapt(timm_vit(), "rotat"),
}
SOURCES = {  # beginning of a symptom: a part of it that occurs in a package's source
    "timm is not installed": ("lrpe_md", " is not installed; run pip install 'lrpe-md["),
    "tables: expected the same": ("lrpe_md", "tables: expected the same entry for both channels of a pair"),
    "impl: 'triton' needs tensors": ("lrpe_md", "impl: 'triton' needs tensors on a GPU"),
    "triton is not installed": ("lrpe_md", "triton is not installed, so the slower reference runs on this GPU"),
    "train needs typer": ("scripts", ", which is not installed"),
    "--out runs/x: another run": ("scripts", ": another run is writing there"),
}


@pytest.mark.parametrize("beginning", CASES)
def test_the_library_raises_each_error(beginning):
    (symptom,) = [each for each in SYMPTOMS if each.startswith(f"`{beginning}")]
    with pytest.raises(Exception) as raised:  # noqa: PT011
        CASES[beginning]()
    message = str(raised.value)
    for part in re.findall(r"`([^`]+)`", symptom):
        assert re.sub(r"^(AssertionError|FailOnRecompileLimitHit): ", "", part) in message


def test_every_error_on_the_page_is_tested():
    errors = [each for each in SYMPTOMS if each.startswith("`")]
    known = [f"`{beginning}" for beginning in (*CASES, *SOURCES)]
    assert not [each for each in errors if not each.startswith(tuple(known))]
    assert len(errors) == len(known)


@pytest.mark.parametrize("beginning", SOURCES)
def test_other_texts_are_in_the_source(beginning):
    (symptom,) = [each for each in SYMPTOMS if each.startswith(f"`{beginning}")]
    folder, part = SOURCES[beginning]
    assert part in symptom
    assert any(part in path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py"))


def test_each_symptom_has_a_cause_and_a_remedy():
    for part in re.split(r"^\*\*.+\*\*$", PAGE, flags=re.M)[1:]:
        assert part.count("- *Cause:* ") == part.count("- *Fix:* ") == 1, part
