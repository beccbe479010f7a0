"""Hypothesis strategies that follow from declarations: values of a class, operands of an implementation.

    names of axes -> sizes        distinct ones first (so that swapped axes show), then 0, 1 and others
    open dtypes -> dtypes         float32 first, then every other one that the annotation admits
    batch axes -> sizes           none first; built stacked where the class allows it, else stacked by the library
    arrays -> numbers             ordinary ones first; zeros of both signs, NaN, infinities, subnormal and huge numbers

Every one can be narrowed: ``values(Blocks, n=8, group=st.sampled_from([2, 4]), scale=my_strategy)``.
"""

import ast
import enum
import inspect
import typing
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import reject
from hypothesis.errors import UnsatisfiedAssumption

from typax import _axes, _jax
from typax._axes import Axis
from typax._declaration import MISSING
from typax._op import Refused
from typax._type import dense_type, typing_tree
from typax._value import Value
from typax.laws._calls import reference
from typax.laws._law import Call, NotApplicable, Values
from typax.laws._values import lowered, meaning, raised, stacked
from typax.quantized import QArray

FLOATS = ("float32", "bfloat16", "float16")
OTHERS = ("int32", "int8", "int16", "uint8", "uint16", "uint32", "bool", "complex64", "prng_key")
NASTY = (np.nan, 0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-40, 3e38, -3e38, 1.0)


class _Options(typing.NamedTuple):
    """What an example may be: ``plain`` (the simplest only), ``batched``, ``statics`` (others than the defaults), ``edges``
    (sizes 1, NaN), ``empty``, or any."""

    profile: str = "any"
    tame: bool = False
    smooth: bool = False
    even: bool = False
    nth: int = 0  # which of the values of one example: they differ
    salt: int = 0  # which component or operand: they differ too
    alike: int = 0  # 1: all sizes the same; 2: of values that show none, batch axes too
    makers: Any = ()  # pairs of a class and the op that makes its values of arrays

    @property
    def simple(self) -> bool:
        return self.profile in ("plain", "batched", "statics")


@st.composite
def _composite_values(draw: Any, cls: Any, o: _Options, shape: Any, dtype: Any, batch: Any, count: int, given: Any) -> Any:
    return _draw_values(draw, cls, o, shape, dtype, batch, count, given)


def values(cls: Any, *, shape: Any = None, dtype: Any = None, batch: Any = None, tame: bool = False, **narrow: Any) -> Any:
    """A strategy for values of a declared class.

    Args:
      cls: a subclass of `typax.Value`.
      shape: the shape that the values stand for.
      dtype: the dtype that they stand for, where the class leaves it open.
      batch: the sizes of the batch axes, a tuple.
      tame: finite numbers of ordinary size only.
      narrow: by name, the size of an axis, a static, or a component: a value or a strategy for it.

    Raises:
      TypeError: for a name that the class does not have.
    """
    decl = cls._declaration
    names = {n for c in decl.components if c.axes for d in c.axes.dims for n in d.names}
    names |= {c.name for c in decl.components} | {s.name for s in decl.statics}
    if unknown := narrow.keys() - names:
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(unknown))} to narrow; it has {', '.join(sorted(names))}")
    return _composite_values(cls, _Options(tame=tame), shape, dtype, batch, 1, narrow).map(lambda vs: vs[0])


def examples_of(cls: Any, o: _Options, narrow: Mapping[str, Any]) -> Any:
    """A strategy for `Values` of a declared class."""
    drawn = _composite_values(cls, o, None, None, None, 3, dict(narrow))
    return drawn.map(lambda vs: Values(vs[0], tuple(vs[1:])))


def operands(op: Any, impl: Any = None, *, tame: bool = False, **narrow: Any) -> Any:
    """A strategy for the operands of an op, tuples of values that fit an implementation (the first, unless given).

    ``narrow`` gives an operand or a static by the name of its parameter, or the size of an axis: a value or a strategy.
    """
    return calls_of(op, impl or op.impls[0], _Options(tame=tame), narrow).map(lambda c: c.args)


