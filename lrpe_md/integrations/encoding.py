"""Build a backbone's encoding from a name, module or factory, and lay out the backbone's tokens."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..checks import check_one_of, explain_unknown, join_names
from ..engine.core.call import Act
from ..engine.encode.validate import check_act
from ..engine.linear.call import Description, NormalizerName
from ..engine.linear.validate import check_normalizer
from ..frequencies.axial import check_split, warn_of_idle_axes
from ..modules.base import FrequencyModule
from ..modules.encodings import CosineMd, PresetMd, RotateMd
from ..modules.linear import HeadDecay
from ..norm import Norm
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..positions.sequences import After, Tokens, compose
from ..presets.registry import RESERVED, list_presets, preset
from ..presets.scheme import PRESET_OPTIONS, Axial, Preset, Scheme
from ..reference import activate

__all__ = [
    "Activation", "Encoding", "EncodingStack", "build_encoding", "build_for_layers",
]  # fmt: skip

Sharing = Literal["model", "layer"]
Encoding: TypeAlias = str | Preset | Scheme | nn.Module | Callable[..., nn.Module] | None


class Activation(nn.Module):
    """Activation without an encoding: it maps q and k to act(q) and act(k), regardless of positions."""

    describes = True

    def __init__(self, act: str = "none", dim: int | None = None) -> None:
        super().__init__()
        check_act(act, dim)
        self.act, self.dim = act, dim

    def describe(self) -> Description:
        act: Any = self.act
        return Description(None, act=act, dim=self.dim)

    def forward(
        self, *xs: Tensor, positions: Any = None, norm: Norm | None = None, attend: Callable[..., Any] | None = None
    ) -> Any:
        if attend is not None:
            return attend(self.describe()._replace(norm=norm), *xs)
        if norm is not None:
            raise ValueError("norm: expected None with this encoding, which can't apply it; normalise q and k first")
        return tuple(activate(x, self.act, self.dim) for x in xs)

    def extra_repr(self) -> str:
        return f"act={self.act!r}"


# Advice for values of other arguments that are passed as the encoding.
REMEDIES = {
    "linear": "attention='linear' to adapt() or the model itself",
    "keep": "absolute='keep' to adapt()",
    "drop": "absolute='drop' to adapt()",
    "learned": "absolute='learned' to the model itself",
    "sincos": "absolute='sincos' to the model itself",
}


def build_encoding(
    encoding: Any, kwargs: dict[str, Any], head_dim: int, num_heads: int, depth: int, num_axes: int
) -> nn.Module | None:
    """Build the ``encoding`` of a backbone: one module for all layers, a ModuleList with one per layer, or None.

    Args:
        encoding: one of these:

            - "cosine" or "rotate": axial frequencies, shared by all heads and layers. With ``frequencies="mixed"``,
              each head has separate frequencies. With a phase, each layer and head has a separate phase, and separate
              frequencies if they are learned or mixed;
            - "mixed": rotate with learned frequencies per layer and head, base 10 (RoPE-ViT, arXiv 2403.13298);
            - a name from :func:`lrpe_md.list_presets` or a :class:`lrpe_md.Scheme`: a :class:`lrpe_md.PresetMd`, or one
              per layer if it has learned parameters;
            - the result of :func:`lrpe_md.preset` for this head_dim;
            - a module, shared by all layers, called as ``module(q, k, positions=positions)`` with q and k (B, H, N, D);
            - a factory, called once per layer. If its signature contains any of ``head_dim``, ``num_heads`` and
              ``num_axes``, as for ``CosineMd`` and ``partial(CosineMd, learnable=True)``, the factory receives these
              sizes. Otherwise, it receives ``(head_dim, num_heads)``;
            - None or "none": no encoding.
        kwargs: options of :class:`lrpe_md.CosineMd` or :class:`lrpe_md.RotateMd` for "cosine", "rotate" and "mixed",
            options of :func:`lrpe_md.preset` and PresetMd for a preset, arguments of the factory, or ``act`` and
            ``dim`` for None. "cosine" and "rotate" also accept ``split``, each axis's share of the channels ((2, 3, 3)
            gives time two eighths), and ``remainder``, the axis that gets the leftover channels. With ``split``,
            ``learnable`` trains ω. For modules that are built here, ``sharing`` can be "model" or "layer". For
            "cosine", "rotate" and "mixed", ``heads`` can be "shared" or "own".
        head_dim, num_heads, depth, num_axes: sizes of the backbone.

    Raises:
        ValueError, TypeError: for an unknown name or an invalid argument.
    """
    if encoding is None or encoding == "none":
        if kwargs.keys() - {"act", "dim"}:
            raise ValueError(
                f"encoding_kwargs: expected only act and dim without an encoding, got {kwargs}{_advise(kwargs)}"
            )
        return Activation(**kwargs) if kwargs.get("act", "none") != "none" else None
    if isinstance(encoding, nn.Module):
        if kwargs:
            raise ValueError(
                f"encoding_kwargs: expected no options with a module as the encoding, got {kwargs}{_advise(kwargs)}"
            )
        return encoding
    kwargs = dict(kwargs)
    sharing: Sharing | None = kwargs.pop("sharing", None)
    if sharing is not None:
        check_one_of("sharing", sharing, ("model", "layer"))
    if encoding in ("cosine", "rotate", "mixed"):
        make, usual = _of_series(encoding, kwargs, head_dim, num_heads, num_axes)
    elif isinstance(encoding, (Preset, Scheme)) or encoding in list_presets():
        make, usual = _of_preset(encoding, kwargs, head_dim, num_heads)
    elif isinstance(encoding, str) or not callable(encoding):
        expected = (
            "'cosine', 'rotate', 'mixed', 'none', a name from lrpe_md.list_presets() (including registered schemes), a "
            "Preset, a Scheme, an nn.Module, a factory (head_dim, num_heads) -> nn.Module, or None"
        )
        advice = REMEDIES.get(str(encoding))
        known = () if advice else (*RESERVED, *list_presets())
        remedy = f"; pass an encoding such as 'rotate', and {advice}" if advice else ""
        raise ValueError(explain_unknown("encoding", encoding, known, expected) + remedy)
    else:
        make, usual = _of_factory(encoding, kwargs, head_dim, num_heads, num_axes), "layer"
    by_layer = (sharing or usual) == "layer"
    layers = [make(i) for i in range(depth if by_layer else 1)]
    if not all(isinstance(layer, nn.Module) for layer in layers):
        raise TypeError(f"encoding: expected a factory that returns an nn.Module, got a {type(layers[0]).__name__}")
    return nn.ModuleList(layers) if by_layer else layers[0]


def build_for_layers(
    encoding: Any, kwargs: dict[str, Any], head_dim: int, num_heads: int, kinds: Sequence[str], num_axes: int,
    normalizer: NormalizerName,
) -> tuple[nn.Module | None, Act | None]:  # fmt: skip
    """Call :func:`build_encoding`, and return the activation that linear layers use instead of the encoding's, or None.

    Linear attention applies relu to q and k, unless ``kwargs`` or the user's module sets an activation. If a model has
    both kinds of attention, the encoding is built for softmax attention, which applies no activation by default.
    """
    kwargs, act = dict(kwargs), None
    by_name = encoding is None or isinstance(encoding, (str, Preset, Scheme))
    if "linear" in kinds and by_name and "act" not in kwargs:
        if "softmax" in kinds:
            act = "relu"
        else:
            kwargs["act"] = "relu"
    built = build_encoding(encoding, kwargs, head_dim, num_heads, len(kinds), num_axes)
    for module in EncodingStack(built).distinct if "linear" in kinds else ():
        check_normalizer(normalizer, act or getattr(module, "act", "none"))
    return built, act


Maker: TypeAlias = Callable[[int], nn.Module]  # maps a layer's index to its module
Made: TypeAlias = tuple[Maker, Sharing]


def _of_series(encoding: str, kwargs: dict[str, Any], head_dim: int, num_heads: int, num_axes: int) -> Made:
    _check_options(kwargs, encoding_options(encoding), repr(encoding))
    if encoding == "mixed":
        kwargs = {"frequencies": "mixed", "learnable": True, **kwargs}
    heads, split, remainder, seed = (kwargs.pop(name, None) for name in ("heads", "split", "remainder", "seed"))
    by_head = kwargs.get("phase") or kwargs.get("frequencies") == "mixed" if heads is None else heads == "own"
    if heads is not None:
        check_one_of("heads", heads, ("shared", "own"))
        if "num_heads" in kwargs:
            raise ValueError(f"heads: expected None with num_heads, got {heads!r}; pass only one of them")
    if by_head:
        kwargs = {"num_heads": num_heads, **kwargs}
    if split is not None:
        check_split(split, num_axes)
        series = {"base": kwargs.pop("base", 1e4), "axis_order": kwargs.pop("axis_order", "minor_first")}
        own = partial(_split_omega, Axial(tuple(split), remainder=remainder, **series))
        kwargs = {"frequencies": own, **kwargs}
    elif remainder is not None:
        raise ValueError(
            f"remainder: expected None without split, got {remainder}; pass split as well, or leave out remainder"
        )
    make = partial(CosineMd if encoding == "cosine" else RotateMd, head_dim, num_axes, **kwargs)
    return lambda i: make(seed=(seed or 0) + i), "layer" if encoding == "mixed" or kwargs.get("phase") else "model"


def _split_omega(series: Axial, channels: int, heads: int, seed: int) -> Tensor:
    warn_of_idle_axes(series.sections(channels), series.split)
    return series.build(channels, heads, seed)[0].expand(heads, -1, -1)


def _of_preset(encoding: str | Scheme | Preset, kwargs: dict[str, Any], head_dim: int, num_heads: int) -> Made:
    """Build a preset. All layers share it if nothing is learned, or if the scheme says so."""
    if "heads" in kwargs:
        raise ValueError(f"heads: expected None with a preset, got {kwargs['heads']!r}")
    _check_options(kwargs, encoding_options(encoding), "a preset")
    changes = {key: kwargs.pop(key) for key in PRESET_OPTIONS if key in kwargs}
    if isinstance(encoding, Preset):
        _check_made(encoding, changes, head_dim, num_heads)
        made, by_seed = encoding, False  # all layers start with its frequencies
    else:
        made = preset(encoding, head_dim, num_heads, **changes)
        by_seed = "seed" in made.scheme.frequencies.takes
    first = PresetMd(made, **kwargs)

    def make(i: int) -> PresetMd:
        if not i:
            return first
        seed = {"seed": changes.get("seed", 0) + i}
        return PresetMd(preset(encoding, head_dim, num_heads, **changes | seed) if by_seed else made, **kwargs)  # pyright: ignore[reportArgumentType]

    return make, "model" if made.scheme.shared or not list(first.parameters()) else "layer"


def _check_made(made: Preset, changes: dict[str, Any], head_dim: int, num_heads: int) -> None:
    if changes:
        raise ValueError(
            f"encoding_kwargs: expected no {join_names(PRESET_OPTIONS, 'or')} with a Preset, which is already built, "
            f"got {changes}; pass the scheme or its name instead"
        )
    heads = max(made.omega.shape[0], 1 if made.phase is None else made.num_heads)
    if made.head_dim != head_dim or heads not in (1, num_heads):
        raise ValueError(
            f"encoding: expected a preset for head_dim={head_dim} and num_heads={num_heads} or 1, got {made}; pass the "
            "scheme or its name to build it for this model"
        )


def _of_factory(
    factory: Callable[..., Any], kwargs: dict[str, Any], head_dim: int, num_heads: int, num_axes: int
) -> Maker:
    """Call a factory with keyword arguments, because the argument order differs (num_axes is second in CosineMd)."""
    known = {"head_dim": head_dim, "num_heads": num_heads, "num_axes": num_axes}
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some C functions have no signature
        parameters = ()
    bound = factory.keywords if isinstance(factory, partial) else {}
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not named & known.keys() or required - known.keys() - kwargs.keys():
        return lambda i: factory(head_dim, num_heads, **kwargs)
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        _check_options(kwargs, named, getattr(factory, "__name__", "the factory"))
    own = {**{name: known[name] for name in known.keys() & named - bound.keys()}, **kwargs}
    return lambda i: factory(**own)


MODEL_OPTIONS = (
    "absolute", "attention", "copy_v", "keep_encoded", "memory", "modules", "normalizer", "num_axes", "positions",
)  # fmt: skip
F = TypeVar("F", bound=Callable[..., Any])


def encoding_options(encoding: Any) -> set[str]:
    """Return the names in ``encoding_kwargs`` that :func:`build_encoding` accepts for a name, scheme or preset."""
    if encoding is None or encoding == "none":
        return {"act", "dim"}
    by_name = {"cosine": CosineMd, "rotate": RotateMd, "mixed": RotateMd}
    module = by_name.get(encoding, PresetMd) if isinstance(encoding, str) else PresetMd
    own = {*inspect.signature(module).parameters, "sharing"} - {"preset", "head_dim", "num_axes"}
    if module is PresetMd:
        return {*own, *PRESET_OPTIONS} - {"num_heads"}
    return {*own, "heads", *(() if encoding == "mixed" else ("split", "remainder"))}


def _check_options(kwargs: dict[str, Any], known: set[str], name: str) -> None:
    for key in sorted(kwargs.keys() - known):
        advice, expected = _advise(kwargs), f"options of {name} ({', '.join(sorted(known))})"
        raise TypeError(explain_unknown("encoding_kwargs", key, () if advice else known, expected) + advice)


def _advise(kwargs: dict[str, Any]) -> str:
    names = [name for name in MODEL_OPTIONS if name in kwargs]
    if not names:
        return ""
    function = "adapt_attention" if names[0] == "num_axes" else "adapt"
    return f"; pass {names[0]}= to {function}() or the model itself, outside encoding_kwargs"


def explain_misplaced_options(function: F) -> F:
    """Raise an error for a misplaced reference or encoding option, to explain where to pass it."""
    own = inspect.signature(function).parameters.keys()
    options = encoding_options("cosine") | encoding_options("rotate") | encoding_options("eva02")
    options -= {*own, "device", "dtype", "num_heads"}
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for key in sorted(options & kwargs.keys()):
            raise TypeError(
                f"{key}: belongs in encoding_kwargs, not in the arguments of {name}; pass "
                f"encoding_kwargs={{{key!r}: {kwargs[key]!r}}}"
            )
        if "reference" in kwargs and not own & {"reference", "positions"}:  # positions= has no reference
            raise TypeError(
                f"reference: expected an attribute of the model, not an argument of {name}; set "
                f"model.reference = {kwargs['reference']!r} afterwards"
            )
        return function(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


class EncodingStack:
    """View of a backbone's encoding, which may be None, one module for all layers, or one module per layer.

    The backbone itself registers the module or ModuleList, so that parameters have a single name everywhere.
    """

    def __init__(self, encoding: nn.Module | Sequence[nn.Module] | None) -> None:
        self.encoding: Any = encoding
        self.by_layer = isinstance(encoding, (nn.ModuleList, Sequence))

    def __getitem__(self, layer: int) -> nn.Module | None:
        return self.encoding[layer] if self.by_layer else self.encoding

    @property
    def distinct(self) -> list[nn.Module | None]:
        return list(self.encoding) if self.by_layer else [self.encoding]

    @property
    def preset(self) -> Preset | None:
        # Read attributes, which wrappers such as those of PEFT, FSDP1 and torch.compile pass on.
        preset = getattr(next(iter(self.distinct), None), "preset", None)
        return preset if isinstance(preset, Preset) else None

    def check(self, num_axes: int, preset_axes: int | None = None) -> None:
        """Check a preset's number of axes, and that it places images (2 axes) or videos (3 axes) in row-major order."""
        made = self.preset
        if made is None:
            return
        if preset_axes is not None and made.num_axes != preset_axes:
            raise ValueError(
                f"encoding: expected a preset with {preset_axes} axes, got {made.name!r} with {made.num_axes}"
            )
        try:
            made.positions((2,) * num_axes)
        except ValueError as error:
            what = {2: "images", 3: "videos"}[num_axes]
            raise ValueError(f"encoding: expected a preset for {what}, got {made.name!r}: {error}") from error
        if not made.scheme.row_major:
            raise ValueError(f"encoding: expected a preset whose tokens are in row-major order, got {made.name!r}")

    def check_modules(self, head_dim: int, num_axes: int) -> None:
        """Check that encoding modules match the model's sizes. Skip presets, which place tokens themselves."""
        for module in self.distinct:
            if not isinstance(module, FrequencyModule):
                continue
            axes = num_axes if isinstance(module, PresetMd) else module.num_axes
            if (module.head_dim, axes) != (head_dim, num_axes):
                raise ValueError(
                    f"encoding: expected a module with head_dim={head_dim} and num_axes={num_axes}, like this model, "
                    f"got a {type(module).__name__} with head_dim={module.head_dim} and num_axes={module.num_axes}"
                )

    def check_idle_channels(self, num_axes: int) -> None:
        """Warn if some channels of a preset encode all tokens of an image alike. Raise an error if all of them do."""
        made = self.preset
        if made is None or made.num_axes == num_axes:
            return
        positions = made.positions((8,) * num_axes)
        coords = (positions.explicit() if isinstance(positions, Grid) else positions).coords
        varies, used = (coords != coords[:1]).any(0), made.omega != 0
        idle = float((used.any(-1) & ~(used & varies).any(-1)).double().mean())
        message = (
            f"encoding: expected a preset with {num_axes} axes, like this model, got {made.name!r} with "
            f"{made.num_axes}. {idle:.0%} of its channels encode an axis on which all tokens have the same position. "
            "Choose another preset"
        )
        if idle == 1:
            raise ValueError(message)
        if idle:
            warnings.warn(f"{message}, or reassign these channels with encoding_kwargs={{'split': ...}}", stacklevel=4)

    def lay_out(
        self,
        size: Sequence[int],
        before: int | Tokens = 0,
        *,
        after: Sequence[int] | None = None,
        reference: Sequence[int | None] | None = None,
        device: torch.device | str = "cpu",
    ) -> Grid | Coordinates:
        """Return positions of tokens outside the grid, followed by a grid of this size, with one unit per token.

        Args:
            before: number of unrotated tokens before the grid, or :class:`Tokens` with a rule. If this is a number, a
                preset places the tokens by its own rule.
            after: axes on which the grid continues after the tokens. With None, the grid starts at the origin. A preset
                uses its own axes instead.
            reference: the size to interpolate positions to on each axis, or None for the preset's default.
        """
        size, made = tuple(size), self.preset
        if made is not None:
            if not isinstance(before, Tokens) and made.scheme.tokens is None:
                before = Tokens(before)
            return made.positions(before, size, reference=reference, device=device)
        tokens = before if isinstance(before, Tokens) else Tokens(before)
        grid = Grid(size) if reference is None else Grid(size).interpolate(reference)
        if tokens.rule == "skip":
            return replace(grid, prefix=tokens.length)
        return compose(tokens, grid if after is None else After(grid, tuple(after)), device=device)

    def no_weight_decay(self, backbone: nn.Module) -> set[str]:
        """Return the names of all frequencies, phases and decays in the backbone."""
        own = {module for layer in self.distinct if layer is not None for module in layer.modules()}
        names = set()
        for path, module in backbone.named_modules():
            if isinstance(module, (FrequencyModule, HeadDecay)) or module in own:
                names |= {f"{path}.{name}" for name in getattr(module, "no_weight_decay", set)()}
        return names

    def locate(self, positions: Any) -> Any:
        """Apply :meth:`FrequencyModule.set_places` to a grid. Call this once per forward pass, not in every layer."""
        first: Any = next(iter(self.distinct), None)
        if not getattr(first, "moved", ()):
            return positions
        if not isinstance(positions, Grid):
            raise ValueError(
                f"places: expected None for axes {list(first.moved)}, because the positions are not a Grid. Text with "
                "its own positions, images after text, and dropped tokens all need a table of positions"
            )
        return first.locate(positions)
