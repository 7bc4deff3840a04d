"""Associative recall: the answers in a clip, what a model can learn from clips, the memories, and the training."""

import json
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from lrpe_md.models.frames import FrameAttention
from lrpe_md.scripts.train.data.recall import KINDS, NO_ANSWER, OFFSETS, Clips, Symbols, draw_clips, encode_clips
from lrpe_md.scripts.train.memory import MemoryAttention, build_model, limit_gate
from lrpe_md.scripts.train.tasks import recall
from lrpe_md.scripts.train.tasks.recall import RecallTraining
from torch.nn.functional import one_hot
from train_commands import Killed, die_after

from lrpe_md.integrations.attention import Context
from lrpe_md.integrations.encoding import EncodingStack
from lrpe_md.reference import activate

SYMBOLS = Symbols(keys=6, values=5, writes=3, questions=2)
SIZE = 6, 3, 4
MIXED = "delta,delta,delta,softmax"


def draws(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2**63, size=number)


def config(out: Path, **changes: Any) -> RecallTraining:
    same: dict[str, Any] = {"device": "cpu", "tensorboard": False, "progress": False}
    return RecallTraining(out=out, **{**same, **changes})


# --- the clips -------------------------------------------------------------------------------------------------------


def answer(clips: Clips, sample: int, t: int, h: int, w: int) -> int | None:
    """Find the answer for one token as a person would, by going back frame by frame from the token's own frame."""
    key, offset = clips.keys[sample, t, h, w], clips.offsets[sample, t, h, w]
    if clips.values[sample, t, h, w] >= 0:
        return None  # it writes
    if offset >= 0:
        back, down, right = OFFSETS[offset]
        assert min(t - back, h + down, w + right) >= 0
        return clips.values[sample, t - back, h + down, w + right]
    if key < 0:
        return None
    for frame in range(t, -1, -1):
        for place in np.argwhere(clips.keys[sample, frame] == key):
            value = clips.values[(sample, frame, *place)]
            if value >= 0:
                return value
    raise AssertionError("a key that was never written")


@pytest.mark.parametrize("size", [SIZE, (5, 4, 4), (9, 2, 5)])
def test_answers_are_those_of_a_search(size: tuple[int, int, int]) -> None:
    clips = draw_clips(SYMBOLS, size, draws(30))
    asked = Counter()
    for place in np.ndindex(clips.keys.shape):
        expected = answer(clips, *place)
        assert clips.answers[place] == (-1 if expected is None else expected)
        asked[expected is not None, bool(clips.offsets[place] >= 0)] += 1
    assert min(asked[True, False], asked[True, True]) > 200
    assert clips.kind(0).sum() == asked[True, False]
    assert clips.kind(1).sum() == asked[True, True]


def test_each_frame_holds_the_symbols_that_were_asked_for() -> None:
    clips = draw_clips(SYMBOLS, SIZE, draws(300))
    writes = clips.values >= 0
    assert (writes.sum((2, 3)) == SYMBOLS.writes).all()
    assert (clips.keys[writes] >= 0).all()
    assert (clips.kind(0).sum((2, 3)) == SYMBOLS.questions).all()
    assert (clips.kind(1).sum((2, 3)) <= SYMBOLS.questions).all()
    assert (clips.kind(1)[:, 0] == 0).all()  # nothing lies before the first frame
    assert not (clips.kind(0) & clips.kind(1)).any()
    assert not (writes & (clips.answers >= 0)).any()
    for sample, frame in np.ndindex(clips.keys.shape[:2]):
        written = clips.keys[sample, frame][writes[sample, frame]]
        assert len(set(written.tolist())) == len(written)
    for symbols, number in (
        (clips.keys[writes], SYMBOLS.keys), (clips.values[writes], SYMBOLS.values), (clips.keys[clips.kind(0)], 6),
        (clips.offsets[clips.offsets >= 0], len(OFFSETS)),
    ):  # fmt: skip
        counts = np.bincount(symbols, minlength=number)
        assert len(counts) == number
        assert counts.min() > 0.5 * counts.mean()


def test_answers_are_evenly_distributed_and_independent_of_the_question() -> None:
    clips = draw_clips(SYMBOLS, SIZE, draws(1500))
    for kind in range(len(KINDS)):
        asks = clips.kind(kind)
        table = np.zeros((6, SYMBOLS.values))
        symbol = clips.keys[asks] if kind == 0 else clips.offsets[asks]
        np.add.at(table, (symbol, clips.answers[asks]), 1)
        table = table[table.sum(1) > 0]
        share = table / table.sum(1, keepdims=True)
        assert np.abs(share - 1 / SYMBOLS.values).max() < 4.5 / np.sqrt(SYMBOLS.values * table.sum(1).min())


