"""``jax.debug`` for values: ``typax.debug.print("{q}", q=q)`` and ``typax.debug.callback``."""

from typax._callbacks import debug_callback as callback
from typax._callbacks import debug_print as print

__all__ = ["callback", "print"]
