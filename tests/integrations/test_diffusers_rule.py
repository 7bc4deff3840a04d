"""diffusers' models by rule: their own code, on tables that are coordinates and frequencies."""

import copy
import importlib
import pickle
import sys
from pathlib import Path

import pytest
import torch

from lrpe_md import adapt_rotary
from lrpe_md.integrations import restore_rotary, trial
from lrpe_md.integrations.exchange import Adapted, parts

pytest.importorskip("diffusers")

from lrpe_md.integrations import diffusers_apply, tables, trial_diffusers
from lrpe_md.integrations.tables import Heads, Table, outer, read_angles, to_tensor

TABLE = Path(__file__).parents[2] / "scripts" / "results" / "adapters" / "diffusers.csv"
pytestmark = pytest.mark.filterwarnings("ignore")

SPREAD = [  # one of each way in which rotary code differs
    "BriaFibo2Transformer2DModel", "ChronoEditTransformer3DModel", "CogView4Transformer2DModel",
    "CosmosTransformer3DModel", "Flux2Transformer2DModel", "HiDreamImageTransformer2DModel",
    "HunyuanImageTransformer2DModel", "Kandinsky5Transformer3DModel", "LTXVideoTransformer3DModel",
    "LTX2VideoTransformer3DModel", "Lumina2Transformer2DModel", "MiniMaxH3Transformer3DModel",
    "MochiTransformer3DModel", "PRXTransformer2DModel", "QwenImageControlNetModel", "QwenImage21Transformer2DModel",
    "SanaVideoTransformer3DModel", "StableAudio3DiTModel", "ZImageTransformer2DModel",
]  # fmt: skip
QWEN, WAN = "QwenImageTransformer2DModel", "SkyReelsV2Transformer3DModel"


@pytest.fixture
def calls(monkeypatch):
    """How often q and k were encoded by ours, and tables were made into tensors."""
    counts = {"encoded": 0, "computed": 0}
    encode, compute = diffusers_apply._encode, tables._compute

    def count(name, function):
        def counted(*args):
            counts[name] += 1
            return function(*args)

        return counted

    monkeypatch.setattr(diffusers_apply, "_encode", count("encoded", encode))
    monkeypatch.setattr(tables, "_compute", count("computed", compute))
    return counts


@pytest.mark.parametrize("name", SPREAD)
def test_models_are_adapted_whole(name):
    assert trial.try_model("diffusers", trial_diffusers.candidate(name)) == ("diffusers", name, "adapted", "")


@pytest.mark.parametrize("name", [QWEN, WAN, "Flux2Transformer2DModel", "LTXVideoTransformer3DModel"])
def test_no_table_is_computed(name, calls):
    model = adapt_rotary(trial_diffusers.build(name))
    calls.update(encoded=0, computed=0)
    trial_diffusers.call(model)
    assert calls["encoded"] >= 2
    assert calls["computed"] == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CogVideoXTransformer3DModel", r"attn1\.processor \(CogVideoXAttnProcessor2_0\), got none: a function or the"),
        ("ErnieImageTransformer2DModel", "no rotation"), ("HunyuanVideoFramepackTransformer3DModel", "averages"),
    ],
)  # fmt: skip
def test_others_are_refused_with_the_reason(name, reason):
    model = trial_diffusers.build(name)
    with pytest.raises((TypeError, ValueError), match=reason):
        adapt_rotary(model)
    assert not any(isinstance(part, Adapted) for part in parts(model).values())


def test_the_committed_table():
    counts = trial.count(trial.read(TABLE))
    assert counts["adapted"] >= 46
    assert "wrong" not in counts


# --- whose code or tables are others -----------------------------------------------------------------------------


def compare(model, call=trial_diffusers.call):
    """Adapted as stock, restored as before."""
    stock = call(model)
    found = call(adapt_rotary(model))
    assert any(isinstance(part, Adapted) for part in parts(model).values())
    assert trial._distance(found, stock) <= trial.BOUND
    again = call(restore_rotary(model))
    assert trial._distance(again, stock) == 0
    return stock


def test_a_theta_that_is_written_afterwards_is_followed():
    """Also after the model was adapted."""
    model = trial_diffusers.build("Flux2Transformer2DModel")
    first = compare(model)
    model.pos_embed.theta = 77
    second = compare(model)
    assert trial._distance(first, second) > 1e-3
    adapt_rotary(model).pos_embed.theta = 33
    found = trial_diffusers.call(model)
    assert trial._distance(found, trial_diffusers.call(restore_rotary(model))) <= trial.BOUND
    assert trial._distance(found, second) > 1e-3


