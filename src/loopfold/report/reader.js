"use strict";

// What the model says of a text, token after token, in slices short enough that the page never waits for it.

const EVERY = 32; // so many steps apart its state is kept, to go on from there

// Work until the slice is over, then let the page do what it has to.
class Slices {
  constructor() {
    this.begin = performance.now();
  }

  get over() {
    return performance.now() - this.begin > 12;
  }

  async rest() {
    await new Promise((go) => setTimeout(go));
    this.begin = performance.now();
  }
}

class Reader {
  constructor(program, make, { start, hidden }, ngram) {
    Object.assign(this, { program, make, start, hidden, ngram, model: make(), turn: 0, tokens: [] });
    this.best = []; // at each place, and after the last: the likeliest tokens, as [token, probability]
    this.bits = []; // of each token
    this.grams = []; // the same by the n-gram
    this.states = []; // the hidden state after each token
    this.saved = []; // where the model stands before step 0, EVERY, 2 EVERY, …
  }

  // Read tokens; `seen(from, to)` is called after each slice. False where another text came before the end.
  async read(tokens, seen) {
    const turn = ++this.turn;
    let same = 0;
    while (same < Math.min(tokens.length, this.best.length - 1) && tokens[same] === this.tokens[same]) same++;
    const first = same - (same % EVERY);
    this.tokens = tokens;
    for (const list of [this.best, this.bits, this.grams]) list.length = Math.min(list.length, first);
    this.states.length = Math.min(this.states.length, Math.max(first - 1, 0));
    if (first) this.model.restore(this.saved[first / EVERY]);
    else this.model.reset();
    const slices = new Slices();
    let shown = first;
    for (let i = first; i <= tokens.length; i++) {
      if (i % EVERY === 0) this.saved[i / EVERY] = this.model.save();
      this.step(i);
      if (slices.over) {
        seen(shown, i + 1);
        shown = i + 1;
        await slices.rest();
        if (turn !== this.turn) return false;
      }
    }
    seen(shown, tokens.length + 1);
    return true;
  }

  // Step i reads token i - 1, and says what token i may be.
  step(i) {
    const said = this.program.logProbabilities(this.model.step(i ? this.tokens[i - 1] : this.start));
    this.best[i] = likeliest(said, 5);
    if (i) this.states[i - 1] = Object.values(this.model.state)[this.hidden].slice();
    if (i === this.tokens.length) return;
    this.bits[i] = -said[this.tokens[i]] / Math.LN2;
    if (this.ngram) this.grams[i] = this.ngram.bits(i, this.tokens[i]);
  }

  // Bring a model of one's own to where it has yet to read the token before a place, which must have been read.
  bring(model, place) {
    const first = place - (place % EVERY);
    model.restore(this.saved[first / EVERY]);
    for (let i = first; i < place; i++) model.step(this.before(i));
    return model;
  }

  before(place) {
    return place ? this.tokens[place - 1] : this.start;
  }
}

// The likeliest tokens and their probabilities, the likeliest first.
function likeliest(logProbabilities, count) {
  const found = [];
  for (let token = 0; token < logProbabilities.length; token++) {
    const value = logProbabilities[token];
    if (found.length === count && !(value > logProbabilities[found[count - 1]])) continue;
    let at = found.length;
    while (at && value > logProbabilities[found[at - 1]]) at--;
    found.splice(at, 0, token);
    if (found.length > count) found.pop();
  }
  return found.map((token) => [token, Math.exp(logProbabilities[token])]);
}

const perplexity = (bits) => (bits.length ? 2 ** (bits.reduce((a, b) => a + b, 0) / bits.length) : NaN);
