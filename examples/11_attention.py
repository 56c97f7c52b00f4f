"""A decoder that may look back needs no vector that holds the whole source.

An encoder that leaves one vector behind must put all that it read into it, however long that was, and what is written
gets worse with the length of the source. Bahdanau, Cho and Bengio (2015) let the decoder look at all of the encoder's
states instead, with other weights at every step, and found that long sentences were translated as well as short ones.
Here the language is made up: numbers of two digits are said as in German, the ones before the tens, so that "three,
forty" is written 4 3. Two networks with as many units learn to write down sentences of 1 to 8 numbers, one from the
encoder's last vector, one with attention; they are then tested on sentences of each length, writing freely. Each is
started three times. The learning rate falls to zero: at a constant one, steps stay so large that what has been learnt
is thrown over now and then, and how good a network is hangs on when training happens to end.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import loopfold as lf

ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TENS = ("nought", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
END = 10  # written after the last digit


@dataclass
class Result:
    right: dict[str, dict[int, list[float]]]  # by network and numbers read: digits that are right, of each start
    weights: Tensor  # [τ, places], where the first network with attention looked in one sentence
    read: list[str]
    written: list[str]


def sentences(number: int, least: int, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Words `[2·most, number]`, their number in each sentence, and the digits to write, `[2·most + 1, number]`."""
    counts = torch.randint(least, most + 1, (number,), generator=generator)
    tens, ones = torch.randint(10, (2, most, number), generator=generator)
    words = torch.stack([ones, 10 + tens], 1).flatten(0, 1)
    digits = torch.stack([tens, ones], 1).flatten(0, 1)
    lengths = 2 * counts
    alive = torch.arange(2 * most)[:, None] < lengths
    return words, lengths, torch.cat([torch.where(alive, digits, END), torch.full((1, number), END)])


def networks(n: int) -> dict[str, lf.EncoderDecoder | lf.AttentionDecoder]:
    def encoder() -> lf.Bidirectional:
        return lf.Bidirectional(lf.GRU(20, n), lf.GRU(20, n))

    decoder = {"outputs": 11}
    return {
        "the last vector": lf.EncoderDecoder(encoder(), lf.GRU(2 * n + 11, 2 * n), **decoder),
        "attention": lf.AttentionDecoder(encoder(), lf.GRU(11 + 2 * n, 2 * n), **decoder),
    }


def train(model: lf.Pattern, most: int, iterations: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def loss(model: lf.Pattern, words: Tensor, lengths: Tensor, digits: Tensor) -> Tensor:
        o = model.given(one_hot(words, 20).float(), digits, lengths)
        return model.loss(o, digits) / digits.numel()

    batches = (sentences(64, 1, most, generator) for _ in range(iterations))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)  # lower ones may not have found where to look by the end
    lf.fit(model, batches, iterations, loss=loss, optimiser=optimiser, schedule=lf.Ramp(1, 0, over=iterations))


@torch.no_grad()
def experiment(most: int = 8, n: int = 32, iterations: int = 500, tested: int = 300, starts: int = 3) -> Result:
    freely = lf.FreeRunning(lf.Greedy())
    right: dict[str, dict[int, list[float]]] = {}
    for seed in reversed(range(starts)):  # the first comes last, to be looked at
        torch.manual_seed(seed)
        for name, model in (models := networks(n)).items():
            with torch.enable_grad():
                train(model, most, iterations, seed)
            generator = torch.Generator().manual_seed(99)
            for count in range(1, most + 1):
                words, lengths, digits = sentences(tested, count, count, generator)
                o = model(one_hot(words, 20).float(), feeding=freely, steps=len(digits), lengths=lengths)
                share = float((o.argmax(-1) == digits)[:-1].float().mean())
                right.setdefault(name, {}).setdefault(count, []).append(share)
    words, lengths, _ = sentences(1, 4, 4, torch.Generator().manual_seed(3))
    found = models["attention"].predict(one_hot(words, 20).float(), feeding=freely, steps=8, lengths=lengths)
    assert found.run.outputs is not None
    return Result(
        right,
        found.run.outputs.weights[:, 0],
        [(ONES + TENS)[i] for i in words[:, 0].tolist()],
        ["end" if i == END else str(i) for i in found.o[:, 0].argmax(-1).tolist()],
    )


def table(result: Result) -> str:
    counts = list(next(iter(result.right.values())))
    lines = [f"{'digits that are right, by numbers read':<40}" + "".join(f"{count:>7}" for count in counts)]
    for name, shares in result.right.items():
        for what, of in ((f"written from {name}, median", median), ("  least of the starts", min), ("  greatest", max)):
            lines += [f"{what:<40}" + "".join(f"{of(shares[count]):>7.3f}" for count in counts)]
    lines += ["", f"read:    {' '.join(result.read)}", f"written: {' '.join(result.written)}"]
    return "\n".join(lines)


def picture(result: Result) -> lf.Drawing:
    return lf.draw_attention(result.weights, result.read, result.written)


def found(result: Result) -> str:
    vector, attention = ({count: median(shares) for count, shares in of.items()} for of in result.right.values())
    most = max(attention)
    holds = min(attention.values()) >= 0.95 > vector[most]
    places = result.weights.argmax(-1).tolist()
    looked = sum(place == step ^ 1 for step, place in enumerate(places))  # 1 0 3 2 …: the ones are said before the tens
    return f"""\
claim     A decoder that may look back needs no vector of the whole source
holds if  with attention at least 0.95 are right at every length, and from one vector fewer at the longest
verdict   {"holds" if holds else "does not hold here"}
figures   {most} numbers read: {attention[most]:.3f} right with attention, {vector[most]:.3f} from one vector

The picture shows how: {looked} of {len(places)} digits look most at the word that says them, and the weights cross
where the words do. A neighbour may serve as well, since the encoder has told its state of the word too."""


def main() -> None:
    torch.set_num_threads(1)  # the products are small: two threads would wait for each other
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "11_attention.svg")


if __name__ == "__main__":
    main()
