// Pictures: the unfolded graph with its values, the way back, and the loss.

const SANS = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif";
const LEAST = -8, MOST = 4;  // powers of ten that the way back shows
const FATES = [  // what becomes of a gradient of which less than 10^power comes to the start, and its colour
  [-3, "vanishes", "blue"], [-1, "fades", "orange"], [2, "survives", "green"], [Infinity, "explodes", "red"],
];
const fateOf = (power) => FATES.find(([limit]) => power < limit) ?? FATES.at(-1);

class Palette {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    for (const use of ["ink", "paper", "muted", "grid", "blue", "orange", "green", "purple", "red", "operation", "state"])
      this[use] = style.getPropertyValue(`--lf-${use}`).trim();
    const levels = Array.from({ length: 129 }, (_, i) => i / 64 - 1);
    this.values = levels.map((v) => Palette.mixed(this.paper, v < 0 ? this.blue : this.orange, Math.abs(v)));
    this.shares = levels.map((v) => Palette.mixed(this.paper, this.purple, (v + 1) / 2));
    this.pixels = document.createElement("canvas");
  }

  static mixed(a, b, share) {
    const [p, q] = [a, b].map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
    return p.map((v, i) => Math.round(v + (q[i] - v) * share));
  }

  value(v) {  // from -1 to 1
    return this.values[Math.round((Math.min(1, Math.max(-1, v || 0)) + 1) * 64)];
  }

  share(s) {  // from 0 to 1
    return this.shares[Math.round(Math.min(1, Math.max(0, s || 0)) * 128)];
  }

  // Rows of numbers as an image, a column of pixels for each.
  image(rows, colour) {
    const [width, height] = [rows.length, rows[0].length], pen = this.pixels.getContext("2d", { willReadFrequently: true });
    [this.pixels.width, this.pixels.height] = [width, height];
    const image = pen.createImageData(width, height);
    for (let t = 0; t < width; t++)
      for (let i = 0; i < height; i++) {
        const k = 4 * (i * width + t);
        [image.data[k], image.data[k + 1], image.data[k + 2]] = colour(rows[t][i], t);
        image.data[k + 3] = 255;
      }
    pen.putImageData(image, 0, 0);
    return this.pixels;
  }

  fate(power) {  // of a gradient that is 10^power of what it was
    return this[fateOf(power)[2]];
  }
}

function prepared(canvas, height) {
  const ratio = Math.min(2, devicePixelRatio || 1), width = canvas.clientWidth || 300;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}

function label(pen, text, x, y, colour, size = 13, align = "right") {
  pen.font = `${size}px ${SANS}`;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillStyle = colour;
  pen.fillText(text, x, y);
}

function arrow(pen, x1, y1, x2, y2, colour, width = 1) {
  const head = Math.min(5, 2 + width, Math.hypot(x2 - x1, y2 - y1) / 2), angle = Math.atan2(y2 - y1, x2 - x1);
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = width;
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2 - head * Math.cos(angle), y2 - head * Math.sin(angle));
  pen.stroke();
  pen.beginPath();
  pen.moveTo(x2, y2);
  for (const turn of [2.6, -2.6]) pen.lineTo(x2 + head * Math.cos(angle + turn), y2 + head * Math.sin(angle + turn));
  pen.fill();
}

const SUPERSCRIPTS = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹";
const powerOfTen = (p) => `10${String(p).replace(/./g, (c) => SUPERSCRIPTS["-0123456789".indexOf(c)])}`;

// A number as one says it: 0.27, 350, 4·10⁻⁷.
function spoken(value) {
  if (value === 0 || !Number.isFinite(value)) return String(value);
  const [digit, p] = value.toExponential(0).split("e").map(Number);
  return p >= -3 && p < 4 ? String(+value.toPrecision(2)) : `${digit}·${powerOfTen(p)}`;
}

