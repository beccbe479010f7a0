"""`Receipt`: what a lifted program did with each hi operand.

receipt = typax.explain(f)(*args)         a table: place, operands, how it ran, bytes, multiplications
assert receipt.densified == []
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from typax import _jax
from typax._interpret import Event
from typax._type import dense_type


@dataclass(frozen=True)
class Line:
    """One equation of the program.

    Attributes:
      primitive: its name.
      operands: the types of its operands, as they print.
      ran: ``"native"`` by an op; ``"densified"``: ``became`` was made dense for it; ``"plain"``: a product of arrays.
      became: the type that was made dense, and ``why``, if it was not for want of an op.
      place: file, line and function.
      scope: the named scopes that it is in.
      path: of the argument that its hi operand came from, if the lifted function was asked to follow it.
      bytes: of its operands; if it was densified, of the dense array.
      flops: of a product, each time it runs.
      times: how often it runs: in a scan its length; in a while loop, once for each trip.
    """

    primitive: str
    operands: tuple[str, ...]
    ran: Literal["native", "densified", "plain"]
    became: str | None = None
    why: str = ""
    place: tuple[str, int, str] | None = None
    scope: str = ""
    path: str | None = None
    bytes: int = 0
    flops: int = 0
    times: int = 1

    def __str__(self) -> str:
        if self.ran != "densified":
            return f"{self.primitive}({', '.join(self.operands)})"
        why = f" {self.why}" if self.why else ""
        at = f", at {self.where}" if self.place is not None else ""
        return f"{self.primitive} makes {self.became} dense ({self.bytes} bytes){why}{at}"

    @property
    def where(self) -> str:
        """Its place, as ``file:line (function)``."""
        if self.place is None:
            return ""
        file, line, function = self.place
        return f"{os.path.basename(file)}:{line} ({function})"


def line_of(event: Event) -> Line:
    """What a receipt says of an event."""
    if event.dense is not None:
        size = _dense_bytes(event.dense)
        ran, became = "densified", str(event.dense)
    else:
        size, became = sum(map(nbytes, event.types)), None
        ran = "plain" if event.plain else "native"
    types = tuple(map(str, event.types))
    return Line(
        event.primitive, types, ran, became, event.why, event.place, event.scope, event.path, size, event.flops, event.times
    )  # fmt: skip


def nbytes(ty: Any) -> int:
    """Bytes of what a type lowers to."""
    return sum(lo.size * lo.dtype.itemsize for lo in (ty.lo_ty() if _jax.is_hi(ty) else [ty]))


def _dense_bytes(ty: Any) -> int:
    dense = dense_type(ty)
    return dense.size * dense.dtype.itemsize


@dataclass
class Receipt:
    """What ran natively and what became dense, when a lifted function last ran or was last traced.

    Attributes:
      lines: a `Line` for each equation with a hi operand, and for each product of arrays. Equations of a loop's body, of
        branches and of nested calls are there once, as in the program's jaxpr.
      held: bytes of the hi arguments.
      stood_for: bytes of what these stand for.
    """

    lines: list[Line] = field(default_factory=list)
    held: int = 0
    stood_for: int = 0

    def record(self, event: Event) -> None:
        """Note what became of an equation."""
        self.lines.append(line_of(event))

    def begin(self, types: Sequence[Any]) -> None:
        """A new run, on arguments of these types."""
        self.lines.clear()
        hi = [t for t in types if _jax.is_hi(t)]
        self.held, self.stood_for = sum(map(nbytes, hi)), sum(map(_dense_bytes, hi))

    @property
    def natives(self) -> list[str]:
        """A line for each equation that an op has run: the primitive with the types of its operands."""
        return [str(x) for x in self.lines if x.ran == "native"]

    @property
    def densified(self) -> list[str]:
        """A line for each operand that became dense, with its place in the program."""
        return [str(x) for x in self.lines if x.ran == "densified"]

    @property
    def native_share(self) -> float:
        """Of the multiplications of all products, those that ran natively on hi operands: 0 to 1; 1 if there are none."""
        work = {
            ran: sum(x.flops * x.times for x in self._once() if x.ran == ran) for ran in ("native", "densified", "plain")
        }
        return work["native"] / sum(work.values()) if any(work.values()) else 1.0

    def _once(self) -> list[Line]:
        """The lines, without the second of an equation that made two operands dense."""
        same = lambda x: (x.primitive, x.operands, x.place)
        pairs = zip([None, *self.lines], self.lines, strict=False)
        return [x for a, x in pairs if a is None or {a.ran, x.ran} != {"densified"} or same(a) != same(x)]

    def as_rows(self) -> list[tuple[str, str, str, str, str]]:
        """Cells for a table; lines that are alike are one row, with their number."""
        groups: dict[Any, list[Line]] = {}
        for x in self.lines:
            groups.setdefault(
                (x.where, x.scope, str(x) if x.ran == "densified" else (x.primitive, x.operands), x.ran), []
            ).append(x)
        rows = []
        for (where, scope, _, ran), xs in groups.items():
            x, n = xs[0], sum(x.times for x in xs)
            what = f"{x.primitive}({', '.join(x.operands)})" + (f" x{n}" if n > 1 else "")
            ran = ran + (f" {x.became}" if x.became else "") + (f" {x.why}" if x.why else "")
            place = " ".join(filter(None, (scope, where)))
            rows.append((place, what, ran, f"{x.bytes * n:,}", f"{x.flops * n:,}" if x.flops else ""))
        return rows

    @property
    def summary(self) -> str:
        """The totals, as one line."""
        counts = {ran: sum(x.ran == ran for x in self.lines) for ran in ("native", "densified", "plain")}
        work = any(x.flops for x in self.lines)
        share = f"{100 * self.native_share:.1f}% of the multiplications ran natively" if work else "there are no products"
        held = f"arguments: {self.held:,} bytes for {self.stood_for:,}" if self.stood_for else "no argument is a hi value"
        ran = f"{counts['native']} native, {counts['densified']} densified, {counts['plain']} products of arrays"
        return f"{ran}; {share}; {held}"

    def __str__(self) -> str:
        rows = [_HEADINGS, *self.as_rows()]
        widths = [max(len(r[i]) for r in rows) for i in range(len(_HEADINGS))]
        lines = [
            "  ".join(c.rjust(w) if i > 2 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self.summary])

    def __rich__(self) -> Any:
        import rich.console
        import rich.markup
        import rich.table

        table = rich.table.Table(caption=self.summary)
        for i, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="right" if i > 2 else "left", overflow="fold")
        for row in self.as_rows():
            style = "red" if row[2].startswith("densified") else "dim" if row[2] == "plain" else None
            table.add_row(*map(rich.markup.escape, row), style=style)
        return table

    def to_json(self) -> str:
        """The lines and totals as JSON."""
        totals = {"held": self.held, "stood_for": self.stood_for, "native_share": self.native_share}
        return json.dumps({"lines": [asdict(x) for x in self.lines], **totals}, indent=1)

    def plot(self, path: str | Path | None = None) -> Any:
        """The multiplications of each equation, by how it ran: a matplotlib figure, also written to ``path``.

        Raises:
          ImportError: without matplotlib, which the extra ``typax[plot]`` brings.
        """
        try:
            from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError("Receipt.plot needs matplotlib: pip install 'typax[plot]'") from None
        rows: dict[str, list[Any]] = {}
        for x in self._once():
            if x.flops:
                rows.setdefault(f"{x.primitive}({', '.join(x.operands)})", [x.ran, 0])[1] += x.flops * x.times
        figure = Figure(figsize=(9, 1 + 0.3 * max(1, len(rows))), layout="constrained")
        axes = figure.subplots()
        names, colours = list(rows)[::-1], {"native": "tab:green", "densified": "tab:red", "plain": "tab:gray"}
        axes.barh(names, [rows[n][1] for n in names], color=[colours[rows[n][0]] for n in names])
        axes.set_xlabel("multiplications, twice")
        axes.set_title(self.summary, fontsize=8, wrap=True)
        if path is not None:
            figure.savefig(path)
        return figure


_HEADINGS = ("place", "equation", "ran", "bytes", "flops")
