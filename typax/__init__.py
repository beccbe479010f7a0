"""typax: hi types for JAX, each a class statement, with every transformation derived from it."""

from typax import hijax
from typax._codes import dot_general, gather, transpose
from typax._lift import Receipt, lift
from typax._moves import reshard, unshare
from typax._op import Op, op
from typax._policies import Componentwise, Dense, Itself, NoTangent, retract
from typax._show import show
from typax._spec import Axes, Pspec
from typax._structural import dense
from typax._tangent import Tangent
from typax._type import ValueType
from typax._value import Value
from typax.quantized import QArray, matmul, quantize

__version__ = "0.1.0"

__all__ = [
    "Axes",
    "Componentwise",
    "Dense",
    "Itself",
    "NoTangent",
    "Op",
    "QArray",
    "Pspec",
    "Receipt",
    "Tangent",
    "Value",
    "ValueType",
    "dense",
    "dot_general",
    "gather",
    "hijax",
    "lift",
    "matmul",
    "op",
    "quantize",
    "reshard",
    "retract",
    "show",
    "transpose",
    "unshare",
]
