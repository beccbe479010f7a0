"""What several test files need: examples of the seed's size, and a comparison with the dense oracle."""

import jax.numpy as jnp
import numpy as np

X = jnp.array([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]])
W = jnp.arange(12.0, dtype="float32").reshape(3, 4) / 12.0


def close(got, want, tol=1e-5):
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)
