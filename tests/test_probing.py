"""Hidden states over a text, what units track, the eigenvalues of W, and the command that shows them."""

import io
import json
import math
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from helpers import FastAndSlow, TwoMatrices
from torch import Tensor, nn

import loopfold as lf
from loopfold import cli, probing
from loopfold.language.recurrent import recurrent_lm
from loopfold.report.subject import Subject
from loopfold.text.vocabulary import Tokens
from loopfold.training.options import Options
from loopfold.training.watching import Silent

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = 'f(x) = Max(a[1], g(b))\nprint("so (it) is") if (y > 0)\n\nDo it {again (and again)}\n' * 3
VOCABULARY = lf.Characters.of(TEXT)
SIZE = VOCABULARY.size


class Counter(lf.Transition):
    """Reads one-hot characters. Unit 1 counts brackets, unit 3 the characters of the line; 0 and 2 are of no use."""

    brackets: Tensor
    line_end: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.V = nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))

        def one_hot(symbols: str) -> Tensor:
            ids = VOCABULARY.encode(symbols).ids
            return torch.zeros(SIZE).index_fill(0, ids, 1.0)

        self.register_buffer("brackets", one_hot("([{") - one_hot(")]}"))
        self.register_buffer("line_end", one_hot("\n"))

    def initial_state(self, batch: int) -> Tensor:
        return self.V.new_zeros(batch, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        noise, depth, place = x @ self.V, h[:, 1] + x @ self.brackets, (h[:, 3] + x.sum(-1)) * (1 - x @ self.line_end)
        return torch.stack([noise, depth, torch.ones_like(depth), place], -1)


@pytest.fixture
def states() -> lf.HiddenStates:
    return lf.hidden_states(lf.SequenceToSequence(Counter(), outputs=SIZE), VOCABULARY, TEXT)


# ------------------------------------------------------------------ hidden states


@pytest.mark.parametrize("layer", [0, 1, -1, -2])
def test_the_state_after_each_token_is_the_one_that_predicts_the_next(layer: int) -> None:
    model = recurrent_lm(SIZE, [lf.GRU(5, 6), lf.LSTM(6, 7)], 5, dropout=0.5)
    found = lf.hidden_states(model, VOCABULARY, TEXT[:30], layer=layer)
    assert model.training
    model.eval()
    context = model.initial_context(1)
    for t, token in enumerate(VOCABULARY.encode(TEXT[:30]).ids):
        context = lf.Context(token[None], model.next(context).memory)
        after = model.next(context).memory  # once the token has been read
        h = after[0] if layer in (0, -2) else after[1].h
        torch.testing.assert_close(found.values[t], h[0])
    assert found.pieces == list(TEXT[:30])


def test_pieces_are_the_text_as_the_model_reads_it() -> None:
    text = "to bé or not\nto be 中\n"
    for vocabulary in (
        lf.Words.of(text, min_count=1),
        lf.Bytes(),
        lf.Subwords.of(text * 9, 270),
        lf.Characters.of(text),
    ):
        model = recurrent_lm(vocabulary.size, [lf.Elman(3, 4)], 3)
        found = lf.hidden_states(model, vocabulary, text)
        assert found.text == text
        assert len(found.values) == len(found.pieces) == len(vocabulary.encode(text))
        found.draw()
    unknown = lf.hidden_states(recurrent_lm(SIZE, [lf.Elman(3, 4)], 3), VOCABULARY, "a¿b")
    assert unknown.pieces == ["a", "\N{REPLACEMENT CHARACTER}", "b"]


def test_what_cannot_be_probed() -> None:
    ids = VOCABULARY.encode(TEXT).ids
    with pytest.raises(TypeError, match="a NGramLM keeps no hidden state; hidden_states needs a lf.RecurrentLM"):
        lf.hidden_states(lf.NGramLM(ids, SIZE, 2), VOCABULARY, TEXT)
    with pytest.raises(TypeError, match="a Linear is not a language model"):
        lf.hidden_states(nn.Linear(3, 4), VOCABULARY, TEXT)
    model = recurrent_lm(SIZE, [lf.Elman(3, 4)], 3)
    with pytest.raises(ValueError, match=f"the model knows {SIZE} tokens, the vocabulary has 256"):
        lf.hidden_states(model, lf.Bytes(), TEXT)
    with pytest.raises(ValueError, match="the text has no tokens"):
        lf.hidden_states(model, VOCABULARY, "")
    with pytest.raises(ValueError, match="there is no layer 1: the model has 1, from 0 to 0"):
        lf.hidden_states(model, VOCABULARY, TEXT, layer=1)


# ------------------------------------------------------------------ what units track


def test_the_unit_that_counts_is_found(states: lf.HiddenStates) -> None:
    found = {tracked.feature: tracked for tracked in states.tracking}
    for feature, unit in (("bracket depth", 1), ("position in the line", 3)):
        assert found[feature].unit == unit
        assert found[feature].correlation == pytest.approx(1.0)
    assert {tracked.feature for tracked in states.tracking[:2]} == {"bracket depth", "position in the line"}
    assert all(-1 - 1e-9 <= tracked.correlation <= 1 + 1e-9 for tracked in states.tracking)
    assert states.correlations["bracket depth"].shape == (4,)
    assert states.correlations["bracket depth"][2] == 0  # it never moves


def test_correlation_is_pearsons(states: lf.HiddenStates) -> None:
    depth = torch.tensor(probing.bracket_depth(TEXT)).double()
    r = torch.corrcoef(torch.stack([depth, states.values[:, 0].double()]))[0, 1]
    torch.testing.assert_close(states.correlations["bracket depth"][0], r)


def test_a_constant_feature_is_left_out() -> None:
    plain = lf.hidden_states(lf.SequenceToSequence(Counter(), outputs=SIZE), VOCABULARY, "again and again")
    assert {*plain.correlations} == {"position in the line", "letters", "spaces"}
    assert not any(math.isnan(tracked.correlation) for tracked in plain.tracking)
    one = lf.hidden_states(lf.SequenceToSequence(Counter(), outputs=SIZE), VOCABULARY, "a")
    assert one.tracking == []
    one.draw()


def test_a_feature_of_ones_own(states: lf.HiddenStates) -> None:
    depths = probing.bracket_depth(TEXT)
    by_text = states.tracks(lambda text: [-2 * depth for depth in probing.bracket_depth(text)], "minus twice the depth")
    assert (by_text.feature, by_text.unit) == ("minus twice the depth", 1)
    assert by_text.correlation == pytest.approx(-1.0)
    assert states.tracks(depths) == states.tracks(torch.tensor(depths))
    with pytest.raises(ValueError, match=f"tokens has shape .2,.; the text has {len(TEXT)} tokens, so a list of"):
        states.tracks([1, 2], "tokens")
    with pytest.raises(ValueError, match=rf"gave numbers of shape \(1,\); the text has {len(TEXT)} characters"):
        states.tracks(lambda text: [1.0])
    with pytest.raises(ValueError, match="your feature is 7 at every step, so no unit can go with it"):
        states.tracks([7] * len(TEXT))
    with pytest.raises(ValueError, match="not finite"):
        states.tracks([math.nan] * len(TEXT))


def test_a_piece_of_several_characters_has_the_feature_of_its_last() -> None:
    vocabulary = lf.Words.of("(a b) (c\n", min_count=1)
    found = lf.hidden_states(recurrent_lm(vocabulary.size, [lf.Elman(3, 4)], 3), vocabulary, "(a b) (c\n")
    assert found.pieces == ["(a", " b)", " (c", "\n"]
    assert found._per_token("depth", probing.bracket_depth).tolist() == [1, 0, 1, 1]


def test_features() -> None:
    assert probing.bracket_depth("a)(]]([x") == [0, 0, 1, 0, 0, 1, 2, 2]
    assert probing.inside_quotes('a"b"c“d”') == [0, 1, 1, 0, 0, 1, 1, 0]
    assert probing.inside_quotes('"a\n\nb') == [1, 1, 1, 0, 0]
    assert probing.position_in_line("ab\n\nc") == [1, 2, 0, 0, 1]
    assert probing.length_of_line_before("ab\nc\n\nd") == [0, 0, 0, 2, 2, 1, 0]
    assert all(len(feature(text)) == len(text) for feature in probing.FEATURES.values() for text in ("", "\n", TEXT))


def test_the_picture_names_the_units_that_track(states: lf.HiddenStates) -> None:
    axes = states.draw(steps=100).figure.axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels[1].startswith("bracket depth +1.00")
    assert labels[1].endswith(" 1")
    shown = axes.images[0].get_array()
    assert shown is not None
    torch.testing.assert_close(torch.tensor(shown.data), states.values[:100].T.double())
    only = states.draw(units=[3, 0]).figure.axes[0]
    assert [text.get_text().split()[-1] for text in only.get_yticklabels()] == ["3", "0"]
    with pytest.raises(ValueError, match="there is no unit 9: the state has 4, from 0 to 3"):
        states.draw(units=[9])


def test_of_many_units_those_that_track_come_first() -> None:
    values = torch.randn(60, 100)
    values[:, 70] = torch.tensor([float(c == "(") for c in "(ab)" * 15]) * 1e-3
    labels = lf.HiddenStates(values, list("(ab)" * 15)).draw().figure.axes[0].get_yticklabels()
    assert len(labels) == 40
    assert labels[0].get_text().endswith(" 70")


# ------------------------------------------------------------------ eigenvalues


def modulus(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix.detach().double()).abs().max())