// What was seen of one sequence. Steps before `forward` have been taken, and the way back has come as far as step `back`.
function drawUnfolded(canvas, seen, palette, letters, forward, back) {
  const [pen, width] = prepared(canvas, 520), steps = seen.x.length, narrow = width < 560, { muted, grid } = palette;
  const left = narrow ? 46 : 96, column = (width - left - 10) / steps, wide = Math.max(1.5, Math.min(column * 0.62, 26));
  const node = Math.min(10, column * 0.4), at = (t) => left + (t + 0.5) * column;
  const area = { pen, palette, at, left, column, wide, node, steps, letters, right: width - 6 };
  const known = seen.names.every((name) => name.length < 4), [state] = known ? seen.names : ["h"];
  const names = narrow ? ["y", "o", state, "x"] : ["target y", "output o", `state ${state}`, "x"];
  [16, 46, 125, 206].forEach((y, i) => label(pen, names[i], left - 8, y, muted));
  const parts = known && seen.names.length < 4 ? seen.names : [narrow ? "s" : "state"];
  parts.forEach((part, i) => label(pen, `∂L${narrow ? "/" : " / "}∂${part}`, left - 8, 248 + (74 * (i + 0.5)) / parts.length, muted));
  pen.imageSmoothingEnabled = false;
  pen.lineWidth = 1;
  pen.strokeStyle = grid;
  const states = palette.image(seen.states, (v) => palette.value(v));
  for (let t = 0; t < forward; t++) drawColumn(area, states, t, 70, 110);
  for (let t = 0; t < forward; t++) drawStep(area, seen, t);
  drawBack(area, seen, back);
  label(pen, "step 1", left, 508, muted, 12, "left");
  label(pen, `step τ = ${steps}`, width - 6, 508, muted, 12);
}

function drawColumn({ pen, at, wide }, image, t, top, height) {
  pen.drawImage(image, t, 0, 1, image.height, at(t) - wide / 2, top, wide, height);
  pen.strokeRect(at(t) - wide / 2, top, wide, height);
}

function drawNode({ pen, palette, at, column, node, letters }, value, t, y, letter) {
  if (letters) {
    if (column >= 7) label(pen, letter === " " ? "␣" : letter, at(t), y, palette.ink, Math.min(15, column), "center");
    return;
  }
  pen.beginPath();
  pen.arc(at(t), y, node, 0, 7);
  pen.fillStyle = `rgb(${palette.value(value)})`;
  pen.fill();
  pen.strokeStyle = palette.muted;
  pen.lineWidth = 0.75;
  pen.stroke();
}

// One step forwards: what it reads, what it answers, and the arrows around its state.
function drawStep(area, { x, y, outputs, cost }, t) {
  const { pen, palette, at, column, wide, node, letters } = area, { muted } = palette, gap = letters ? 9 : node;
  const likeliest = (row) => letters && letters[row.indexOf(Math.max(...row))];
  drawNode(area, x[t][0], t, 206, likeliest(x[t]));
  if (!letters && x[t][1]) {  // a marked number
    pen.lineWidth = 3;
    pen.strokeStyle = palette.red;
    pen.stroke();
  }
  if (column >= 9) {
    if (t) arrow(pen, at(t - 1) + wide / 2, 125, at(t) - wide / 2, 125, muted, 1.25);
    arrow(pen, at(t), 206 - gap, at(t), 180, muted);
  }
  if (y[t] === null) return;
  const bit = cost === "bit";
  drawNode(area, bit ? 2 * y[t] - 1 : y[t], t, 16, letters && letters[y[t]]);
  drawNode(area, bit ? Math.tanh(outputs[t][0] / 2) : outputs[t][0], t, 46, likeliest(outputs[t]));
  if (column >= 9) arrow(pen, at(t), 70, at(t), 46 + gap, muted);
}

