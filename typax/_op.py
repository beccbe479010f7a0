"""An op is its reference; implementations are added by operand types.

    matmul = typax.op(jnp.matmul)                        the meaning: a plain array function

    @matmul.impl
    def _(x: Float[Array, "*b k"], w: QArray): ...       chosen by the types of the operands

From the pair follow the typing rule, every derivative and the batching rule (`_structural.Rule`, `_prim.Application`).
"""

import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from typax import _axes, _interpret, _jax, _jaxpr, _prim
from typax._axes import Pattern
from typax._byhand import axes_type, has_axes, is_raw
from typax._match import Implementation, covers, overlap, read_implementation, show_operands
from typax._misfit import no_implementation, show
from typax._override import Overridden, rule_setter
from typax._prim import Cache, Calls, Linear, Mask, Statics, has_tangent
from typax._structural import (
    Opened,
    Rule,
    by_components,
    component_leaves,
    dense_fn,
    from_traced,
    is_value,
    leaf_types,
    over_components,
    over_views,
    pack_open,
    refuse_closure,
    splits,
    type_difference,
    views,
)
from typax._type import ValueType, dense_type, record_view

every: "weakref.WeakSet[Op]" = weakref.WeakSet()
"""All ops that there are."""


def by_name() -> list["Op"]:
    """All ops that there are, by name."""
    return sorted(every, key=lambda op: op.name)


