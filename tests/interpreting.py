"""Patches that make Triton's interpreter faster, and make its products equal on all processors.

The interpreter runs a kernel as Python and spends most of its time on types. For every sum, it creates and compares the
tuple of a block's shape. These patches reuse one object for equal shapes, and compute most operators, casts and indices
with a single call of numpy. Before Triton 3.9, they also fix errors.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from lrpe_md.engine.core import operator


class PatchOnce:
    """Replacement for ``interpreter._patch_lang`` that keeps the patches of a launch until it ends.

    The original patches ``triton.language`` at each launch and again at each nested call, and searches for what to
    patch.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch = patch
        self.found: dict[frozenset[int], list[tuple[Any, str, Any]]] = {}  # by languages
        self.languages: set[int] = set()
        self.seen: set[int] = set()  # globals of kernel modules that are patched already
        self.scopes: list[Any] = []

    def __call__(self, fn: Any) -> "PatchOnce":
        """Apply the patches for a launch or a nested call, unless they are already in place."""
        if id(fn.__globals__) in self.seen:
            return self
        # Compare by identity, because not every global of a kernel module supports equality.
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not languages or not languages <= self.languages:
            self.scopes.append(self.make_scope(fn, frozenset(languages)))
            self.languages |= languages
        if languages:
            self.seen.add(id(fn.__globals__))
        return self

    def make_scope(self, fn: Any, languages: frozenset[int]) -> Any:
        if languages not in self.found:
            scope = self.patch(fn)
            self.found[languages] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for owner, name, value in self.found[languages]:
            scope.set_attr(owner, name, value)
        return scope

    def restore(self) -> None:
        self.languages.clear()
        self.seen.clear()
        while self.scopes:
            self.scopes.pop().restore()


class Shape(NamedTuple):
    """Objects that all blocks of the same shape share."""

    sizes: tuple[int, ...]
    of_type: Any  # equal to Triton's tuple
    of_tensor: Any  # tuple of constexprs
    numel: int
    numel_constexpr: Any


SHAPES: dict[tuple[int, ...], Shape] = {}
BY_IDENTITY: dict[int, Shape] = {}  # id of Shape.of_type, which is never freed
NUMPY_TYPES: dict[str, Any] = {}
NO_SHAPE = tl.core.tuple([]), tl.core.constexpr(1)
BLOCK, TENSOR = tl.core.block_type, tl.core.tensor


def find_shape(shape: Any) -> Shape:
    known = BY_IDENTITY.get(id(shape))
    if known is not None:
        return known
    key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if key not in SHAPES:
        made = make_block_type(tl.int32, key)  # validates the sizes
        constants = tl.core.tuple([tl.core.constexpr(size) for size in key])
        SHAPES[key] = Shape(key, made.shape, constants, made.numel, tl.core.constexpr(math.prod(key)))
        BY_IDENTITY[id(made.shape)] = SHAPES[key]
    return SHAPES[key]


def make_block_type(element_ty: Any, shape: tuple[int, ...]) -> Any:
    """Create a block type with Triton's own constructor."""
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


