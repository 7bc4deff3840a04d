"""transformers' models, by rule: text models, and towers whose rotary module is given positions.

The rotary module gives a :class:`Rotary` where it gave cos and sin, and the functions that the attentions call with it
are exchanged for some that take both: models that are not adapted compute as before. Which module and function that
may be is no list of classes: :mod:`.transformers_read` reads what they compute, :mod:`.transformers_flow` whether what
the module gives goes to such functions and nowhere else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

from .extras import require

require("transformers")

import torch
from torch import Tensor, nn

from ..engine.validate import Impl
from ..modules import RotateMd
from ..positions.augment import AugmentPositions
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from .exchange import Adapted, Exact, Rotary, Step, adapted_class, reduce_adapted
from .norms import defer_norms
from .transformers_exceptions import EXCEPTIONS
from .transformers_flow import Moved, find_misuse
from .transformers_read import (
    Form,
    Misfit,
    Reading,
    Unknown,
    by_length,
    leaves_prefix,
    read_function,
    read_image_rotary,
    read_rotary,
)

__all__ = ["plan", "refusals"]


# --- rotary modules ------------------------------------------------------------------------------------------


class AxesRotate(Exact, RotateMd):
    """Our encoding with the frequencies of a model's rotary module, of one axis or several."""

    def __init__(self, reading: Reading, pairs: Any, *, kind: type[Rotary] = Rotary, impl: Impl, device: Any) -> None:
        channels, num_axes = reading.omega.shape
        super().__init__(
            2 * channels, num_axes, frequencies=partial(_frequencies, reading.omega), pairs=pairs, impl=impl,
            device=device, dtype=torch.float64,
        )  # fmt: skip
        self.kind, self.layout, self.gain_of_all = reading.kind, reading.layout, reading.amplitude
        self.gives: type[Rotary] = Places if reading.kind == "table" else kind

    def at(self, coords: Tensor, omega: Tensor | None = None, amplitude: float | None = None) -> Rotary:
        omega = self.get_omega() if omega is None else omega
        amplitude = self.gain_of_all if amplitude is None else amplitude
        return self.gives(omega, Coordinates(coords), self.pairs, amplitude, self.impl, 2 * omega.shape[1])


def _frequencies(omega: Tensor, channels: int, heads: int, seed: int) -> Tensor:
    return omega[None]


class ByFunction(Rotary):
    """Where a model has functions of both pairs, and calls one or the other."""


class Places(Rotary):
    """Some towers bring cos and sin (N, ..) into another order of tokens, by shape and by index; some decoders go on
    with a part of the tokens of cos and sin (B, N, ..)."""

    positions: Coordinates

    def reshape(self, *shape: int) -> Rotary:
        return self._moved(self.positions.coords.reshape(shape))

    def __getitem__(self, index: Any) -> Rotary:
        coords = self.positions.coords
        if isinstance(index, tuple) and coords.ndim == 2:  # one sample's for the whole batch
            return self._moved(coords[None][index][0])
        return self._moved(coords[index])

    def _moved(self, coords: Tensor) -> Rotary:
        return self.at(replace(self.positions, coords=coords))


class Signed(Rotary):
    """Where a model turns back by giving a function -sin."""

    def __neg__(self) -> Backwards:
        return Backwards(-self.omega, self.positions, self.pairs, self.amplitude, self.impl, self.rotary_dim)


class Backwards(Rotary):
    """In place of -sin."""


class Patches(Rotary):
    """Patches of an image, in front of which are tokens that are not rotated, however many."""

    positions: Grid

    def encode(self, *xs: Tensor) -> Sequence[Tensor]:
        prefix = xs[0].shape[2] - self.positions.num_grid_tokens
        whole = self if prefix == self.positions.prefix else self.at(replace(self.positions, prefix=prefix))
        return Rotary.encode(whole, *xs)


