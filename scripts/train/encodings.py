"""Encodings for all tasks by name, including all presets and registered schemes."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import typer

from lrpe_md import Grid, Memory, Scheme, list_presets
from lrpe_md.checks import is_finite_number, suggest
from lrpe_md.integrations.encoding import encoding_options
from lrpe_md.presets.registry import REGISTERED, find_scheme
from lrpe_md.presets.scheme import make_preset

from ..common.options import choose, in_shell_terms
from .checkpoint import digest_of


@dataclass(frozen=True)
class Encoding:
    """Arguments of a model that determine its position encoding.

    Args:
        encoding: name of the encoding of q and k in the models.
        arguments: options of the encoding.
        model: other arguments of the model.
        needs: capabilities that the model must have; see :class:`Backbone`.
    """

    encoding: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()


def _entry(encoding: str | None = None, *needs: str, model: dict[str, Any] | None = None, **arguments: Any) -> Encoding:
    return Encoding(encoding, arguments, model or {}, frozenset(needs))


# As in PoPE (arXiv 2509.10534), only the keys have a phase. The same phase on q and k would cancel in q·k.
ENCODINGS: dict[str, Encoding] = {
    "none": _entry(),
    "learned": _entry(None, "table", model={"absolute": "learned"}),
    "sincos": _entry(None, "sincos", model={"absolute": "sincos"}),
    "space-only": _entry("rotate", "time", model={"temporal": False}),
    "rotate": _entry("rotate"),
    "rotate-learnable": _entry("rotate", learnable=True),
    "rotate-numerator": _entry("rotate", "memory", model={"normalizer": "unrotated"}),
    "rotate-both": _entry("rotate", "memory", model={"normalizer": "encoded"}),
    "rotate-split": _entry("rotate", "time", split=[2, 3, 3]),
    "rotate-mixed-fixed": _entry("mixed", "axes", learnable=False),
    "rotate-mixed": _entry("mixed", "axes"),
    "rotate-text-axis": _entry("rotate", "caption", model={"text_positions": "axis", "image_after": [0]}),
    "rotate-text-diagonal": _entry("rotate", "caption", model={"text_positions": "diagonal"}),
    "cosine": _entry("cosine", act="none"),
    "cosine-split": _entry("cosine", "time", act="none", split=[2, 3, 3]),
    "cosine-relu": _entry("cosine", act="relu"),
    "cosine-silu": _entry("cosine", act="silu"),
    "cosine-silu-phase": _entry("cosine", act="silu", phase="k"),
    "cosine-softplus": _entry("cosine", act="softplus"),
    "cosine-softplus-phase": _entry("cosine", act="softplus", phase="k"),
    "cosine-learnable": _entry("cosine", act="none", learnable=True),
    "cosine-softplus-learnable": _entry("cosine", act="softplus", learnable=True),
    "cosine-mixed": _entry("cosine", "axes", base=10.0, act="none", frequencies="mixed"),
    "cosine-mixed-learnable": _entry("cosine", "axes", base=10.0, act="none", frequencies="mixed", learnable=True),
}


def has_coordinates(arguments: dict[str, Any]) -> bool:
    """Return whether the positions of a vision transformer with these arguments can be rescaled to a reference grid."""
    is_encoded = arguments.get("encoding") is not None or arguments.get("absolute") == "sincos"
    return is_encoded and not has_position_table(arguments)


def has_position_table(arguments: dict[str, Any]) -> bool:
    """Return whether a model with these arguments has a preset that uses a table of coordinates instead of a grid."""
    encoding, axes = arguments.get("encoding"), arguments.get("num_axes", 3 if "num_frames" in arguments else 2)
    return encoding in list_presets() and not find_scheme(encoding)[1].has_grid(axes)


def find_reference(settings: dict[str, Any], frames: int = 0) -> str:
    """Return the --reference that maps positions onto the training grid of a run of `train image` or `train video`.

    frames: number of frames to use instead of the run's, for a model that can't rescale time. 0 uses the run's.
    """
    found = str(settings.get("reference") or settings["size"])
    if "tubelet" not in settings:
        return found
    trained, _, size = found.rpartition("x")
    return f"{frames or trained or settings['frames']}x{size}"


def explain_single_patch(reference: str) -> str:
    """Return the error for a --reference grid that has only one patch."""
    return (
        f"--reference {reference}: expected more than one patch, because a model trained on a single patch has seen "
        "only one position; pass the size that --weights were trained at"
    )


def split_options(text: str) -> tuple[str, dict[str, Any]]:
    """Split a string such as "rotate:base=100,split=2,3,3" into a name and options.

    Raises:
        typer.BadParameter: if the name is missing, or an option is not KEY=VALUE.
    """
    name, colon, rest = text.partition(":")
    options = {}
    for part in re.split(r",(?=[A-Za-z_]+=)", rest) if colon else ():
        key, equals, value = part.partition("=")
        if not (name and key.isidentifier() and equals and value):
            raise typer.BadParameter(f"--encoding: expected NAME:KEY=VALUE,KEY=VALUE, got {text!r}")
        try:
            options[key] = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value, value))
        except (SyntaxError, ValueError):
            options[key] = value
    return name, options


def split_list(text: str) -> list[str]:
    """Split a comma-separated list of encodings. The options of an encoding may also contain commas."""
    return re.split(r",(?=[A-Za-z_][\w-]*(?:[:,]|$))", text)


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_list_of_integers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_integer, value))


# Numeric options of encodings: a description of valid values, and a check for values other than None.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "base": ("a number", is_finite_number),
    "amplitude": ("a number", is_finite_number),
    "seed": ("an integer", _is_integer),
    "phase_groups": ("an integer", _is_integer),
    "rotary_dim": ("an integer", _is_integer),
    "split": ("integers separated by commas, such as 2,3,3", _is_list_of_integers),
}


def fingerprint_scheme(encoding: str) -> str | None:
    """Return a hash of a registered scheme's definition. In another process, the name may refer to a different scheme.

    ``encoding`` is NAME or NAME:KEY=VALUE,...

    Returns:
        the hash, or None if the encoding is not a registered scheme.
    """
    scheme = REGISTERED.get(split_options(encoding)[0])
    if scheme is None:
        return None
    try:
        definition = {name: value for name, value in scheme.to_dict().items() if name != "doc"}
    except ValueError:  # the scheme has custom functions, so compare what they return
        definition = _probe_scheme(scheme)
    return digest_of(definition)[:16]


def check_scheme(settings: dict[str, Any]) -> None:
    """Check that the scheme in a run's settings is registered, and warn if its definition has changed since training.

    Raises:
        ValueError: if the scheme is not registered.
    """
    if "scheme" not in settings:
        return
    name, _ = split_options(settings["encoding"])
    found = fingerprint_scheme(name)
    if found is None:
        raise ValueError(
            f"encoding: expected the run's scheme {name!r} to be registered; first import the module that registers it "
            "(on the command line, pass --import MODULE)"
        )
    if found != settings["scheme"]:
        warnings.warn(
            f"encoding: the definition of {name!r} differs from the one that the run was trained with; register the "
            "original scheme",
            stacklevel=3,
        )


def _probe_scheme(scheme: Scheme) -> dict[str, Any]:
    """Return a scheme's plain fields, its frequencies, and its positions on a small grid."""
    built = make_preset("this scheme", scheme, scheme.head_dim, scheme.num_heads)
    shape = tuple(range(3, 3 + built.num_axes))
    plain = {
        each.name: getattr(scheme, each.name) for each in fields(scheme) if each.name not in ("doc", "frequencies")
    }
    plain = {name: value for name, value in plain.items() if not callable(value)}
    segments = (shape,) if scheme.tokens is None else (2, shape, 3, shape)
    try:
        positions = built.positions(*segments)
    except ValueError:  # the scheme doesn't support this grid shape
        table = None
    else:
        table = positions.coordinates() if isinstance(positions, Grid) else positions.explicit().coords
    return {
        "plain": repr(plain), "omega": built.omega, "amplitude": built.amplitude, "phase": built.phase, "table": table
    }  # fmt: skip