def test_a_frame_asks_independently_of_what_it_writes() -> None:
    clips = draw_clips(SYMBOLS, (12, 3, 4), draws(600))
    found: dict[tuple[int, ...], list[bool]] = {}
    for sample in range(600):
        written = clips.keys[sample, -1][clips.values[sample, -1] >= 0]
        for place in np.argwhere(clips.kind(0)[sample, -1]):
            key = clips.keys[(sample, -1, *place)]
            found.setdefault(tuple(place), []).append(key in written)
    share = SYMBOLS.writes / SYMBOLS.keys  # by then all keys were written
    assert len(found) == 12
    for each in found.values():
        assert abs(np.mean(each) - share) < 4.5 * np.sqrt(share * (1 - share) / len(each))


def test_later_writes_replace_earlier_ones_often() -> None:
    """Otherwise, a memory that adds would be as good as one that overwrites."""
    clips = draw_clips(Symbols(16, 16, 4, 2), (8, 4, 4), draws(50))
    several = 0
    for sample, frame, *place in np.argwhere(clips.kind(0)):
        key = clips.keys[(sample, frame, *place)]
        seen = clips.values[sample, : frame + 1][clips.keys[sample, : frame + 1] == key]
        several += len(set(seen[seen >= 0].tolist())) > 1
    assert several / clips.kind(0).sum() > 0.3


def test_a_draw_gives_the_same_clip_in_any_batch() -> None:
    number = draws(7)
    whole, again = draw_clips(SYMBOLS, SIZE, number), draw_clips(SYMBOLS, SIZE, number)
    parts = [draw_clips(SYMBOLS, SIZE, part) for part in np.split(number, (3, 5))]
    for one, two, split in zip(whole, again, zip(*parts, strict=True), strict=True):
        assert (one == two).all()
        assert (one == np.concatenate(split)).all()
    assert (whole.values[0] != whole.values[1]).any()
    assert (draw_clips(SYMBOLS, SIZE, draws(7, 1)).values != whole.values).any()


def test_the_input_shows_the_question_and_hides_the_answer() -> None:
    clips = draw_clips(SYMBOLS, SIZE, draws(4))
    x, labels = encode_clips(SYMBOLS, clips)
    assert x.shape == (4, SYMBOLS.channels, *SIZE)
    assert labels.shape == (4, 72)
    parts = x.split([SYMBOLS.keys, SYMBOLS.values, len(OFFSETS)], 1)
    for part, symbols in zip(parts, clips, strict=False):
        assert (part.sum(1).numpy() == (symbols >= 0)).all()
        assert (part.argmax(1).numpy()[symbols >= 0] == symbols[symbols >= 0]).all()
    asks = labels.view(4, *SIZE) != NO_ANSWER
    assert (asks.numpy() == (clips.answers >= 0)).all()
    assert (parts[1].sum(1)[asks] == 0).all()  # no value at a token that asks


# --- the model -------------------------------------------------------------------------------------------------------


def model_of(attention: str, encoding: str = "rotate", **changes: Any) -> Any:
    torch.manual_seed(0)
    return build_model(
        **recall.model_arguments(config(Path("unused"), attention=attention, encoding=encoding, **changes))
    )


@pytest.mark.parametrize("attention", ["softmax", "add", "decay", "delta", MIXED])
def test_a_token_sees_no_later_frame(attention: str) -> None:
    model = model_of(attention, depth=4).eval()
    symbols, size = Symbols(8, 8, 4, 2), (5, 4, 4)
    x, _ = encode_clips(symbols, draw_clips(symbols, size, draws(2)))
    y, _ = encode_clips(symbols, draw_clips(symbols, size, draws(2, 1)))
    mixed = torch.cat([x[:, :, :3], y[:, :, 3:]], dim=2)
    with torch.no_grad():
        one, two = (model(each).unflatten(1, size) for each in (x, mixed))
    assert torch.allclose(one[:, :3], two[:, :3], atol=1e-5)
    assert (one[:, 3:] - two[:, 3:]).abs().max() > 1e-3


def test_memories() -> None:
    kinds = {name: [type(block.attn) for block in model_of(name, depth=4).blocks] for name in ("softmax", "add", MIXED)}
    assert kinds["softmax"] == [FrameAttention] * 4
    assert kinds["add"] == [MemoryAttention] * 4
    assert kinds[MIXED] == [*[MemoryAttention] * 3, FrameAttention]
    two = [block.attn for block in model_of("decay,delta", depth=2).blocks]
    assert [attn.rule for attn in two] == ["add", "delta"]
    assert two[1].decay is None
    decay = two[0].decay()
    assert torch.allclose(math.log(0.5) / decay[[0, -1]].log(), torch.tensor([1.0, 16.0]), rtol=1e-3)
    with pytest.raises(ValueError, match="attention: expected 'softmax', 'add', 'decay' or 'delta', got 'subtract'"):
        build_model(**{**recall.model_arguments(config(Path("unused"))), "attention": "subtract"})


