"""diffusers' models by rule: their own code, on tables that are coordinates and frequencies.

A rotary module runs its own forward, but what it makes tables with makes a :class:`.tables.Table`; an attention runs
its own code, but the functions that turn q and k by such tables are ours (:mod:`.diffusers_apply`). Between the two a
table goes the library's way, so that positions are what the model says, whatever it does to them. Frequencies and
settings are read whenever the module is called: what is written into it by hand is followed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.validate import Impl
from .diffusers_apply import exchange_calls
from .exchange import OWN, Adapted, Step, adapted_class, parts
from .rewrite import Unread, rewrite_pads, rewrite_tables
from .scales import Scales
from .tables import Block, Table

__all__ = ["explain_by_rule", "find_ropes", "is_rope", "plan_by_rule", "plan_callers", "refusals_by_rule"]

EXCEPTIONS = {  # classes of models that look like what is known and are not, and what is special about each
    "HunyuanVideoFramepackTransformer3DModel": (
        "cosines and sines of its history are averages over windows, which no angle has"
    ),
    "AnyFlowFARTransformer3DModel": "positions of its compressed frames are averages of tables",
    "ErnieImageTransformer2DModel": (
        "its angles are repeated for neighbours, and it turns channels that are half a head apart: no rotation"
    ),
    "AllegroTransformer3DModel": "its pipeline makes its tables, and its attentions turn one axis after the other",
    "Cosmos3OmniTransformer": (
        "its attentions turn q and k in code of their own, by tables that are cut for two sequences"
    ),
    "Ideogram4Transformer2DModel": "its attentions turn q and k in code of their own, by no function",
    "WanAnimate2Transformer3DModel": (
        "sizes of grids and strides go to a function that turns one sample after the other"
    ),
}
NAME = re.compile(r"Rope|RoPE|Rotary|PosEmbed|EmbedND|PosEmb")
PROCESSED = re.compile(r"Patch|Attn|Attention|Block|Transformer|Processor|ControlNet|Model")


# --- rotary modules ------------------------------------------------------------------------------------------------


class Stand:
    """In place of a rotary module, for its own methods: what it has, with tables where it has tensors of them."""

    of: type

    def __init__(self, part: Any, tables: dict[str, Any]) -> None:
        self.part, self.tables = part, tables
        for name, value in vars(part).items():
            if "cache" in name and not callable(value):  # of tensors
                setattr(self, name, type(value)() if isinstance(value, (dict, list)) else None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("part", "tables", "of"):
            raise AttributeError(name)
        made = self.tables.get(name)
        value = getattr(self.part, name)
        return value if made is None else made.table(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_make_stand, (self.of,), vars(self))


@functools.cache
def stand_class(cls: type) -> Any:
    return type(f"Stand{cls.__name__}", (Stand,), {**rewrite_tables(cls).methods, "of": cls})


def _make_stand(cls: type) -> Any:
    made = stand_class(cls)
    return made.__new__(made)


class RuledRope(Adapted):
    """A rotary module that gives tables."""

    extras = ("stand", "scales")
    stand: Any
    scales: Scales

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "stand"):
            return self.original.forward(self, *args, **kwargs)
        return self.scales(self.stand.forward(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(self, "rope", "auto")


class RuledCallable(Adapted):
    """The same for one that is no module."""

    extras = ("stand", "scales")
    stand: Any
    scales: Scales

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "stand"):
            return self.original.__call__(self, *args, **kwargs)
        return self.scales(self.stand(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(self, "callable", "auto")


# --- attentions ------------------------------------------------------------------------------------------------------


class RuledCalls(Adapted):
    """An attention, or its processor, whose calls take tables; with tensors they are the library's."""

    impl: Impl = "auto"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "original" in vars(cls):
            for name, method in exchange_calls(cls.original, cls.impl).items():
                setattr(cls, name, method)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(self, "calls", self.impl)


@functools.cache
def _base(kind: str, impl: Impl) -> type[Adapted]:
    if kind == "calls":
        return type("RuledCalls", (RuledCalls,), {"impl": impl, "__module__": __name__})
    return {"rope": RuledRope, "callable": RuledCallable}[kind]


def _reduce(part: Any, kind: str, impl: Impl) -> Any:
    _, _, *state = object.__reduce_ex__(part, 2)
    return (_make_anew, (kind, impl, type(part).original), *state)


def _make_anew(kind: str, impl: Impl, original: type) -> Any:
    cls = adapted_class(_base(kind, impl), original)
    return cls.__new__(cls)


