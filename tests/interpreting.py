"""Triton's interpreter without what it does over and over, or for nothing; before 3.9, mended.

It runs a kernel as Python, and most of its time goes to types: a block's shape is a tuple of Triton's own, made and
compared anew at each sum. Here equal shapes are one object.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from lrpe_md.engine import dispatch


class PatchOnce:
    """Stands in for ``interpreter._patch_lang``, which replaces the functions of ``triton.language`` when a kernel is
    launched and again, to the same effect, whenever a kernel calls another: what is replaced stays until the launch
    ends.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch = patch
        self.languages: set[int] = set()
        self.seen: set[int] = set()  # modules of kernels, by their globals, whose languages are replaced
        self.scopes: list[Any] = []

    def __call__(self, fn: Any) -> "PatchOnce":
        """At a launch, which restores what this returns, and at each nested call, which doesn't."""
        if id(fn.__globals__) in self.seen:
            return self
        # By identity: not every global of a module of kernels can be compared.
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not languages or not languages <= self.languages:
            self.scopes.append(self.patch(fn))
            self.languages |= languages
        if languages:
            self.seen.add(id(fn.__globals__))
        return self

    def restore(self) -> None:
        self.languages.clear()
        self.seen.clear()
        while self.scopes:
            self.scopes.pop().restore()


class Shape(NamedTuple):
    """What blocks of one shape have in common."""

    sizes: tuple[int, ...]
    of_type: Any  # the same as Triton's tuple
    of_tensor: Any  # of constexprs
    numel: int
    numel_constexpr: Any


SHAPES: dict[tuple[int, ...], Shape] = {}
BY_IDENTITY: dict[int, Shape] = {}  # of Shape.of_type, which stays
NUMPY_TYPES: dict[str, Any] = {}
NO_SHAPE = tl.core.tuple([]), tl.core.constexpr(1)


def find_shape(shape: Any) -> Shape:
    known = BY_IDENTITY.get(id(shape))
    if known is not None:
        return known
    key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if key not in SHAPES:
        made = make_block_type(tl.int32, key)  # checks the sizes
        constants = tl.core.tuple([tl.core.constexpr(size) for size in key])
        SHAPES[key] = Shape(key, made.shape, constants, made.numel, tl.core.constexpr(math.prod(key)))
        BY_IDENTITY[id(made.shape)] = SHAPES[key]
    return SHAPES[key]


def make_block_type(element_ty: Any, shape: tuple[int, ...]) -> Any:
    """As Triton makes it."""
    made = tl.core.block_type.__new__(tl.core.block_type)
    INIT_BLOCK(made, element_ty, list(shape))
    return made


INIT_BLOCK = tl.core.block_type.__init__
FIND_NUMPY_TYPE = interpreter._get_np_dtype


