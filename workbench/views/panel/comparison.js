// Runs side by side: loss over three axes, bars, staleness, a table that sorts, exports, a verdict.

SECTIONS.push((() => {
  const AXES = [["t_s", "time", "s"], ["samples", "samples", "samples"], ["step", "steps", "step"]];
  const EXPORTS = [["csv", "CSV"], ["md", "Markdown"], ["html", "HTML"], ["json", "JSON"], ["png", "PNG"], ["svg", "SVG"]];
  const PARTS = ["data_wait", "compute", "sync_wait", "bubble", "transfer", "other"];
  const RATES = { samples_per_s: "samples_per_s", speedup: "relative" };
  const HEIGHT = 250, EDGE = { left: 52, right: 12, top: 10, bottom: 30 };

  const percent = (x) => (x == null ? "–" : `${(x * 100).toFixed(x < 0.0995 ? 1 : 0)} %`);
  const times = (x) => (x == null ? "–" : `${threeDigits(x)}x`);
  const plain = (x) => (x == null ? "–" : number(x));
  const rate = (x) => (x == null ? "–" : `${number(x)}/s`);

  /** One group of bars: caption, a bar per row with its value in words, spread over seeds. */
  const BARS = [
    ["samples_per_s", "Throughput", "samples/s after warm-up, higher is better", rate],
    ["all_samples_per_s", "Throughput, all steps", "samples/s, warm-up included", rate],
    ["speedup", "Speed-up", "throughput after warm-up, divided by the throughput of one device", times],
    ["efficiency", "Efficiency", "speed-up per worker", percent],
    ["step_s", "Time of a step", "lower is better", kit.seconds],
    ["sent_bytes_per_step", "Sent per step", "by all workers", kit.bytes],
    ["memory_bytes_per_worker", "Memory of a worker", "for model, gradients and optimizer, on the worker that uses the most memory", kit.bytes],
    ["final_loss", "Final loss", "mean ± standard deviation over seeds, lower is better", plain],
  ];
  /** What is shown at first; the others are told by "All columns". */
  const FEW = new Set(["run", "workers", "samples_per_s", "speedup", "efficiency", "step_s", "sync_wait_share", "staleness_mean", "final_loss", "state"]);
  const COLUMNS = [
    ["run", "run", String], ["strategy", "strategy", String], ["workers", "workers", plain], ["steps", "steps", plain],
    ["samples_per_s", "samples/s", plain], ["all_samples_per_s", "all steps", plain], ["speedup", "speed-up", times], ["efficiency", "efficiency", percent],
    ["step_s", "step", kit.seconds], ["compute_share", "compute", percent], ["data_wait_share", "data wait", percent],
    ["sync_wait_share", "sync wait", percent], ["transfer_share", "transfer", percent], ["bubble_share", "bubble", percent],
    ["staleness_mean", "staleness", plain], ["sent_bytes_per_step", "sent/step", kit.bytes],
    ["memory_bytes_per_worker", "memory", kit.bytes], ["final_loss", "final loss", plain], ["wall_s", "elapsed", kit.seconds],
    ["state", "state", String],
  ];

  /** A row's colour is its run's, here as in the dashboard and in stored pictures. */
  function color(app, row) { return app.ink.runs[(row.color ?? 0) % app.ink.runs.length]; }

  /** Rows beyond the eighth have an earlier one's colour; their lines are dashed. */
  function dashes(rows, at) {
    const before = rows.slice(0, at).filter((r) => r.color === rows[at].color).length;
    return ["", "7 4", "7 3 2 3", "2 3"][before % 4];
  }

  function decode(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }

  // ---- the overlay of losses

  function overlay(app, compared, axis, width) {
    const WIDTH = Math.max(260, width);
    const curves = compared.curves.filter((c) => c.loss.some((v) => v != null));
    const svg = kit.svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "wbp-chart", role: "img", "aria-label": `Loss by ${axis[1]} of ${compared.rows.map((r) => r.run).join(", ")}` });
    if (!curves.length) return svg;
    const finite = (values) => values.filter((v) => v != null && Number.isFinite(v));
    const xs = curves.flatMap((c) => finite(c[axis[0]])), ys = curves.flatMap((c) => finite(c.loss));
    const x1 = Math.max(...xs) || 1, y0 = Math.min(...ys), y1 = Math.max(...ys), pad = (y1 - y0 || Math.abs(y1) || 1) * 0.05;
    const x = (v) => EDGE.left + (v / x1) * (WIDTH - EDGE.left - EDGE.right);
    const y = (v) => HEIGHT - EDGE.bottom - ((v - y0 + pad) / (y1 - y0 + 2 * pad)) * (HEIGHT - EDGE.top - EDGE.bottom);
    for (const t of ticks(y0 - pad, y1 + pad, 5)) {
      svg.append(kit.svg("line", { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: y(t), y2: y(t), class: "wbp-grid" }));
      svg.append(text(EDGE.left - 7, y(t) + 4, tickLabel(t), "end"));
    }
    for (const t of ticks(0, x1, WIDTH / 110)) if (x(t) < WIDTH - 70) svg.append(text(x(t), HEIGHT - 12, tickLabel(t), "middle"));
    svg.append(text(WIDTH - EDGE.right, HEIGHT - 12, axis[2], "end"));
    for (const curve of curves) {
      let d = "", pen = "M";
      curve.loss.forEach((v, i) => {
        if (v == null || curve[axis[0]][i] == null) { pen = "M"; return; }
        d += `${pen}${x(curve[axis[0]][i]).toFixed(1)} ${y(v).toFixed(1)}`;
        pen = "L";
      });
      svg.append(kit.svg("path", { d, fill: "none", stroke: color(app, compared.rows[curve.row]), "stroke-dasharray": dashes(compared.rows, curve.row) || null, "stroke-width": 1.8, "stroke-linejoin": "round", opacity: 0.9 }, kit.svg("title", {}, document.createTextNode(curve.run))));
    }
    return svg;
  }

  function text(x, y, words, anchor) {
    return kit.svg("text", { x, y, "text-anchor": anchor, class: "wbp-tick" }, document.createTextNode(words));
  }

  // ---- bars

  function bars(app, compared, [field, caption, help, words]) {
    const rows = compared.rows, most = Math.max(...rows.map((r) => spreadOf(r, field).high ?? 0), 0);
    if (!rows.some((r) => r[field] != null)) return null;
    const figure = kit.h("figure", { class: "wbp-bars" }, kit.h("figcaption", {}, kit.h("b", {}, caption), kit.h("span", {}, help)));
    rows.forEach((row) => {
      const { mean, std, low, high } = spreadOf(row, field), bar = kit.h("div", { class: "wbp-bar" });
      if (mean != null && most > 0) {
        bar.append(kit.h("i", { style: `width:${(100 * mean) / most}%;background:${color(app, row)}` }));
        if (high > low) bar.append(kit.h("u", { style: `left:${(100 * low) / most}%;width:${(100 * (high - low)) / most}%` }));
      }
      const value = words(mean) + (std ? ` ± ${words(std)}` : "");
      figure.append(kit.h("div", { class: "wbp-barrow", role: "img", "aria-label": `${row.run}: ${value}` }, kit.h("span", { title: row.run }, row.run), bar, kit.h("b", {}, value)));
    });
    return figure;
  }

  function spreadOf(row, field) {
    // Rates have a 95 % interval, other figures their standard deviation over seeds.
    const known = RATES[field], mean = row[field] ?? null, std = known ? null : row[`${field}_std`] ?? null;
    if (mean == null) return { mean, std, low: null, high: null };
    return { mean, std, low: Math.max(0, known ? row[`${known}_low`] ?? mean : mean - (std ?? 0)), high: known ? row[`${known}_high`] ?? mean : mean + (std ?? 0) };
  }

  /** Where a step's time goes: stacked shares, waits hatched. */
  function shares(app, compared) {
    const { phases } = app.ink, colors = { data_wait: phases[0], compute: phases[1], sync_wait: phases[2], bubble: phases[2], transfer: phases[3], other: phases[4] };
    const used = PARTS.filter((p) => compared.rows.some((r) => r[`${p}_share`]));
    if (!used.length) return null;
    const figure = kit.h("figure", { class: "wbp-bars wbp-shares" }, kit.h("figcaption", {}, kit.h("b", {}, "Where a step's time goes"), kit.h("span", {}, "percentage of the workers' time")));
    const paint = (p) => (p === "sync_wait" || p === "bubble" ? `repeating-linear-gradient(135deg, ${colors[p]} 0 3px, ${colors[p]}38 3px 6px)` : colors[p]);
    for (const row of compared.rows) {
      const bar = kit.h("div", { class: "wbp-bar wbp-stack" }), said = [];
      for (const p of used) {
        const share = row[`${p}_share`];
        if (!share) continue;
        const name = p.replace("_", " ");
        said.push(`${name} ${percent(share)}`);
        bar.append(kit.h("i", { style: `width:${share * 100}%;background:${paint(p)}`, title: `${name} ${percent(share)}` }));
      }
      figure.append(kit.h("div", { class: "wbp-barrow", role: "img", "aria-label": `${row.run}: ${said.join(", ")}` }, kit.h("span", { title: row.run }, row.run), bar, kit.h("b", {}, kit.seconds(row.step_s))));
    }
    const legend = kit.h("ul", { class: "wb-legend" }, used.map((p) => key(p.replace("_", " "), colors[p], p === "sync_wait" || p === "bubble")));
    figure.append(legend);
    return figure;
  }

  function staleness(app, compared) {
    const rows = compared.rows.filter((r) => r.staleness?.length);
    if (!rows.length) return null;
    const figure = kit.h("figure", { class: "wbp-bars" }, kit.h("figcaption", {}, kit.h("b", {}, "Staleness of pushes"), kit.h("span", {}, "updates by other workers between pull and push")));
    for (const row of rows) {
      const all = row.staleness.reduce((a, b) => a + b, 0), most = Math.max(...row.staleness), shown = row.staleness.slice(0, 24);
      const columns = kit.h("div", { class: "wbp-histogram", role: "img", "aria-label": `${row.run}: mean ${plain(row.staleness_mean)}, max ${plain(row.staleness_max)}` });
      shown.forEach((count, s) => columns.append(kit.h("span", { title: `staleness ${s}: ${percent(count / all)}` }, kit.h("i", { style: `height:${(100 * count) / most}%;background:${color(app, row)}` }), kit.h("small", {}, String(s)))));
      figure.append(kit.h("div", { class: "wbp-stale" }, kit.h("span", {}, row.run), columns, kit.h("b", {}, `mean ${plain(row.staleness_mean)}`)));
    }
    return figure;
  }

  // ---- the table

  function makeTable(compared, sort, onsort, all) {
    const metrics = compared.metrics.map((m) => [`eval_${m}`, m, plain]);
    const columns = [...COLUMNS.slice(0, -2), ...metrics, ...COLUMNS.slice(-2)].filter(([k]) => all || FEW.has(k) || k.startsWith("eval_")).filter(([k]) => k !== "state" || all || compared.rows.some((r) => r.state !== "finished")).filter(([k]) => compared.rows.some((r) => r[k] != null && r[k] !== ""));
    const rows = [...compared.rows];
    if (sort.key) rows.sort((a, b) => order(a[sort.key], b[sort.key], sort.down));
    const head = kit.h("tr", {}, columns.map(([k, title]) => {
      const on = sort.key === k;
      return kit.h("th", { scope: "col", class: rows.some((r) => typeof r[k] === "string") ? "wbp-left" : null, "aria-sort": on ? (sort.down ? "descending" : "ascending") : null },
        kit.h("button", { type: "button", onclick: () => onsort(k), title: `Sort by ${title}` }, title, on ? (sort.down ? " ↓" : " ↑") : ""));
    }));
    const body = rows.map((row) => kit.h("tr", {}, columns.map(([k, , words]) => kit.h("td", { class: typeof row[k] === "string" ? "wbp-left" : null }, row[k] == null ? "–" : words(row[k])))));
    return kit.h("table", { class: "wbp-table" }, kit.h("thead", {}, head), kit.h("tbody", {}, body));
  }

  function order(a, b, down) {
    if (a == null || b == null) return (a == null) - (b == null);
    const less = typeof a === "string" ? a.localeCompare(b) : a - b;
    return down ? -less : less;
  }

  function make(app, root) {
    let axis = AXES[0], sort = { key: "", down: true }, compared = null;
    const picks = kit.h("div", { class: "wbp-chips", role: "group", "aria-label": "Runs to compare" });
    const latest = kit.button("Runs of the latest recipe", "Compare the runs that have the same recipe as the latest ended run. At most 24 runs are compared: the latest ones", () => app.do("comparison.latest"));
    const none = kit.h("p", { class: "wbp-empty" }, "Finished runs are compared here. Run one recipe under two strategies.");
    const verdict = kit.h("p", { class: "wbp-verdict", role: "status" });
    const axes = kit.h("div", { class: "wbp-segments", role: "radiogroup", "aria-label": "Loss by" }, AXES.map((one) => kit.h("button", { type: "button", role: "radio", onclick: () => { axis = one; drawLoss(); } }, `by ${one[1]}`)));
    const legend = kit.h("ul", { class: "wb-legend" }), chart = kit.h("div");
    const loss = kit.h("figure", { class: "wbp-loss" }, kit.h("figcaption", {}, kit.h("b", {}, "Loss"), axes), chart, legend);
    const grid = kit.h("div", { class: "wbp-bargrid" });
    const table = kit.h("div", { class: "wbp-scroll", tabindex: "0", role: "region", "aria-label": "Table of the runs" });
    const every = kit.field({ kind: "bool", label: "All columns", onchange: () => drawTable() });
    const saves = kit.h("div", { class: "wbp-row", role: "group", "aria-label": "Export" }, kit.h("span", { class: "wbp-muted" }, "Export"), EXPORTS.map(([kind, name]) => kit.button(name, `Save the comparison as ${name}`, () => save(kind))));
    const notes = kit.h("ul", { class: "wb-notes" });
    const whole = kit.h("div", { class: "wbp-compared" }, verdict, loss, grid, kit.h("div", {}, every.root, table), saves, notes);
    root.append(kit.h("div", { class: "wbp-row" }, picks, latest), none, whole);

    async function save(kind) {
      const file = await app.do("comparison.export", { kind });
      kit.download(file.name, decode(file.data), file.type);
    }

    const resized = new ResizeObserver(() => { if (compared && chart.clientWidth && chart.clientWidth !== drawn) drawLoss(); });
    resized.observe(chart);
    let drawn = 0;

    function drawLoss() {
      drawn = chart.clientWidth;
      [...axes.children].forEach((b, i) => { b.setAttribute("aria-checked", AXES[i] === axis); b.tabIndex = AXES[i] === axis ? 0 : -1; });
      chart.replaceChildren(overlay(app, compared, axis, chart.clientWidth || 720));
      legend.replaceChildren(...compared.rows.map((r) => key(r.run, color(app, r), false)));
    }

    function drawTable() {
      const focused = table.contains(document.activeElement) ? document.activeElement.title : "";
      table.replaceChildren(makeTable(compared, sort, (k) => { sort = { key: k, down: sort.key === k ? !sort.down : true }; drawTable(); }, every.read()));
      if (focused) [...table.querySelectorAll("button")].find((b) => b.title === focused)?.focus();
    }

    axes.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      axis = AXES[(AXES.indexOf(axis) + step + AXES.length) % AXES.length];
      drawLoss();
      axes.children[AXES.indexOf(axis)].focus();
    });

    function drawAll() {
      kit.text(verdict, [compared.verdict, compared.outlook].filter(Boolean).join(" "));
      kit.show(verdict, Boolean(verdict.textContent));
      drawLoss();
      const metrics = compared.metrics.map((m) => [`eval_${m}`, m, "last evaluation, mean ± standard deviation over seeds", plain]);
      grid.replaceChildren(...[shares(app, compared), ...[...BARS, ...metrics].map((b) => bars(app, compared, b)), staleness(app, compared)].filter(Boolean));
      drawTable();
      notes.replaceChildren(...[...compared.notes, compared.rates].filter(Boolean).map((n) => kit.h("li", {}, n)));
    }

    return {
      draw(value) {
        kit.list(picks, value.runs, (r) => r.name, (r) => {
          const box = kit.h("input", { type: "checkbox", onchange: () => app.do("comparison.pick", { run: r.name, on: box.checked }) });
          return kit.h("label", { class: "wbp-chip" }, box, kit.h("span", {}, r.name));
        }, (element, r) => { element.firstChild.checked = r.picked; kit.attr(element, "data-state", r.state); element.title = `${r.strategy}, ${r.state}`; });
        kit.show(latest, value.runs.length > 1);
        compared = value.compared;
        kit.show(none, !compared);
        kit.text(none, value.why || "Finished runs are compared here. Run one recipe under two strategies.");
        kit.show(whole, Boolean(compared));
        if (compared) drawAll();
      },
      restyle() { if (compared) drawAll(); },
      close() { resized.disconnect(); },
    };
  }

  return { name: "comparison", tab: "compare", title: "Runs side by side", make };
})());
