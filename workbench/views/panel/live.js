// The selected run: the dashboard that a cell shows below it, here inside the panel.

SECTIONS.push({
  name: "live",
  tab: "run",
  order: 3,
  title: "Selected run",
  make(app, root) {
    const pick = kit.h("select", { class: "wbp-input wbp-pick", "aria-label": "Run to show", onchange: () => app.do("live.pick", { run: pick.value }) });
    const none = kit.h("p", { class: "wbp-empty" }, "No run yet. Choose a recipe and strategies, then press Run.");
    const error = kit.h("details", { class: "wbp-failure", hidden: true }, kit.h("summary", {}, "Why the run failed"), kit.h("pre"));
    const place = kit.h("div", { class: "wbp-live" });
    const forget = kit.button("Remove", "Remove this run from the lists. Its files stay on the disk", () => app.do("live.forget", { run: pick.value }));
    const from = kit.h("input", { type: "text", class: "wbp-input", placeholder: "folder of a saved run", "aria-label": "Folder of a saved run", spellcheck: "false" });
    const load = kit.button("Load", "Load a run from a folder that run.save(path) wrote", () => { if (from.value.trim()) app.do("live.load", { path: from.value }).then(() => { from.value = ""; }).catch(() => {}); });
    root.append(kit.h("div", { class: "wbp-row" }, pick, forget, from, load), none, error, place);
    let view = null, names = "", drawn = null;
    return {
      always: true,
      draw(value) {
        kit.show(none, !value.run);
        kit.show(pick, value.runs.length > 1);
        const listed = JSON.stringify(value.runs);
        if (names !== listed) {
          names = listed;
          pick.replaceChildren(...[...value.runs].reverse().map((r) => kit.h("option", { value: r.name }, [...new Set([r.name, r.strategy, r.state])].join(" · "))));
        }
        if (pick.value !== value.run) pick.value = value.run;
        pick.disabled = ["starting", "running", "paused", "stopping", "recovering"].includes(value.state);
        forget.disabled = pick.disabled;
        kit.show(forget, Boolean(value.run));
        kit.show(error, Boolean(value.error));
        kit.text(error.firstChild, `Why the run failed: ${(value.error ?? "").split("\n")[0]}`);
        kit.text(error.lastChild, [value.error, value.printed].filter(Boolean).join("\n\n"));
        if (value.run && !view) view = new View(kit.h("div"), app.store.frames, app.palette);
        if (view && !view.root.parentNode) place.append(view.root);
        const now = `${app.store.run}:${app.store.frames.seq}`; // other news need no new charts
        if (drawn !== now) view?.schedule();
        drawn = now;
      },
      restyle() { view?.restyle(); view?.schedule(); },
      close() { view?.close(); },
    };
  },
});
