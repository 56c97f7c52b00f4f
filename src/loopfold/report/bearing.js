"use strict";

// What bears on a prediction: the gradient of its log-probability by each token before it, back through time.

const REACH = 100; // tokens back
const TOGETHER = 2; // steps that go back at once: short enough that the page does not wait for them

class Bearing {
  constructor(reader) {
    Object.assign(this, { reader, model: reader.make(), turn: 0 });
    const rows = Array.from({ length: reader.start }, (_, token) => this.model.row(token));
    this.mean = rows[0].map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
  }

  // Of each token before a place, to first order: how many bits likelier it made the token there, or at the end the
  // likeliest one, than the mean of all tokens in its stead. As [place, bits] of the last REACH; null where another
  // turn began.
  async of(place) {
    const turn = ++this.turn;
    const { reader, model } = this;
    const first = Math.max(place - REACH, 0);
    const slices = new Slices();
    const goOn = async () => {
      if (slices.over) await slices.rest();
      return turn === this.turn;
    };
    const saved = []; // before every so many steps
    const begin = first - (first % EVERY);
    model.restore(reader.saved[begin / EVERY]);
    for (let i = begin; i <= place; i++) {
      if (i >= first && (i - first) % TOGETHER === 0) saved.push(model.save());
      model.step(reader.before(i));
      if (!(await goOn())) return null;
    }
    const found = [];
    let last = null; // the gradient by the state after these steps
    for (let k = saved.length - 1; k >= 0; k--) {
      const from = first + k * TOGETHER;
      const read = Array.from({ length: Math.min(TOGETHER, place + 1 - from) }, (_, i) => reader.before(from + i));
      model.restore(saved[k]);
      const outputs = model.unfold(read);
      const gradients = outputs.map((output, i) => (from + i === place ? this.gradient(place, output) : null));
      const { x, states } = model.backward(gradients, last, null);
      last = states[0];
      for (let i = read.length - 1; i >= 0; i--) if (from + i > 0) found.push([from + i - 1, this.bits(x[i], read[i])]);
      if (!(await goOn())) return null;
    }
    return found.reverse();
  }

  // Of log p of the token at a place, by the output before it.
  gradient(place, output) {
    const token = this.reader.tokens[place] ?? this.reader.best[place][0][0];
    return this.reader.program.logProbabilities(output).map((log, i) => (i === token ? 1 : 0) - Math.exp(log));
  }

  bits(gradient, token) {
    const row = this.model.row(token);
    return gradient.reduce((sum, g, j) => sum + g * (row[j] - this.mean[j]), 0) / Math.LN2;
  }
}
