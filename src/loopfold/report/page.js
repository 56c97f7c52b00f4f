"use strict";

// What moves on the page: the unfolded graph, and two maps to point at. Text that came from elsewhere only ever
// becomes textContent or is painted on a canvas.

const at = (id) => document.getElementById(id);
const read = (id) => at(id) && JSON.parse(at(id).textContent);

// ---------------------------------------------------------------- the unfolded graph

function unfoldedGraph() {
  const slider = at("steps");
  if (!slider) return;
  const pictures = [...document.querySelectorAll("figure[data-steps]")];
  const lengths = [...new Set(pictures.map((picture) => picture.dataset.steps))];

  function show() {
    const steps = lengths[slider.value - 1];
    const way = document.querySelector("input[name=way]:checked").value;
    for (const picture of pictures) {
      picture.hidden = picture.dataset.steps !== steps || picture.dataset.way !== way;
    }
    at("steps-shown").value = `τ = ${steps}`;
    slider.setAttribute("aria-valuetext", `${steps} steps`);
  }

  slider.addEventListener("input", show);
  for (const radio of document.querySelectorAll("input[name=way]")) radio.addEventListener("change", show);
  show();
}

// ---------------------------------------------------------------- maps

// A colour of the page as three numbers; the names are those of the pictures.
function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--lf-${name}`).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

const mix = (a, b, share) => a.map((x, i) => Math.round(x + (b[i] - x) * share));
const css = (rgb) => `rgb(${rgb.join(" ")})`;
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// A map of numbers on a canvas: `show(row, column)` is called when the cursor moves, by pointer or by arrow keys, and
// `keep(row, column)` on a click or Enter. `content` says what to paint:
//   rows, columns         how many
//   width, height         of a cell, in pixels
//   paint(row, column)    the colour of a cell, or null for none
//   foot, below(context)  what is written under the cells, so many pixels high
class HeatMap {
  constructor(canvas, show, keep) {
    this.canvas = canvas;
    this.show = show;
    this.keep = keep;
    this.cursor = null;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("click", (event) => this.point(event) && this.keep(...this.cursor));
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("focus", () => this.cursor || (canvas.matches(":focus-visible") && this.move(0, 0)));
    for (const query of ["print", "(prefers-color-scheme: dark)"]) {
      matchMedia(query).addEventListener("change", () => this.repaint());
    }
  }

  set content(content) {
    this._content = content;
    if (this.cursor && this.cursor[0] >= content.rows) this.cursor = null;
    this.repaint();
  }

  // One pixel a cell, to be drawn large; again when the content or the colours change.
  repaint() {
    const { rows, columns, paint } = this._content;
    this.cells = new OffscreenCanvas(columns, rows);
    const context = this.cells.getContext("2d");
    const image = context.createImageData(columns, rows);
    const palette = { paper: colour("paper"), blue: colour("blue"), orange: colour("orange") };
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const rgb = paint(row, column, palette);
        if (rgb) image.data.set([...rgb, 255], 4 * (row * columns + column));
      }
    }
    context.putImageData(image, 0, 0);
    this.draw();
  }

  draw() {
    const { rows, columns, width, height, foot, below } = this._content;
    const [w, h] = [columns * width, rows * height + foot];
    const ratio = Math.min(devicePixelRatio || 1, 2);
    Object.assign(this.canvas, { width: w * ratio, height: h * ratio });
    this.canvas.style.width = `${w}px`;
    this.canvas.style.setProperty("--height", `${h}px`); // kept on paper, where it may be narrower
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.cells, 0, 0, w, rows * height);
    below(context, rows * height);
    if (this.cursor) {
      const [row, column] = this.cursor;
      for (const [name, line] of [["paper", 4], ["ink", 1.5]]) { // seen on cells of any colour
        context.strokeStyle = css(colour(name));
        context.lineWidth = line;
        context.strokeRect(column * width - 1, row * height - 1, width + 2, height + 2);
      }
    }
  }

  move(row, column) {
    const { rows, columns, width } = this._content;
    this.cursor = [clamp(row, 0, rows - 1), clamp(column, 0, columns - 1)];
    this.draw();
    this.show(...this.cursor);
    const box = this.canvas.parentElement;
    const left = this.cursor[1] * width;
    if (left < box.scrollLeft) box.scrollLeft = left - width;
    if (left + width > box.scrollLeft + box.clientWidth) box.scrollLeft = left + 2 * width - box.clientWidth;
  }

  // Where the pointer is; false where there is no cell.
  point(event) {
    const { rows, columns, foot, height } = this._content;
    const box = this.canvas.getBoundingClientRect();
    const tall = (box.height * rows * height) / (rows * height + foot);
    const row = Math.floor(((event.clientY - box.top) / tall) * rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    if (row < 0 || row >= rows || column < 0 || column >= columns) return false;
    this.move(row, column);
    return true;
  }

  press(event) {
    const [row, column] = this.cursor || [0, 0];
    const { columns, rows } = this._content;
    const moves = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      PageUp: [row - 10, column],
      PageDown: [row + 10, column],
      Home: [event.ctrlKey ? 0 : row, 0],
      End: [event.ctrlKey ? rows - 1 : row, columns - 1],
    };
    if (event.altKey || event.metaKey) return;
    if (moves[event.key]) this.move(...(this.cursor ? moves[event.key] : [0, 0]));
    else if ((event.key === "Enter" || event.key === " ") && this.cursor) this.keep(row, column);
    else return;
    event.preventDefault();
  }
}

// A list of what was kept. A thing that is kept twice stands in it once.
class Kept {
  constructor(list, button) {
    this.list = list;
    this.button = button;
    button.addEventListener("click", () => {
      list.replaceChildren();
      button.hidden = true;
    });
  }

  add(text) {
    if ([...this.list.children].some((item) => item.textContent === text)) return;
    const item = document.createElement("li");
    item.textContent = text;
    this.list.append(item);
    this.button.hidden = false;
  }
}

// The map named `name`, with its readout and its list, where `describe(row, column)` says a cell in words.
function mapOf(name, describe) {
  const kept = new Kept(at(`${name}-kept`), at(`${name}-clear`));
  return new HeatMap(
    at(`${name}-map`),
    (row, column) => (at(`${name}-readout`).value = describe(row, column)),
    (row, column) => kept.add(describe(row, column)),
  );
}

// ---------------------------------------------------------------- how far gradients reach

function gradientMap() {
  const flow = read("flow-data");
  if (!flow) return;
  const { norms, first } = flow; // norms[t][k] of ∂L(t)/∂h(k); null for what is no finite number
  const describe = (row, k) => {
    const [t, value] = [row + first, norms[row][k]];
    const what = `∂L(${t + 1})/∂h(${k + 1})`;
    if (k > t) return `${what}: none, since step ${k + 1} cannot reach L(${t + 1})`;
    if (value === null) return `${what}: no finite number`;
    if (value === 0) return `${what}: vanished, below what a float holds`;
    return `${what}: size ${value.toPrecision(3)}, ${t - k} ${t - k === 1 ? "step" : "steps"} back`;
  };
  const map = mapOf("flow", describe);
  const picture = map.canvas.parentElement.querySelector("image"); // the cells; the canvas over them is see-through
  const fit = () => {
    const [cells, box] = [picture.getBoundingClientRect(), map.canvas.parentElement.getBoundingClientRect()];
    const left = cells.left - box.left + map.canvas.parentElement.scrollLeft;
    Object.assign(map.canvas.style, { left: `${left}px`, top: `${cells.top - box.top}px` });
    const [rows, columns] = [norms.length, norms[0].length];
    const [width, height] = [cells.width / columns, cells.height / rows];
    map.content = { rows, columns, width, height, foot: 0, below: () => {}, paint: () => null };
  };
  new ResizeObserver(fit).observe(picture.ownerSVGElement);
}

// ---------------------------------------------------------------- hidden states

// A piece of text without the spaces around it, unless it is nothing else.
const bare = (piece) => piece.trim() || piece;

// A piece of text as one can see it.
function visible(piece) {
  const names = { "\n": "↵", "\t": "⇥", "": "∅" };
  return names[piece] ?? piece.replace(/[\0-\x1f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)));
}

// A piece of text as it is named; isolated, so that a script that runs leftwards does not carry the rest along.
function named(piece) {
  const names = { "\n": "end of line", "\t": "tab", " ": "space", "": "nothing to print yet" };
  return names[piece] ?? `“\u2068${visible(bare(piece))}\u2069”`;
}

// Numbers of two bytes, low byte first, as base64.
function int16(text) {
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Int16Array.from({ length: bytes.length / 2 }, (_, i) => view.getInt16(2 * i, true));
}

function stateMap() {
  const states = read("states-data");
  if (!states) return;
  const { pieces, units, scale, unit, tracked, choices } = states;
  const numbers = int16(states.values); // [τ, n]
  const value = (t, i) => (numbers[t * units + i] < -32767 ? NaN : (numbers[t * units + i] / 32767) * scale);
  const labels = pieces.map((piece) => [...visible(bare(piece))].slice(0, 12).join(""));
  const longest = Math.max(...labels.map((label) => [...label].length));
  const long = longest > 2; // words or subwords, which are written upwards
  const WIDTH = long ? 14 : 10;
  const choose = at("states-choice");
  const chosen = () => choices[choose.value];

  const describe = (row, t) => {
    const i = chosen().order[row];
    const number = value(t, i);
    const sign = number < 0 ? "−" : "+";
    const size = Number.isNaN(number) ? "no finite number" : `${sign}${Math.abs(number).toFixed(3)}`;
    const goes = tracked[i] ? ` (goes with ${tracked[i]})` : "";
    return `unit ${i} at ${unit} ${t + 1}, ${named(pieces[t])}: ${size}${goes}`;
  };
  const map = mapOf("states", describe);

  function below(context, top) {
    const column = map.cursor && map.cursor[1];
    const [ink, muted] = [css(colour("ink")), css(colour("muted"))];
    context.textAlign = long ? "right" : "center";
    context.textBaseline = long ? "middle" : "top";
    labels.forEach((label, t) => {
      context.fillStyle = t === column ? ink : muted;
      context.font = `${t === column ? "bold " : ""}12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace`;
      context.save();
      context.translate((t + 0.5) * WIDTH, top + 5);
      if (long) context.rotate(-Math.PI / 2);
      context.fillText(label, 0, 0);
      context.restore();
    });
  }

  function show() {
    const { order, note } = chosen();
    const height = order.length > 64 ? 3 : 11;
    at("states-note").textContent = note;
    at("states-units").replaceChildren(
      ...(height < 9 ? [] : order).map((i) => {
        const label = document.createElement("li");
        label.textContent = i;
        return label;
      }),
    );
    map.content = {
      rows: order.length,
      columns: pieces.length,
      width: WIDTH,
      height,
      foot: long ? 12 + 8 * longest : 22,
      below,
      paint: (row, t, { paper, blue, orange }) => {
        const share = value(t, order[row]) / scale;
        return Number.isNaN(share) ? null : mix(paper, share < 0 ? blue : orange, Math.abs(share));
      },
    };
    if (map.cursor) map.move(...map.cursor);
  }

  choose.addEventListener("change", show);
  show();
}

for (const part of document.querySelectorAll(".needs-script")) part.hidden = false;
unfoldedGraph();
gradientMap();
stateMap();