def test_only_linear_layers_of_a_mixed_model_have_features() -> None:
    for encoding, act in (("none", None), ("rotate", "none"), ("rotate-mixed", "none")):
        model = model_of(MIXED, encoding, depth=4)
        assert [block.attn.feature_act for block in model.blocks[:3]] == ["relu"] * 3
        assert getattr(EncodingStack(model.encoding)[3], "act", None) == act
    model = model_of(MIXED, "cosine-silu", depth=4)
    assert model.blocks[0].attn.feature_act is None
    assert model.encoding.act == "silu"


def test_which_parts_of_linear_attention_are_rotated() -> None:
    found = {
        name: model_of("add", name).blocks[0].attn.normalizer for name in ("rotate", "rotate-numerator", "rotate-both")
    }
    assert found == {"rotate": "none", "rotate-numerator": "unrotated", "rotate-both": "encoded"}


class Fixed(torch.nn.Module):
    """A projection that returns the same q, k and v for any input."""

    def __init__(self, keys: list[list[float]], values: list[float]) -> None:
        super().__init__()
        self.out = torch.tensor([[*key, *key, value, 0.0] for key, value in zip(keys, values, strict=True)])[None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out


@pytest.mark.parametrize(("memory", "expected"), [("add", [0.5, 2.0]), ("decay", [0.5, 1.25]), ("delta", [0.5, 1.0])])
def test_a_memory_adds_forgets_or_overwrites(memory: str, expected: list[float]) -> None:
    """There is one head, and the second of two tokens per frame is blank. Frames 1 and 3 write with the same key."""
    attn: Any = model_of(memory, "none", dim=2, heads=1).blocks[0].attn
    attn.qkv = Fixed([[1, 0], [0, 0], [0, 1], [0, 0], [1, 0], [0, 0]], [1, 0, 0.5, 0, 1, 0])
    attn.q_norm = attn.k_norm = attn.norm = attn.proj = torch.nn.Identity()
    torch.nn.init.zeros_(attn.write_gate.weight)
    torch.nn.init.constant_(attn.write_gate.bias, 30.0)
    if memory == "decay":
        torch.nn.init.zeros_(attn.decay.logit)  # half of the state is kept
    out = attn(torch.zeros(1, 6, 2), Context(None, None, block=2))
    assert out[0, [2, 4], 0].tolist() == pytest.approx(expected)


# --- the training ----------------------------------------------------------------------------------------------------


def test_a_limited_gate_keeps_the_delta_rule_stable() -> None:
    """No eigenvalue of A exceeds 1, and keys that don't overlap are written as before."""
    torch.manual_seed(0)
    k = torch.randn(2, 3, 24, 8).relu() * torch.linspace(0.05, 2, 3)[:, None, None]
    gate = torch.rand(2, 3, 24).requires_grad_()
    limited = limit_gate(gate, k, 6)
    keys, beta = k.unflatten(2, (-1, 6)).double(), limited.unflatten(2, (-1, 6)).double()
    largest = torch.linalg.eigvalsh(keys.mT @ (keys * beta[..., None]))[..., -1]
    full = torch.linalg.eigvalsh(keys.mT @ (keys * gate.unflatten(2, (-1, 6))[..., None].double()))[..., -1]
    assert largest.max() <= 1 + 1e-6
    assert full.max() > 2
    torch.testing.assert_close(limited[:, 0], gate[:, 0])  # these keys are too short to need a limit
    limited.square().sum().backward()
    assert gate.grad is not None
    assert gate.grad.isfinite().all()
    unit = torch.eye(6).repeat(4, 1)[None, None]  # one write for each key
    torch.testing.assert_close(limit_gate(torch.ones(1, 1, 24), unit, 6), torch.ones(1, 1, 24))


@pytest.mark.parametrize("encoding", ["rotate", "none", "cosine-silu"])
def test_the_gate_of_a_delta_layer_is_limited(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound uses the keys that linear attention sees: after the norm, the activation and the map."""
    made = build_model(**recall.model_arguments(config(tmp_path, attention="delta", encoding=encoding)))
    seen: list[float] = []

    def attend(encoding, q, k, v, positions, *, gate, block, act, **options):
        k_hat = encoding(q, k if act is None else activate(k, act), positions=positions)[1]
        weighted = k_hat.unflatten(2, (-1, block)).double()
        beta = gate.unflatten(2, (-1, block)).double()
        seen.append(torch.linalg.eigvalsh(weighted.mT @ (weighted * beta[..., None])).max().item())
        return torch.zeros_like(v)

    monkeypatch.setattr("lrpe_md.scripts.train.memory.attend_with", attend)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("k_norm.weight"):
                weight.fill_(1)
        made(torch.randn(2, Symbols(8, 8, 4, 2).channels, 8, 4, 4))
    assert len(seen) == 2
    assert max(seen) <= 1 + 1e-5
    assert max(seen) > 0.3


def test_the_loss_does_not_depend_on_how_a_batch_is_divided(tmp_path: Path) -> None:
    """Clips have different numbers of questions, but the same weight in any micro-batch."""
    chosen = config(tmp_path, data="4x2x3", writes=2, questions=2)
    x, labels = recall.batch(chosen, torch.device("cpu"), np.zeros(8, np.int64), draws(8))
    numbers = (labels >= 0).sum(1)
    assert len(set(numbers.tolist())) > 1
    model = torch.nn.Sequential(torch.nn.Flatten(2), Transposed(), torch.nn.Linear(chosen.symbols.channels, 8)).double()
    x = x.double()
    logs = model(x).log_softmax(-1)
    each = [-logs[i, places, labels[i, places]].mean() for i, places in enumerate(labels >= 0)]
    whole = recall.loss(model, (x, labels))
    torch.testing.assert_close(whole, torch.stack(each).mean())
    parts = [recall.loss(model, (x[i::4], labels[i::4])) for i in range(4)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


class Transposed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mT


@pytest.mark.slow
def test_a_small_softmax_model_learns_both_kinds_of_questions(tmp_path: Path) -> None:
    result = recall.run(
        config(
            tmp_path, attention="softmax", keys=4, values=4, steps=120, warmup=10, lr=4e-3, test_clips=16, sizes="8x4x4"
        )
    )
    for kind in KINDS:
        assert result["accuracy"][kind]["8x4x4"] > 2 * result["chance"], result["accuracy"]


def test_sizes_and_kinds_of_a_result(tmp_path: Path) -> None:
    result = recall.run(config(tmp_path, data="4x3x3", writes=2, questions=1, steps=1, warmup=0, dim=16, test_clips=4))
    assert list(result["accuracy"]) == list(KINDS)
    for values in result["accuracy"].values():
        assert list(values) == ["4x3x3", "8x3x3", "16x3x3", "32x3x3", "4x6x6"]
        assert all(0 <= value <= 100 for value in values.values())
    assert json.loads((tmp_path / "result.json").read_text())["chance"] == 12.5


def test_the_accuracy_counts_the_last_frames(tmp_path: Path) -> None:
    settings = config(tmp_path, data="4x3x3", writes=2, questions=1, test_clips=5)

    class Oracle(torch.nn.Module):
        """A model that knows the answers for the last frames, or for all other frames."""

        def __init__(self, late: bool) -> None:
            super().__init__()
            self.late = late

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = tuple(x.shape[2:])
            seeds = np.random.default_rng((recall.TEST_SEED, *size)).integers(2**63, size=5)
            answers = draw_clips(settings.symbols, size, seeds).answers
            known = (np.arange(size[0]) >= size[0] - 4)[:, None, None] == self.late
            wrong = (answers + 1) % settings.values
            return one_hot(torch.from_numpy(np.where(known, answers, wrong).clip(0)), settings.values).flatten(1, 3)

    for late, expected in ((True, [100.0, 100.0]), (False, [0.0, 0.0])):
        assert recall.accuracy(settings, Oracle(late), (8, 3, 3), torch.device("cpu"), nullcontext) == expected


def test_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"data": "4x3x3", "writes": 2, "questions": 1, "dim": 16, "test_clips": 4, "steps": 5}
    whole = recall.run(config(tmp_path / "whole", save_every=2, **small))
    with monkeypatch.context() as patch:
        patch.setattr(recall, "batch", die_after(3, recall.batch))
        with pytest.raises(Killed):
            recall.run(config(tmp_path / "killed", save_every=2, **small))
    resumed = recall.run(config(tmp_path / "killed", save_every=2, **small))
    assert (whole["accuracy"], whole["loss"]) == (resumed["accuracy"], resumed["loss"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "8x4"}, "--data: expected FRAMESxHEIGHTxWIDTH, such as 8x4x4, got '8x4'"),
        ({"data": "3x4x4"}, "--data: expected more than 3 frames"),
        ({"sizes": "8x0x4"}, "--sizes: expected FRAMESxHEIGHTxWIDTH"),
        ({"keys": 3}, "--writes: expected at most --keys = 3, got 4"),
        ({"questions": 7}, "expected at most 16 tokens"),
        ({"attention": MIXED}, "attention: expected one value, or a sequence that can be repeated over the 2 layers"),
        ({"attention": "linear"}, "unknown 'linear'"),
        ({"encoding": "cosine:act=gelu"}, "act: expected one of"),
    ],
)
def test_options_are_checked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message.replace("(", r"\(")):
        config(tmp_path, **changes)