class AdaptedImageRope(Adapted):
    """A rotary module that gives :class:`Patches` for the pixels of an image (B, C, H, W)."""

    extras = ("rotation", "augment")
    rotation: AxesRotate
    augment: AugmentPositions | None
    training: bool
    config: Any

    @torch.no_grad()
    def forward(self, pixel_values: Tensor) -> Any:
        if not hasattr(self, "rotation"):
            return self.original.forward(self, pixel_values)
        shape = tuple(size // self.config.patch_size for size in pixel_values.shape[-2:])
        positions: Any = Grid(shape).cells("axis")
        if self.augment is not None and self.training:
            positions = self.augment(positions, pixel_values.device)
        rotation = self.rotation
        rotary = Patches(rotation.get_omega(), positions, rotation.pairs, impl=rotation.impl)
        return rotary, None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_adapted(self, AdaptedImageRope)


class AdaptedRope(Adapted):
    """A rotary module that gives :class:`Rotary`, at the places that ``position_ids`` says."""

    extras = ("rotation",)
    rotation: Any
    inv_freq: Tensor
    attention_scaling: float

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        if not hasattr(self, "rotation"):
            args = (x, position_ids) if layer_type is None else (x, position_ids, layer_type)
            return self.original.forward(self, *args)
        rotation = self.rotation if layer_type is None else self.rotation[layer_type]
        coords, omega, amplitude = _coordinates(rotation, position_ids), None, None
        if by_length(self):  # the original updates its frequencies
            self.original.forward(self, x, position_ids)
            omega, amplitude = self.inv_freq.float()[None, :, None], self.attention_scaling
        rotary = rotation.at(coords, omega, amplitude)
        if rotation.layout == "complex":
            return rotary
        return rotary, (rotary if issubclass(rotation.gives, (Places, Signed)) else None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_adapted(self, AdaptedRope)


def _coordinates(rotation: AxesRotate, position_ids: Tensor) -> Tensor:
    """(N, K), or (B, N, K); one sample's hold for a whole batch."""
    if rotation.kind == "table":
        return position_ids
    if rotation.kind == "places":
        coords = position_ids
    elif rotation.kind == "axes":
        coords = position_ids.expand(rotation.num_axes, -1, -1).permute(1, 2, 0)
    else:
        coords = position_ids[..., None]
    return coords[0] if coords.shape[0] == 1 else coords


# --- the functions that the attentions call ----------------------------------------------------------------------


@dataclass
class Call:
    """A function ``f(q, k, cos, sin)`` that takes a :class:`Rotary`, too."""

    form: Form

    def __call__(self, rotary: Rotary, xs: Sequence[Tensor], options: dict[str, Any]) -> Any:
        form = self.form
        for name, default in form.others:
            if options.get(name, default) is not default and name != "position_ids":
                raise TypeError(f"{name}: expected {default!r} in a model with our encoding, got another; restore it")
        if isinstance(rotary, ByFunction):
            rotary = rotary.at(rotary.positions)
            rotary.pairs = form.pairs
        if form.reverse:
            rotary = rotary.at(rotary.positions, -rotary.omega)
        shape = form.shape
        if shape == "given":
            shape = {0: "bhnd", 1: "bhnd", 2: "bnhd"}.get(options.get("unsqueeze_dim", form.unsqueeze_dim))
        elif shape == "bnhd" and xs[0].ndim == 3:
            shape = "nhd"
        if shape is None:
            raise TypeError(f"unsqueeze_dim: expected 1 or 2, got {options['unsqueeze_dim']}")
        if shape == "bnhd":
            xs = [x.transpose(1, 2) for x in xs]
        elif shape == "nhd":  # images end to end
            xs = [x[None].transpose(1, 2) for x in xs]
        if form.trailing:
            rotary = rotary.at(rotary.positions)
            width = xs[0].shape[-1]
            rotary.rotary_dim = slice(width - 2 * rotary.omega.shape[1], width)
        ys = _turn(rotary, xs, form.gathered)
        if shape == "bnhd":
            ys = [y.transpose(1, 2) for y in ys]
        elif shape == "nhd":
            ys = [y.transpose(1, 2)[0] for y in ys]
        return tuple(ys) if form.num_tensors == 2 else ys[0]


def _turn(rotary: Rotary, xs: Sequence[Tensor], gathered: bool) -> Sequence[Tensor]:
    ys = rotary.encode(*xs)
    if not gathered:
        return ys
    width = rotary.omega.shape[1] * 2
    return [
        torch.cat([y[..., 0:width:2], y[..., 1:width:2], y[..., width:]], -1) for y in ys
    ]  # fmt: skip


def _exchange(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    ours, names, num = Call(form), (*form.names, form.first), form.num_tensors
    rest = tuple(inspect.signature(function).parameters)[num:]

    @functools.wraps(function)
    def apply_rotary(*args: Any, **kwargs: Any) -> Any:
        given = args[num] if len(args) > num else kwargs.get(names[num])
        if not isinstance(given, Rotary):
            return function(*args, **kwargs)
        sine = args[num + 1] if len(args) > num + 1 else kwargs.get("sin")
        if isinstance(given, Backwards):
            raise TypeError("cos: expected it with its sign in a model with our encoding, got -cos; restore it")
        if isinstance(sine, Backwards):
            given = sine
        xs = [args[i] if len(args) > i else kwargs[name] for i, name in enumerate(names[:num])]
        return ours(given, xs, {**dict(zip(rest, args[num:])), **kwargs})  # noqa: B905

    vars(apply_rotary)["takes_rotary"] = form
    return apply_rotary


# --- what a model is made of -------------------------------------------------------------------------------------


@dataclass
class Found:
    """A rotary module, and what it gives cos and sin to."""

    path: str
    rope: Any
    owner: nn.Module
    users: list[nn.Module]  # modules of the owner, with itself
    readings: dict[str | None, Reading]
    functions: list[tuple[dict[str, Any], str, Form]]  # where each is looked up, its name
    reason: str | None = None  # why not

    misfit: bool = False  # which is an error, where other parts are taken, too
    moved: Moved = "no"  # what is done to what it gives on its way

    @property
    def pairs(self) -> Any:
        return self.functions[0][2].pairs

    @property
    def kind(self) -> type[Rotary]:
        if self.moved != "no":
            return Signed if self.moved == "signed" else Places
        return ByFunction if len({form.pairs for *_, form in self.functions}) > 1 else Rotary


def find_ropes(model: nn.Module) -> list[Found]:
    """Every rotary module with ``inv_freq``, in the module that has it."""
    owners = {
        path: module
        for path, module in model.named_modules()
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and next(_own_ropes(module), None)
    }
    found: list[Found] = []
    for path, owner in owners.items():
        inner = [f"{other}." for other in owners if other.startswith(f"{path}." if path else "") and other != path]
        users = [
            module
            for name, module in model.named_modules()
            if (not path or name == path or name.startswith(f"{path}."))
            and not any(f"{name}.".startswith(other) for other in inner)
        ]
        for name, rope in _own_ropes(owner):
            found.append(_read(f"{path}.{name}".lstrip("."), name.split(".")[0], rope, owner, users))
    if _is_rope(model):
        raise ValueError("model: expected the model that has the rotary module, got the module alone")
    return found


def _own_ropes(owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Rotary modules that are attributes of a module, or in a list that is one."""
    for name, part in owner._modules.items():
        inner = part._modules if isinstance(part, (nn.ModuleList, nn.ModuleDict)) else {}
        yield from ((f"{name}.{key}", each) for key, each in inner.items() if _is_rope(each))
        if _is_rope(part):
            yield name, part  # pyright: ignore[reportReturnType]


def _is_rope(part: Any) -> bool:
    """Of transformers, or like it: frequencies and a forward of positions, or of pixels."""
    if not isinstance(part, nn.Module) or isinstance(part, Exact) or type(part).__module__.startswith("diffusers"):
        return False
    if not any(name.endswith("inv_freq") for name in part._buffers):
        return False
    names = inspect.signature(type(part).forward).parameters
    return "position_ids" in names or list(names) == ["self", "pixel_values"]


def _read(path: str, name: str, rope: Any, owner: nn.Module, users: list[nn.Module]) -> Found:
    found = Found(path, rope, owner, users, {}, [])
    try:
        reason = next((EXCEPTIONS[c.__name__] for c in (type(rope), type(owner)) if c.__name__ in EXCEPTIONS), None)
        if reason is not None:
            raise Unknown(reason)
        _check_sections(rope)
        for layer_type in _layer_types(rope):
            reading = found.readings[layer_type] = _read_one(rope, layer_type)
            if by_length(rope) and (reading.kind != "sequence" or layer_type is not None):
                raise Misfit(f"expected frequencies that don't depend on the length, got {rope.rope_type!r}")
        reading = next(iter(found.readings.values()))
        if len({r.layout for r in found.readings.values()} | {r.kind for r in found.readings.values()}) != 2:
            raise Unknown("expected all layer types to be of one layout")
        found.functions = list(_functions(users, reading))
        forms = {(form.pairs, form.gathered) for *_, form in found.functions}
        if not forms:
            raise Unknown("expected a function of q, k, cos and sin that is known, found none")
        if len({pairs for pairs, _ in forms}) > 1 and reading.kind == "table":
            raise Unknown("expected its functions to turn the same pairs")
        known = {id(space[name]) for space, name, _ in found.functions}
        misuse = find_misuse(name, owner, users, known, "reordered" if reading.kind == "table" else "no")
        if misuse is not None and reading.kind in ("sequence", "axes", "places"):
            ways: list[Moved] = ["sliced", "signed"] if len({pairs for pairs, _ in forms}) == 1 else []
            for way in ways:
                if found.moved == "no" and find_misuse(name, owner, users, known, way) is None:
                    found.moved = way
        if misuse is not None and found.moved == "no":
            raise Unknown(misuse)
        if reading.kind == "image" and not all(
            leaves_prefix(inspect.unwrap(space[name]), form, len(reading.omega))
            for space, name, form in found.functions
        ):
            raise Unknown("expected a function that leaves tokens in front of the patches alone")
    except Unknown as error:
        found.reason, found.misfit = str(error), isinstance(error, Misfit)
    return found


def _read_one(rope: Any, layer_type: str | None) -> Reading:
    if "pixel_values" in inspect.signature(type(rope).forward).parameters:
        return read_image_rotary(rope)
    return read_rotary(rope, layer_type)


def _layer_types(rope: Any) -> list[str | None]:
    ends = [name.removesuffix("_inv_freq") for name in rope._buffers if name.endswith("_inv_freq")]
    return [name for name in ends if not name.endswith("original") and name != "original"] or [None]


def _check_sections(rope: Any) -> None:
    sections = getattr(rope, "mrope_section", None)
    if sections is None:
        return
    for each in sections.values() if isinstance(sections, dict) else [sections]:
        if len(each) < 3:
            raise Misfit(f"expected an mrope_section of time, height and width, got {list(each)}")
    if isinstance(sections, dict):
        return
    pairs = len(rope.inv_freq) if getattr(rope, "inv_freq", None) is not None else sum(sections)
    splits = "split" in _names(getattr(type(rope), "recomposition_frequencies", None))
    if splits and (sum(sections) != pairs or min(sections) < 0):
        raise Misfit(f"expected an mrope_section that sums to head_dim / 2 = {pairs}, got {list(sections)}")


def _names(function: Any) -> tuple[str, ...]:
    return getattr(getattr(function, "__code__", None), "co_names", ())


def _functions(users: list[nn.Module], reading: Reading) -> Iterator[tuple[dict[str, Any], str, Form]]:
    """Known functions by where the users' methods look them up."""
    seen: set[tuple[int, str]] = set()
    for method in _methods(users):
        space = method.__globals__
        for name in method.__code__.co_names:
            function = space.get(name)
            if (id(space), name) in seen or not callable(function) or isinstance(function, type):
                continue
            seen.add((id(space), name))
            original = function.__wrapped__ if hasattr(function, "takes_rotary") else function  # pyright: ignore
            if not isinstance(inspect.unwrap(original), FunctionType):
                continue
            form = read_function(original, reading.layout, len(reading.omega))
            if form is not None:
                yield space, name, form


def _methods(users: list[nn.Module]) -> Iterator[FunctionType]:
    classes = {cls for part in users for cls in type(part).__mro__ if issubclass(cls, nn.Module)}
    own = [vars(part).get("forward") for part in users]
    for method in [*(m for cls in classes if cls is not nn.Module for m in vars(cls).values()), *own]:
        method = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
        if isinstance(method, FunctionType):
            yield method


def plan(model: nn.Module, impl: Impl) -> list[Step]:
    """The exchanges that put our encoding into the known rotary modules of ``model``."""
    found = find_ropes(model)
    taken = [each for each in found if each.reason is None]
    refused = [each for each in found if each.reason is not None]
    named = next((EXCEPTIONS[cls] for cls in (type(m).__name__ for m in model.modules()) if cls in EXCEPTIONS), None)
    if not found and named is not None:
        raise ValueError(f"model: {named}")
    wrong = [each for each in refused if each.misfit or not taken]
    if wrong:
        raise ValueError(f"{wrong[0].path}: {wrong[0].reason}")
    steps: list[Step] = []
    for each in taken:
        device = next(each.rope.buffers()).device
        options: dict[str, Any] = {"kind": each.kind, "impl": impl, "device": device}
        made = {key: AxesRotate(reading, each.pairs, **options) for key, reading in each.readings.items()}
        rotation: Any = made[None] if None in made else nn.ModuleDict(made)  # pyright: ignore[reportArgumentType]
        if None in made and made[None].kind == "image":
            attributes = {"rotation": rotation, "augment": _read_augmentation(each.rope)}
            steps.append(Step(each.rope, adapted_class(AdaptedImageRope, type(each.rope)), attributes))
        else:
            steps.append(Step(each.rope, adapted_class(AdaptedRope, type(each.rope)), {"rotation": rotation}))
    if taken:
        steps += defer_norms(model, _classes("Attention"), _classes("RMSNorm"))
    for each in taken:
        for space, name, form in each.functions:
            if not hasattr(space[name], "takes_rotary"):
                space[name] = _exchange(space[name], form)
    return steps


def _read_augmentation(rope: Any) -> AugmentPositions | None:
    """Random positions in training, as the configuration has them; from a generator of its own, seeded by rank."""
    draws = {name: getattr(rope.config, f"pos_embed_{name}", None) for name in ("shift", "jitter", "rescale")}
    if not any(draws.values()):
        return None
    return AugmentPositions(**draws, seed=torch.initial_seed()).train(rope.training)


NORMED = ("qwen3.Qwen3", "qwen3_moe.Qwen3Moe", "qwen3_vl.Qwen3VLText", "qwen3_vl_moe.Qwen3VLMoeText")


def _classes(kind: str) -> list[type]:
    """Those whose norms of q and k go with the map, as far as the library has them."""
    found: list[type] = []
    for name in NORMED:
        folder, prefix = name.split(".")
        try:
            module = import_module(f"transformers.models.{folder}.modeling_{folder}")
        except ImportError:
            continue
        found += [cls] if (cls := getattr(module, prefix + kind, None)) is not None else []
    return found


def refusals(model: nn.Module) -> dict[str, str]:
    """Why rotary modules of ``model`` are left as they are."""
    return {each.path: each.reason for each in find_ropes(model) if each.reason is not None}
