"""What typax changes in JAX leaves programs on arrays as they are: they are traced and lowered with and without typax."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.core

PROGRAM = """
import jax
import jax.numpy as jnp

def f(p, x, w):
    y = jax.checkpoint(lambda x: jnp.sin(x @ w))(x)
    y = jax.lax.cond(p, lambda: y, lambda: y) + jax.lax.optimization_barrier(jax.lax.stop_gradient(y))
    total, ys = jax.lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(4), y)
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c + ys, ys * total)

x, w = jnp.ones((5, 2, 3)), jnp.ones((3, 4))
g = jax.vmap(jax.grad(lambda p, x, w: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(x)), (1, 2)), (None, 1, None), 1)
h = jax.vmap(f, (None, 0, None), (1))
for fn, args in ((h, (True, x, w)), (g, (True, jnp.ones((2, 5, 3)), w))):
    print(jax.make_jaxpr(fn)(*args))
    print(jax.jit(fn).lower(*args).as_text())
"""


def printed(head: str) -> str:
    done = subprocess.run([sys.executable, "-c", head + PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_on_arrays_are_the_same_with_and_without_typax():
    plain = printed("")
    assert "stablehlo" in plain and ("remat" in plain or "checkpoint" in plain)
    assert printed("import typax\n") == plain
