"""Argument checks shared by frequencies, positions and calls."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from .engine.inductor.private import are_transforms_active, is_tracing, num_dispatch_modes

__all__ = [
    "a_or_an", "as_integer", "can_read", "check_at_least", "check_boundaries", "check_dense", "check_frequencies",
    "check_offsets", "check_one_of", "check_precise", "check_reference", "describe_positions", "explain_unknown",
    "find_similar", "fleeting", "invalid_positions", "is_finite_number", "is_real", "join_names", "or_one",
    "plural", "repeat_over_layers", "rotary_slice", "show_value", "split_pair", "suggest",
    "warn_caller",
]  # fmt: skip


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and attribute the warning to our script that runs, or else to the first frame outside this package."""
    package, names = __name__.partition(".")[0], []
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    callers = [i for i, name in enumerate(names) if name.startswith(f"{package}.scripts.")]
    callers += [i for i, name in enumerate(names) if name.partition(".")[0] not in (package, "torch")]
    warnings.warn(message, category, stacklevel=2 + next(iter(callers), 0))


def split_pair(name: str, value: Any, num_tensors: int = 2) -> tuple[Any, ...]:
    """Return one value per tensor (q and k). A tuple must have one value per tensor. Any other value is repeated."""
    if type(value) is not tuple:
        return (value,) * num_tensors
    if len(value) != num_tensors or num_tensors != 2:
        expected = "a pair (for q, for k)" if num_tensors == 2 else "one value for one tensor"
        raise ValueError(f"{name}: expected {expected}, got {len(value)} values")
    return value


def describe_positions(value: Any) -> str:
    """Describe invalid positions for an error message, with advice if they look like coordinates or a grid shape."""
    if isinstance(value, Tensor):
        return "a Tensor; pass Coordinates(tensor)"
    if hasattr(value, "__array__"):
        return f"{type(value).__name__}; pass Coordinates(torch.as_tensor(...))"
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if isinstance(value, list) and value and all(isinstance(each, (list, tuple)) for each in value):
        return "list; for coordinates (N, K), pass Coordinates(torch.tensor(...))"
    if not sizes or any(type(size) is not int for size in sizes):
        return type(value).__name__
    return f"{value}; for a grid of this size, pass Grid({sizes}), or the result of positions({sizes}) of a preset"


def invalid_positions(value: Any) -> TypeError:
    """Return the error for positions of an invalid type."""
    numbers = (int, float, list, tuple)
    if isinstance(value, list) and value and not any(isinstance(each, numbers) for each in value):
        found = "a list; for samples of different sizes, pass the result of pad(...) or pack(...)"
        found += ", and for q and k, a tuple" if len(value) == 2 else ""
    else:
        found = describe_positions(value)
    return TypeError(f"positions: expected a Grid, Coordinates or a tensor of coordinates, got {found}")


def plural(number: int, noun: str) -> str:
    """Format a number with its noun, such as "1 step", "1200 steps" or "2 axes"."""
    return f"{number} {noun if number == 1 else 'axes' if noun == 'axis' else f'{noun}s'}"


def join_names(names: Iterable[str], conjunction: str) -> str:
    """Join names with commas and a conjunction, such as "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def or_one(number: int) -> str:
    """Format the accepted sizes for an error message: "4 or 1" for 4, and "1" for 1."""
    return "1" if number == 1 else f"{number} or 1"


def as_integer(value: Any) -> Any:
    """Convert an integer-like value, such as a NumPy integer, to int. Keep a SymInt. Return None for anything else."""
    if isinstance(value, (int, torch.SymInt)):  # type() of a constant has no guard
        return None if isinstance(value, bool) else value
    if not hasattr(value, "__index__"):  # in torch 2.11, Dynamo can't trace an operator.index that fails
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def fleeting() -> bool:
    """Return whether a dispatch mode, function transform or trace is active. If so, new tensors must not be cached."""
    return bool(num_dispatch_modes() or are_transforms_active() or is_tracing())


def can_read(t: Tensor) -> bool:
    """Return whether the host can read t's values: t must be a plain CPU tensor, outside of traces and transforms."""
    if torch.compiler.is_compiling() or fleeting():
        return False
    return type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"