def format_block(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type = handle, type
    if type.__class__ is BLOCK:
        self.dtype, self.shape, self.numel = type.element_ty, type.shared.of_tensor, type.shared.numel_constexpr
    else:
        self.dtype, (self.shape, self.numel) = type, NO_SHAPE


def find_numpy_type(dtype: Any) -> Any:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
    if name not in NUMPY_TYPES:
        NUMPY_TYPES[name] = FIND_NUMPY_TYPE(scalar)
    return NUMPY_TYPES[name]


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the patches.

    Raise an error if Triton lacks a patched function, because tests would otherwise silently take three times as long.
    """
    monkeypatch.setattr(interpreter, "_patch_lang", PatchOnce(interpreter._patch_lang))
    for owner, name, function in QUICK:
        monkeypatch.setattr(owner, name, function)
    builder = interpreter.interpreter_builder
    # Integer sums and products are recomputed in 64 bits for an assertion that only debug mode enables.
    assert builder.options.sanitize_overflow
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply_matrices)
    if not hasattr(interpreter._interpreter, "fma_fp32"):
        fix_old_interpreter(monkeypatch)


CREATE_DOT = interpreter.InterpreterBuilder.create_dot


def multiply_matrices(self: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
    """Sum float32 products in float64, so that results don't depend on the order in which a processor's BLAS sums."""
    if a.data.dtype != np.float32:
        return CREATE_DOT(self, a, b, acc, *precision)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


CALL = interpreter.InterpretedFunction.__call__


def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a kernel, without looking for patches if they are in place."""
    function = self.rewritten_fn.get(self.fn)
    if function is None or id(function.__globals__) not in getattr(interpreter._patch_lang, "seen", ()):
        return CALL(self, *args, **kwargs)
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


TO_TENSOR = interpreter.TritonSemantic.to_tensor
KEPT = {tl.core.tuple, tuple, str, type(None)}  # not tensors
MADE: dict[tuple[Any, ...], Any] = {}  # tensors of numbers


def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
    kind = type(x)
    if kind is TENSOR:
        return x
    if kind is tl.constexpr:
        x = x.value
        kind = type(x)
    if kind not in (int, float, bool):
        return x if kind in KEPT and not check_type else TO_TENSOR(self, x, check_type)
    if x != x:
        return TO_TENSOR(self, x, check_type)
    key = kind, x, math.copysign(1, x)
    if key not in MADE:
        MADE[key] = TO_TENSOR(self, x)
        MADE[key].handle.data.flags.writeable = False
    return MADE[key]


CAST, BROADCAST = interpreter.TritonSemantic.cast, interpreter.TritonSemantic.broadcast_impl_value


def cast(self: Any, x: Any, dtype: Any, *rounding: Any) -> Any:
    """Convert a tensor, with a fast path for conversions that are numpy's."""
    if x.dtype is dtype:
        return x
    if dtype.name in NUMBERS and (x.dtype.name in NUMBERS or x.dtype.name == "int1") and not any(rounding):
        handle = interpreter.TensorHandle(x.handle.data.astype(NUMBERS[dtype.name]), dtype.scalar)
        return tl.tensor(handle, find_type(dtype.scalar, x.type))
    return CAST(self, x, dtype, *rounding)


def broadcast(self: Any, x: Any, y: Any) -> Any:
    if x.shape is y.shape:
        return x, y
    joined = join_types(x.type, y.type)
    return BROADCAST(self, x, y) if joined is None else (expand(x, joined), expand(y, joined))


def expand(x: Any, like: Any) -> Any:
    """Broadcast a scalar or a block to the shape of a type."""
    if not like.is_block() or (x.type.is_block() and x.type.shape is like.shape):
        return x
    data = np.broadcast_to(x.handle.data, like.shared.sizes)
    return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype.scalar), find_type(x.dtype, like))


MATCH, UNWRAP, EQUAL = (
    interpreter.TritonSemantic.binary_op_type_checking_impl, tl.core._unwrap_if_constexpr, tl.core.dtype.__eq__
)  # fmt: skip
SIGNED = {"int32", "int64"}
NUMBERS: dict[str, Any] = {
    "fp32": np.float32, "fp64": np.float64, "int32": np.int32, "int64": np.int64, "uint32": np.uint32,
    "uint64": np.uint64,
}  # fmt: skip
LIMITS = {name: np.iinfo(dtype) for name, dtype in NUMBERS.items() if "int" in name}
CONSTANTS: dict[tuple[Any, ...], Any] = {}


def match(self: Any, lhs: Any, rhs: Any, *options: Any) -> Any:
    """Convert operands to a common type, with a fast path for equal types and for numbers that fit a tensor's type."""
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
    """Return a tensor of x's type and shape, filled with a number."""
    data = find_constant(number, x.dtype.name, x.type.shared.sizes if x.type.is_block() else (1,))
    return tl.tensor(interpreter.TensorHandle(data, x.dtype), x.type)


def find_constant(number: Any, name: str, sizes: tuple[int, ...]) -> Any:
    """Return an array, which is shared, filled with a number of the named type."""
    key = number, math.copysign(1, number), name, sizes
    if key not in CONSTANTS:
        data = np.full(sizes, number, NUMBERS[name])
        data.flags.writeable = False
        CONSTANTS[key] = data
    return CONSTANTS[key]


PLAIN = {tl.tensor, int, float, bool, str, type(None)}


def unwrap(o: Any) -> Any:
    kind = type(o)
    return o if kind in PLAIN else o.value if kind is tl.constexpr else UNWRAP(o)


def equal(self: Any, other: Any) -> bool:
    return self is other or EQUAL(self, other)


