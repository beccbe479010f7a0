"""A program that is exported and read again is the program.

f  ->  typax.export(f)(*args)  ->  bytes  ->  typax.deserialize  ->  .call(*args)  ==  f(*args)
"""

from collections.abc import Callable
from typing import Any

import jax

from typax import _describe, _jax
from typax._byhand import is_raw
from typax._export import deserialize
from typax._export import export as export_
from typax.laws._law import Broken, Call, NotApplicable, Values, law
from typax.laws._values import close, meaning, near, same, show


def _read_again(f: Callable[..., Any], *args: Any) -> Any:
    """The results of ``f``, exported to bytes and read again."""
    for x in jax.tree.leaves((args, jax.jit(f).trace(*args).jaxpr.out_avals)):
        ty = x if isinstance(x, _jax.AbstractValue) else _jax.typeof(x)
        if is_raw(ty):
            raise NotApplicable("a type written by hand does not say how it is kept in a file")
        try:
            _describe.type_to_json(ty)
        except TypeError as e:
            raise NotApplicable(f"the type has no form in a file: {e}") from None
    try:
        data = export_(f)(*args).serialize()
    except ImportError as e:
        raise NotApplicable(str(e)) from None
    return deserialize(data).call(*args)


@law("type", "A program of values, exported to bytes and read again, takes and gives the same values.")
def export(cls: Any, example: Values) -> None:
    v = example.value
    back, got = _read_again(lambda v: (v, meaning(v)), v)
    if type(back) is not type(v):
        raise Broken(f"the exported identity gives a {type(back).__name__}: programs in files would give another class")
    same("the exported identity", back, v, "programs in files would change values")
    want = meaning(v)
    close("dense in an exported program", got, want, near(got, want, 4), "programs in files compute something else")


@law("op", "An op, exported to bytes and read again, gives what it gives.")
def export_of_calls(op: Any, call: Call) -> None:
    want = call.run(*call.args)
    got = _read_again(call.run, *call.args)
    for g, w in zip(map(_jax.typeof, jax.tree.leaves(got)), map(_jax.typeof, jax.tree.leaves(want)), strict=True):
        if g != w:
            raise Broken(f"the exported op gives {show([g])}, not {show([w])}: programs in files give another type")
    got, want = meaning(got), meaning(want)
    close("the result of the exported op", got, want, near(got, want, 16), "programs in files compute something else")