def test_kept_tables_of_another_theta_are_followed():
    first = compare(trial_diffusers.build(QWEN))
    model = trial_diffusers.build(QWEN)  # as yet without tables in a cache
    for name, start in (("pos_freqs", 0), ("neg_freqs", -4096)):
        rows = torch.arange(start, start + 4096, dtype=torch.float64)
        angles = [torch.outer(rows, 500.0 ** -(torch.arange(0, dim, 2).double() / dim)) for dim in (4, 6, 6)]
        table = torch.cat(angles, 1)
        setattr(model.pos_embed, name, torch.polar(torch.ones_like(table), table).to(torch.complex64))
    assert trial._distance(first, compare(model)) > 1e-3


@pytest.mark.parametrize(
    ("name", "attribute"), [(QWEN, "pos_freqs"), (WAN, "freqs_cos"), ("Kandinsky5Transformer3DModel", "args_0")]
)
def test_kept_tables_that_follow_from_no_theta_are_refused(name, attribute):
    model = trial_diffusers.build(name)
    rope = next(part for part in model.modules() if hasattr(part, attribute))
    table = getattr(rope, attribute)
    with torch.no_grad():
        table[5:] = table[5:].roll(1, 0) if attribute != "freqs_cos" else 0.5
    if attribute == "args_0":  # angles of no line are no table that is known: the code makes a tensor of them
        compare(model)
        return
    with pytest.raises(ValueError, match="tables that follow from one theta"):
        adapt_rotary(model)
    assert not any(isinstance(part, Adapted) for part in parts(model).values())


def test_frequencies_that_are_scaled_by_hand_are_followed():
    model = trial_diffusers.build("MiniMaxH3Transformer3DModel")
    first = compare(model)
    model.rope.inv_freq.mul_(0.5)
    assert trial._distance(first, compare(model)) > 1e-3


@pytest.mark.parametrize("power", [1, 2])
def test_a_processor_of_the_users_is_followed(power):
    """What it does to the tables is done to tensors: here it turns by twice the angle."""
    model = trial_diffusers.build(QWEN)
    base = type(model.transformer_blocks[0].attn.processor)

    class Own(base):
        def __call__(
            self, attn, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None,
            attention_mask=None, image_rotary_emb=None,
        ):  # fmt: skip
            freqs = tuple(f * f if power == 2 else f for f in image_rotary_emb)
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, attention_mask, freqs
            )

    first = compare(model)
    model.transformer_blocks[0].attn.set_processor(Own())
    second = compare(model)
    assert (trial._distance(first, second) > 1e-3) == (power == 2)


class Reversed(importlib.import_module("diffusers.models.transformers.transformer_flux2").Flux2PosEmbed):
    def forward(self, ids):
        return [torch.flip(t, (0,)) for t in self.forward_of_stock(ids.flip(0))]

    def forward_of_stock(self, ids):
        angles = torch.outer(ids[:, 1].float(), 100.0 ** -(torch.arange(8) / 8))
        return angles.cos().repeat_interleave(2, dim=1), angles.sin().repeat_interleave(2, dim=1)


EVALUATED: list[str] = []


def note(what):
    EVALUATED.append(what)
    return lambda function: function


class Unrun:
    """Code that reading a processor must not run: imports, defaults and decorators of branches that are never taken."""

    def __call__(self, q, rotary_emb, never=False):
        if never:
            from antigravity import fly

            from no_such_package.models import apply_rotary_emb

            def apply_rotary(x, table, scale=note("default"), *, more=note("keyword")):  # noqa: B008
                return fly(x * scale)

            @note("decorator")
            def apply_rope(x, table):
                return x

            q = apply_rope(apply_rotary(apply_rotary_emb(q, rotary_emb), rotary_emb), rotary_emb)
        return q


def test_reading_runs_nothing_else():
    assert diffusers_apply.exchange_calls(Unrun, "auto") == {}
    assert not EVALUATED
    assert not {"antigravity", "no_such_package"} & sys.modules.keys()


def test_a_rotary_module_of_the_users_is_followed():
    model = trial_diffusers.build("Flux2Transformer2DModel")
    first = compare(model)
    model.pos_embed.__class__ = Reversed
    assert trial._distance(first, compare(model)) > 1e-3