def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Patch a function of the language to call the builtin directly, without the wrapper that checks ``_semantic``."""
    function = member.__wrapped__ if getattr(member, "__code__", None) is BUILTIN else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    shortened = SHORTENED.get(name) if obj is tl.tensor else None
    scope.set_attr(obj, name, call if shortened is None else shortened(call))


def shorten_operator(ufunc: Any, dtypes: Collection[str], is_reflected: bool = False) -> Callable[[Any], Any]:
    """Return a function that shortens an operator of tensors.

    The shortened operator calls a numpy function if both operands have the same elements or are signed integers, or if
    one is a number that the other's type can hold. Otherwise, it calls Triton's operator.
    """
    compares = ufunc in (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)

    def shorten(call: Any) -> Any:
        def operator(self: Any, other: Any) -> Any:
            dtype, of_result, value = self.dtype, None, other.value if type(other) is tl.constexpr else other
            if type(value) is int and dtype.is_ptr():
                value = to_tensor(interpreter.interpreter_semantic, value)
            if type(value) is TENSOR:
                if value.dtype is dtype and dtype.name in dtypes:
                    of_result, data = join_types(self.type, value.type), value.handle.data
                elif {dtype.name, value.dtype.name} == SIGNED:
                    of_result = join_types(find_type(tl.int64, self.type), find_type(tl.int64, value.type))
                    data = value.handle.data
                elif ufunc is np.add and dtype.is_ptr():
                    moved = move_pointers(self, value)
                    return call(self, other) if moved is None else moved
            elif dtype.name in dtypes and holds(self, value):
                of_result, data = self.type, find_constant(value, dtype.name, (1,))
            if of_result is None:
                return call(self, other)
            made = ufunc(data, self.handle.data) if is_reflected else ufunc(self.handle.data, data)
            handle = interpreter.TensorHandle(made, of_result.scalar)
            return TENSOR(handle, find_type(tl.int1, of_result) if compares else of_result)

        return operator

    return shorten


def move_pointers(pointers: Any, offsets: Any) -> Any:
    """Return pointers plus signed offsets, or None if the operands need Triton's own operator."""
    element = pointers.dtype.element_ty
    if offsets.dtype.name not in LIMITS or offsets.dtype.name.startswith("u") or element.is_ptr():
        return None
    of_result = join_types(pointers.type, find_type(pointers.dtype, offsets.type))
    if of_result is None:
        return None
    width = max(1, element.primitive_bitwidth // 8)
    data = pointers.handle.data + width * offsets.handle.data.astype(np.uint64)
    return tl.tensor(interpreter.TensorHandle(data, pointers.handle.dtype), of_result)


def shorten_index(call: Any) -> Any:
    """Shorten indices such as ``[:, None]``, which only add dimensions to a block."""

    def index(self: Any, slices: Any) -> Any:
        if not self.type.is_block() or type(slices) is not tuple or not all(map(is_whole, slices)):
            return call(self, slices)
        key = id(self.type.shape), *(s is None for s in slices)
        data = self.handle.data[slices]
        if key not in INDEXED:
            INDEXED[key] = tl.block_type(tl.int1, data.shape)
        handle = interpreter.TensorHandle(data, self.handle.dtype.scalar)
        return tl.tensor(handle, find_type(self.dtype, INDEXED[key]))

    return index


def is_whole(part: Any) -> bool:
    return part is None or (type(part) is slice and part == slice(None))


INDEXED: dict[tuple[Any, ...], Any] = {}  # types by the id of Shape.of_type and the new dimensions
BLOCK_TYPES: dict[tuple[str, int], Any] = {}
JOINED: dict[tuple[int, int], Any] = {}  # shapes by the ids of Shape.of_type


def find_type(dtype: Any, like: Any) -> Any:
    """Return a type of these elements with the shape of another type."""
    if not like.is_block():
        return dtype
    key = dtype.name, id(like.shape)
    if key not in BLOCK_TYPES:
        BLOCK_TYPES[key] = tl.block_type(dtype, like.shape)
    return BLOCK_TYPES[key]


def join_types(a: Any, b: Any) -> Any:
    """Return the type of a result of operands with the same elements, or None if their shapes need Triton's rules."""
    if not b.is_block() or a.shape is b.shape if a.is_block() else not b.is_block():
        return a
    if not a.is_block():
        return b
    key = id(a.shape), id(b.shape)
    if key not in JOINED:
        pairs = list(zip(a.shared.sizes, b.shared.sizes, strict=False))
        fits = len(a.shape) == len(b.shape) and all(x == y or 1 in (x, y) for x, y in pairs)
        JOINED[key] = find_shape(tuple(y if x == 1 else x for x, y in pairs)).of_type if fits else None
    shape = JOINED[key]
    if shape is None:
        return None
    return a if shape is a.shape else b if shape is b.shape else tl.block_type(a.element_ty, shape)


def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


BUILTIN = tl.core.builtin(lambda: None).__code__
BITS = {"int1", *LIMITS}
SHORTENED = {
    "__getitem__": shorten_index,
    "__add__": shorten_operator(np.add, NUMBERS), "__radd__": shorten_operator(np.add, NUMBERS, True),
    "__sub__": shorten_operator(np.subtract, NUMBERS), "__rsub__": shorten_operator(np.subtract, NUMBERS, True),
    "__mul__": shorten_operator(np.multiply, NUMBERS), "__rmul__": shorten_operator(np.multiply, NUMBERS, True),
    "__lt__": shorten_operator(np.less, NUMBERS), "__le__": shorten_operator(np.less_equal, NUMBERS),
    "__gt__": shorten_operator(np.greater, NUMBERS), "__ge__": shorten_operator(np.greater_equal, NUMBERS),
    "__eq__": shorten_operator(np.equal, NUMBERS), "__ne__": shorten_operator(np.not_equal, NUMBERS),
    "__and__": shorten_operator(np.bitwise_and, BITS), "__or__": shorten_operator(np.bitwise_or, BITS),
    "__xor__": shorten_operator(np.bitwise_xor, BITS), "__lshift__": shorten_operator(np.left_shift, LIMITS),
    "__rshift__": shorten_operator(np.right_shift, LIMITS),
}  # fmt: skip
QUICK = (
    (tl.core.block_type, "__init__", init_block),
    (tl.core.block_type, "__str__", format_block),
    (tl.core.tensor, "__init__", init_tensor),
    (interpreter.TensorHandle, "__init__", init_handle),
    (interpreter, "_get_np_dtype", find_numpy_type),
    (interpreter, "_patch_attr", patch_builtin),
    (tl.core, "_unwrap_if_constexpr", unwrap),
    (tl.core.dtype, "__eq__", equal),
    (interpreter.TritonSemantic, "binary_op_type_checking_impl", match),
    (interpreter.InterpretedFunction, "__call__", call_function),
    (interpreter.TritonSemantic, "to_tensor", to_tensor),
    (interpreter.TritonSemantic, "cast", cast),
    (interpreter.TritonSemantic, "broadcast_impl_value", broadcast),
)
OWN = tuple((owner, name, getattr(owner, name)) for owner, name, _ in QUICK)


def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Compute x · y + z in a wider type, in which the product of two float32 numbers is not rounded."""
    wide = np.longdouble if z.data.dtype == np.float64 else np.float64
    a, b, c = (v.data.astype(wide) for v in (x, y, z))
    return interpreter.TensorHandle((a * b + c).astype(z.data.dtype), z.dtype.scalar)


def fix_old_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix errors of versions before Triton 3.9, where fma rounds twice and numpy 2.4 rejects tensors as indices."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    # the warning is about errors that are fixed here
    monkeypatch.setattr(operator, "warn_of_interpreter", lambda: None)
    monkeypatch.setattr(type(interpreter.interpreter_builder), "create_fma", fma)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


class Bounds:
    """Disjoint ranges of addresses that a launch's tensors occupy."""

    def __init__(self) -> None:
        self.begins = self.ends = np.zeros(0, np.uint64)

    def note(self, args: Any) -> None:
        """Record all tensors among a launch's arguments, including those in nested tuples."""
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
        """Raise IndexError if a load or store has an unmasked address outside of the ranges."""
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.uint64)
        if not addresses.size:
            return
        at = np.searchsorted(self.begins, addresses, side="right") - 1
        size = np.uint64(np.dtype(find_numpy_type(pointers.get_element_ty())).itemsize)
        outside = at < 0 if not self.ends.size else (at < 0) | (addresses + size > self.ends[at])
        if outside.any():
            raise IndexError(f"{int(outside.sum())} of {addresses.size} addresses are outside of the kernel's tensors")


def check_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels raise an error if they access memory outside of their tensors, which a GPU may not notice."""
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
