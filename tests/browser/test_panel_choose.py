"""The panel's Choose tab in a real JupyterLab: cards, options, recipes, and what comes of them."""

import re

import pytest
from panel_hands import opened, press

pytestmark = [pytest.mark.browser]

CELLS = [
    "%load_ext workbench\nimport workbench as wb",
    '@wb.recipe\ndef tiny(lr=0.1, width=16, nesterov=False):\n    "One layer, for a look."\n'
    "    import torch\n    wb.fit(torch.nn.Linear(4, 2), None, optimizer=None)",
    "wb.panel()",
]


def card(book, name):
    """The card of a strategy."""
    return book.page.locator(".wbp-card").filter(
        has=book.page.get_by_role("checkbox", name=name, exact=True)
    )


def pick(book, name):
    """Click a strategy's checkbox."""
    book.page.get_by_role("checkbox", name=name, exact=True).click()


def summary(book, text):
    """Wait for what is said below the cards."""
    book.page.locator(".wbp-total").filter(has_text=text).wait_for()


def test_two_strategies_are_compared_over_three_seeds(notebook, tmp_path):
    book = opened(notebook, "choose.ipynb", cells=CELLS, height=1500, width=1240)
    summary(book, "1 run of digits_mlp: mirrored on 2 workers")
    pick(book, "one_device")
    book.page.get_by_label("Seeds").fill("3")
    summary(book, "2 strategies × 3 seeds = 6 runs of digits_mlp on 2 workers")
    summary(book, "press Start")
    assert card(book, "mirrored").locator(".wbp-order").text_content() == "1."
    book.page.locator(".wbp-detail svg, .wbp-detail p").first.wait_for()
    book.screenshot(tmp_path / "choose.png", ".wbp")
