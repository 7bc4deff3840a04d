"""Our kernels in place of the rotary code of other libraries' models, their weights and outputs as they were.

    from lrpe_md import adapt_rotary
    model = adapt_rotary(timm.create_model("vit_small_patch16_rope_mixed_224", pretrained=True))
    adapt_rotary(pipe)                                  # diffusers: FLUX, Wan, Qwen-Image, ..; or pipe.transformer
    adapt_rotary(Qwen3VLForConditionalGeneration.from_pretrained(..))
    adapt_rotary(LlamaForCausalLM.from_pretrained(..))

Here is what the adapters of all libraries share: the encoding that travels through a model, and how parts are
exchanged. The adapters themselves are imported for the libraries that a model is made of.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import FunctionType
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ..engine.validate import IMPLS, Impl, Pairs
from ..functional import rotate
from ..module_base import FrequencyModule
from ..modules import PresetMd
from ..norm import Norm
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..presets.scheme import Preset

__all__ = [
    "OWN", "Adapted", "Exact", "Left", "PresetRotate", "Rotary", "Step", "adapt_rotary", "adapted_class", "apply",
    "find_others", "found_series", "install", "is_pipeline", "models_of", "parts", "reduce_adapted", "restore",
    "restore_rotary", "with_series",
]  # fmt: skip

torch.fx.wrap("rotate")  # one step of a traced graph

Model = TypeVar("Model")

LIBRARIES = {  # the adapters of each, and what they take
    "timm": (
        (".timm_rotary", ".timm_patches"),
        "timm's Eva (EVA-02, RoPE-ViT, DINOv3, Perception Encoder), NaFlexViT and encoders of Qwen3-VL, DeepSeek and "
        "Gemma 4",
    ),
    "diffusers": (
        (".diffusers",),
        "diffusers' models whose rotary module and functions can be read (FLUX, Wan, Qwen-Image, LTX, ..)",
    ),
    "transformers": (
        (".transformers",),
        "transformers' models whose rotary module and functions are like known ones (Llama, Qwen, Gemma, ..)",
    ),
}


OWN = "_lrpe_methods"  # names of methods that an object was given in place of its class'
_UNKNOWING = (
    "rotary: expected a part that adapt_rotary knows, got one that takes cos and sin, set after the model was adapted "
    "(a processor, a function); call adapt_rotary(model) again, which takes or names it, or restore_rotary(model)"
)


class Rotary:
    """What a model hands to its attentions where it handed cos and sin: frequencies and positions.

    Called with q and k (B, H, N, D); see :func:`lrpe_md.rotate`. ``amplitude`` is a factor of both; without a
    ``rotary_dim`` all channels are rotated.

    Neither a dataclass nor a tuple: the mixed precision of FSDP and DDP casts every tensor that it finds in those.
    """

    def __init__(
        self,
        omega: Tensor,
        positions: Grid | Coordinates,
        pairs: Pairs,
        amplitude: float | Tensor = 1.0,
        impl: Impl = "auto",
        rotary_dim: int | slice | None = None,
        norm: Norm | None = None,
    ) -> None:
        self.norm = norm
        self.omega, self.positions = omega, positions
        self.pairs: Pairs = pairs
        self.amplitude, self.rotary_dim = amplitude, rotary_dim
        self.impl: Impl = impl

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.encode(q, k)
        return q, k

    def encode(self, *xs: Tensor) -> Sequence[Tensor]:
        """q and k, or one of them."""
        ys = rotate(
            *xs, omega=self.omega, positions=self.positions, pairs=self.pairs, rotary_dim=self.rotary_dim,
            amplitude=self.amplitude, norm=self.norm, impl=self.impl,
        )  # fmt: skip
        return (ys,) if isinstance(ys, Tensor) else ys

    def bnhd(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The same for q and k (B, N, H, D)."""
        q, k = self(q.transpose(1, 2), k.transpose(1, 2))
        return q.transpose(1, 2), k.transpose(1, 2)

    def __iter__(self) -> NoReturn:
        raise TypeError(_UNKNOWING)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: {_UNKNOWING}")

    def at(self, positions: Grid | Coordinates, omega: Tensor | None = None) -> Rotary:
        """The same at other positions."""
        omega = self.omega if omega is None else omega
        return type(self)(omega, positions, self.pairs, self.amplitude, self.impl, self.rotary_dim, self.norm)

    def normed(self, norm: Norm | None) -> Rotary:
        """With a norm of q and k in front."""
        return type(self)(
            self.omega, self.positions, self.pairs, self.amplitude, self.impl, self.rotary_dim, norm
        )  # fmt: skip

    def cut(self, start: int, stop: int | None = None) -> Rotary:
        """Of tokens start .. stop, where positions are a table without prefix and suffix."""
        positions: Any = self.positions
        return self.at(replace(positions, coords=positions.coords[..., start:stop, :]))

    def behind(self, num_tokens: int) -> Rotary:
        """With so many unrotated tokens more at the end: text behind a video."""
        return self.at(replace(self.positions, suffix=self.positions.suffix + num_tokens))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Rotary:
        """On another device: accelerate asks for it where a model is spread over several."""
        positions = self.positions if isinstance(self.positions, Grid) else self.positions.to(device)
        moved = self.at(positions, self.omega.to(device, non_blocking=non_blocking))
        if isinstance(self.amplitude, Tensor):
            moved.amplitude = self.amplitude.to(device, non_blocking=non_blocking)
        return moved