def check_boundaries(cu_seqlens: Any, x: Tensor | None = None, owner: str = "x") -> None:
    """Check the type, dtype, shape and, if x is passed, the device of the boundaries of packed sequences."""
    check_dense("cu_seqlens", cu_seqlens, "(num_seqs + 1,)", x, owner)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens: expected an int32 or int64 tensor of shape (num_seqs + 1,), got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}"
        )


def check_offsets(cu_seqlens: Tensor, num_tokens: int, *, to_the_end: bool = True) -> None:
    """Check the values of ``cu_seqlens``, the boundaries of packed sequences, if the host can read them.

    to_the_end: whether the last sequence must end at the last token.
    """
    if not can_read(cu_seqlens):
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    ends_right = last == num_tokens if to_the_end else last <= num_tokens
    if first == 0 and ends_right and not (cu_seqlens[1:] < cu_seqlens[:-1]).any():
        return
    shown = ", ".join(map(str, cu_seqlens[:8].tolist())) + (", ..." if len(cu_seqlens) > 8 else "")
    raise ValueError(
        f"cu_seqlens: expected non-decreasing offsets from 0 to {'' if to_the_end else 'at most '}{num_tokens} (the "
        f"number of tokens), got [{shown}]; pass 0 followed by the cumulative sum of the lengths"
    )


SYNONYMS: dict[str, str] = {
    "rope": "rotate", "rotary": "rotate", "axial": "rotate", "lrpe": "cosine", "mixed": "rotate-mixed",
    "rotate-mixed": "mixed", "theta": "base", "rope_theta": "base", "learning_rate": "lr", "batch_size": "batch",
    "num_layers": "depth", "layers": "depth", "embed_dim": "dim", "num_heads": "heads", "optimizer": "opt",
    "dtype": "precision",
}  # fmt: skip


def a_or_an(noun: str) -> str:
    """Return a noun with its article, such as "a Tensor" or "an OptimizedModule"."""
    return f"{'an' if noun[:1] in 'AEIOaeio' else 'a'} {noun}"


def find_similar(name: Any, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelt name or a synonym probably stands for, or None.

    If only a trailing number is missing, return the first known name that matches.
    """
    if not isinstance(name, str):
        return None
    names, synonym = list(known), SYNONYMS.get(name.lower())
    if synonym in names:
        return synonym
    numbered = [each for each in names if each.rstrip("0123456789") == name.lower()]
    return next(iter([*numbered, *get_close_matches(name, names, n=1)]), None)


def suggest(name: Any, known: Iterable[str]) -> str:
    """Return a hint to append to an error, such as " (did you mean 'rotate'?)", or "" if no known name is similar."""
    close = find_similar(name, known)
    return f" (did you mean {close!r}?)" if close else ""


def explain_unknown(argument: str, name: Any, known: Iterable[str], expected: str) -> str:
    """Return an error about an unknown name. Suggest a similar name first, because ``expected`` may be long."""
    close = find_similar(name, known)
    if close is None:
        return f"{argument}: expected {expected}, got {name!r}"
    return f"{argument}: unknown {name!r}; did you mean {close!r}? Expected {expected}"


def explain_unknown_keyword(owner: str, name: str, when: str, advice: str) -> str:
    """Return an error about a keyword argument that a module doesn't accept when you ``build`` or ``call`` it."""
    return f"{name}: {owner} doesn't accept this argument when you {when} it{advice}"


def check_reference(reference: Sequence[int | None], grid: Sequence[int], patch_size: Sequence[int]) -> None:
    """Raise an error if a reference size is so much larger than the patch grid that it is probably in pixels."""
    sizes = zip(reference, grid, patch_size, strict=True)
    if any(size is not None and patch >= 8 and size >= number * patch for size, number, patch in sizes):
        raise ValueError(
            f"reference: expected sizes in patches, as in the model's grid {tuple(grid)}, got {tuple(reference)}; if "
            f"these are pixels, divide them by the patch size, {tuple(patch_size)}"
        )


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a finite Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_precise(name: str, dtype: torch.dtype, advice: str = "") -> None:
    """Check that a dtype is precise enough for frequencies and positions."""
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name}: expected float32 or float64 (16 bits are too coarse for distant tokens), got {dtype}{advice}"
        )


