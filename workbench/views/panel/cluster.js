// The cluster's row: how many engines, start, restart, stop, and a line per engine.

SECTIONS.push((() => {
  const MOST = 256; // as workbench/execution/requests.py has it

  function line(app, ask) {
    return (e) => {
      const parts = Object.fromEntries(["id", "state", "device", "cpu", "memory", "gpu", "log"].map((n) => [n, kit.h("span", { class: `wbp-e-${n}` })]));
      const meter = kit.h("i", {}), bar = kit.h("span", { class: "wbp-meter", "aria-hidden": "true" }, meter);
      parts.cpu.append(bar, kit.h("b", {}));
      const summary = kit.h("summary", { title: "Show the engine's log" }, Object.values(parts));
      const log = kit.h("pre", { class: "wbp-log", tabindex: "0" }, "…");
      const restart = kit.button("Restart", `Replace engine ${e.engine} with a new one`, () => ask(`Restart engine ${e.engine}?`, "cluster.restart", { engine: e.engine }));
      const again = kit.button("Reload", "Read the log again", () => load());
      const element = kit.h("details", { class: "wbp-engine" }, summary, kit.h("div", { class: "wbp-row" }, again, restart), log);
      const load = async () => { kit.text(log, (await app.do("cluster.log", { engine: e.engine })) || "The log is empty."); log.scrollTop = log.scrollHeight; };
      element.addEventListener("toggle", () => { if (element.open) load(); });
      element.wbp = { parts, meter };
      return element;
    };
  }

  function update(element, e) {
    const { parts, meter } = element.wbp, cpu = e.cpu_percent;
    kit.text(parts.id, e.rank == null ? `engine ${e.engine}` : `rank ${e.rank}`);
    parts.id.title = `engine ${e.engine}, process ${e.pid}`;
    kit.text(parts.state, e.doing || e.state);
    parts.state.dataset.state = e.state;
    kit.text(parts.device, e.device);
    kit.text(parts.cpu.lastChild, cpu == null ? "– %" : `${cpu.toFixed(0)} %`);
    parts.cpu.title = "CPU use of the engine and its child processes (100 % is one core)";
    meter.style.width = `${Math.min(100, cpu ?? 0)}%`;
    kit.text(parts.memory, kit.bytes(e.memory_bytes));
    parts.memory.title = `memory (${e.memory_kind})`;
    kit.show(parts.gpu, e.gpu_percent != null || e.gpu_memory_bytes != null);
    kit.text(parts.gpu, `GPU ${e.gpu_percent == null ? "–" : e.gpu_percent.toFixed(0)} % ${kit.bytes(e.gpu_memory_bytes)}`);
    kit.text(parts.log, e.log_line ?? "");
    parts.log.title = e.log_line ?? "";
    element.firstChild.setAttribute("aria-label", `rank ${e.rank ?? "none"}, engine ${e.engine}: ${e.doing || e.state}, ${e.device}, CPU ${cpu == null ? "unknown" : Math.round(cpu)} percent, memory ${kit.bytes(e.memory_bytes)}. ${e.log_line ?? ""}`);
  }

  /** The cluster in a few words, where its engines' lines do not say enough. */
  function whole({ running, lost, engines }) {
    const dead = engines.filter((e) => e.state === "dead").length;
    if (!running) return lost ? `This notebook has no cluster now: ${lost}.` : "No cluster yet. Press Start or Run.";
    return dead ? `${dead} of ${engines.length} engines ${dead > 1 ? "are" : "is"} dead. Press Restart to replace all engines.` : "";
  }

  function make(app, root) {
    const count = kit.field({ kind: "int", label: "Engines", min: 1, max: MOST, onchange: () => redraw() });
    count.input.addEventListener("input", () => { redraw(); if (possible()) app.do("cluster.asked", { count: count.read() }); });
    const devices = kit.field({ kind: "str", label: "Devices", placeholder: "auto, cpu, cuda, 0,1" });
    devices.set("auto");
    const launcher = kit.field({ kind: "choice", label: "Launcher", choices: ["local"], onchange: () => { redraw(); place(); } });
    launcher.input.title = "The program that starts the engines. Choose \"local\" to start the engines on this machine.";
    const fields = {
      on: kit.field({ kind: "str", label: "Hosts", placeholder: "node1:4,user@node2:4", onchange: () => place() }),
      nodes: kit.field({ kind: "str", label: "Nodes", placeholder: "any", onchange: () => place() }),
      partition: kit.field({ kind: "str", label: "Partition", placeholder: "the default", onchange: () => place() }),
      time: kit.field({ kind: "str", label: "Time limit", placeholder: "1:30:00", onchange: () => place() }),
    };
    for (const [name, field] of Object.entries(fields)) field.root.classList.add(`wbp-where-${name}`);
    const start = kit.button("Start", "Start this many engines", () => app.do("cluster.start", { count: Number(count.read()), devices: devices.read() }), "wbp-primary");
    const restart = kit.button("Restart", "Replace all engines with new ones", () => ask("Restart all engines?", "cluster.restart"));
    const stop = kit.button("Stop cluster", "End all engines and everything that runs on them", () => ask("Stop the cluster?", "cluster.stop"));
    const sure = kit.h("div", { class: "wbp-sure", role: "alertdialog", "aria-label": "Are you sure?", hidden: true });
    const cancel = kit.button("Cancel", "Cancel the start of the engines", () => { cancel.disabled = true; app.do("cluster.cancel"); });
    const words = kit.h("span", { class: "wbp-muted", role: "status" });
    const track = kit.h("progress", { max: 1, class: "wbp-progress", hidden: true, "aria-label": "Starting the engines" });
    const engines = kit.h("div", { class: "wbp-engines", role: "group", "aria-label": "Engines" });
    root.append(kit.h("div", { class: "wbp-row wbp-clusterrow" }, kit.h("strong", { class: "wbp-brand" }, "Workbench"), count.root, devices.root, launcher.root, Object.values(fields).map((f) => f.root), start, kit.h("span", { class: "wbp-together" }, restart, stop), track, words, cancel), sure, engines);
    let latest = { count: 0, running: false, launchers: [{ name: "local", fields: [] }], where: {} }, shown = "";
    count.input.value = 2;

    function possible() {
      const asked = Number(count.read());
      return Number.isInteger(asked) && asked >= 1 && asked <= MOST;
    }

    /** Tell the kernel where Start and Run should start engines. */
    function place() {
      const typed = Object.entries(fields).map(([name, field]) => [name, field.read()]);
      if (!latest.running) app.do("cluster.where", { launcher: launcher.read(), ...Object.fromEntries(typed) });
    }

    /** Offer the launchers that are installed, and that of a cluster that was started by a line. */
    function offer({ launchers, where, running }) {
      const names = [...new Set([...launchers.map((one) => one.name), where.launcher])];
      if (launcher.input.children.length !== names.length) launcher.input.replaceChildren(...names.map((n) => kit.h("option", { value: n }, n)));
      const now = JSON.stringify([where, running]);
      if (now !== shown) {
        launcher.set(where.launcher);
        for (const [name, field] of Object.entries(fields)) field.set(where[name] ?? "");
      }
      shown = now;
      kit.show(launcher.root, names.length > 1);
    }

    /** If the cluster is busy, ask before ending the work. */
    function ask(question, name, fields = {}) {
      if (!latest.at_work) return void app.do(name, fields);
      const close = () => { kit.show(sure, false); sure.replaceChildren(); };
      const yes = kit.button("End it", "End the current work; its results are lost", () => { close(); app.do(name, fields); }, "wbp-danger");
      const no = kit.button("Cancel", "Change nothing", close);
      sure.replaceChildren(kit.h("b", {}, question), kit.h("span", {}, `Work that would be lost: ${latest.at_work}.`), yes, no);
      kit.show(sure, true);
      no.focus();
    }

    function redraw() {
      const asked = Number(count.read()), { running, busy } = latest;
      count.error(possible() ? "" : `a whole number, from 1 to ${MOST}`);
      if (running) kit.rename(start, "Add engines", `Add engines until there are ${asked}`);
      else kit.rename(start, "Start", "Start this many engines");
      start.disabled = busy || !possible() || (running && asked <= latest.count);
      devices.enable(!running);
      launcher.enable(!running && !busy);
      const takes = latest.launchers.find((one) => one.name === launcher.read())?.fields ?? [];
      for (const [name, field] of Object.entries(fields)) { kit.show(field.root, takes.includes(name)); field.enable(!running && !busy); }
    }

    return {
      draw(value, all) {
        const doing = all.panel?.doing ?? [], busy = doing.some((d) => d.startsWith("cluster."));
        if (value.count !== latest.count && value.running) count.set(value.count);
        if (!value.running && value.asked !== latest.asked && possible()) count.set(value.asked);
        if (!value.at_work && !sure.hidden) { kit.show(sure, false); sure.replaceChildren(); }
        latest = { ...value, busy };
        if (value.running) devices.set(value.devices);
        for (const button of [restart, stop]) { kit.show(button, value.running); button.disabled = busy && !value.progress; }
        kit.show(track, Boolean(value.progress));
        if (value.progress?.endless) track.removeAttribute("value"); // nobody knows how long a queue is
        else if (value.progress) track.value = value.progress.fraction;
        if (!value.progress) cancel.disabled = false;
        kit.show(cancel, Boolean(value.progress));
        offer(value);
        kit.text(words, value.progress?.text ?? (busy ? "one moment…" : whole(value)));
        redraw();
        const away = value.running && value.where.launcher !== "local";
        const placed = (e) => (away ? { ...e, device: [e.host, e.device].filter(Boolean).join(" · ") } : e);
        kit.list(engines, value.engines.map(placed), (e) => e.engine, line(app, ask), update);
        engines.classList.toggle("wbp-away", away);
        engines.classList.toggle("wbp-many", value.engines.length > 8);
      },
      always: true,
    };
  }

  return { name: "cluster", tab: "top", order: 0, title: "Cluster", make };
})());
