"use strict";

// Let the model go on, in several ways side by side.

const WAYS = 3;

class Writing {
  // `take(place, tokens, text)` puts what was written after a place
  constructor(reader, box, take) {
    Object.assign(this, { reader, box, take, turn: 0 });
    this.models = Array.from({ length: WAYS }, () => reader.make());
  }

  async go(place, { temperature, topK, length }) {
    const turn = ++this.turn;
    const { program, tokens } = this.reader;
    const before = tokens.slice(0, place);
    const saved = this.reader.bring(this.models[0], place).save();
    const ways = this.models.map((model, i) => {
      model.restore(saved);
      return { model, last: this.reader.before(place), written: [], shown: this.card(i) };
    });
    const show = () => {
      for (const { shown, written } of ways) shown.text.textContent = program.decode(written, before);
    };
    const slices = new Slices();
    for (let i = 0; i < length; i++) {
      for (const way of ways) {
        way.last = program.pick(way.model.step(way.last), temperature, topK);
        way.written.push(way.last);
      }
      if (slices.over) {
        show();
        await slices.rest();
        if (turn !== this.turn) return;
      }
    }
    show();
    for (const { shown, written } of ways) {
      shown.button.disabled = false;
      shown.button.onclick = () => this.take(place, written, program.decode(written, before));
    }
  }

  card(i) {
    if (!i) this.box.replaceChildren();
    const [card, text, button] = ["div", "pre", "button"].map((name) => document.createElement(name));
    card.className = "live-way";
    text.dir = "auto";
    text.tabIndex = 0;
    text.setAttribute("role", "region");
    text.setAttribute("aria-label", `Way ${i + 1}`);
    Object.assign(button, { type: "button", textContent: "Take this", disabled: true });
    button.setAttribute("aria-label", `Take this, way ${i + 1}`);
    card.append(text, button);
    this.box.append(card);
    return { text, button };
  }

  clear() {
    this.turn++;
    this.box.replaceChildren();
  }
}
