// The page: controls become a learner, and what it does becomes pictures.

const find = (id) => document.getElementById(id);
const facts = JSON.parse(find("facts").textContent);
const tasks = tasksOf(facts);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const SPEEDS = [  // updates for each frame
  [1 / 240, "an update in 4 s"], [1 / 60, "an update a second"], [1 / 8, "8 a second"], [1, "one a frame"], [8, "as it can"],
];
const BUDGET = 14;  // milliseconds of learning for each frame

let palette = new Palette();
let learner, shown, seen, work = null, playing = false, progress = 1, drawn = 0, dirty = true, waiting = false;
let radiusNow = 0, held = false, before = 0;

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
const number = (id) => Number(find(id).value);
const rate = () => 10 ** number("rate");
const seed = () => Math.min(find("seed").max, Math.max(find("seed").min, Math.trunc(number("seed")) || 0));

// A new network, from the seed.
function reset() {
  const [inputs, outputs] = facts.shapes[chosen("task")], size = Number(chosen("size"));
  const network = networks[`${chosen("cell")}/${size}/${inputs}/${outputs}`];
  learner = new Learner(tasks[chosen("task")], network, size, seed(), number("bias"));
  find("bias-row").hidden = !network.gate;
  find("bias-label").textContent = network.gate?.[0] === "f" ? "Bias of the forget gate" : "Bias of the update gate";
  find("radius").disabled = !network.recurrent.length;
  find("radius-hint").textContent = network.gate ? "Drag: the matrix of each gate is scaled to it." : "Drag: W is scaled to it.";
  find("written").hidden = chosen("task") !== "text";
  find("written").textContent = "";
  for (const circuit of document.querySelectorAll("[data-cell]")) circuit.hidden = circuit.dataset.cell !== chosen("cell");
  example();
}

// Another sequence to look at.
function example() {
  shown = tasks[chosen("task")].sequence(chance(seed() + 1), number("length"));
  find("about").textContent = tasks[chosen("task")].about(number("length"));
  work = null;
  look();
}

function look() {
  seen = { ...learner.look(shown), cost: learner.task.cost };
  progress = 1;
  ask();
}

function say() {
  const { task, losses, network } = learner, recent = losses.slice(-20), steps = seen.norms.length;
  const loss = recent.reduce((a, b) => a + b, 0) / recent.length;
  find("loss-shown").textContent = losses.length
    ? `After ${losses.length} update${losses.length > 1 ? "s" : ""}: ${loss.toPrecision(3)} (${task.unit}); gradient norm ${learner.norm.toPrecision(2)}` +
      (Number.isFinite(learner.norm) ? (learner.norm > Learner.clip ? ", clipped to 1." : ".") : ": not a number, so nothing was learned.")
    : `Press Play to learn. The loss is the ${task.unit}.`;
  find("loss-caption").textContent = `Mean over the sequences of an update, before it. Dashed: ${task.guess}.`;
  const share = seen.norms[0] / seen.norms[steps - 1], each = share ** (1 / (steps - 1));
  const fate = fateOf(Math.log10(share))[1];
  const word = document.createElement("b");
  word.className = fate;
  word.textContent = Number.isFinite(share) ? `The gradient ${fate}.` : "There is no gradient to follow.";
  const left = share >= 1.05 ? `${spoken(share)} times as much comes to the start.` : `${spoken(share)} of it comes to the start.`;
  const rest = ` Each step back multiplies it by ${each.toFixed(2)}; ${left}`;
  find("verdict").replaceChildren(word, Number.isFinite(share) ? rest : "");
  find("radius-shown").textContent = network.recurrent.length ? radiusNow.toFixed(2) : "no such matrix";
  if (!held) find("radius").value = radiusNow;
  find("bias-shown").textContent = find("bias").value;
  find("length-shown").textContent = find("length").value;
  find("rate-shown").textContent = rate().toPrecision(2);
  find("speed-shown").textContent = SPEEDS[number("speed")][1];
  find("radius").setAttribute("aria-valuetext", radiusNow.toFixed(2));
  find("rate").setAttribute("aria-valuetext", rate().toPrecision(2));
  find("speed").setAttribute("aria-valuetext", SPEEDS[number("speed")][1]);
  find("unfolded").setAttribute("aria-label", `${facts.cells[chosen("cell")]} unfolded over ${steps} steps, with its values and gradients`);
  find("loss").setAttribute("aria-label", `The loss over ${losses.length} updates, beside a guess, ${task.baseline.toFixed(3)}`);
}

