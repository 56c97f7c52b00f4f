"use strict";

// The step that the model takes, unfolded over the text: its operations as they are computed, with their values.

const STEPS = 100; // the most that are unfolded
const LETTER = 6; // pixels of a letter, roughly

function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Where the operations of one step stand: across in shares of a column, upwards in layers.
function laidOut({ operations }) {
  const layer = [];
  const across = { input0: 0.5 };
  operations.forEach(({ reads }, i) => {
    layer[i] = 1 + Math.max(0, ...reads.map((from) => (typeof from === "number" ? layer[from] : 0)));
  });
  // What comes from the state before alone stands just below what reads it.
  const early = [];
  operations.forEach(({ reads }, i) => {
    early[i] = reads.length > 0 && reads.every((from) => early[from] ?? from.startsWith("state"));
  });
  for (const i of [...layer.keys()].reverse()) {
    const readers = [...layer.keys()].filter((k) => operations[k].reads.includes(i));
    if (early[i] && readers.length) layer[i] = Math.min(...readers.map((k) => layer[k])) - 1;
  }
  const layers = Math.max(0, ...layer);
  const apart = []; // in each layer, at least
  for (let l = 1; l <= layers; l++) {
    const here = [...layer.keys()].filter((i) => layer[i] === l);
    const wish = (i) => {
      const places = operations[i].reads.map((from) => across[from] ?? 0.15); // a state comes from the left
      return places.length ? places.reduce((a, b) => a + b, 0) / places.length : 0.5;
    };
    here.sort((a, b) => wish(a) - wish(b));
    apart[l] = Math.min(0.2, 0.84 / Math.max(here.length - 1, 1));
    const places = here.map(wish);
    for (let k = 0; k < here.length; k++) places[k] = Math.max(places[k], k ? places[k - 1] + apart[l] : 0.08);
    for (let k = here.length - 1; k >= 0; k--) {
      places[k] = Math.min(places[k], k === here.length - 1 ? 0.92 : places[k + 1] - apart[l]);
    }
    here.forEach((i, k) => (across[i] = places[k]));
  }
  return { layer, across, layers, apart };
}

function arrowhead() {
  const size = { viewBox: "0 0 6 6", refX: 5.5, refY: 3, markerWidth: 6, markerHeight: 6 };
  const marker = svg("marker", { id: "live-arrow", orient: "auto", ...size });
  marker.append(svg("path", { d: "M0 0.5L6 3L0 5.5Z" }));
  return marker;
}

const shortened = (text, most) => (text.length <= most ? text : most > 3 ? `${text.slice(0, most - 1)}…` : "");

