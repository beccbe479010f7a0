# Every target sets up what it needs, on a fresh clone too: see scripts/bootstrap.sh.
#   make demo ARGS="..."     arguments for the demo           make test ARGS="-k vmap"   for every pytest
#   make test JOBS=8         pytest's processes               PYTHON=/path/to/python     instead of a search

PY = PYTHONPATH= .venv/bin/python
ARGS =
JOBS = 2

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: env  ## a sentence encoder and a language model on quantized weights, in some minutes
	@$(PY) -m examples.demo $(ARGS)

demo-full: env  ## the same with more of the novel
	@$(PY) -m examples.demo --full $(ARGS)

test:  ## lint, types, all tests on the newest JAX, the core ones on the older
	@PYTHONPATH= JOBS=$(JOBS) sh scripts/test.sh $(ARGS)

lint: env  ## ruff
	@$(PY) -m ruff check .

fix: env  ## what ruff can put right by itself
	@$(PY) -m ruff check --fix .

typecheck: env  ## basedpyright
	@$(PY) -m basedpyright

docs: env  ## build the reference in build/docs, and run the code blocks of README.md and docs/
	@JAX_PLATFORMS=cpu $(PY) tests/_reference.py build/docs
	@JAX_PLATFORMS=cpu $(PY) -m pytest -n $(JOBS) tests/test_docs_blocks.py $(ARGS)

laws: env  ## every law on every shipped type and op, and on the gallery; writes a table of docs/laws.md
	@JAX_PLATFORMS=cpu PYTHONPATH=. .venv/bin/python tests/_shipped.py

mutants: env  ## every mutant of every shipped type and op, against the laws; writes a table of docs/laws.md
	@JAX_PLATFORMS=cpu PYTHONPATH=. .venv/bin/python tests/_mutate.py --write

bench: env  ## what calls, tracing, products, quantizing and the import cost, each table in one run
	@bad=0; for table in eager jit trace load lift matmul quantize; do \
		echo; JAX_PLATFORMS=cpu $(PY) -m benchmarks.$$table $(ARGS) || bad=1; done; exit $$bad

references: env  ## what PyTorch's libraries of quantization make of the same numbers, in an environment of their own
	@sh scripts/references.sh $(ARGS)

bench-torchao:  ## torchao's int8 products, times PyTorch's of float32; after make references
	@.venv-references/bin/python benchmarks/of_torchao.py $(ARGS)

matrix: env  ## which calls work, on every supported JAX: tests/data/matrix.json and the table of docs/limits.md
	@sh scripts/matrix.sh

lock:  ## pin every package anew, each at its newest
	@sh scripts/lock.sh

env:  ## only the environment, .venv
	@sh scripts/bootstrap.sh

clean:  ## remove the environments and all that was built
	rm -rf .venv .venv-jax-* .venv-references .uv build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo demo-full test lint fix typecheck docs laws mutants bench bench-torchao references matrix lock env clean
