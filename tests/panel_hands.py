"""What a hand does to the panel, for tests in a real browser."""

OPEN = "%load_ext workbench\nimport workbench as wb\nwb.panel()"


def opened(notebook, name, *, cells=(OPEN,), **size):
    """Open a notebook that shows the panel, and wait until the kernel has answered it."""
    book = notebook(name, list(cells), **size)
    book.run_all()
    book.page.wait_for_selector(".wbp .wbp-top button", timeout=60_000)
    return book


def press(book, name, within=".wbp"):
    """Press a button by its text."""
    book.page.locator(within).get_by_role("button", name=name).first.click()


def slide(book, label, value):
    """Move a slider as a hand would: the browser's own events."""
    book.page.get_by_label(label, exact=True).evaluate(
        """(input, value) => {
          input.value = value;
          for (const kind of ["input", "change"]) input.dispatchEvent(new Event(kind));
        }""",
        value,
    )  # fmt: skip


def turn(book, tab):
    """Open one of the panel's tabs."""
    book.page.locator(".wbp-tabs").first.get_by_role("tab", name=tab).click()