class Exact(FrequencyModule):
    """Fixed frequencies that stay exact where FSDP and DDP cast the buffers of a model by their data."""

    def get_omega(self) -> Tensor:
        omega = super().get_omega()
        if omega.dtype != self.dtype:
            if "trained_omega" in self._buffers:
                raise ValueError(
                    f"omega: expected {self.dtype}, got {omega.dtype}: the model's buffers were cast after its "
                    "frequencies were changed; change them again"
                )
            self.omega = omega = self._initial("omega", omega.device)
        return omega


def found_series(buffer: Tensor | None, exact: Tensor | None) -> Tensor | None:
    """A model's own frequencies (E,), float64 on the CPU, where they are not those of its configuration.

    None: they are, or are rounded from them, or are on the meta device, or there are none.
    """
    if buffer is None or buffer.is_meta:
        return None
    found = buffer.detach().cpu().double()
    rtol = max(1e-5, torch.finfo(buffer.dtype).eps)
    if exact is not None and exact.shape == found.shape and torch.allclose(exact, found, rtol=rtol, atol=0):
        return None
    return found


def with_series(path: str, omega: Tensor, series: Tensor | None) -> Tensor:
    """omega (1, C, K) with another series (E,), from which each of C / E blocks of channels takes its frequencies."""
    if series is None:
        return omega
    if omega.shape[1] % len(series):
        raise ValueError(f"{path}: expected frequencies for {omega.shape[1]} pairs, got {len(series)}")
    theta = series.repeat(omega.shape[1] // len(series))
    return (omega != 0) * theta[None, :, None]


class PresetRotate(Exact, PresetMd):
    """:class:`lrpe_md.PresetMd` with fixed frequencies, float64 whatever the model is cast to.

    Args:
        preset: its amplitude must be one number.
        omega: instead of the preset's, (1, C, K).
        pairs: instead of the preset's.
        device: of the frequencies.
        impl: see :func:`lrpe_md.rotate`.
    """

    rotary: ClassVar[type[Rotary]] = Rotary  # what it gives

    def __init__(
        self,
        preset: Preset,
        *,
        omega: Tensor | None = None,
        pairs: Any = None,
        device: torch.device | str | None = None,
        impl: Impl = "auto",
    ) -> None:
        assert isinstance(preset.amplitude, float)
        scheme = replace(preset.scheme, pairs=pairs or preset.scheme.pairs)
        preset = replace(preset, scheme=scheme, omega=preset.omega if omega is None else omega)
        super().__init__(preset, learnable=False, device=device, impl=impl)

    def at(self, positions: Grid | Coordinates) -> Rotary:
        if self.moved and not isinstance(positions, Grid):
            raise ValueError(
                f"places: expected None for axes {list(self.moved)} of a model that is given coordinates; change those"
            )
        amplitude: Any = self.amplitude if "trained_amplitude" in self._buffers else self.preset.amplitude
        return self.rotary(self.get_omega(), self.locate(positions), self.pairs, amplitude, self.impl)


class Adapted:
    """A part of a library's model with our encoding: the class that it had comes last among the bases.

    Only the class of an object changes, so that parameters, their names, hooks and optimizers stay as they are. What is
    made anew of such a class has nothing of ours, and computes as the original.

    ``original`` and not ``super()``: dynamo can't follow it in a class that an object was not made of.
    """

    extras: ClassVar[Sequence[str]] = ()  # attributes that adapting adds
    original: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls.__bases__[-1], Adapted):  # as FSDP2 and parametrizations derive theirs
            cls.original = cls.__bases__[-1]


