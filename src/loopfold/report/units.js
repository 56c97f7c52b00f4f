"use strict";

// The hidden units over the text: what each goes with in held-out text, and which stand out in a passage.

class Units {
  constructor(reader, known) {
    Object.assign(this, { reader, known });
  }

  get count() {
    return this.known.length;
  }

  name(unit) {
    const goes = this.known[unit][2];
    return goes ? `${unit}: ${goes}` : `${unit}`;
  }

  // Those that go with something first, the closest first; then the rest in their order.
  get order() {
    const close = (unit) => Math.abs(Number(this.known[unit][2].split(" ").pop().replace("−", "-")) || 0);
    return [...this.known.keys()].sort((a, b) => close(b) - close(a) || a - b);
  }

  value(unit, place) {
    return this.reader.states[place]?.[unit] ?? NaN;
  }

  // How many deviations the unit is from its mean, both as held-out text has them.
  away(unit, place) {
    const [mean, deviation] = this.known[unit];
    return deviation > 0 ? (this.value(unit, place) - mean) / deviation : 0;
  }

  // The units that stand out most in a passage, each with its mean there, in deviations.
  standOut(first, last, count) {
    const found = this.known.map((_, unit) => {
      let sum = 0;
      for (let i = first; i <= last; i++) sum += this.away(unit, i);
      return [unit, sum / (last - first + 1)];
    });
    return found.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]) || a[0] - b[0]).slice(0, count);
  }

  // Where else the unit is on in the same direction: the strongest place of each stretch, outside the passage.
  elsewhere(unit, sign, first, last, count) {
    const places = [];
    for (let i = 0; i < this.reader.states.length; i++) {
      const away = this.away(unit, i) * sign;
      if ((i >= first && i <= last) || !(away >= 1)) continue;
      const near = places[places.length - 1];
      if (near && i - near.end <= 1) {
        near.end = i;
        if (away > near.away) Object.assign(near, { place: i, away });
      } else places.push({ place: i, end: i, away });
    }
    return places.sort((a, b) => b.away - a.away).slice(0, count).map(({ place }) => place);
  }
}
