"""Each prints ratios measured in one run: `python -m benchmarks.NAME`, or `make bench` for all."""
