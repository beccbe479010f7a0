"""Recipes: which leaves become quantized."""

import jax
import jax.numpy as jnp
import pytest

import typax
from typax import _recipe

pytestmark = pytest.mark.core


def params():
    x = jax.random.normal(jax.random.key(0), (8, 4, 16))
    return {
        "embed": {"embedding": x[0]},
        "layers": [
            {
                "attn": {
                    "query": {"kernel": x, "bias": x[0]},
                    "out": {"kernel": jnp.moveaxis(x, 0, -1)},
                },
                "mlp": {"kernel": x[0], "bias": x[0, 0]},
                "conv": {"kernel": x[None]},
                "norm": {"scale": x[0, 0]},
            }
        ],
        "head": {"weight": x[1]},
        "step": jnp.int32(3),
        "name": "m",
    }


def test_a_format_for_all():
    tree, report = typax.quantize_tree(params(), "int8")
    got = {t.path: t.after for t in report.changed}
    assert got == {
        "embed.embedding": "q8[4,16]",
        "layers.0.attn.query.kernel": "q8<axis=(-3)>[8,4,16]",
        "layers.0.attn.out.kernel": "q8<axis=(-3,-2)>[4,16,8]",
        "layers.0.mlp.kernel": "q8t[4,16]",
        "layers.0.conv.kernel": "q8<axis=(-4,-3,-2)>[1,8,4,16]",
        "head.weight": "q8[4,16]",
    }
    assert {t.path: t.why for t in report.left} == {
        "layers.0.attn.query.bias": "it is called bias",
        "layers.0.mlp.bias": "its rank is 1",
        "layers.0.norm.scale": "its rank is 1",
        "step": "it is no array of floats",
    }
    assert tree["name"] == "m" and not report.unmatched
    assert report.bytes_before == sum(x.nbytes for x in jax.tree.leaves(params()) if hasattr(x, "nbytes"))
    assert report.bytes_after == sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))
    assert "layers.0.mlp.kernel" in str(report) and "q8t[4,16]" in str(report)
    again, report = typax.quantize_tree(tree, "int8")
    assert not report.changed and {t.why for t in report.left} >= {"it is a value already"}
    assert jax.tree.structure(again) == jax.tree.structure(tree)


@pytest.mark.parametrize(
    ("name", "shape", "bias", "axes"),
    [
        ("kernel", (3, 16, 4, 8), (3, 4, 8), "-3"),  # layers of 16 in, 4 x 8 out
        ("kernel", (3, 4, 8, 16), (3, 16), "-3,-2"),
        ("kernel", (16, 4, 8), (4, 8), "-3"),
        ("kernel", (5, 16, 8), (8,), "-3,-2"),  # a convolution
        ("kernel", (5, 16, 8), (5, 8), "-2"),
        ("kernel", (2, 3, 3, 4, 8), (2, 8), "-4,-3,-2"),
        ("weight", (5, 4, 3), (5, 1), "-2,-1"),
        ("weight", (5, 4, 3), (5,), "-2,-1"),
        ("weight", (5, 4, 3), (5, 4), "-1"),
        ("weight", (2, 5, 4, 3), (2, 5, 1), "-2,-1"),
        ("weight", (5, 4, 3), (7,), "-1"),  # not of this weight
    ],
)
def test_a_bias_tells_what_is_contracted(name, shape, bias, axes):
    tree = {"layer": {name: jnp.ones(shape), "bias": jnp.ones(bias)}}
    made = typax.quantize(tree["layer"][name], axis=tuple(map(int, axes.split(","))))
    assert jax.typeof(typax.quantize_tree(tree)[0]["layer"][name]) == jax.typeof(made)


def test_groups_are_of_inputs_and_no_larger_than_these():
    tree = {"a": {"weight": jnp.ones((5, 16, 3, 3))}, "b": {"kernel": jnp.ones((3, 3, 4, 8))}, "c": jnp.ones((5, 4))}
    made, report = typax.quantize_tree(tree, {"format": "int4", "group": 8})
    assert [t.after for t in report.changed] == ["q4g8<axis=(-3)>[5,16,3,3]", "q4<axis=(-4,-3,-2)>[3,3,4,8]", "q4g4[5,4]"]
    assert jnp.array_equal(typax.dense(made["c"]), typax.dense(typax.quantize(tree["c"], "int4", group=8)))