class Unfold {
  constructor(reader, live) {
    Object.assign(this, { reader, live, model: reader.make(), graph: reader.program.graph, turn: 0, steps: [] });
    this.place = laidOut(this.graph);
    if (innerWidth < 600) at("live-steps").value = 1;
    for (const id of ["live-steps", "live-step"]) at(id).addEventListener("input", () => this.draw());
    at("live-graph").addEventListener("click", (event) => {
      const column = event.target.closest("[data-step]");
      if (!column) return;
      at("live-step").value = Number(column.dataset.step) + 1;
      this.draw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(at("live-graph"));
  }

  // What the state is called that an operation gives.
  called(i) {
    return this.graph.state.filter((_, k) => this.graph.after[k] === i).join(", ");
  }

  name(i) {
    const called = this.called(i);
    return this.graph.operations[i].label + (called && ` → ${called}`);
  }

  // How wide an operation may be, and would be for its label, where a column is so wide.
  room(i, width) {
    const { layer, apart } = this.place;
    return Math.min(this.graph.operations[i].label.length * LETTER + 12, apart[layer[i]] * width - 6);
  }

  // The steps from a token on, with all that they compute.
  async from(first) {
    const turn = ++this.turn;
    const { reader, model } = this;
    const count = Math.min(STEPS, reader.tokens.length - first);
    const slices = new Slices();
    const steps = [];
    if (count > 0) reader.bring(model, first + 1);
    for (let i = 0; i < count; i++) {
      model.step(reader.tokens[first + i]);
      const [[likely]] = reader.best[first + i + 1];
      const next = likely === reader.program.unknown ? UNKNOWN : reader.program.texts[likely];
      steps.push({ values: model.values.map((row) => row.slice()), piece: this.live.pieces[first + i], next });
      if (slices.over) {
        await slices.rest();
        if (turn !== this.turn) return;
      }
    }
    this.steps = steps;
    at("live-steps").max = Math.max(count, 1);
    this.draw();
  }

  draw() {
    const count = Math.min(Number(at("live-steps").value), this.steps.length);
    at("live-unfolded").hidden = !count;
    at("live-unfold-none").hidden = !!count;
    if (!count) return;
    at("live-step").max = count;
    const now = clamp(Number(at("live-step").value), 1, count) - 1;
    at("live-steps-shown").value = `${count} ${count === 1 ? "step" : "steps"}`;
    at("live-step-shown").value = `${now + 1}: ${named(this.steps[now].piece)}`;
    this.picture(count, now);
    this.table(now);
  }

  // The wider a column, the more of the step is shown: first its state alone, then every operation.
  picture(count, now) {
    const { graph, place } = this;
    const box = at("live-graph");
    const margin = 48;
    const room = Math.max(box.clientWidth - 2 * margin, 240);
    const width = clamp(room / count, 14, 420);
    const left = margin + Math.max(0, (room - count * width) / 2);
    const detail = clamp((width - 90) / 90, 0, 1);
    const full = clamp(460 / place.layers, 28, 40); // from layer to layer
    const gap = full * (0.4 + 0.6 * detail);
    const bottom = (place.layers + 1) * gap + 24;
    const picture = svg("svg", {
      width: Math.max(room + 2 * margin, left + count * width + margin), height: bottom + 34, role: "img",
      "aria-label": `The step of the model, unfolded ${count} ${count === 1 ? "time" : "times"}`,
    });
    const whole = svg("g", { opacity: 1 - detail });
    const parts = svg("g", { opacity: detail });
    const [names, called] = [svg("g", {}), svg("g", {})];
    const column = svg("rect", { x: left + now * width, y: 4, width, height: bottom + 26, class: "now" });
    picture.append(arrowhead(), column, parts, whole, names, called);
    const spot = (t, i) => [left + (t + place.across[i]) * width, bottom - place.layer[i] * gap];
    const middle = (t) => left + (t + 0.5) * width;
    const states = [...new Set(graph.after.filter((i) => typeof i === "number"))];
    const between = ([x, y], [u, v]) => Math.hypot(x - u, y - v);
    const apart = Math.min(...states.flatMap((i, k) => states.slice(0, k).map((j) => between(spot(0, i), spot(0, j)))));
    const radius = clamp(width * 0.3, 3, Math.max(3, detail ? 0.42 * Math.min(gap, 31) : Math.min(13, 0.4 * apart)));
    const half = (i) => (detail ? Math.max(radius, this.room(i, width) / 2) : radius);

    // Where something stands that step t reads; a state from before the first step comes from the left.
    const source = (t, from) => {
      if (typeof from === "number") return spot(t, from);
      if (from?.startsWith("input")) return [middle(t), bottom];
      if (from !== null && t) return source(t - 1, graph.after[Number(from.slice(5))]);
      const after = from === null ? null : graph.after[Number(from.slice(5))];
      return [left + t * width - 16, typeof after === "number" ? spot(0, after)[1] : bottom - gap];
    };
    const arrow = (group, d) => group.append(svg("path", { d, "marker-end": "url(#live-arrow)" }));
    const line = (group, t, from, i) => {
      const [[x1, y1], [x, y]] = [source(t, from), spot(t, i)];
      const before = String(from).startsWith("state");
      const [x2, y2] = before ? [x - half(i) - 1, y] : [x, y + radius + 1];
      const bend = before ? Math.min(width / 3, 60) : 0;
      const rise = before ? 0 : 8;
      arrow(group, `M${x1} ${y1}C${x1 + bend} ${y1 - rise} ${x2 - bend} ${y2 + rise} ${x2} ${y2}`);
    };
    const upwards = (group, t, from) => {
      const [x, y] = source(t, from);
      arrow(group, `M${x} ${y}C${x} ${y - 8} ${middle(t)} 34 ${middle(t)} 24`);
    };
    for (let t = 0; t < count; t++) {
      const step = this.steps[t];
      graph.sources.forEach((sources, k) => {
        const to = graph.after[k];
        for (const from of sources) {
          if (k >= graph.after.length) upwards(whole, t, from);
          else if (typeof to === "number") line(whole, t, from, to);
        }
      });
      if (detail) {
        graph.operations.forEach(({ reads }, i) => reads.forEach((from) => line(parts, t, from, i)));
        for (const o of graph.gives) if (o !== null) upwards(parts, t, o);
      }
      graph.operations.forEach(({ label }, i) => {
        const state = states.includes(i);
        if (!detail && !state) return;
        const [x, y] = spot(t, i);
        const node = svg("rect", {
          x: x - half(i), y: y - radius, width: 2 * half(i), height: 2 * radius, rx: radius,
          "data-step": t, opacity: state ? 1 : detail,
        });
        const mean = average(step.values[i]) / (largest(step.values[i]) || 1);
        node.style.setProperty("--share", clamp(Math.abs(mean) * 2, 0, 1));
        node.style.setProperty("--colour", `var(--lf-${mean < 0 ? "blue" : "orange"})`);
        node.classList.add("node");
        node.classList.toggle("state", state);
        node.append(svg("title", {}, `${this.name(i)}: ${range(step.values[i])}`));
        names.append(node);
        if (detail) {
          const text = shortened(label, Math.floor((2 * half(i) - 6) / LETTER));
          names.append(svg("text", { x, y: y + 4, opacity: detail, "data-step": t }, text));
        }
        const is = (attributes) => called.append(svg("text", { y: y + 4, ...attributes }, this.called(i)));
        if (state && detail) is({ x: x + half(i) + 4, opacity: detail, class: "name" });
        if (state && !t) is({ x: left - 22, class: "name before" });
      });
      const most = Math.max(1, Math.floor(width / 9));
      const short = (text) => [...visible(bare(text)).replace(" ", "␣")].slice(0, most).join("");
      names.append(svg("text", { x: middle(t), y: bottom + 18, class: "token", "data-step": t }, short(step.piece)));
      names.append(svg("text", { x: middle(t), y: 16, class: "token next", "data-step": t }, short(step.next)));
    }
    box.replaceChildren(picture);
    const start = left + now * width;
    if (start < box.scrollLeft) box.scrollLeft = start - width;
    if (start + width > box.scrollLeft + box.clientWidth) box.scrollLeft = start + 2 * width - box.clientWidth;
  }

  // Every operation of one step, with its numbers.
  table(now) {
    const { values } = this.steps[now];
    const [paper, blue, orange] = ["paper", "blue", "orange"].map(colour);
    at("live-values").replaceChildren(
      ...values.map((row, i) => {
        const [item, name, numbers] = ["li", "span", "span"].map((tag) => document.createElement(tag));
        const strip = document.createElement("canvas");
        Object.assign(strip, { width: row.length, height: 1 });
        const context = strip.getContext("2d");
        const image = context.createImageData(row.length, 1);
        const most = largest(row) || 1;
        row.forEach((value, k) => image.data.set([...mix(paper, value < 0 ? blue : orange, Math.abs(value) / most), 255], 4 * k));
        context.putImageData(image, 0, 0);
        strip.setAttribute("role", "img");
        strip.setAttribute("aria-label", `${row.length} numbers`);
        name.textContent = this.name(i);
        numbers.textContent = range(row);
        item.append(name, strip, numbers);
        return item;
      }),
    );
  }
}

const average = (row) => row.reduce((a, b) => a + b, 0) / row.length;
const largest = (row) => row.reduce((a, b) => Math.max(a, Math.abs(b)), 0);

function range(row) {
  const [low, high] = [Math.min, Math.max].map((far) => row.reduce((a, b) => far(a, b)));
  return `${low.toFixed(2)} … ${high.toFixed(2)}`.replaceAll("-", "−");
}
