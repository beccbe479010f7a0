"""Quantizes the numbers of `inputs` by the libraries of others, and writes what they make of them into a folder.

    python tests/references/produce.py FOLDER [EARLIER]       and says what differs from an earlier one

    FOLDER/torchao.npz, ...          codes, scales and numbers, by name
    FOLDER/versions.json             of the libraries; why one could not be imported
    FOLDER/checkpoints/NAME/         config.json and model.safetensors as the library that owns the format writes them,
                                     and dense.npz, what it decodes them to

Needs what constraints.txt pins, on any Python from 3.11 on; neither typax nor JAX.
"""

import importlib.machinery
import importlib.metadata
import json
import logging
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import torch
from inputs import edges, normal
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from _quantized_reference import NF4

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def figures(x):
    """A tensor as an array; floats that NumPy lacks as their bits, or, of 16 bits, as float32."""
    if isinstance(x, np.ndarray):
        return x
    x = x.detach().cpu().contiguous()
    if x.dtype in (torch.bfloat16,):
        return x.float().numpy()
    if x.dtype.itemsize == 1 and x.dtype not in (torch.int8, torch.uint8, torch.bool):
        return x.view(torch.uint8).numpy()
    return x.numpy()


class Out:
    def __init__(self, folder):
        self.folder, self.dense = folder, {}

    def arrays(self, name, found):
        np.savez_compressed(self.folder / f"{name}.npz", **{k: figures(v) for k, v in found.items()})

    def checkpoint(self, name, config, tensors, dense, dtype="float32"):
        folder = self.folder / "checkpoints" / name
        folder.mkdir(parents=True)
        save_file({n: x.contiguous() for n, x in tensors.items()}, folder / "model.safetensors")
        told = {"torch_dtype": dtype, "quantization_config": config}
        (folder / "config.json").write_text(json.dumps(told, indent=1) + "\n")
        self.dense |= {f"{name}/{n}": figures(x) for n, x in dense.items()}


def of_torchao(out):
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    from torchao.quantization import quant_primitives as q
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    x = torch.from_numpy(edges(NF4))
    found = {}
    elements = {"mxfp8": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}
    for name, element in elements.items():
        for mode in mx_tensor.ScaleCalculationMode:
            scale, codes = mx_tensor.to_mx(x, element, 32, mode)
            found |= {f"{name} {mode.name.lower()} scale": scale, f"{name} {mode.name.lower()} codes": codes}
    scale, codes = mx_tensor.to_mx(x[:20].bfloat16(), torch.float8_e4m3fn, 32)
    found |= {"mxfp8 bfloat16 scale": scale, "mxfp8 bfloat16 codes": codes}
    scale, codes = nvfp4_quantize(x)
    found |= {"nvfp4_block scale": scale, "nvfp4_block codes": codes}
    usual = torch.from_numpy(normal(2, 16, 64))
    g = per_tensor_amax_to_scale(usual.abs().max())
    scale, codes = nvfp4_quantize(usual, per_tensor_scale=g)
    found |= {"nvfp4 scale": scale, "nvfp4 codes": codes, "nvfp4 global": g}
    for bits in (8, 4):
        low, high = -(1 << bits - 1), (1 << bits - 1) - 1
        scale, zero = q.choose_qparams_affine(x, q.MappingType.SYMMETRIC, (1, 64), torch.int8, low, high)
        codes = q.quantize_affine(x, (1, 64), scale, zero, torch.int8, low, high)
        found |= {f"int{bits} scale": scale, f"int{bits} codes": codes}
        scale, zero = q.choose_qparams_affine(x, q.MappingType.ASYMMETRIC, (1, 64), torch.uint8, 0, 2**bits - 1)
        codes = q.quantize_affine(x, (1, 64), scale, zero, torch.uint8, 0, 2**bits - 1)
        found |= {f"uint{bits} scale": scale, f"uint{bits} zero": zero, f"uint{bits} codes": codes}
    scale = q._choose_scale_float8(x, (1, 64), torch.float8_e4m3fn)
    found |= {"fp8 scale": scale, "fp8 codes": q._quantize_affine_float8(x, scale, torch.float8_e4m3fn)}
    nf4 = to_nf4(torch.from_numpy(edges(NF4)[:16]), 64, 16)
    found |= {"nf4 table": nf4.nf4, "nf4 codes": nf4.quantized_data, "nf4 dense": nf4.get_original_weight()}
    out.arrays("torchao", found)


