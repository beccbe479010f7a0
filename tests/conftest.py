"""The ground that every test stands on: 8 virtual CPU devices, strict dtype promotion, no mesh.

The environment is set before JAX is imported, so that the programs that tests start inherit it; the
configuration is set too, in case a pytest plugin imported JAX first.
"""

import os

DEVICES = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

pytest_plugins = ["pytest_typax"]  # where typax is not installed, its entry point is not there

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


@pytest.fixture(autouse=True)
def strict_and_without_a_mesh():
    """Each test starts with strict promotion and no mesh, and leaves neither behind changed."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    with jax.set_mesh(None):
        yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard_promotion():
    """JAX's default promotion, as other libraries need it: Optax multiplies integers by floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def minilm_folder():
    """The files of the sentence encoder of examples/; without them the test is skipped."""
    from examples import assets  # the tests of the core need nothing of the examples

    try:
        return assets.find(assets.MINILM)
    except assets.AssetError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def minilm_params(minilm_folder):
    from examples import minilm

    return minilm.load(minilm_folder)
