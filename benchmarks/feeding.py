"""What it gains to compile networks that read their own outputs: against Python loops.

    python benchmarks/feeding.py

The loops are here: one call of the layer, the readout and the feeding at every step. Both ways are first shown
to give the same numbers; then they take turns in one process, and medians are compared. `--threads 1` is for a machine
that does other things too.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import loopfold as lf
from loopfold.evaluation import evaluating
from loopfold.feeding import Feeding, Mixed
from loopfold.language.base import Context
from loopfold.language.recurrent import recurrent_lm
from loopfold.states import map_state

HIDDEN, SIZE, ROUNDS = 64, 16, 7


# ------------------------------------------------------------------ the loops


def loop_generate(model: lf.RecurrentLM, vocabulary: lf.Vocabulary, length: int, generator: torch.Generator) -> str:
    """One call of Python a token."""
    text, pieces = vocabulary.stream(), []
    with evaluating(model):
        context = model.initial_context(1)
        for _ in range(length):
            log_p, memory = model.next(context)
            log_p = log_p.index_fill(1, torch.tensor(0), -torch.inf)
            token = torch.multinomial(log_p.softmax(-1), 1, generator=generator)[:, 0]
            token = nn.functional.one_hot(token, vocabulary.size).to(log_p.dtype).argmax(-1)
            pieces.append(text(int(token)))
            context = Context(token, memory)
    return "".join(pieces)


@torch.no_grad()
def torch_generate(cell: nn.GRUCell, E: Tensor, V: Tensor, c: Tensor, length: int, batch: int) -> Tensor:
    """The loop that a user of torch alone would write."""
    h, token, found = torch.zeros(batch, cell.hidden_size), torch.full((batch,), len(E) - 1), []
    for _ in range(length):
        h = cell(E[token], h)
        token = torch.multinomial((h @ V.T + c).softmax(-1), 1)[:, 0]
        found.append(token)
    return torch.stack(found)


def loop_over(
    run: Callable[[Tensor, object, int], tuple[Tensor, object]],
    model: lf.Pattern,
    fed: Tensor,
    y: Tensor,
    feeding: Mixed,
) -> Tensor:
    beside = feeding.beside(y, (len(y), len(fed)), model.outputs, fed)
    os: list[Tensor] = []
    state: object = None
    for t in range(len(y)):
        h, state = run(fed, state, t)
        os.append(model.readout(h))
        fed = feeding.mixed(os[-1], map_state(lambda leaf: leaf[t], beside), model.outputs)  # noqa: B023
    return torch.stack(os)


def loop_output_recurrence(model: lf.OutputRecurrence, x: Tensor, y: Tensor, feeding: Mixed) -> Tensor:
    fed = x.new_zeros(x.shape[1], model.outputs.size)
    return loop_over(lambda fed, state, t: (model.hidden(fed, x[t]), None), model, fed, y, feeding)


def loop_encoder_decoder(model: lf.EncoderDecoder, x: Tensor, y: Tensor, feeding: Mixed) -> Tensor:
    vector = model.encoder(x).last_hidden

    def run(fed: Tensor, state: object, t: int) -> tuple[Tensor, object]:
        found = model.decoder.recurrent(torch.cat([vector, fed], -1)[None], state)
        return found.hidden[0], found.last

    return loop_over(run, model.decoder, vector.new_zeros(len(vector), model.outputs.size), y, feeding)


# ------------------------------------------------------------------ taking turns


def medians(*ways: Callable[[], object]) -> list[float]:
    """Seconds of each, taking turns."""
    rounds: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, times in zip(ways, rounds, strict=True):
            begin = time.perf_counter()
            way()
            times.append(time.perf_counter() - begin)
    return [statistics.median(times) for times in rounds]


def row(what: str, against: str, ratio: float, target: float, figures: str) -> None:
    met = "met" if ratio >= target else "NOT met"
    print(f"{what:<58} {against:<12} {ratio:>6.1f}×   ≥ {target:g}×: {met:<8} {figures}", flush=True)


def generation() -> None:
    vocabulary = lf.Characters.of("".join(map(chr, range(33, 136))))
    torch.manual_seed(0)
    model = recurrent_lm(vocabulary.size, [lf.GRU(vocabulary.size, 320)], None)
    cell, E = nn.GRUCell(vocabulary.size, 320), torch.eye(vocabulary.size + 1, vocabulary.size)
    V, c = model.network.V, model.network.c
    generator = torch.Generator().manual_seed(0)
    for samples, targets in ((1, (15, 10)), (64, (150, 10))):
        length = 1000 if samples == 1 else 300
        pick = lf.Sample(generator)

        def ours() -> None:
            lf.generate(model, vocabulary, "", length, pick, samples=samples)  # noqa: B023

        ours()  # compiles it
        ours_took, loop, plain = medians(
            ours,
            lambda: loop_generate(model, vocabulary, 200, generator),
            lambda: torch_generate(cell, E, V, c, 200, samples),  # noqa: B023
        )
        speeds = samples * length / ours_took, 200 / loop, samples * 200 / plain
        texts = "1 text" if samples == 1 else f"{samples} texts"
        for against, speed, target in zip(("a loop", "plain torch"), speeds[1:], targets, strict=True):
            figures = f"{speeds[0]:,.0f} tokens/s against {speed:,.0f}"
            row(f"generate, GRU 320, characters, {texts}", against, speeds[0] / speed, target, figures)


def training(
    what: str,
    model: lf.Pattern,
    loop: Callable[..., Tensor],
    steps: int,
    batch: int,
    feeding: Callable[[], Feeding],
    target: float,
) -> None:
    x, y = torch.randn(steps, batch, SIZE), torch.randint(SIZE, (steps, batch))

    def both_ways(o: Tensor) -> Tensor:
        model.zero_grad()
        loss = model.loss(o, y)
        loss.backward()
        return loss.detach()

    def ours() -> Tensor:
        return both_ways(model(x, y, feeding()))

    def theirs() -> Tensor:
        return both_ways(loop(model, x, y, feeding()))

    torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-3)
    for _ in range(3):
        ours()
    new, before = medians(ours, theirs)
    row(f"{what}, batch {batch}", "a loop", before / new, target, f"{1e3 * new:.1f} ms against {1e3 * before:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32\n")
    generation()
    for batch, target in ((1, 30), (16, 5)):
        training(
            f"OutputRecurrence, free, n {HIDDEN}, τ 1000",
            lf.OutputRecurrence(SIZE, HIDDEN, SIZE),
            loop_output_recurrence,
            1000,
            batch,
            lf.FreeRunning,
            target,
        )
    training(
        f"EncoderDecoder, scheduled sampling, n {HIDDEN}, τ 100",
        lf.EncoderDecoder(lf.GRU(SIZE, HIDDEN), lf.GRU(HIDDEN + SIZE, HIDDEN), SIZE),
        loop_encoder_decoder,
        100,
        16,
        lambda: lf.ScheduledSampling(0.5, generator=torch.Generator().manual_seed(1)),
        8,
    )


if __name__ == "__main__":
    main()