def test_vectors_in_disguise_are_left():
    tree = {"cls": jnp.ones((1, 1, 8)), "w": jnp.ones((2, 8))}
    _, report = typax.quantize_tree(tree)
    assert [(t.path, t.why) for t in report.left] == [("cls", "it is a vector")] and [t.path for t in report.changed] == [
        "w"
    ]
    assert typax.quantize_tree(tree, [("cls", "int8")])[1].changed  # named whole, so that it is meant


def test_the_first_rule_that_matches_decides():
    recipe = [
        ("head", None),
        ("layers.*.mlp", {"format": "int4", "group": 4}),
        ("layers.0.attn.query.bias", "int8"),
        ("layers.*.attn", lambda x: x.astype(jnp.bfloat16)),
        ("decoder.*", "int8"),
        ("embed", {"format": "int8", "axis": None}),
    ]
    _, report = typax.quantize_tree(params(), recipe)
    got = {t.path: t.after for t in report.changed}
    assert got.pop("layers.0.attn.query.kernel") == "bfloat16[8,4,16]"
    assert got == {
        "layers.0.attn.out.kernel": "bfloat16[4,16,8]",
        "layers.0.attn.query.bias": "q8[4,16]",  # named whole, so that it is meant
        "layers.0.mlp.kernel": "q4g4t[4,16]",
        "embed.embedding": "q8<axis=(-2,-1)>[4,16]",
    }
    why = {t.path: t.why for t in report.left}
    assert why["head.weight"] == "the rule says so" and why["layers.0.conv.kernel"] == "no rule matches it"
    assert report.unmatched == ("decoder.*",)
    assert typax.quantize_tree(params(), dict(recipe))[1] == report
    assert "The pattern 'decoder.*' matched nothing." in str(report)


def test_types_become_types():
    types = jax.eval_shape(lambda: {k: v for k, v in params().items() if k != "name"})
    tree, report = typax.quantize_tree(types, "int8")
    made, same = typax.quantize_tree(params(), "int8")
    assert report == same
    assert tree["head"]["weight"] == jax.typeof(made["head"]["weight"])


def test_a_recipe_in_a_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[[rule]]\npaths = ["layers.*.mlp", "head"]\nformat = "int4"\ngroup = 4\n'
        '[[rule]]\npaths = "layers"\nformat = "none"\n'
        '[[rule]]\npaths = "*"\nformat = "int8"\n'
    )
    tree, _ = typax.quantize_tree(params(), str(path))
    assert str(jax.typeof(tree["head"]["weight"])) == "q4g4[4,16]"
    assert str(jax.typeof(tree["embed"]["embedding"])) == "q8[4,16]"
    assert isinstance(tree["layers"][0]["conv"]["kernel"], jax.Array)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x =", "is no TOML"),
        ("x = 1", r"a recipe is a list of \[\[rule\]\] tables"),
        ('[[rule]]\nformat = "int8"', "rule 1 has no paths"),
        ('[[rule]]\npaths = 3\nformat = "int8"', "paths must be a pattern"),
        ('[[rule]]\npaths = "*"', "names no format"),
        ('[[rule]]\npaths = "*"\nformat = "int8"\ngruop = 3', "there is no argument 'gruop' of quantize"),
        ('[[rule]]\npaths = "*"\nformat = "int99"', "no format is called 'int99'"),
    ],
)
def test_a_recipe_that_cannot_be_understood(tmp_path, text, match):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError, match=match):
        _recipe.rules_of(str(tmp_path / "r.toml"))


def test_other_recipes_that_cannot_be_understood():
    for recipe, match in [([("*",)], "made of pairs"), ([("*", 3)], "neither a format"), ("no.toml", "No such file")]:
        with pytest.raises(ValueError, match=match):
            typax.quantize_tree({}, recipe)
    with pytest.raises(ValueError, match=r"step is int32\[\], and only arrays of floats"):
        typax.quantize_tree(params(), [("step", "int8")])
    with pytest.raises(ValueError, match=r"head\.weight, float32\[4,16\]: .*axis=7"):
        typax.quantize_tree(params(), [("head", {"format": "int8", "axis": 7})])


def test_functions_that_make_no_array_of_the_leaf():
    def fails(x):
        raise KeyError("w")

    for f, says in [
        (fails, r"head\.weight, float32\[4,16\]: the function of the rule 'head\*' raised KeyError: 'w'"),
        (lambda x: None, r"head\.weight, .* 'head\*' returned None; return an array or a value of the shape \[4, 16\]"),
        (lambda x: "int8", "returned 'int8'"),
        (lambda x: x.T, r"returned float32\[16,4\]"),
    ]:
        with pytest.raises(ValueError, match=says):
            typax.quantize_tree(params(), [("head*", f)])
