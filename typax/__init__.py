"""typax: hi types for JAX, each a class statement, with every transformation derived from it."""

from typax._op import Op, op
from typax._structural import dense
from typax._type import Axes, ValueType
from typax._value import Value
from typax.quantized import QArray, dot_general, matmul, quantize

__version__ = "0.1.0"

__all__ = ["Axes", "Op", "QArray", "Value", "ValueType", "dense", "dot_general", "matmul", "op", "quantize"]
