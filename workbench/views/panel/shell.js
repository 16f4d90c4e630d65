// The panel as a whole: what has come from the kernel, the tabs, messages, and a kernel that is gone.

const TABS = [["setup", "Choose"], ["run", "Run"], ["compare", "Compare"], ["scaling", "Scaling"], ["teach", "Understand"]];
const SILENT_MS = 4000;

/** What the kernel has sent; one per widget, shared by its views. */
class PanelStore {
  constructor(model) {
    this.model = model;
    this.parts = {};
    this.run = null;
    this.frames = new Store((said) => void (said.type === "command" ? this.do(`live.${said.name}`, said.fields) : this.hello()));
    this.listeners = new Set();
    this.replies = new Map();
    this.waiting = new Map();
    this.number = 0;
    this.gone = "";
    this.onsilence = () => {};
  }

  hello() { this.model.send({ type: "hello" }); }

  /** Ask the kernel to do something; the promise is for actions that answer. */
  do(name, fields = {}) {
    if (this.gone) return new Promise(() => {});
    const id = ++this.number;
    this.waiting.set(id, performance.now());
    setTimeout(() => { if (this.silent) this.onsilence(); this.tell(); }, SILENT_MS + 50);
    this.model.send({ type: "do", id, name, fields });
    const answer = new Promise((resolve, reject) => this.replies.set(id, { resolve, reject }));
    answer.catch(() => {}); // most controls do not wait; the kernel shows a message
    return answer;
  }

  receive(message, buffers) {
    if (message?.type === "parts") Object.assign(this.parts, message.parts);
    else if (message?.type === "ack") this.waiting.delete(message.id);
    else if (message?.type === "reply") {
      const answer = this.replies.get(message.id);
      if (message.failed) answer?.reject(new Error("The command failed. The panel shows the reason."));
      else answer?.resolve(message.value);
      this.replies.delete(message.id);
    } else if (message?.type === "frame") {
      if (message.run !== this.run) { this.run = message.run; this.frames.seq = -1; }
      this.frames.receive(message, buffers);
    }
    this.tell();
  }

  /** Whether the kernel owes an answer for too long. */
  get silent() {
    const now = performance.now();
    return [...this.waiting.values()].some((since) => now - since > SILENT_MS);
  }

  lose(why) { this.gone = why; this.tell(); }

  tell() { for (const listener of this.listeners) listener(); }
}

/** One display of the panel. */
class App {
  constructor(root, store, palette) {
    Object.assign(this, { root, store, palette, frame: 0, sections: [] });
    root.classList.add("wbp", "wb-dash");
    root.dataset.lmSuppressShortcuts = "true";
    root.setAttribute("role", "region");
    root.setAttribute("aria-label", "Workbench panel");
    this.state = kit.h("div", { class: "wbp-gone", role: "alert", hidden: true });
    this.notices = kit.h("div", { class: "wbp-notices", "aria-live": "polite" });
    this.body = kit.h("div", { class: "wbp-body" });
    this.root.append(this.state, this.body);
    this.buildPlaces();
    this.restyle();
    this.schedule();
  }

  do(name, fields) { return this.store.do(name, fields); }

  buildPlaces() {
    const top = kit.h("div", { class: "wbp-top" }), bar = kit.h("div", { class: "wbp-tabs", role: "tablist", "aria-label": "Parts of the panel" });
    this.body.append(top, this.notices, bar);
    this.places = { top };
    this.tabs = TABS.map(([name, title]) => this.buildTab(bar, name, title));
    bar.addEventListener("keydown", (event) => this.moveTab(event));
    for (const section of [...SECTIONS].sort((a, b) => (a.order ?? 0) - (b.order ?? 0))) this.buildSection(section);
    this.open("setup");
  }

  buildTab(bar, name, title) {
    const id = `wbp-${Math.random().toString(36).slice(2)}`;
    const tab = kit.h("button", { type: "button", role: "tab", id: `${id}-tab`, "aria-controls": id, onclick: () => this.open(name) }, title);
    const place = kit.h("div", { role: "tabpanel", id, "aria-labelledby": `${id}-tab`, class: `wbp-place wbp-place-${name}`, hidden: true });
    bar.append(tab);
    this.body.append(place);
    this.places[name] = place;
    return { name, tab, place };
  }

  buildSection({ name, tab, title, make }) {
    const root = kit.h("section", { class: `wbp-section wbp-${name}`, "aria-label": title });
    if (tab !== "top") root.append(kit.h("h3", {}, title));
    const inner = kit.h("div", { class: "wbp-inner" }), broken = kit.h("p", { class: "wbp-broken", hidden: true });
    root.append(broken, inner);
    this.places[tab].append(root);
    this.sections.push({ name, tab, broken, inner, view: make(this, inner), seen: undefined });
  }

  /** Open a tab; sections are drawn when they are in sight. */
  open(name) {
    this.opened = name;
    for (const one of this.tabs) {
      const on = one.name === name;
      one.tab.setAttribute("aria-selected", on);
      one.tab.tabIndex = on ? 0 : -1;
      one.place.hidden = !on;
    }
    for (const section of this.sections) if (section.tab === name) section.seen = undefined;
    this.schedule();
  }

