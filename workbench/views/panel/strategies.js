// The cards of the strategies, their options, and what all runs have in common.

const TYPING_MS = 350;
const FRAMEWORK_NAMES = { torch: "PyTorch", tensorflow: "TensorFlow" };

/** Report what is typed soon after the last key, and at once when the field is left. */
function asTyped(field, report) {
  let timer = 0, sent = null;
  const send = () => {
    clearTimeout(timer);
    const value = field.read();
    if (value === sent) return;
    sent = value;
    report(value);
  };
  field.input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(send, TYPING_MS); });
  field.input.addEventListener("change", send);
  field.forget = () => { clearTimeout(timer); sent = null; };
  const set = field.set;
  field.set = (value) => { if (document.activeElement !== field.input) sent = null; set(value); };
  return field;
}

/** Fields of options in step with what the kernel says; each with a way back to its default. */
function optionFields(parent, options, owner, report) {
  kit.list(parent, options, (o) => `${owner}.${o.name}`, (o) => {
    const typed = ["int", "float", "str"].includes(o.kind);
    const field = kit.field({
      kind: o.kind, label: o.name, help: o.help ?? "", min: o.minimum, max: o.maximum,
      step: o.kind === "int" ? 1 : "any", placeholder: o.optional ? "none" : (o.default ?? ""), choices: (o.choices ?? []).map((c) => c.name),
      onchange: typed ? undefined : (value) => report(o.name, String(value)),
    });
    if (typed) asTyped(field, (value) => report(o.name, value));
    const back = () => {
      if (o.kind === "bool") field.input.checked = o.default === "true";
      else field.input.value = o.default ?? "";
      field.forget?.();
      report(o.name, null);
      field.input.focus(); // the button is about to go
    };
    const reset = kit.h("button", { type: "button", class: "wbp-reset", title: `Set to the default${o.default ? ` (${o.default})` : ""}`, "aria-label": `Set ${o.name} to the default`, onclick: back }, "↺");
    field.root.append(reset);
    Object.assign(field.root, { wbpField: field, wbpReset: reset });
    return field.root;
  }, (element, o) => {
    const { wbpField: field, wbpReset: reset } = element;
    field.set(o.kind === "bool" ? o.value === "true" : o.value);
    field.error(o.error);
    kit.show(reset, o.given);
    (o.choices ?? []).forEach((c, i) => {
      const option = field.input.options?.[i];
      if (!option) return;
      option.disabled = !c.fits && field.input.value !== c.name;
      kit.text(option, c.fits ? c.name : `${c.name} (needs GPUs)`);
    });
  });
}

/** A strategy's messages as a small picture: workers side by side, time downwards. */
function strategyGlyph(glyph) {
  const width = 132, height = 64, edge = 7;
  const svg = kit.svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "wbp-glyph", "aria-hidden": "true", focusable: "false" });
  if (!glyph) return svg;
  const count = glyph.nodes.length, gap = Math.min(40, (width - 2 * edge - 10) / Math.max(1, count - 1));
  const left = (width - gap * (count - 1)) / 2, x = (i) => left + i * gap, top = 13;
  const parts = glyph.phases.map((p) => ({ ...p, rows: p.arrows.length ? 1 + Math.max(...p.arrows.map((a) => a[3])) : 0 }));
  const units = parts.reduce((sum, p) => sum + (p.busy.length ? 0.8 : 0) + (p.rows ? Math.min(2.4, 0.6 + 0.55 * p.rows) : 0), 0) || 1;
  const unit = Math.min(22, (height - top - 4) / units);
  glyph.nodes.forEach((kind, i) => {
    svg.append(kit.svg("path", { class: "wbp-lane", d: `M${x(i)} ${top}V${height - 2}` }));
    const round = kind === "server" || kind === "store" || kind === "coordinator";
    svg.append(kit.svg("rect", { class: `wbp-node wbp-${kind}`, x: x(i) - 5, y: 3, width: 10, height: 9, rx: round ? 4.5 : 2 }));
  });
  let y = top;
  for (const phase of parts) {
    if (phase.busy.length) {
      for (const i of phase.busy) svg.append(kit.svg("rect", { class: "wbp-work", x: x(i) - 3.5, y: y + 1, width: 7, height: Math.max(2, 0.8 * unit - 2), rx: 1.5 }));
      y += 0.8 * unit;
    }
    if (!phase.rows) continue;
    const whole = unit * Math.min(2.4, 0.6 + 0.55 * phase.rows), each = whole / phase.rows;
    for (const [from, to, kind, order] of phase.arrows) svg.append(glyphArrow(x(from), y + order * each, x(to), y + (order + 1) * each - 0.5, kind));
    y += whole;
  }
  return svg;
}

