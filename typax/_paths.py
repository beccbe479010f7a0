"""Paths of leaves in trees, as texts: the keys joined by dots, ``layers.0.w``."""

import fnmatch
from typing import Any

import jax


def dotted(keys: Any) -> str:
    """The path of a leaf, of which these are the keys."""
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern, in which ``*`` stands for anything, is one of a path or of something that it is in.

    A name that has ``[``, ``*`` or ``?`` in it is also a pattern of itself.
    """
    return (
        f"{path}.".startswith(f"{pattern}.")
        or fnmatch.fnmatchcase(path, pattern)
        or fnmatch.fnmatchcase(path, f"{pattern}.*")
    )