def test_a_rotary_module_that_can_not_be_read_is_refused():
    class Own(Reversed):
        def forward(self, ids):
            return super().forward(ids)

    model = trial_diffusers.build("Flux2Transformer2DModel")
    model.pos_embed.__class__ = Own
    with pytest.raises(ValueError, match=r"Own\.forward: expected a function without a closure or super"):
        adapt_rotary(model)
    assert not any(isinstance(part, Adapted) for part in parts(model).values())


def test_a_forward_of_the_instances_is_refused():
    model = trial_diffusers.build("Flux2Transformer2DModel")
    model.pos_embed.forward = lambda ids: None
    with pytest.raises(ValueError, match=r"pos_embed: expected the forward of its class"):
        adapt_rotary(model)


def test_axes_that_do_not_fill_a_head():
    """The library's own error, adapted or not."""
    torch.manual_seed(0)
    model = trial_diffusers.build("Flux2Transformer2DModel")
    model.pos_embed.axes_dim = (4, 4, 4, 2)
    with pytest.raises(RuntimeError):
        trial_diffusers.call(model)
    with pytest.raises(RuntimeError):
        trial_diffusers.call(adapt_rotary(model))


def test_a_split_sequence_is_refused():
    """diffusers splits a rotary module's tensors over ranks; tables are none."""
    hooks = pytest.importorskip("diffusers.hooks.context_parallel")
    model = adapt_rotary(trial_diffusers.build(WAN))
    hook = hooks.ContextParallelSplitHook({}, None)
    given = model.rope(torch.randn(1, 4, 3, 8, 12))
    with pytest.raises(ValueError, match="Expected output to be a tensor"):
        hook.post_forward(model.rope, given)


# --- as models are used ------------------------------------------------------------------------------------------


def test_other_models_of_the_process_are_left_alone():
    one, other = (trial_diffusers.build(QWEN) for _ in range(2))
    stock = trial_diffusers.call(other)
    kinds = [type(part) for part in parts(other).values()]
    adapt_rotary(one)
    assert type(one) is type(other)
    assert [type(part) for part in parts(other).values()] == kinds
    assert trial._distance(trial_diffusers.call(other), stock) == 0
    assert not any(isinstance(part, Adapted) for part in parts(trial_diffusers.build(QWEN)).values())


