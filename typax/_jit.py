"""`jax.jit` for functions of hi values, at what a call on arrays costs.

    f       q8[8,4], float32[2,8] -> r8[2,4]                        traced by JAX, once for given types
    flat    int8[8,4], float32[8], float32[2,8] -> int8, float32    the same program on arrays: what is compiled
    a call  opens the values, runs the compiled program, closes the results: in C++ (`_jax.fast_call`), else in Python

A function of arrays only, and any function under a trace, goes to `jax.jit` itself: tangents, batches and jaxprs are JAX's.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from typax import _jax
from typax._placement import with_sharding_constraint
from typax._prim import opens_in_calls
from typax._spec import Pspec
from typax._type import ValueType, by_type

SHARDINGS = ("in_shardings", "out_shardings")
KEPT = ("keep_unused", "device", "backend", "inline", "compiler_options")  # what holds for the program on arrays as it is


class Flat:
    """A traced function as a jitted function of arrays."""

    def __init__(self, traced: Any, options: dict[str, Any], shardings: dict[str, Any]) -> None:
        jaxpr = traced.jaxpr
        self.in_tys, self.out_tys, self.out_tree = tuple(jaxpr.in_avals), tuple(jaxpr.out_avals), traced.out_tree
        run = _jax.eval_jaxpr_fun(traced.lojax.jaxpr)

        def flat(*los: Any) -> list[Any]:
            return run(*los)

        flat.__name__ = flat.__qualname__ = traced.fun_name
        donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
        per = by_type(self.in_tys, (d for t, d in zip(self.in_tys, donated, strict=True) for _ in t.lo_ty()))
        flags = [d for _, own in per for d in own]
        self.call = jax.jit(
            flat, donate_argnums=tuple(i for i, d in enumerate(flags) if d), **options, **self._per_array(traced, shardings)
        )

    def trace(self, args: Sequence[Any]) -> Any:
        """Traced on the arrays that make up the arguments, of which the devices are known then, or on their types."""
        pairs = zip(self.in_tys, args, strict=True)
        los = (t.lower_val(x) if _jax.is_hi_value(x) else t.lo_ty() if _jax.is_hi(t) else [x] for t, x in pairs)
        return self.call.trace(*(lo for own in los for lo in own))

    def open(self, args: Sequence[Any]) -> list[Any]:
        """The arrays that make up the arguments."""
        return [lo for t, x in zip(self.in_tys, args, strict=True) for lo in t.lower_val(x)]

    def close(self, los: Sequence[Any]) -> Any:
        """The results, from the arrays that make them up."""
        return self.out_tree.unflatten([t.raise_val(*own) for t, own in by_type(self.out_tys, los)])

    def _per_array(self, traced: Any, shardings: dict[str, Any]) -> dict[str, Any]:
        out = {}
        if "in_shardings" in shardings:
            args, _ = traced.in_tree.unflatten(self.in_tys)
            given = shardings["in_shardings"]
            given = tuple(given) if isinstance(given, list) else given
            out["in_shardings"] = tuple(_spread("in_shardings", given, args))
        if "out_shardings" in shardings:
            types = self.out_tree.unflatten(self.out_tys)
            out["out_shardings"] = _spread("out_shardings", shardings["out_shardings"], types)
        return out


def _is_sharding(x: Any) -> bool:
    return x is None or isinstance(x, jax.P | jax.sharding.Sharding | _jax.HiPspec)


def _spread(name: str, given: Any, types: Any) -> list[Any]:
    """For each array of which values of these types are made, what a pytree prefix says of its sharding."""
    full = jax.tree.leaves(jax.tree.broadcast(given, types, is_leaf=_is_sharding), is_leaf=_is_sharding)
    return [s for ty, spec in zip(jax.tree.leaves(types), full, strict=True) for s in _of_type(name, ty, spec)]


def _of_type(name: str, ty: Any, spec: Any) -> list[Any]:
    los = ty.lo_ty()
    if not _jax.is_hi(ty):
        if isinstance(spec, _jax.HiPspec):
            raise TypeError(f"{name}: {spec!r} is for hi values, not for {ty}; give a jax.P or a sharding")
        return [spec]
    if spec is None or (isinstance(spec, jax.sharding.Sharding) and spec.num_devices == 1):
        return [spec] * len(los)
    if not isinstance(ty, ValueType):
        raise TypeError(f"{name}: the type of {ty} is written by hand, so {spec!r} cannot be told to its arrays; give None")
    if not isinstance(spec, jax.P | jax.sharding.NamedSharding | Pspec):
        raise TypeError(f"{name}: {ty} takes {ty.decl.cls.__name__}.P(...), a jax.P or a NamedSharding, not {spec!r}")
    own, mesh = ty.partition_spec(spec)
    parts = own.to_lo()
    return [jax.sharding.NamedSharding(mesh, p) if mesh is not None else p for p in parts]


class Jitted:
    """A function jitted by `jit`, called through Python; `miss` is what a call in C++ asks the first time."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        shardings = {k: v for k, v in options.items() if k in SHARDINGS and v is not _jax.unspecified}
        leaves, tree = jax.tree.flatten(shardings, is_leaf=_is_sharding)
        rest = {k: v for k, v in options.items() if k not in SHARDINGS}
        self.shardings, self.by_class = shardings, any(isinstance(s, _jax.HiPspec) for s in leaves)
        self.fun, self.bare_options = fun, rest
        self.bare: Any = jax.jit(fun, **rest)
        self.own: Any = jax.jit(fun, **options) if shardings and not self.by_class else self.bare
        self.options = {k: v for k, v in rest.items() if k in KEPT}
        self.nums, self.names = static_arguments(fun, rest.get("static_argnums"), rest.get("static_argnames"))
        self.key = (tuple(map(str, rest.items())), tuple(leaves), tree)
        functools.update_wrapper(self, fun)

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat | None:
        """The program on arrays; ``None`` if JAX itself is to run this."""
        self._refuse_static(args, kwargs)
        if not _jax.trace_is_clean():
            return None
        return self._of(self.bare.trace(*args, **kwargs))

    def _of(self, traced: Any) -> Flat | None:
        jaxpr = traced.jaxpr
        if not (_jax.is_high(jaxpr) or self.by_class):
            return None
        if any(isinstance(a, _jax.AbstractRef) for a in (*jaxpr.in_avals, *jaxpr.out_avals)):
            return None
        per = _flats.setdefault(jaxpr, {})
        if self.key not in per:
            per[self.key] = Flat(traced, self.options, self.shardings)
        return per[self.key]

    def _is_static(self, i: int, n: int) -> bool:
        """Whether the argument at ``i`` of ``n`` is."""
        return i in self.nums or i - n in self.nums

    def _refuse_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        static = [x for i, x in enumerate(args) if self._is_static(i, len(args))]
        static += [x for k, x in kwargs.items() if k in self.names]
        if found := [x for x in jax.tree.leaves(static) if _jax.is_hi_value(x)]:
            raise TypeError(
                f"typax.jit: a value of type {_jax.typeof(found[0])} is no static argument, as an array is none: pass it "
                "as an operand, or close over it"
            )

    def dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of what is not static."""
        own = [x for i, x in enumerate(args) if not self._is_static(i, len(args))]
        return jax.tree.leaves((own, {k: v for k, v in kwargs.items() if k not in self.names}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (flat := self.flat(args, kwargs)) is None:
            return self._traced(args, kwargs)(*args, **kwargs)
        return flat.close(flat.call(*flat.open(self.dynamic(args, kwargs))))

    def miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        if (flat := self.flat(args, kwargs)) is None:
            return _jax.own_miss(self._traced(args, kwargs), args, kwargs)
        los = flat.open(self.dynamic(args, kwargs))
        if not all(map(opens_in_calls, (*flat.in_tys, *flat.out_tys))):
            return flat.close(flat.call(*los)), None, False
        return _jax.call_miss(flat.call, los, flat.close)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """JAX's function, for arrays and for a program that is being traced: there shardings of values are constraints."""
        if not self.shardings:
            return self.own
        traced = self.bare.trace(*args, **kwargs)
        if not self.by_class and not any(map(_jax.is_hi, (*traced.jaxpr.in_avals, *traced.jaxpr.out_avals))):
            return self.own
        return self.constrained

    @functools.cached_property
    def constrained(self) -> Any:
        fun = self.fun

        @functools.wraps(fun)
        def within(*args: Any, **kwargs: Any) -> Any:
            if kwargs.keys() - set(self.names) and "in_shardings" in self.shardings:
                raise ValueError("typax.jit: in_shardings are for arguments by position; pass all so")
            moving = [i for i in range(len(args)) if i not in self.nums and i - len(args) not in self.nums]
            moved = dict(zip(moving, self._constrain("in_shardings", tuple(args[i] for i in moving)), strict=True))
            out = fun(*(moved.get(i, x) for i, x in enumerate(args)), **kwargs)
            return self._constrain("out_shardings", out)

        return jax.jit(within, **self.bare_options)

    def _constrain(self, name: str, tree: Any) -> Any:
        if name not in self.shardings:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        given = self.shardings[name]
        specs = jax.tree.broadcast(tuple(given) if isinstance(given, list) else given, tree, is_leaf=_is_sharding)
        out = []
        for x, spec in zip(leaves, jax.tree.leaves(specs, is_leaf=_is_sharding), strict=True):
            _of_type(name, _jax.typeof(x), spec)  # which says what does not fit
            out.append(x if spec is None else with_sharding_constraint(x, spec))
        return structure.unflatten(out)

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    # --- ahead of time

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`: ``f.trace(*args)``, from values or their types."""
        traced = self.bare.trace(*args, **kwargs)
        flat = self._of(traced)
        if flat is None:
            return self.own.trace(*args, **kwargs) if self.own is not self.bare else traced
        return Staged(_jax.prepare_lowering(traced, flat.trace(self.dynamic(args, kwargs))), traced.in_tree, flat.in_tys)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`: ``f.lower(*args).compile()(*args)``."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`: the types of the results."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forget what was traced and compiled."""
        for own in (self.bare, self.own):
            own.clear_cache()


_flats: Any = weakref.WeakKeyDictionary()
"""For each traced program, by options, the one on arrays."""


class Staged:
    """A stage of `jax.stages` of a function of hi values, and those that follow; a compiled one checks what it is called
    with."""

    def __init__(self, stage: Any, tree: Any, tys: Sequence[Any]) -> None:
        self._stage, self._tree, self._tys = stage, tree, tuple(tys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def lower(self, **options: Any) -> "Staged":
        """As `jax.stages.Traced.lower`."""
        return Staged(self._stage.lower(**options), self._tree, self._tys)

    def compile(self, *args: Any, **options: Any) -> "Staged":
        """As `jax.stages.Lowered.compile`."""
        return Staged(self._stage.compile(*args, **options), self._tree, self._tys)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a `jax.stages.Compiled` is called.

        Raises:
          TypeError: for other types than it was compiled for.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree == self._tree:  # else JAX says how they differ
            for i, (x, want) in enumerate(zip(leaves, self._tys, strict=True)):
                if _jax.is_hi(want) and (got := _jax.typeof(x)) != want and got.normalize() != want.normalize():
                    raise TypeError(f"compiled for {want} as argument {i}, but called with {got}; compile it for that type")
        return self._stage(*args, **kwargs)


def jit(fun: Any = None, /, **options: Any) -> Any:
    """`jax.jit`, with its arguments, for functions of hi values too: a call costs what it costs on arrays.

    ``in_shardings`` and ``out_shardings`` say of a hi value how what it stands for is sharded (``jax.P``, a
    ``NamedSharding``), or how its components are (``Cls.P(...)``); a donated value gives up the buffers of its components.
    ``lower``, ``trace`` and ``eval_shape`` take hi values and their types.  For arrays, and inside a program that is being
    traced, it is `jax.jit`.

    Raises:
      TypeError: if a sharding does not fit the type that it is for.
    """
    if fun is None:
        jax.jit(lambda: (), **{k: v for k, v in options.items() if "arg" not in k and k not in SHARDINGS})  # known keywords?
        return functools.partial(jit, **options)
    jitted = Jitted(fun, options)
    if _jax.call_path is None:
        return jitted
    call = _jax.fast_call(fun, jitted.miss, jitted.nums, jitted.names, jitted.key)
    functools.update_wrapper(call, fun)
    call.trace, call.lower, call.eval_shape = jitted.trace, jitted.lower, jitted.eval_shape

    def clear_cache() -> None:
        jitted.clear_cache()
        call._clear_cache()

    call.clear_cache = clear_cache
    return call


jit.__signature__ = inspect.signature(jax.jit)  # type: ignore[attr-defined]


def static_arguments(fun: Any, nums: Any, names: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and the names of static arguments; of these the one that is not given follows from the other."""
    given = nums is not None and names is not None
    nums = (nums,) if isinstance(nums, int) else tuple(nums or ())
    names = (names,) if isinstance(names, str) else tuple(names or ())
    if given or not (nums or names):
        return nums, names
    try:
        params = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a function that does not tell
        return nums, names
    both = [(i, p.name) for i, p in enumerate(params) if p.kind is p.POSITIONAL_OR_KEYWORD]
    if names:
        return tuple(i for i, n in both if n in names), names
    return nums, tuple(n for i, n in both if i in nums or i - len(params) in nums)
