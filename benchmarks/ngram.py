"""The n-gram model on a text of words: perplexity, entries kept, time and memory, for each order.

    python benchmarks/ngram.py ptb.train.txt ptb.valid.txt

On Penn Treebank as Mikolov has prepared it (one sentence a line, 10,000 words, the rest `<unk>`), a 5-gram's published
perplexity on the test text is 141.2; `<eos>` is scored, and contexts do not reach over it.
"""

import sys
import time
from pathlib import Path

from memory import largest

import loopfold as lf


def main(train_path: str, held_out_path: str) -> None:
    train = Path(train_path).read_text(encoding="utf-8")
    words = lf.Words.of(train)
    ids, held_out = words.encode(train).ids, words.encode(Path(held_out_path).read_text(encoding="utf-8"))
    print(f"{len(ids):,} words of training text, {words.size:,} distinct; {len(held_out):,} scored")
    print(f"{'order':>5} {'entries':>10} {'of |V|^n':>9} {'fit s':>6} {'score s':>7} {'perplexity':>11} {'peak MB':>8}")
    for order in range(7):
        begin = time.perf_counter()
        model = lf.NGramLM(ids, words.size, order, words.end)
        fitted = time.perf_counter()
        ledger = lf.perplexity(model, held_out, streams=1, window=len(held_out))
        scored = time.perf_counter()
        print(
            f"{order:>5} {model.entries:>10,} {model.table_size:>9.0e} {fitted - begin:>6.2f} {scored - fitted:>7.2f} "
            f"{ledger.perplexity:>11.2f} {largest():>8.0f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
