"""Types of the kinds that people write, by hand and declared, under the laws, which say nothing against either."""

import _field
import _field_raw as raw
import jax.numpy as jnp
import numpy as np
import pytest

import typax.laws as laws
from gallery import units

pytestmark = pytest.mark.core

ENDS = [(jnp.array([0, 1, k]), jnp.array([1, 2, 0])) for k in range(3)]
X = jnp.array([1.0, -2.0, 0.5])
SPEED = units.Unit((1, -1, 0))
NUMBERS = [X, 2 * X, X - 1]
AT = jnp.array([0.3, 0.7])


def pictures(make):
    disc = lambda k: make("disc", jnp.array([0.5 * k, 1.0]), jnp.float32(0.25 + k))
    return [make("both", make("moved", jnp.array([1.0, k]), disc(k)), disc(k + 1)) for k in (1.0, 2.0, -1.0)]


def calls(values, *operands):
    """An example of an op: of each of these values, with the same other operands."""
    rows = [(v, *operands) for v in values]
    return [laws.Call(None, rows[0], tuple(rows[1:]), {})]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("stored") / "rows.npy")
    np.save(path, np.arange(12, dtype="float32").reshape(3, 4) - 5)
    return path


def cases(file):
    """For each kind, by hand and declared: its class, values, and its ops, each with its reference and examples."""
    by_hand = [raw.Graph(s, t, 3) for s, t in ENDS], pictures(raw.make), [raw.measure(x, SPEED) for x in NUMBERS]
    declared = [_field.Graph(s, t, 3) for s, t in ENDS], pictures(picture), [units.Quantity(x, SPEED) for x in NUMBERS]
    graphs, drawn, speeds = by_hand
    d_graphs, d_drawn, d_speeds = declared
    rows = [raw.Stored(jnp.int32(k), file, 4) for k in (2, 0, 1)]
    d_rows = [_field.Stored(jnp.int32(k), file, 4) for k in (2, 0, 1)]
    return {
        "graph-by-hand": (raw.Graph, graphs, {(raw.spread, jnp.matmul): calls(graphs, X)}),
        "graph": (_field.Graph, d_graphs, {_field.spread: calls(d_graphs, X)}),
        "picture-by-hand": (raw.Picture, drawn, {raw.distance: calls(drawn, AT)}),
        "picture": (_field.Picture, d_drawn, {_field.distance: calls(d_drawn, AT)}),
        "quantity-by-hand": (raw.Measured, speeds, {(raw.times, jnp.multiply): calls(speeds, speeds[1])}),
        "quantity": (units.Quantity, d_speeds, {units.multiply: calls(d_speeds, d_speeds[1])}),
        "stored-by-hand": (raw.Stored, rows, {(raw.read, lambda x: x): calls(rows)}),
        "stored": (_field.Stored, d_rows, {_field.total: calls(d_rows)}),
    }


def picture(tag, *parts):
    return _field.Picture(parts, tag)


@pytest.mark.parametrize("name", cases(""))
def test_all_laws(name, file):
    cls, values, ops = cases(file)[name]
    fns = [op[0] if isinstance(op, tuple) else op for op in ops]
    examples = {cls: [laws.Values(values[0], tuple(values[1:]))], **dict(zip(fns, ops.values(), strict=True))}
    result = laws.check(cls, list(ops), examples=examples)
    assert result.ok, str(result)
    assert sum(c.status == "pass" for c in result.cells) >= 19, str(result)
