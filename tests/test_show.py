"""`typax.show` says what a declaration and an op were understood as, and what the type answers."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Float32, Int8, UInt8

import typax
from typax._show import describe
from typax.hijax import HiType, register_hitype

pytestmark = pytest.mark.core


class Grouped(typax.Value, name="g8", tangent="componentwise"):
    qvalue: Int8[Array, "*batch n"]
    scale: Float32[typax.QArray, "*batch n//group"]
    group: int = 4

    def dense(self) -> Float32[Array, "*batch n"]:
        return self.qvalue * jnp.repeat(typax.dense(self.scale), self.group, axis=-1)

    @property
    def bits(self):
        return 8

    @typax.op(reference=jnp.negative)
    def negated(self):
        return Grouped(-self.qvalue, self.scale)

    def scales(self):
        return self.scale


class Bits(typax.Value, tangent="none"):
    packed: UInt8[Array, "m"]
    n: int

    def dense(self) -> Float32[Array, "n"]:
        return jnp.unpackbits(self.packed, axis=-1)[: self.n].astype(jnp.float32)


class Open(typax.Value):
    d: Float[Array, "k"]
    q: typax.QArray

    def dense(self) -> Float[Array, "k"]:
        return self.d


class Pair(typax.Value):
    elts: tuple[Any, ...]


def test_a_class(capsys):
    typax.show(Grouped)
    assert (
        capsys.readouterr().out
        == """\
Grouped, a hi type: g8
  components              qvalue: Int8[Array, '*batch n']
                          scale: Float32[QArray, '*batch n//group']
  statics                 group = 4
  stands for              Float32[Array, '*batch n']
  tangent                 componentwise: a record of the tangents of its components
  mapped by               an int (batch axes lead); typax.Axes(qvalue, scale)
  partitioned             Grouped.P(*batch, n=)
  methods                 bits: a property, an op where it reads components
                          negated: an op that means jax.numpy.negative
                          scales: an op without a reference
  for example             g8[2,12] over int8[2,12], q8[2,3]
    lo_ty()               int8[2,12], int8[2,3], float32[2]
    shape, dtype          (2, 12), float32
    to_tangent_aval()     g8.tangent{qvalue:float0[2,12],scale:float32[2,3]}
    inc_rank(8, 0)        g8[8,2,12]
    dec_rank(2, 0)        g8[12]
    leading_axis_spec()   0
    P("i").to_lo()        (P('i', None), P('i', None), P('i',))
"""
    )


def test_the_answers_are_those_of_the_type_at_hand():
    q = typax.quantize(jnp.ones((5, 7), jnp.bfloat16))
    for x in (q, jax.typeof(q)):
        said = describe(x)
        assert "q8<bfloat16>[5,7] over int8[5,7], float32[5]" in said and "bfloat16[5,7]" in said
    assert describe(typax.QArray) == describe(typax.quantize(jnp.ones((2, 3))))


def test_sizes_that_only_a_value_knows():
    assert "ask of a value: typax.show(v) with a Bits v" in describe(Bits)
    said = describe(Bits(jnp.ones(2, jnp.uint8), n=11))
    assert "bits<n=11>[11] over uint8[2]" in said and "float0[11]" in said
    assert "stacks arise under vmap and scan only" in said and "none: a value is a constant" in said


def test_open_dtypes_and_records():
    assert "Float[Array, 'k']; d gives the dtype" in describe(Open)
    said = describe(Pair)
    assert said.startswith("Pair, a record: pair") and "typax.Axes with an entry for each element" in said
    assert "Pair.P(a spec for each element)" in said and "pair{float32[3],float32[]}" in said


def test_an_op():
    def reference(x):
        return x

    @typax.op(reference=reference)
    def f(x: Float32[Array, "n"], *, k=1):
        return x

    line = f.impls[0].fn.__code__.co_firstlineno
    assert (
        describe(f)
        == f"""\
f, an op
  reference     {__name__}.reference
  implemented   (Float32[Array, 'n']), statics k  at test_show.py:{line}
  on arrays     the implementation that fits
  typed by      the implementation, compared with the reference
  derivatives   jvp, linearize, vjp, transpose: of the reference, evaluated on the values
                with respect to componentwise operands: of the implementation
  mapped        the implementation over the components, for any mix of operands"""
    )


class Loud(typax.ValueType):
    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return "LOUD"


class Row(typax.Value, hitype=Loud):
    x: Float32[Array, "n"]

    def dense(self) -> Float32[Array, "n"]:
        return self.x


def test_what_is_replaced():
    said = describe(Row)
    assert "str_short of the type, by Loud" in said and "LOUD over float32[3]" in said
    assert "replaced" not in describe(Grouped)


def test_rules_by_hand():
    f = typax.op(jnp.sin, name="f")
    assert "by hand" not in describe(f)

    @f.def_jvp
    def rule(primals, tangents):
        return f(*primals), tangents[0]

    fwd, bwd = lambda *_: None, lambda *_: None
    f.def_vjp(fwd, bwd)
    lines = [fn.__code__.co_firstlineno for fn in (rule, fwd)]
    assert [f"{k}, at test_show.py:{n}" in describe(f) for k, n in zip(("jvp", "vjp"), lines, strict=True)] == [True, True]


def opens(v: Grouped):
    return v.qvalue


def test_ops_of_primitives_and_without_a_reference():
    assert "where a program has transpose" in describe(typax.transpose)
    said = describe(Grouped.scales)
    assert "none: it has no meaning on what its operands stand for" in said and "no others" in said
    opened = typax.op(reference=None)(opens)
    assert "a TypeError, as for operands that none fits" in describe(opened)


class Hand:
    pass


class HandType(HiType):
    def __eq__(self, other):
        return isinstance(other, HandType)

    def __hash__(self):
        return 0

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return "hand"

    __repr__ = str_short


register_hitype(Hand, lambda v: HandType())


@pytest.mark.parametrize("x", [typax.Value, jnp.ones(3), jnp.matmul, 3])
def test_what_it_does_not_take(x):
    with pytest.raises(TypeError, match=r"typax.show takes a subclass of typax.Value, a value or type of one, or an op"):
        typax.show(x)


def test_types_written_by_hand():
    with pytest.raises(TypeError, match="hand is a type written by hand: what it says to JAX stands in its class"):
        typax.show(Hand())
