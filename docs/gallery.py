"""Make docs/gallery.md and its pictures: python docs/gallery.py, or make gallery."""

import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch

import loopfold as lf

HERE = Path(__file__).parent
FOLDER = HERE / "gallery"


class Entry(NamedTuple):
    name: str  # of the picture's file
    title: str
    words: str
    code: str  # its last line is the picture


ENTRIES = [
    Entry(
        "elman-circuit",
        "A transition, as a circuit",
        "One node per component. The black square is a delay of one step; U and W are what the edges carry.",
        "lf.draw(lf.Elman(3, 5))",
    ),
    Entry(
        "elman-unfolded",
        "The same, unfolded",
        "One node per variable per step. U and W stand at every step, in their own colour: they are shared.",
        "lf.draw(lf.Elman(3, 5), steps=4)",
    ),
    Entry(
        "every-step-circuit",
        "An output at every step",
        "Book Fig. 10.3: x, h, o, the loss L and the target y.",
        "model = lf.SequenceToSequence(lf.Elman(3, 5), outputs=4)\nlf.draw(model)",
    ),
    Entry(
        "every-step-unfolded",
        "An output at every step, unfolded",
        "The way forward: from the inputs to the losses.",
        "lf.draw(model, steps=4)",
    ),
    Entry(
        "beside",
        "Side by side",
        "The circuit, and what it unfolds to.",
        "lf.beside(lf.draw(model), lf.draw(model, steps=3))",
    ),
    Entry(
        "every-step-gradients",
        "The way back, with real gradients",
        "The same layout, arrows turned round. The number in a node is ‖∂L/∂·‖ on these data; the thicker an edge, the "
        "more comes back through it (a thousandth of the most is drawn five times thinner).",
        "x, y = torch.randn(6, 8, 3), torch.randint(4, (6, 8))\nlf.draw(model, steps=6, gradients=True, x=x, y=y)",
    ),
    Entry(
        "vanishing",
        "A gradient that dies on its way",
        "W is small, and the only loss is at the end: what comes back is less with every step.",
        "small = lf.Elman(3, 5, recurrent_init=lf.Orthogonal(0.2))\n"
        "last = lf.SequenceToOne(small, outputs=4)\n"
        "lf.draw(last, steps=7, gradients=True, x=torch.randn(7, 8, 3), y=torch.randint(4, (8,)))",
    ),
    Entry(
        "long",
        "A thousand steps",
        "Of more than twelve steps, the first three and the last two are shown; `columns=20` shows up to twenty.",
        "lf.draw(model, steps=1000)",
    ),
    Entry(
        "lstm",
        "LSTM",
        "Its state has two parts, h and c; the picture is read off the step, so it has two as well.",
        "lf.draw(lf.SequenceToSequence(lf.LSTM(3, 5), outputs=4), steps=3)",
    ),
    Entry(
        "lstm-operations",
        "LSTM, every operation",
        "The step graph itself. `@` is a product with the parameter on its edge, ⊙ a product number by number. i, f, g "
        "and o are what the cell calls its gates. A state that passes through sums and products alone, as c does, is a "
        "straight line.",
        "lf.draw(lf.LSTM(3, 5), level=lf.Level.OPERATIONS)",
    ),
    Entry(
        "gru-operations",
        "GRU, every operation",
        "",
        "lf.draw(lf.GRU(3, 5), level=lf.Level.OPERATIONS)",
    ),
    Entry(
        "elman-operations-unfolded",
        "Operations, unfolded",
        "What is really run for τ = 3; a test compares node by node with a recording.",
        "lf.draw(model, steps=3, level=lf.Level.OPERATIONS)",
    ),
    Entry(
        "own-cell",
        "A cell of your own",
        "Names are yours: of parameters, of the state, of the input and of what the step computes on its way. The "
        "edges follow from what the code computes, and 1 - α is not α.",
        """
        class Leaky(lf.Transition):
            def __init__(self, n_in, n):
                super().__init__()
                self.W_in = torch.nn.Parameter(torch.randn(n, n_in) / n_in**0.5)
                self.W_rec = torch.nn.Parameter(torch.randn(n, n) / n**0.5)
                self.alpha = torch.nn.Parameter(torch.full((n,), 0.5))

            def forward(self, h, x):
                new = torch.tanh(x @ self.W_in.T + h @ self.W_rec.T)
                return (1 - self.alpha) * h + self.alpha * new


        lf.draw(Leaky(3, 5), level=lf.Level.OPERATIONS)""",
    ),
    Entry(
        "one-output",
        "One output at the end",
        "Book Fig. 10.5. In the circuit, (τ) marks what is there after the last step alone.",
        "one = lf.SequenceToOne(lf.GRU(3, 5), outputs=4)\nlf.beside(lf.draw(one), lf.draw(one, steps=4))",
    ),
    Entry(
        "output-recurrence-free",
        "Output recurrence, running freely",
        "Book Fig. 10.4: the only way to the future is through the output. What is fed back is dashed.",
        "fed = lf.OutputRecurrence(3, 5, outputs=4)\nlf.draw(fed, steps=4, feeding=lf.FreeRunning())",
    ),
    Entry(
        "output-recurrence-forced",
        "Output recurrence under teacher forcing",
        "Book Fig. 10.6: the true y(t) takes the place of the output, and no step waits for another.",
        "lf.draw(fed, steps=4)",
    ),
    Entry(
        "output-recurrence-scheduled",
        "Scheduled sampling",
        "One or the other goes back in.",
        "lf.draw(fed, steps=4, feeding=lf.ScheduledSampling(0.5))",
    ),
    Entry(
        "vector-to-sequence",
        "A vector to a sequence",
        "Book Fig. 10.9: x is read at every step, beside the output of the step before. U holds the columns for "
        "both: the book's R and U.",
        "lf.draw(lf.VectorToSequence(lf.Elman(3 + 4, 5), outputs=4), steps=4)",
    ),
    Entry(
        "encoder-decoder",
        "Encoder and decoder",
        "Book Fig. 10.12: C is the encoder's last state, and the two may differ in length.",
        "lf.draw(lf.EncoderDecoder(lf.GRU(3, 5), lf.GRU(5 + 4, 6), outputs=4), steps=(4, 3))",
    ),
    Entry(
        "autoencoder",
        "Autoencoder",
        "The targets are the inputs, and it runs freely.",
        "lf.draw(lf.Autoencoder(lf.GRU(3, 5), lf.GRU(5 + 3, 5), outputs=lf.Reals(3)), steps=3)",
    ),
    Entry(
        "bidirectional",
        "Both ways",
        "Book Fig. 10.11: every output sees what comes before and what comes after.",
        "both = lf.Bidirectional(lf.GRU(3, 5), lf.GRU(3, 5))\nlf.draw(lf.SequenceToSequence(both, outputs=4), steps=4)",
    ),
    Entry(
        "bidirectional-stacked",
        "Both ways, in two layers",
        "Each layer reads both directions of the one below.",
        "def both(n_in):\n"
        "    return lf.Bidirectional(lf.LSTM(n_in, 5), lf.LSTM(n_in, 5))\n\n\n"
        "deep = lf.Stacked([both(3), both(5 + 5)])\n"
        "lf.draw(lf.SequenceToSequence(deep, outputs=4), steps=3)",
    ),
    Entry(
        "stacked",
        "Layers on top of each other",
        "Book Fig. 10.13 (a).",
        "stack = lf.Stacked([lf.GRU(3, 5), lf.GRU(5, 5)])\nlf.draw(lf.SequenceToSequence(stack, outputs=4), steps=4)",
    ),
    Entry(
        "language-model",
        "A language model at work",
        "It reads what it wrote: x(t+1) is drawn from o(t). E is the table of embeddings.",
        "cell = lf.Embedded(lf.GRU(6, 5), torch.nn.Embedding(11, 6))\n"
        "language = lf.RecurrentLM(lf.SequenceToSequence(cell, outputs=10))\n"
        "lf.draw(language, steps=4, feeding=lf.FreeRunning(lf.Sample()))",
    ),
    Entry(
        "gradient-flow",
        "How far gradients reach",
        "‖∂L(t)/∂h(k)‖ for every t and k, and the verdict.",
        "x, y = torch.randn(40, 8, 3), torch.randint(4, (40, 8))\nlf.gradient_flow(model, model.loss, x, y).draw()",
    ),
    Entry(
        "gradient-flow-lstm",
        "The same of an LSTM with its forget gate open",
        "",
        "gated = lf.SequenceToSequence(lf.LSTM(3, 5, forget_bias=3.0), outputs=4)\n"
        "lf.gradient_flow(gated, gated.loss, x, y).draw()",
    ),
    Entry(
        "step-gradients",
        "What each step adds to each gradient",
        "‖∇W(t)‖, where W(t) is a copy of W that step t alone uses.",
        "lf.per_step_gradients(model, model.loss, x, y).draw()",
    ),
    Entry(
        "eigenvalues",
        "Eigenvalues of W",
        "Inside the unit circle signals shrink, outside they grow.",
        "lf.eigenvalues(lf.GRU(8, 64)).draw()",
    ),
    Entry(
        "learning-curve",
        "A learning curve",
        "Of a small run, trained for a few seconds.",
        'run = lf.train(lf.preset("quick", hidden_size=64, epochs=1), "gallery-run")\nrun.learning_curve()',
    ),
    Entry(
        "hidden-states",
        "Hidden states over a text",
        "Each unit a row, the text below.",
        "lf.hidden_states(run.model, run.vocabulary, run.corpus().valid[:400]).draw()",
    ),
]


def main() -> None:
    import tempfile

    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    names: dict[str, Any] = {"lf": lf, "torch": torch}
    page = [
        "# Gallery",
        "",
        "Every kind of picture, and the line that draws it. A drawing shows itself in a notebook and saves itself:",
        '`drawing.save("picture.svg")`, or .png, .pdf, .html, .dot (graphs, for Graphviz). `loopfold draw`, `loopfold',
        "gradients` and `loopfold report` make such pictures from the command line. `make gallery` makes this page and",
        "its pictures, of which the repository keeps two; `make docs` makes a site with all of them.",
        "",
        "```python",
        "import loopfold as lf",
        "import torch",
        "```",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for entry in ENTRIES:
            code = textwrap.dedent(entry.code).strip()
            *before, last = code.splitlines()
            exec("\n".join(before).replace('"gallery-run"', repr(f"{folder}/run")), names)
            drawing = eval(last, names)
            drawing.save(FOLDER / f"{entry.name}.svg")
            page += ["", f"## {entry.title}", ""]
            page += [*textwrap.wrap(entry.words, 120), ""] if entry.words else []
            page += ["```python", code, "```", "", f"![{entry.title}](gallery/{entry.name}.svg)"]
            print(drawing)
    (HERE / "gallery.md").write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
