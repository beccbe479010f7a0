"""The laws hold of what is shipped, and say what is wrong with what is wrong."""

import json
import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _mutants import OPS, TYPES, product, type_of
from _raw import Codes, decode, encode
from jaxtyping import Array, Complex64, Float, Float32, Int32, UInt8

import typax
import typax.laws as laws
from gallery import complex_pair, diagonal_plus_lowrank, units
from gallery.packed_bits import Bits, both, negate, pack
from typax import QArray, Value, matmul, quantize
from typax._rows import transpose
from typax.laws._values import stacked


class Rank1(Value, name="r1", tangent="componentwise"):
    u: Float[Array, "*batch m"]
    v: Float[Array, "*batch n"]

    def dense(self) -> Float[Array, "*batch m n"]:
        return self.u[..., :, None] * self.v[..., None, :]


@pytest.mark.typax_laws(QArray, ops=[quantize], max_examples=0)
def test_with_edges_and_empty_examples(law):
    law()


@pytest.mark.typax_laws(Rank1, max_examples=0)
@pytest.mark.typax_laws(
    type_of(), max_examples=0, laws=["equality", "inequality", "printing", "retract-zero", "rank-change"]
)
def test_types_of_ones_own(law):
    law()


def kill(subject, names):
    """The first of the laws, by name, that is broken."""
    cells = [laws.check_cell(laws.LAWS[n], subject, 1) for n in names.split("|")]
    return next((c for c in cells if c.status == "fail"), cells[0])


@pytest.mark.parametrize("name", TYPES)
def test_a_wrong_type_is_found(name):
    make, names, says = TYPES[name]
    (subject,) = laws.subjects(make())
    cell = kill(subject, names)
    assert cell.status == "fail" and re.search(says, cell.why), cell
    assert "\n" not in cell.why and cell.example


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_op_is_found(name):
    make, names, says = OPS[name]
    (subject,) = laws.subjects(None, [make()])
    cell = kill(subject, names)
    assert cell.status == "fail" and re.search(says, cell.why), cell
    assert "\n" not in cell.why and cell.example


@pytest.mark.parametrize("names", sorted({names for _, names, _ in OPS.values()}))
def test_the_op_that_they_were_made_from_is_right(names):
    (subject,) = laws.subjects(None, [product()])
    for name in names.split("|"):
        assert laws.check_cell(laws.LAWS[name], subject, 0).status in ("pass", "not applicable")


class Steps(Value, name="steps"):
    code: Int32[Array, "*batch n"]
    bits: int = 4

    def dense(self) -> Float32[Array, "*batch n"]:
        return self.code.astype(jnp.float32) * 2.0**-self.bits


class Pair(Value, name="pair2"):
    steps: Steps
    x: Float32[Array, "*batch m"]


class Halved(typax.Itself):
    name = "halved"

    def open(self, ty, t):
        return super().open(ty, t) / 2


def test_a_static_that_is_forgotten_and_a_tangent_that_is_scaled_are_found():
    @typax.op(reference=jnp.negative)
    def forgets(x: Float32[Steps, "*b n"]):
        return Steps(-x.code)

    (cell,) = laws.check(None, [forgets], laws="agrees-with-reference", max_examples=0).failures
    assert "computes something else" in cell.why and "<bits=2>" in cell.example

    class Scaled(Value, name="scaled", tangent=Halved()):
        x: Float32[Array, "*batch n"]

        def dense(self) -> Float32[Array, "*batch n"]:
            return self.x

        @classmethod
        def from_dense(cls, x):
            return cls(x)

    (cell,) = laws.check(Scaled, laws="tangent-types", max_examples=0).failures
    assert "derivatives are scaled, or lost" in cell.why


class Nibbles(Value, name="nibbles"):
    data: UInt8[Array, "*batch n//2"]
    n: int

    def dense(self) -> Float32[Array, "*batch n"]:
        both = jnp.stack([self.data & 15, self.data >> 4], -1)
        return both.reshape(*self.data.shape[:-1], self.n).astype(jnp.float32)