@st.composite
def calls_of(draw: Any, op: Any, impl: Any, o: _Options, narrow: Mapping[str, Any], owner: Any = None) -> Any:
    """A strategy for `Call`."""
    names = _parameters(impl)
    if unknown := narrow.keys() - {*names, *impl.statics, *_axis_names(impl)}:
        raise TypeError(f"{op.name} {impl} has no {', '.join(sorted(unknown))} to narrow")
    others = _other_statics(impl) if o.profile == "statics" else {}
    for some in [others, *({k: v} for k, v in others.items())] if others else ():  # all, else one
        try:  # which of them an op admits is known by trying
            call = _draw_call(draw, op, impl, o, {**some, **narrow}, owner)
            jax.eval_shape(call.run, *call.args)
        except NotApplicable:
            raise
        except Exception:
            continue
        if _fits(call):
            return call
    drawn, failed = [], None
    for alike in range(3):  # where sizes that differ do not fit, as of a matrix that is to be square
        try:
            drawn.append(_draw_call(draw, op, impl, o._replace(alike=alike), narrow, owner))
        except UnsatisfiedAssumption:
            continue
        except Unmade as e:
            failed = failed or e
            continue
        if _fits(drawn[-1]):
            return drawn[-1]
    if failed is not None and not drawn:
        raise failed
    return drawn[0] if drawn and op.reference is None else reject()


def _draw_call(draw: Any, op: Any, impl: Any, o: _Options, narrow: Mapping[str, Any], owner: Any) -> Call:
    names = _parameters(impl)
    sizes: dict[str, Any] = {k: _given(draw, v) for k, v in narrow.items() if k not in names}
    dtypes: dict[Any, str] = {}
    rows: list[Any] = [None] * len(impl.operands)
    order = sorted(range(len(rows)), key=lambda i: not _is_hi_pattern(impl.operands[i]))
    for i in order:
        if names[i] in narrow:
            rows[i] = [_given(draw, narrow[names[i]])] * 3
        else:
            where = f"{op.name}: operand {names[i]}"
            rows[i] = _draw_operand(draw, o._replace(salt=i), impl.operands[i], sizes, dtypes, where, owner)
    statics = {}
    for k, default in impl.statics.items():
        if k in narrow:
            statics[k] = sizes[k]
        elif default is not MISSING and default is not _EMPTY:
            statics[k] = default
        elif op.primitive is not None and k == "permutation":
            statics[k] = tuple(range(rows[0][0].ndim))[::-1]
        else:
            raise NotApplicable(f"no example of the static {k}; give one: examples={{op: ...}}")
    if impl.any_static:
        raise NotApplicable("its statics are parameters of a primitive; give examples: examples={op: ...}")
    first, *others = zip(*rows, strict=True)
    return Call(op, tuple(first), tuple(map(tuple, others)), statics)


def _other_statics(impl: Any) -> dict[str, Any]:
    """Statics other than the defaults."""
    hints = getattr(impl.fn, "__annotations__", {})
    known = {k: v for k, v in impl.statics.items() if v is not MISSING and v is not _EMPTY}
    others = {k: next((o for o in _others(v, hints.get(k)) if o != v), v) for k, v in known.items()}
    return {k: o for k, o in others.items() if o != known[k]}


def _fits(call: Call) -> bool:
    """Whether the reference takes what the operands stand for: what it refuses is no example. Without one the op does."""
    try:
        if call.op.reference is None:
            jax.eval_shape(call.run, *call.args)
        else:
            ref = reference(call)
            jax.eval_shape(ref, *(jax.tree.map(lambda x: dense_type(_jax.typeof(x)), a) for a in call.args))
    except NotApplicable:
        pass
    except Exception as e:  # of any kind, where it is the user's op that says no
        return call.op.reference is not None and not isinstance(e, (TypeError, ValueError))
    return True