# --- tables that a rotary module keeps ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A kept table: rows are positions from ``start`` on, channels a series theta^-(i / n) for each (theta, n)."""

    kind: str
    start: int
    series: tuple[tuple[float, int], ...]
    repeated: bool
    wrapped: int = 0  # so many rows at the end are -wrapped .. -1

    def table(self, value: Tensor) -> Table:
        rows = value.shape[0]
        coords = torch.arange(self.start, self.start + rows, device=value.device)[:, None]
        if self.wrapped:
            coords = torch.where(coords >= rows - self.wrapped, coords - rows, coords)
        blocks: list[Block] = []
        for theta, num in self.series:
            steps = torch.arange(num, device=value.device, dtype=torch.float64)
            trail, key = ("kept", self.start, rows, self.wrapped), ("kept", theta, num)
            blocks.append(Block(coords, (theta ** (-steps / num))[:, None], self.repeated, trail, key))
        return Table(blocks, self.kind, value.dtype)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Products:
    """A kept table of angles, rows from 0 on: its second row is the frequencies."""

    def table(self, value: Tensor) -> Table:
        coords = torch.arange(value.shape[0], device=value.device)[:, None]
        block = Block(coords, value[1][:, None], False, ("kept", value.shape[0]), ("kept", value))
        return Table([block], "angle", value.dtype)


@dataclass(frozen=True)
class Several:
    """A list of kept tables, one an axis."""

    each: tuple[Series, ...]

    def table(self, value: Any) -> list[Table]:
        return [own.table(tensor) for own, tensor in zip(self.each, value, strict=True)]


def read_kept(path: str, part: Any) -> dict[str, Any]:
    """The tables among a rotary module's attributes.

    Raises:
        Unread: tables of no theta that could be found.
    """
    held: dict[str, Any] = {**vars(part), **getattr(part, "_buffers", {})}
    found: dict[str, Any] = {}
    for name in held:
        value: Any = held[name]
        if _is_list(value):
            found[name] = Several(tuple(_read_series(f"{path}.{name}", v, None) for v in value))
        elif not _is_table(value):
            continue
        elif value.is_complex():
            found[name] = _read_series(f"{path}.{name}", value, None)
        elif name.endswith("cos") and _is_table(sin := held.get(f"{name[:-3]}sin")):
            found[name] = _read_series(f"{path}.{name}", value, sin)
            found[f"{name[:-3]}sin"] = dataclasses.replace(found[name], kind="sin")
        elif not name.endswith("sin") and _is_outer(value):
            found[name] = _read_angles(f"{path}.{name}", value)
    return found


