"""From n-grams to a hidden state.

An n-gram model reads the probability of a token from a table with an entry for every n tokens: |V|ⁿ of them, so each
token of context more makes it |V| times as large. A recurrent network puts a hidden state in its place, P(x(t) |
x(1…t-1)) ≈ P(x(t) | h(t-1)), whose size does not depend on how far back it looks. A multilayer perceptron over a
window, and a convolution, stand between the two: they share what they learn among contexts, but see only so far.

All learn the same text (Python's own reference, in characters) and are scored on the same unseen part of it by
perplexity: |V| for a model that knows nothing, 1 for one that knows all. The networks read the text four times. Their
settings were chosen on the valid text: of six pairs of rate and weight decay the one that did best for all four
together, and of two sizes each the better, which was the larger.
"""

from dataclasses import dataclass
from math import log2
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from matplotlib.figure import Figure

import loopfold as lf

NETWORKS = {
    "MLP, window of 8": {"model": "window", "hidden_size": 192, "embedding_size": 64, "span": 8},
    "convolution over 16": {"model": "convolution", "hidden_size": 96, "span": 16},
    "Elman, 256 units": {"cell": "elman", "hidden_size": 256, "embedding_size": 64},
    "GRU, 192 units": {"cell": "gru", "hidden_size": 192, "embedding_size": 64},
}


@dataclass
class Row:
    name: str
    sees: int | None  # how many tokens back; None: all
    table: int | None  # |V|ⁿ
    parameters: int  # numbers learnt; of an n-gram model, the entries that it keeps
    perplexity: float


def ngram(order: int, vocabulary: lf.Vocabulary, corpus: lf.Corpus) -> Row:
    model = lf.NGramLM(vocabulary.encode(corpus.train).ids, vocabulary.size, order)
    score = lf.perplexity(model, vocabulary.encode(corpus.test)).perplexity
    return Row(f"{order}-gram", order - 1, model.table_size, model.entries, score)


def network(name: str, options: lf.Options) -> Row:
    with TemporaryDirectory() as folder:
        run = lf.train(options, Path(folder) / "run")
        score = lf.perplexity(run.model, run.vocabulary.encode(run.corpus().test)).perplexity
    sees = None if options.model == "recurrent" else options.span
    return Row(name, sees, None, lf.count_parameters(run.model), score)


def experiment(
    orders: tuple[int, ...] = (1, 2, 3, 4, 5, 6),
    names: tuple[str, ...] = tuple(NETWORKS),
    sources: tuple[str, ...] = ("python-docs",),
    epochs: float = 4.0,
) -> list[Row]:
    corpus = lf.read_corpus(sources)
    vocabulary = lf.Characters.of(corpus.train)
    rows = [ngram(order, vocabulary, corpus) for order in orders]
    for name in names:
        options = lf.Options(
            sources=sources, epochs=epochs, streams=16, learning_rate=1e-2, weight_decay=0.2, **NETWORKS[name]
        )
        rows.append(network(name, options))
    return rows


def table(result: list[Row]) -> str:
    lines = [f"{'model':<20} {'sees back':>9} {'table |V|ⁿ':>17} {'parameters':>13} {'perplexity':>11}"]
    for row in result:
        sees = "all" if row.sees is None else row.sees
        full = "" if row.table is None else f"{row.table:,}"
        lines.append(f"{row.name:<20} {sees:>9} {full:>17} {row.parameters:>13,} {row.perplexity:>11.2f}")
    return "\n".join(lines)


@lf.style()
def picture(result: list[Row]) -> lf.Drawing:
    """On the left perplexity against size; on the right every model, bars in bits, which begin at an honest 0."""
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    grams = [row for row in result if row.table is not None]
    others = [row for row in result if row.table is None]
    scores = [row.perplexity for row in grams]
    left.plot([row.table for row in grams], scores, "o--", color="0.5", label="n-grams, the full table $|V|^n$")
    left.plot([row.parameters for row in grams], scores, "o-", color="C0", label="n-grams, what occurred")
    for row in grams:
        left.annotate(f"n = {row.name[0]}", (row.table or 0, row.perplexity), (6, 5), textcoords="offset points")
    left.plot([r.parameters for r in others], [r.perplexity for r in others], "D", color="C1", label="networks")
    left.set(xscale="log", yscale="log", ylabel="perplexity a character, unseen text (log scale)")
    left.set_xlabel("parameters, or entries of a table (log scale)")
    left.margins(x=0.09)
    ticks = [3, 4, 5, 7, 10, 15, 25]
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.legend()
    ranked = sorted(result, key=lambda row: -row.perplexity)
    colours = ["C0" if row.table is not None else "C1" for row in ranked]
    bars = right.barh([row.name for row in ranked], [log2(row.perplexity) for row in ranked], color=colours, height=0.6)
    right.bar_label(bars, [f"{row.perplexity:.2f}" for row in ranked], padding=3)
    right.set_xlabel("bits a character, unseen text\n(at each bar, the perplexity)")
    right.margins(x=0.12)
    right.tick_params(axis="y", length=0)
    return lf.Drawing(figure, "Perplexity against size: n-grams as full tables and as kept, and networks")


def found(result: list[Row]) -> str:
    full = max((row for row in result if row.table is not None), key=lambda row: row.table or 0)
    best = min((row for row in result if row.table is not None), key=lambda row: row.perplexity)
    hopeless = (full.table or 0) >= 1000 * full.parameters
    networks = [row for row in result if row.sees is None]
    better, close = (
        [row.name.split(",")[0] for row in networks if row.perplexity < factor * best.perplexity]
        for factor in (1, 1.05)
    )
    verdict = f"in part: {' and '.join(close)} comes within 5%" if close else "does not hold here"
    figures = ", ".join(f"{row.name.split(',')[0]} {row.perplexity:.2f}" for row in [*networks, best])
    return f"""\
claim     A table of n-grams grows as |V|ⁿ and becomes hopeless
holds if  the largest has a thousand entries or more for each that occurred
verdict   {"holds for the full table, which nobody keeps" if hopeless else "does not hold here"}
figures   {full.name}: {full.table:,} entries in full, {full.parameters:,} kept

claim     A hidden state of fixed size does better
holds if  a recurrent network has a lower perplexity than any n-gram model
verdict   {f"holds for {' and '.join(better)}" if better else verdict}
figures   perplexity: {figures}

No n-gram model keeps the full table. It keeps what occurred, for each order at most one entry a token of the text, and
well smoothed that is a strong model. (A larger network that is trained for longer passes n-grams of every order:
README.)"""


def main() -> None:
    torch.set_num_threads(1)  # the same figures whatever the number of cores
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "08_ngrams.svg")


if __name__ == "__main__":
    main()
