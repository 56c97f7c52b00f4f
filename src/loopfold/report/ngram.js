"use strict";

// The n-gram of the training text: P(token | those before it) from shares and weights of lower orders.

// Bytes as base64 of deflated bytes.
async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class NGram {
  static async of({ order, sizes, boundary, numbers }, vocabulary) {
    const planes = await inflated(numbers);
    const half = planes.length / 2;
    const all = Uint16Array.from({ length: half }, (_, i) => planes[i] | (planes[half + i] << 8));
    return new NGram(all, order, sizes, boundary, vocabulary);
  }

  constructor(numbers, order, sizes, boundary, vocabulary) {
    let at = 0;
    const next = (size) => numbers.subarray(at, (at += size));
    const share = (size) => Float32Array.from(next(size), (q) => (q === 65535 ? 0 : 2 ** (-q / 2048)));
    this.order = order;
    this.vocabulary = vocabulary;
    this.orders = sizes.map(([contexts, grams]) => {
      const starts = new Uint32Array(contexts + 1);
      next(contexts).forEach((count, i) => (starts[i + 1] = starts[i] + count));
      return { starts, tokens: next(grams), share: share(grams), gamma: share(contexts) };
    });
    this.ids = []; // for each place, the id of the k-gram that ends before it, k = 0 … order - 1; -1: never seen
    this.ids[0] = [0, boundary === null ? -1 : this.find(0, 0, boundary), ...Array(order).fill(-1)].slice(0, order);
  }

  // The id of a context of k tokens with another after it; -1 where that was never seen.
  find(k, context, token) {
    if (context < 0) return -1;
    const { starts, tokens } = this.orders[k];
    let low = starts[context], high = starts[context + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tokens[middle] < token) low = middle + 1;
      else high = middle;
    }
    return low < starts[context + 1] && tokens[low] === token ? low : -1;
  }

  // −log2 P of the token at a place; to be asked place after place.
  bits(place, token) {
    const ids = this.ids[place];
    const after = [0];
    let p = 1 / this.vocabulary;
    this.orders.forEach(({ share, gamma }, k) => {
      const gram = this.find(k, ids[k], token);
      if (ids[k] >= 0) p = (gram < 0 ? 0 : share[gram]) + gamma[ids[k]] * p;
      after.push(gram);
    });
    this.ids[place + 1] = after.slice(0, this.order);
    return -Math.log2(p);
  }
}
