"""The panel's Choose tab in a real JupyterLab: cards, options, recipes, and what comes of them."""

import pytest
from panel_hands import opened, press, turn

pytestmark = [pytest.mark.browser]

TINY = """@wb.recipe
def tiny(lr=0.1, width=16, nesterov=False):
    "One layer, for a look."
    import torch
    model = torch.nn.Linear(64, 10)
    wb.fit(model, wb.data.digits("train"), loss=torch.nn.CrossEntropyLoss(), clip_norm=1.0,
           optimizer=lambda p: torch.optim.SGD(p, lr, nesterov=nesterov), batch_size=width)
"""
CELLS = ["%load_ext workbench\nimport workbench as wb", TINY, "wb.panel()"]
WIDE_ENOUGH = """() => {
  const box = document.querySelector(".wbp");
  const over = [...box.querySelectorAll(".wbp-place-setup *")].filter(
    (e) => !e.closest(".wbp-code, .wbp-recipes, svg, option, [hidden]")
      && e.getBoundingClientRect().right > box.getBoundingClientRect().right + 1);
  return over.map((e) => e.className || e.tagName);
}"""


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


def test_two_strategies_over_three_seeds_become_two_cells(notebook, tmp_path):
    book = opened(notebook, "choose.ipynb", cells=CELLS, height=2600, width=1240)
    summary(book, "1 run of digits_mlp: mirrored on 2 workers")
    pick(book, "local_sgd")
    book.page.get_by_label("Seeds", exact=True).fill("3")
    summary(book, "2 strategies × 3 seeds = 6 runs of digits_mlp on 2 workers")
    summary(book, "Run starts 2")
    assert card(book, "local_sgd").locator(".wbp-order").text_content() == "2."
    book.page.locator(".wbp-detail svg").wait_for()
    book.screenshot(tmp_path / "picked.png", ".wbp")
    before = book.page.locator(".jp-Notebook .jp-CodeCell").count()
    press(book, "To a cell")
    book.page.get_by_text("2 new cells below").wait_for()
    book.save()
    cells = ["".join(cell["source"]) for cell in book.lab.saved(book.name)["cells"]]
    assert len(cells) == before + 2
    assert [one.splitlines()[0] for one in cells[3:5]] == [
        "%%distributed mirrored -n 2 --seeds 3",
        "%%distributed local_sgd -n 2 --seeds 3",
    ]
    # Where the front end lets no widget insert cells, the text is copied and shown.
    book.page.evaluate(
        "() => { window.jupyterapp.shell.currentWidget.context.model.sharedModel.insertCell = 0; }"
    )
    press(book, "To a cell")
    text = book.page.get_by_label("Cells for the selection")
    text.wait_for()
    assert "%%distributed local_sgd -n 2 --seeds 3" in text.input_value()
    book.page.get_by_text("into a new cell").wait_for()


def test_what_is_wrong_is_said_where_it_was_typed(notebook, tmp_path):
    book = opened(notebook, "choose-wrong.ipynb", cells=CELLS, height=2600, width=1240)
    card(book, "mirrored").get_by_role("button").click()
    book.page.get_by_label("bucket_mb", exact=True).fill("-3")
    summary(book, "bucket_mb of mirrored")
    field = book.page.locator(".wbp-field").filter(has=book.page.get_by_label("bucket_mb"))
    assert "from 0.001 to 4096" in field.locator("small").text_content()
    assert field.locator("small code").text_content() == "bucket_mb"
    book.page.get_by_label("Faults to inject").fill("slow=7:50ms, sloow=1")
    book.page.locator(".wbp-of-inject.wbp-wrong").wait_for()
    book.page.get_by_label("Batch size").fill("1")
    book.dark()
    book.page.wait_for_timeout(1000)
    book.screenshot(tmp_path / "wrong-dark.png", ".wbp")
    book.page.get_by_label("Set bucket_mb to the default").click()
    book.page.get_by_label("Faults to inject").fill("")
    card(book, "mirrored").get_by_text("smaller than the number of workers").wait_for()
    book.page.get_by_label("Batch size").fill("")
    summary(book, "No engine is running yet")


def test_a_function_brings_its_parameters_and_greys_what_it_cannot_use(notebook, tmp_path):
    book = opened(notebook, "choose-narrow.ipynb", cells=CELLS, height=4600, width=520)
    book.page.get_by_role("radio", name="tiny").check()
    book.page.get_by_label("nesterov", exact=True).check()
    book.page.get_by_label("lr", exact=True).fill("0.5")
    summary(book, "1 run of tiny")
    reason = card(book, "local_sgd").locator(".wbp-reason")
    reason.filter(has_text="clip_norm").wait_for()
    assert book.page.get_by_role("checkbox", name="local_sgd").is_disabled()
    card(book, "mirrored").get_by_role("button").click()
    book.page.locator(".wbp-detail svg").wait_for()
    book.screenshot(tmp_path / "narrow.png", ".wbp")
    assert book.page.evaluate(WIDE_ENOUGH) == []
    book.page.get_by_role("radio", name="TensorFlow", exact=True).check()
    book.page.get_by_text("tiny is written for PyTorch").first.wait_for()
    assert book.page.get_by_role("checkbox", name="tpu").is_disabled()
    book.screenshot(tmp_path / "tensorflow.png", ".wbp")


BROKEN = """@wb.recipe
def broken():
    import torch
    model = torch.nn.Linear(64, "ten")
"""


@pytest.mark.cluster
@pytest.mark.torch
def test_a_recipe_that_cannot_be_built_shows_why_and_the_panel_goes_on(notebook, tmp_path):
    cells = [f"{CELLS[0]}\n%cluster start 2", BROKEN, "wb.panel()"]
    book = opened(notebook, "choose-broken.ipynb", cells=cells, height=1600)
    book.page.get_by_role("radio", name="broken").check()
    summary(book, "1 run of broken: mirrored on 2 workers")
    book.page.get_by_role("button", name="Run: ").click()
    why = book.page.locator(".wbp-failure")
    why.locator("summary").click(timeout=120_000)
    why.get_by_text('torch.nn.Linear(64, "ten")').first.wait_for()  # the traceback's line
    book.screenshot(tmp_path / "broken.png", ".wbp")
    turn(book, "Choose")
    book.page.get_by_role("radio", name="digits_mlp").check()
    book.page.get_by_label("Steps", exact=True).fill("3")
    summary(book, "1 run of digits_mlp")
    assert book.page.locator(".wbp-total .wbp-problem").count() == 0