@functools.cache
def adapted_class(base: type[Adapted], original: type) -> Any:
    """A class of ours, made of ``base``, for objects of ``original``; the same each time."""
    return type(f"Lrpe{original.__name__}", (base, original), {"__module__": base.__module__})


def reduce_adapted(part: Any, base: type[Adapted]) -> Any:
    """What copies and files keep of a part whose class :func:`adapted_class` made, which is found nowhere by name."""
    _, _, *state = object.__reduce_ex__(part, 2)
    return (_make_anew, (base, type(part).original), *state)


def _make_anew(base: type[Adapted], original: type) -> Any:
    cls = adapted_class(base, original)
    return cls.__new__(cls)


@dataclass(frozen=True)
class Step:
    """One exchange: an object gets a class, and attributes."""

    part: Any
    cls: type
    attributes: dict[str, Any] = field(default_factory=dict)


Encode = Callable[[Rotary, Any, Any], Any]  # rotary, q, k → q, k


def install(model: nn.Module, functions: Mapping[str, Encode]) -> None:
    """Exchange functions ``f(q, k, cos, sin)`` that the model's parts call, for those that take a :class:`Rotary`, too.

    They are looked up where the code of each part finds them: in its library's file, or in another that imported them
    by name. What was set there since the last exchange is exchanged again.
    """
    for cls in {cls for part in model.modules() for cls in type(part).__mro__ if issubclass(cls, nn.Module)}:
        for method in vars(cls).values():
            _install(method, functions)
    for part in model.modules():  # a forward of its own
        _install(vars(part).get("forward"), functions)


def _install(method: Any, functions: Mapping[str, Encode]) -> None:
    method = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
    if not isinstance(method, FunctionType):
        return
    for name in functions.keys() & set(method.__code__.co_names):
        current = method.__globals__.get(name)
        if callable(current) and not hasattr(current, "takes_rotary"):
            method.__globals__[name] = _dispatch(current, functions[name])