def test_a_matrix_for_each_gate() -> None:
    """M17: whether W by itself lets a state grow."""
    lstm, gru = lf.LSTM(4, 4), lf.GRU(4, 4)  # U is square too, and must not be taken for W
    for cell, gates in ((lstm, "ifgo"), (gru, "rzn")):
        radius = lf.eigenvalues(cell).radius
        assert [*radius] == [f"W_{gate}" for gate in gates]
        for name, part in zip(radius, cell.W.split(4), strict=True):
            assert radius[name] == pytest.approx(modulus(part))
    assert lf.eigenvalues(lf.Elman(3, 5, recurrent_init=lf.ScaledIdentity(1.5))).radius == {"W": 1.5}
    assert [*lf.eigenvalues(lf.Embedded(lf.LayerNormLSTM(3, 5), nn.Embedding(7, 3))).values][0] == "W_i"


def test_every_layer_of_a_model_by_its_name() -> None:
    stack = lf.SequenceToSequence(lf.Stacked([lf.Elman(3, 4), lf.Elman(4, 4)]), outputs=5)
    assert [*lf.eigenvalues(stack).values] == ["0.cell.W", "1.cell.W"]
    both = lf.Bidirectional(lf.Elman(3, 4), lf.Elman(3, 6))
    assert {name: len(v) for name, v in lf.eigenvalues(both).values.items()} == {
        "forwards.cell.W": 4,
        "backwards.cell.W": 6,
    }


