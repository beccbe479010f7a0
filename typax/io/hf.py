"""Checkpoints of Hugging Face's layout whose weights are quantized already, as values, without a detour over floats.

    method                                   tensors of ``layer.weight`` [out, in]                value
    fp8 (per tensor, channel or tile)        weight, weight_scale or weight_scale_inv             f8e4m3
    compressed-tensors, codes                weight, weight_scale, [weight_zero_point]            q8, q8z, f8e4m3
      packed                                 weight_packed, weight_scale, [weight_zero_point]     q4, q8, u4z, ...
      nvfp4, mxfp4, mxfp8                    weight_packed, weight_scale, [weight_global_scale]   nvfp4, mxfp4, mxfp8
    gptq (v1, v2)                            qweight, qzeros, scales, [g_idx]                     u4z, ...
    awq                                      qweight, qzeros, scales                              u4z
    bitsandbytes nf4 (nested scales too)     weight, weight.absmax, weight.quant_map, ...         nf4
      int8                                   weight, SCB, weight_format                           q8

``scale`` is multiplied, also that which is called its inverse.  Packed words hold the first code in the lowest bits; AWQ
puts eight columns in the order 0 2 4 6 1 3 5 7.  GPTQ's first version stores zero points less one.  A GPTQ file whose
``g_idx`` orders the inputs by their activations has groups that are not contiguous: its value is a `Permuted`.

Sources: the layouts as compressed-tensors 0.20, transformers' fine-grained fp8, GPTQModel, AutoAWQ 0.2.9 and bitsandbytes
0.50 write them.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from typax import _jax
from typax._codes import dot_general
from typax._describe import brief
from typax._lift import lift
from typax._op import Refused
from typax._structural import Opened, dense
from typax._type import ValueType
from typax._value import Value
from typax.io._disk import FileError, fail, opened
from typax.io._save import Checkpoint, flat, own, placing, put
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
      folder: with ``config.json`` and safetensors files, or one such file beside it. Without a ``quantization_config`` the
        tensors are what they are in the file; values that typax wrote are those that `typax.io.load` gives.
      sharding, only: as for `typax.io.load`; names are those of the model, ``layer.weight``.

    Returns:
      a flat dict; a quantized weight stands for [out, in], of the dtype that the configuration names.

    Raises:
      FileError: if a file is damaged, or its quantization is none of those above.
    """
    return flat(checkpoint(folder, part=only is not None), only, placing(sharding))


def checkpoint(path: Any, part: bool = False) -> Any:
    """The checkpoint of safetensors files at a path, of values if its configuration says how they are quantized."""
    ck = Checkpoint(path, part)
    return ck if _is_typed(ck) or not _config(ck.path.parent).get("quantization_config") else HfCheckpoint(ck)


def _is_typed(ck: Checkpoint) -> bool:
    """Whether typax wrote it, and not what another library calls its codes and scales."""
    if ck.tree is None:
        return False
    arrays = all(isinstance(x, Leaf) and not isinstance(x.type, ValueType) for x in ck.leaves().values())
    return not arrays or not any(n.rpartition(".")[2] in _PARTS for n in ck.readers)


class HfCheckpoint:
    """A quantized checkpoint of Hugging Face's layout as `typax.io`'s checkpoints are: its leaves, read when asked for."""

    tree = None

    def __init__(self, ck: Checkpoint) -> None:
        if ck.absent:
            fail(ck.path, f"{min(ck.absent.values())} is not there, and what is quantized may be in several files")
        self._reader, self.path, self.absent = _reader(ck), ck.path, ck.absent

    @cached_property
    def _leaves(self) -> dict[str, Any]:
        names = Names()
        return {name: leaf_of(self._reader.type(name), name, names) for name in self._reader.names()}

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


def _reader(ck: Checkpoint) -> "_Reader":
    config, path = _config(ck.path.parent), ck.path.parent / "config.json"
    q = config.get("quantization_config") or {}
    if not isinstance(q, dict):
        fail(path, "its quantization_config is not a JSON object")
    if (method := _method(q)) not in _METHODS:
        fail(path, f"its weights are quantized by the method {brief(method)}, and {', '.join(_METHODS)} are read")
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        fail(path, f"its dtype is {dtype!r}, none of float32, float16 and bfloat16")
    return _Reader(ck, q, dtype)