def _dispatch(original: Callable[..., Any], ours: Encode) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_rotary(q: Tensor, k: Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(cos, q, k) if isinstance(cos, Rotary) else original(q, k, cos, sin, *args, **kwargs)

    vars(apply_rotary)["takes_rotary"] = True
    return apply_rotary


def is_pipeline(model: Any) -> bool:
    """Whether it is one of diffusers."""
    return any(base.__name__ == "DiffusionPipeline" for base in type(model).__mro__)


def parts(model: Any) -> dict[str, Any]:
    """All modules by name, the attention processors that some of them have, and diffusers' rotary objects; of a
    pipeline, itself and what its denoisers have."""
    found: dict[str, Any] = {}
    if is_pipeline(model):
        for name, own in models_of(model).items():
            found |= {f"{name}.{path}".rstrip("."): part for path, part in parts(own).items()}
        return {"": model, **found}
    for name, module in model.named_modules():
        found[name] = module
        for attribute, value in vars(module).items():
            if isinstance(value, Adapted) or type(value).__name__.startswith("Rope"):
                found[f"{name}.{attribute}".lstrip(".")] = value
        processor = getattr(module, "processor", None)
        if processor is not None:
            found[f"{name}.processor".lstrip(".")] = processor
    return found


def apply(steps: Sequence[Step]) -> None:
    for step in steps:
        step.part.__class__ = step.cls
        for name, value in step.attributes.items():
            setattr(step.part, name, value)


def models_of(model: Any) -> dict[str, nn.Module]:
    """A model, or the denoisers of a pipeline by name."""
    return import_module(".pipelines", __package__).find_denoisers(model) if is_pipeline(model) else {"": model}


def restore(model: Any) -> None:
    found = parts(model)
    for path, part in found.items():
        if isinstance(part, Adapted) and type(part).__bases__[-1] is not type(part).original:
            raise ValueError(
                f"{path or 'model'}: expected a class that adapt_rotary made, got {type(part).__name__}, derived from "
                "it; adapt or restore before fully_shard"
            )
    for part in found.values():
        if isinstance(part, Adapted):
            for name in type(part).extras:
                if hasattr(part, name):
                    delattr(part, name)
            part.__class__ = type(part).original
        for name in (*vars(part).get(OWN, ()), OWN) if OWN in vars(part) else ():
            delattr(part, name)


# --- a whole model ---------------------------------------------------------------------------------------------


def adapt_rotary(model: Model, *, impl: Impl = "auto", verbose: bool = False) -> Model:
    """Encode q and k with :func:`lrpe_md.rotate` in a built model of timm, diffusers or transformers, or in the
    denoisers of a pipeline of diffusers; returns it.

    In place, and in one launch for q and k. Parameters, their names, hooks and optimizers stay as they are: only the
    classes of the model's parts change, which :func:`restore_rotary` takes back. Frequencies that the model learns
    (RoPE-ViT mixed) stay its parameter and get their gradient. An adapted model may be adapted again.

    Args:
        model: one with parts of these, itself or anywhere inside:

            - timm: ``Eva`` or ``NaFlexVit`` with a rotary: ``eva02_*``, ``vit_*_rope_*``, ``vit_*_dinov3*``,
              ``vit_pe_*``; encoders of Qwen3-VL, DeepSeek and Gemma 4;
            - diffusers: those with a rotary module of their own, and functions that turn q and k as known ones do:
              FLUX, Qwen-Image, Wan and its derivatives, HunyuanVideo, LTX, Z-Image, Cosmos, ..; ControlNets of the same
              parts. CogVideoX and others whose tables their pipeline makes in a method of its own: as the pipeline
              alone, in which text encoders stay as they are;
            - transformers: language models and vision towers whose rotary module and functions compute what is known,
              with every length scaling; docs/results/adapted-models.md names them.
        impl: see :func:`lrpe_md.rotate`.
        verbose: print what was adapted, and what was left and why.

    A part with a rotary encoding that is none of these stays as it is, and a warning names it. Attention processors set
    afterwards (diffusers' IP adapters) get tables, as in the original; what exchanges functions of the model afterwards
    (Liger) asks for another ``adapt_rotary``.

    The angles are exact in float32 whatever the model's dtype; transformers rounds cos and sin to it, so that a
    16-bit model's outputs differ by that rounding. Adapt before ``torch.compile``. Random positions in training (timm's
    ``rope_*_coords``) are drawn as in timm, but from a generator of the encoding's own.

    Raises:
        TypeError: not a model, or none of its parts is known.
        ValueError: a part that does not fit, by its name, or was sharded since it was adapted; the model is as it was.
    """
    if not isinstance(model, nn.Module) and not is_pipeline(model):
        raise TypeError(f"model: expected an nn.Module or a pipeline of diffusers, got {type(model).__name__}")
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS}, got {impl!r}")
    restore(model)  # what was adapted fits
    with torch.device("cpu"):  # whatever the default is: what is computed to read the model's code must have values
        others = _exchange_parts(model, impl)
    if verbose:
        _print_report(model, others)
    elif others:
        found = ", ".join(f"{path} ({left.name})" for path, left in others.items())
        warnings.warn(f"adapt_rotary: {found}: not known, left as in the original", stacklevel=2)
    return model


