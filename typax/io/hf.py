"""Checkpoints of Hugging Face's layout whose weights are quantized already, as values, without a detour over floats.

    method                                   tensors of ``layer.weight`` [out, in]                value
    fp8 (per tensor, channel or tile)        weight, weight_scale or weight_scale_inv             f8e4m3
    compressed-tensors, codes or packed      weight_packed, weight_scale, [weight_zero_point]     q4, q8, u4z, ...
      nvfp4, mxfp4, mxfp8                    weight_packed, weight_scale, [weight_global_scale]   nvfp4, mxfp4, mxfp8
    gptq (v1, v2)                            qweight, qzeros, scales, [g_idx]                     u4z, ...
    awq                                      qweight, qzeros, scales                              u4z
    bitsandbytes nf4 (nested scales too)     weight, weight.absmax, weight.quant_map, ...         nf4

``scale`` is multiplied, also that which is called its inverse.  Packed words hold the first code in the lowest bits; AWQ
puts eight columns in the order 0 2 4 6 1 3 5 7.  GPTQ's first version stores zero points less one.  A GPTQ file whose
``g_idx`` orders the inputs by their activations has groups that are not contiguous: its value is a `Permuted`.

Sources: the layouts as compressed-tensors 0.20, transformers' fine-grained fp8, GPTQModel, AutoAWQ 0.2.9 and bitsandbytes
0.50 write them.
"""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from typax._codes import dot_general
from typax._lift import lift
from typax._op import Refused
from typax._structural import dense
from typax._value import Value
from typax.io._disk import FileError, fail
from typax.io._save import Checkpoint, chooser, placing, put
from typax.io._tree import Kept, Leaf, Names, describe, leaf_of
from typax.quantized import Quantized, from_codes, packing
from typax.quantized.format import NF4, Format, formats, signed, unsigned


class Permuted(Value, name="perm"):
    """A matrix whose columns were ordered anew before they were quantized: ``inner`` has column ``order[k]`` at k."""

    inner: Float[Quantized, "*batch n k"]
    order: Int32[Array, "*batch k"]

    def dense(self) -> Float[Array, "*batch n k"]:
        return jnp.take_along_axis(dense(self.inner), jnp.argsort(self.order)[None, :], axis=-1)


def load_hf(folder: Any, *, sharding: Any = None, only: Any = None) -> dict[str, Any]:
    """The tensors of a checkpoint by their names: quantized weights as values, others as arrays.

    Args:
      folder: with ``config.json`` and safetensors files, or one such file beside it.
      sharding, only: as for `typax.io.load`; names are those of the model, ``layer.weight``.

    Returns:
      a flat dict; a quantized weight stands for [out, in], of the dtype that the configuration names.

    Raises:
      FileError: if a file is damaged, or its quantization is none of those above.
    """
    reader = _reader(Checkpoint(folder))
    wanted = chooser(only) if only is not None else lambda _: True
    place = placing(sharding)
    return {n: put(reader.value(n), place, n) for n in reader.names() if wanted(n)}


class HfCheckpoint:
    """A quantized checkpoint of Hugging Face's layout as `typax.io`'s checkpoints are: its leaves, read when asked for."""

    def __init__(self, ck: Checkpoint) -> None:
        self._reader, self.path = _reader(ck), ck.path

    @cached_property
    def _leaves(self) -> dict[str, Any]:
        names, out = Names(), {}
        for name in self._reader.names():  # the type of a quantized weight is known when it is put together
            out[name] = leaf_of(self._reader.value(name), name, names)
            self._reader.release(name)
        return out

    def leaves(self) -> dict[str, Any]:
        """The leaves by name."""
        return self._leaves

    def value(self, leaf: Leaf, place: Callable[[str, Any], Any] = lambda *_: None) -> Any:
        """An array or a value."""
        return put(self._reader.value(leaf.path), place, leaf.path)

    def release(self, leaf: Leaf) -> None:
        """Let go of the memory that the file's part takes."""
        self._reader.release(leaf.path)

    def retyped(self, types: Callable[[str, Leaf], Any]) -> tuple[Any, list[Leaf]]:
        """The description of a flat dict of leaves of other types, and these leaves."""
        told, new, _ = describe({n: types(n, x) for n, x in self._leaves.items()})
        return told, new

    def shown_metadata(self) -> dict[str, Any]:
        """How it is quantized, as its configuration says."""
        return {"quantization_config": self._reader.config}


def is_quantized(folder: Path) -> bool:
    """Whether the configuration in a folder says that the weights beside it are quantized."""
    return bool(_config(folder).get("quantization_config"))