_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "bitsandbytes")


def _method(config: dict[str, Any]) -> Any:
    """The method that a configuration names; the first ones of bitsandbytes did not."""
    first = config.get("load_in_4bit") or config.get("load_in_8bit")
    return config.get("quant_method", "bitsandbytes" if first else None)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        with opened(path) as file:
            told = json.loads(file.read().decode("utf-8"))
    except FileError:
        raise
    except (OSError, ValueError, RecursionError) as e:
        raise FileError(f"{path}: {getattr(e, 'strerror', None) or e}") from None
    if not isinstance(told, dict):
        fail(path, "is not a JSON object")
    return told


class _Reader:
    """The tensors of a checkpoint, put together by the method that its configuration names."""

    def __init__(self, ck: Checkpoint, config: dict[str, Any], dtype: str) -> None:
        self.ck, self.config, self.dtype = ck, config, dtype
        self.method = _method(config)

    # --- names --------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of the model's tensors."""
        out = []
        for name in self.ck.readers:
            stem, _, last = name.rpartition(".")
            if last in ("weight_packed", "qweight"):
                out.append(f"{stem}.weight")
            elif not ((last in _OWN and self._is_weight(stem)) or self._is_state(name)):
                out.append(name)
        return out

    def _is_weight(self, stem: str) -> bool:
        return any(self.has(f"{stem}.{w}") for w in ("weight", "weight_packed", "qweight"))

    def _is_state(self, name: str) -> bool:
        """Whether it is what bitsandbytes keeps beside a weight."""
        weight, dot, _ = name.partition(".weight.")
        return bool(dot) and self.method == "bitsandbytes" and self.has(f"{weight}.weight")

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

    def type(self, name: str) -> Any:
        """The type of a tensor of the model, of the headers and what is small."""
        with self._about(name):
            if (found := self._found(name)) is None:
                e = self.ck.readers[name].entries[name]
                return jax.ShapeDtypeStruct(e.shape, e.dtype)
            make, parts = found
            return _type_of(make, [self._told(p) for p in parts])

    def value(self, name: str) -> Any:
        """The array or value of a tensor of the model."""
        with self._about(name):
            if (found := self._found(name)) is None:
                x = self.array(name)
                return x.copy() if x.dtype.itemsize == 8 and not jax.config.jax_enable_x64 else jax.device_put(own(x))
            make, parts = found
            return make(*(jax.device_put(own(self.array(p))) for p in parts))

    @contextlib.contextmanager
    def _about(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileError:
            raise
        except KeyError as e:
            fail(self.ck.path, f"what describes its quantization has no {e}", name)
        except (ValueError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as e:
            why = str(e).splitlines()[0] if str(e) else type(e).__name__
            fail(self.ck.path, f"its quantization is not what it should be: {why}", name)

    def _found(self, name: str) -> "tuple[Callable[..., Any], list[str]] | None":
        """How a value is made of tensors in the file, and of which; ``None`` for what is an array."""
        stem = name.removesuffix(".weight")
        if self.has(f"{stem}.qweight"):
            self._is_of(name, "gptq", "awq")
            return self._awq(stem) if self.method == "awq" else self._gptq(stem)
        if self.has(f"{stem}.weight_packed"):
            self._is_of(name, "compressed-tensors")
            return self._packed(stem)
        if self.has(f"{stem}.weight.absmax"):
            self._is_of(name, "bitsandbytes")
            return self._bnb(name)
        if name == f"{stem}.weight" and self.has(f"{stem}.SCB"):
            self._is_of(name, "bitsandbytes")
            return self._bnb_int8(stem)
        for scale in ("weight_scale", "weight_scale_inv"):
            if name == f"{stem}.weight" and self.has(f"{stem}.{scale}"):
                self._is_of(name, "fp8", "fbgemm_fp8", "compressed-tensors")
                return self._codes(stem, scale)
        return None

    def _is_of(self, name: str, *methods: str) -> None:
        if self.method not in methods:
            what = f"its tensors are those of {' or '.join(methods)}, but its configuration names {self.method}"
            fail(self.ck.path, what, name)

    def _version(self, name: str, key: str, known: tuple[str, ...]) -> str:
        """How a method orders its words, as a configuration tells it; the first if it does not."""
        told = self.config.get(key)
        if told is not None and (not isinstance(told, str) or told.lower() not in known):
            fail(self.ck.path, f"its {key} is {brief(told)}, and {', '.join(known)} are read", name)
        return known[0] if told is None else told.lower()

    def _told(self, name: str, ndim: int | None = None, dtypes: tuple[str, ...] = ()) -> Any:
        """What the header tells of a tensor, of so many axes and one of these dtypes."""
        if not self.has(name):
            fail(self.ck.path, "there is no such tensor in it, which its quantization needs", name)
        e = self.ck.readers[name].entries[name]
        if dtypes and e.dtype.name not in dtypes:
            fail(self.ck.path, f"it is of dtype {e.dtype}, none of {', '.join(dtypes)}", name)
        if ndim is not None and len(e.shape) != ndim:
            fail(self.ck.path, f"it has the shape {list(e.shape)}, not {ndim} axes", name)
        return jax.ShapeDtypeStruct(e.shape, e.dtype)

    def _built(self, codes: Any, scale: Any, format: Any, **layout: Any) -> Any:
        return from_codes(codes, scale, format, dtype=self.dtype, **layout)

    def _width(self, told: Any, name: str, among: Any = range(2, 9)) -> int:
        """The bits of a code, as a configuration tells them."""
        if type(told) is not int or told not in among:
            fail(self.ck.path, f"codes of {brief(told)} bits are not read", name)
        return told

    def _codes(self, stem: str, scale: str) -> Any:
        """Codes of 8 bits, one for each entry."""
        weight, scale = f"{stem}.weight", f"{stem}.{scale}"
        known = {"int8": "int8", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
        w, s = self._told(weight, 2, tuple(known)), self._told(scale, None, _SCALES)
        format = known[w.dtype.name]
        size = int(np.prod(s.shape))
        if _is_powers(s) and s.shape == (w.shape[0], -(-w.shape[1] // 32)) and format != "int8":
            mx = "mxfp8" if format == "fp8_e4m3" else "mxfp8_e5m2"
            return lambda w, s: self._built(w, _bytes(s), mx), [weight, scale]
        layout, shape = self._layout(w.shape, s.shape, weight)
        if self.has(told := f"{stem}.weight_zero_point"):
            zeros = self._small(told, size, ("int8", "int32", "int64", "float8_e4m3fn"))
            if zeros.astype(np.float32).any():
                if format != "int8":
                    fail(self.ck.path, f"codes of {w.dtype} have no zero points", told)
                layout["zero_point"] = zeros.astype(np.int8).reshape(shape)
        return lambda w, s: self._built(w, _scales(s).reshape(shape), format, **layout), [weight, scale]

    def _layout(self, shape: Any, scales: Any, name: str) -> tuple[dict[str, Any], tuple[int, ...]]:
        """The axes along which values of a matrix share one of its scales, and the shape that these then have."""
        if int(np.prod(scales)) == 1:
            return {"axis": None}, ()
        if scales in ((shape[0], 1), (shape[0],)):
            return {"axis": -1, "group": None}, (shape[0],)
        if len(scales) == 2 and scales[0] == shape[0] and any(w.get("group_size") for w in self._schemes()):
            return {"axis": -1, "group": _group(shape[1], scales[1])}, scales
        return {"axis": (0, 1), "group": self._block(shape, scales, name)}, scales

    def _block(self, shape: Any, scales: Any, name: str) -> tuple[int, int]:
        told = [self.config.get("weight_block_size"), *(w.get("block_structure") for w in self._schemes())]
        for block in (told := [b for b in told if b] or [[128, 128]]):
            if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
                fail(self.ck.path, f"the block size {brief(block)} is not two numbers", name)
            if tuple(-(-n // b) for n, b in zip(shape, block, strict=True)) == tuple(scales):
                return block[0], block[1]
        blocks = " or ".join(map(str, told))
        fail(self.ck.path, f"{list(scales)} scales do not go with {list(shape)} in blocks of {blocks}", name)

    def _schemes(self) -> list[dict[str, Any]]:
        """How the groups of layers are quantized, as compressed-tensors says it."""
        groups = self.config.get("config_groups")
        told = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
        return [w for w in told if isinstance(w, dict)]

    def _packed(self, stem: str) -> Any:
        """compressed-tensors: int32 words along the inputs, or bytes of two 4-bit floats."""
        packed, scale = f"{stem}.weight_packed", f"{stem}.weight_scale"
        words, s = self._told(packed, 2, ("int32", "uint8")), self._told(scale, None, _SCALES)
        if words.dtype == np.uint8:
            pairs = lambda w: _unpacked(w, unsigned(4), 2 * words.shape[1])
            if _is_powers(s):
                return lambda w, s: self._built(pairs(w), _bytes(s), "mxfp4"), [packed, scale]
            (inverse,) = self._small(f"{stem}.weight_global_scale", 1, ("float32",))
            outer = np.float32(1) / inverse
            return lambda w, s: self._built(pairs(w), (s, outer), "nvfp4"), [packed, scale]
        n, k = (int(v) for v in self._small(f"{stem}.weight_shape", 2, ("int64", "int32")))
        told = {brief(w["num_bits"]): w["num_bits"] for w in self._schemes() if w.get("num_bits") is not None}
        widths = [self._width(b, packed) for b in told.values()] or [self._width(32 * words.shape[1] // max(k, 1), packed)]
        fitting = [b for b in widths if words.shape == (n, -(-k * b // 32))]
        if len(fitting) != 1:
            does, bits = "fit" if fitting else "do not hold", " or ".join(map(str, widths))
            fail(self.ck.path, f"{list(words.shape)} words {does} [{n}, {k}] codes of {bits} bits", packed)
        (bits,) = fitting
        size, half = int(np.prod(s.shape)), 1 << (bits - 1)
        g = None if size in (1, n) and s.shape[-1:] == (1,) else _group(k, s.shape[1])
        layout = {"axis": None} if size == 1 else {"axis": -1, "group": g}
        if self.has(order := f"{stem}.weight_g_idx") and _order(self._small(order, k, ("int32", "int64")), g) is not None:
            fail(self.ck.path, "weights ordered by activations are read from GPTQ files only", order)
        rows = () if size == 1 else (n,) if g is None else s.shape
        if not self.has(zero := f"{stem}.weight_zero_point"):
            signs = lambda w: (_unpacked(w, unsigned(bits), k).astype(jnp.int16) - half).astype(jnp.int8)
            return lambda w, s: self._built(signs(w), _scales(s).reshape(rows), signed(bits), **layout), [packed, scale]
        whole = self._told(zero, None, ("int32", "int8")).dtype == np.int8

        def made(w: Any, s: Any, z: Any) -> Any:
            z = (z.astype(jnp.int16) + half).astype(jnp.uint8) if whole else _unpacked(z.T, unsigned(bits), n).T
            codes = _unpacked(w, unsigned(bits), k)  # the code plus half the range
            return self._built(codes, _scales(s).reshape(rows), unsigned(bits), zero_point=z.reshape(rows), **layout)

        return made, [packed, scale, zero]

    def _columns(self, stem: str) -> tuple[list[str], Any, Any]:
        """The tensors of words along the inputs, one column for each output; the shapes of the words and of the scales."""
        parts = [f"{stem}.{p}" for p in ("qweight", "qzeros", "scales")]
        told = [self._told(p, 2, dtypes) for p, dtypes in zip(parts, (("int32",), ("int32",), _SCALES), strict=True)]
        return parts, told[0].shape, told[2].shape

    def _gptq(self, stem: str) -> Any:
        parts, (words, _), (g, n) = self._columns(stem)
        bits = self._width(self.config.get("bits", 4), parts[0])
        k = words * 32 // bits
        less = 0 if self._version(parts[0], "checkpoint_format", ("gptq", "gptq_v2")) == "gptq_v2" else 1
        size = None if g == 1 else _group(k, g)
        told = f"{stem}.g_idx"
        order = _order(self._small(told, k, ("int32", "int64")), size) if self.has(told) else None
        shape = (n,) if g == 1 else (n, g)

        def made(w: Any, z: Any, s: Any) -> Any:
            codes = _unpacked(w.T, unsigned(bits), k)
            codes = codes if order is None else jnp.take(codes, order, axis=1)
            zeros = (_unpacked(z, unsigned(bits), n) + np.uint8(less)) & np.uint8((1 << bits) - 1)
            given = {"zero_point": zeros.T.reshape(shape), "axis": -1, "group": size}
            value = self._built(codes, _scales(s).T.reshape(shape), unsigned(bits), **given)
            return value if order is None else Permuted(value, jnp.asarray(order, jnp.int32))

        return made, parts

    def _awq(self, stem: str) -> Any:
        parts, (k, _), (g, n) = self._columns(stem)
        self._width(self.config.get("bits", 4), parts[0], (4,))
        self._version(parts[0], "version", ("gemm",))
        size, shape = None if g == 1 else _group(k, g), (n,) if g == 1 else (n, g)
        columns = np.argsort(np.array([0, 2, 4, 6, 1, 3, 5, 7]))

        def ordered(words: Any) -> Any:
            codes = _unpacked(words, unsigned(4), n).reshape(words.shape[0], n // 8, 8)
            return codes[..., columns].reshape(words.shape[0], n).T

        def made(w: Any, z: Any, s: Any) -> Any:
            given = {"zero_point": ordered(z).reshape(shape), "axis": -1, "group": size}
            return self._built(ordered(w), _scales(s).T.reshape(shape), "uint4", **given)

        return made, parts

    def _bnb(self, name: str) -> Any:
        state = next((n for n in self.ck.readers if n.startswith(f"{name}.quant_state.")), None)
        if state is None or not state.endswith("bitsandbytes__nf4"):
            fail(self.ck.path, f"its quantization is {state or 'not described'}, and only nf4 is read", name)
        told = json.loads(bytes(self._small(state, None, ("uint8",))).decode("utf-8"))
        if not isinstance(told, dict) or not isinstance(told["shape"], list):
            fail(self.ck.path, "it describes no quantization", state)
        shape, size = told["shape"], told["blocksize"]
        table = self._small(f"{name}.quant_map", 16, ("float32",))
        if len(shape) != 2 or not np.array_equal(table, np.asarray(NF4.values, np.float32)):
            fail(self.ck.path, "its table is not that of nf4, or its weight is no matrix", name)
        if not all(type(v) is int and v > 0 for v in (*shape, size)):
            fail(self.ck.path, f"its shape {brief(shape)} or its blocks of {brief(size)} are none", name)
        n, k = shape
        if k % size:
            fail(self.ck.path, f"blocks of {size} go over the ends of its rows of {k}", name)
        w, s = self._told(name, None, ("uint8",)), self._told(f"{name}.absmax", 1, ("float32", "uint8"))
        if w.shape not in ((-(-n * k // 2), 1), (1, -(-n * k // 2))) or s.shape[0] != n * k // size:
            fail(
                self.ck.path, f"{list(w.shape)} bytes and {s.shape[0]} scales do not hold {shape} in blocks of {size}", name
            )
        parts = [name, f"{name}.absmax"]
        nested: Any = None
        if s.dtype == np.uint8:
            levels, outer = self._small(f"{name}.nested_quant_map", 256, ("float32",)), told["nested_blocksize"]
            offset = np.float32(told["nested_offset"])
            if type(outer) is not int or outer <= 0:
                fail(self.ck.path, f"its scales are in blocks of {brief(outer)}", name)
            coarse = self._small(f"{name}.nested_absmax", -(-s.shape[0] // outer), ("float32",))
            nested = levels, coarse[np.arange(s.shape[0]) // outer], offset

        def made(w: Any, s: Any) -> Any:
            if nested is not None:
                levels, coarse, offset = nested
                s = lax.optimization_barrier(jnp.asarray(levels)[s] * jnp.asarray(coarse)) + offset
            codes = _unpacked(w.reshape(1, -1), formats()["nf4"], n * k).reshape(n, k)
            return self._built(codes, s.reshape(n, k // size), "nf4", group=size)

        return made, parts

    def _bnb_int8(self, stem: str) -> Any:
        """Codes, and the largest magnitude of each row, which 127 stands for."""
        parts, form = [f"{stem}.weight", f"{stem}.SCB"], f"{stem}.weight_format"
        w, most = self._told(parts[0], 2, ("int8",)), self._told(parts[1], None, ("float32", "float16", "bfloat16"))
        if int(np.prod(most.shape)) != w.shape[0]:
            fail(self.ck.path, f"{list(most.shape)} scales do not go with {list(w.shape)} codes", parts[1])
        if self.has(form) and self._small(form, 1, ("uint8", "int8", "int32", "int64")).any():
            fail(self.ck.path, "its codes are in the order of a device; save it again, by rows", form)
        scale = lambda s: s.reshape(-1).astype(jnp.float32) * np.float32(1 / 127)
        return lambda w, s: self._built(w, scale(s), "int8"), parts

    def _small(self, name: str, size: int | None, dtypes: tuple[str, ...]) -> np.ndarray:
        """A tensor that says how others are read, of so many entries, flat."""
        told = self._told(name, None, dtypes)
        n = int(np.prod(told.shape, dtype=object))
        if n != size if size is not None else n > 10**6:
            fail(self.ck.path, f"it has {n} entries, not {size or 'a description'}", name)
        return self.array(name).reshape(-1)


def _type_of(make: Callable[..., Any], told: Sequence[Any]) -> Any:
    """The type of what is made of such arrays."""
    found = []

    def traced(*xs: Any) -> None:
        with Opened():
            found.append(_jax.typeof(make(*xs)))

    jax.eval_shape(traced, *told)
    return found[0]


_OWN = ("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx",
        "input_scale", "input_global_scale", "qzeros", "scales", "g_idx", "SCB", "weight_format")  # fmt: skip
"""The last names of tensors that describe a weight beside them."""
_PARTS = (*_OWN, "weight_packed", "qweight", "absmax")
_SCALES = ("float32", "float16", "bfloat16", "uint8", "float8_e8m0fnu", "float8_e4m3fn")
_POWERS = np.array([2.0 ** (i - 127) for i in range(255)] + [np.nan], np.float32)
"""What scales of 8 bits that are powers of two stand for."""


def _is_powers(s: Any) -> bool:
    return s.dtype.name in ("uint8", "float8_e8m0fnu")


def _bytes(s: Any) -> Any:
    """Scales that are powers of two, as their bytes."""
    return s if s.dtype == jnp.uint8 else lax.bitcast_convert_type(s, jnp.uint8)


def _scales(s: Any) -> Any:
    """Scales as float32, which holds those of fewer bits exactly."""
    return jnp.asarray(_POWERS)[_bytes(s)] if _is_powers(s) else s.astype(jnp.float32)


def _group(k: int, groups: int) -> int:
    if not groups or k % groups:
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


def _unpacked(words: Any, format: Format, n: int) -> Any:
    """Codes [rows, n] of rows of words, as the format packs them."""
    raw = words if words.dtype == jnp.uint8 else lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)
    if raw.shape[1] * 8 < n * format.bits:
        raise ValueError(f"{raw.shape[1]} bytes do not hold {n} codes of {format.bits} bits")
    size = packing.width(format, n)
    raw = jnp.pad(raw[:, :size], ((0, 0), (0, max(0, size - raw.shape[1]))))
    return packing.unpack(format, raw)[:, :n]


@dot_general.impl
def _(x: Float[Array, "*b"], w: Permuted, *, dimension_numbers: Any, **params: Any) -> Any:
    ((own, other), (_, batch)) = dimension_numbers
    if other != (w.ndim - 1,) or w.ndim != 2 or batch:
        raise Refused("only the inputs of a permuted matrix are contracted")
    x = jnp.take(x, w.order, axis=own[0])
    product = lambda x, w: dot_general.reference(x, w, dimension_numbers=dimension_numbers, **params)
    return lift(product, "allow")(x, w.inner)