def of_bitsandbytes(out):
    import bitsandbytes as bnb
    from bitsandbytes import functional as b

    x = torch.from_numpy(edges(NF4))
    found = {}
    for name, y in (("nf4", x), ("nf4 bfloat16", x[:20].bfloat16())):
        codes, state = b.quantize_4bit(y, blocksize=64, quant_type="nf4")
        found |= {f"{name} codes": codes, f"{name} scale": state.absmax, f"{name} dense": b.dequantize_4bit(codes, state)}
    found["nf4 table"] = state.code
    many = torch.from_numpy(normal(3, 280, 64))
    codes, state = b.quantize_4bit(many, blocksize=64, quant_type="nf4", compress_statistics=True)
    found |= {"nested codes": codes, "nested scale": state.absmax, "nested outer": state.state2.absmax,
              "nested offset": state.offset, "nested table": state.state2.code}  # fmt: skip
    usual = torch.from_numpy(normal(4, 4, 512))
    codes, state = b.quantize_blockwise(usual, blocksize=256)
    found |= {
        "dynamic8 codes": codes,
        "dynamic8 scale": state.absmax,
        "dynamic8 dense": b.dequantize_blockwise(codes, state),
    }
    codes, stats, _ = b.int8_vectorwise_quant(x[:16].half())
    found |= {"int8 codes": codes, "int8 stats": stats, "int8 dense": b.int8_vectorwise_dequant(codes, stats)}
    out.arrays("bitsandbytes", found)

    for name, nested, dtype in (("nf4", False, torch.float32), ("nf4-nested", True, torch.float32),
                                ("nf4-bfloat16", True, torch.bfloat16)):  # fmt: skip
        tensors, dense = {}, {}
        for i, (n, k, size) in enumerate(((24, 64, 64), (24, 352 if name == "nf4-nested" else 64, 32))):
            layer = bnb.nn.Linear4bit(k, n, bias=i == 0, compute_dtype=dtype, compress_statistics=nested, quant_type="nf4")
            w = torch.from_numpy(normal(10 + i, n, k)).to(dtype)
            layer.weight = bnb.nn.Params4bit(w, False, blocksize=size, compress_statistics=nested, quant_type="nf4")
            layer.weight = layer.weight.to("cpu")  # which quantizes it
            tensors |= {f"{i}.{key}": v for key, v in layer.state_dict().items()}
            dense[f"{i}.weight"] = b.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                  "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": str(dtype)[6:]}  # fmt: skip
        out.checkpoint(f"bitsandbytes-{name}", config, tensors, dense, str(dtype)[6:])
    layer = bnb.nn.Linear8bitLt(64, 24, bias=True, has_fp16_weights=False)
    w = torch.from_numpy(normal(12, 24, 64)).half()
    codes, stats, _ = b.int8_vectorwise_quant(w)
    layer.weight = bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=stats)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    dense = {"0.weight": b.int8_vectorwise_dequant(codes, stats)}
    out.checkpoint("bitsandbytes-int8", config, {f"0.{k}": v for k, v in layer.state_dict().items()}, dense)


