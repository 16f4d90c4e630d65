"""How a recipe trains, read from its source without running it."""

from __future__ import annotations

import pytest

from workbench import catalog
from workbench.cookbook import builtin
from workbench.cookbook.recipe import misfit, use_of

PREPARE = 'model = wb.prepare(model)\nwb.log(fit="wb.fit(")\n'


@pytest.mark.parametrize(
    ("source", "way", "features"),
    [
        ("wb.fit(m, d, clip_norm=1.0, compile=False, accumulate=1)", "fit", {"clip_norm"}),
        (PREPARE, "prepare", set()),
        ("import keras\nmodel.fit(x)", "keras", set()),
        ("model.fit(x)", None, set()),
        ("import torch\nscaler.fit(x)\nwb.watch(model, optimizer)", None, set()),
        ("keras.Sequential([]).fit(x)", None, set()),
        ("strategy.run(step)", "loop", set()),
        ("model.fit(x)\nwb.fit(m)", "fit", set()),
        ("%time wb.fit(m)", None, set()),
        ("trainer.train()", None, set()),
    ],
)
def test_how_a_recipe_trains_is_read_from_its_source(source, way, features):
    assert use_of(source).way == way
    assert use_of(source).features == features


@pytest.mark.parametrize("framework", catalog.FRAMEWORKS)
@pytest.mark.parametrize("name", builtin.names())
def test_built_in_recipes_suit_what_the_catalog_says(framework, name):
    use = use_of(builtin.lookup(name, framework).source)
    assert use.way is not None
    assert not misfit(catalog.lookup("mirrored", framework), use)