MEMORY_HELP = (
    "How linear attention layers forget, as KEY=VALUE,...: rule (add, delta), decay (retnet, lightning), learnable "
    "(true, false), directions (forward, both). By default, these layers forget nothing."
)

# Key of --memory for each value that people may pass without a key.
_MEMORY_KEYS = {
    "add": "rule", "delta": "rule", "retnet": "decay", "lightning": "decay", "forward": "directions",
    "both": "directions",
}  # fmt: skip


def parse_memory(text: str) -> Memory | None:
    """Parse a memory such as "rule=delta,decay=retnet". Return None for "".

    Raises:
        typer.BadParameter: for an unknown option or value.
    """
    if not text:
        return None
    known, options = [each.name for each in fields(Memory)], {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            hint = "" if key in known else suggest(key, known)
            if part in _MEMORY_KEYS:
                hint = f" (did you mean '{_MEMORY_KEYS[part]}={part}'?)"
            raise typer.BadParameter(
                f"--memory: expected KEY=VALUE,KEY=VALUE with keys from {', '.join(known)}, got {text!r}{hint}"
            )
        options[key] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    try:
        return Memory(**options)
    except ValueError as error:
        raise typer.BadParameter(f"--memory {text}: {in_shell_terms(error)}") from error


def restore_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert the plain values in a checkpoint to the model arguments that they represent."""
    memory = arguments.get("memory")
    return {**arguments, "memory": Memory(**memory) if isinstance(memory, dict) else memory}


@dataclass(frozen=True)
class Backbone:
    """Capabilities of a task's model.

    Args:
        can: capabilities of the model: "axes" (more than one axis), "time" (three axes, the first of which is time),
            "caption" (text next to the image), "table" (a learned position table), "sincos" (a sinusoidal position
            table), and "memory" (linear attention whose denominator depends on the encoding).
        attentions: model arguments for each kind of attention.
        options: the encoding options that the model supports, or None for all.
    """

    can: frozenset[str]
    attentions: dict[str, dict[str, Any]]
    options: frozenset[str] | None = None

    @property
    def encodings(self) -> list[str]:
        """Encodings in the table that the model supports."""
        return [name for name, each in ENCODINGS.items() if each.needs <= self.can]

    @property
    def names(self) -> list[str]:
        """Names of all encodings, presets and registered schemes. The model may not support every preset."""
        return list(dict.fromkeys([*self.encodings, *list_presets()]))

    @property
    def help(self) -> str:
        """Help text of --encoding."""
        return (
            f"Position encoding, one of: {', '.join(self.encodings)}; or any preset"
            f"{'' if 'axes' in self.can else ' on one axis'}, or a scheme that your module registers "
            "(--import MODULE). Append options to the name, for example rotate:base=100,act=relu."
        )

    @property
    def attention_help(self) -> str:
        """Help text of --attention."""
        return (
            f"Kind of attention, one of: {', '.join(self.attentions)}; or one per layer, separated by commas and "
            "repeated over the depth, such as linear,linear,softmax."
        )

    def split_attention(self, text: str, option: str = "--attention") -> list[str]:
        """Split a string into kinds of attention, one for each layer.

        Raises:
            typer.BadParameter: for an unknown kind.
        """
        kinds = text.split(",")
        choose(option, kinds, self.attentions)
        return kinds

    def find(self, text: str, option: str = "--encoding") -> Encoding:
        """Return the encoding for NAME or NAME:KEY=VALUE,...

        Raises:
            typer.BadParameter: for an unknown name or option.
        """
        name, options = split_options(text)
        if name in self.attentions:
            raise typer.BadParameter(
                f"{option}: expected an encoding, such as rotate, got {name!r}, a kind of attention; pass it as "
                f"--attention {name}"
            )
        if name in ENCODINGS and name in REGISTERED:
            raise typer.BadParameter(
                f"{option}: expected one encoding, but {name!r} names both a built-in encoding and your scheme; "
                "register your scheme under another name"
            )
        choose(option, [name], self.names, "For your own scheme, pass --import MODULE.")
        chosen = ENCODINGS[name] if name in self.encodings else _entry(name)
        known = encoding_options(chosen.encoding) - {"num_heads", "device", "dtype", "scaling"}
        known = known if self.options is None else known & self.options
        for key in options.keys() - known:
            raise typer.BadParameter(
                f"{option} {text}: {name} has no option {key!r}{suggest(key, known)}; it accepts "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        if options.get("act", "none") is None:
            options["act"] = "none"  # this activation's name is "none"
        for key, value in options.items():
            expected, accepts = _TYPES.get(key, ("", None))
            if accepts is not None and value is not None and not accepts(value):
                raise typer.BadParameter(in_shell_terms(f"{option} {text}: {key}: expected {expected}, got {value!r}"))
        return replace(chosen, arguments={**chosen.arguments, **options})

    def attention_arguments(self, attention: str, memory: str = "") -> dict[str, Any]:
        """Return the model arguments for kinds of attention and a memory."""
        kinds, given = self.split_attention(attention), {}
        for kind in kinds:
            given.update(self.attentions[kind])
        given["attention"] = kinds[0] if len(kinds) == 1 else tuple(kinds)
        return {**given, "memory": parse_memory(memory)} if memory else given

    def arguments(self, encoding: str, attention: str, memory: str = "") -> dict[str, Any]:
        """Return the model arguments for an encoding, kinds of attention and a memory."""
        chosen = self.find(encoding)
        return {
            "encoding": chosen.encoding, "encoding_kwargs": chosen.arguments, **chosen.model,
            **self.attention_arguments(attention, memory),
        }  # fmt: skip


# Linear attention uses relu features unless the encoding sets an activation. A norm replaces the denominator, so
# activations with negative values can also be compared.
_WITHOUT_DENOMINATOR = {"attention": "linear", "normalizer": "none"}
_VIT = {
    "softmax": {"attention": "softmax"},
    "linear": {**_WITHOUT_DENOMINATOR, "scale_attn_norm": True},
}
IMAGES = Backbone(frozenset({"axes", "table", "sincos"}), _VIT)
VIDEOS = Backbone(frozenset({"axes", "time", "table", "sincos"}), _VIT)
# Softmax attention, or linear attention with a memory from :mod:`.memory`.
RECALL = Backbone(
    frozenset({"axes", "time", "table", "sincos", "memory"}),
    {name: {} for name in ("softmax", "add", "decay", "delta")},
)  # fmt: skip
CAPTIONED = Backbone(
    frozenset({"axes", "caption", "sincos"}),
    {"softmax": {"attention": "softmax"}, "linear": _WITHOUT_DENOMINATOR},
)
TEXT = Backbone(
    frozenset(),
    {name: {"attention": name} for name in ("softmax", "linear")},
    frozenset({"base", "act", "learnable", "phase"}),
)