def test_what_is_right_but_unusual_is_right():
    assert laws.check(Nibbles, laws=["printing", "equality", "inequality", "dense-declared", "dense-of-stack"]).ok
    assert laws.check(Pair, laws=["equality", "one-trace", "export"]).ok
    values = [encode(jnp.arange(6.0).reshape(2, 3) * s) for s in (1.0, 2.0, -1.0)]
    call = laws.Call(None, (values[0],), tuple((v,) for v in values[1:]), {})
    (cell,) = laws.check(None, [(decode, lambda x: x)], laws="shard-map-calls", examples={decode: [call]}).cells
    assert cell.status == "not applicable" and "written by hand" in cell.why


def test_a_result_is_a_table_and_failures_shrink():
    wrong, _, _ = OPS["a component dropped"]
    result = laws.check(None, [wrong()], laws=["agrees-with-reference", "rules-by-hand"])
    assert not result.ok and "FAIL agrees-with-reference of product: the result, against" in str(result)
    assert "rules-by-hand of product: no rule is written by hand" in str(result)
    assert re.search(r"agrees-with-reference +FAIL", str(result))
    with pytest.raises(laws.Broken, match="agrees-with-reference of product"):
        result.raise_if_broken()
    assert laws.check(QArray, laws="raise-lower").ok
    with pytest.raises(ValueError, match="no law is called nonsense; the laws are raise-lower"):
        laws.check(QArray, laws=["nonsense"])


def test_what_could_not_be_checked_is_not_ok():
    class Odd(Value, name="odd"):
        x: Float32[Array, "n"]
        table: tuple[str, ...]

        def dense(self) -> Float32[Array, "n"]:
            return self.x

    result = laws.check(Odd, laws="raise-lower")
    assert not result.ok and "no example of the static table of Odd" in str(result)
    assert laws.check(Odd, laws="raise-lower", examples=laws.values(Odd, table=("a",))).ok
    assert laws.check(Odd, laws="raise-lower", examples=[Odd(jnp.ones(2), ("a",))]).ok


def test_values_are_made_by_an_op_where_components_do_not_go_together():
    some = ["dense-declared", "agrees-with-reference", "sharded-values"]
    result = laws.check(Bits, [negate], laws=some, examples={Bits: pack}, max_examples=0)
    assert result.ok, str(result)
    (cell,) = laws.check(Bits, laws="dense-declared", max_examples=0).failures
    assert cell.why.endswith("if not all components fit each other, say how values are made: examples={Bits: op}")
    assert laws.check(Bits, [pack, both], laws=some, max_examples=0).ok  # pack, whose reference is the identity, makes them
    v = pack(jnp.ones((4, 16), bool))
    refused = pytest.raises(TypeError, match="no component shows the axis n")
    with jax.set_mesh(jax.make_mesh((2,), ("i",))), refused:
        typax.reshard(v, jax.P(None, "i"))


def test_statics_of_ops_other_than_the_defaults_are_tried():
    @typax.op(reference=lambda x, factor=2.0, sign=1: x * (factor * sign))
    def scaled(x: Rank1, *, factor: float = 2.0, sign: int = 1) -> Rank1:
        if sign not in (1, -1):
            raise ValueError("a sign is 1 or -1")
        return Rank1(x.u * 2, x.v)

    (cell,) = laws.check(None, [scaled], laws="agrees-with-reference", max_examples=0).failures
    assert "factor=2.0" not in cell.example and "factor=" in cell.example


def test_an_implementation_stands_for_itself_among_ops():
    @matmul.impl
    def times(x: Float32[Array, "*b k"], w: Float32[Steps, "k n"]):
        return x @ typax.dense(w)

    assert [s.name for s in laws.subjects(Steps, [times])] == ["Steps", "matmul(Array, Steps)"]


def test_one_cause_is_told_once():
    def fails(x: Float32[Array, "n"]):
        raise ValueError("never with this one")

    result = laws.check(None, [typax.op(reference=jnp.negative, name="fails")(fails)], max_examples=0)
    assert len(result.failures) > 8
    (line,) = [line for line in str(result).splitlines() if line.startswith("FAIL")]
    assert "result-type, agrees-with-reference, jit-is-eager" in line and "never with this one, at test_laws.py:" in line


