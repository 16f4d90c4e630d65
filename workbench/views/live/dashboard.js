// The live dashboard, drawn from the binary frames of workbench/views/live/frames.py.
// One store per widget, shared by its views; a view only draws. Works offline.

const LEFT = 46, RIGHT = 10, TOP = 6, BOTTOM = 22, CHART = 150, MOST_LABELS = 6, STRIP = 15, MARK_GAP = 4, HOVER_PX = 6, SMALL = 92, ROW = 24, GAP = 5;
const FEWER = "Remove one worker", MORE = "Add one worker";
const HEARD_MS = 3000; // by then a change that was asked for has begun, or cannot be
const HELLO_AGAIN_MS = 1000, UNHEARD_LIMIT = 5;

/** What the kernel has sent so far: the head, and tables of float32 by key. */
class Store {
  constructor(send) {
    this.send = send;
    this.seq = -1;
    this.head = {};
    this.tables = new Map();
    this.listeners = new Set();
    this.asked = -Infinity;
    this.unheard = 0;
  }

  hello() {
    const now = performance.now();
    if (now - this.asked < HELLO_AGAIN_MS) return false;
    this.asked = now;
    this.send({ type: "hello" });
    return true;
  }

  receive(frame, buffers) {
    if (frame?.type !== "frame") return;
    if (!frame.full && frame.base !== this.seq) return void this.hello();
    if (frame.full) { this.head = {}; this.tables.clear(); }
    this.seq = frame.seq;
    // A hello that is sent before JupyterLab has opened the widget's subshell waits for the cell's
    // end, so it is sent again; not for ever, as kernels without subshells hold back every one.
    if (!frame.heard && this.unheard < UNHEARD_LIMIT && this.hello()) this.unheard += 1;
    Object.assign(this.head, frame.head);
    const view = buffers[0];
    const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
    const floats = new Float32Array(bytes);
    for (const table of frame.arrays) this.merge(table, floats);
    for (const listener of this.listeners) listener();
  }

  merge({ key, skip, keep, rows, columns, offset }, floats) {
    const old = this.tables.get(key)?.data ?? new Float32Array(0);
    const kept = old.subarray(skip * columns, (skip + keep) * columns);
    const data = new Float32Array((keep + rows) * columns);
    data.set(kept);
    data.set(floats.subarray(offset, offset + rows * columns), keep * columns);
    this.tables.set(key, { data, columns, rows: keep + rows });
  }

  table(key) { return this.tables.get(key) ?? { data: new Float32Array(0), columns: 1, rows: 0 }; }
}

// ---- numbers and ticks

/** Three significant digits with k, M, G, as workbench/views/text.py writes them. */
function number(x, digits = threeDigits) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  for (const [limit, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= limit * 0.9995) return digits(x / limit) + suffix;
  return size !== 0 && size < 1e-3 ? x.toExponential(2) : digits(x);
}

function threeDigits(x) {
  const size = Math.abs(x);
  if (size >= 99.95 || Number.isInteger(x)) return x.toFixed(0);
  return size >= 1 ? x.toFixed(size >= 9.995 ? 1 : 2) : trim(x);
}

function trim(x) {
  return String(Number(x.toPrecision(3)));
}

function tickLabel(x) {
  return x !== 0 && Math.abs(x) < 1e-3 ? String(x.toExponential()).replace(/(\.\d)\d+e/, "$1e") : number(x, trim);
}

function milliseconds(x) {
  return Number.isFinite(x) ? `${x.toFixed(x >= 9.95 || x === 0 ? 0 : x >= 0.995 ? 1 : 2)} ms` : "–";
}

/** Round values that divide [low, high] into about `count` parts. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step)
    found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

// ---- drawing helpers

/** A canvas with a caption; knows its width from a ResizeObserver, so drawing reads no layout. */
class Panel {
  constructor(parent, name, observer) {
    this.figure = make("figure", "", parent);
    this.caption = make("figcaption", "", this.figure);
    this.title = make("b", "", this.caption, name);
    this.value = make("span", "", this.caption);
    this.canvas = make("canvas", "", this.figure);
    this.canvas.setAttribute("role", "img");
    this.canvas.panel = this;
    this.context = this.canvas.getContext("2d");
    this.width = 0;
    this.observer = observer;
    observer.observe(this.figure);
    this.figure.panel = this;
  }

  /** Clear to `height` CSS pixels and return the context, or null while there is no width. */
  begin(height, ink) {
    const scale = globalThis.devicePixelRatio || 1, width = this.width;
    if (width < 40) return null;
    const pixels = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) {
      [this.canvas.width, this.canvas.height] = pixels;
      this.canvas.style.height = `${height}px`;
    }
    const c = this.context;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = `11px ${ink.font}`;
    c.textBaseline = "middle";
    c.lineJoin = "round";
    return c;
  }

  label(text) { this.canvas.setAttribute("aria-label", text); }

  remove() { this.observer.unobserve(this.figure); this.figure.remove(); }
}

function make(tag, name, parent, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.textContent = text;
  parent?.append(element);
  return element;
}

/** One item of a legend. */
function key(name, color, hatched) {
  const item = make("li", ""), swatch = make("i", "", item);
  swatch.style.background = hatched
    ? `repeating-linear-gradient(135deg, ${color} 0 2px, ${color}38 2px 4.5px)` : color;
  item.append(name);
  return item;
}

