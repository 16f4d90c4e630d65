// Runs over the numbers of workers: speed-up and efficiency, the laws, what fewer workers let expect,
// published curves, a table.

SECTIONS.push((() => {
  const HEIGHT = 270, EDGE = { left: 52, right: 16, top: 14, bottom: 34 }, LOG_FROM = 16;
  const EXPORTS = [["csv", "CSV"], ["md", "Markdown"], ["html", "HTML"], ["json", "JSON"], ["png", "PNG"], ["svg", "SVG"]];
  const percent = (x) => (x == null ? "–" : `${(x * 100).toFixed(x < 0.0995 ? 1 : 0)} %`);
  const times = (x) => (x == null ? "–" : `${x.toFixed(2)}x`);
  const plain = (x) => (x == null ? "–" : number(x));
  const between = (low, high, words) => (low == null || high == null ? "" : ` (${words(low)} to ${words(high)})`);
  const COLUMNS = [
    ["curve", "plan", String], ["workers", "workers", plain], ["batch", "batch", plain], ["samples_per_s", "samples/s", plain],
    ["speedup", "speed-up", (v, p) => times(v) + between(p.speedup_low, p.speedup_high, (x) => x.toFixed(2))],
    ["efficiency", "efficiency", percent], ["predicted_speedup", "predicted", (v, p) => times(v) + between(p.predicted_speedup_low, p.predicted_speedup_high, (x) => x.toFixed(2))],
    ["step_s", "step", kit.seconds], ["compute_share", "compute", percent],
    ["sync_wait_share", "sync wait", percent], ["transfer_share", "transfer", percent], ["cost", "cost", (v) => (v == null ? "–" : threeDigits(v))],
    ["missing", "missing", String],
  ];

  const colorOf = (app, curve) => app.ink.runs[curve.color % app.ink.runs.length];
  const label = (x, y, words, anchor, kind = "wbp-tick") => kit.svg("text", { x, y, "text-anchor": anchor, class: kind }, document.createTextNode(words));

  /** The axes of a chart over workers: what places a number of workers and a value. */
  function chart(name, counts, top, width, words, run) {
    const low = Math.min(...counts), high = Math.max(...counts), ahead = counts.filter((n) => n > Math.max(...run));
    const logarithmic = ahead.length > 0 || high >= LOG_FROM * low;
    const scale = logarithmic ? Math.log2 : (v) => v, span = scale(high) - scale(low) || 1;
    const x = (v) => EDGE.left + 12 + ((scale(v) - scale(low)) / span) * (width - EDGE.left - EDGE.right - 24);
    const y = (v) => HEIGHT - EDGE.bottom - (v / top) * (HEIGHT - EDGE.top - EDGE.bottom);
    const svg = kit.svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, class: "wbp-chart", role: "img", "aria-label": name });
    if (ahead.length) { // shaded where nothing was run
      const from = (x(Math.max(...run)) + x(Math.min(...ahead))) / 2;
      svg.append(kit.svg("rect", { x: from, y: EDGE.top, width: width - EDGE.right - from, height: HEIGHT - EDGE.top - EDGE.bottom, class: "wbp-notrun" }));
    }
    for (const t of ticks(0, top, 5)) {
      if (t > top) continue;
      svg.append(kit.svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(t), y2: y(t), class: "wbp-grid" }), label(EDGE.left - 7, y(t) + 4, words(t), "end"));
    }
    let last = -Infinity;
    for (const count of [...counts].sort((a, b) => a - b)) {
      svg.append(kit.svg("line", { x1: x(count), x2: x(count), y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "wbp-grid" }));
      if (x(count) - last > 26) { svg.append(label(x(count), HEIGHT - 18, String(count), "middle")); last = x(count); }
    }
    svg.append(label((width + EDGE.left) / 2, HEIGHT - 4, "workers", "middle"));
    return { svg, x, y, low, high, top, width };
  }

  /** What fewer workers let expect: rings on dashes in a band, from the run it was predicted from on. */
  function expect(at, color, curve, field, words) {
    const found = curve.predicted, start = curve.points.find((p) => p.workers === found?.workers);
    if (!found?.points.length || start?.[field] == null) return;
    const { svg, x, top } = at, y = (v) => at.y(Math.max(0, Math.min(v, top)));
    const value = (p, end = "") => (p === start ? p[field + end] ?? p[field] : p[`speedup${end}`] * (field === "speedup" ? 1 : curve.base.workers / p.workers));
    const points = [start, ...found.points], line = (list, end) => list.map((p) => `${x(p.workers).toFixed(1)} ${y(value(p, end)).toFixed(1)}`).join("L");
    svg.append(kit.svg("path", { d: `M${line(points, "_low")}L${line([...points].reverse(), "_high")}Z`, fill: color, class: "wbp-band" }),
      kit.svg("path", { d: `M${line(points, "")}`, fill: "none", stroke: color, class: "wbp-expected" }));
    for (const p of found.points) {
      const said = `${curve.name}, ${p.workers} workers, predicted from ${found.run}: ${words(value(p))}${between(value(p, "_low"), value(p, "_high"), words)}${p.far ? ", less certain" : ""}`;
      svg.append(kit.svg("circle", { cx: x(p.workers), cy: y(value(p)), r: 7, stroke: color, class: "wbp-ring" }, kit.svg("title", {}, document.createTextNode(said))));
    }
  }

  /** One curve: what was measured, with its intervals; a gap where something is missing. */
  function draw(at, color, points, field, words, name) {
    const { svg, x, y } = at;
    let d = "", pen = "M";
    for (const p of points) {
      if (p[field] == null) { pen = "M"; continue; }
      d += `${pen}${x(p.workers).toFixed(1)} ${y(p[field]).toFixed(1)}`;
      pen = "L";
    }
    svg.append(kit.svg("path", { d, fill: "none", stroke: color, "stroke-width": 2 }));
    for (const p of points) {
      const value = p[field], low = p[`${field}_low`], high = p[`${field}_high`];
      if (value == null) {
        svg.append(label(x(p.workers), HEIGHT - EDGE.bottom - 6, "× missing", "middle", "wbp-tick wbp-missing"));
        continue;
      }
      if (low != null && high > low) svg.append(kit.svg("path", { d: `M${x(p.workers)} ${y(low)}V${y(high)}M${x(p.workers) - 4} ${y(low)}h8M${x(p.workers) - 4} ${y(high)}h8`, stroke: color, "stroke-width": 1.5, fill: "none" }));
      svg.append(kit.svg("circle", { cx: x(p.workers), cy: y(value), r: 4.5, fill: color }, kit.svg("title", {}, document.createTextNode(`${name}, ${p.workers} workers: ${words(value)}${between(low, high, words)}`))));
    }
  }

  function ideal(at, from, to, words) {
    const { svg, x, y, top } = at;
    const end = to(at.high) > top ? at.low + ((top - from) / (to(at.high) - from)) * (at.high - at.low) : at.high;
    const count = 24, path = [...Array(count + 1).keys()].map((i) => { const n = at.low + ((end - at.low) * i) / count; return `${i ? "L" : "M"}${x(n).toFixed(1)} ${y(Math.min(to(n), top)).toFixed(1)}`; });
    svg.append(kit.svg("path", { d: path.join(""), fill: "none", class: "wbp-ideal" }), place(x(end), y(Math.min(to(end), top))));
    /** Beside the end of a line that rises, below one that does not. */
    function place(px, py) {
      if (to(at.high) === from) return label(px - 6, py + 13, words, "end");
      return px + 44 < at.width ? label(px + 8, py + 12, words, "start") : label(px - 10, py + 2, words, "end");
    }
  }

  function lawAt(law, n) {
    const spread = law.name === "Amdahl" ? 1 / (law.serial + (1 - law.serial) / n) : law.serial + (1 - law.serial) * n;
    return law.scale * spread;
  }

  function speedups(app, shown, width) {
    const all = shown.curves.flatMap((c) => c.points.map((p) => p.speedup_high ?? p.speedup ?? 0)), least = shown.curves[0].base.workers;
    const ahead = shown.curves.flatMap((c) => c.predicted?.points.map((p) => p.speedup) ?? []);
    const top = Math.min(Math.max(...shown.axis) / least, Math.max(1.35 * Math.max(...all, ...ahead), 1.4)) * 1.05;
    const at = chart("Speed-up over workers", shown.axis, top, width, (v) => `${tickLabel(v)}x`, shown.workers);
    ideal(at, at.low / least, (n) => n / least, "ideal");
    at.svg.append(kit.svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: at.y(1), y2: at.y(1), class: "wbp-one" }));
    for (const curve of shown.curves) {
      expect(at, colorOf(app, curve), curve, "speedup", times);
      draw(at, colorOf(app, curve), curve.points, "speedup", times, curve.name);
      const known = curve.points.filter((p) => p.speedup != null);
      if (curve.law.why_not || known.length < 2) continue;
      const first = known[0].workers, last = known.at(-1).workers;
      const path = [...Array(41).keys()].map((i) => { const n = first * (last / first) ** (i / 40); return `${i ? "L" : "M"}${at.x(n).toFixed(1)} ${at.y(lawAt(curve.law, n)).toFixed(1)}`; });
      at.svg.append(kit.svg("path", { d: path.join(""), fill: "none", stroke: colorOf(app, curve), "stroke-width": 1.6, "stroke-dasharray": "1 4", "stroke-linecap": "round" }));
    }
    return at.svg;
  }

  function efficiencies(app, shown, published, width) {
    const others = published.flatMap((p) => p.points.map(([n]) => n)), counts = [...new Set([...shown.axis, ...others])];
    const most = Math.max(1.05, ...shown.curves.flatMap((c) => c.points.map((p) => p.efficiency_high ?? p.efficiency ?? 0)));
    const at = chart("Efficiency over workers", counts, most * 1.04, width, (v) => `${Math.round(v * 100)} %`, [...shown.workers, ...others]);
    ideal(at, 1, () => 1, "ideal");
    published.forEach((one, i) => {
      const color = app.ink.runs[(shown.curves.length + 1 + i) % app.ink.runs.length], d = one.points.map(([n, v], k) => `${k ? "L" : "M"}${at.x(n).toFixed(1)} ${at.y(v).toFixed(1)}`).join("");
      at.svg.append(kit.svg("path", { d, fill: "none", stroke: color, "stroke-width": 1.2, "stroke-dasharray": "2 3", opacity: 0.85 }));
      for (const [n, v] of one.points) at.svg.append(kit.svg("rect", { x: at.x(n) - 3, y: at.y(v) - 3, width: 6, height: 6, fill: color, opacity: 0.85 }, kit.svg("title", {}, document.createTextNode(`${one.name} (${one.year}), ${n} GPUs: ${percent(v)}; ${one.source}`))));
    });
    for (const curve of shown.curves) {
      expect(at, colorOf(app, curve), curve, "efficiency", percent);
      draw(at, colorOf(app, curve), curve.points, "efficiency", percent, curve.name);
    }
    return at.svg;
  }

  function key(words, color, dashed) {
    return kit.h("li", {}, kit.h("i", { class: dashed ? "wbp-dashkey" : null, style: dashed ? `border-color:${color}` : `background:${color}` }), words);
  }

  /** What rings are, and where there are none although somebody asked. */
  function expectedKeys(shown) {
    const made = shown.curves.filter((c) => c.predicted?.points.length), keys = [];
    if (made.length) {
      const counts = [...new Set(made.map((c) => c.predicted.workers))].sort((a, b) => a - b).join(" and ");
      const picture = kit.svg("svg", { width: 36, height: 14, class: "wbp-ringkey", "aria-hidden": "true" },
        kit.svg("rect", { width: 36, height: 14, class: "wbp-band" }), kit.svg("path", { d: "M0 7H12M24 7H36", class: "wbp-expected" }), kit.svg("circle", { cx: 18, cy: 7, r: 5.5, class: "wbp-ring" }));
      const shaded = Math.max(...shown.axis) > Math.max(...shown.workers) ? " Shaded area: no run with so many workers was measured." : "";
      keys.push(kit.h("li", {}, picture, `Circles: predicted from runs with ${counts} workers. Band: should contain 90 % of runs. Dots: measured.${shaded}`));
    }
    const reasons = new Map(), many = shown.curves.length;
    for (const c of shown.curves) if (c.predicted?.why_not) reasons.set(c.predicted.why_not, [...(reasons.get(c.predicted.why_not) ?? []), c.name]);
    const none = [...reasons].map(([why, names]) => `Not predicted${names.length < many ? ` (${names.join(", ")})` : ""}: ${why[0].toLowerCase()}${why.slice(1)}`);
    return [...keys, ...none.map((n) => kit.h("li", { class: "wbp-muted" }, n))];
  }

  function lawWords(law) {
    if (law.why_not) return law.why_not;
    return `${law.name}'s law (dotted line), serial share ${percent(law.serial)} (${percent(law.low)} to ${percent(law.high)})`;
  }

  function makeTable(shown) {
    const { rows } = shown;
    const columns = COLUMNS.filter(([k]) => rows.some((r) => r[k] != null && r[k] !== ""));
    const left = (k) => (typeof rows[0][k] === "string" ? "wbp-left" : null);
    return kit.h("table", { class: "wbp-table" },
      kit.h("thead", {}, kit.h("tr", {}, columns.map(([k, title]) => kit.h("th", { scope: "col", class: left(k) }, title)))),
      kit.h("tbody", {}, rows.map((r) => kit.h("tr", {}, columns.map(([k, , words]) => kit.h("td", { class: left(k) }, r[k] == null ? "–" : words(r[k], r)))))));
  }

  function make(app, root) {
    let value = null, drawn = 0;
    const none = kit.h("p", { class: "wbp-empty" });
    const verdict = kit.h("p", { class: "wbp-verdict", role: "status" });
    const price = kit.field({ kind: "str", label: "Price of a worker-hour", help: "to show the cost of an epoch (or of 1M samples)", placeholder: "2.5", onchange: (v) => app.do("scaling.price", { value: v }) });
    const beside = kit.field({ kind: "bool", label: "Published curves", onchange: (v) => app.do("scaling.published", { on: v }) });
    const expected = kit.field({ kind: "bool", label: "Predicted curves", onchange: (v) => app.do("scaling.predicted", { on: v }) });
    const speed = kit.h("div"), share = kit.h("div"), legend = kit.h("ul", { class: "wb-legend" }), others = kit.h("ul", { class: "wb-legend" });
    const charts = kit.h("div", { class: "wbp-scalecharts" },
      kit.h("figure", { class: "wbp-loss" }, kit.h("figcaption", {}, kit.h("b", {}, "Speed-up"), kit.h("span", {}, "samples per second")), speed),
      kit.h("figure", { class: "wbp-loss" }, kit.h("figcaption", {}, kit.h("b", {}, "Efficiency"), kit.h("span", {}, "speed-up per worker")), share));
    const table = kit.h("div", { class: "wbp-scroll", tabindex: "0", role: "region", "aria-label": "Table of results for each number of workers" });
    const saves = kit.h("div", { class: "wbp-row", role: "group", "aria-label": "Export" }, kit.h("span", { class: "wbp-muted" }, "Export"), EXPORTS.map(([kind, name]) => kit.button(name, `Save scaling as ${name}`, () => save(kind))));
    const notes = kit.h("ul", { class: "wb-notes" });
    const whole = kit.h("div", { class: "wbp-compared" }, verdict, legend, charts, others, table, kit.h("div", { class: "wbp-row" }, price.root, expected.root, beside.root), saves, notes);
    root.append(none);

    async function save(kind) {
      const file = await app.do("scaling.export", { kind });
      kit.download(file.name, Uint8Array.from(atob(file.data), (c) => c.charCodeAt(0)), file.type);
    }

    const resized = new ResizeObserver(() => { if (value?.scaling && speed.clientWidth && speed.clientWidth !== drawn) drawAll(); });
    resized.observe(speed);

    function drawAll() {
      const shown = value.scaling, width = Math.max(260, speed.clientWidth || 420);
      drawn = speed.clientWidth;
      kit.text(verdict, shown.verdict);
      verdict.classList.toggle("wbp-not", shown.distribute === false);
      legend.replaceChildren(...shown.curves.map((c) => key(`${c.name}: ${lawWords(c.law)}`, colorOf(app, c), false)), ...expectedKeys(shown));
      speed.replaceChildren(speedups(app, shown, width));
      share.replaceChildren(efficiencies(app, shown, value.published, width));
      others.replaceChildren(...value.published.map((p, i) => key(`${p.name}${p.over > 1 ? `, relative to ${p.over} GPUs` : ""} (${p.year})`, app.ink.runs[(shown.curves.length + 1 + i) % app.ink.runs.length], true)));
      kit.show(others, value.published.length > 0);
      table.replaceChildren(makeTable(shown));
      const sources = value.published.map((p) => `${p.name}: ${p.from}; ${p.hardware}. ${p.source}, ${p.url}`);
      notes.replaceChildren(...[...shown.notes, ...sources].map((n) => kit.h("li", {}, n)));
    }

    return {
      draw(found) {
        value = found;
        kit.show(none, !found.scaling);
        kit.text(none, found.why ? `${found.why} Run one recipe with 1, 2 and 4 workers. If you have these runs already, select them on the Compare tab.` : "Run one recipe with several numbers of workers: %%distributed one_device,mirrored -n 1,2,4");
        if (found.scaling && !whole.isConnected) root.append(whole); // not before it is looked at
        kit.show(whole, Boolean(found.scaling));
        price.set(found.price);
        price.error(found.wrong);
        beside.set(found.beside);
        expected.set(found.predicted);
        kit.text(expected.root.querySelector("small"), found.owed ? "will be computed when no run is active" : "");
        if (found.scaling) drawAll();
      },
      restyle() { if (value?.scaling) drawAll(); },
      close() { resized.disconnect(); },
    };
  }

  return { name: "scaling", tab: "scaling", title: "Gain from more workers", make };
})());
