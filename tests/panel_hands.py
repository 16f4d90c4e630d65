"""Uses the panel in a real browser, and finds visible defects; for tests."""

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
    """Move a slider by the browser's own events."""
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


# -- what is amiss ---------------------------------------------------------------------------------

OUTSIDE = """() => {
  const box = document.querySelector(".wbp"), found = [];
  const right = box.getBoundingClientRect().right + 1;
  const apart = "svg, option, pre, .wbp-scroll, .wb-scroll, .wbp-code, .wbp-tabs";
  if (box.scrollWidth > box.clientWidth) found.push(`panel: ${box.scrollWidth}`);
  for (const e of box.querySelectorAll("*")) {
    const b = e.getBoundingClientRect();
    if (!b.width || !b.height || e.closest(apart)) continue;
    if (b.right > right) found.push(`${e.tagName}.${e.className}: ${b.right - right} px`);
  }
  return found;
}"""
OVERLAPS = """() => {
  const texts = [], found = [], folded = "details:not([open]) > :not(summary)";
  const walk = document.createTreeWalker(document.querySelector(".wbp"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.textContent.trim()) continue;
    if (parent.closest(`[hidden], svg, option, pre, ${folded}`)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    let { left, right, top, bottom } = range.getBoundingClientRect();
    for (let e = parent; e && !e.classList.contains("wbp"); e = e.parentElement) {
      if (getComputedStyle(e).overflow === "visible") continue;
      const c = e.getBoundingClientRect();
      [left, right] = [Math.max(left, c.left), Math.min(right, c.right)];
      [top, bottom] = [Math.max(top, c.top), Math.min(bottom, c.bottom)];
    }
    const words = node.textContent.slice(0, 30);
    if (right - left > 2 && bottom - top > 2) texts.push({ left, right, top, bottom, words });
  }
  texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 3 && high > 4) found.push(`${a.words} / ${b.words}`);
  }));
  return found;
}"""
NAMED = {"button", "textbox", "spinbutton", "checkbox", "radio", "slider", "combobox", "tab"}
NAMED |= {"image", "img", "progressbar"}
DRAWN = "() => new Promise((go) => requestAnimationFrame(() => setTimeout(go, 150)))"
WIDTH = "() => document.querySelector('.wbp').parentElement.clientWidth"


def be_wide(page, width):
    """Size the window so that the panel has this width; what is around it changes with it too."""
    for _ in range(5):
        missing = width - page.evaluate(WIDTH)
        if not missing:
            return
        now = page.viewport_size
        page.set_viewport_size({"width": now["width"] + missing, "height": now["height"]})
        page.evaluate(DRAWN)
    raise AssertionError(f"the panel is {page.evaluate(WIDTH)} px wide, not {width}")


def heard(page):
    """What Chromium tells a screen reader about the panel: roles and names."""
    devtools = page.context.new_cdp_session(page)
    root = devtools.send("DOM.getDocument")["root"]["nodeId"]
    panel = devtools.send("DOM.querySelector", {"nodeId": root, "selector": ".wbp"})["nodeId"]
    nodes = devtools.send("Accessibility.queryAXTree", {"nodeId": panel})["nodes"]
    devtools.detach()
    return [
        (one.get("role", {}).get("value"), one.get("name", {}).get("value", ""))
        for one in nodes
        if not one["ignored"]
    ]


def amiss(page):
    """Elements of the open tab that are outside the panel, overlap, or have no name."""
    unnamed = [role for role, name in heard(page) if role in NAMED and not name.strip()]
    return page.evaluate(OUTSIDE) + page.evaluate(OVERLAPS) + unnamed