def init_block(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shared = find_shape(shape)
    self.shape, self.numel = self.shared.of_type, self.shared.numel
    self.name = "block"


def say_block(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        self.shape, self.numel = type.shared.of_tensor, type.shared.numel_constexpr
    else:
        self.shape, self.numel = NO_SHAPE


def find_numpy_type(dtype: Any) -> Any:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
    if name not in NUMPY_TYPES:
        NUMPY_TYPES[name] = FIND_NUMPY_TYPE(scalar)
    return NUMPY_TYPES[name]


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where Triton has none of what is replaced: better than tests that silently take three times as long."""
    monkeypatch.setattr(interpreter, "_patch_lang", PatchOnce(interpreter._patch_lang))
    for owner, name, function in QUICK:
        monkeypatch.setattr(owner, name, function)
    builder = interpreter.interpreter_builder
    # Each sum and product of integers is formed again in 64 bits for an assertion that only debug turns on.
    assert builder.options.sanitize_overflow
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    if not hasattr(interpreter._interpreter, "fma_fp32"):
        mend(monkeypatch)


CAST, BROADCAST = interpreter.TritonSemantic.cast, interpreter.TritonSemantic.broadcast_impl_value


def cast(self: Any, x: Any, dtype: Any, *rounding: Any) -> Any:
    return x if x.dtype is dtype else CAST(self, x, dtype, *rounding)


def broadcast(self: Any, x: Any, y: Any) -> Any:
    if x.shape is y.shape:
        return x, y
    if not (x.type.is_block() and y.type.is_block() and len(x.shape) == len(y.shape)):
        return BROADCAST(self, x, y)
    pairs = list(zip(x.type.shared.sizes, y.type.shared.sizes, strict=True))
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        return BROADCAST(self, x, y)  # which says what is wrong
    sizes = tuple(b if a == 1 else a for a, b in pairs)
    return spread(self, x, sizes), spread(self, y, sizes)


def spread(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
    if x.type.shared.sizes == sizes:
        return x
    return self.tensor(self.builder.create_broadcast(x.handle, sizes), tl.block_type(x.dtype, sizes))


MATCH, UNWRAP, EQUAL = (
    interpreter.TritonSemantic.binary_op_type_checking_impl, tl.core._unwrap_if_constexpr, tl.core.dtype.__eq__
)  # fmt: skip
NUMBERS = {"fp32": np.float32, "fp64": np.float64, "int32": np.int32, "int64": np.int64}
LIMITS = {name: np.iinfo(dtype) for name, dtype in NUMBERS.items() if name.startswith("int")}
CONSTANTS: dict[tuple[Any, ...], Any] = {}


def match(self: Any, lhs: Any, rhs: Any, *options: Any) -> Any:
    """Operands of one type: two tensors that are, and a tensor and a Python number that its type holds."""
    if type(lhs) is tl.tensor:
        if type(rhs) is tl.tensor:
            if lhs.dtype is rhs.dtype and lhs.dtype.name in NUMBERS:
                return self.broadcast_impl_value(lhs, rhs)
        elif holds(lhs, rhs):
            return lhs, fill(lhs, rhs)
    elif type(rhs) is tl.tensor and holds(rhs, lhs):
        return fill(rhs, lhs), rhs
    return MATCH(self, lhs, rhs, *options)


def holds(x: Any, number: Any) -> bool:
    name = x.dtype.name
    if name in LIMITS:
        return type(number) is int and LIMITS[name].min <= number <= LIMITS[name].max
    return name in NUMBERS and type(number) in (int, float)


def fill(x: Any, number: Any) -> Any:
    """The number in the type and shape of x."""
    sizes = x.type.shared.sizes if x.type.is_block() else (1,)
    key = number, math.copysign(1, number), x.dtype.name, sizes
    if key not in CONSTANTS:
        data = np.full(sizes, number, NUMBERS[x.dtype.name])
        data.flags.writeable = False  # many have it
        CONSTANTS[key] = data
    return tl.tensor(interpreter.TensorHandle(CONSTANTS[key], x.dtype), x.type)


def unwrap(o: Any) -> Any:
    kind = type(o)
    return o if kind is tl.tensor else o.value if kind is tl.constexpr else UNWRAP(o)


def equal(self: Any, other: Any) -> bool:
    return self is other or EQUAL(self, other)


def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language, called without those that only look for ``_semantic``."""
    function = member.__wrapped__ if getattr(member, "__code__", None) is BUILTIN else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


BUILTIN = tl.core.builtin(lambda: None).__code__
QUICK = (
    (tl.core.block_type, "__init__", init_block),
    (tl.core.block_type, "__str__", say_block),
    (tl.core.tensor, "__init__", init_tensor),
    (interpreter, "_get_np_dtype", find_numpy_type),
    (interpreter, "_patch_attr", patch_builtin),
    (tl.core, "_unwrap_if_constexpr", unwrap),
    (tl.core.dtype, "__eq__", equal),
    (interpreter.TritonSemantic, "binary_op_type_checking_impl", match),
    (interpreter.TritonSemantic, "cast", cast),
    (interpreter.TritonSemantic, "broadcast_impl_value", broadcast),
)
OWN = tuple((owner, name, getattr(owner, name)) for owner, name, _ in QUICK)


def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Rounded once: the product of two float32 is exact in np.longdouble."""
    a, b, c = (v.data.astype(np.longdouble) for v in (x, y, z))
    return interpreter.TensorHandle((a * b + c).astype(z.data.dtype), z.dtype.scalar)


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Triton 3.9 an fma rounds twice, and numpy 2.4 takes no tensor for an index."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(dispatch, "warn_of_interpreter", lambda: None)  # of what is mended here
    monkeypatch.setattr(type(interpreter.interpreter_builder), "create_fma", fma)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


class Bounds:
    """The memory that a launch was given, as disjoint ranges of addresses."""

    def __init__(self) -> None:
        self.begins = self.ends = np.zeros(0, np.uint64)

    def note(self, args: Any) -> None:
        """Take the tensors among the arguments of a launch, wherever these are nested."""
        ranges: list[tuple[int, int]] = []

        def visit(arg: Any) -> None:
            if isinstance(arg, tuple):
                for each in arg:
                    visit(each)
            elif hasattr(arg, "data_ptr") and arg.numel():
                steps = sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
                ranges.append((arg.data_ptr(), arg.data_ptr() + (steps + 1) * arg.element_size()))

        visit(tuple(args))
        merged: list[list[int]] = []
        for begin, end in sorted(ranges):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        self.begins = np.array([begin for begin, _ in merged], np.uint64)
        self.ends = np.array([end for _, end in merged], np.uint64)

    def check(self, pointers: Any, mask: Any) -> None:
        """Raise IndexError unless all addresses that a load or store doesn't mask off are in the ranges."""
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.uint64)
        if not addresses.size:
            return
        at = np.searchsorted(self.begins, addresses, side="right") - 1
        size = np.uint64(np.dtype(find_numpy_type(pointers.get_element_ty())).itemsize)
        outside = at < 0 if not self.ends.size else (at < 0) | (addresses + size > self.ends[at])
        if outside.any():
            raise IndexError(f"{int(outside.sum())} of {addresses.size} addresses are outside of the kernel's tensors")


def check_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels fail that read or write outside of the tensors that they are given: a GPU may not notice."""
    bounds, builder = Bounds(), type(interpreter.interpreter_builder)
    init, load, store = (
        interpreter.GridExecutor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    )  # fmt: skip

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        found = init(self, args, kwargs)
        bounds.note((*found[0], *found[1].values()))
        return found

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        bounds.check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", init_args)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