/** One note; what stands between backticks is drawn as code. */
function note(text) {
  const item = make("li", "");
  text.split(/`([^`\n]+)`/).forEach((part, i) => { if (part) item.append(i % 2 ? make("code", "", null, part) : part); });
  return item;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function hatch(c, color) {
  const scale = globalThis.devicePixelRatio || 1, side = Math.round(6 * scale);
  const tile = document.createElement("canvas");
  tile.width = tile.height = side;
  const t = tile.getContext("2d");
  t.globalAlpha = 0.22;
  t.fillStyle = color;
  t.fillRect(0, 0, side, side);
  t.globalAlpha = 1;
  t.strokeStyle = color;
  t.lineWidth = 1.7 * scale;
  t.beginPath();
  for (const shift of [-side, 0, side]) { t.moveTo(shift, side); t.lineTo(shift + side, 0); }
  t.stroke();
  const pattern = c.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

/** Fill styles of the phases; the hatched one is a pattern. */
function fills(c, ink) {
  return ink.phases.map((color, i) => (i === ink.hatched ? hatch(c, color) : color));
}

// ---- line charts

/** Draw a curve: band from least to greatest, line of means, axes with units. */
function drawCurve(panel, table, ink, options) {
  const c = panel.begin(options.height, ink);
  if (!c) return;
  const { data, rows } = table, plotRight = panel.width - RIGHT, plotBottom = options.height - BOTTOM;
  if (!rows) return drawEmpty(c, panel, options.height, ink);
  const [low, high] = valueRange(data, rows, options);
  const first = data[0], last = Math.max(data[(rows - 1) * 4], first + 1);
  const x = (step) => LEFT + ((step - first) / (last - first)) * (plotRight - LEFT);
  const marks = shownChanges(options.changes ?? [], first, last, x), top = TOP + (marks.length ? STRIP : 0);
  const y = (v) => plotBottom - ((v - low) / (high - low)) * (plotBottom - top);
  drawAxes(c, ink, { low, high, first, last, x, y, plotRight, plotBottom });
  c.save();
  c.beginPath();
  c.rect(LEFT - 1, TOP - 4, plotRight - LEFT + 6, plotBottom - TOP + 6);
  c.clip();
  drawBand(c, data, rows, x, y, options.color);
  const evals = options.evals ?? [], each = Math.ceil(evals.length / 24); // more would hide the line
  evals.forEach((e, i) => { if ((evals.length - 1 - i) % each === 0) drawEval(c, e, x, y, plotBottom, ink, low, high); });
  drawLine(c, data, rows, x, y, options.color);
  drawChanges(c, marks, TOP - 4, plotBottom, plotRight, ink);
  c.restore();
  panel.at = (px) => nearestRow(data, rows, first + ((px - LEFT) / (plotRight - LEFT)) * (last - first));
  if (panel.hover != null) drawHover(c, panel, table, x, y, plotBottom, ink, options, marks);
}

function drawEmpty(c, panel, height, ink) {
  c.fillStyle = ink.muted;
  c.textAlign = "center";
  c.fillText("waiting for the first step", panel.width / 2, height / 2);
}

function valueRange(data, rows, { fromZero, evals }) {
  const seen = (evals ?? []).map((e) => e.loss).filter(Number.isFinite);
  let low = Math.min(Infinity, ...seen), high = Math.max(-Infinity, ...seen);
  for (let i = 0; i < rows; i++) {
    const a = data[i * 4 + 2], b = data[i * 4 + 3];
    if (a < low) low = a;
    if (b > high) high = b;
  }
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (fromZero) low = Math.min(0, low);
  const pad = (high - low || Math.abs(high) || 1) * 0.05;
  return [fromZero && low === 0 ? 0 : low - pad, high + pad];
}

function drawAxes(c, ink, { low, high, first, last, x, y, plotRight, plotBottom }) {
  c.strokeStyle = ink.grid;
  c.lineWidth = 1;
  c.fillStyle = ink.muted;
  c.textAlign = "right";
  for (const t of ticks(low, high, plotBottom > 100 ? 5 : 2.5)) {
    const at = Math.round(y(t)) + 0.5;
    line(c, LEFT, at, plotRight, at);
    c.fillText(tickLabel(t), LEFT - 6, at);
  }
  c.textAlign = "center";
  const wide = plotRight - LEFT, unit = plotRight - 26;
  for (const t of ticks(first, last, Math.max(2, wide / 90))) {
    const at = x(t);
    if (at < unit - 14 && t === Math.round(t)) c.fillText(tickLabel(t), at, plotBottom + 12);
  }
  c.textAlign = "right";
  c.fillText("step", plotRight, plotBottom + 12);
}

function line(c, x0, y0, x1, y1) {
  c.beginPath();
  c.moveTo(x0, y0);
  c.lineTo(x1, y1);
  c.stroke();
}

function drawBand(c, data, rows, x, y, color) {
  c.globalAlpha = 0.2;
  c.fillStyle = color;
  c.beginPath();
  for (let i = 0; i < rows; i++) if (data[i * 4 + 3] === data[i * 4 + 3]) c.lineTo(x(data[i * 4]), y(data[i * 4 + 3]));
  for (let i = rows - 1; i >= 0; i--) if (data[i * 4 + 2] === data[i * 4 + 2]) c.lineTo(x(data[i * 4]), y(data[i * 4 + 2]));
  c.fill();
  c.globalAlpha = 1;
}

function drawLine(c, data, rows, x, y, color) {
  c.strokeStyle = color;
  c.lineWidth = 1.8;
  c.beginPath();
  let pen = false;
  for (let i = 0; i < rows; i++) {
    const v = data[i * 4 + 1];
    if (v !== v) { pen = false; continue; }
    if (pen) c.lineTo(x(data[i * 4]), y(v));
    else c.moveTo(x(data[i * 4]), y(v));
    pen = true;
  }
  c.stroke();
  const end = (rows - 1) * 4;
  dot(c, x(data[end]), y(data[end + 1]), 2.8, color);
}

function dot(c, x, y, radius, color) {
  c.fillStyle = color;
  c.beginPath();
  c.arc(x, y, radius, 0, 2 * Math.PI);
  c.fill();
}

function drawEval(c, evaluation, x, y, plotBottom, ink, low, high) {
  const at = x(evaluation.step);
  c.strokeStyle = ink.text;
  c.lineWidth = 1;
  c.globalAlpha = 0.55;
  c.setLineDash([2, 3]);
  line(c, at, TOP, at, plotBottom);
  c.setLineDash([]);
  c.globalAlpha = 1;
  const loss = evaluation.loss;
  const top = loss >= low && loss <= high ? y(loss) : TOP + 4;
  c.fillStyle = ink.text;
  c.beginPath();
  for (const [dx, dy] of [[0, -4.5], [4.5, 0], [0, 4.5], [-4.5, 0]]) c.lineTo(at + dx, top + dy);
  c.fill();
}

/** The changes of a curve's steps: [where, step, what is said]. */
function shownChanges(changes, first, last, x) {
  return changes.filter(([step]) => step >= first && step <= last).map(([step, said]) => [x(step), step, said]);
}

/** Where workers went or came: a dashed line, and words above the curve where they have room. */
function drawChanges(c, marks, top, plotBottom, plotRight, ink) {
  c.font = `11px ${ink.font}`;
  const wide = marks.map(([, , said]) => c.measureText(said).width);
  const places = marks.length <= MOST_LABELS ? labelPlaces(marks.map(([at]) => at), wide, LEFT, plotRight) : [];
  c.save();
  c.lineWidth = 1;
  c.textAlign = "left";
  marks.forEach(([place, , said], i) => {
    const at = Math.round(place) + 0.5;
    c.strokeStyle = ink.text;
    c.globalAlpha = 0.6;
    c.setLineDash([4, 2]);
    line(c, at, top, at, plotBottom);
    c.globalAlpha = 1;
    c.fillStyle = ink.muted;
    if (places[i] != null) c.fillText(said, places[i], top + 6);
  });
  c.restore();
}

/** The same as `change_places` in views/text.py: right of the mark, else left of it, else null. */
function labelPlaces(marks, wide, left, right) {
  let free = left;
  return marks.map((at, i) => {
    const later = marks[i + 1] ?? right, after = at + MARK_GAP;
    const before = at - MARK_GAP - wide[i];
    const begin = after + wide[i] <= later ? after : before >= free ? before : null;
    free = Math.max(free, (begin === null ? at : Math.max(at, begin + wide[i])) + MARK_GAP);
    return begin;
  });
}

function nearestRow(data, rows, step) {
  let best = 0;
  for (let i = 1; i < rows; i++) if (Math.abs(data[i * 4] - step) < Math.abs(data[best * 4] - step)) best = i;
  return best;
}

function drawHover(c, panel, { data }, x, y, plotBottom, ink, options, marks) {
  const row = panel.at(panel.hover) * 4;
  c.strokeStyle = ink.muted;
  c.lineWidth = 1;
  line(c, x(data[row]), TOP, x(data[row]), plotBottom);
  dot(c, x(data[row]), y(data[row + 1]), 3.5, options.color);
  const near = marks.filter(([at]) => Math.abs(at - panel.hover) <= HOVER_PX).map(([, step, said]) => ` · ${said} at step ${step}`);
  setText(panel.value, `step ${number(data[row])}: ${number(data[row + 1])}${options.unit}${near.join("")}`);
}

// ---- worker rows

function rowHeight(workers) {
  return workers <= 8 ? ROW : Math.max(9, Math.floor((8 * ROW) / workers));
}

/** The labels for a width, and the space that they take. */
function gutter(c, head, width, ink) {
  const labels = width < 520 ? head.labels.map((l) => l.split(" · ")[0]) : head.labels;
  c.font = `600 12px ${ink.font}`;
  const widest = Math.max(0, ...labels.map((l) => c.measureText(l).width));
  return { labels, left: Math.min(Math.ceil(widest) + 14, width * 0.4) };
}

function drawLabel(c, text, y, height, slow, ink) {
  const size = Math.min(12, height - 1);
  c.font = `${slow ? 600 : 400} ${size}px ${ink.font}`;
  c.textAlign = "left";
  c.fillStyle = slow ? ink.wait : ink.text;
  c.fillText(text, 6, y + height / 2 + 0.5);
  if (slow) c.fillRect(0, y + 2, 3, height - 4);
}

/** The latest steps: one row per worker, one box per phase. */
function drawTimeline(panel, table, head, ink) {
  const ranks = head.labels.length, row = rowHeight(ranks);
  const height = 18 + ranks * (row + GAP) + BOTTOM;
  const c = panel.begin(height, ink);
  if (!c) return;
  const { data, rows, columns } = table;
  if (!rows) return drawEmpty(c, panel, height, ink);
  const { labels, left } = gutter(c, head, panel.width, ink);
  const right = panel.width - RIGHT, visible = Math.max(4, Math.min(16, Math.floor((right - left) / 64)));
  const from = Math.max(0, rows - visible), [t0, t1] = span(data, columns, from, rows, ranks);
  const x = (t) => left + ((t - t0) / (t1 - t0 || 1)) * (right - left);
  drawTimeAxis(c, ink, t0, t1, x, height - BOTTOM, right);
  const styles = fills(c, ink);
  for (let r = 0; r < ranks; r++) {
    const y = 18 + r * (row + GAP);
    drawLabel(c, labels[r], y, row, r === head.slow_rank, ink);
    for (let i = from; i < rows; i++) drawStep(c, data, i * columns + 1 + r * 6, x, y, row, styles, ink);
  }
  drawStepNumbers(c, data, columns, from, rows, x, ink);
  const last = data[(rows - 1) * columns], cut = drawCuts(c, table, head, from, ranks, x, height - BOTTOM, ink);
  setText(panel.value, `steps ${data[from * columns]} to ${last}${cut ? " · dashed line: a pause was cut out" : ""}`);
}

/** A dashed line where time between two steps was left out; returns whether there is one. */
function drawCuts(c, { data, rows, columns }, head, from, ranks, x, bottom, ink) {
  let any = false;
  c.strokeStyle = ink.text;
  c.lineWidth = 1.2;
  c.setLineDash([3, 3]);
  for (let i = from + 1; i < rows; i++) {
    if (!(head.cuts ?? []).includes(data[i * columns])) continue;
    any = true;
    const starts = Array.from({ length: ranks }, (_, r) => data[i * columns + 1 + r * 6]).filter((t) => t === t);
    const before = span(data, columns, i - 1, i, ranks)[1], at = Math.round(x((before + Math.min(...starts)) / 2)) + 0.5;
    line(c, at, 14, at, bottom);
  }
  c.setLineDash([]);
  return any;
}

function span(data, columns, from, rows, ranks) {
  let t0 = Infinity, t1 = -Infinity;
  for (let r = 0; r < ranks; r++) {
    const begin = data[from * columns + 1 + r * 6];
    if (begin < t0) t0 = begin;
    for (let i = from; i < rows; i++) {
      const at = i * columns + 1 + r * 6;
      let end = data[at];
      for (let p = 1; p <= 5; p++) end += data[at + p] || 0;
      if (end > t1) t1 = end;
    }
  }
  return Number.isFinite(t0) && t1 > t0 ? [t0, t1] : [0, 1];
}

function drawStep(c, data, at, x, y, height, styles, ink) {
  let t = data[at];
  if (t !== t) return;
  const begin = x(t);
  for (let p = 0; p < 5; p++) {
    const length = data[at + 1 + p];
    if (!(length > 0)) continue;
    const a = x(t), b = x(t + length);
    if (styles[p] instanceof CanvasPattern) { c.fillStyle = ink.paper; c.fillRect(a, y, b - a, height); }
    c.fillStyle = styles[p];
    c.fillRect(a, y, Math.max(b - a, 0.4), height);
    t += length;
  }
  c.fillStyle = ink.paper; // a gap between steps
  c.fillRect(begin - 0.75, y - 1, 1.5, height + 2);
}

function drawStepNumbers(c, data, columns, from, rows, x, ink) {
  c.font = `10.5px ${ink.font}`;
  c.fillStyle = ink.muted;
  c.textAlign = "left";
  let free = -Infinity;
  for (let i = from; i < rows; i++) {
    const begins = Array.from({ length: (columns - 1) / 6 }, (_, r) => data[i * columns + 1 + r * 6]).filter((t) => t === t);
    const at = x(begins[0]), text = String(data[i * columns]); // the lowest rank that took part
    if (!(at >= free)) continue;
    c.fillText(text, at + 1, 9);
    free = at + c.measureText(text).width + 8;
  }
}

function drawTimeAxis(c, ink, t0, t1, x, bottom, right) {
  const long = t1 - t0 > 5, scale = long ? 1 : 1e3;
  c.strokeStyle = ink.grid;
  c.fillStyle = ink.muted;
  c.font = `11px ${ink.font}`;
  c.textAlign = "center";
  for (const t of ticks(0, (t1 - t0) * scale, Math.max(2, (right - x(t0)) / 110))) {
    const at = Math.round(x(t0 + t / scale)) + 0.5;
    line(c, at, 16, at, bottom);
    if (at < right - 34) c.fillText(trim(t), at, bottom + 11);
  }
  c.textAlign = "right";
  c.fillText(long ? "s" : "ms", right, bottom + 11);
}

/** Where each worker's time goes: stacked shares, what it could do, how long it waits. */
function drawShares(panel, table, head, ink) {
  const ranks = table.rows, row = rowHeight(ranks), height = 18 + ranks * (row + GAP);
  const c = panel.begin(height, ink);
  if (!c || !ranks) return;
  const { labels, left } = gutter(c, head, panel.width, ink);
  const wide = panel.width > 620, bar = panel.width - RIGHT - left - (wide ? 176 : 72);
  const columns = wide ? [["potential", panel.width - RIGHT - 84], ["median wait", panel.width - RIGHT]]
    : [["wait", panel.width - RIGHT]];
  c.font = `11px ${ink.font}`;
  c.fillStyle = ink.muted;
  c.textAlign = "right";
  for (const [name, at] of columns) c.fillText(name, at, 8);
  const styles = fills(c, ink);
  for (let r = 0; r < ranks; r++) {
    const at = r * table.columns, y = 18 + r * (row + GAP), slow = r === head.slow_rank;
    drawLabel(c, labels[r], y, row, slow, ink);
    drawShare(c, table.data, at + 4, left, y, bar, row, styles, ink);
    c.textAlign = "right";
    c.font = `${Math.min(12, row)}px ${ink.font}`;
    c.fillStyle = ink.text;
    const texts = [milliseconds(table.data[at + 3])];
    if (wide) texts.unshift(`${number(table.data[at + 2])}/s`);
    texts.forEach((text, i) => c.fillText(text, columns[i][1], y + row / 2 + 0.5));
  }
}

function drawShare(c, data, at, left, y, width, height, styles, ink) {
  c.fillStyle = ink.grid;
  c.fillRect(left, y, width, height);
  let from = left;
  c.textAlign = "center";
  c.font = `600 ${Math.min(11.5, height)}px ${ink.font}`;
  for (let p = 0; p < 5; p++) {
    const share = data[at + p], size = share * width;
    if (!(size > 0)) continue;
    c.fillStyle = ink.paper;
    c.fillRect(from, y, size, height);
    c.fillStyle = styles[p];
    c.fillRect(from, y, Math.max(0, size - 1), height);
    const text = `${Math.round(share * 100)} %`;
    if (size > c.measureText(text).width + 8 && height >= 11) drawOn(c, text, from + size / 2, y + height / 2 + 0.5, p, ink);
    from += size;
  }
}

/** A pipeline's bubbles: the schedule's share hatched, the excess full, then the worker's work. */
function drawBubbles(panel, table, head, ink) {
  const ranks = table.rows, row = rowHeight(ranks), height = 18 + ranks * (row + GAP) + 4;
  const c = panel.begin(height, ink);
  if (!c || !ranks) return;
  const { labels, left } = gutter(c, head, panel.width, ink), { ideal } = head.split;
  const wide = panel.width > 620, bar = panel.width - RIGHT - left - (wide ? 176 : 96);
  const columns = wide ? [["bubble", panel.width - RIGHT - 94], ["above ideal", panel.width - RIGHT]]
    : [["above ideal", panel.width - RIGHT]];
  c.font = `11px ${ink.font}`;
  c.fillStyle = ink.muted;
  c.textAlign = "right";
  for (const [name, at] of columns) c.fillText(name, at, 8);
  const styles = fills(c, ink);
  for (let r = 0; r < ranks; r++) {
    const y = 18 + r * (row + GAP), bubble = table.data[r * table.columns + 9];
    drawLabel(c, labels[r], y, row, r === head.slow_rank, ink);
    if (bubble === bubble) drawBubble(c, bubble, ideal, left, y, bar, row, styles, ink);
    c.textAlign = "right";
    c.font = `${Math.min(12, row)}px ${ink.font}`;
    c.fillStyle = ink.text;
    head.bubbles[r].slice(wide ? 0 : 1).forEach((text, i) => c.fillText(text, columns[i][1], y + row / 2 + 0.5));
  }
  drawIdeal(c, left + ideal * bar, height, ink);
}

/** A worker's bubble in words, from the two texts that its row shows. */
function bubbleWords(whole, beyond) {
  const points = Number.parseInt(beyond.replace(/[+±]/, ""), 10);
  if (Number.isNaN(points)) return "the bubble is not measured";
  const size = `the bubble is ${whole} of the time for compute and bubble together. This is`;
  if (!points) return `${size} not more than the ideal bubble`;
  return `${size} ${points} percentage ${points === 1 ? "point" : "points"} more than the ideal bubble`;
}

function drawBubble(c, bubble, ideal, left, y, width, height, styles, ink) {
  const pieces = [[Math.min(bubble, ideal), styles[ink.hatched], ink.hatched],
    [Math.max(0, bubble - ideal), ink.phases[ink.hatched], -1], [1 - bubble, styles[ink.busy], ink.busy]];
  let from = left;
  c.textAlign = "center";
  c.font = `600 ${Math.min(11.5, height)}px ${ink.font}`;
  for (const [share, style, phase] of pieces) {
    const size = share * width, text = `${Math.round(share * 100)} %`;
    if (!(size > 0)) continue;
    c.fillStyle = ink.paper;
    c.fillRect(from, y, size, height);
    c.fillStyle = style;
    c.fillRect(from, y, Math.max(0.5, size - 1), height);
    if (size > c.measureText(text).width + 8 && height >= 11) drawOn(c, text, from + size / 2, y + height / 2 + 0.5, phase, ink);
    from += size;
  }
}

/** Where a bubble would end with the schedule's share alone. */
function drawIdeal(c, x, height, ink) {
  c.strokeStyle = ink.text;
  c.lineWidth = 1.2;
  c.setLineDash([4, 3]);
  line(c, Math.round(x) + 0.5, 14, Math.round(x) + 0.5, height);
  c.setLineDash([]);
}

/** Text on a phase's colour; on the hatched one it stands on a plate, -1 is its colour in full. */
function drawOn(c, text, x, y, phase, ink) {
  if (phase === ink.hatched) {
    const half = c.measureText(text).width / 2 + 4;
    c.fillStyle = ink.paper;
    c.fillRect(x - half, y - 8, 2 * half, 15);
    c.fillStyle = ink.text;
  } else c.fillStyle = ink.on[phase < 0 ? ink.hatched : phase];
  c.fillText(text, x, y);
}

// ---- theme

/** Whether the page is dark: JupyterLab says so, other pages show it by their colours. */
function isDark(element) {
  const said = document.body.dataset.jpThemeLight;
  if (said) return said === "false";
  const own = document.body.dataset.vscodeThemeKind ?? document.documentElement.dataset.theme ?? "";
  if (own) return own.includes("dark") || own.includes("contrast");
  if (getComputedStyle(element).getPropertyValue("--jp-layout-color1")) return false;
  return globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches ?? false;
}

function readInk(root, palette) {
  const mode = isDark(root) ? "dark" : "light";
  root.dataset.mode = mode;
  const style = getComputedStyle(root), of = (name, other) => style.getPropertyValue(name).trim() || other;
  const own = palette[mode];
  return {
    ...own, mode, hatched: palette.hatched, busy: palette.busy, names: palette.names, font: style.fontFamily || "sans-serif",
    text: of("--wb-ink", own.ink), muted: of("--wb-muted", own.muted), grid: of("--wb-line", own.grid),
    paper: of("--wb-paper", own.paper), wait: of("--wb-wait", own.phases[palette.hatched]),
    on: own.phases.map(readable),
  };
}

/** Black or white, whichever reads better on a colour. */
function readable(color) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(color.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 ? "#111418" : "#FFFFFF";
}

// ---- one view

class View {
  constructor(root, store, palette) {
    Object.assign(this, { root, store, palette, more: new Map(), pending: null, frame: 0 });
    root.classList.add("wb-dash");
    root.dataset.lmSuppressShortcuts = "true"; // JupyterLab would take Space and Enter
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Training dashboard");
    this.observer = new ResizeObserver((entries) => this.resized(entries));
    this.buildHead();
    this.buildPanels();
    this.restyle();
    this.draw = this.draw.bind(this);
    this.schedule();
  }

  buildHead() {
    const head = make("div", "wb-head", this.root), title = make("div", "wb-title", head);
    this.name = make("span", "wb-name", title);
    this.strategy = make("span", "wb-strategy", title);
    this.state = make("span", "wb-state", title);
    this.state.setAttribute("role", "status");
    this.buildStaffing(head);
    const buttons = make("div", "wb-buttons", head);
    this.stepButton = this.button(buttons, "wb-step", "One step", "Do one more step, then pause again", () => this.command("step", { steps: 1 }));
    this.pauseButton = this.button(buttons, "wb-pause", "Pause", "Pause training", () => this.command(this.isPaused() ? "resume" : "pause"));
    this.stopButton = this.button(buttons, "wb-stop", "Stop", "Stop training after the current step", () => this.command("stop"));
    const progress = make("div", "wb-progress", this.root);
    this.track = make("div", "wb-track", progress);
    this.track.setAttribute("role", "progressbar");
    this.track.setAttribute("aria-label", "Steps done");
    this.fill = make("div", "wb-fill", this.track);
    this.steps = make("span", "wb-steps", progress);
    this.figures = make("div", "wb-figures", this.root);
    this.slow = make("div", "wb-slow", this.root);
    this.slow.setAttribute("role", "status");
  }

  /** Fewer and more workers, in a run whose workers can change. */
  buildStaffing(head) {
    this.staffing = make("div", "wb-staffing", head);
    this.staffing.setAttribute("role", "group");
    this.staffing.setAttribute("aria-label", "Workers");
    make("span", "", this.staffing, "Workers");
    const change = (by) => this.command("scale", { workers: this.store.head.staffing.workers + by });
    this.fewer = this.button(this.staffing, "wb-fewer", "\u2212", FEWER, () => change(-1));
    this.many = make("output", "", this.staffing);
    this.oneMore = this.button(this.staffing, "wb-one-more", "+", MORE, () => change(1));
  }

  drawStaffing(staffing, live) {
    this.staffing.hidden = !staffing;
    if (!staffing) return;
    const { workers, target, most, why_not: whyNot } = staffing, changing = target != null || this.pending?.name === "scale";
    setText(this.many, target != null && target !== workers ? `${workers} \u2192 ${target}` : String(workers));
    this.fewer.disabled = !live || Boolean(whyNot) || changing || workers <= 1;
    this.oneMore.disabled = !live || Boolean(whyNot) || changing || workers >= (most ?? Infinity);
    const why = whyNot || (changing ? "The number of workers is changing." : "");
    const full = workers >= (most ?? Infinity) ? "The number of workers cannot be larger than the number of samples in a batch." : "";
    this.staffing.title = why;
    for (const [button, label, limit] of [[this.fewer, FEWER, workers <= 1 ? "A run needs at least one worker." : ""], [this.oneMore, MORE, full]]) {
      button.title = why || limit || label;
      button.setAttribute("aria-label", why || limit ? `${label}: ${why || limit}` : label);
    }
  }

  buildPanels() {
    const charts = make("div", "wb-charts", this.root);
    this.loss = this.chart(charts, "Loss");
    this.throughput = this.chart(charts, "Throughput");
    this.timeline = new Panel(this.root, "What each worker did", this.observer);
    this.legend = make("ul", "wb-legend", this.root);
    this.legend.setAttribute("aria-label", "Colours of the phases");
    this.shares = new Panel(this.root, "Where the time went", this.observer);
    setText(this.shares.value, "parts of each worker's time in the whole run, in percent");
    this.pipeline = make("div", "wb-pipeline", this.root);
    this.pipeline.hidden = true;
    this.bubbles = new Panel(this.pipeline, "", this.observer);
    this.bubbleLegend = make("ul", "wb-legend", this.pipeline);
    this.cut = make("div", "wb-cut", this.pipeline);
    this.stages = make("table", "wb-stages", make("div", "wb-scroll", this.pipeline));
    this.extras = make("div", "wb-more", this.root);
    this.notes = make("ul", "wb-notes", this.root);
    this.foot = make("div", "wb-foot", this.root);
  }

  chart(parent, name) {
    const panel = new Panel(parent, name, this.observer);
    panel.canvas.addEventListener("pointermove", (event) => { panel.hover = event.offsetX; this.schedule(); });
    panel.canvas.addEventListener("pointerleave", () => { panel.hover = null; this.schedule(); });
    return panel;
  }

  button(parent, name, text, label, action) {
    const button = make("button", name, parent, text);
    button.type = "button";
    button.title = label;
    button.setAttribute("aria-label", `${text}: ${label}`);
    button.addEventListener("click", action);
    return button;
  }

  isPaused() { return this.store.head.state === "paused"; }

  command(name, fields = {}) {
    this.store.send({ type: "command", name, fields });
    const { state, staffing } = this.store.head, pending = { name, state, staffing };
    this.pending = pending;
    if (name === "scale") setTimeout(() => { if (this.pending === pending) this.pending = null; this.schedule(); }, HEARD_MS);
    this.schedule();
  }

  resized(entries) {
    for (const { target, contentRect } of entries) target.panel.width = contentRect.width;
    this.schedule();
  }

  schedule() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  /** Read the theme's colours again; the page's styles may arrive a little after its attribute. */
  restyle() {
    this.ink = readInk(this.root, this.palette);
    const { names, phases, hatched } = this.ink;
    this.legend.replaceChildren(...names.map((name, i) => key(name, phases[i], i === hatched)));
    this.split = null; // its legend has colours too
  }

  draw() {
    const { head } = this.store;
    if (!head.state) return;
    this.drawHead(head);
    this.root.classList.toggle("wb-none", Boolean(head.over) && !this.store.table("timeline").rows); // nothing to draw will come
    const evals = head.evals ?? [], seen = evals.at(-1)?.loss;
    const evaluated = Number.isFinite(seen) ? ` · ◆ evaluation ${number(seen)}` : "";
    this.drawChart(this.loss, "loss", { color: this.ink.runs[(head.color ?? 0) % this.ink.runs.length], evals, changes: head.changes, unit: "", after: evaluated });
    this.drawChart(this.throughput, "throughput", { color: this.ink.runs[(head.color ?? 0) % this.ink.runs.length], fromZero: true, changes: head.changes, unit: " samples/s" });
    drawTimeline(this.timeline, this.store.table("timeline"), head, this.ink);
    this.timeline.label(`Timeline of the latest steps. ${head.description}`);
    drawShares(this.shares, this.store.table("workers"), head, this.ink);
    this.shares.label(this.sharesInWords(head));
    this.drawPipeline(head);
    this.drawExtras(head);
    this.drawNotes(head);
  }

  drawHead(head) {
    const { pending } = this;
    if (pending && (pending.state !== head.state || head.over || (pending.name === "scale" && pending.staffing !== head.staffing))) this.pending = null;
    const busy = this.pending && { stop: "stopping…", pause: "pausing…", resume: "resuming…" }[this.pending.name];
    setText(this.name, head.title);
    const known = head.title === head.strategy ? [] : [head.strategy]; // unnamed runs have the strategy's name
    setText(this.strategy, [...known, head.term, head.place].filter(Boolean).join(" · "));
    setText(this.state, busy || (head.state === "stopping" ? "stopping…" : head.state));
    this.state.dataset.state = busy === "stopping…" ? "stopping" : head.state;
    setText(this.steps, head.progress);
    this.fill.style.width = `${Math.round((head.fraction ?? 0) * 1000) / 10}%`;
    if (head.fraction != null) this.track.setAttribute("aria-valuenow", Math.round(head.fraction * 100));
    this.track.setAttribute("aria-valuetext", head.progress);
    this.drawButtons(head, busy);
    this.drawFigures(head.figures);
    this.slow.hidden = !(head.banner || head.slow);
    setText(this.slow, head.banner || head.slow); // what holds the run up counts first
    this.root.setAttribute("aria-label", `Training dashboard of run ${head.title}`);
  }

  drawButtons(head, busy) {
    const stopping = head.state === "stopping" || busy === "stopping…", live = !head.over && !stopping;
    this.stopButton.disabled = !live;
    this.drawStaffing(head.staffing, live);
    this.pauseButton.disabled = !live || Boolean(busy) || !["running", "paused"].includes(head.state);
    this.stepButton.hidden = !this.isPaused();
    this.stepButton.disabled = !live;
    setText(this.stopButton, stopping && !head.over ? "Stopping…" : "Stop");
    const paused = this.isPaused();
    setText(this.pauseButton, paused ? "Resume" : "Pause");
    this.pauseButton.setAttribute("aria-label", paused ? "Resume training" : "Pause: Pause training");
    this.pauseButton.title = paused ? "Resume training" : "Pause training";
  }

  drawFigures(figures) {
    const entries = Object.entries(figures);
    while (this.figures.children.length > entries.length) this.figures.lastChild.remove();
    while (this.figures.children.length < entries.length) {
      const cell = make("div", "", this.figures);
      make("strong", "", cell);
      make("span", "", cell);
    }
    entries.forEach(([label, value], i) => {
      const [figure, name] = this.figures.children[i].children;
      setText(figure, value);
      setText(name, label);
    });
  }

  drawChart(panel, key, options) {
    const table = this.store.table(key), latest = table.rows ? table.data[(table.rows - 1) * 4 + 1] : NaN;
    const text = `${number(latest)}${options.unit}${options.after ?? ""}`;
    setText(panel.value, text);
    drawCurve(panel, table, this.ink, { height: CHART, ...options });
    panel.label(`${panel.title.textContent} over steps, now ${text}.`);
  }

  drawPipeline(head) {
    this.pipeline.hidden = !head.split;
    if (!head.split) return;
    if (this.split !== head.split) this.layOutStages(head.split);
    drawBubbles(this.bubbles, this.store.table("workers"), head, this.ink);
    const words = head.bubbles.map(([whole, beyond], r) => `${head.labels[r]}: ${bubbleWords(whole, beyond)}`);
    this.bubbles.label(`${head.split.caption}. The ideal bubble is the bubble that this schedule has if all stages take the same time. ${words.join(". ")}.`);
  }

  layOutStages(split) {
    this.split = split;
    const { phases, hatched, busy } = this.ink, wait = phases[hatched];
    setText(this.bubbles.title, split.title);
    setText(this.bubbles.value, "");
    this.bubbleLegend.replaceChildren(...split.names.map((name, i) => key(name, i < 2 ? wait : phases[busy], i === 0)));
    const cells = (row, kind, parent) => row.forEach((text, i) => {
      make(kind, split.numeric[i] ? "wb-number" : "", parent, text);
    });
    setText(this.cut, split.caption);
    this.stages.setAttribute("aria-label", `Stages: ${split.caption}`);
    this.stages.replaceChildren();
    cells(split.columns, "th", make("tr", "", make("thead", "", this.stages)));
    for (const cell of this.stages.querySelectorAll("th")) cell.scope = "col";
    const body = make("tbody", "", this.stages);
    for (const row of split.rows) cells(row, "td", make("tr", "", body));
  }

  drawExtras(head) {
    const keys = head.curves ?? [];
    for (const [key, panel] of this.more) if (!keys.includes(key)) { panel.remove(); this.more.delete(key); }
    keys.forEach((key, i) => {
      if (!this.more.has(key)) this.more.set(key, this.chart(this.extras, key.slice(key.indexOf(":") + 1)));
      this.drawChart(this.more.get(key), key, { height: SMALL, color: this.ink.series[(i + 3) % 8], unit: "" });
    });
  }

  sharesInWords(head) {
    const { data, rows, columns } = this.store.table("workers");
    return Array.from({ length: rows }, (_, r) => {
      const parts = this.ink.names.map((name, p) => `${name} ${Math.round(data[r * columns + 4 + p] * 100)} %`);
      return `${head.labels[r]}: ${parts.join(", ")}, median wait ${milliseconds(data[r * columns + 3])}`;
    }).join(". ");
  }

  drawNotes(head) {
    const notes = head.notes ?? [], words = notes.join("\n");
    if (this.noted !== words) this.notes.replaceChildren(...notes.map(note));
    this.noted = words;
    this.notes.hidden = !notes.length;
    const foot = [head.dropped, head.drawing].filter(Boolean).join(" · ");
    setText(this.foot, foot);
    this.foot.hidden = !foot;
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
  }
}

export default () => {
  let store;
  return {
    initialize({ model }) {
      store = new Store((content) => model.send(content));
      model.on("msg:custom", (content, buffers) => store.receive(content, buffers));
      store.hello();
    },
    render({ model, el }) {
      const view = new View(make("div", "", el), store, model.get("palette"));
      const redraw = () => view.schedule();
      const restyle = () => { view.restyle(); view.schedule(); };
      const later = () => { restyle(); setTimeout(restyle, 400); };
      store.listeners.add(redraw);
      const themes = new MutationObserver(later);
      for (const node of [document.body, document.documentElement])
        themes.observe(node, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "data-theme", "data-vscode-theme-kind", "class"] });
      const media = globalThis.matchMedia?.("(prefers-color-scheme: dark)");
      media?.addEventListener("change", restyle);
      if (store.seq < 0) store.hello();
      return () => {
        store.listeners.delete(redraw);
        themes.disconnect();
        media?.removeEventListener("change", restyle);
        view.close();
      };
    },
  };
};