def _exchange_parts(model: Any, impl: Impl) -> dict[str, Left]:
    """The rotary parts that are left as they are."""
    models = models_of(model)
    planned = {name: _plan(own, impl) for name, own in models.items()}
    steps = [step for own in planned.values() for step in own]
    if is_pipeline(model):
        steps += import_module(".pipelines", __package__).plan_of_pipeline(model, planned, impl)
    if not steps:
        for own in models.values():
            _explain(own)
        names = "; ".join(names for _, names in LIBRARIES.values())
        raise TypeError(
            f"model: expected one with a rotary encoding of {names}, "
            f"got {type(model).__module__}.{type(model).__qualname__}"
        )
    apply(steps)
    return find_others(model)


def _adapters(model: nn.Module) -> list[Any]:
    libraries = {type(part).__module__.split(".")[0] for part in model.modules()}
    names = [name for library, (names, _) in LIBRARIES.items() if library in libraries for name in names]
    return [import_module(name, __package__) for name in names]


def _plan(model: nn.Module, impl: Impl) -> list[Step]:
    return [step for adapter in _adapters(model) for step in adapter.plan(model, impl)]


def _explain(model: nn.Module) -> None:
    """
    Raises:
        TypeError: why nothing of it is taken, where that can be said.
    """
    for adapter in _adapters(model):
        reason = adapter.explain(model) if hasattr(adapter, "explain") else None
        if reason is not None:
            raise TypeError(f"model: {reason}")


_ROTARY_NAME = re.compile(r"[Rr]otary|R[oO]PE|Rope|(^|_)rope(_|d|$)")


@dataclass(frozen=True)
class Left:
    """A rotary part that stays as it is: the name of its class, and why."""

    name: str
    reason: str


def find_others(model: Any) -> dict[str, Left]:
    """The model's other rotary encodings, which stay as they are."""
    others: dict[str, Left] = {}
    if is_pipeline(model):
        for name, own in models_of(model).items():
            others |= {f"{name}.{path}": left for path, left in find_others(own).items()}
        return others
    reasons: dict[str, str] = {}
    for adapter in _adapters(model):
        reasons |= adapter.refusals(model) if hasattr(adapter, "refusals") else {}
    for path, part in model.named_modules():
        name, cls = path.split(".")[-1], type(part)
        inside = any(path.startswith(f"{outer}.") for outer in others)
        known = isinstance(part, (Adapted, nn.Identity)) or cls.__module__.split(".")[0] == "lrpe_md"
        known = known or _takes_rotary(cls)
        if path and not inside and not known and (_ROTARY_NAME.search(name) or _ROTARY_NAME.search(cls.__name__)):
            others[path] = Left(cls.__name__, reasons.get(path, "its code is not known"))
    return others


def _takes_rotary(cls: type) -> bool:
    """Whether a method calls an exchanged function: it is given what an adapted part gives."""
    methods = (inspect.unwrap(m) for base in cls.__mro__ for m in vars(base).values() if inspect.isfunction(m))
    return any(
        hasattr(method.__globals__.get(name), "takes_rotary") for method in methods for name in method.__code__.co_names
    )


def _print_report(model: Any, others: Mapping[str, Left]) -> None:
    adapted = {path: part for path, part in parts(model).items() if isinstance(part, Adapted)}
    for path, part in adapted.items():
        print(f"adapted: {path or 'model'} ({type(part).original.__name__})")
    for path, left in others.items():
        print(f"left: {path} ({left.name}): {left.reason}")


def restore_rotary(model: Model) -> Model:
    """Take back :func:`adapt_rotary`, in place; a model that is not adapted stays as it is."""
    restore(model)
    return model
