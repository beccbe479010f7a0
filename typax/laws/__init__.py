"""Laws: what must hold of every type and op, checked on examples that follow from the declaration.

    result = typax.laws.check(QArray, ops=[typax.quantize, typax.matmul])
    print(result)                        a table of laws and subjects: pass, FAIL, or - (not applicable), with the reasons
    assert result.ok

`values` and `operands` are the hypothesis strategies of the examples, for tests of one's own.  Importing ``typax`` does not
import this package; it needs the extra ``typax[laws]``.
"""

try:
    import hypothesis as _
except ImportError as e:
    raise ImportError("typax.laws needs hypothesis: pip install 'typax[laws]'") from e

from typax.laws import identity, mapping, tangents, ops, derivatives, batching, sharding, exporting  # isort: skip
from typax.laws import _law
from typax.laws._draw import operands, values
from typax.laws._law import Broken, Call, Law, NotApplicable, Values
from typax.laws._run import Cell, Result, check, check_cell, settled
from typax.laws._subjects import Subject, concerns, in_module, pairs, subjects, written_by_hand

LAWS = _law.LAWS
"""All laws by name, in the order of the table."""

__all__ = [
    "LAWS",
    "Broken",
    "Call",
    "Cell",
    "Law",
    "NotApplicable",
    "Result",
    "Subject",
    "Values",
    "check",
    "check_cell",
    "concerns",
    "in_module",
    "operands",
    "pairs",
    "settled",
    "subjects",
    "values",
    "written_by_hand",
]