  moveTab(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], at = this.tabs.findIndex((t) => t.name === this.opened);
    const next = event.key === "Home" ? 0 : event.key === "End" ? this.tabs.length - 1 : step ? (at + step + this.tabs.length) % this.tabs.length : -1;
    if (next < 0) return;
    event.preventDefault();
    this.open(this.tabs[next].name);
    this.tabs[next].tab.focus();
  }

  schedule() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  restyle() {
    this.ink = readInk(this.root, this.palette);
    for (const section of this.sections) { section.seen = undefined; section.view.restyle?.(this.ink); }
  }

  draw() {
    const { parts } = this.store;
    this.drawState();
    for (const section of this.sections) {
      if (section.tab !== "top" && section.tab !== this.opened) continue;
      const value = parts[section.name];
      if (!value) continue;
      kit.show(section.broken, Boolean(value.broken));
      kit.show(section.inner, !value.broken);
      if (value.broken) { kit.text(section.broken, value.broken); continue; }
      if (section.seen === value && !section.view.always) continue;
      section.seen = value;
      try { section.view.draw(value, parts); } catch (error) { // the other sections continue
        console.error(error);
        kit.show(section.broken, true);
        kit.text(section.broken, `This part cannot be drawn: ${error.message}`);
      }
    }
    this.drawNotices(parts.panel?.notices ?? []);
  }

  drawState() {
    const { gone, silent } = this.store;
    this.body.inert = Boolean(gone);
    this.root.classList.toggle("wbp-dead", Boolean(gone));
    kit.show(this.state, Boolean(gone) || silent);
    kit.text(this.state, gone || (silent ? "The kernel does not answer. Perhaps it is busy. Your clicks take effect when the kernel answers." : ""));
  }

  drawNotices(notices) {
    kit.list(this.notices, notices, (n) => n.id, (n) => {
      const close = kit.h("button", { type: "button", class: "wbp-close", "aria-label": "Close this message", onclick: () => this.do("panel.dismiss", { notice: n.id }) }, "×");
      const detail = n.detail && kit.h("details", {}, kit.h("summary", {}, "Traceback"), kit.h("pre", {}, n.detail));
      return kit.h("div", { class: `wbp-notice wbp-${n.level}`, role: n.level === "error" ? "alert" : "status" }, kit.h("div", { class: "wbp-words" }, this.words(n.text), detail), close);
    });
  }

  /** A message of several lines: what it is about, then what was seen, what is allowed, what to do. */
  words(text) {
    const [first, ...rest] = text.split("\n"), rows = rest.map((line) => /^\s+(\w+):\s+(.*)$/.exec(line));
    if (!rest.length || rows.some((row) => !row)) return kit.h("pre", {}, text);
    return kit.h("div", {}, kit.told("b", first), kit.h("dl", {}, rows.map(([, name, value]) => [kit.h("dt", {}, name), kit.told("dd", value)])));
  }

  close() {
    cancelAnimationFrame(this.frame);
    for (const section of this.sections) section.view.close?.();
  }
}

const GONE = "This panel no longer works, because its kernel has ended. Run wb.panel() again.";
const ENDED = ["restarting", "autorestarting", "terminating", "dead"];

/**
 * Notice that the panel's kernel is gone. Widgets are told of a restart that was asked for; of a
 * kernel that died JupyterLab's connection knows; elsewhere the next kernel is asked for its comms.
 */
class Watch {
  constructor(model, lose) {
    Object.assign(this, { model, lose, manager: model.widget_manager, undo: [], asking: false });
    model.on("comm:close", lose);
    model.on("comm_live_update", () => void this.look());
    const kernel = this.manager?.kernel;
    this.connect(kernel?.statusChanged, (_, status) => { if (ENDED.includes(status)) lose(); });
    this.connect(kernel?.disposed, lose);
    void this.look();
  }

  connect(signal, slot) {
    if (!signal?.connect) return;
    signal.connect(slot);
    this.undo.push(() => signal.disconnect(slot));
  }

  /** A model that was read from a file, or whose comm was closed, has nobody to talk to. */
  async look() {
    const own = await this.manager?.get_model?.(this.model.get("me"))?.catch(() => null);
    if (own?.comm_live === false) this.lose();
  }

  /** Ask whether the kernel that answers knows this panel. */
  async ask() {
    if (this.asking || !this.manager?._get_comm_info) return;
    this.asking = true;
    try {
      const known = await this.manager._get_comm_info();
      if (known && !(this.model.get("me") in known)) this.lose();
    } catch { /* no kernel to answer; the panel says that it is silent */ } finally { this.asking = false; }
  }

  close() { for (const undo of this.undo) undo(); }
}

export default () => {
  let store;
  return {
    initialize({ model }) {
      store = new PanelStore(model);
      const watch = new Watch(model, () => store.lose(GONE));
      store.onsilence = () => void watch.ask();
      model.on("msg:custom", (content, buffers) => store.receive(content, buffers));
      store.hello();
      return () => watch.close();
    },
    render({ model, el }) {
      const app = new App(kit.h("div"), store, model.get("palette"));
      el.append(app.root);
      const redraw = () => app.schedule();
      const restyle = () => { app.restyle(); app.schedule(); };
      const later = () => { restyle(); setTimeout(restyle, 400); };
      store.listeners.add(redraw);
      const themes = new MutationObserver(later);
      for (const node of [document.body, document.documentElement])
        themes.observe(node, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "data-theme", "data-vscode-theme-kind", "class"] });
      const media = globalThis.matchMedia?.("(prefers-color-scheme: dark)");
      media?.addEventListener("change", restyle);
      store.hello();
      return () => {
        store.listeners.delete(redraw);
        themes.disconnect();
        media?.removeEventListener("change", restyle);
        app.close();
        // A view that is moved is made anew at once and says hello; the last one says goodbye.
        setTimeout(() => { if (!store.listeners.size && !store.gone) model.send({ type: "bye" }); }, 1000);
      };
    },
  };
};