class SideBySide(nn.Module):
    """M11: one product of [x, h]; the part of the matrix that meets h is the recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Linear(3 + 4, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.A(torch.cat([x, h], -1)))


class RightHand(nn.Module):
    """h @ W, not h @ W.T, and two gates."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 8))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a, b = ((0.5 * h) @ self.W).chunk(2, -1)
        return torch.tanh(a * torch.sigmoid(b) + x)


class Dropping(nn.Module):
    """Draws random numbers: always, or in training alone. U is square too."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))
        self.U = nn.Parameter(torch.randn(4, 4))
        self.drop, self.always = nn.Dropout(0.5), always

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        h = nn.functional.dropout(h, 0.5) if self.always else self.drop(h)
        return torch.tanh(h @ self.W.T + x @ self.U.T)


class Two(NamedTuple):
    h: Tensor
    c: Tensor


class OneProduct(lf.Transition):
    """A matrix of one or two gates that meets h, c and x side by side."""

    def __init__(self, gates: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4 * gates, 4 + 4 + 3))
        self.input_size = 3

    def initial_state(self, batch: int) -> Two:
        return Two(self.W.new_zeros(batch, 4), self.W.new_zeros(batch, 4))

    def forward(self, state: Two, x: Tensor) -> Two:
        a = torch.cat([state.h, state.c, x], -1) @ self.W.T
        return Two(torch.tanh(a[:, :4]), a[:, -4:])


class Reservoir(nn.Module):
    """W is fixed, a buffer."""

    W: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("W", torch.randn(4, 4))
        self.U = nn.Parameter(torch.randn(4, 4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self.W.T + x @ self.U.T)


class Antisymmetric(nn.Module):
    """W = A - Aᵀ is written twice, and A by itself multiplies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(4, 4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ (self.A - self.A.T).T + x) * torch.sigmoid(h @ (self.A - self.A.T).T)


