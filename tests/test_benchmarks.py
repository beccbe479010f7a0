"""The benchmarks compare like with like, and run."""

import jax
import numpy as np
import pytest

from benchmarks import _measure, eager, jit, lift, load, matmul, quantize, trace


def arrays(result):
    opened = jax.tree.map(lambda v: v.components()[:2] if hasattr(v, "components") else v, result)
    return jax.tree.leaves(opened)


def test_both_sides_of_a_case_compute_the_same():
    for name, (f, g) in eager.cases().items():
        got, want = arrays(f()), arrays(g())
        assert len(got) == len(want), name
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


def test_medians_are_of_the_same_round():
    times = _measure.Times({"a": [2.0, 40.0, 6.0], "b": [1.0, 10.0, 2.0]})
    assert (times.us("a"), times.ratio("a", "b"), times.more("a", "b")) == (6, 3, 4)


def test_every_column_of_a_row_computes_the_same():
    for name, columns in jit.cases([1, 3]).items():
        want = jax.tree.leaves(columns["arrays"]())
        for column, f in columns.items():
            got = arrays(f())
            assert len(got) == len(want), (name, column)
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)), (name, column)
    for name, forms in trace.programs(2).items():
        made = {form: make()(*args) for form, (make, args) in forms.items()}
        np.testing.assert_allclose(made["typax"], made["raw hijax"], rtol=1e-5, err_msg=name)
        if name != "gradient by w":  # of arrays it is by the scales
            np.testing.assert_allclose(made["typax"], made["arrays"], rtol=1e-5, err_msg=name)


def test_they_print_a_row_for_each_case(capsys, monkeypatch):
    eager.main(["--rounds", "1", "--calls", "2"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in eager.cases()) and "the same arithmetic on arrays, jitted" in printed
    jit.main(["--rounds", "1", "--calls", "2", "--counts", "1"])
    assert "1 hi, hi results" in capsys.readouterr().out
    trace.main(["--rounds", "1", "--ops", "2"])
    assert "gradient by w" in capsys.readouterr().out
    monkeypatch.setattr(load, "seconds", lambda more: 1.5 if more else 1.0)
    assert load.main(["--rounds", "1"]) == 1 and "import typax 0.50 s more" in capsys.readouterr().out


def test_that_of_lift_prints_a_row_for_each_model(capsys):
    lift.main(["--rounds", "1", "--only", "experts"])
    printed = capsys.readouterr().out
    assert "mixture of experts" in printed and "tracing at most 2 times" in printed and "MiniLM" not in printed


def test_qwix_computes_the_same(standard_promotion):
    pytest.importorskip("qwix")
    x, w = matmul.normal(0, 4, 64), matmul.normal(1, 64, 32)
    for dynamic in (False, True):
        f = matmul.qwix_int8(x, w, dynamic)
        assert f is not None
        assert np.all(np.abs(f() - x @ w) <= 0.02 * (np.abs(x) @ np.abs(w)))


def test_products_and_quantizing_print_ratios(capsys, standard_promotion):
    few = ["--rounds", "1", "--calls", "1"]
    matmul.main([*few, "--shapes", "64x32", "--rows", "2", "8", "--only", "int8", "by 128", "--products-alone"])
    printed = capsys.readouterr().out
    assert "64 x 32" in printed and "naive int8" in printed and "nf4" not in printed
    assert ("qwix int8, dynamic" in printed) == (matmul.qwix is not None) == ("is not installed" not in printed)
    assert "int4 by 128, float to 8 rows, then bfloat16" in printed and "(0.25)" in printed  # what is wanted, at 8 rows
    quantize.main([*few, "--shape", "4x128"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in quantize.FORMATS) and quantize.READ in printed
