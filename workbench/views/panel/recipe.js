// What is trained: the notebook's cells, its functions and the built-in recipes; its code.

/** Copy text; true if it worked. `area` holds it, selected, where the clipboard is out of reach. */
async function copyText(text, area) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    area?.select();
    try { return Boolean(area) && document.execCommand("copy"); } catch { return false; }
  }
}

/**
 * Put code cells below the one that shows `root`, where the front end lets a widget do so
 * (JupyterLab, Notebook 7); returns how many were put there.
 */
function insertCells(model, root, texts) {
  const notebook = model?.widget_manager?.context?.model?.sharedModel;
  if (typeof notebook?.insertCell !== "function" || !Array.isArray(notebook.cells)) return 0;
  const cell = root.closest(".jp-Cell"), all = cell?.parentElement?.querySelectorAll(":scope > .jp-Cell") ?? [];
  const windowed = cell?.dataset.windowedListIndex;
  const at = !cell ? notebook.cells.length : 1 + (windowed !== undefined ? Number(windowed) : [...all].indexOf(cell));
  texts.forEach((source, i) => notebook.insertCell(at + i, { cell_type: "code", source }));
  return texts.length;
}

SECTIONS.push({
  name: "recipe",
  tab: "setup",
  title: "What is trained",
  make(app, root) {
    const group = `wbp-${Math.random().toString(36).slice(2)}`;
    const list = kit.h("div", { class: "wbp-recipes", role: "radiogroup", "aria-label": "Recipes" });
    const problem = kit.h("p", { class: "wbp-problem", role: "status", hidden: true });
    const title = kit.h("strong", { class: "wbp-code-name" }), about = kit.h("span", { class: "wbp-muted" });
    const numbers = kit.h("pre", { class: "wbp-numbers", "aria-hidden": "true" }), code = kit.h("code", {});
    const listing = kit.h("div", { class: "wbp-code", tabindex: "0", role: "region", "aria-label": "Code of the recipe" }, numbers, kit.h("pre", {}, code));
    const copy = kit.button("Copy code", "Copy the recipe's code", copyCode);
    const cell = kit.button("To a cell", "Write a %%distributed cell for each selected strategy", toCell);
    const job = kit.button("To a job", "Write a job folder for each run of the selected strategies. You can start a job on another machine that has Linux, Python and the job's packages", toJob);
    const said = kit.h("span", { class: "wbp-muted", role: "status" });
    const area = kit.h("textarea", { class: "wbp-text", readonly: true, rows: 6, spellcheck: "false", "aria-label": "Cells for the selection", hidden: true });
    const parameters = kit.h("div", { class: "wbp-options", role: "group", "aria-label": "Parameters of the recipe" });
    const detail = kit.h("div", { class: "wbp-recipe-detail" },
      kit.h("div", { class: "wbp-row wbp-code-head" }, title, about), parameters, listing, kit.h("div", { class: "wbp-row" }, copy, cell, job, said), area);
    root.append(list, problem, detail);
    let source = "", quiet = 0, value = null;

    function say(words) {
      kit.text(said, words);
      clearTimeout(quiet);
      quiet = setTimeout(() => kit.text(said, ""), 12_000);
    }

    async function copyCode() {
      say((await copyText(source)) ? "Copied." : "The browser blocked copying. Select the code and copy it by hand.");
    }

    async function toCell() {
      const answer = await app.do("recipe.cell").catch(() => null); // the panel says why
      if (!answer) return;
      const { cells } = answer;
      const put = insertCells(app.store.model, app.root, cells);
      if (put) {
        area.hidden = true;
        say(put === 1 ? "The code is in a new cell below. Run this cell." : `The code is in ${put} new cells below. Run these cells.`);
        return;
      }
      area.value = cells.join("\n\n");
      area.hidden = false;
      const copied = await copyText(area.value, area);
      area.focus();
      area.select();
      say(copied ? "The code is copied. Paste it into a new cell." : "Copy the selected text and paste it into a new cell.");
    }

    async function toJob() {
      const answer = await app.do("recipe.job").catch(() => null); // the panel says why
      if (!answer) return;
      said.title = answer.where;
      say(`${answer.folders.length > 1 ? "The jobs are" : "The job is"} in ${answer.folders.join(", ")}. To run a job with Slurm: wb.submit("${answer.folders[0]}", on="slurm"). The README.md in a job folder explains other ways to start the job.`);
    }

    function row(one) {
      const input = kit.h("input", { type: "radio", name: group, onchange: () => app.do("recipe.pick", { name: one.name }).catch(redraw) });
      const words = kit.h("span", { class: "wbp-recipe-words" }, kit.h("span", { class: "wbp-recipe-name" }), kit.h("small", { class: "wbp-muted" }));
      return kit.h("label", { class: "wbp-recipe-row" }, input, words);
    }

    function drawRow(element, one, selected) {
      const [input, words] = element.children;
      input.checked = one.name === selected;
      element.classList.toggle("wbp-on", input.checked);
      element.classList.toggle("wbp-unfit", !one.fits);
      const from = one.origin.startsWith("In[") ? `${one.origin} · run ${one.name}` : one.name;
      kit.text(words.firstChild, from);
      kit.text(words.lastChild, [one.summary, one.frameworks.join(", ")].filter(Boolean).join(" · "));
    }

    function drawCode(picked) {
      if (picked.source !== source || !numbers.textContent) {
        source = picked.source;
        kit.text(code, source);
        kit.text(numbers, source.split("\n").map((_, i) => picked.first_line + i).join("\n"));
        listing.scrollTop = 0;
      }
      kit.text(title, picked.name);
      kit.text(about, [picked.way && `trains with ${picked.way}`, picked.framework].filter(Boolean).join(" · "));
      optionFields(parameters, picked.parameters, `recipe ${picked.name}`, (name, value) => app.do("recipe.parameter", { name, value }));
      kit.show(parameters, picked.parameters.length);
    }

    function redraw() {
      if (!value) return;
      kit.list(list, value.groups, (g) => g.title, (g) => kit.h("div", { class: "wbp-recipe-group" }, kit.h("div", { class: "wbp-group-title" }, g.title), kit.h("div", {})), (element, g) => {
        kit.list(element.lastChild, g.recipes, (r) => r.name, row, (child, one) => drawRow(child, one, value.selected));
      });
      kit.text(problem, value.problem);
      kit.show(problem, value.problem);
      kit.show(detail, value.picked);
      if (value.picked) drawCode(value.picked);
    }

    return {
      draw(now) { value = now; redraw(); },
      close() { clearTimeout(quiet); },
    };
  },
});