_EMPTY = inspect.Parameter.empty


def _parameters(impl: Any) -> list[str]:
    code = getattr(impl.fn, "__code__", None)
    names = list(code.co_varnames[: code.co_argcount]) if code else []
    return names + [f"{i}" for i in range(len(names), len(impl.operands))]


def _axis_names(impl: Any) -> set[str]:
    return {n for ps in impl.operands for p in ps if p.axes for d in p.axes.dims for n in d.names}


def _is_hi_pattern(pats: Any) -> bool:
    return any(isinstance(p.cls, type) and hasattr(p.cls, "_declaration") for p in pats)


def _draw_operand(draw: Any, o: _Options, pats: Any, sizes: Any, dtypes: Any, where: str, owner: Any) -> list[Any]:
    p = draw(st.sampled_from(pats)) if len(pats) > 1 and not o.simple else pats[0]
    cls = p.cls
    if (cls is Any or cls is _EMPTY) and owner is not None and where.endswith(" self"):
        cls = owner
    if cls is Any or cls is _EMPTY:
        p = _axes.Pattern(jax.Array, ("float32",), _axes.parse("*any k n", where), "any")
        cls = jax.Array
    if isinstance(cls, type) and hasattr(cls, "_declaration"):
        dtype = None
        shape, batch = _hi_shape(draw, o, cls, p.axes, sizes)
        floats = [d for d in FLOATS if d in (p.dtypes or ())]
        if floats and (o.simple or o.smooth):
            dtype = floats[0]
        elif floats and len(floats) < len(FLOATS):  # fewer than the class may stand for
            dtype = draw(st.sampled_from(floats))
        vs = _draw_values(draw, cls, o, shape, dtype, batch, 3, {})
        _bind(p.axes, tuple(vs[0].shape) if p.axes else (), sizes)
        if p.axes is None:  # a bare class: its axes have the names that it gives them
            for name, axis in vs[0]._type.bindings.items():
                sizes.setdefault(name, axis.size)
        if vs[0]._type.decl.stands_for is not None:
            dtypes.setdefault("float", jnp.dtype(vs[0].dtype).name)
        return vs
    if cls is not jax.Array or p.axes is None:
        raise NotApplicable(f"{where}: no example follows from the annotation {p.text}; give one: examples={{op: ...}}")
    shape = _shape(draw, o, p.axes, sizes)
    usual = dtypes.get("float")
    dtype = usual if p.dtypes and usual in p.dtypes and len(p.dtypes) > 1 else _dtype(draw, o, p.dtypes, dtypes)
    return [_array(draw, o._replace(nth=nth), shape, dtype) for nth in range(3)]


def _hi_shape(draw: Any, o: _Options, cls: Any, axes: Any, sizes: dict[str, Any]) -> tuple[Any, Any]:
    """What is known of the shape of an operand of a class, and of its batch axes."""
    stands_for = cls._declaration.stands_for
    if axes is None or stands_for is None:
        return None, None if axes is None and cls._declaration.stackable else ()
    lead = axes.rank - stands_for.axes.rank
    if lead >= 0 and all(d.name is not None for d in stands_for.axes.dims):
        return _shape(draw, o, axes, sizes), None
    env = {k: Axis(v) for k, v in sizes.items() if isinstance(v, int)}
    own = axes.dims[: max(lead, 0)]
    for d in own:
        for name in d.names - env.keys():
            sizes[name] = _size(draw, o, len(sizes))
            env[name] = Axis(sizes[name])
    more = _batch(draw, o) if axes.variadic is not None else ()
    return None, (*more, *(_axes.evaluate(d, env, "an operand").size for d in own))