def test_operands_fit_each_other_where_that_needs_equal_sizes():
    @typax.op(reference=jnp.matmul)
    def times(a: Float[Rank1, "m k"], b: Float[Rank1, "k n"]) -> Rank1:
        return Rank1(a.u * (a.v @ b.u), b.v)

    @typax.op(reference=None)
    def trace(a: Float[Rank1, "m n"]):
        if a.u.shape != a.v.shape:
            raise ValueError("not square")
        return a.u @ a.v

    result = laws.check(Rank1, [times, trace], laws=["agrees-with-reference", "vjp-differences"], max_examples=0)
    assert [c.status for c in result.cells] == ["pass", "pass", "not applicable", "pass"], str(result)


def test_complex_numbers_and_tangents_of_the_own_class_are_differentiated():
    names = ["dot-product", "vjp-differences", "dense-derivative"]
    assert laws.check(complex_pair.Pair, [complex_pair.multiply], laws=names, max_examples=0).ok

    @typax.op(reference=jnp.conj)
    def conjugate(z: complex_pair.Pair):
        return complex_pair.Pair(z.re, -z.im)

    @conjugate.def_jvp
    def _(primals, tangents):
        return conjugate(*primals), tangents[0]

    assert laws.check(complex_pair.Pair, [conjugate], laws="jvp-differences", max_examples=0).failures
    result = laws.check(units.Quantity, [units.divide], laws=names, max_examples=0)
    assert {c.status for c in result.cells} == {"pass"}, str(result)


def test_a_method_is_an_op_on_its_class():
    ops = {s.name: s for s in laws.in_module(complex_pair)}
    assert laws.check_cell(laws.LAWS["jit-is-eager"], ops["magnitude"], 0).status == "pass"
    assert {"Pair", "split", "multiply", "matmul(Pair, Pair)"} <= ops.keys()
    own = [s.name for s in laws.in_module(diagonal_plus_lowrank, diagonal_plus_lowrank.DiagonalPlusLowRank)]
    assert own == ["DiagonalPlusLowRank", "solve", "logdet", "matmul(Array, DiagonalPlusLowRank)"]


def test_the_stacks_of_a_class_without_batch_axes_are_partitioned():
    class Outer(Value, name="outer"):
        u: Float32[Array, "m"]
        v: Float32[Array, "n"]

        def dense(self) -> Float32[Array, "m n"]:
            return self.u[:, None] * self.v

    v = stacked([Outer(jnp.arange(2.0) + k, jnp.arange(3.0)) for k in range(4)])
    with jax.set_mesh(jax.make_mesh((2,), ("i",))):
        f = jax.shard_map(typax.dense, in_specs=Outer.P("i"), out_specs=jax.P("i"))
        out = jax.jit(f)(typax.reshard(v, Outer.P("i")))
    assert out.shape == (4, 2, 3) and (jax.device_get(out) == typax.dense(v)).all()


def test_strategies_follow_from_declarations_and_are_narrowed():
    class Blocks(Value, name="blk"):
        q: UInt8[Array, "*batch n"]
        s: Float32[Array, "*batch n//group"]
        group: int

        def dense(self) -> Float32[Array, "*batch n"]:
            return self.q.astype(jnp.float32) * jnp.repeat(self.s, self.group, axis=-1)

    sizes, dtypes, batches = set(), set(), set()

    @hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @hypothesis.given(laws.values(QArray), laws.values(Blocks), laws.values(Blocks, n=8, group=st.sampled_from([2, 4])))
    def look(q, b, narrow):
        sizes.update(q.shape)
        dtypes.add(str(q.dtype))
        batches.add(q.ndim)
        assert b.q.shape[-1] % b.group == 0
        assert narrow.q.shape[-1] == 8 and narrow.s.shape[-1] == 8 // narrow.group

    look()
    assert {0, 1, 2, 3} <= sizes and dtypes == {"float32", "bfloat16", "float16"} and {1, 2, 3} <= batches
    with pytest.raises(TypeError, match="QArray has no nonsense to narrow"):
        laws.values(QArray, nonsense=1)

    @hypothesis.settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @hypothesis.given(laws.operands(matmul, n=5))
    def multiply(args):
        x, w = args
        assert matmul(x, w).shape == (*x.shape[:-1], 5)

    multiply()