class Parts(nn.Module):
    """Both halves of a state of one tensor, the second backwards, each times its half of W."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(8, 4))

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, 8)

    def forward(self, s: Tensor, x: Tensor) -> Tensor:
        (h, c), (W, V) = s.chunk(2, -1), self.W.chunk(2)
        return torch.cat([torch.tanh(h @ W.T + x), c.flip(-1) @ V.T], -1)


class Columns(nn.Module):
    """W h in columns, [batch, n, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((self.W @ h[..., None])[..., 0] + x)


class Remembering(nn.Module):
    """Sets an attribute, which no step graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        self.seen = h
        return torch.tanh(h @ self.W.T + x)


class Leaky(lf.Transition):
    def __init__(self) -> None:
        super().__init__()
        self.U = nn.Parameter(torch.randn(4, 4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return 0.9 * h + x @ self.U.T


def test_cells_of_ones_own() -> None:
    side, right = SideBySide(), RightHand()
    assert [*lf.eigenvalues(side).radius.values()] == [pytest.approx(modulus(side.A.weight[:, 3:]))]
    assert lf.eigenvalues(right).radius == {
        "W_1": pytest.approx(modulus(right.W[:, :4])),
        "W_2": pytest.approx(modulus(right.W[:, 4:])),
    }
    assert [*lf.eigenvalues(TwoMatrices(5, 5)).values] == ["A"]
    assert [*lf.eigenvalues(FastAndSlow(5, 5)).values] == ["A"]


def test_dropout_is_that_of_evaluation_and_flags_come_back() -> None:
    cell = Dropping(always=False)
    for flags in ((True, True), (True, False), (False, True)):
        cell.training, cell.drop.training = flags
        assert lf.eigenvalues(cell).radius == {"W": pytest.approx(modulus(cell.W))}
        assert (cell.training, cell.drop.training) == flags


def test_a_step_that_cannot_be_traced_is_refused_not_guessed() -> None:
    hooked = lf.Elman(5, 5)
    hooked.register_forward_hook(lambda *_: None)
    for model, said in (
        (hooked, r"state of Elman is not known, .* has hooks, .* Take them off first: handle.remove\(\)\."),
        (lf.SequenceToSequence(hooked, 3), "state of Elman is not known"),
        (Dropping(always=True), "it draws random numbers"),
        (Remembering(), r"it changes self.seen at every step.* torch.linalg.eigvals"),
        (Columns(), r"aten.bmm. Write it as a product of rows \[batch, n\], such as h @ W.T"),
    ):
        with pytest.raises(ValueError, match=said):
            lf.eigenvalues(model)


def test_every_part_of_the_state_has_its_block() -> None:
    """cat([h, c, x]) @ W.T: h is not all of the state."""
    one, two = OneProduct(1), OneProduct(2)
    assert lf.eigenvalues(one).radius == {
        "W (h)": pytest.approx(modulus(one.W[:, :4])),
        "W (c)": pytest.approx(modulus(one.W[:, 4:8])),
    }
    assert {name: v for name, v in lf.eigenvalues(two).radius.items() if "h" in name} == {
        "W_1 (h)": pytest.approx(modulus(two.W[:4, :4])),
        "W_2 (h)": pytest.approx(modulus(two.W[4:, :4])),
    }
    assert [*lf.eigenvalues(two).radius][2:] == ["W_1 (c)", "W_2 (c)"]


def test_a_matrix_that_is_no_parameter_by_itself() -> None:
    """A buffer, a part of a parameter, and what is computed from parameters: as the step uses it."""
    reservoir, skew, parts = Reservoir(), Antisymmetric(), Parts()
    assert lf.eigenvalues(reservoir).radius == {"W": pytest.approx(modulus(reservoir.W))}
    stack = lf.Stacked([Reservoir(), lf.Elman(4, 4)])
    assert [*lf.eigenvalues(stack).values] == ["0.cell.W", "1.cell.W"]
    assert lf.eigenvalues(skew).radius == {"f(A)": pytest.approx(modulus(skew.A - skew.A.T))}
    assert lf.eigenvalues(parts).radius == {
        "W_1": pytest.approx(modulus(parts.W[:4])),
        "W_2": pytest.approx(modulus(parts.W[4:].flip(-1))),
    }


@pytest.mark.parametrize("how", ["orthogonal", "spectral_norm", "weight_norm"])
def test_a_parametrised_matrix_is_the_one_that_is_used(how: str) -> None:
    cell = SideBySide()
    cell.A = getattr(nn.utils.parametrizations, how)(nn.Linear(7, 4))
    radius = lf.eigenvalues(cell).radius
    cell.eval()  # in training spectral_norm changes W at every call
    assert radius == {"weight": pytest.approx(modulus(cell.A.weight[:, 3:]))}


def test_nothing_that_multiplies_the_state() -> None:
    with pytest.raises(ValueError, match="Leaky has no matrix that multiplies its state"):
        lf.eigenvalues(Leaky())
    for model in (nn.Linear(3, 4), lf.WindowLM(10, 4, 4, 4, 0.0)):
        with pytest.raises(ValueError, match=rf"{type(model).__name__} takes no step f\(state, x\) -> state"):
            lf.eigenvalues(model)
    with pytest.raises(TypeError, match="got a str"):
        lf.eigenvalues("lstm")  # type: ignore[arg-type]
    cell = lf.Elman(3, 4)
    cell.W.data[0, 0] = math.inf
    with pytest.raises(ValueError, match="W holds numbers that are not finite"):
        lf.eigenvalues(cell)


# ------------------------------------------------------------------ the command

OWN_CELL = """
import torch
from torch import nn

class Leaky(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.U = nn.Parameter(torch.randn(n, n_in) / 8)

    def forward(self, h, x):
        return torch.tanh(0.9 * h + x @ self.U.T)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, one of a cell without W, and a baseline."""
    path = tmp_path_factory.mktemp("home")
    (path / "text.txt").write_text(TEXT * 4)
    (path / "cells.py").write_text(OWN_CELL)
    common = {"sources": (str(path / "text.txt"),), "split": (60, 20, 20), "hidden_size": 8, "streams": 2, "window": 16}
    for name, kind in (
        ("gru", {"cell": "gru"}),
        ("leaky", {"cell": f"{path}/cells.py:Leaky"}),
        ("window", {"model": "window"}),
    ):
        lf.train(Options(**common, **kind, epochs=2.0), path / name, watcher=Silent())  # type: ignore[arg-type]
    return path


def loopfold(*arguments: object) -> tuple[int | str | None, str, str]:
    out, err = io.StringIO(), io.StringIO()
    patched = mock.patch.object(sys, "argv", ["loopfold", *map(str, arguments)])
    with patched, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, out.getvalue(), err.getvalue()


PICTURES = ["gradient_flow.svg", "step_gradients.svg", "hidden_states.svg", "eigenvalues.svg"]


def test_the_command_says_what_gradients_do_and_draws_it(home: Path) -> None:
    code, out, err = loopfold("gradients", home / "gru", "--steps", 20)
    assert (code, err) == (0, "")
    assert re.search(r"^gradient +(vanishes|fades|healthy|explodes)", out, re.MULTILINE)
    assert re.search(r"^0 +1$", out, re.MULTILINE)
    assert all(f"W_{gate} " in out for gate in "rzn")
    assert re.search(r"^bracket depth +\d+  [+-][01]\.\d\d$", out, re.MULTILINE)
    assert sorted(path.name for path in (home / "gru" / "pictures").iterdir()) == sorted(PICTURES)
    assert all((home / "gru" / "pictures" / name).read_text().startswith("<?xml") for name in PICTURES)
    assert lf.open_run(home / "gru")  # a run is still a run


def test_the_command_in_json(home: Path, tmp_path: Path) -> None:
    code, out, _ = loopfold(
        "gradients", home / "gru", "--json", "--on", "train", "--steps", 12, "--out", tmp_path / "a/b"
    )
    data = json.loads(out)
    assert (code, data["on"], data["steps"], data["passages"], len(data["reach"])) == (0, "train", 12, 8, 12)
    assert data["reach"][0] == 1
    run = lf.open_run(home / "gru")
    assert data["spectral_radius"] == lf.eigenvalues(run.model).radius
    assert data["tracking"][0].keys() == {"feature", "unit", "correlation"}
    assert [Path(path).name for path in data["pictures"]] == PICTURES
    assert all(Path(path).parent == tmp_path / "a/b" and Path(path).exists() for path in data["pictures"])


def test_passages_come_from_all_over_the_text(home: Path) -> None:
    run = lf.open_run(home / "gru")

    def passages(tokens: int, steps: int) -> tuple[Tensor, Tensor]:
        found = Tokens(torch.arange(tokens), "character", tokens, tokens, 0)
        with mock.patch.object(lf.Run, "tokens", return_value=found):
            return run.passages(steps)

    x, y = passages(100, 20)
    assert x.shape == y.shape == (20, 4)
    assert (int(x[0, 0]), int(y[-1, -1])) == (0, 99)
    assert bool((y == x + 1).all())
    assert passages(11, 3)[0].tolist() == [[0, 3, 7], [1, 4, 8], [2, 5, 9]]  # as the docstring draws it
    assert passages(7, 20)[0].shape == (6, 1)
    with pytest.raises(lf.OptionError, match="the text has 1 token, needs 2: choose another with part"):
        passages(1, 20)


def test_passages_of_a_text_of_more_tokens_than_float32_can_count(home: Path) -> None:
    ids = torch.zeros(16_777_284, dtype=torch.uint8)
    ids[-1] = 1
    with mock.patch.object(lf.Run, "tokens", return_value=Tokens(ids, "character", len(ids), len(ids), 0)):
        x, y = lf.open_run(home / "gru").passages(64)
    assert (x.shape, int(x.sum())) == ((64, 8), 0)
    assert y[-1].tolist() == [0, 0, 0, 0, 0, 0, 0, 1]


def test_the_opening_of_a_text_begins_at_its_start(home: Path) -> None:
    run = lf.open_run(home / "gru")
    x, y = run.opening(TEXT, 9)
    assert y[:, 0].tolist() == run.vocabulary.encode(TEXT).ids[:9].tolist()
    assert x[:, 0].tolist() == [run.vocabulary.size, *y[:-1, 0].tolist()]
    assert run.opening("", 9)[0].shape == (0, 1)


def test_a_cell_without_recurrent_matrix_has_no_eigenvalues_and_all_else(home: Path, tmp_path: Path) -> None:
    code, out, err = loopfold("gradients", home / "leaky", "--steps", 9, "--out", tmp_path)
    assert (code, err) == (0, "")
    assert "spectral radius" not in out
    assert re.search(r"^eigenvalues +none: RecurrentLM has no matrix that multiplies its state", out, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(PICTURES[:3])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["window"], "window is a window without recurrence: no gradient goes back through time."),
        (["gru", "--on", "tests"], "there is no part 'tests'; choose from test, valid, train. Did you mean 'test'?"),
        (["nowhere"], "there is no run folder"),
        (["gru", "--out", "text.txt"], "text.txt is a file: name a folder, such as --out pictures."),
    ],
)
def test_what_the_command_says_to_bad_input(home: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    for name in ("gru", "window", "text.txt"):
        (shutil.copytree if name != "text.txt" else shutil.copy)(home / name, tmp_path / name)
    paths = [str(tmp_path / a) if (tmp_path / a).exists() or a == "nowhere" else a for a in arguments]
    code, out, err = loopfold("gradients", *paths, "--steps", 5)
    assert (code, out) == (2, "")
    assert err.startswith("loopfold: ")
    assert said in err
    assert err.count("\n") == 1


# ------------------------------------------------------------------ the learning curve of a run


def test_a_run_draws_its_learning_curve_beside_the_baselines(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "gru", tmp_path / "run")
    run = lf.open_run(tmp_path / "run")
    axes = run.learning_curve().figure.axes[0]
    ends = {line.get_xydata()[-1][1] for line in axes.lines}  # type: ignore[index]
    assert ends == {run.metrics[-1]["train"], run.metrics[-1]["valid"]}
    rows = [row.as_json() for row in lf.compare([run])]
    (tmp_path / "run" / "comparison.json").write_text(json.dumps({"on": "test", "rows": rows}))
    drawn = run.learning_curve()
    texts = " ".join(text.get_text() for text in drawn.figure.axes[0].texts)
    lines = Subject(run).table.lines  # the report draws the same
    assert [*lines][1:] == ["window", "convolution", "gru 8"]
    for row in rows:
        assert (row["name"] in texts) == (row["name"] in lines), row["name"]
    assert "across, the test text" in drawn.figure.axes[0].get_title(loc="left")
    (tmp_path / "run" / "comparison.json").write_text('{"rows": [1]}')
    with pytest.raises(lf.RunError, match=r"comparison.json is damaged \(.*\)\. Remove it, or type loopfold compare"):
        run.learning_curve()


def test_a_curve_has_finite_numbers_alone(home: Path) -> None:
    run = lf.open_run(home / "gru")
    run.metrics[:] = [
        {"step": 1, "train": 2.0, "valid": math.nan},
        {"step": 2, "train": math.inf},
        {"step": 3, "train": 1.0, "valid": 1.5},
    ]
    assert run.curves == {"train": [(1, 2.0), (3, 1.0)], "valid": [(3, 1.5)]}
    assert Subject(run).best == 1.5


def test_a_run_without_a_curve_says_so(home: Path) -> None:
    run = lf.open_run(home / "gru")
    run.metrics.clear()
    with pytest.raises(lf.RunError, match="has no learning curve yet: its first entry comes after 50 steps"):
        run.learning_curve()
