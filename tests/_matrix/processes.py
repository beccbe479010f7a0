"""Two processes, two devices each: values that no process holds whole.

Each row runs in both processes at once; what it returns is gathered before it is compared.  `cells` starts the processes.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from _matrix import row, works_raw
from _matrix.sides import ROWS8, mesh

KIND = "processes"
MODES = {"auto": False, "explicit": True}


def modes(name: str, of: Any = row, where: Any = tuple(MODES), **how: Any) -> Any:
    """A row on a mesh over both processes."""

    def add(program: Any) -> None:
        for mode in where:

            def run(s: Any, explicit: bool = MODES[mode]) -> Any:
                with jax.set_mesh(m := mesh(explicit)):
                    return jax.tree.map(whole, program(s, m))

            run.__module__ = program.__module__
            of(f"[{mode}] {name}", **how)(run)

    return add


def whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    return multihost_utils.process_allgather(x, tiled=True)


def spread(m: Any, x: Any, *parts: Any) -> Any:
    """A global array of which every process brings its own rows."""
    x = np.asarray(x)
    half = len(x) // 2
    mine = x[jax.process_index() * half :][:half] if parts else x
    return jax.make_array_from_process_local_data(NamedSharding(m, jax.P(*parts)), mine, x.shape)


def rows(s: Any, m: Any) -> Any:
    return s.jit(s.quantize)(spread(m, ROWS8, "i"))


@modes("jit, values as arguments and results", works_raw)
def _(s: Any, m: Any) -> Any:
    q = s.jit(lambda q: s.quantize(s.dense(q) * 2))(rows(s, m))
    return s.jit(s.dense)(q)


@modes("grad of a value", works_raw)
def _(s: Any, m: Any) -> Any:
    return s.jit(s.grad(lambda q: jnp.sum(jnp.sin(s.dense(q)))))(rows(s, m))


@modes("shard_map", works_raw)
def _(s: Any, m: Any) -> Any:
    f = s.shard_map(lambda q: s.dense(q) * 2, in_specs=s.P("i"), out_specs=jax.P("i"))
    return s.jit(f)(rows(s, m))


@modes("shard_map: all_gather of a value")
def _(s: Any, m: Any) -> Any:
    f = lambda q: s.dense(s.all_gather(q, "i", tiled=True))[None]
    return s.jit(s.shard_map(f, in_specs=s.P("i"), out_specs=jax.P("i")))(rows(s, m))


@modes("device_put")
def _(s: Any, m: Any) -> Any:
    q = s.device_put(s.quantize(ROWS8), NamedSharding(m, jax.P("i")))
    held = q if s.is_plain else s.codes(q)
    return s.jit(s.dense)(q), jnp.array([len(held.addressable_shards), *held.addressable_shards[0].data.shape])


def on_the_wire(f: Any, x: Any) -> Any:
    """Whether the compiled program gathers int8 codes, and whether it gathers a matrix of floats."""
    text = f.lower(x).compile().as_text()
    gathers = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather", text)
    return jnp.array([("s8", "8,3") in gathers, any(dtype == "f32" and "," in shape for dtype, shape in gathers)]).astype(
        int
    )


@modes("reshard gathers the codes: int8 on the wire", where=("explicit",), want=lambda: jnp.array([1, 0]))
def _(s: Any, m: Any) -> Any:
    return on_the_wire(s.jit(lambda x: s.reshard(s.quantize(x), jax.P(None, None))), spread(m, ROWS8, "i"))


@modes("all_gather gathers the codes: int8 on the wire", want=lambda: jnp.array([1, 0]))
def _(s: Any, m: Any) -> Any:
    f = lambda x: s.dense(s.all_gather(s.quantize(x), "i", tiled=True))[None]
    return on_the_wire(s.jit(s.shard_map(f, in_specs=jax.P("i"), out_specs=jax.P("i"))), spread(m, ROWS8, "i"))


@modes("a checkpoint: each process writes its own shards", where=("auto",))
def _(s: Any, m: Any) -> Any:
    if s.is_plain:
        return s.jit(s.dense)(rows(s, m))
    q = rows(s, m)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{jax.process_index()}.npz"
        own = lambda x: np.concatenate([np.asarray(p.data) for p in x.addressable_shards])
        np.savez(file, codes=own(s.codes(q)), steps=own(s.steps(q)))
        held = np.load(file)
        put = lambda x, like: jax.make_array_from_process_local_data(like.sharding, x, like.shape)
        back = s.build(put(held["codes"], s.codes(q)), put(held["steps"], s.steps(q)))
    return s.jit(s.dense)(back)


@modes("a global value closed over by jit", error=(RuntimeError | ValueError, "[Cc]los(ing|ed) over"))
def _(s: Any, m: Any) -> Any:
    q = rows(s, m)
    return s.jit(lambda x: x + s.dense(q))(spread(m, ROWS8, "i"))


@modes("multihost_utils.process_allgather of a value", limit=(TypeError, r"typax\.dense"))
def _(s: Any, m: Any) -> Any:
    return s.dense(multihost_utils.process_allgather(rows(s, m), tiled=True))


# --- the processes


def cells(side: str, words: list[str] | None = None) -> dict[str, str]:
    """The cells of these rows: the worse of what the two processes say."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
    program = [sys.executable, "-m", "_matrix._worker", side, port]
    both = [
        subprocess.Popen(
            [*program, str(k), *(words or [])], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for k in range(2)
    ]
    try:
        said = [p.communicate(timeout=300) for p in both]
    finally:
        for p in both:
            p.kill()
    found = []
    for p, (out, err) in zip(both, said, strict=True):
        if p.returncode:
            raise RuntimeError(err)
        found.append(json.loads(out.splitlines()[-1]))
    return {key: got if (got := found[0][key]) != "works" else found[1][key] for key in found[0]}
