"""Whole programs, each run by a test: `python -m examples.NAME` from the root of the repository."""
