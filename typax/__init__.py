"""typax: hi types for JAX, each a class statement, with every transformation derived from it."""

from typax import _blocks as _blocks
from typax import _convolutions as _convolutions
from typax import _factors as _factors
from typax import debug, hijax, io
from typax._arithmetic import divide, multiply
from typax._callbacks import io_callback, pure_callback
from typax._codes import dot_general
from typax._collectives import all_gather, all_to_all, pmean, ppermute, psum
from typax._control_flow import associative_scan, cond, fori_loop, map, scan, switch, vmap, while_loop
from typax._derivatives import hessian, jacfwd, jacrev, stop_gradient
from typax._export import Exported, deserialize, export
from typax._indexing import concatenate, dynamic_slice, split, stack, take, where
from typax._jit import jit
from typax._lift import explain, lift
from typax._moves import reshard, unshare
from typax._op import Op, Refused, op
from typax._optimize import apply_updates, optimizer, tangent_zeros
from typax._placement import device_put, shard_map, with_sharding_constraint
from typax._policies import Componentwise, Dense, Itself, NoTangent, retract
from typax._receipt import Line, Receipt
from typax._recipe import quantize_tree
from typax._rows import gather, transpose
from typax._shapes import expand_dims, moveaxis, reshape, squeeze, swapaxes
from typax._show import show
from typax._spec import Axes, Pspec
from typax._structural import dense
from typax._tangent import Tangent
from typax._type import ValueType
from typax._value import Value
from typax.lowrank import DenseLowRank, FactoredRank1, LowRank, Rank1, factors, outer
from typax.quantized import QArray, matmul, quantize, requantize
from typax.sums import Sum
from typax.tup import Tup, tup

__version__ = "0.1.0"

__all__ = [
    "Axes",
    "Componentwise",
    "Dense",
    "DenseLowRank",
    "Exported",
    "FactoredRank1",
    "Itself",
    "Line",
    "LowRank",
    "NoTangent",
    "Op",
    "Pspec",
    "QArray",
    "Rank1",
    "Receipt",
    "Refused",
    "Sum",
    "Tangent",
    "Tup",
    "Value",
    "ValueType",
    "all_gather",
    "all_to_all",
    "apply_updates",
    "associative_scan",
    "concatenate",
    "cond",
    "debug",
    "dense",
    "deserialize",
    "device_put",
    "divide",
    "dot_general",
    "dynamic_slice",
    "expand_dims",
    "explain",
    "export",
    "factors",
    "fori_loop",
    "gather",
    "hessian",
    "hijax",
    "io",
    "io_callback",
    "jacfwd",
    "jacrev",
    "jit",
    "lift",
    "map",
    "matmul",
    "moveaxis",
    "multiply",
    "op",
    "optimizer",
    "outer",
    "pmean",
    "ppermute",
    "psum",
    "pure_callback",
    "quantize",
    "quantize_tree",
    "requantize",
    "reshard",
    "reshape",
    "retract",
    "scan",
    "shard_map",
    "show",
    "split",
    "squeeze",
    "stack",
    "stop_gradient",
    "swapaxes",
    "switch",
    "take",
    "tangent_zeros",
    "transpose",
    "tup",
    "unshare",
    "vmap",
    "where",
    "while_loop",
    "with_sharding_constraint",
]
