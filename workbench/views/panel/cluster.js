// The cluster's row: how many engines, start, restart, stop, and a line per engine.

SECTIONS.push({
  name: "cluster",
  tab: "top",
  title: "Cluster",
  make(app, root) {
    const count = kit.field({ kind: "int", label: "Engines", min: 1, max: 256 });
    count.set(2);
    const start = kit.button("Start", "Start this many engines", () => app.do("cluster.start", { count: Number(count.read()) }), "wbp-primary");
    const stop = kit.button("Stop cluster", "End all engines", () => app.do("cluster.stop"));
    const progress = kit.h("span", { class: "wbp-muted", role: "status" });
    const engines = kit.h("div", { class: "wbp-engines" });
    root.append(kit.h("div", { class: "wbp-row" }, kit.h("strong", {}, "Workbench"), count.root, start, stop, progress), engines);
    return {
      draw(value) {
        kit.text(start, value.running ? "Add" : "Start");
        kit.show(stop, value.running);
        kit.text(progress, value.progress || value.lost || "");
        kit.list(engines, value.engines, (e) => e.engine, () => kit.h("div", { class: "wbp-engine" }), (element, e) => {
          kit.text(element, `${e.engine} ${e.device} ${e.state} ${kit.bytes(e.memory_bytes)}`);
        });
      },
    };
  },
});
