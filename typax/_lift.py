"""`lift`: a program that knows nothing of hi types runs on hi values.

The program is traced on what its arguments stand for (types only: no dense array is made), and its jaxpr is evaluated on the
hi values themselves: an equation with a hi operand runs by the op whose reference is the primitive at hand.  Where no op
fits, the operand becomes dense, which is announced, and never done silently.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from typax import _again as _again  # these register themselves
from typax import _control as _control
from typax import _interpret, _jax, _jaxpr
from typax import _stacks as _stacks
from typax import _through as _through
from typax._axes import static_key
from typax._closures import Held, held
from typax._interpret import Event, Modes
from typax._op import Op
from typax._paths import dotted, matches
from typax._prim import Cache
from typax._receipt import Receipt, line_of
from typax._structural import component_leaves, pack_open
from typax._type import ValueType, dense_type, record_view

type Fallback = Literal["error", "announce", "allow"]


class _Program:
    """A function traced on what its arguments stand for: the arrays and hi values among their leaves are its operands.

    Leaves of its result that are neither are what they were when it was traced."""

    out_tree: Any  # these are known once it is traced
    out: list[Any]

    def __init__(self, f: Callable[..., Any], own: Held | None, leaves: list[Any], tree: Any, avals: dict[int, Any]) -> None:
        def on_arrays(*xs: Any) -> list[Any]:
            full = list(leaves)
            for i, x in zip(avals, xs, strict=True):
                full[i] = x
            values, args, kwargs = tree.unflatten(full)
            run = f if own is None else own.rebuild(values)
            with _interpret.lifting:
                self.out, self.out_tree = jax.tree.flatten(run(*args, **kwargs))
            pairs = [(x, _operand_type(x) is not None) for x in self.out]
            self.out = [_ARRAY if traced else x for x, traced in pairs]
            return [x for x, traced in pairs if traced]

        on_arrays.__name__ = self.name = getattr(f, "__name__", "lifted")
        self.jaxpr = _jaxpr.trace(on_arrays, list(avals.values()))

    def result(self, arrays: list[Any]) -> Any:
        it = iter(arrays)
        return self.out_tree.unflatten([next(it) if x is _ARRAY else x for x in self.out])


_ARRAY = object()


def lift[F: Callable[..., Any]](
    f: F,
    fallback: Fallback | Mapping[str, Fallback] = "announce",
    receipt: Receipt | None = None,
    *,
    activations: str | Mapping[str, str] = "float",
) -> F:
    """``f`` on arguments that hold hi values anywhere in their pytrees.

    What ``f`` itself holds are arguments too: what it closes over, what a method is bound to, a model that is called.
    A record, such as a `typax.Tup`, is the pytree that it stands for.
    ``f`` is traced once for given argument types, as `jax.jit` does: its Python code must depend on nothing else.  What it
    returns may hold hi values, where what it returns is an argument or the result of an op that gives one.

    Args:
      f: a JAX-traceable function. Leaves that are neither arrays, NumPy scalars nor hi values are static (functions,
        strings, Python numbers and bools); ``f`` is traced anew for each, and for each call if they are not hashable.
      fallback: where no op fits, ``"error"`` raises a TypeError, ``"announce"`` makes the operand dense and warns once for
        each place in the program, ``"allow"`` makes it dense. A dict says so for primitives or for arguments:
        ``{"exp": "allow", "layers.*": "error", "*": "announce"}``; the first key that is the primitive's name, or matches
        the path of the argument that the operand came from, decides, and where none does it is announced.
      receipt: holds, after each run or trace, what ran how.
      activations: what `typax.matmul` takes by that name, for the products of the program; or a dict from paths to it.

    In a program that is lifted itself, ``fallback`` and ``activations`` hold as given here; where they have their defaults,
    as given there.

    A path is that of a leaf in its argument, joined by dots; an argument that is itself a leaf has its number or keyword,
    and what ``f`` holds its name.

    Raises:
      TypeError: if ``f`` is no function, or for an argument whose type stands for no single array.
    """
    if not callable(f):
        raise TypeError(
            f"typax.lift takes a function, not {f!r} of type {type(f).__name__}; call it as typax.lift(f)(*args)"
        )
    wanted: Mapping[str, Any] = fallback if isinstance(fallback, Mapping) else {"*": fallback}
    for mode in wanted.values():
        if mode not in ("error", "announce", "allow"):
            raise ValueError(f'typax.lift: fallback must be "error", "announce" or "allow", got {mode!r}')
    told = activations if isinstance(activations, Mapping) else {"*": activations}
    modes = Modes(tuple(told.items()), tracked=isinstance(activations, Mapping) or isinstance(fallback, Mapping))
    programs, announced = Cache(256), Cache(1024)

    def record(event: Event) -> bool:
        if event.place is None and event.dense is not None:  # JAX's own function, lifted: nothing but the call to point at
            event = event._replace(place=_jaxpr.calling_place())
        if receipt is not None:
            receipt.record(event)
        if event.dense is None or event.settled:
            return event.settled
        mode = _mode(wanted, event)
        if mode == "error":
            raise TypeError(
                f"typax.lift: {line_of(event)}: no op with the reference {event.primitive} has an implementation for it; "
                f'add one, or lift with fallback="allow"'
            )
        if mode == "announce":
            announced.get((event.place, str(line_of(event))), lambda: _announce(event))
        return True

    def record_within(event: Event) -> bool:
        """In a program that is lifted itself: what is said here holds, of what is left at its default the other decides."""
        if fallback != "announce":
            return record(event)
        if receipt is not None:
            receipt.record(event)
        return False

    @functools.wraps(f, updated=())
    def lifted(*args: Any, **kwargs: Any) -> Any:
        own = held(f)
        values = () if own is None else own.values
        leaves, tree = jax.tree.flatten(jax.tree.map(_opened, (values, args, kwargs)))
        leaves = [pack_open(x) for x in leaves]
        types = {i: t for i, t in enumerate(map(_operand_type, leaves)) if t is not None}
        avals = {i: dense_type(t) for i, t in types.items()}
        for i, a in avals.items():
            if not isinstance(a, _jax.ShapedArray):
                raise TypeError(f"typax.lift: {_jax.typeof(leaves[i])} stands for no single array; pass its components")
        program = _program(f, own, programs, leaves, tree, avals)
        if receipt is not None:
            receipt.begin(list(types.values()))
        paths = _paths(own, *tree.unflatten(leaves)) if modes.tracked else None
        of_args = None if paths is None else [paths[i] for i in avals]
        operands = [leaves[i] for i in avals]
        if _interpret.lifting.depth and not any(map(_jax.is_hi, types.values())):
            out = _within(program, operands, record_within, modes, of_args)
        else:
            out = _interpret.evaluate(program.jaxpr, operands, record, modes, of_args)
        return program.result(out)

    return lifted  # type: ignore[return-value]


def _within(program: _Program, operands: list[Any], record: Any, modes: Modes, paths: Any) -> list[Any]:
    """A program within one that is being traced to be lifted: it stays one, until values are there."""
    jaxpr, consts = _jax.separate_consts(program.jaxpr)
    op = Op(_jax.eval_jaxpr_fun(jaxpr), program.name)
    op._within_lift = _interpret.Within(jaxpr, record, modes, paths and [*(None,) * len(consts), *paths])
    return op(*consts, *operands)


def explain(
    f: Callable[..., Any],
    fallback: Fallback | Mapping[str, Fallback] = "allow",
    *,
    activations: str | Mapping[str, str] = "float",
) -> Callable[..., Receipt]:
    """A function of the same arguments that tells how `lift` would run ``f`` on them, without running it.

    The arguments may be types, as those of `jax.eval_shape`; arguments of `explain` are those of `lift`.
    """

    @functools.wraps(f, updated=())
    def explained(*args: Any, **kwargs: Any) -> Receipt:
        receipt = Receipt()
        lifted = lift(f, fallback, receipt, activations=activations)
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [i for i, x in enumerate(leaves) if _operand_type(x) is not None or _is_type(x)]

        def run(*xs: Any) -> Any:
            full = list(leaves)
            for i, x in zip(traced, xs, strict=True):
                full[i] = x
            own, named = tree.unflatten(full)
            lifted(*own, **named)

        jax.eval_shape(run, *(leaves[i] for i in traced))
        return receipt

    return explained


def _opened(x: Any) -> Any:
    """A record as the pytree that it stands for, with its components as they are; another leaf as it is."""
    ty = _jax.typeof(x) if _jax.is_hi_value(x) else None
    if not isinstance(ty, ValueType) or not ty.decl.is_record:
        return x
    return record_view(ty.decl, ty.tree.unflatten([_opened(c) for c in component_leaves(x)]))


def _is_type(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct | ValueType)


def _mode(wanted: Mapping[str, Any], event: Event) -> Fallback:
    for key, mode in wanted.items():
        if key in ("*", event.primitive) or (event.path is not None and matches(key, event.path)):
            return mode
    return "announce"


def _paths(own: Held | None, values: Any, args: Any, kwargs: Any) -> list[str]:
    flat, _ = jax.tree_util.tree_flatten_with_path((values, args, kwargs))
    out = []
    for keys, _ in flat:  # which of the three, the argument, then its own
        inner = keys[2:] or keys[1:]
        alone = own is not None and keys[0].idx == 0 and not keys[2:]
        out.append(own.names[keys[1].idx] if own is not None and alone else dotted(inner))
    return out


def _operand_type(x: Any) -> Any:
    """The type of a leaf that is an operand; ``None`` for one that is static."""
    if isinstance(x, np.ndarray | np.generic | jax.Array) or _jax.is_hi_value(x):
        try:
            return _jax.typeof(x)
        except TypeError:  # an array of strings or objects
            return None
    return None


def _program(f: Any, own: Held | None, programs: Cache, leaves: list[Any], tree: Any, avals: dict[int, Any]) -> _Program:
    statics = [None if i in avals else x for i, x in enumerate(leaves)]
    key = (tree, static_key(tuple(statics)), tuple(avals.items()), _jax.trace_key())
    try:
        if (known := programs.entries.get(key)) is not None:
            return programs.get(key, lambda: known)
    except TypeError:  # a static that is not hashable
        return _Program(f, own, statics, tree, avals)
    program = _Program(f, own, statics, tree, avals)
    if _jaxpr.has_tracer_consts(program.jaxpr):  # it closes over a program being traced, which ends before the next call
        return program
    return programs.get(key, lambda: program)


def _announce(event: Event) -> bool:
    message = f"typax.lift: {line_of(event)}"
    if event.place is None:
        warnings.warn(message, stacklevel=2)
    else:
        warnings.warn_explicit(message, UserWarning, event.place[0], event.place[1])
    return True