def _bind(axes: Any, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    if axes is None:
        return
    lead = len(shape) - len(axes.dims)
    if lead < 0:
        reject()
    for dim, size in zip(axes.dims, shape[lead:], strict=True):
        if dim.name is not None and sizes.setdefault(dim.name, size) != size:
            reject()
    if axes.variadic is not None:
        sizes.setdefault(f"*{axes.variadic}", shape[:lead])  # type: ignore[arg-type]


def _shape(draw: Any, o: _Options, axes: Any, sizes: dict[str, Any]) -> tuple[int, ...]:
    for name in sorted({n for d in axes.dims for n in d.names}):
        if name not in sizes:
            sizes[name] = _size(draw, o, len(sizes))
    lead = ()
    if axes.variadic is not None:
        key = f"*{axes.variadic}"
        if key not in sizes:
            sizes[key] = _batch(draw, o)
        lead = sizes[key]
    env = {k: Axis(v) for k, v in sizes.items() if isinstance(v, int)}
    return (*lead, *(_axes.evaluate(d, env, "an operand").size for d in axes.dims))


def _size(draw: Any, o: _Options, k: int) -> int:
    if o.alike:
        return {"edges": 1, "empty": 0}.get(o.profile, 2) if o.alike == 1 else 2
    if o.even:
        return draw(st.sampled_from([4, 2]))
    own = 2 + k % 4
    first = {"edges": 1, "empty": 0}.get(o.profile, own)
    return own if o.simple else draw(st.sampled_from([first, *({own, 1, 0, own + 1} - {first})]))


def _batch(draw: Any, o: _Options) -> tuple[int, ...]:
    if o.alike == 2:
        return (2, 2)
    if o.even:
        return (4,)
    if o.profile == "plain":
        return ()
    if o.profile == "batched":
        return (3, 2)
    return tuple(draw(st.lists(st.sampled_from([2, 3, 1, 0]), max_size=2)))


def _dtype(draw: Any, o: _Options, admitted: Any, drawn: dict[Any, str]) -> str:
    """A dtype; the same for every component and operand that leaves it open alike."""
    if admitted is not None and len(admitted) == 1:
        return admitted[0]
    if admitted not in drawn:
        able = [d for d in (*FLOATS, *OTHERS) if admitted is None or d in admitted] or list(admitted or ())
        able = [d for d in able if o.tame is False or d in FLOATS or not set(able) & set(FLOATS)]
        able = able[1:] + able[:1] if o.profile == "edges" and not o.smooth else able
        drawn[admitted] = able[0] if o.simple or o.smooth else draw(st.sampled_from(able))
    return drawn[admitted]


def _array(draw: Any, o: _Options, shape: tuple[int, ...], dtype: Any) -> Any:
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng([seed, o.nth, *([o.salt] if o.salt else [])])
    if dtype == "prng_key":
        keys = jax.random.split(jax.random.key(seed + o.nth), int(np.prod(shape)))
        return keys.reshape(shape)
    d = jnp.dtype(dtype)
    size = int(np.prod(shape))
    if jnp.issubdtype(d, jnp.inexact):
        plain = (
            ((np.arange(size) + 2 * o.salt) % 7 - 2.5) * 0.3 * (1 + o.nth)
            if seed == 0
            else rng.uniform(0.25, 1.5, size) * rng.choice([-1, 1], size)
        )
        if not o.tame and size:
            least = int(o.profile == "edges")
            for bad in draw(st.lists(st.sampled_from(NASTY), min_size=least, max_size=3)) if not o.simple else ():
                plain[rng.integers(size)] = bad
        if jnp.issubdtype(d, jnp.complexfloating):
            with np.errstate(all="ignore"):
                plain = plain + 1j * np.roll(plain, 1)
    elif d == jnp.bool_:
        plain = rng.integers(0, 2, size)
    else:
        low, high = (0 if jnp.issubdtype(d, jnp.unsignedinteger) else -7), 8
        plain = rng.integers(low, high, size)
        if not o.tame and size and not o.simple:
            for bad in draw(st.lists(st.sampled_from(["min", "max"]), max_size=2)):
                plain[rng.integers(size)] = getattr(jnp.iinfo(d), bad)
    with np.errstate(all="ignore"):
        return jnp.asarray(np.asarray(plain).reshape(shape).astype(d))


def _given(draw: Any, x: Any) -> Any:
    return draw(x) if isinstance(x, st.SearchStrategy) else x


# --- values of a class ---------------------------------------------------------------------------------------------


def _draw_values(
    draw: Any, cls: Any, o: _Options, shape: Any, dtype: Any, batch: Any, count: int, given: Mapping[str, Any]
) -> list[Any]:
    if o.profile == "statics":  # which of them a class admits is known by trying
        try:
            made = _draw_as(draw, cls, o, shape, dtype, batch, count, given)
            jax.eval_shape(meaning, made[0])
        except NotApplicable:
            raise
        except Exception:
            o = o._replace(profile="plain")
        else:
            return made
    return _draw_as(draw, cls, o, shape, dtype, batch, count, given)


def _draw_as(
    draw: Any, cls: Any, o: _Options, shape: Any, dtype: Any, batch: Any, count: int, given: Mapping[str, Any]
) -> list[Any]:
    decl = cls._declaration
    if (maker := dict(o.makers).get(cls)) is not None:
        return _made(draw, cls, maker, o, shape, batch, count)
    given = {k: v for k, v in given.items() if v is not None}
    statics = {s.name: _static(draw, cls, s, o, dtype, given) for s in decl.statics}
    sizes = {k: int(v) for k, v in statics.items() if isinstance(v, int) and not isinstance(v, bool)}
    names = {n for c in decl.components if c.axes for d in c.axes.dims for n in d.names}
    sizes |= {n: int(_given(draw, v)) for n, v in given.items() if n in names and n not in statics}
    if batch is None and shape is not None and decl.stands_for is not None:
        lead = len(shape) - decl.stands_for.axes.rank
        if lead < 0:
            reject()
        batch = tuple(shape[:lead])
    if shape is not None and decl.stands_for is not None:
        _bind(decl.stands_for.axes, tuple(shape), sizes)
        sizes = {k: v for k, v in sizes.items() if isinstance(v, int)}
    if batch is None:
        batch = _batch(draw, o)
    fixed = frozenset(sizes)
    for name in sorted(names - fixed):
        sizes[name] = _size(draw, o, len(sizes))
    dims = [d for c in decl.components if c.axes for d in c.axes.dims]
    dims += decl.stands_for.axes.dims if decl.stands_for else ()
    for dim in dims:
        _make_divisible(dim, sizes, fixed)
    env = {k: Axis(v) for k, v in sizes.items()}
    drawn: dict[Any, Any] = {}  # the dtypes of a pattern, and components that are values without axes
    if dtype is not None and decl.dtype_from not in (None, "dtype"):
        source = next(c for c in decl.components if c.name == decl.dtype_from)
        drawn[source.patterns[0].dtypes] = jnp.dtype(dtype).name
    made = []
    for nth in range(count):
        o = o._replace(nth=nth) if count > 1 else o
        stackable = decl.stackable or not batch
        parts = []
        for _ in range(1 if stackable else int(np.prod(batch))):
            comps = [
                _component(
                    draw,
                    cls,
                    c,
                    o._replace(salt=o.salt + k),
                    batch if stackable and c.axes and c.axes.variadic else (),
                    env,
                    drawn,
                    given,
                )
                for k, c in enumerate(decl.components)
            ]
            try:
                parts.append(cls(*_in_order(cls, comps, statics)))
            except TypeError as e:
                failed = UnsatisfiedAssumption(f"{e}")
                raise failed from None
        made.append(parts[0] if stackable else _grid(parts, batch, draw))
    if shape is not None and decl.stands_for is not None and tuple(made[0].shape) != tuple(shape):
        reject()
    return made


class Unmade(Exception):
    """An op that is to make values of a class makes none of an array of this shape."""


def _made(draw: Any, cls: Any, maker: Any, o: _Options, shape: Any, batch: Any, count: int) -> list[Any]:
    """Values that an op makes of arrays: a class whose components do not go with each other as they like."""
    if shape is not None:
        return _made_of(draw, cls, maker, o, tuple(shape), count)
    failed = None
    for alike in (o.alike, 1):  # where sizes that differ do not fit, as of a matrix that is to be square
        at = o._replace(alike=alike)
        lead = _batch(draw, at) if batch is None else batch
        sizes: dict[str, int] = {}
        own = []
        for d in cls._declaration.stands_for.axes.dims:
            size = d.size if d.size is not None else sizes.get(d.name) or _size(draw, at, len(own))
            own.append(size if d.name is None else sizes.setdefault(d.name, size))
        try:
            return _made_of(draw, cls, maker, at, (*lead, *own), count)
        except Unmade as e:
            failed = failed or e
    assert failed is not None
    raise failed


def _made_of(draw: Any, cls: Any, maker: Any, o: _Options, shape: tuple[int, ...], count: int) -> list[Any]:
    dtype = _dtype(draw, o, cls._declaration.stands_for.dtypes, {})
    arrays = [_array(draw, o._replace(nth=nth), shape, dtype) for nth in range(count)]
    try:
        made = [maker(x) for x in arrays]
    except Refused:
        return reject()
    except Exception as e:  # of any kind: it is the user's op
        name = getattr(maker, "name", None) or getattr(maker, "__name__", str(maker))
        told = f"{name}, which is to make values of {cls.__name__}, makes none of {_jax.typeof(arrays[0])}"
        why = f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise Unmade(f"{told}: {why}; give another op, or values: examples={{{cls.__name__}: [...]}}") from e
    if not isinstance(made[0], cls):
        raise NotApplicable(f"{maker} makes no {cls.__name__}")
    return made


def _grid(parts: list[Any], batch: tuple[int, ...], draw: Any) -> Any:
    if not parts:
        return reject()
    for size in reversed(batch):
        parts = [stacked(parts[i : i + size]) for i in range(0, len(parts), size)]
    return parts[0]


def _in_order(cls: Any, comps: list[Any], statics: dict[str, Any]) -> list[Any]:
    by_name = dict(zip((c.name for c in cls._declaration.components), comps, strict=True)) | statics
    return [by_name[n] for n in cls._declaration.order]


def _make_divisible(dim: Any, sizes: dict[str, int], fixed: frozenset[str]) -> None:
    """Let sizes of the form ``n//k`` be whole."""
    for node in ast.walk(dim.expr):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and isinstance(node.left, ast.Name):
            env = {k: Axis(v) for k, v in sizes.items()}
            by = _axes.evaluate(_axes.Dim(ast.unparse(node.right).replace(" ", ""), node.right), env, "an axis").size
            name = node.left.id
            if by <= 0:
                reject()
            if sizes[name] % by:
                if name in fixed:
                    reject()
                sizes[name] = (sizes[name] // by + 1) * by


def _others(default: Any, hint: Any) -> Any:
    """What a static may be beside its default: of numbers one that a class of arrays is likely to admit."""
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, enum.Enum):
        return type(default)
    if isinstance(default, int):  # 32 in a group -> 16, 8 bits -> 4, axis -1 -> -2
        return [default // 2 if default >= 4 and default % 2 == 0 else default - 1 if default < 0 else default + 1]
    if isinstance(default, float):
        return [default / 2 + 1, default + 1]
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else []


def _static(draw: Any, cls: Any, s: Any, o: _Options, dtype: Any, given: Mapping[str, Any]) -> Any:
    if s.name in given:
        return _given(draw, given[s.name])
    decl = cls._declaration
    if s.name == "dtype" and decl.dtype_from == "dtype":
        if dtype is not None:
            return jnp.dtype(dtype)
        admitted = [d for d in FLOATS if decl.stands_for.dtypes is None or d in decl.stands_for.dtypes]
        admitted = admitted or list(decl.stands_for.dtypes or ())
        return jnp.dtype(admitted[0] if o.simple or o.smooth else draw(st.sampled_from(admitted)))
    hint = next(
        (vars(b)["__annotations__"][s.name] for b in cls.__mro__ if s.name in vars(b).get("__annotations__", {})), None
    )
    hint = {"int": int, "bool": bool, "float": float, "str": str}.get(hint, hint) if isinstance(hint, str) else hint
    if s.default is not MISSING:
        if o.profile == "statics":
            return next((v for v in _others(s.default, hint) if v != s.default), s.default)
        if isinstance(s.default, bool) and not o.simple:
            return draw(st.sampled_from([s.default, not s.default]))
        if isinstance(s.default, enum.Enum) and not o.simple:
            return draw(st.sampled_from([s.default, *type(s.default)]))
        return s.default
    if hint is int:
        return 2 + len(decl.statics) if o.simple else draw(st.integers(1, 4))
    if hint is bool:
        return draw(st.booleans())
    if hint is float:
        return draw(st.sampled_from([1.0, 0.5, 2.0]))
    if hint is str:
        return draw(st.sampled_from(["a", "b"]))
    if typing.get_origin(hint) is typing.Literal:
        return draw(st.sampled_from(typing.get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return draw(st.sampled_from(list(hint)))
    raise NotApplicable(f"no example of the static {s.name} of {cls.__name__}; give one: examples=values(cls, {s.name}=...)")


def _component(
    draw: Any, cls: Any, c: Any, o: _Options, batch: tuple[int, ...], env: Any, drawn: Any, given: Mapping[str, Any]
) -> Any:
    if c.name in given:
        return _given(draw, given[c.name])
    p = c.patterns[0] if o.simple or len(c.patterns) == 1 else draw(st.sampled_from(c.patterns))
    if typing_tree(p.cls):
        return _elements(draw, o)
    shape = None
    if c.axes is not None:
        shape = (*batch, *(_axes.evaluate(d, env, cls.__name__).size for d in c.axes.dims))
        if min(shape, default=0) < 0:
            reject()
    if isinstance(p.cls, type) and issubclass(p.cls, Value) and p.cls is not Value:
        dtype = None if p.dtypes is None else _dtype(draw, o, p.dtypes, drawn)
        if shape is None and not o.simple and c.name in drawn:  # sizes of its own, the same in each value of an example
            first = drawn[c.name]
            return raised(_jax.typeof(first), [jnp.roll(a, o.nth) for a in lowered(first)])
        made = _draw_values(draw, p.cls, o, shape, dtype, None if shape is not None else (), 1, {})[0]
        return made if shape is not None or o.simple else drawn.setdefault(c.name, made)
    if p.cls is jax.Array:
        shape = (2, 3) if shape is None else shape
        return _array(draw, o, shape, _dtype(draw, o, p.dtypes if c.axes else ("float32",), drawn))
    raise NotApplicable(
        f"no example of the component {c.name} of {cls.__name__} follows from its annotation {p.text}; give one: "
        f"examples=values(cls, {c.name}=...)"
    )


def _elements(draw: Any, o: _Options) -> tuple[Any, ...]:
    """Values of any kind, for a component that is a tuple of them."""
    first = (_array(draw, o, (2, 3), "float32"), _draw_values(draw, QArray, o, (2, 3), "float32", None, 1, {})[0])
    more = [_array(draw, o, (2,), d) for d in ("float32", "int32")]
    n = 2 if o.simple else draw(st.integers(0, 2))
    return (*first, *more[:n])
