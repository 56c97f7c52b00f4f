"""The commands, to what is long, wrong or missing: what they say, when, and that they agree with each other."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cli import loopfold, refused, worked

import loopfold as lf
from loopfold.report import inside
from loopfold.report.subject import Subject
from loopfold.telling import telling
from loopfold.training.folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")
RHYME = '\n\nthe cat (a cat) sat on "the mat", and\nthe Rat ran at 7.\n'
SIZES = ["--hidden-size", "8", "--streams", "16", "--window", "32", "--epochs", "1", "--dropout", "0", "--warmup", "0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run` with a valid and a test text, `no-test` without the latter, `given` with a valid text of its own."""
    path = tmp_path_factory.mktemp("said")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("text.txt", "valid.txt"):
        (path / name).write_text(RHYME * 250)
    text = path / "text.txt"
    worked("train", text, "--out", path / "run", "--split", "40/30/30", "--quiet", *SIZES)
    worked("train", text, "--out", path / "no-test", "--split", "40/60/0", "--quiet", *SIZES)
    worked("train", text, "--valid", path / "valid.txt", "--out", path / "given", "--quiet", *SIZES)
    torch.set_num_threads(threads)
    return path


# ------------------------------------------------------------------ gradients and report


@pytest.mark.parametrize("run", ["run", "no-test"])
def test_report_and_gradients_find_the_same_correlations(here: Path, run: str) -> None:
    printed = json.loads(worked("gradients", run, "--steps", "8", "--out", "pictures", "--json"))["tracking"]
    opened = lf.open_run(run)
    assert isinstance(opened.model, lf.RecurrentLM)
    subject = Subject(opened)
    found = lf.hidden_states(opened.model, opened.vocabulary, subject.text).tracking
    assert printed == [vars(tracked) for tracked in found]
    shown = str(inside._states(subject, opened.model).data)
    assert all(f"{tracked.feature}, {tracked.correlation:+.2f}" in shown for tracked in found)


def test_a_passage_that_would_take_days_is_refused_at_once(here: Path) -> None:
    refused("--steps needs a number of at most 1000; got '100000'", "gradients", "run", "--steps", "100000")