class Op:
    """Made by `typax.op`. Call it on values; add implementations with `Op.impl`.

    `reference` is the plain function that it means, with `primitive` if that is one; `impls` are its implementations,
    `rules` those set by ``def_jvp`` and the like; `cache` has what was traced for given operand types.

    Raises:
      TypeError: when it is called, if no implementation fits the operands' types, or two do equally well, or if one gives
        another type than the reference.
      NotImplementedError: when it is differentiated and has no reference.
    """

    def __init__(self, reference: Any, name: str, within: Any = 8) -> None:
        self.__name__ = self.__qualname__ = self.name = name
        self.within = within
        """How far a result may be from that of the reference; see `op`."""
        self._within_lift: Any = None  # of a program that is lifted within another: a `_interpret.Within`
        self._reference_derives = False  # its derivatives are those of its reference alone, by a rule that this has
        self.primitive = reference if isinstance(reference, _jax.Primitive) else None
        self.reference: Any = _jaxpr.binder(reference) if self.primitive is not None else reference
        self.impls: list[Implementation] = []
        self.rules: dict[str, Any] = {}
        self.cache = Cache()
        self.__doc__ = getattr(reference, "__doc__", None)
        every.add(self)
        if self.primitive is not None:
            self.__doc__ = (
                f"The op of JAX's primitive ``{name}``, by which `typax.lift` and derivatives run it natively where it has "
                "an implementation for the operand types. Its keywords are the primitive's parameters."
            )
            _interpret.registry.setdefault(self.primitive, []).append(self)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    @property
    def __signature__(self) -> inspect.Signature:
        """That of its reference, or of its first implementation where that says more."""
        if self.reference is not None:
            told = inspect.signature(self.reference)
            if not self.impls or all(p.kind is not p.VAR_POSITIONAL for p in told.parameters.values()):
                return told
        return inspect.signature(self.impls[0].fn) if self.impls else inspect.signature(self.__call__)

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def impl(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Add an implementation, chosen where the operand types fit its annotations.

        Raises:
          TypeError: if an annotation cannot be read, or if another implementation fits the same operands equally well.
        """
        return self.add(fn, _axes.scope(sys._getframe(1)))

    def add(self, fn: Callable[..., Any], names: Any) -> Callable[..., Any]:
        """Add an implementation; `names` are those in sight of its annotations. `impl` is the decorator."""
        new = read_implementation(self.name, fn, names)
        self._check_defaults(new)
        for old in self.impls:
            shared = overlap(old, new)
            if shared is None or any(covers(i.operands, shared) and covers(old.operands, i.operands) and i is not old
                                     for i in self.impls):  # fmt: skip
                continue
            if covers(old.operands, new.operands):
                raise TypeError(f"{self.name}: two implementations take {new}; narrow one")
            raise TypeError(
                f"{self.name}: two implementations, {old} and {new}, fit {show_operands(shared)} equally well; narrow one, "
                f"or add an implementation for {show_operands(shared)} before them"
            )
        self.impls.append(new)
        self.forget()
        return fn

    def forget(self) -> None:
        """What was derived so far no longer holds."""
        self.cache = Cache()

    def application(self, tys: Sequence[Any], **statics: Any) -> Any:
        """The op at operands of these types."""
        return self._application(jax.tree.structure(tuple(range(len(tys)))), tuple(tys), statics)

    def_jvp = rule_setter(
        "jvp",
        1,
        """Set the forward-mode rule, as for `jax.custom_jvp`: ``rule(primals, tangents, **statics) -> (result, tangent)``.

        A tangent that is zero is given as one; those of integers are of dtype float0.
        """,
    )
    def_vjp = rule_setter(
        "vjp",
        2,
        """Set the reverse-mode rule, as for `jax.custom_vjp`.

        ``fwd(nonzero, *operands, **statics) -> (result, residuals)``, where ``nonzero`` tells for each operand whether its
        cotangent is asked for; ``bwd(residuals, cotangent, **statics) -> cotangents``, one for each operand, ``None`` for
        zero. Forward mode is then refused, unless `def_jvp` is given as well.
        """,
    )
    def_lin = rule_setter(
        "lin",
        2,
        """Set the linearization: ``lin(nonzero, *operands, **statics) -> (result, residuals)`` and
        ``linearized(residuals, *tangents, **statics) -> tangent``, linear in the tangents.
        """,
    )
    def_transpose = rule_setter(
        "transpose",
        1,
        """Set the transpose of a linear op: ``rule(cotangent, *operands, **statics) -> cotangents``; operands in which it
        is to be transposed are ``None``, and only their cotangents are read.
        """,
    )
    def_batch = rule_setter(
        "batch",
        1,
        """Set the batching rule: ``rule(axis_size, in_axes, *operands, **statics) -> (result, out_axes)``; an axis is an
        int, a `typax.Axes`, or ``None``.
        """,
    )
    def_remat = rule_setter(
        "remat",
        2,
        """Set what a checkpoint keeps: ``forward(*operands, **statics) -> (result, kept)`` and
        ``again(kept, *operands, **statics) -> result``.

        What is kept is a constant: derivatives are those of ``again`` in the operands. JAX asks for the rule under its
        ``jax_remat3`` option; its present checkpoint runs the op again.
        """,
    )
    def_dce = rule_setter(
        "dce",
        1,
        """Set what is left where not all results are used: ``rule(used, **statics) -> (op, reads)``, an op that gives the
        used results alone and which operands it takes; ``None`` leaves all as it is.
        """,
    )

    @functools.cached_property
    def reference_keywords(self) -> dict[str, inspect.Parameter] | None:
        """The parameters of the reference; ``None`` if it takes any keyword."""
        if self.primitive is not None or self.reference is None:
            return None
        try:
            params = inspect.signature(self.reference).parameters
        except (TypeError, ValueError):  # a function that does not tell
            return None
        return None if any(p.kind is p.VAR_KEYWORD for p in params.values()) else dict(params)

    def accepted(self, statics: dict[str, Any]) -> dict[str, Any]:
        """Those of the statics that the reference takes."""
        known = self.reference_keywords
        return statics if known is None else {k: v for k, v in statics.items() if k in known}

    def _check_defaults(self, new: Implementation) -> None:
        for k, p in (self.reference_keywords or {}).items():
            mine = new.statics.get(k, p.default)
            if inspect.Parameter.empty not in (mine, p.default) and not (mine is p.default or mine == p.default):
                raise TypeError(
                    f"{self.name} {new}: the default of {k} is {mine!r}, but its reference has {p.default!r}; make them one"
                )

    def _on_arrays(self, args: Any, statics: dict[str, Any]) -> Any:
        """The reference, for operands that are all plain; a keyword must be known to it or to an implementation."""
        taken = self.accepted(statics)
        known = {k for i in self.impls for k in i.statics}
        if (unknown := statics.keys() - taken.keys() - known) and not any(i.any_static for i in self.impls):
            raise TypeError(f"{self.name} takes no keyword {', '.join(sorted(unknown))}")
        return self.reference(*args, **taken)

    def _of_reference(self, count: int) -> Implementation:
        """The reference as an implementation for arrays, where rules by hand hold for it."""
        operands = ((Pattern(Any, None, None, "Any"),),) * count
        return Implementation(lambda *args, **statics: self._on_arrays(args, statics), operands, False, {}, True)

    def choose(self, args: Sequence[Any]) -> Implementation | None:
        """The most specific implementation for operands of these types, each a pytree of types; ``None`` if none fits."""
        fit = [i for i in self.impls if i.fits(args)]
        best = [i for i in fit if not any(j is not i and covers(i.operands, j.operands) for j in fit)]
        if len(best) > 1:
            raise TypeError(
                f"{self.name}: {' and '.join(map(str, best))} fit {show(args)} equally; add an implementation for it"
            )
        return best[0] if best else None

    def __call__(self, *args: Any, **statics: Any) -> Any:
        try:
            named = Statics(statics) if statics else None
        except TypeError as e:
            raise TypeError(
                f"{self.name}: keyword arguments are static and must be hashable ({e}); values go by position"
            ) from None
        calls = self.cache.calls
        if calls is None:
            calls = self.cache.calls = Calls(self.name, self._find)
        return calls.call(named, *args) if _jax.trace_is_clean() else calls.run(named, *args)

    def _find(self, named: Statics | None, args: tuple[Any, ...]) -> Any:
        statics = named.given if named else {}
        flat, tree = jax.tree.flatten(args)
        flat = [pack_open(x) for x in flat]
        tys = tuple(_type_of(self.name, x) for x in flat)
        key = (tree, tys, named, _jax.trace_key())
        app = self.cache.find(key)
        if _interpret.lifting.depth and (app is _REFERENCE or app is None):
            app = _interpret.for_lift(self, key, tree, tys, statics)
        if app is None:
            with _jax.without_anonymous_axes():
                key = (tree, tys, named, _jax.trace_key())
                app = self.cache.get(key, lambda: self._application(tree, tys, statics))
        if app is _REFERENCE:
            return functools.partial(self._on_arrays, args, statics)
        if isinstance(app, Refused):
            raise Refused(*app.args)
        return app, flat, app.out_tree.unflatten

    def _application(self, tree: Any, tys: Sequence[Any], statics: dict[str, Any]) -> Any:
        if values := [k for k, v in statics.items() if _jax.is_hi_value(v)]:
            raise TypeError(f"{self.name}: keyword arguments are static; the value {values[0]} goes by position")
        args = tree.unflatten(tys)
        impl = self.choose(args)
        if impl is None:
            # With an implementation for plain operands, these must fit it: the reference says only what it stands for.
            on_plain = any(not i.hi_count() for i in self.impls)
            if self.reference is not None and not on_plain and not any(map(_jax.is_hi, tys)):
                if not self.rules:
                    return _REFERENCE
                impl = self._of_reference(len(args))
        if impl is None:
            raise no_implementation(self.name, self.impls, args)
        try:
            return OpApplication(self, impl, tree, tys, statics)
        except Refused as refusal:
            return Refused(*refusal.args)

    def run_equation(self, operands: Sequence[Any], params: dict[str, Any], options: dict[str, Any]) -> Any:
        """For the interpreter: the result on these operands, ``NotImplemented`` if no implementation fits, or ``Declined``.

        Of the ``options``, the implementation is given those that it has a keyword for.
        """
        types = tuple(map(_jax.typeof, operands))
        impl = self.cache.get(("chosen", types), lambda: self.choose(types) or NotImplemented)
        if impl is NotImplemented:
            return NotImplemented
        own = {k: v for k, v in options.items() if k in impl.statics}
        try:
            return self(*operands, **params, **own)
        except Refused as refusal:
            return _interpret.Declined(str(refusal))


class Refused(TypeError):
    """Raised, with the reason, by an implementation that fits the operands' types but not these operands.

    `typax.lift` then goes on as if there were none, and tells the reason; a call of the op raises it; the laws pass over
    such examples.
    """


_REFERENCE = object()


def _type_of(op: str, x: Any) -> Any:
    try:
        return _jax.typeof(x)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{op}: operand {x!r} of type {type(x).__name__} is not a value; static parameters go by keyword"
        ) from None


class OpApplication(Overridden):
    """An op with one of its implementations, at given operand types and statics."""

    out_tree: Any  # these two are found out by tracing the implementation
    out_like: tuple[Any, ...]
    reference_tree: Any

    def __init__(self, op: Op, impl: Implementation, tree: Any, tys: Sequence[Any], statics: dict[str, Any]) -> None:
        self.op, self.impl, self.tree, self.name, self.rules = op, impl, tree, op.name, dict(op.rules)
        self.views = Cache(64)
        self.in_tys = tuple(tys)
        self.statics = self._bind_statics(statics)
        self.shown = {} if op.primitive is not None else dict(self.statics)
        self._refuse_unstackable()
        self._refuse_other_meshes()
        leaves = [a for t in tys for a in leaf_types(t)]
        traced = self._trace(leaves)
        self.traced = traced
        outs = iter(traced.jaxpr.out_avals)
        self.out_tys = tuple(
            t.with_leaves([next(outs) for _ in t.leaves]) if isinstance(t, ValueType) else next(outs) for t in self.out_like
        )
        self.out_tys = tuple(t.check() if isinstance(t, ValueType) else t for t in self.out_tys)
        self.lo, self.deps, self.effects = from_traced(self.name, traced)
        self._check_reference()

    def _bind_statics(self, statics: dict[str, Any]) -> dict[str, Any]:
        if self.impl.any_static:
            return dict(statics)
        known = self.impl.statics
        if self.op.primitive is None and (unknown := statics.keys() - known.keys()):
            raise TypeError(f"{self.name} {self.impl} takes no keyword {', '.join(sorted(unknown))}")
        full = {k: statics.get(k, d) for k, d in known.items()}
        if missing := [k for k, v in full.items() if v is inspect.Parameter.empty]:
            raise TypeError(f"{self.name} {self.impl} needs the keyword {', '.join(missing)}")
        self.all_statics = statics
        return full

    def _refuse_other_meshes(self) -> None:
        here = jax.sharding.get_abstract_mesh()
        for t in self.in_tys:
            for lo in t.lo_ty():
                mesh = getattr(getattr(lo, "sharding", None), "mesh", here)
                if mesh.empty or here.empty or dict(mesh.shape) == dict(here.shape):
                    continue
                raise TypeError(
                    f"{self.name}: {t} is on a mesh with the axes {dict(mesh.shape)}, but the mesh in force has "
                    f"{dict(here.shape)}; move it there with jax.device_put of its components"
                )

    def _refuse_unstackable(self) -> None:
        for t in self.in_tys:
            if isinstance(t, ValueType) and t.n_batch and t.has_own_axes and not t.decl.stackable:
                raise TypeError(
                    f"{self.name}: {t} is a stack of {t.decl.cls.__name__} values; apply {self.name} to each with jax.vmap"
                )

    def _trace(self, leaves: Sequence[Any]) -> Any:
        def run(*xs: Any) -> list[Any]:
            it, args = iter(xs), []
            for t in self.in_tys:
                mine = [next(it) for _ in leaf_types(t)]
                args.append(t.of_leaves(mine) if isinstance(t, ValueType) else mine[0])
            with Opened():
                out = self.impl.fn(*self.tree.unflatten(args), **self.statics)
            flat, self.out_tree = jax.tree.flatten(out)
            if wrong := [x for x in flat if not is_value(x)]:
                raise TypeError(
                    f"{self.name} {self.impl}: the implementation returns {wrong[0]!r} of type {type(wrong[0]).__name__}, "
                    f"which is not a value"
                )
            self.out_like = tuple(_jax.typeof(x) for x in flat)
            if len(flat) == 1 and flat[0] is out and not self.impl.gives(self.tree.unflatten(self.in_tys), self.out_like[0]):
                wanted = " | ".join(p.text for p in self.impl.returns)
                raise TypeError(
                    f"{self.name} {self.impl}: the implementation is annotated to give {wanted}, but it gives "
                    f"{self.out_like[0]}"
                )
            split = [
                component_leaves(x) if isinstance(t, ValueType) else [x] for t, x in zip(self.out_like, flat, strict=True)
            ]
            return [pack_open(x) for part in split for x in part]

        run.__name__ = run.__qualname__ = self.name
        try:
            with _interpret.outside():
                traced = jax.jit(run).trace(*leaves)
        except _jax.ShardingTypeError as e:
            raise TypeError(f"{self.name} of {show(self.in_tys)}: {e}") from e
        refuse_closure(f"{self.name}: the implementation", traced, leaves)
        return traced

    def _statics_of_reference(self) -> dict[str, Any]:
        given = {**getattr(self, "all_statics", {}), **self.statics}
        return self.op.accepted(given)

    def _on_views(self, *leaves: Any, whole: Sequence[bool] = ()) -> list[Any]:
        """The reference as a function of the views of the operands."""
        it, args = iter(leaves), []
        for t, w in itertools.zip_longest(self.in_tys, whole, fillvalue=False):
            args.append(_unview(t, [next(it) for _ in views(t, w)], w))
        out = self.op.reference(*self.tree.unflatten(args), **self._statics_of_reference())
        flat, self.reference_tree = jax.tree.flatten(out)
        return flat

    def _check_reference(self) -> None:
        if self.op.reference is None:
            return
        avals = [v for t in self.in_tys for v in views(t)]
        name = getattr(self.op.reference, "__name__", "reference")
        try:
            traced = jax.jit(self._on_views).trace(*avals)
        except Exception as e:
            raise TypeError(f"{self.name} of {show(self.in_tys)}: its reference {name} refuses {show(avals)}: {e}") from e
        refuse_closure(f"{self.name}: its reference {name}", traced, avals)
        want = traced.jaxpr.out_avals
        got = [x for t in self.out_tys for x in jax.tree.leaves(dense_type(t))]
        if len(want) != len(got):
            raise TypeError(f"{self.name}: its reference {name} gives {len(want)} results, the implementation {len(got)}")
        tree = jax.tree.structure(self.out_tree.unflatten([dense_type(t) for t in self.out_tys]))
        if self.op.primitive is None and tree != self.reference_tree:
            raise TypeError(f"{self.name}: its reference {name} gives {self.reference_tree}, but the implementation {tree}")
        for w, g in zip(want, got, strict=True):
            if is_raw(g) and has_axes(g) and not _jax.is_hi(w):
                # A value written by hand stands for itself, or for an array as its tangents are.
                g = _jax.with_varying(axes_type(g), [w])
            if difference := type_difference(w, g):
                raise TypeError(
                    f"{self.name} of {show(self.in_tys)}: the implementation gives {g}, but its reference {name} gives "
                    f"{w} ({difference})"
                )

    # --- linear parts

    def _rules(self, mask: Mask) -> list[tuple[Rule, Mask]]:
        """Operands with componentwise tangents are differentiated through the implementation, others through the
        reference; a componentwise result needs the implementation for all. An equation with a rule of its own has it in
        its reference alone."""
        by = tuple(m and by_components(t) for m, t in zip(mask, self.in_tys, strict=True))
        rest = tuple(m and not b for m, b in zip(mask, by, strict=True))
        result = any(map(by_components, self.out_tys))
        rounded = any(isinstance(t, ValueType) and not by_components(t) and has_tangent(t) for t in self.out_tys)
        values = [t for t in self.in_tys if isinstance(t, ValueType)]
        exact = result or (bool(values) and all(map(by_components, values)))  # the implementation is the meaning
        if self.op.reference is None and (rounded or (any(rest) and not exact)):
            raise NotImplementedError(
                f"{self.name} of {show(self.in_tys)} has no reference, so it has no derivative; give it one with "
                f"@typax.op(reference=...), or a rule with {self.name}.def_jvp, or keep gradients away with "
                f"jax.lax.stop_gradient"
            )
        if self.op._reference_derives:
            if result:
                raise NotImplementedError(
                    f"{self.name} of {show(self.in_tys)}: its own rule of derivatives speaks of arrays, but the result has "
                    f"componentwise tangents; pass typax.dense(v) to the function with the rule, and return arrays"
                )
            return [(self._by_views(mask), mask)]
        if result:
            for t, m in zip(self.in_tys, rest, strict=True):
                if m and isinstance(t, ValueType):
                    raise NotImplementedError(
                        f"{self.name} of {show(self.in_tys)}: the tangent of {t} has no components, but the result has "
                        f"componentwise tangents; none follows from the reference: give one with {self.name}.def_jvp"
                    )
            return [(self._by_components, mask)]
        if self.op.reference is None:
            return [(self._by_components, mask)]
        if rounded:
            return [(self._by_views(mask), mask)]
        parts = [(self._by_components, by)] if any(by) else []
        return parts + ([(self._by_views(rest), rest)] if any(rest) else [])

    def _by_views(self, mask: Mask) -> Rule:
        """Through the reference; an operand outside ``mask`` stays the value it is: products with it run natively."""
        whole = tuple(by_components(t) and not m for t, m in zip(self.in_tys, mask, strict=True))
        fn = functools.partial(self._on_views, whole=whole)
        return self.views.get(whole, lambda: over_views(self.name, self.in_tys, self.out_tys, fn, whole))

    @functools.cached_property
    def _by_components(self) -> Rule:
        return over_components(self.name, self.in_tys, self.out_tys, _jax.eval_jaxpr_fun(self.traced.jaxpr))

    def _pushforward(self, nonzero: Mask) -> Linear:
        rules = self._rules(nonzero)
        parts = [r.pushforward(m) for r, m in rules]
        if len(parts) == 1:
            return parts[0]
        reads = tuple(sorted({i for p in parts for i in p.reads}))

        def fn(residuals: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
            values, totals = dict(zip(reads, residuals, strict=True)), None
            mine = self._leaves_by_operand(nonzero, leaves)
            for part, (_, m) in zip(parts, rules, strict=True):
                own = [x for i, xs in mine.items() if m[i] for x in xs]
                out = part.fn([values[i] for i in part.reads], own)
                totals = out if totals is None else [a + b for a, b in zip(totals, out, strict=True)]
            assert totals is not None
            return totals

        return Linear(reads, fn)

    def _leaves_by_operand(self, mask: Mask, leaves: Sequence[Any]) -> dict[int, list[Any]]:
        it = iter(leaves)
        return {
            i: [next(it) for _ in range(_prim.tangent_leaf_count(t))]
            for i, (t, m) in enumerate(zip(self.in_tys, mask, strict=True))
            if m
        }

    def _pullback(self, nonzero: Mask) -> Linear:
        return self._merged(nonzero, [(r.pullback(m), m) for r, m in self._rules(nonzero)])

    def _transposed(self, linear: Mask) -> Linear:
        return self._merged(linear, [(r.transposed(m), m) for r, m in self._rules(linear)])

    def _merged(self, mask: Mask, parts: Sequence[tuple[Linear, Mask]]) -> Linear:
        if len(parts) == 1:
            return parts[0][0]
        reads = tuple(sorted({i for p, _ in parts for i in p.reads}))

        def fn(residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
            values, found = dict(zip(reads, residuals, strict=True)), dict[int, list[Any]]()
            for part, m in parts:
                out = part.fn([values[i] for i in part.reads], cts)
                found |= self._leaves_by_operand(m, out)
            return [x for i, m in enumerate(mask) if m for x in found[i]]

        return Linear(reads, fn)


def _unview(ty: Any, leaves: Sequence[Any], whole: bool = False) -> Any:
    """What a value stands for, from its views."""
    if not splits(ty, whole):
        return leaves[0]
    it = iter(leaves)
    parts = [_unview(leaf, [next(it) for _ in views(leaf, whole)], whole) for leaf in ty.leaves]
    if ty.decl.is_record:
        return record_view(ty.decl, ty.tree.unflatten(parts))
    return dense_fn(ty.with_leaves(list(map(_jax.typeof, parts))))(*parts)


def op(fn: Any = None, *, reference: Any = _REFERENCE, name: str | None = None, within: Any = 8) -> Any:
    """Make an op.

    ``op(reference)`` makes one of a plain array function, or of a JAX primitive, to which implementations are added by
    operand types (`Op.impl`).  ``@op(reference=f)`` makes one of its only implementation, the decorated function;
    ``reference=None`` says that it has no meaning on what its operands stand for, so that it has no derivative.

    Positional arguments are values (arrays, hi values, pytrees of them); keyword-only ones are static.

    ``within`` bounds how far the result may be from that of the reference: a number of rounding errors (of the result's
    dtype, relative to the reference on absolute values), or a function ``within(result, *operands, **statics)`` that gives
    the bound for each entry, to which 8 rounding errors are added. `typax.laws` checks it.
    """
    for f in (fn, reference):
        if not (f is None or f is _REFERENCE or callable(f) or isinstance(f, _jax.Primitive)):
            raise TypeError(f"typax.op takes a function or a JAX primitive, not {f!r} of type {type(f).__name__}")
    if fn is not None:
        return Op(fn, name or getattr(fn, "__name__", None) or getattr(fn, "name", "op"), within)
    names = _axes.scope(sys._getframe(1))
    if reference is _REFERENCE:
        raise TypeError("typax.op needs a reference: op(f), @op(reference=f) or @op(reference=None)")

    def decorate(impl: Callable[..., Any]) -> Op:
        new = Op(reference, name or impl.__name__, within)
        new.__doc__ = impl.__doc__
        new.add(impl, names)
        return new

    return decorate