def test_types_written_by_hand_are_checked_as_far_as_laws_apply():
    values = [encode(jnp.arange(6.0).reshape(2, 3) * s) for s in (1.0, 2.0, -1.0)]
    names = ["raise-lower", "lowered-types", "equality", "rank-change", "vmap-identity", "scan-slices", "one-trace"]
    result = laws.check(Codes, examples=[laws.Values(values[0], tuple(values[1:]))], laws=names)
    assert result.ok, str(result)
    with pytest.raises(TypeError, match="Codes is written by hand, so that no examples follow"):
        laws.check(Codes)
    with pytest.raises(TypeError, match=r"Encode is written by hand, .*examples=\{fn: \[...\]\}"):
        laws.check(None, [encode])


def test_examples_of_what_is_not_checked_are_refused():
    with pytest.raises(TypeError, match="given of Rank1, which is none of what is checked, but of another one of this name"):
        laws.check(type("Rank1", (Rank1,), {}, name="r2"), laws="raise-lower", examples={Rank1: []})
    with pytest.raises(TypeError, match="no class is checked"):
        laws.check(None, [quantize], laws="result-type", examples=[(jnp.ones(2),)])


def test_examples_of_ops_on_primitives():
    q = quantize(jnp.arange(6.0).reshape(2, 3))
    names = ["agrees-with-reference", "batch-is-loop", "vjp-differences"]
    result = laws.check(None, [transpose], laws=names, examples={transpose: [((q,), {"permutation": (1, 0)})]})
    assert result.ok, str(result)