function glyphArrow(x, y, toX, toY, kind) {
  const length = Math.hypot(toX - x, toY - y) || 1, dx = (toX - x) / length, dy = (toY - y) / length;
  const bx = toX - dx * 4, by = toY - dy * 4, p = (a, b) => `${a.toFixed(1)} ${b.toFixed(1)}`;
  return kit.svg("g", { class: `wbp-message wbp-m-${kind}` },
    kit.svg("path", { class: "wbp-line", d: `M${p(x, y)}L${p(bx, by)}` }),
    kit.svg("path", { class: "wbp-tip", d: `M${p(toX, toY)}L${p(bx - dy * 2, by + dx * 2)}L${p(bx + dy * 2, by - dx * 2)}z` }));
}

SECTIONS.push({
  name: "strategies",
  tab: "setup",
  title: "Strategies",
  make(app, root) {
    const frameworks = kit.h("div", { class: "wbp-switch", role: "radiogroup", "aria-label": "Framework" });
    const group = `wbp-${Math.random().toString(36).slice(2)}`;
    const hint = kit.h("span", { class: "wbp-muted" }, "Select one strategy, or several to compare. Several strategies run one after the other.");
    const cards = kit.h("div", { class: "wbp-cards", role: "group", "aria-label": "Strategies" });
    const detail = makeDetail();
    const common = makeCommon();
    const summary = kit.h("strong", { class: "wbp-total-words" }), problem = kit.h("span", {});
    root.append(kit.h("div", { class: "wbp-row wbp-cards-head" }, frameworks, hint), cards, common.root,
      kit.h("div", { class: "wbp-row wbp-total", role: "status" }, summary, problem));
    let open = "", value = null;

    function makeCard(card) {
      const id = `wbp-${Math.random().toString(36).slice(2)}`;
      const box = kit.h("input", { type: "checkbox", id, "aria-describedby": `${id}-about`, onchange: () => {
        if (box.checked) open = card.name;
        app.do("strategies.toggle", { strategy: card.name }).catch(redraw);
        redraw();
      } });
      const more = kit.h("button", { type: "button", class: "wbp-more-button", "aria-label": `Options and details of ${card.name}`, onclick: () => { open = open === card.name ? "" : card.name; redraw(); } }, "Details");
      const order = kit.h("span", { class: "wbp-order", role: "img", hidden: true });
      const words = kit.h("div", { class: "wbp-card-about", id: `${id}-about` }, kit.h("span", { class: "wbp-term" }, card.term), kit.h("span", { class: "wbp-what" }, card.summary), kit.h("span", { class: "wbp-reason" }));
      const element = kit.h("div", { class: "wbp-card" },
        kit.h("div", { class: "wbp-card-head" }, box, kit.h("label", { for: id }, card.name), order),
        strategyGlyph(card.glyph), words, kit.h("div", { class: "wbp-card-foot" }, kit.h("span", { class: "wbp-muted wbp-changed" }), more));
      element.addEventListener("click", (event) => {
        if (event.target.closest("button, input, label, a") || box.disabled || getSelection()?.toString()) return;
        box.click();
      });
      Object.assign(element, { wbpBox: box, wbpOrder: order, wbpMore: more, wbpReason: words.lastChild, wbpChanged: element.querySelector(".wbp-changed") });
      return element;
    }

    function drawCard(element, card) {
      const several = value.cards.filter((c) => c.picked).length > 1;
      element.wbpBox.checked = card.picked > 0;
      element.wbpBox.disabled = Boolean(card.reason) && !card.picked;
      element.classList.toggle("wbp-on", card.picked > 0);
      element.classList.toggle("wbp-off", Boolean(card.reason));
      element.classList.toggle("wbp-bad", Boolean(card.picked && (card.problem || card.reason)));
      kit.show(element.wbpOrder, card.picked && several);
      kit.text(element.wbpOrder, card.picked ? `${card.picked}.` : "");
      kit.attr(element.wbpOrder, "aria-label", card.picked ? `runs as number ${card.picked}` : null);
      const problem = card.reason || (card.picked ? card.problem.split("\n")[0] : "");
      kit.text(element.wbpReason, problem);
      kit.show(element.wbpReason, problem);
      const given = card.options.filter((o) => o.given).map((o) => `${o.name}=${o.value || "none"}`);
      kit.text(element.wbpChanged, given.join(" "));
      kit.attr(element.wbpMore, "aria-expanded", String(open === card.name));
      kit.attr(element.wbpMore, "aria-controls", detail.root.id);
      kit.text(element.wbpMore, open === card.name ? "Close" : card.options.length ? `Details, ${card.options.length} option${card.options.length > 1 ? "s" : ""}` : "Details");
      element.classList.toggle("wbp-open", open === card.name);
    }

    /** The details of one card: its picture, options, what it suits, its source. */
    function makeDetail() {
      const id = `wbp-${Math.random().toString(36).slice(2)}`;
      const name = kit.h("strong", {}), term = kit.h("span", { class: "wbp-muted" }), facts = kit.h("span", { class: "wbp-muted" });
      const why = kit.h("div", { class: "wbp-problem" }), options = kit.h("div", { class: "wbp-options", role: "group", "aria-label": "Options" });
      const none = kit.h("p", { class: "wbp-muted wbp-none" }, "This strategy has no options.");
      const suits = kit.h("span", {}), source = kit.h("span", {}), aliases = kit.h("span", {});
      const picture = kit.h("div", { class: "wbp-picture" });
      const about = kit.h("div", { class: "wbp-about" }, [["Suits", suits], ["Source", source], ["Also called", aliases]].flatMap(([name, words]) => [kit.h("span", { class: "wbp-muted" }, name), words]));
      const element = kit.h("div", { class: "wbp-detail", id, role: "region" },
        kit.h("div", { class: "wbp-row" }, name, term, facts), why, kit.h("div", { class: "wbp-detail-body" }, kit.h("div", { class: "wbp-detail-words" }, options, none, about), picture));
      let asked = "";
      return {
        root: element,
        draw(card, framework, workers) {
          kit.attr(element, "aria-label", `Details of ${card.name}`);
          kit.text(name, card.name);
          kit.text(term, card.term);
          kit.text(facts, card.facts.join(" · "));
          kit.text(why, card.reason || card.problem);
          kit.show(why, card.reason || card.problem);
          optionFields(options, card.options, `${framework}.${card.name}`, (option, typed) => app.do("strategies.option", { strategy: card.name, option, value: typed }));
          kit.show(options, card.options.length);
          kit.show(none, !card.options.length);
          kit.text(suits, card.suits);
          kit.text(source, card.source);
          kit.text(aliases, card.aliases.join(", "));
          kit.show(aliases, card.aliases.length);
          kit.show(aliases.previousSibling, card.aliases.length);
          const now = JSON.stringify([framework, card.name, workers, card.options.map((o) => [o.value, o.error])]);
          if (now === asked) return;
          asked = now;
          app.do("strategies.diagram", { strategy: card.name }).then((drawn) => {
            if (asked !== now) return;
            if (drawn.svg) picture.innerHTML = drawn.svg; // drawn by the kernel, which escapes words
            else picture.replaceChildren(kit.h("p", { class: "wbp-muted" }, drawn.text));
          }).catch(() => { asked = ""; });
        },
      };
    }

    /** Workers, seeds and what is overridden. */
    function makeCommon() {
      const field = (name, kind, label, help, more = {}) => [name, asTyped(kit.field({ kind, label, help, ...more }), (typed) => app.do("strategies.common", { name, value: typed })), help];
      const as = { placeholder: "unchanged" };
      const fields = [
        field("workers", "str", "Workers", "", { placeholder: "all, or 1,2,4" }),
        field("seeds", "int", "Seeds", "runs of each strategy", { min: 1, max: 10, placeholder: "1" }),
        field("epochs", "int", "Epochs", "", { min: 1, ...as }),
        field("steps", "int", "Steps", "instead of epochs", { min: 1, ...as }),
        field("batch_size", "str", "Batch size", "samples per step, on all workers together; you can type several sizes: 64,128", as),
        field("seed", "int", "Seed", "", { min: 0, ...as }),
        field("inject", "str", "Faults to inject", "for example slow=1:50ms (worker 1 takes 50 ms longer in each step), jitter=20ms (every worker takes a random time of up to 20 ms longer in each step), kill=1@100 (worker 1 is killed before step 100)", { placeholder: "none" }),
        field("name", "str", "Name", "name of the run, to find it again", { placeholder: "strategy name" }),
        field("checkpoint", "str", "Checkpoint folder", "folder for checkpoints, to continue the run later", { placeholder: "none" }),
        field("checkpoint_every", "int", "Checkpoint every", "steps", { min: 1, placeholder: "100" }),
        field("on_failure", "str", "When an engine dies", "stop: end the run; continue: go on with fewer workers; replace: start a new engine (needs a checkpoint folder); heal: the other workers continue, and a new engine joins them. Default: stop; with a checkpoint folder: replace", { placeholder: "automatic" }),
        field("log", "str", "Log to", "tensorboard:FOLDER, mlflow:URI, wandb:PROJECT or trackio:PROJECT", { placeholder: "none" }),
      ];
      const element = kit.h("div", { class: "wbp-common", role: "group", "aria-label": "For all runs" }, kit.h("div", { class: "wbp-group-title" }, "For all runs"), kit.h("div", { class: "wbp-common-fields" }, fields.map(([name, one]) => { one.root.classList.add(`wbp-of-${name}`); return one.root; })));
      return {
        root: element,
        draw(all) {
          for (const [name, one, help] of fields) {
            one.set(all[name].value);
            one.error(all[name].error);
            if (!all[name].error) kit.text(one.root.querySelector("small"), name === "seed" && all.seed.off ? "several seeds start from 0" : all[name].hint ?? help);
          }
          fields.find(([name]) => name === "seed")[1].enable(!all.seed.off);
        },
      };
    }

    function drawFrameworks() {
      kit.list(frameworks, value.frameworks, (f) => f.name, (f) => {
        const input = kit.h("input", { type: "radio", name: group, onchange: () => app.do("strategies.framework", { name: f.name }).catch(redraw) });
        return kit.h("label", {}, input, FRAMEWORK_NAMES[f.name] ?? f.name);
      }, (element, f) => {
        element.firstChild.checked = f.name === value.framework;
        kit.attr(element, "title", f.reason || null);
        element.classList.toggle("wbp-on", f.name === value.framework);
      });
    }

    function redraw() {
      if (!value) return;
      drawFrameworks();
      kit.list(cards, value.cards, (c) => `${value.framework}.${c.name}`, makeCard, drawCard);
      const at = value.cards.findIndex((c) => c.name === open);
      if (at < 0) detail.root.remove();
      else {
        const after = cards.wbpItems.get(`${value.framework}.${open}`);
        if (after.nextSibling !== detail.root) after.after(detail.root);
        detail.draw(value.cards[at], value.framework, value.common.workers.value + value.common.workers.hint);
      }
      common.draw(value.common);
      kit.text(summary, value.summary);
      kit.text(problem, value.problem || value.note);
      problem.className = value.problem ? "wbp-problem" : "wbp-muted";
    }

    return { draw(now) { value = now; redraw(); } };
  },
});
