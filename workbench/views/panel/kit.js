// The panel's kit: elements, fields and lists that are drawn again without losing focus or place.
// A section is a file that calls SECTIONS.push({ name, tab, order, title, make(app, root) }); `make`
// builds once and returns { draw(value, all) }, called whenever the kernel has sent something new.

const SECTIONS = [];

const kit = {
  /** An element: kit.h("button", { class: "x", onclick: f, "aria-label": "y" }, "text", child). */
  h(tag, props = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (value == null || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "text") element.textContent = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(2).filter((c) => c != null && c !== false));
    return element;
  },

  /** An SVG element. */
  svg(tag, props = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(props)) if (value != null) element.setAttribute(name, value);
    element.append(...children.flat(2).filter((c) => c != null && c !== false));
    return element;
  },

  /** Set an element's text; what stands between backticks is drawn as code, but not inside of code. */
  text(element, text) {
    const words = text == null ? "" : String(text);
    if ((element.wbpText ?? element.textContent) === words) return;
    element.wbpText = words;
    const parts = /^(PRE|CODE|OPTION|BUTTON)$/.test(element.tagName) ? [words] : words.split(/`([^`\n]+)`/);
    element.replaceChildren(...parts.map((part, i) => (i % 2 ? kit.h("code", {}, part) : part)).filter((part) => part !== ""));
  },

  /** An element with such a text. */
  told(tag, text, props = {}) {
    const element = kit.h(tag, props);
    kit.text(element, text);
    return element;
  },

  attr(element, name, value) {
    if (value == null || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : value);
  },

  show(element, on) {
    if (element.hidden === Boolean(on)) element.hidden = !on;
  },

  /** A button that is disabled while `app` waits for the kernel's answer to it. */
  button(text, label, onclick, kind = "") {
    return kit.h("button", { type: "button", class: `wbp-button ${kind}`.trim(), title: label, "aria-label": `${text}: ${label}`, onclick }, text);
  },

  /** Give a button another meaning: what is read, seen and heard of it. */
  rename(button, text, label) {
    kit.text(button, text);
    kit.attr(button, "title", label);
    kit.attr(button, "aria-label", `${text}: ${label}`);
  },

  /** Keep children of `parent` in step with `items`: made once per key, updated, moved, removed. */
  list(parent, items, key, make, update = () => {}) {
    const old = parent.wbpItems ?? (parent.wbpItems = new Map()), kept = new Map(), ours = new Set(old.values());
    let place = parent.firstChild;
    for (const item of items) {
      const id = key(item);
      let element = old.get(id);
      if (element) old.delete(id);
      else element = make(item);
      kept.set(id, element);
      update(element, item);
      while (place && !ours.has(place)) place = place.nextSibling; // somebody else's child stays where it is
      if (element === place) place = place.nextSibling;
      else parent.insertBefore(element, place);
    }
    for (const element of old.values()) element.remove();
    parent.wbpItems = kept;
  },

  /**
   * A labelled control: { kind: int|float|bool|choice|str, label, help, min, max, step, choices,
   * placeholder, onchange(value) }. `set(value)` leaves alone what is being typed; `error(text)`.
   */
  field({ kind, label, help = "", min, max, step, choices = [], placeholder = "", onchange }) {
    const id = `wbp-${Math.random().toString(36).slice(2)}`;
    const common = { id, class: "wbp-input", "aria-describedby": `${id}-help` };
    let input;
    if (kind === "choice") input = kit.h("select", common, choices.map((c) => kit.h("option", { value: c }, c)));
    else if (kind === "bool") input = kit.h("input", { ...common, type: "checkbox" });
    else if (kind === "str") input = kit.h("input", { ...common, type: "text", placeholder, autocomplete: "off", spellcheck: "false" });
    else input = kit.h("input", { ...common, type: "number", min, max, step: step ?? (kind === "int" ? 1 : "any"), placeholder });
    const read = () => (kind === "bool" ? input.checked : input.value);
    input.addEventListener("change", () => onchange?.(read()));
    const note = kit.told("small", help, { id: `${id}-help`, class: "wbp-help" });
    const root = kit.h("div", { class: `wbp-field wbp-${kind}` }, kit.h("label", { for: id }, label), input, note);
    return {
      root, input, read,
      set(value) {
        if (document.activeElement === input && kind !== "bool" && kind !== "choice") return;
        if (kind === "bool") input.checked = Boolean(value);
        else if (input.value !== String(value ?? "")) input.value = value ?? "";
      },
      enable(on) { input.disabled = !on; },
      error(text) {
        kit.attr(input, "aria-invalid", text ? "true" : null);
        root.classList.toggle("wbp-wrong", Boolean(text));
        kit.text(note, text || help);
      },
    };
  },

  /** Give the browser a file. */
  download(name, data, type) {
    const link = kit.h("a", { href: URL.createObjectURL(new Blob([data], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  },

  bytes(value) {
    if (value == null || !Number.isFinite(value)) return "–";
    for (const [limit, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (Math.abs(value) >= limit) return `${threeDigits(value / limit)} ${unit}`;
    return `${value.toFixed(0)} B`;
  },

  /** A time that is only estimated: whole seconds, minutes, or hours. */
  left(value) {
    if (value == null || !Number.isFinite(value)) return "–";
    if (value < 90) return `${Math.max(1, Math.round(value))} s`;
    return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
  },

  seconds(value) {
    if (value == null || !Number.isFinite(value)) return "–";
    if (value < 1) return milliseconds(value * 1e3);
    if (value < 90) return `${threeDigits(value)} s`;
    return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
  },
};
