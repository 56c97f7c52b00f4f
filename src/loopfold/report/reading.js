"use strict";

// The text as the model reads it: an element for each token, and a last one for what comes next. One of them is the
// place that was chosen; several may be marked as a passage. By pointer, by touch or by arrow keys.

const AT_ONCE = 1000; // tokens that get their elements together

class Reading {
  // `point(place)` is called when a token is pointed at or chosen, `mark(first, last)` when a passage is
  constructor(box, { point, mark }) {
    Object.assign(this, { box, point, mark, chosen: null, anchor: null, pieces: [], tokens: [] });
    this.end = document.createTextNode("");
    this.next = document.createElement("span");
    this.next.textContent = "…";
    this.next.className = "next";
    this.next.setAttribute("aria-label", "what comes next");
    this.dress(this.next);
    box.append(this.end, this.next);
    box.addEventListener("pointerover", (event) => this.over(event));
    box.addEventListener("pointerdown", (event) => this.press(event));
    box.addEventListener("pointerleave", () => this.chosen !== null && this.point(this.chosen));
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("focus", () => this.chosen ?? (box.matches(":focus-visible") && this.choose(0, false)));
  }

  get length() {
    return this.pieces.length;
  }

  dress(element) {
    element.setAttribute("role", "option");
    element.setAttribute("aria-selected", "false");
  }

  // Show these pieces of text; those at the beginning that are the same stay as they are. `rest` belongs to no token.
  // The place that was chosen is chosen again by whoever has read the text; one at the end stays at the end.
  show(pieces, rest) {
    if (this.chosen !== null) this.chosen = Math.min(this.chosen < this.length ? this.chosen : Infinity, pieces.length);
    this.anchor = null;
    let same = 0;
    while (same < Math.min(pieces.length, this.tokens.length) && this.pieces[same] === pieces[same]) same++;
    for (const element of this.tokens.splice(same)) element.remove();
    Object.assign(this, { pieces, rest });
    this.end.textContent = "";
    this.grow(same + 1);
  }

  // Have elements for so many tokens at least. There are more of them in steps, since each lays all of the text out.
  grow(count) {
    const first = this.tokens.length;
    const last = Math.min(Math.ceil(count / AT_ONCE) * AT_ONCE, this.length);
    const made = document.createDocumentFragment();
    for (let i = first; i < last; i++) {
      const piece = this.pieces[i];
      const element = document.createElement("span");
      element.textContent = piece;
      element.id = `live-${i}`;
      if (piece.endsWith("\n")) element.className = "newline";
      else if (!visibly(piece)) element.dataset.sign = [...piece].map(signOf).join("");
      if (!visibly(piece.trim())) element.setAttribute("aria-label", named(piece));
      this.dress(element);
      this.tokens.push(element);
      made.append(element);
    }
    if (last > first) this.box.insertBefore(made, this.end);
    if (this.tokens.length === this.length) this.end.textContent = this.rest;
    this.next.id = `live-${this.length}`;
  }

  // How strongly each token from `first` on is coloured: from -1, blue, to 1, orange.
  colour(first, end, share) {
    for (let i = first; i < Math.min(end, this.tokens.length); i++) {
      const value = share(i);
      this.tokens[i].style.setProperty("--share", Math.min(Math.abs(value), 1).toFixed(3));
      this.tokens[i].style.setProperty("--colour", `var(--lf-${value < 0 ? "blue" : "orange"})`);
    }
  }

  element(place) {
    return this.tokens[place] ?? this.next;
  }

  place(event) {
    const element = event.target.closest("[role=option]");
    return element ? Number(element.id.slice(5)) : null;
  }

  over(event) {
    const place = this.place(event);
    if (place === null) return;
    if (event.buttons & 1) this.choose(place, true);
    else this.point(place);
  }

  press(event) {
    const place = this.place(event);
    if (event.button || place === null) return;
    if (event.pointerType === "mouse") event.preventDefault(); // marking is ours
    if (event.target.hasPointerCapture(event.pointerId)) event.target.releasePointerCapture(event.pointerId);
    this.box.focus({ preventScroll: true });
    this.choose(place, event.shiftKey);
  }

  key(event) {
    const at = this.chosen ?? 0;
    const end = this.length;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 50, PageDown: at + 50, Home: 0, End: end };
    moves.ArrowUp = this.above(at, -1);
    moves.ArrowDown = this.above(at, 1);
    if (event.altKey || event.metaKey || event.ctrlKey || !(event.key in moves)) return;
    event.preventDefault();
    this.choose(clamp(moves[event.key], 0, end), event.shiftKey);
  }

  // The token in the line above or below.
  above(at, way) {
    const box = this.element(at).getBoundingClientRect();
    const middle = box.left + box.width / 2;
    let [best, distance, top] = [at, Infinity, null];
    for (let i = at + way; i >= 0 && i <= this.length; i += way) {
      const other = this.element(i).getBoundingClientRect();
      if (Math.abs(other.top - box.top) < box.height / 2) continue;
      top ??= other.top;
      if (Math.abs(other.top - top) > box.height / 2) break;
      const away = Math.abs(other.left + other.width / 2 - middle);
      if (away < distance) [best, distance] = [i, away];
    }
    return best;
  }

  choose(place, further) {
    this.grow(place);
    this.element(this.chosen).classList.remove("chosen");
    this.anchor = further && this.chosen !== null ? (this.anchor ?? this.chosen) : null;
    this.chosen = place;
    const element = this.element(place);
    element.classList.add("chosen");
    this.box.setAttribute("aria-activedescendant", element.id);
    const [box, its] = [this.box.getBoundingClientRect(), element.getBoundingClientRect()];
    if (its.top < box.top) this.box.scrollTop -= box.top - its.top + 8;
    if (its.bottom > box.bottom) this.box.scrollTop += its.bottom - box.bottom + 8;
    const [first, last] = [Math.min(place, this.anchor ?? place), Math.max(place, this.anchor ?? place)];
    for (const marked of this.box.querySelectorAll("[aria-selected=true]")) marked.setAttribute("aria-selected", "false");
    for (let i = first; i <= last; i++) this.element(i).setAttribute("aria-selected", "true");
    this.point(place);
    this.mark(first, Math.min(last, this.length - 1));
  }
}

// Whether a piece of text leaves a mark of its own.
const visibly = (piece) => piece !== "" && !/^[\0-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]*$/.test(piece);

// What stands for such a sign: the picture of a control character, or a number.
const signOf = (sign) => (sign < " " ? visible(sign) : `⟨${sign.codePointAt(0).toString(16).toUpperCase()}⟩`);