def test_a_place_that_cannot_be_is_refused_before_the_work(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worked_on(*_: object) -> None:
        raise AssertionError("the work had begun")

    monkeypatch.setattr("loopfold.gradients.gradient_flow", worked_on)
    monkeypatch.setattr("loopfold.report.page.report_page", worked_on)
    refused("--out is a folder here, for several pictures; got the file x.jpg", "gradients", "run", "--out", "x.jpg")
    refused("x.png. Type --out pictures --format png.", "gradients", "run", "--out", "x.png")
    refused("there is no format 'pgn'; choose from svg, png", "gradients", "run", "--format", "pgn")
    refused("text.txt is a file: name a folder", "gradients", "run", "--out", "text.txt")
    refused("must end in .html; got x.jpg", "report", "run", "--out", "x.jpg")
    assert not Path("x.jpg").exists()


def test_the_pictures_of_gradients_in_a_format_of_choice(here: Path) -> None:
    assert "gradient_flow.png" in worked("gradients", "run", "--steps", "3", "--format", "png", "--out", "images")
    found = [path.read_bytes() for path in Path("images").iterdir()]
    assert len(found) == 4
    assert all(data.startswith(b"\x89PNG") for data in found)


def test_those_who_work_long_say_how_far_they_are() -> None:
    model = lf.SequenceToSequence(lf.Elman(3, 5), outputs=3)
    x, y = torch.randn(7, 2, 3), torch.zeros(7, 2, dtype=torch.long)
    told: list[tuple[str, int, int, str]] = []
    with telling(lambda *what: told.append(what)):
        lf.gradient_flow(model, model.loss, x, y)
        assert told == [("following gradients", t, 7, "steps") for t in range(1, 8)]
        told.clear()
        lf.perplexity(model, torch.randint(3, (1000,)), streams=4, window=50)
        assert [done for _, done, _, _ in told] == [200, 400, 600, 800, 1000]
        told.clear()
        with telling(None):
            lf.gradient_flow(model, model.loss, x, y)
    assert not told


def test_ways_to_score_say_how_far_they_are_and_what_they_try() -> None:
    model, ids = lf.SequenceToSequence(lf.Elman(3, 5), outputs=3), torch.randint(3, (50,))
    told: list[tuple[str, int, int, str]] = []
    with telling(lambda *what: told.append(what)):
        lf.gradient_rms(model, ids, streams=2, window=10)
        assert [what[:3] for what in told] == [("following gradients", done, 50) for done in (16, 33, 50)]
        told.clear()
        lf.perplexity(model, ids, way=lf.DynamicEvaluation(0.01, window=20))
        assert told == [("scoring", done, 50, "tokens") for done in (20, 40, 50)]
        told.clear()
        lf.perplexity(model, ids, way=lf.NeuralCache(10))
        assert told[-1] == ("looking back", 50, 50, "tokens")
        told.clear()
        lf.DynamicEvaluation.tuned(model, ids, window=25)
        tried = [*dict.fromkeys(doing for doing, *_ in told)]
        assert len(tried) > 3
        assert all(re.fullmatch(r"tuning, rate [0-9.]+, decay [0-9.]+", doing) for doing in tried)
        told.clear()
        lf.NGramLM(ids, 3, 4)
        assert told == [("counting n-grams", k, 4, "orders") for k in (2, 3, 4)]


@pytest.mark.parametrize("beam", [None, 2])
def test_writing_that_nobody_sees_says_how_far_it_is(here: Path, beam: int | None) -> None:
    run = lf.open_run("run")
    told: list[tuple[str, int, int, str]] = []
    pick = lf.Sample() if beam is None else lf.Beam(beam)
    with telling(lambda *what: told.append(what)):
        lf.generate(run.model, run.vocabulary, length=3, pick=pick)
        doing = "writing" if beam is None else "searching"
        assert [what for what in told if what[0] == doing] == [(doing, done, 3, "tokens") for done in (1, 2, 3)]
        told.clear()
        lf.generate(run.model, run.vocabulary, length=3, pick=lf.Sample(), show=lambda piece: None)
    assert not told


# ------------------------------------------------------------------ what is missing


def test_runs_with_and_without_a_test_text(here: Path) -> None:
    refused("no-test has no test text, and run has one: they cannot be compared", "compare", "run", "no-test")
    refused("no-test has no test text, and run has one: they cannot be compared", "compare", "no-test", "run")
    refused("given has no test text, and run has one", "compare", "run", "given")
    refused("given was trained on another part of the same text than no-test", "compare", "no-test", "given")


def test_every_place_that_was_tried_for_a_text_is_named(here: Path, tmp_path: Path) -> None:
    run, old, new = (tmp_path / name for name in ("run", "old", "new"))
    for folder, names in ((old, ("text.txt", "valid.txt")), (new, ("text.txt",))):
        folder.mkdir()
        for name in names:
            shutil.copy(name, folder)
    worked("train", old / "text.txt", "--valid", old / "valid.txt", "--out", run, "--quiet", *SIZES)
    shutil.rmtree(old)
    both = "name a folder that holds text.txt and valid.txt, or one place for each"
    for text, tried in ((new, f"{new}/valid.txt and {old}/valid.txt"), (new / "text.txt", f"{old}/valid.txt")):
        said = loopfold("evaluate", run, "--on", "valid", "--text", text)
        assert said.code == 2
        assert f"valid.txt, which {run} was trained with, is not there; tried {tried}. With --text, {both}" in said.err
    refused("there is no file .*none.txt", "evaluate", run, "--on", "valid", "--text", new / "none.txt")
    shutil.copy("valid.txt", new)
    assert "perplexity" in worked("evaluate", run, "--on", "valid", "--text", new)


def test_a_run_without_a_valid_text_shows_a_line_for_every_epoch(tmp_path: Path, here: Path) -> None:
    said = loopfold("train", "text.txt", "--out", tmp_path / "run", "--split", "100/0/0", *SIZES, "--epochs", "2.5")
    head, *rows = re.findall(r"^ .*$", said.err, re.MULTILINE)
    assert head.split() == ["epoch", "step", "train"]
    assert [row.split()[0] for row in rows] == ["1.0", "2.0", "2.5"]
    losses = [float(row.split()[2]) for row in rows]
    assert losses == sorted(losses, reverse=True)


# ------------------------------------------------------------------ what is typed, and what it means


def test_a_number_after_a_way_is_not_taken_for_a_text(here: Path) -> None:
    refused("type --cache --cache-weight 0.1.", "evaluate", "run", "--cache", "0.1")
    refused("type --dynamic --dynamic-rate 1e-3.", "evaluate", "run", "--dynamic", "1e-3")
    refused("there is no file 0.1", "evaluate", "run", "0.1")
    Path("0.2").write_text(RHYME)
    given = ["--cache-weight", "0.1", "--cache-sharpness", "1"]
    assert "0.2" in worked("evaluate", "run", "--cache", "0.2", *given)


def test_weights_that_diverge_on_the_way_are_told_of_in_words(here: Path) -> None:
    Path("short.txt").write_text(RHYME * 4)
    wild = ["evaluate", "run", "short.txt", "--dynamic", "--dynamic-rate", "1e9", "--dynamic-decay", "0"]
    said = worked(*wild)
    assert "inf" not in said
    assert "too large to write" in said
    plain = json.loads(worked("evaluate", "run", "short.txt", "--json"))["perplexity"]
    assert (
        f"the weights diverged on their way through the text: without --dynamic the perplexity is {plain:,.4f}" in said
    )
    assert json.loads(worked(*wild, "--json"))["diverged"] is True
    mild = [*wild[:5], "1e-4", *wild[6:]]
    assert "diverged" not in worked(*mild)
    Path("strange.txt").write_text("7)(Rq" * 40)  # of which any model knows less than nothing
    assert "diverged" not in worked(*mild[:2], "strange.txt", *mild[3:])


def test_a_preset_with_a_size_for_each_layer_says_what_to_type(here: Path) -> None:
    said = (
        "--preset words-large has 3 layers of their own sizes, --hidden-size 1152-1152-400. For 2, give --hidden-size"
    )
    refused(said, "train", "text.txt", "--preset", "words-large", "--layers", "2", "--dry-run")
    assert lf.preset("words-large", layers=3).layers == 3
    assert lf.preset("words-large", layers=2, hidden_size=8).layers == 2


@pytest.mark.parametrize("command", [[], ["train"], ["evaluate"], ["draw"]])
def test_help_shows_flags_as_they_are_typed(command: list[str]) -> None:
    said = worked(*command, "--help")
    assert "--help" in said
    assert "bool" not in said


def test_a_dry_run_shows_the_notes_of_the_run(here: Path, tmp_path: Path) -> None:
    typed = ["train", "text.txt", *SIZES, "--schedule", "step", "--decay-after", "3"]
    dry = loopfold(*typed, "--dry-run")
    wet = loopfold(*typed, "--out", tmp_path / "run")
    notes = re.findall(r"^note: .*$", wet.err, re.MULTILINE)
    assert any("the learning rate never falls" in note for note in notes)
    assert re.findall(r"^note: .*$", dry.out, re.MULTILINE) == notes


# ------------------------------------------------------------------ a run that is stopped


def test_a_run_that_nobody_reads_any_more_is_saved_and_stops(here: Path, tmp_path: Path) -> None:
    """As after `loopfold train … 2>&1 | head`: with the status that the shell has for a closed pipe."""
    typed = ["train", "text.txt", "--out", str(tmp_path / "run"), *SIZES, "--epochs", "1000", "--save-every", "1e6"]
    command = [sys.executable, "-m", "loopfold", *typed, "--evaluate-every", "3"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("   0.1"):
            break
    process.stderr.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert RunFolder.find(tmp_path / "run").step()
    assert lf.open_run(tmp_path / "run").standing.unfinished


def test_a_second_interrupt_is_told_of(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: object, step: int, loss: float) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("loopfold.training.watching.Terminal.step", twice)
    said = loopfold("train", "text.txt", "--out", tmp_path / "run", *SIZES)
    assert said.code == 128 + signal.SIGINT
    assert said.err.endswith("loopfold: stopped at once; a run goes on from what it saved last.\n")
    assert RunFolder.find(tmp_path / "run").step() == 0


# ------------------------------------------------------------------ notes on a run


def test_shares_that_are_no_percentages_and_streams_that_leave_one_step_are_noted(here: Path) -> None:
    said = worked("train", "text.txt", "--dry-run", *SIZES, "--split", "50/50/50", "--streams", "1000000")
    assert "note: the shares 50/50/50 add up to 150, not to 100: the text is split 33.3/33.3/33.3 %" in said
    assert re.search("note: an epoch is one step, of windows of 1, since 1,000,000 streams share [0-9,]+ char", said)
    said = worked("train", "text.txt", "--dry-run", *SIZES, "--split", "0.8/0.1/0.1")
    assert "the shares" not in said
    assert "an epoch is" not in said