def _reader(ck: Checkpoint) -> "_Reader":
    config, path = _config(ck.path.parent), ck.path.parent / "config.json"
    q = config.get("quantization_config") or {}
    if not isinstance(q, dict):
        fail(path, "its quantization_config is not a JSON object")
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        fail(path, f"its dtype is {dtype!r}, none of float32, float16 and bfloat16")
    return _Reader(ck, q, dtype)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise FileError(f"{path}: {getattr(e, 'strerror', None) or e}") from None
    if not isinstance(told, dict):
        fail(path, "is not a JSON object")
    return told


class _Reader:
    """The tensors of a checkpoint, put together by the method that its configuration names."""

    def __init__(self, ck: Checkpoint, config: dict[str, Any], dtype: str) -> None:
        self.ck, self.config, self.dtype = ck, config, dtype
        self.method = str(config.get("quant_method", ""))

    # --- names --------------------------------------------------------------------------------------------------

    _OWN = ("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx",
            "input_scale", "input_global_scale", "qzeros", "scales", "g_idx")  # fmt: skip

    def names(self) -> list[str]:
        """The names of the model's tensors."""
        out = []
        for name in self.ck.readers:
            stem, _, last = name.rpartition(".")
            if last in ("weight_packed", "qweight"):
                out.append(f"{stem}.weight")
            elif not ((last in self._OWN and self._is_weight(stem)) or ".weight." in name):
                out.append(name)
        return out

    def _is_weight(self, stem: str) -> bool:
        return any(self.has(f"{stem}.{w}") for w in ("weight", "weight_packed", "qweight"))

    def release(self, name: str) -> None:
        """Let go of the memory of what a tensor of the model is made of."""
        stem = name.removesuffix(".weight")
        for part in self.ck.readers:
            if part == name or part.startswith(f"{stem}."):
                self.ck.readers[part].release(part)

    def has(self, name: str) -> bool:
        return name in self.ck.readers

    def array(self, name: str) -> np.ndarray:
        """A tensor as it is in the file."""
        if not self.has(name):
            fail(self.ck.path, "there is no such tensor in it, which its quantization needs", name)
        e = self.ck.readers[name].entries[name]
        return self.ck.array(Kept(name, e.dtype, e.shape))

    # --- values -------------------------------------------------------------------------------------------------

    def value(self, name: str) -> Any:
        """The array or value of a tensor of the model."""
        stem = name.removesuffix(".weight")
        try:
            if self.has(f"{stem}.qweight"):
                return self._awq(stem) if self.method == "awq" else self._gptq(stem)
            if self.has(f"{stem}.weight_packed"):
                return self._packed(stem)
            if self.has(f"{stem}.weight.absmax"):
                return self._bnb(name)
            for scale in ("weight_scale", "weight_scale_inv"):
                if name == f"{stem}.weight" and self.has(f"{stem}.{scale}"):
                    return self._codes(stem, scale)
        except FileError:
            raise
        except KeyError as e:
            fail(self.ck.path, f"what describes its quantization has no {e}", name)
        except (ValueError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as e:
            fail(self.ck.path, f"its quantization is not what it should be: {str(e).splitlines()[0]}", name)
        x = self.array(name)
        wide = x.dtype.itemsize == 8 and not jax.config.jax_enable_x64
        return x.copy() if wide else jnp.array(x)

    def _built(self, codes: Any, scale: Any, format: Any, **layout: Any) -> Any:
        return from_codes(jnp.asarray(codes), scale, format, dtype=self.dtype, **layout)

    def _codes(self, stem: str, scale: str) -> Any:
        """Codes of 8 bits, one for each entry."""
        w, s = self.array(f"{stem}.weight"), self.array(f"{stem}.{scale}")
        known = {"int8": "int8", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
        if w.dtype.name not in known:
            fail(self.ck.path, f"a weight with scales is of dtype {w.dtype}, none of {', '.join(known)}", f"{stem}.weight")
        format = known[w.dtype.name]
        if w.ndim != 2:
            fail(self.ck.path, f"a weight with scales has the shape {list(w.shape)}, not [out, in]", f"{stem}.weight")
        if s.dtype == np.uint8 and s.shape == (w.shape[0], -(-w.shape[1] // 32)):
            return self._built(w, s, "mxfp8" if format == "fp8_e4m3" else "mxfp8_e5m2")
        s = _scales(s)
        if s.size == 1:
            return self._built(w, s, format, axis=None)
        if s.shape == (w.shape[0], 1) or s.shape == (w.shape[0],):
            return self._built(w, s.reshape(-1), format)
        block = self._block(w.shape, s.shape, stem)
        return self._built(w, s, format, axis=(0, 1), group=block)

    def _block(self, shape: Any, scales: Any, stem: str) -> tuple[int, int]:
        told = self.config.get("weight_block_size")
        if not told:
            told = self._scheme().get("block_structure") or [128, 128]
        block = tuple(told)
        if len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
            fail(self.ck.path, f"the block size {told} is not two numbers", f"{stem}.weight")
        if tuple(-(-n // b) for n, b in zip(shape, block, strict=True)) != tuple(scales):
            fail(
                self.ck.path,
                f"{list(scales)} scales do not go with {list(shape)} in blocks of {list(block)}",
                f"{stem}.weight",
            )
        return block  # type: ignore[return-value]

    def _scheme(self) -> dict[str, Any]:
        groups = self.config.get("config_groups")
        first = next(iter(groups.values()), {}) if isinstance(groups, dict) else {}
        weights = first.get("weights") if isinstance(first, dict) else None
        return weights if isinstance(weights, dict) else {}

    def _packed(self, stem: str) -> Any:
        """compressed-tensors: int32 words along the inputs, or bytes of two 4-bit floats."""
        words, s = self.array(f"{stem}.weight_packed"), self.array(f"{stem}.weight_scale")
        if words.dtype == np.uint8:
            codes = _unpacked(words, unsigned(4), 2 * words.shape[1])
            if s.dtype == np.uint8:
                return self._built(codes, s, "mxfp4")
            inverse = np.float32(1) / self.array(f"{stem}.weight_global_scale").astype(np.float32).reshape(())
            return self._built(codes, (jnp.asarray(s), inverse), "nvfp4")
        n, k = (int(v) for v in self.array(f"{stem}.weight_shape"))
        bits = self._scheme().get("num_bits") or 32 * words.shape[1] // k
        if bits not in range(2, 9) or words.shape != (n, -(-k * bits // 32)):
            fail(
                self.ck.path,
                f"{list(words.shape)} words do not hold [{n}, {k}] codes of {bits} bits",
                f"{stem}.weight_packed",
            )
        codes = _unpacked(words, unsigned(bits), k)  # the code plus half the range
        s = _scales(s)
        g = None if s.size in (1, n) and s.shape[-1] == 1 else _group(k, s.shape[1])
        layout = {"axis": None} if s.size == 1 else {"axis": -1, "group": g}
        if self.has(f"{stem}.weight_g_idx") and _order(self.array(f"{stem}.weight_g_idx"), g) is not None:
            fail(self.ck.path, "weights ordered by activations are read from GPTQ files only", f"{stem}.weight_g_idx")
        rows = s.reshape(()) if s.size == 1 else s.reshape(n) if g is None else s
        if self.has(f"{stem}.weight_zero_point"):
            z = self.array(f"{stem}.weight_zero_point")
            z = _unpacked(z.T, unsigned(bits), n).T if z.dtype == np.int32 else (z + (1 << bits - 1)).astype(np.uint8)
            return self._built(codes, rows, unsigned(bits), zero_point=z.reshape(rows.shape), **layout)
        shifted = (codes.astype(np.int16) - (1 << bits - 1)).astype(np.int8)
        return self._built(shifted, rows, signed(bits), **layout)

    def _gptq(self, stem: str) -> Any:
        bits = int(self.config.get("bits", 4))
        w, z = self.array(f"{stem}.qweight"), self.array(f"{stem}.qzeros")
        s = _scales(self.array(f"{stem}.scales"))
        (g, n), k = s.shape, w.shape[0] * 32 // bits
        codes = _unpacked(w.T, unsigned(bits), k)
        zeros = _unpacked(z, unsigned(bits), n)
        if str(self.config.get("checkpoint_format", "gptq")) != "gptq_v2":
            zeros = (zeros + 1) & ((1 << bits) - 1)
        size = None if g == 1 else _group(k, g)
        order = _order(self.array(f"{stem}.g_idx"), size) if self.has(f"{stem}.g_idx") else None
        if order is not None:
            codes = codes[:, order]
        shape = (n,) if g == 1 else (n, g)
        given = {"zero_point": zeros.T.reshape(shape), "axis": -1, "group": size}
        value = self._built(codes, s.T.reshape(shape), unsigned(bits), **given)
        return value if order is None else Permuted(value, jnp.asarray(order, jnp.int32))

    def _awq(self, stem: str) -> Any:
        bits = int(self.config.get("bits", 4))
        if bits != 4:
            fail(self.ck.path, f"AWQ packs 4 bits, and its configuration says {bits}", f"{stem}.qweight")
        s = _scales(self.array(f"{stem}.scales"))
        g, n = s.shape
        columns = np.argsort(np.array([0, 2, 4, 6, 1, 3, 5, 7]))

        def ordered(words: np.ndarray) -> np.ndarray:
            codes = _unpacked(words, unsigned(4), n).reshape(words.shape[0], n // 8, 8)
            return codes[..., columns].reshape(words.shape[0], n).T

        codes, zeros = ordered(self.array(f"{stem}.qweight")), ordered(self.array(f"{stem}.qzeros"))
        size = None if g == 1 else _group(codes.shape[1], g)
        shape = (n,) if g == 1 else (n, g)
        given = {"zero_point": zeros.reshape(shape), "axis": -1, "group": size}
        return self._built(codes, s.T.reshape(shape), "uint4", **given)

    def _bnb(self, name: str) -> Any:
        state = next((n for n in self.ck.readers if n.startswith(f"{name}.quant_state.")), None)
        if state is None or not state.endswith("bitsandbytes__nf4"):
            fail(self.ck.path, f"its quantization is {state or 'not described'}, and only nf4 is read", name)
        told = json.loads(bytes(self.array(state)).decode("utf-8"))
        shape, size = tuple(told["shape"]), int(told["blocksize"])
        table = self.array(f"{name}.quant_map").astype(np.float32)
        if len(shape) != 2 or not np.array_equal(table, np.asarray(NF4.values, np.float32)):
            fail(self.ck.path, "its table is not that of nf4, or its weight is no matrix", name)
        s = self.array(f"{name}.absmax")
        if s.dtype == np.uint8:
            levels = self.array(f"{name}.nested_quant_map").astype(np.float32)[s]
            coarse, outer = self.array(f"{name}.nested_absmax").astype(np.float32), int(told["nested_blocksize"])
            if outer <= 0 or coarse.size != -(-s.size // outer):
                fail(self.ck.path, f"{coarse.size} scales do not go with {s.size} in blocks of {outer}", name)
            s = levels * coarse[np.arange(s.size) // outer] + np.float32(told["nested_offset"])
        n, k = shape
        if k % size:
            fail(self.ck.path, f"blocks of {size} go over the ends of its rows of {k}", name)
        codes = _unpacked(self.array(name).reshape(1, -1), formats()["nf4"], n * k).reshape(n, k)
        return self._built(codes, s.astype(np.float32).reshape(n, k // size), "nf4", group=size)


def _scales(s: np.ndarray) -> np.ndarray:
    """Scales as float32, which holds those of fewer bits exactly."""
    if s.dtype == np.uint8:  # powers of two
        return np.where(s == 255, np.float32(np.nan), np.ldexp(np.float32(1), s.astype(np.int32) - 127)).astype(np.float32)
    return s.astype(np.float32)


def _group(k: int, groups: int) -> int:
    if k % groups:
        raise ValueError(f"{groups} groups do not divide {k} inputs")
    return k // groups


def _order(g_idx: np.ndarray, group: int | None) -> np.ndarray | None:
    """The order in which the groups of inputs are contiguous; ``None`` if they are."""
    k = g_idx.size
    if group is None or np.array_equal(g_idx, np.arange(k) // group):
        return None
    order = np.argsort(g_idx, kind="stable")
    if not np.array_equal(g_idx[order], np.arange(k) // group):
        raise ValueError("g_idx does not give every group the same number of inputs")
    return order


def _unpacked(words: np.ndarray, format: Format, n: int) -> np.ndarray:
    """Codes [rows, n] of rows of words, as the format packs them."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(words.shape[0], -1)
    if raw.shape[1] * 8 < n * format.bits:
        raise ValueError(f"{raw.shape[1]} bytes do not hold {n} codes of {format.bits} bits")
    size = packing.width(format, n)
    raw = np.pad(raw[:, :size], ((0, 0), (0, max(0, size - raw.shape[1]))))
    return np.asarray(packing.unpack(format, raw))[:, :n]


@dot_general.impl
def _(x: Float[Array, "*b"], w: Permuted, *, dimension_numbers: Any, **params: Any) -> Any:
    ((own, other), (_, batch)) = dimension_numbers
    if other != (w.ndim - 1,) or w.ndim != 2 or batch:
        raise Refused("only the inputs of a permuted matrix are contracted")
    x = jnp.take(x, w.order, axis=own[0])
    product = lambda x, w: dot_general.reference(x, w, dimension_numbers=dimension_numbers, **params)
    return lift(product, "allow")(x, w.inner)
