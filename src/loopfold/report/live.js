"use strict";

// The section in which the model runs: it reads what is typed, writes, and shows what its units do.

const MOST = 10000; // tokens that are read of a text
const MODES = {
  surprise: "The more orange, the less the model expected it: −log2 of its probability, full where a mere guess would do " +
    "as well.",
  unit: "Orange where the unit is above its mean in WHERE text, blue below, full at 3 deviations. Mark a passage, by " +
    "dragging or with Shift and arrow keys, and see which units stand out there.",
  bearing: `How much each earlier token made the one you point at likelier (orange) or less likely (blue) than an average ` +
    `token there would have: the gradient of its log-probability, back through at most ${REACH} steps.`,
};

// A piece of text in quotation marks or by its name, with what stands for a token that the model does not know.
const UNKNOWN = "unknown";
const tokenName = (program, token) => (token === program.unknown ? UNKNOWN : named(program.texts[token]));
const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : p >= 0.001 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %");

class Live {
  constructor(program, data, ngram) {
    const weights = program.decoded();
    Object.assign(this, { program, data, mode: "surprise" });
    this.reader = new Reader(program, () => program.create(weights), data, ngram);
    this.units = new Units(this.reader, data.units);
    this.bearing = new Bearing(this.reader);
    this.unfold = new Unfold(this.reader, this);
    this.reading = new Reading(at("live-text"), {
      point: (place) => this.point(place),
      mark: (first, last) => this.mark(first, last),
    });
    this.writing = new Writing(this.reader, at("live-ways"), (...taken) => this.take(...taken));
    this.controls();
    if (ngram) {
      at("live-rival").hidden = false;
      at("live-rival-name").textContent = `${ngram.order}-gram of the training text`;
    }
    if (data.pieces) this.given(data.tokens, data.pieces);
    else this.begin(data.text, data.count);
  }

  controls() {
    at("live-typed").addEventListener("input", () => this.typed(at("live-typed").value));
    for (const radio of document.querySelectorAll("input[name=live-mode]")) {
      radio.addEventListener("change", () => this.setMode(radio.value));
    }
    at("live-unit").replaceChildren(...this.units.order.map((unit) => new Option(this.units.name(unit), unit)));
    at("live-unit").addEventListener("change", () => this.recolour());
    document.querySelector("input[name=live-mode][value=unit]").disabled = !this.units.count;
    const temperature = at("live-temperature");
    const shown = () => (at("live-temperature-shown").value = Number(temperature.value).toFixed(2));
    temperature.addEventListener("input", shown);
    at("live-write").addEventListener("click", () => this.write());
    this.setMode("surprise");
  }

  // ---- the text

  typed(text) {
    const all = this.program.read(text);
    const read = all.slice(0, MOST);
    const ends = read.map(([, end]) => end);
    const pieces = ends.map((end, i) => text.slice(i ? ends[i - 1] : 0, end));
    const tokens = read.map(([token]) => token);
    this.show(tokens, pieces, text.slice(ends.length ? ends[ends.length - 1] : 0));
    const unknown = pieces.filter((piece, i) => tokens[i] === this.program.unknown && !/^\s*<unk>$/.test(piece));
    const notes = [];
    if (all.length > MOST) notes.push(`Only the first ${MOST.toLocaleString("en")} ${this.data.unit}s are read.`);
    if (unknown.length) {
      const names = [...new Set(unknown.map(named))].slice(0, 8).join(", ");
      notes.push(`The model has never seen ${names}; it reads that as unknown.`);
    }
    at("live-note").textContent = notes.join(" ");
  }

  // Tokens of a model whose text cannot be cut into tokens here.
  given(tokens, pieces) {
    at("live-typed").value = pieces.join("");
    this.show(tokens, pieces, "");
  }

  // The first tokens of a text.
  begin(text, count) {
    const [, end] = this.program.read(text).slice(0, count).pop() ?? [null, 0];
    at("live-typed").value = text.slice(0, end);
    this.typed(at("live-typed").value);
  }

