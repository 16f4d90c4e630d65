// The fault lab: sliders and buttons that act on the current run, as run.inject does.

SECTIONS.push({
  name: "faults",
  tab: "run",
  order: 2,
  title: "Fault lab",
  make(app, root) {
    const none = kit.h("p", { class: "wbp-empty" }, "During a run, you can slow down workers or links here, or kill a worker. Then watch what the other workers do.");
    const lab = kit.h("div", { class: "wbp-lab" });
    const workers = kit.h("div", { class: "wbp-victims" });
    const everyone = kit.h("div", { class: "wbp-everyone" });
    const same = kit.h("code", { class: "wbp-same", title: "These faults, written as flags of %%distributed" });
    const clear = kit.button("Remove all", "Remove every fault", () => app.do("faults.clear"));
    const jitter = slider("jitter", "random delay of each worker in each step, from 0 to this value", [0, 200, 1], (v) => `${v} ms`, (v) => app.do("faults.everyone", { jitter_ms: v }));
    const latency = slider("latency of links (simulated)", "delay that is added to each message", [0, 200, 1], (v) => `${v} ms`, (v) => app.do("faults.everyone", { latency_ms: v }));
    const rate = (v) => 10 ** (10 - v / 20), unlimited = (v) => v === 0;
    const bandwidth = slider("bandwidth of links (simulated)", "limit for each worker", [0, 100, 1], (v) => (unlimited(v) ? "unlimited" : `${kit.bytes(rate(v))}/s`),
      (v) => app.do("faults.everyone", unlimited(v) ? { clear: "bandwidth" } : { bytes_per_s: rate(v) }));
    everyone.append(jitter.root, latency.root, bandwidth.root);
    const nolinks = kit.h("small", { class: "wbp-help" }, "Under this strategy, Workbench itself sends no tensors: either the framework sends them, or no tensors are sent. So Workbench cannot slow down the links.");
    lab.append(workers, everyone, nolinks, kit.h("div", { class: "wbp-row" }, clear, same));
    root.append(none, lab);

    /** A slider that reports while it is dragged, and follows the kernel when it is not. */
    function slider(name, help, [min, max, step], words, change) {
      const input = kit.h("input", { type: "range", min, max, step, value: min, "aria-label": name });
      const shown = kit.h("output", {});
      let held = 0, sent = null, timer = 0;
      const send = () => { timer = 0; if (sent !== input.value) { sent = input.value; change(Number(input.value)); } };
      const tell = () => { kit.text(shown, words(Number(input.value))); input.setAttribute("aria-valuetext", words(Number(input.value))); };
      input.addEventListener("input", () => { held = performance.now(); tell(); timer ||= setTimeout(send, 120); });
      input.addEventListener("change", () => { clearTimeout(timer); send(); });
      tell();
      const label = kit.h("span", { class: "wbp-slider-name", title: help }, name);
      return {
        root: kit.h("label", { class: "wbp-slider" }, label, input, shown), input, label,
        set(value) {
          if (performance.now() - held < 1500) return;
          sent = null;
          if (Number(input.value) !== value) input.value = value;
          tell();
        },
      };
    }

    function victim(worker) {
      const element = kit.h("div", { class: "wbp-victim", role: "group", "aria-label": `Faults of worker ${worker.rank}` });
      const unit = kit.h("select", { class: "wbp-input", "aria-label": `Unit of the delay of worker ${worker.rank}` }, kit.h("option", { value: "ms" }, "ms"), kit.h("option", { value: "factor" }, "times"));
      const by = slider(`worker ${worker.rank}`, "how much slower this worker is in each step", [0, 100, 1], words, change);
      function words(v) { return unit.value === "ms" ? `+${v * 5} ms` : `${(1 + v * 0.09).toFixed(1)}x`; }
      function change(v) { app.do("faults.slow", unit.value === "ms" ? { rank: worker.rank, ms: v * 5 } : { rank: worker.rank, factor: Number((1 + v * 0.09).toFixed(2)) }); }
      unit.addEventListener("change", () => { by.input.value = 0; by.input.dispatchEvent(new Event("change")); by.input.dispatchEvent(new Event("input")); });
      const kill = kit.button("Kill", `End the process of worker ${worker.rank} (SIGKILL)`, () => app.do("faults.kill", { rank: worker.rank }), "wbp-danger");
      element.append(by.root, unit, kill);
      element.wbpSet = (now) => {
        if (now.factor > 1) unit.value = "factor";
        else if (now.ms > 0) unit.value = "ms";
        by.set(unit.value === "ms" ? now.ms / 5 : (now.factor - 1) / 0.09);
      };
      return element;
    }

    return {
      draw(value) {
        kit.show(none, !value.live);
        kit.show(lab, value.live);
        if (!value.live) return;
        kit.list(workers, value.workers, (w) => w.rank, victim, (element, now) => element.wbpSet(now));
        jitter.set(value.jitter_ms);
        latency.set(value.latency_ms);
        bandwidth.set(value.bytes_per_s ? Math.round((10 - Math.log10(value.bytes_per_s)) * 20) : 0);
        for (const one of [latency, bandwidth]) one.input.disabled = !value.links;
        kit.show(nolinks, !value.links);
        kit.text(same, value.inject);
        kit.show(same, Boolean(value.inject));
        clear.disabled = !value.faults.length;
      },
    };
  },
});