def _is_list(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(_is_table(each) and each.is_complex() for each in value)


def _is_table(value: Any) -> Any:
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[0] > 1


def _is_outer(value: Tensor) -> bool:
    """Whether rows are multiples of the second, as far as the dtype tells."""
    if value.is_meta or not value.is_floating_point():
        return False
    rows = torch.arange(value.shape[0], dtype=torch.float64)[:, None]
    angles = value.detach().cpu().double()
    return torch.allclose(angles, rows * angles[1], rtol=2 * torch.finfo(value.dtype).eps, atol=0)


def _read_angles(path: str, value: Tensor) -> Series | Products:
    omega = value[1].detach().cpu().double()
    for snap in (_round, _shorten, float):
        series = tuple(_theta_of(run, snap) for run in _runs(omega))
        exact = torch.cat([theta ** (-torch.arange(n, dtype=torch.float64) / n) for theta, n in series])
        if torch.allclose(omega, exact, rtol=2 * max(torch.finfo(value.dtype).eps, 2.5e-7), atol=0):
            return Series("angle", 0, series, False)
    if value.dtype.itemsize < 4:
        raise Unread(f"{path}: expected frequencies that {value.dtype} tells: call adapt_rotary before the cast")
    return Products()


def _read_series(path: str, value: Tensor, sin: Tensor | None) -> Series:
    if value.is_meta:
        raise Unread(f"{path}: expected a table with values, got one on the meta device")
    table, eps = value.detach().cpu(), torch.finfo(value.dtype).eps
    table = table.to(torch.complex128) if sin is None else torch.complex(table.double(), sin.detach().cpu().double())
    repeated = sin is not None and table.shape[1] % 2 == 0 and torch.equal(table[:, 0::2], table[:, 1::2])
    pairs = table[:, 0::2] if repeated else table
    rows = len(pairs)
    mirrored = (pairs.flip(0)[: rows // 2] - pairs[1 : rows // 2 + 1].conj()).abs().amax(-1) < 1e-3
    wrapped = int(mirrored.long().cumprod(0).sum()) if rows > 3 else 0
    for start, row, sign in ((0, 1, 1), (-rows, rows - 1, -1)):
        omega = sign * pairs[row].angle()
        positions = torch.arange(start, start + rows, dtype=torch.float64)
        if wrapped and start == 0:
            positions[rows - wrapped :] -= rows
        for snap in (_round, _shorten, float):
            series = tuple(_theta_of(run, snap) for run in _runs(omega))
            exact = torch.cat([theta ** (-torch.arange(n, dtype=torch.float64) / n) for theta, n in series])
            error = (
                pairs - torch.polar(torch.ones(pairs.shape, dtype=torch.float64), positions[:, None] * exact)
            ).abs()
            if bool((error <= 2.5e-7 * positions.abs()[:, None] + 2 * eps).all()):
                return Series("complex" if sin is None else "cos", start, series, repeated, 0 if start else wrapped)
    raise Unread(f"{path}: expected tables that follow from one theta an axis, got others")


def _runs(omega: Tensor) -> list[Tensor]:
    """Each axis' frequencies fall from 1."""
    starts = [i for i in range(len(omega)) if i == 0 or omega[i] > omega[i - 1]]
    return [omega[a:b] for a, b in zip(starts, [*starts[1:], len(omega)], strict=True)]


def _theta_of(run: Tensor, snap: Any) -> tuple[float, int]:
    num = len(run)
    if num == 1 or float(run[-1]) <= 0:
        return 1.0, num
    return snap(float(run[-1]) ** (-num / (num - 1))), num


def _round(theta: float) -> float:
    return float(round(theta)) or 1.0


def _shorten(theta: float) -> float:
    return float(f"{theta:.6g}")


# --- a whole model ---------------------------------------------------------------------------------------------------


@dataclass
class Found:
    path: str
    part: Any
    tables: dict[str, Any]
    reason: str | None = None


def find_ropes(model: nn.Module) -> list[Found]:
    """Rotary modules, and why some can't be taken."""
    found: list[Found] = []
    for path, part in parts(model).items():
        cls = type(part).original if isinstance(part, Adapted) else type(part)
        if not is_rope(cls):
            continue
        each = Found(path, part, {})
        try:
            if "forward" in vars(part):
                raise Unread(f"{path}: expected the forward of its class, got one of its own")
            each.tables = read_kept(path, part)
            if not rewrite_tables(cls).makes_tables and not each.tables:
                continue
        except Unread as error:
            each.reason = str(error)
        found.append(each)
    inner = [f"{each.path}." for each in found]
    return [each for each in found if not any(each.path.startswith(outer) for outer in inner)]


def is_rope(cls: type) -> bool:
    """By a name in its ancestry, in a library's file or one of the user's."""
    names = [base.__name__ for base in cls.__mro__ if base.__module__.startswith("diffusers.")]
    return any(NAME.search(name) and not PROCESSED.search(name) for name in names)


def find_callers(model: nn.Module, impl: Impl) -> Iterator[tuple[str, Any]]:
    """Attentions and processors in which known functions turn q and k."""
    for path, part in parts(model).items():
        cls = type(part).original if isinstance(part, Adapted) else type(part)
        if any(base.__module__.startswith("diffusers.") for base in cls.__mro__) and exchange_calls(cls, impl):
            yield path, part


def plan_callers(model: nn.Module, impl: Impl) -> list[Step]:
    """The exchanges in attentions, for tables that somebody else makes."""
    return [Step(part, adapted_class(_base("calls", impl), type(part))) for _, part in find_callers(model, impl)]


def plan_by_rule(model: nn.Module, impl: Impl) -> list[Step]:
    named = _find_exception(model)
    if named is not None:
        raise ValueError(f"model: {named}")
    ropes = find_ropes(model)
    wrong = next((each.reason for each in ropes if each.reason is not None), None)
    if wrong is not None:
        raise ValueError(wrong)
    callers = plan_callers(model, impl) if ropes else []
    if not callers:
        return []
    steps: list[Step] = []
    for each in ropes:
        stand = stand_class(type(each.part))(each.part, each.tables)
        kind = "rope" if isinstance(each.part, nn.Module) else "callable"
        steps.append(
            Step(each.part, adapted_class(_base(kind, "auto"), type(each.part)), {"stand": stand, "scales": Scales()})
        )
    steps += callers
    for owner in {id(owner): owner for each in ropes for owner in [_owner(model, each.path)]}.values():
        methods = {name: MethodType(method, owner) for name, method in rewrite_pads(type(owner)).items()}
        steps += [Step(owner, type(owner), {**methods, OWN: tuple(methods)})] if methods else []
    return steps


def _find_exception(model: nn.Module) -> str | None:
    named = next((cls for cls in (type(m).__name__ for m in model.modules()) if cls in EXCEPTIONS), None)
    return None if named is None else f"{EXCEPTIONS[named]} ({named})"


def _owner(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path.rpartition(".")[0])


def refusals_by_rule(model: nn.Module) -> dict[str, str]:
    return {each.path: each.reason for each in find_ropes(model) if each.reason is not None}


def explain_by_rule(model: nn.Module) -> str | None:
    named = _find_exception(model)
    if named is not None:
        return named
    ropes, callers = find_ropes(model), list(find_callers(model, "auto"))
    if callers and not ropes:
        cls = type(callers[0][1]).__name__
        return (
            f"expected a rotary module that makes the tables of {callers[0][0]} ({cls}), got none: a function or the "
            "pipeline makes them; adapt_rotary(pipe) takes a pipeline whose own method does"
        )
    if ropes and not callers:
        return (
            f"expected attentions with a known function of q, k and what {ropes[0].path} "
            f"({type(ropes[0].part).__name__}) gives, got none"
        )
    return None