  async show(tokens, pieces, rest) {
    Object.assign(this, { pieces, borne: null });
    this.bearNothing();
    this.writing.clear();
    this.unfold.turn++;
    this.reading.show(pieces, rest);
    this.reading.box.setAttribute("aria-busy", "true");
    const whole = await this.reader.read(tokens, (first, end) => {
      this.reading.grow(end);
      this.colour(first, end);
      this.figures();
    });
    if (!whole) return;
    this.reading.box.setAttribute("aria-busy", "false");
    this.colour(0, tokens.length);
    if (this.reading.chosen === null) {
      this.point(tokens.length);
      this.unfold.from(this.unfoldedFrom());
    } else this.reading.choose(this.reading.chosen, this.reading.anchor !== null);
  }

  figures() {
    const { bits, grams } = this.reader;
    const shown = (value) => (Number.isNaN(value) ? "—" : value >= 1000 ? value.toExponential(1) : value.toFixed(3));
    at("live-own").textContent = shown(perplexity(bits));
    at("live-grams").textContent = shown(perplexity(grams));
    at("live-count").textContent = bits.length.toLocaleString("en");
  }

  // ---- colours

  setMode(mode) {
    this.mode = mode;
    this.borne = null;
    this.bearNothing();
    at("live-unit-label").hidden = mode !== "unit";
    at("live-passage").hidden = mode !== "unit";
    at("live-mode-note").textContent = MODES[mode].replace("WHERE", this.data.where);
    if (this.pieces) this.recolour();
  }

  recolour() {
    this.colour(0, this.reading.length);
    const place = this.reading.chosen;
    if (place !== null) this.reading.choose(place, this.reading.anchor !== null);
    else this.mark(0, -1);
  }

  colour(first, end) {
    const unit = this.unitChosen;
    const share = {
      surprise: (i) => (this.reader.bits[i] ?? 0) / Math.log2(this.data.start),
      unit: (i) => (this.units.away(unit, i) || 0) / 3,
      bearing: (i) => this.borne?.get(i) ?? 0,
    }[this.mode];
    this.reading.colour(first, end, share);
  }

  // Stop looking for what bears on a token.
  bearNothing() {
    clearTimeout(this.waiting);
    this.bearing.turn++;
  }

  // What bears on the token at a place, once the pointer has rested there, until it moves on.
  bear(place) {
    this.bearNothing();
    this.waiting = setTimeout(async () => {
      const found = this.reader.best[place] && (await this.bearing.of(place));
      if (!found) return;
      const most = found.reduce((a, b) => (Math.abs(b[1]) > Math.abs(a[1]) ? b : a), [null, 0]);
      this.borne = new Map(found.map(([before, bits]) => [before, bits / Math.abs(most[1] || 1)]));
      this.colour(0, this.reading.length);
      const sign = most[1] < 0 ? "−" : "+";
      if (most[0] === null) return;
      at("live-readout").value = `${this.said(place)}. Strongest influence: ${named(this.pieces[most[0]])}, ` +
        `${place - most[0]} back: ${sign}${Math.abs(most[1]).toFixed(2)} bits.`;
    }, 60);
  }

  // ---- one token

  get unitChosen() {
    return Number(at("live-unit").value);
  }

  // What the model says of the token at a place.
  said(place) {
    const { reader, pieces } = this;
    if (place >= pieces.length) return "What comes next";
    const bits = reader.bits[place];
    const grams = reader.ngram ? ` (${reader.ngram.order}-gram ${reader.grams[place].toFixed(2)})` : "";
    const unit = this.unitChosen;
    const value = this.units.value(unit, place).toFixed(3).replace("-", "−");
    const state = this.mode === "unit" ? `; unit ${unit} after it ${value}` : "";
    return `${named(pieces[place])}: probability ${(2 ** -bits).toFixed(4)}, ${bits.toFixed(2)} bits${grams}${state}`;
  }

  point(place) {
    const { reader, program } = this;
    const best = reader.best[place];
    if (!best) return;
    const token = reader.tokens[place];
    at("live-readout").value = this.said(place);
    if (this.mode === "bearing") this.bear(place);
    at("live-best").replaceChildren(
      ...best.map(([other, p]) => {
        const [row, name, bar, number] = ["li", "span", "span", "span"].map((tag) => document.createElement(tag));
        name.textContent = tokenName(program, other);
        number.textContent = percent(p);
        number.dataset.p = p;
        bar.className = "live-bar";
        bar.style.setProperty("--share", p);
        row.classList.toggle("came", other === token);
        row.append(name, bar, number);
        return row;
      }),
    );
  }

