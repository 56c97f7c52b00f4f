// Learning: numbers by chance, tasks, and a network that is trained. Nothing here is drawn.

// Uniform numbers from 0 to 1: Tommy Ettinger's mulberry32, a counter whose 32 bits are mixed.
function chance(seed) {
  let counter = seed >>> 0;
  return () => {
    counter = (counter + 0x6d2b79f5) >>> 0;
    let z = Math.imul(counter ^ (counter >>> 15), counter | 1);
    z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
    return ((z ^ (z >>> 14)) >>> 0) / 4294967296;
  };
}

// What an output costs against its target, and the gradient of that.
const COSTS = {
  square(output, target) {
    const error = output[0] - target;
    return [error * error, [2 * error]];
  },
  bit(output, target) {  // -log of the probability σ(output) of a 1, or of a 0
    const o = output[0], cost = Math.max(o, 0) - o * target + Math.log1p(Math.exp(-Math.abs(o)));
    return [cost, [1 / (1 + Math.exp(-o)) - target]];
  },
  letter(output, target) {  // -log of its probability
    const most = Math.max(...output), shares = Array.from(output, (o) => Math.exp(o - most));
    const total = shares.reduce((a, b) => a + b, 0);
    return [Math.log(total) + most - output[target], shares.map((p, i) => p / total - (i === target ? 1 : 0))];
  },
};

const delayOf = (length) => Math.max(1, Math.round(length / 8));

// A task makes sequences: x at every step, and y, which is null where nothing is asked. `baseline` is what the best
// answer costs that does not look at x.
function tasksOf({ text, letters }) {
  const places = Array.from(text, (letter) => letters.indexOf(letter));
  const counts = Array(letters.length).fill(0);
  for (const place of places) counts[place]++;
  const entropy = -counts.reduce((sum, n) => sum + (n / places.length) * Math.log(n / places.length), 0);
  return {
    echo: {
      cost: "square", baseline: 1, unit: "mean squared error", guess: "always answering the mean, 0",
      about: (length) => `Say what was read ${delayOf(length)} steps ago, +1 or −1.`,
      sequence(random, length) {
        const x = Array.from({ length }, () => [random() < 0.5 ? -1 : 1]), delay = delayOf(length);
        return { x, y: x.map((_, t) => (t < delay ? null : x[t - delay][0])) };
      },
    },
    adding: {
      cost: "square", baseline: 1 / 6, unit: "mean squared error", guess: "always answering the mean, 1",
      about: () => "Two of the numbers are marked, one in each half: after the last step, say their sum.",
      sequence(random, length) {
        const half = length >> 1, marked = [Math.floor(random() * half), half + Math.floor(random() * (length - half))];
        const x = Array.from({ length }, (_, t) => [random(), marked.includes(t) ? 1 : 0]);
        return { x, y: x.map((_, t) => (t < length - 1 ? null : x[marked[0]][0] + x[marked[1]][0])) };
      },
    },
    parity: {
      cost: "bit", baseline: Math.LN2, unit: "cross-entropy in nats", guess: "a fair coin",
      about: () => "Say at every step whether the number of ones so far is odd.",
      sequence(random, length) {
        let odd = 0;
        const x = Array.from({ length }, () => [random() < 0.5 ? -1 : 1]);
        return { x, y: x.map(([bit]) => (odd ^= bit > 0 ? 1 : 0)) };
      },
    },
    text: {
      cost: "letter", baseline: entropy, unit: "cross-entropy in nats", guess: "the letters' frequencies alone",
      about: () => "Say which letter of a text comes next.",
      sequence(random, length) {
        const from = Math.floor(random() * (places.length - length - 1));
        const x = Array.from({ length }, (_, t) => letters.split("").map((_, i) => (i === places[from + t] ? 1 : 0)));
        return { x, y: x.map((_, t) => places[from + t + 1]) };
      },
    },
  };
}