def test_the_command(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp, typax\n"
        "from jaxtyping import Array, Float32\n"
        "class Twice(typax.Value, name='twice'):\n"
        "    x: Float32[Array, '*batch n']\n"
        "    def dense(self) -> Float32[Array, '*batch n']:\n"
        "        return 2 * self.x\n"
        "@typax.op(reference=lambda x: x)\n"
        "def halve(x: Float32[Array, '*b n']) -> Twice:\n"
        "    return Twice(x)\n"
    )

    runner, command = pytest.importorskip("click.testing").CliRunner(), pytest.importorskip("typax.cli").main

    def run(*args):
        monkeypatch.chdir(tmp_path)
        return runner.invoke(command, ["check", *args, "--max-examples", "0"])

    done = run("mine.py:Twice", "--law", "raise-lower", "--law", "agrees-with-reference", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and not found["ok"]
    status = {(c["law"], c["subject"]): c["status"] for c in found["cells"]}
    assert status == {("raise-lower", "Twice"): "pass", ("agrees-with-reference", "halve"): "fail"}
    assert "2/2 agrees-with-reference of halve: fail" in done.stderr
    done = run("mine.py", "--law", "raise-lower", "--op", "halve")
    assert done.exit_code == 0 and re.search(r"raise-lower +pass", done.stdout)
    (tmp_path / "raw.py").write_text((Path(__file__).parent / "_raw.py").read_text())
    (tmp_path / "some.py").write_text(
        "import sys, raw, jax.numpy as jnp\nvalues = {raw.Codes: [raw.encode(jnp.ones((2, 3)))]}\n"
    )
    done = run("raw", "--law", "raise-lower")
    assert done.exit_code == 2 and "Not checked: Codes, Outer, Pair, of hi types written by hand" in done.stderr.replace(
        "\n", " "
    )
    done = run("raw", "--law", "raise-lower", "--examples", "some:values")
    assert done.exit_code == 0 and re.search(r"law +Codes", done.stdout), done.output
    (tmp_path / "given.py").write_text(
        "import jax.numpy as jnp, mine\nclass Other(mine.Twice, name='other'):\n    pass\n"
        "values, strange = {mine.Twice: [mine.Twice(jnp.ones(7))]}, {Other: [Other(jnp.ones(7))]}\n"
    )
    for target, given in [("mine.py:Twice", "given:values"), (f"{tmp_path}/mine.py", "./given.py:values")]:
        done = run(target, "--law", "one-trace", "--examples", given)  # one file is one module, however it is named
        assert done.exit_code == 0, done.output
    done = run("mine:Twice", "--law", "raise-lower", "--examples", "given.py:strange")
    assert done.exit_code == 2 and "given of Other, which is none of what is checked (Twice" in done.stderr.replace(
        "\n", " "
    )
    done = run("mine:Twice", "--examples", "given.py")
    assert done.exit_code == 2 and "--examples is MODULE:NAME" in done.stderr
    for target, says in [
        ("mine.py:Nothing", "has no Nothing"),
        ("nowhere", "cannot import nowhere"),
        ("json", "no value class"),
    ]:
        done = run(target)
        assert done.exit_code == 2 and says in done.stderr


def test_the_page_lists_each_law_and_each_mutant():
    page = (Path(__file__).parent.parent / "docs" / "laws.md").read_text()
    for law in laws.LAWS.values():
        assert f"| `{law.name}` | {law.statement} |" in page
    for name, (_, names, _) in (TYPES | OPS).items():
        assert f"| {name} | {', '.join(f'`{n}`' for n in names.split('|'))} |" in page


def test_each_law_is_stated_in_a_sentence():
    for law in laws.LAWS.values():
        assert law.statement.endswith(".") and "\n" not in law.statement and law.kind in ("type", "op")


def test_examples_that_cannot_be_made_are_said_to_be_so():
    def make(x: Float32[Array, "n"]) -> Rank1:
        raise ValueError("not with this one")

    result = laws.check(Rank1, laws=["raise-lower", "printing"], examples={Rank1: make}, max_examples=0)
    assert not result.ok and not result.failures and {c.status for c in result.cells} == {"no example"}
    assert str(result).count("make, which is to make values of Rank1, makes none of float32[2,3]: ValueError: not") == 1
    with pytest.raises(laws.Broken, match=r"an example cannot be made: .*; give another op, or values: examples=\{Rank1"):
        result.raise_if_broken()


class Symmetric(Value, name="symmetric"):
    tri: Float32[Array, "*batch t"]
    n: int

    def dense(self) -> Float32[Array, "*batch n n"]:
        rows, columns = np.tril_indices(self.n)
        low = jnp.zeros((self.n, self.n), jnp.float32).at[rows, columns].set(self.tri)
        return low + jnp.tril(low, -1).T


def test_values_of_equal_sizes_are_made_where_others_do_not_fit():
    @typax.op(reference=lambda x: (x + jnp.swapaxes(x, -1, -2)) / 2)
    def symmetrize(x: Float32[Array, "*batch n n"]) -> Symmetric:
        i, j = np.tril_indices(x.shape[-1])
        return Symmetric(((x + jnp.swapaxes(x, -1, -2)) / 2)[..., i, j], n=x.shape[-1])

    @matmul.impl
    def times(x: Float32[Array, "*b k"], w: Float32[Symmetric, "k n"]):
        return x @ typax.dense(w)

    some = ["dense-declared", "dense-of-stack", "agrees-with-reference", "shard-map"]
    result = laws.check(Symmetric, [symmetrize, times], laws=some, examples={Symmetric: symmetrize}, max_examples=1)
    assert {c.status for c in result.cells} == {"pass"}, str(result)


class Phase(Value, name="phase"):
    angle: Float32[Array, "*batch n"]
    shift: Float32[Array, "*batch"]

    def dense(self) -> Complex64[Array, "*batch n"]:
        return self.shift[0] * self.angle if self.angle.shape[-1] == 2 else self.angle * jnp.exp(1j * self.angle)


def test_what_ones_own_code_raises_is_told_once_with_its_place_and_what_to_do():
    @typax.op(reference=jnp.negative)
    def negate(x: Phase):
        return -typax.dense(x)

    some = ["dense-declared", "dense-of-stack", "agrees-with-reference"]
    says = {
        2: "dense sees one value, without batch axes: angle has n, shift has no axis, at test_laws.py:",
        3: "laws run under strict promotion of dtypes, so that none widens by accident: write the cast",
    }
    for n, text in says.items():
        values = [Phase(jnp.ones(n), jnp.float32(1))]
        given = {Phase: values, negate: [(v,) for v in values]}
        result = laws.check(Phase, [negate], laws=some, examples=given)
        (line,) = [line for line in str(result).splitlines() if line.startswith("FAIL")]
        assert text in line and "dense-of-stack of Phase; agrees-with-reference of negate: it raises" in line, line