// The way back, as far as step `back`: each unit's gradient, and the whole of it on a scale of powers.
function drawBack({ pen, palette, at, left, right, column, wide, steps }, { gradients, norms }, back) {
  const top = 340, low = 490, up = (p) => low - ((Math.min(MOST, Math.max(LEAST, p)) - LEAST) / (MOST - LEAST)) * (low - top);
  for (let p = LEAST; p <= MOST; p += 4) {
    pen.strokeStyle = p === 0 ? palette.muted : palette.grid;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(left, up(p));
    pen.lineTo(right, up(p));
    pen.stroke();
    label(pen, p === 0 ? "1" : powerOfTen(p), left - 8, up(p), palette.muted, 12);
  }
  const newest = norms[steps - 1], powers = norms.map((n) => Math.log10(n / newest));
  if (!(newest > 0 && Number.isFinite(newest))) return;
  const bright = powers.map((p) => (p - LEAST) / -LEAST);
  const image = palette.image(gradients, (g, t) => palette.share(bright[t] * Math.sqrt(Math.abs(g) / (norms[t] || 1))));
  for (let t = steps - 1; t >= back; t--) {
    pen.strokeStyle = palette.grid;
    pen.lineWidth = 1;
    drawColumn({ pen, at, wide }, image, t, 248, 74);
    const heavy = Math.min(6, Math.max(0.4, (powers[t] - LEAST) * 0.4));
    if (t > back && column >= 9) arrow(pen, at(t) - wide / 2, 285, at(t - 1) + wide / 2, 285, palette.purple, heavy);
    pen.fillStyle = palette.fate(powers[t]);
    const high = Math.min(Number.isFinite(powers[t]) ? up(powers[t]) : powers[t] > 0 ? top : low, low - 1.5);
    pen.fillRect(at(t) - wide / 2, high, wide, low - high);
  }
}

// The loss after each update on a scale of powers, and what a guess scores.
function drawLoss(canvas, losses, baseline, guess, palette) {
  const [pen, width] = prepared(canvas, 280), left = 58, right = width - 10, top = 14, low = 250;
  const bins = Math.max(1, Math.min(losses.length, Math.floor((right - left) / 2)));
  const curve = Array.from({ length: bins }, (_, i) => {
    const part = losses.slice(Math.floor((i * losses.length) / bins), Math.floor(((i + 1) * losses.length) / bins));
    return part.reduce((a, b) => a + b, 0) / Math.max(1, part.length);
  }).filter((loss) => loss > 0 && Number.isFinite(loss));
  const most = Math.log10(Math.max(baseline * 2, ...curve.slice(0, 400))), least = Math.log10(Math.min(baseline / 10, ...curve)) - 0.05;
  const up = (loss) => low - ((Math.log10(Math.max(loss, 1e-12)) - least) / (most - least)) * (low - top);
  const across = (loss, colour, thickness) => {
    pen.strokeStyle = colour;
    pen.lineWidth = thickness;
    pen.beginPath();
    pen.moveTo(left, up(loss));
    pen.lineTo(right, up(loss));
    pen.stroke();
  };
  const marks = [];
  for (let p = Math.floor(least); p <= most; p++) for (const k of most - least > 2.2 ? [1] : [1, 2, 5]) marks.push(k * 10 ** p);
  for (const mark of marks.filter((m) => Math.log10(m) >= least && Math.log10(m) <= most)) {
    across(mark, palette.grid, 1);
    label(pen, String(+mark.toPrecision(1)), left - 8, up(mark), palette.muted, 12);
  }
  pen.setLineDash([5, 4]);
  across(baseline, palette.orange, 1.5);
  pen.setLineDash([]);
  label(pen, `${guess}: ${baseline.toFixed(3)}`, right, up(baseline) - 10, palette.orange, 12);
  pen.strokeStyle = pen.fillStyle = palette.blue;
  pen.lineWidth = 2;
  pen.lineJoin = "round";
  pen.beginPath();
  curve.forEach((loss, i) => pen.lineTo(left + ((right - left) * (curve.length > 1 ? i / (curve.length - 1) : 0)), up(loss)));
  pen.stroke();
  if (curve.length === 1) pen.fillRect(left - 2, up(curve[0]) - 2, 4, 4);
  if (!losses.length) return;
  label(pen, "update 1", left, low + 18, palette.muted, 12, "left");
  label(pen, String(losses.length), right, low + 18, palette.muted, 12);
}