def check_frequencies(name: str, omega: Tensor) -> None:
    """Check that frequencies from a caller's function are precise, finite and independent of other parameters."""
    check_precise(name, omega.dtype)
    if omega.requires_grad:
        raise ValueError(
            f"{name}: expected a tensor that doesn't require gradients, because the module owns its frequencies; "
            "return tensor.detach(). To learn the frequencies, pass learnable=True"
        )
    if can_read(omega) and not omega.isfinite().all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")


def show_value(value: Any) -> str:
    """Return a value for an error message, or only its type if its repr is long."""
    text = repr(value)
    return a_or_an(type(value).__name__) if isinstance(value, Tensor) or len(text) > 120 else text


def check_dense(name: str, value: Any, form: str, x: Tensor | None = None, owner: str = "x") -> None:
    """Check that a value is a dense, strided tensor and, if x is passed, that it is on the device of x.

    ``form`` describes the expected shape in the error, and ``owner`` is the name of x.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape {form}, got {type(value).__name__}")
    if value.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor of shape {form}, got a nested tensor; pad it, or pack its sequences "
            "into (1, H, N, D) and describe their positions with lrpe_md.pack or cu_seqlens"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor of shape {form}, got {value.layout}; call to_dense()")
    if x is not None and value.device != x.device:
        raise ValueError(f"{name}: expected a tensor on {owner}'s device {x.device}, got {value.device}")


def rotary_slice(rotary_dim: int | slice | None, head_dim: int, even: bool = True) -> tuple[int, int]:
    """Return the first mapped channel and the number of mapped channels. Set ``even`` if this number must be even."""
    if rotary_dim is None:
        start, stop = 0, head_dim
        if even and head_dim % 2:
            raise ValueError(
                f"head_dim: expected an even number, got {head_dim}. Channels are rotated in pairs; rotate an even "
                "number of channels with rotary_dim=, or use the cosine map"
            )
    elif isinstance(rotary_dim, slice):
        if rotary_dim.step not in (None, 1):
            raise ValueError(f"rotary_dim: expected a slice with step 1, got {rotary_dim}")
        start, stop, _ = rotary_dim.indices(head_dim)
    else:
        start, stop = 0, None if isinstance(rotary_dim, bool) else as_integer(rotary_dim)
        if stop is None:
            raise TypeError(f"rotary_dim: expected a number of channels, a slice or None, got {show_value(rotary_dim)}")
    if not even and not 0 <= start < stop <= head_dim:
        raise ValueError(f"rotary_dim: expected a width from 1 to head_dim = {head_dim}, got {show_value(rotary_dim)}")
    if not (0 <= start < stop <= head_dim and (not even or (stop - start) % 2 == 0)):
        raise ValueError(
            f"rotary_dim: expected an even width of at most head_dim = {head_dim}, got {show_value(rotary_dim)} "
            f"({stop - start} channels)"
        )
    return start, stop - start


def is_real(t: Tensor) -> bool:
    """Return whether a tensor's dtype is a real number type, not bool or complex."""
    return t.dtype != torch.bool and not t.is_complex()


def check_at_least(least: int, **numbers: Any) -> None:
    """Check that each number is an integer, as in :func:`as_integer`, of at least ``least``."""
    for name, number in numbers.items():
        if as_integer(number) is None or number < least:
            kind = {0: "a non-negative integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
            raise ValueError(f"{name}: expected {kind}, got {show_value(number)}")


def check_boolean(name: str, value: Any) -> None:
    """Check that an option is True or False. Truthy values such as tensors and strings are errors."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {show_value(value)}")


def check_one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    """Check that an option has one of the known values."""
    if value not in known:
        raise ValueError(f"{name}: expected {join_names(map(repr, known), 'or')}, got {show_value(value)}")


def repeat_over_layers(name: str, value: Any, depth: int, known: Sequence[Any]) -> tuple[Any, ...]:
    """Return one value per layer. A single value applies to all layers, and a sequence repeats to fill the depth.

    Raises:
        ValueError: for an unknown value, or a sequence whose length does not divide the depth.
    """
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for each in values:
        check_one_of(name, each, known)
    if not values or depth % len(values):
        raise ValueError(
            f"{name}: expected one value, or a sequence that can be repeated over the {depth} layers, got "
            f"{len(values)} values; pass a sequence whose length divides {depth}"
        )
    return values * (depth // len(values))