  // ---- a passage

  unfoldedFrom() {
    return clamp(this.reading.chosen ?? 0, 0, Math.max(this.reading.length - 1, 0));
  }

  mark(first, last) {
    if (this.reader.best.length > this.reader.tokens.length) this.unfold.from(this.unfoldedFrom());
    if (this.mode !== "unit") return;
    const several = last > first;
    const note = at("live-passage-note");
    note.textContent = several
      ? `Units that stand out in “\u2068${this.excerpt(first, last)}\u2069”, in deviations from their mean:`
      : "No passage is marked.";
    const found = several ? this.units.standOut(first, last, 6) : [];
    at("live-passage-units").replaceChildren(...found.map(([unit, mean]) => this.found(unit, mean, first, last)));
  }

  found(unit, mean, first, last) {
    const row = document.createElement("li");
    const button = document.createElement("button");
    const sign = mean < 0 ? "−" : "+";
    Object.assign(button, { type: "button", textContent: `Unit ${this.units.name(unit)}, ${sign}${Math.abs(mean).toFixed(1)}` });
    button.addEventListener("click", () => {
      at("live-unit").value = unit;
      this.colour(0, this.reading.length);
      this.point(this.reading.chosen);
    });
    row.append(button);
    const others = this.units.elsewhere(unit, Math.sign(mean), first, last, 3);
    others.forEach((place, i) => {
      const go = document.createElement("button");
      const text = this.excerpt(Math.max(place - 6, 0), Math.min(place + 6, this.reading.length - 1));
      Object.assign(go, { type: "button", className: "elsewhere", textContent: `…${text}…` });
      go.setAttribute("aria-label", `Also on at “${text}”`);
      go.addEventListener("click", () => {
        at("live-unit").value = unit;
        this.reading.choose(place, false);
        this.colour(0, this.reading.length);
      });
      row.append(i ? " " : "also at ", go);
    });
    return row;
  }

  excerpt(first, last) {
    const text = this.pieces.slice(first, last + 1).map((piece) => (piece.endsWith("\n") ? piece.slice(0, -1) + "↵" : piece));
    const joined = text.join("");
    return joined.length > 40 ? `${joined.slice(0, 19)} … ${joined.slice(-19)}` : joined;
  }

  // ---- writing

  write() {
    const number = (id) => Number(at(id).value) || 0;
    for (const id of ["live-length", "live-top"]) {
      at(id).value = clamp(Math.round(number(id)), Number(at(id).min), Number(at(id).max));
    }
    const chosen = this.reading.chosen;
    const place = Math.min(chosen === null ? this.reading.length : chosen + 1, this.reading.length);
    if (this.reader.best.length <= place) {
      at("live-from").textContent = "The text is still being read.";
      return;
    }
    const from = place ? `after “\u2068${this.excerpt(Math.max(place - 20, 0), place - 1)}\u2069”` : "from the beginning";
    at("live-from").textContent = `It goes on ${from}.`;
    const [temperature, topK, length] = ["live-temperature", "live-top", "live-length"].map(number);
    this.writing.go(place, { temperature, topK, length });
  }

  take(place, written, text) {
    const before = this.pieces.slice(0, place);
    if (this.data.unit === "subword") {
      const tokens = [...this.reader.tokens.slice(0, place), ...written];
      const pieces = written.map((_, i) => this.program.decode(written.slice(0, i + 1)));
      this.given(tokens, [...before, ...pieces.map((piece, i) => piece.slice(i ? pieces[i - 1].length : 0))]);
    } else {
      at("live-typed").value = before.join("") + text;
      this.typed(at("live-typed").value);
    }
    this.reading.choose(this.reading.length, false);
    this.reading.box.focus();
  }
}

async function live() {
  const data = read("live-data");
  if (!data) return;
  const ngram = data.ngram && (await NGram.of(data.ngram, data.start));
  globalThis.loopfoldLive = new Live(globalThis.loopfold, data, ngram);
}

addEventListener("DOMContentLoaded", live);