def of_compressed_tensors(out):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    def qparams(w, args):
        """Scales and zero points of the layer's own observer, of the minimum and maximum."""
        n, k = w.shape
        g = None
        if args.strategy in ("group", "tensor_group"):
            rows = w.reshape(n, k // args.group_size, args.group_size)
        elif args.strategy == "channel":
            rows = w.reshape(n, 1, k)
        elif args.strategy == "tensor":
            rows = w.reshape(1, -1)
        else:
            a, c = args.block_structure
            pad = torch.nn.functional.pad(w, (0, -k % c, 0, -n % a))
            rows = pad.reshape(pad.shape[0] // a, a, -1, c).transpose(1, 2).flatten(-2)
        low, high = rows.amin(-1), rows.amax(-1)
        if args.strategy == "tensor_group":
            g = generate_gparam(w.min(), w.max())
        scale, zero = calculate_qparams(low, high, args, global_scale=g)
        return scale, zero, g

    def layer_of(form, args, w):
        scale, zero, g = qparams(w, args)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
        if g is not None:
            state["weight_global_scale"] = g
        owner = BaseCompressor.get_value_from_registry(form)
        made = owner.compress(state, scheme)
        return made, owner.decompress(made, scheme)["weight"]

    integers, floats = "int-quantized", "float-quantized"
    by = lambda size: {"strategy": "group", "group_size": size}
    mx = {**by(32), "type": "float", "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    nv = {"strategy": "tensor_group", "group_size": 16, "type": "float", "scale_dtype": torch.float8_e4m3fn}
    cases = {
        "int4-group": (4, "pack-quantized", by(32)),
        "int4-group-asymmetric": (4, "pack-quantized", {**by(32), "symmetric": False}),
        "int4-channel-asymmetric": (4, "pack-quantized", {"strategy": "channel", "symmetric": False}),
        "int3-channel": (3, "pack-quantized", {"strategy": "channel"}),
        "int8-packed": (8, "pack-quantized", by(16)),
        "int8": (8, integers, {"strategy": "channel"}),
        "int8-tensor": (8, integers, {"strategy": "tensor"}),
        "int8-group": (8, integers, by(16)),
        "int8-asymmetric": (8, integers, {"strategy": "channel", "symmetric": False}),
        "fp8-tensor": (8, floats, {"type": "float", "strategy": "tensor"}),
        "fp8-channel": (8, floats, {"type": "float", "strategy": "channel"}),
        "fp8-group": (8, floats, {"type": "float", **by(16)}),
        "fp8-block": (8, floats, {"type": "float", "strategy": "block", "block_structure": [16, 32]}),
        "nvfp4": (4, "nvfp4-pack-quantized", nv),
        "mxfp4": (4, "mxfp4-pack-quantized", mx),
        "mxfp8": (8, "mxfp8-quantized", mx),
    }
    for i, (name, (width, form, more)) in enumerate(cases.items()):
        w = torch.from_numpy(normal(20 + i, 24, 64))
        made, dense = layer_of(form, QuantizationArgs(num_bits=width, **more), w)
        weights = QuantizationArgs(num_bits=width, **more).model_dump(mode="json")
        config = {"quant_method": "compressed-tensors", "format": form,
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
        tensors = {f"0.{k}": v for k, v in made.items()}
        out.checkpoint(f"compressed-tensors-{name}", config, tensors, {"0.weight": dense}, str(dense.dtype)[6:])
    layers, dense, groups = {}, {}, {}
    for i, (name, bits) in enumerate((("a", 4), ("b", 8))):
        args = QuantizationArgs(num_bits=bits, strategy="group", group_size=16)
        made, dense[f"{name}.weight"] = layer_of("pack-quantized", args, torch.from_numpy(normal(40 + i, 16, 32)))
        layers |= {f"{name}.{k}": v for k, v in made.items()}
        groups[f"group_{i}"] = {"targets": [f"re:{name}"], "weights": args.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    out.checkpoint("compressed-tensors-int4-and-int8", config, layers, dense)


def of_transformers(out):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    for name, (n, k), block in (("fp8", (24, 64), [16, 32]), ("fp8-uneven", (20, 50), [16, 32])):
        w = torch.from_numpy(normal(50, n, k)).mul(100).to(torch.float8_e4m3fn)
        s = torch.from_numpy(normal(51, -(-n // block[0]), -(-k // block[1]))).abs()
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
        dense = {"0.weight": _dequantize_fp8_weight(w, s, block, torch.float32)}
        out.checkpoint(f"transformers-{name}", config, {"0.weight": w, "0.weight_scale_inv": s}, dense)


def parameters(seed, groups, n, levels):
    """Scales and zero points of a layer, [groups, n]."""
    scales = np.abs(normal(seed, groups, n)) / levels + np.float32(0.01)
    zeros = np.random.PCG64(seed).random_raw(groups * n).reshape(groups, n) % np.uint64(levels)
    return torch.from_numpy(scales).half().float(), torch.from_numpy(zeros.astype(np.int64) + 1)


def of_auto_round(out):
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    n, k, group = 32, 64, 32
    for name, module, bits in (("v1", qlinear_torch_zp, 4), ("v2", qlinear_torch, 4), ("v1-8bits", qlinear_torch_zp, 8),
                               ("v1-3bits", qlinear_torch_zp, 3), ("v1-2bits", qlinear_torch_zp, 2)):  # fmt: skip
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = torch.from_numpy(normal(60, n, k))
        scales, zeros = parameters(61, k // group, n, 2**bits - 1)
        layer = module.QuantLinear(bits, group, k, n, False)
        layer.device = "cpu"  # which one of the two reads, and neither sets
        layer.pack(linear, scales.t(), zeros.t().float(), device="cpu")
        dense = layer(torch.eye(k, dtype=torch.float16)).t()
        tensors = {f"0.{key}": v for key, v in layer.state_dict().items()}
        tensors["0.g_idx"] = torch.arange(k, dtype=torch.int32) // group
        version = "gptq_v2" if name == "v2" else "gptq"
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False,
                  "checkpoint_format": version}  # fmt: skip
        out.checkpoint(f"gptq-{name}", config, tensors, {"0.weight": dense}, "float16")


def of_awq(out):
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    n, k, group = 32, 64, 32
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data = torch.from_numpy(normal(70, n, k)).half()
    scales, zeros = parameters(71, k // group, n, 15)
    s = scales.half()
    codes = torch.from_numpy((np.random.PCG64(72).random_raw(n * k) % np.uint64(16)).astype(np.int64).reshape(n, k))
    wide = lambda x: x.repeat_interleave(group, 0).t()
    linear.weight.data = ((codes - wide(zeros)) * wide(s.float())).half()
    layer = WQLinear_GEMM.from_linear(linear, 4, group, scales=s, zeros=zeros)
    dense = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, group).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    tensors = {f"0.{key}": v for key, v in layer.state_dict().items()}
    out.checkpoint("awq", config, tensors, {"0.weight": dense}, "float16")


LIBRARIES = {
    "torchao": of_torchao, "bitsandbytes": of_bitsandbytes, "compressed-tensors": of_compressed_tensors,
    "transformers": of_transformers, "auto-round": of_auto_round, "autoawq": of_awq,
}  # fmt: skip


def entries(folder):
    """What is in a folder: arrays and tensors one by one."""
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                yield from ((f"{name}: {k}", (x.dtype, x.shape, x.tobytes())) for k, x in arrays.items())
        elif path.suffix == ".safetensors":
            found = {k: figures(x) for k, x in load_file(path).items()}
            yield from ((f"{name}: {k}", (x.dtype, x.shape, x.tobytes())) for k, x in found.items())
        else:
            yield name, path.read_text()


def different(folder, earlier):
    """The names of what two folders do not share in every bit."""
    new, old = dict(entries(folder)), dict(entries(earlier))
    return sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))


def main(folder, earlier=None):
    out, versions, failed = Out(Path(folder)), {}, {}
    out.folder.mkdir(parents=True)
    torch.manual_seed(0)  # layers begin with biases
    # auto-round and autoawq import `datasets` for calibration, which packing has no use for
    sys.modules.setdefault("datasets", _Unused("datasets"))
    for library, f in LIBRARIES.items():
        try:
            f(out)
        except ImportError as e:
            failed[library] = str(e)
        else:
            versions[library] = importlib.metadata.version(library)
    np.savez_compressed(out.folder / "checkpoints" / "dense.npz", **out.dense)
    versions = {"torch": torch.__version__.partition("+")[0], **versions}
    told = json.dumps({"versions": versions, "not imported": failed}, indent=1)
    (out.folder / "versions.json").write_text(told + "\n")
    print(told)
    changed = different(folder, earlier) if earlier else []
    if earlier:
        print("\n".join([f"differs from {earlier}:", *changed]) if changed else f"the same as {earlier}, in every bit")
    return int(bool(failed or changed))


class _Unused(types.ModuleType):
    __path__ = ()
    __spec__ = importlib.machinery.ModuleSpec("datasets", None)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