function decodedWeights(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

class Learner {
  static batch = 8;
  static clip = 1;

  // A network of `size` units for a task. Weights are drawn as Python's cells draw them, from U(-1/√size, 1/√size); the
  // bias of the gate that keeps the state starts at `bias`. A cell of one's own starts from the weights it came with.
  constructor(task, network, size, seed, bias) {
    this.task = task;
    this.network = network;
    this.size = size;
    this.random = chance(seed);
    this.weights = new Float32Array(network.size);
    if (network.weights) this.weights.set(decodedWeights(network.weights));
    else
      for (const [from, to] of network.trained)
        for (let i = from; i < to; i++) this.weights[i] = (2 * this.random() - 1) / Math.sqrt(size);
    if (network.gate) this.weights.fill(bias, network.gate[1], network.gate[1] + size);
    this.model = network.create(this.weights);
    this.gradient = new Float32Array(network.size);
    this.means = new Float64Array(network.size);
    this.squares = new Float64Array(network.size);
    this.steps = 0;
    this.norm = 0;
    this.losses = [];
  }

  sequences(length, count = Learner.batch) {
    return Array.from({ length: count }, () => this.task.sequence(this.random, length));
  }

  // Forwards and back through every sequence, then one step of Adam; gives the mean cost of an answer before it.
  update(sequences, rate) {
    const work = this.updating(sequences, rate);
    let at = work.next();
    while (!at.done) at = work.next();
    return at.value;
  }

  // The same bit by bit, so that a picture may be drawn after each sequence.
  *updating(sequences, rate) {
    const { model, gradient } = this;
    const asked = sequences.reduce((sum, { y }) => sum + y.filter((target) => target !== null).length, 0);
    let loss = 0;
    gradient.fill(0);
    for (const { x, y } of sequences) {
      model.reset();
      const gradients = model.unfold(x).map((output, t) => {
        if (y[t] === null) return null;
        const [cost, slope] = COSTS[this.task.cost](output, y[t]);
        loss += cost / asked;
        return slope.map((g) => g / asked);
      });
      model.backward(gradients, null, gradient);
      yield;
    }
    this.norm = this.normOf(gradient);
    if (Number.isFinite(this.norm)) this.adam(rate, Math.min(1, Learner.clip / (this.norm + 1e-6)));
    this.losses.push(loss);
    return loss;
  }

  adam(rate, scale) {  // Kingma and Ba (2015)
    const { weights, gradient, means, squares } = this, [a, b] = [0.9, 0.999], k = ++this.steps;
    const now = rate / (1 - a ** k), root = Math.sqrt(1 - b ** k);
    for (const [from, to] of this.network.trained)
      for (let i = from; i < to; i++) {
        const g = gradient[i] * scale;
        means[i] = a * means[i] + (1 - a) * g;
        squares[i] = b * squares[i] + (1 - b) * g * g;
        weights[i] -= (now * means[i]) / (Math.sqrt(squares[i]) / root + 1e-8);
      }
  }

  normOf(row) {
    let sum = 0;
    for (const [from, to] of this.network.trained) for (let i = from; i < to; i++) sum += row[i] * row[i];
    return Math.sqrt(sum);
  }

  // One sequence, to look at: the state after each step, each output, and how the cost of the last answer alone changes
  // with the state before each step.
  look({ x, y }) {
    const { model } = this, states = [], last = y.length - 1;
    model.reset();
    const outputs = x.map((row) => {
      const output = model.step(row);
      states.push(Float32Array.from(Object.values(model.state)[0]));
      return output;
    });
    model.reset();
    model.unfold(x);
    const [, slope] = COSTS[this.task.cost](outputs[last], y[last]);
    const back = model.backward(y.map((_, t) => (t === last ? slope : null))).states;
    const gradients = back.map((state) => Float32Array.from(Object.values(state).flatMap((part) => [...part])));
    return { x, y, states, outputs, gradients, names: Object.keys(model.state), norms: gradients.map((row) => Math.hypot(...row)) };
  }

  // The matrices that multiply the state, one for each gate: where each row of one begins.
  blocks() {
    return this.network.recurrent.flatMap(([at, rows, columns]) =>
      Array.from({ length: columns / rows }, (_, k) => ({ at: at + k * rows, rows, columns })));
  }

  radius() {
    return Math.max(...this.blocks().map((block) => this.radiusOf(block)));
  }

  setRadius(radius) {
    for (const { at, rows, columns } of this.blocks()) {
      const now = this.radiusOf({ at, rows, columns });
      if (!(now > 1e-12)) continue;
      for (let i = 0; i < rows; i++) for (let j = 0; j < rows; j++) this.weights[at + i * columns + j] *= radius / now;
    }
  }

  // The largest modulus of an eigenvalue, as the limit of ‖A^k‖^(1/k): squared 12 times, k = 4096.
  radiusOf({ at, rows, columns }) {
    let a = Float64Array.from({ length: rows * rows }, (_, i) => this.weights[at + Math.floor(i / rows) * columns + (i % rows)]);
    let logarithm = 0;
    for (let k = 1; k <= 4096; k *= 2) {
      const norm = Math.sqrt(a.reduce((sum, v) => sum + v * v, 0));
      if (!(norm > 0)) return norm;
      logarithm += Math.log(norm) / k;
      const next = new Float64Array(rows * rows);
      for (let i = 0; i < rows; i++)
        for (let m = 0; m < rows; m++) {
          const v = a[i * rows + m] / norm;
          for (let j = 0; j < rows; j++) next[i * rows + j] += (v * a[m * rows + j]) / norm;
        }
      a = next;
    }
    return Math.exp(logarithm);
  }

  // It goes on writing, each letter drawn by its probability.
  write(letters, count, random) {
    const { model } = this;
    let text = "", next = letters.indexOf(" ");
    model.reset();
    for (let i = 0; i < count; i++) {
      const output = model.step(Array.from(letters, (_, j) => (j === next ? 1 : 0)));
      const most = Math.max(...output), shares = Array.from(output, (o) => Math.exp((o - most) / 0.7));
      let left = random() * shares.reduce((a, b) => a + b, 0);
      next = Math.max(0, shares.findIndex((share) => (left -= share) < 0));
      text += letters[next];
    }
    return text;
  }
}