@pytest.mark.parametrize("name", [QWEN, "ZImageTransformer2DModel"])
def test_copies_and_files(name):
    model = trial_diffusers.build(name)
    stock = trial_diffusers.call(model)
    adapt_rotary(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = trial_diffusers.call(made)
        assert trial._distance(found, stock) <= trial.BOUND
        assert trial._distance(trial_diffusers.call(restore_rotary(made)), stock) == 0
    assert trial._distance(trial_diffusers.call(model), stock) <= trial.BOUND


@pytest.mark.parametrize("name", [QWEN, WAN])
def test_checkpointing(name):
    model = trial_diffusers.build(name).train()
    model.enable_gradient_checkpointing()
    compare(model)


@pytest.mark.parametrize("name", [QWEN, WAN])
def test_sixteen_bits(name):
    model = trial_diffusers.build(name).to(torch.bfloat16)
    given = trial_diffusers.inputs(model)
    floats = {k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}
    with torch.no_grad():
        stock = model(**floats).sample
        found = adapt_rotary(model)(**floats).sample
    assert found.dtype == torch.bfloat16
    assert (found - stock).float().norm() < 0.02 * stock.float().norm()


@pytest.mark.parametrize("name", [QWEN, "LTXVideoTransformer3DModel"])
def test_compiling_breaks_no_graph_that_the_original_keeps(name):
    model = trial_diffusers.build(name)
    given = trial_diffusers.inputs(model)
    stock = model(**given).sample
    torch._dynamo.reset()
    found = torch.compile(adapt_rotary(model), backend="eager", fullgraph=True)(**given).sample
    torch.testing.assert_close(found, stock, rtol=0, atol=1e-5)


# --- tables --------------------------------------------------------------------------------------------------------


def table(rows=6, channels=4, part="cos", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(n, generator=generator, dtype=torch.float64) for n in (rows, channels))
    return Table(outer(a, b).blocks, part, dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[2:5], lambda t: t[[0, -1]], lambda t: t[torch.tensor([3, 1])], lambda t: t[None, :, None],
        lambda t: t[..., 1:3], lambda t: t[1:, 2:], lambda t: t[..., 0::2], lambda t: t.split([1, 3], dim=1)[1],
        lambda t: t.split(4)[1], lambda t: t.chunk(2)[0], lambda t: t.view(2, 3, -1), lambda t: t.view(6, 1, 1, 4),
        lambda t: t.view(1, 24), lambda t: t.view(3, 8), lambda t: t.unsqueeze(0).expand(2, -1, 4),
        lambda t: t.unsqueeze(-1), lambda t: t.repeat(2, 1), lambda t: t.repeat(1, 2),
        lambda t: t.repeat_interleave(2, dim=-1), lambda t: t.repeat_interleave(2, dim=-1)[..., 2:4],
        lambda t: t.repeat_interleave(2, dim=-1)[..., 1:4], lambda t: t.unflatten(0, (2, -1)).permute(1, 0, 2),
        lambda t: t.unflatten(0, (2, -1)).flatten(0, 1), lambda t: t.transpose(0, 1), lambda t: t.T,
        lambda t: torch.cat([t, t], -1), lambda t: torch.cat([t[:2], t[3:]]), lambda t: torch.stack([t, t]),
        lambda t: torch.cat([t, t[:, :2] * 1], dim=1), lambda t: torch.cat([t, t[:2]], dim=0),
        lambda t: torch.cat([torch.ones_like(t[:, :1]), t], -1), lambda t: -t, lambda t: t * 2 + 1, lambda t: t.sum(),
        lambda t: torch.cat([t, torch.zeros(1, 4)]), lambda t: t.to(torch.bfloat16), lambda t: t.double(),
        lambda t: torch.nn.utils.rnn.pad_sequence([t[:2], t[:2]], batch_first=True), lambda t: list(t)[1],
        lambda t: t.unbind(0)[2], lambda t: t[torch.arange(6) % 2 == 0],
        lambda t: t.view(2, 3, 2, 2), lambda t: t.view(2, 3, 2, 2).transpose(1, 2),
        lambda t: t.numel() + t.dim() + len(t) + t.size(1), lambda t: t.narrow(0, 1, 2), lambda t: t.squeeze(0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", ["cos", "sin", "angle"])
def test_whatever_is_done_to_a_table_is_as_to_its_tensor(change, part):
    given = table(part=part)
    found, expected = to_tensor(change(given)), change(to_tensor(given))
    if isinstance(expected, int):
        assert found == expected
        return
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("part", ["cos", "sin", "angle"])
def test_tables_of_other_frequencies_are_joined(part):
    a, b = table(6, 4, part), table(2, 4, part)
    b = Table([b.blocks[0]._replace(omega=2 * b.blocks[0].omega, key=("other",))], part, b.dtype)
    found = torch.cat([a, b])
    assert isinstance(found, Table)
    torch.testing.assert_close(to_tensor(found), torch.cat([to_tensor(a), to_tensor(b)]))
    assert isinstance(torch.cat([a[:2], b], 1), Table)
    torch.testing.assert_close(to_tensor(torch.cat([a[:2], b], 1)), torch.cat([to_tensor(a)[:2], to_tensor(b)], 1))


def test_products_of_places_and_frequencies():
    places, omega = torch.rand(2, 5, 3), torch.rand(4)
    found = tables.times(omega, places.unsqueeze(-1))
    assert isinstance(found, Table)
    torch.testing.assert_close(to_tensor(found), omega * places.unsqueeze(-1))
    turned = found.transpose(-1, -2).flatten(2)
    torch.testing.assert_close(to_tensor(turned), (omega * places.unsqueeze(-1)).transpose(-1, -2).flatten(2))
    assert read_angles(turned).omega.shape == (12, 3)
    by_head = turned.cos().reshape(2, 5, 2, 6)
    assert isinstance(by_head, Heads)
    torch.testing.assert_close(to_tensor(torch.swapaxes(by_head, 1, 2)), to_tensor(by_head).transpose(1, 2))


def test_cosines_and_sines_of_other_places_are_told_apart():
    angle = table(part="angle")
    cos, sin = angle.cos(), angle.sin()
    assert tables.have_same_angles(cos[1:3], sin[1:3])
    assert not tables.have_same_angles(cos[1:3], sin[2:4])
    index = torch.tensor([0, 1])
    assert tables.have_same_angles(cos[index], sin[index])
    assert not tables.have_same_angles(cos[index], sin[index.clone()])


def test_learned_frequencies_stay_tensors():
    assert isinstance(outer(torch.arange(3.0), torch.rand(2, requires_grad=True)), torch.Tensor)