function draw() {
  if (drawn++ % 12 === 0 || !playing) {
    if (learner.network.recurrent.length) radiusNow = learner.radius();
    say();
  }
  const steps = seen.norms.length, sweep = still.matches ? 1 : progress;
  const forward = Math.min(steps, Math.ceil((sweep / 0.45) * steps));
  const back = sweep >= 0.95 ? 0 : Math.max(0, steps - Math.floor(((sweep - 0.45) / 0.5) * steps));
  const letters = learner.task.cost === "letter" ? facts.letters : null;
  drawUnfolded(find("unfolded"), seen, palette, letters, forward, sweep < 0.45 ? steps : back);
  if (drawn % 4 === 1 || !playing) drawLoss(find("loss"), learner.losses, learner.task.baseline, learner.task.guess, palette);
  if (letters && learner.losses.length && drawn % 60 === 1)
    find("written").textContent = `It writes: ${learner.write(letters, 90, chance(drawn))}`;
}

// Learn for a while; true if an update has come to its end.
function learn(most) {
  const end = performance.now() + BUDGET;
  let done = 0;
  while (done < most) {
    work ??= learner.updating(learner.sequences(number("length")), rate());
    if (work.next().done) {
      work = null;
      done++;
    }
    if (performance.now() > end) break;
  }
  return done > 0;
}

function frame(now) {
  const frames = Math.min((now - before) / (1000 / 60), 4);  // of 60 a second, whatever the screen has
  before = now;
  waiting = false;
  if (playing) {
    const speed = SPEEDS[number("speed")][0];
    if (speed >= 1) {
      if (learn(speed)) look();
    } else {
      progress += speed * frames;
      if (progress >= 1 && learn(1)) {
        look();
        progress = 0;
      }
    }
    dirty = true;
  }
  if (dirty) {
    dirty = false;
    draw();
  }
  if (playing) ask();
}

function ask() {
  dirty = true;
  if (!waiting) requestAnimationFrame(frame);
  waiting = true;
}

function setPlaying(now) {
  playing = now;
  find("play").textContent = playing ? "Pause" : "Play";
  if (!playing) progress = 1;
  ask();
}

find("play").addEventListener("click", () => setPlaying(!playing));
find("step").addEventListener("click", () => {
  setPlaying(false);
  while (!learn(1));
  look();
});
find("reset").addEventListener("click", () => {
  setPlaying(false);
  reset();
});
find("choices").addEventListener("submit", (event) => event.preventDefault());
find("choices").addEventListener("input", ({ target }) => {
  if (target.id === "radius") {
    learner.setRadius(Math.max(0.01, number("radius")));
    work = null;  // an update that was half done had begun with other weights
    look();
  } else if (target.id === "length") example();
  else if (["rate", "speed"].includes(target.id)) ask();
  else reset();
});
find("seed").addEventListener("change", () => (find("seed").value = seed()));
for (const [event, value] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]])
  find("radius").addEventListener(event, () => (held = value));
document.addEventListener("keydown", (event) => {
  if (event.key !== " " || event.target.closest("button, input, select")) return;
  event.preventDefault();
  setPlaying(!playing);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  palette = new Palette();
  ask();
});
addEventListener("resize", ask);
find("own-weights").hidden = !("own" in facts.cells);
globalThis.play = { learner: () => learner, drawn: () => drawn };  // for a look from the console
reset();
