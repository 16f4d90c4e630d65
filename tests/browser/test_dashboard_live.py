"""The dashboard in a real JupyterLab, while its cell blocks the kernel."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.browser

WIDGET = "application/vnd.jupyter.widget-view+json"
STEPS = "parseInt(document.querySelector('.wb-steps')?.textContent.split(' ')[1] ?? 0)"


def live(call: str) -> list[str]:
    return [f"from fake_live import play\nprint('commands:', {call})"]


def wait_steps(page, at_least: int) -> None:
    page.wait_for_function(f"{STEPS} >= {at_least}", timeout=30_000)


def button(nb, name: str):
    return (
        nb.page.get_by_role("group")
        .get_by_role("button", name=name)
        .and_(nb.page.locator(".wb-dash button").filter(has_text=name))
    )


def first_step(nb) -> int:
    """The first step that the loss chart shows, read by pointing at its left edge."""
    chart = nb.page.locator(".wb-dash canvas").first
    chart.hover(position={"x": 47, "y": 60})
    value = nb.page.locator(".wb-dash figcaption span").first
    nb.page.wait_for_function("e => e.textContent.startsWith('step')", arg=value.element_handle())
    return int(value.text_content().split(":")[0].split(" ")[1])


def drawn(page, index: int) -> int:
    """Number of pixels that are not blank in one of the dashboard's canvases."""
    return page.evaluate(
        """i => {
          const c = document.querySelectorAll('.wb-dash canvas')[i];
          const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
          let count = 0;
          for (let k = 3; k < data.length; k += 4) count += data[k] > 0;
          return count;
        }""",
        index,
    )


def test_buttons_work_while_the_cell_blocks_and_a_picture_stays(notebook):
    nb = notebook("stop.ipynb", live("play(4, logged=True)"))
    nb.run_all()
    wait_steps(nb.page, 64)
    canvases = nb.page.locator(".wb-dash canvas").all()
    shown = [index for index, canvas in enumerate(canvases) if canvas.is_visible()]
    assert len(shown) == 6  # all but a pipeline's bubbles
    assert all(drawn(nb.page, index) > 500 for index in shown)
    button(nb, "Pause").click()
    nb.page.locator(".wb-state", has_text="paused").wait_for(timeout=10_000)
    button(nb, "One step").click()
    button(nb, "Resume").press("Enter")
    nb.page.locator(".wb-state", has_text="running").wait_for(timeout=10_000)
    button(nb, "Stop").focus()
    nb.page.keyboard.press("Space")
    nb.wait_text("commands: ['pause', 'step', 'resume', 'stop']", 20)
    nb.page.locator(".jp-OutputArea-output img").wait_for(timeout=20_000)
    bundles = [o["data"] for o in nb.outputs() if o["output_type"] == "display_data"]
    assert [set(bundle) for bundle in bundles] == [{"image/png", "text/plain"}]
    assert "stopped" in "".join(bundles[0]["text/plain"])
    assert len(bundles[0]["image/png"]) > 20_000
    states = nb.lab.saved(nb.name)["metadata"].get("widgets", {})
    assert "wb-dash" not in str(states)


def test_a_page_reload_during_a_background_run_goes_on_with_the_whole_history(notebook):
    nb = notebook("background.ipynb", live("play(2, block=False)"))
    nb.run_all()
    wait_steps(nb.page, 70)
    nb.save()
    nb.page.reload()
    wait_steps(nb.page, 72)
    assert drawn(nb.page, 0) > 500
    assert first_step(nb) == 0
    button(nb, "Stop").click()
    nb.page.locator(".jp-OutputArea-output img").or_(
        nb.page.locator(".wb-state", has_text="stopped")
    ).first.wait_for(timeout=10_000)


def test_a_page_reloaded_while_the_cell_blocks_shows_the_history_when_it_is_over(notebook):
    nb = notebook("reload.ipynb", live("play(2, limit_s=9)"))
    nb.run_all()
    wait_steps(nb.page, 84)
    nb.save()
    assert WIDGET in str(nb.lab.saved(nb.name)["cells"][0]["outputs"])
    nb.page.reload()
    # JupyterLab asks a kernel for its widgets only once the running cell is over.
    nb.page.locator(".wb-state", has_text="finished").wait_for(timeout=40_000)
    wait_steps(nb.page, 86)
    assert first_step(nb) == 0
    assert button(nb, "Stop").is_disabled()


@pytest.mark.parametrize("width", [420, 1100])
def test_eight_workers_fit_without_overflow(notebook, width):
    nb = notebook(f"eight{width}.ipynb", live("play(8, device='cuda', extra=True)"), width=width)
    nb.run_all()
    wait_steps(nb.page, 64)
    overflow = nb.page.evaluate(
        """() => [...document.querySelectorAll('.wb-dash, .wb-dash *')]
          .filter(e => e.scrollWidth > e.clientWidth + 1)
          .filter(e => getComputedStyle(e).display !== 'inline')
          .map(e => e.className || e.tagName)"""
    )
    assert overflow == []
    button(nb, "Stop").click()
    nb.wait_text("commands: ['stop']", 20)


def test_the_theme_is_followed_while_the_run_goes_on(notebook):
    nb = notebook("theme.ipynb", live("play(2)"))
    nb.run_all()
    wait_steps(nb.page, 64)
    shade = "getComputedStyle(document.querySelector('.wb-dash')).backgroundColor"
    light = nb.page.evaluate(shade)
    nb.dark()
    nb.page.wait_for_function(f"{shade} !== '{light}'", timeout=10_000)
    assert nb.page.evaluate("document.querySelector('.wb-dash').dataset.mode") == "dark"
    button(nb, "Stop").click()
    nb.wait_text("commands: ['stop']", 20)


@pytest.mark.parametrize("width", [420, 1100])
def test_a_pipeline_shows_its_bubbles_and_stages(notebook, width):
    nb = notebook(f"pipe{width}.ipynb", live("play(4, pipeline=True)"), width=width)
    nb.run_all()
    wait_steps(nb.page, 64)
    assert nb.page.locator(".wb-stages tbody tr").count() == 4
    assert "ideal bubble 27 %" in nb.page.locator(".wb-cut").text_content()
    bubbles = nb.page.locator(".wb-pipeline canvas")
    label = bubbles.get_attribute("aria-label")
    assert re.search(r"rank 1 · cpu: [^·]*\b22 % [^·]*not more", label)
    assert drawn(nb.page, 4) > 5000
    inside = "e => e.scrollWidth <= e.clientWidth + 1"
    assert nb.page.locator(".wb-dash").evaluate(inside)
    button(nb, "Stop").click()
    nb.wait_text("commands: ['stop']", 20)
