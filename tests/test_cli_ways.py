"""`loopfold evaluate` with --dynamic, --cache and --mix-ngram: the figures of the library, tuned where it says."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import loopfold, refused, worked
from test_cli_read import as_json

import loopfold as lf
from loopfold.cli import ways
from loopfold.training.table import Comparison, Row

pytestmark = pytest.mark.usefixtures("one_thread")
RHYME = "the cat sat on the mat, and the rat ran at the cat.\n"
ALL = ["--dynamic", "--cache", "--mix-ngram"]
GIVEN = {
    "--dynamic": ["--dynamic-rate", "0.01", "--dynamic-decay", "0.01", "--dynamic-window", "7"],
    "--cache": ["--cache-weight", "0.2", "--cache-sharpness", "0.5", "--cache-size", "30"],
    "--mix-ngram": ["--ngram-weight", "0.3", "--ngram-order", "2"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run` with a valid and a test text, `bare` with a test text alone, `window` that is no recurrent network."""
    path = tmp_path_factory.mktemp("ways")
    (path / "text.txt").write_text(RHYME * 9 + "a dog sat on a hill, and the bird ran at the fog, on.\n")
    (path / "test.txt").write_text("a dog sat.\n" * 9)
    options: dict[str, Any] = {"hidden_size": 8, "streams": 3, "window": 16, "learning_rate": 0.03, "warmup": 0}
    options |= {"sources": (str(path / "text.txt"),), "epochs": 1.0}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lf.train(lf.Options(**options, split=(80, 10, 10)), path / "run")
    lf.train(lf.Options(**options, test=str(path / "test.txt")), path / "bare")
    lf.train(lf.Options(**options, split=(80, 10, 10), model="window", span=3), path / "window")
    torch.set_num_threads(threads)
    return path


def test_settings_that_are_given(here: Path) -> None:
    run = lf.open_run("run")
    tokens, train = run.tokens("test"), run.tokens("train").ids
    dynamic = lf.DynamicEvaluation(0.01, 0.01, 7, lf.gradient_rms(run.model, train, window=7))
    ngram = lf.NGramLM(train, run.vocabulary.size, 2)
    needed: dict[str, lf.Way] = {
        "--dynamic": dynamic,
        "--cache": lf.NeuralCache(30, 0.2, 0.5),
        "--mix-ngram": lf.Mixture((0.7, 0.3), (ngram,)),
        " ".join(ALL): lf.Mixture((0.7, 0.3), (ngram,), lf.NeuralCache(30, 0.2, 0.5, dynamic)),
    }
    for flags, way in needed.items():
        given = [part for flag in flags.split() for part in (flag, *GIVEN[flag])]
        data = as_json("evaluate", "run", *given)
        ledger = lf.perplexity(run.model, tokens, way=way)
        assert data == ledger.as_json() | {"tuned_on": None}
        assert data["way"] == str(way)
        shown = worked("evaluate", "run", *given)
        assert f"way                     {way}\nsettings                as given\n" in shown
        assert f"perplexity              {ledger.perplexity:,.4f}\n" in shown


def test_settings_are_tuned_on_the_valid_text(here: Path) -> None:
    run = lf.open_run("run")
    valid, train = run.tokens("valid"), run.tokens("train").ids
    rms = lf.gradient_rms(run.model, train)
    dynamic = lf.DynamicEvaluation.tuned(run.model, valid, rms=rms)
    cache = lf.NeuralCache.tuned(run.model, valid, over=dynamic)
    ngram = lf.NGramLM(train, run.vocabulary.size, 5)
    way = lf.Mixture.tuned(run.model, valid, [ngram], over=cache)
    data = as_json("evaluate", "run", *ALL)
    assert data == lf.perplexity(run.model, run.tokens("test"), way=way).as_json() | {"tuned_on": "valid"}
    flatter = "tuned on this text, so the figures flatter it"
    for text, said in (("--on=test", "tuned on the valid text"), ("--on=valid", flatter)):
        assert f"settings                {said}\n" in worked("evaluate", "run", text, "--mix-ngram")
    (here / "valid.txt").write_text(run.text("valid"))
    assert as_json("evaluate", "run", "valid.txt", "--mix-ngram")["tuned_on"] == "this text"


def test_texts_that_hold_the_valid_text_are_known(here: Path, tmp_path: Path) -> None:
    """With a line more, as part of the run's own file, in a long text: passages, and parts of it, count too."""
    among = "tuned on text that is in this one, so the figures flatter it"
    valid = "".join(f"{n} green bottles hanging on the wall.\n" for n in range(200))
    (tmp_path / "valid.txt").write_text(valid)
    other = "".join(f"{n} brown cows went into the wood and never came back.\n" for n in range(200))
    options = replace(lf.open_run("run").options, valid=str(tmp_path / "valid.txt"), epochs=0.1)
    lf.train(options, tmp_path / "apart")
    texts = {"more": valid + "one.\n", "most": other + valid[:1000] + other, "part": valid[3000:3500], "new": other}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        said = "tuned on the valid text" if name == "new" else among
        assert f"settings                {said}\n" in worked(
            "evaluate", tmp_path / "apart", tmp_path / name, "--mix-ngram"
        )
    assert as_json("evaluate", "run", "text.txt", "--mix-ngram")["tuned_on"] == "text that is in this one"


def test_a_text_is_encoded_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, tokens = list[str](), lf.Run.tokens

    def counted(self: lf.Run, part: str) -> lf.Tokens:
        parts.append(part)
        return tokens(self, part)

    monkeypatch.setattr(lf.Run, "tokens", counted)
    as_json("evaluate", "run", *ALL)
    assert sorted(parts) == ["train", "valid"]


def test_one_setting_given_and_another_tuned(here: Path) -> None:
    data = as_json("evaluate", "run", "--cache", "--cache-weight", "0.25")
    assert data["tuned_on"] == "valid"
    assert "weight 0.25" in data["way"]


@pytest.mark.parametrize("flags", [["--cache"], ["--mix-ngram"], ["--dynamic", "--dynamic-rate", "0.01"]], ids=str)
def test_losses_by_token(flags: list[str], here: Path) -> None:
    data = as_json("evaluate", "run", *flags, "--per-token")
    said = loopfold("evaluate", "run", *flags, "--per-token")
    lines = [line.split("\t") for line in said.out.splitlines()]
    assert [[str(t["index"]), json.dumps(t["token"]), repr(t["nats"])] for t in data["per_token"]] == lines
    assert math.fsum(t["nats"] for t in data["per_token"]) == data["nll"]
    assert said.err == f"loopfold: scored by {data['way']}, tuned on the valid text.\n"


def test_a_plain_ledger_says_so(here: Path) -> None:
    assert as_json("evaluate", "run")["way"] == "plain"
    assert "way                     plain\n" in worked("evaluate", "run")


def test_a_text_is_scored_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, scored = list[int](), lf.RecurrentLM.forward

    def counted(self: lf.RecurrentLM, tokens: torch.Tensor, *rest: Any) -> Any:
        calls.append(len(tokens))
        return scored(self, tokens, *rest)

    monkeypatch.setattr(lf.RecurrentLM, "forward", counted)
    one = ["--streams", "1", "--window", "1000"]
    for flags in ([], ["--per-token"], ["--cache", *GIVEN["--cache"]], ["--mix-ngram", *GIVEN["--mix-ngram"]]):
        calls.clear()
        data = as_json("evaluate", "run", *flags, *one)
        assert calls == [data["tokens"]], flags


def test_without_a_line_for_each_token_no_losses_are_held(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loopfold import evaluation

    needed = as_json("evaluate", "run")

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the losses of a long text would not fit in memory")

    monkeypatch.setattr(evaluation, "token_losses", refused)
    assert as_json("evaluate", "run") == needed
    assert worked("evaluate", "run", "--cold")


def test_where_there_is_no_valid_text(here: Path) -> None:
    refused(
        r"no valid text to tune settings on: give --cache-weight and --cache-sharpness\.", "evaluate", "bare", "--cache"
    )
    refused(
        r"no valid text to tune settings on: give --dynamic-decay and --ngram-weight\.",
        *("evaluate", "bare", "--dynamic", "--dynamic-rate", "0.1", "--mix-ngram"),
    )
    given = as_json("evaluate", "bare", "--cache", *GIVEN["--cache"])
    assert given["tuned_on"] is None


def test_where_the_text_is_gone(here: Path, tmp_path: Path) -> None:
    """What needs none of it works; the rest says how to name its new place, beside another text to score, too."""
    packed = lf.pack_run("run", tmp_path / "run.loopfold")
    shutil.move(here / "text.txt", tmp_path / "moved.txt")
    try:
        as_json("evaluate", packed, "test.txt", "--cache", *GIVEN["--cache"])
        for flags in (["--cache"], ["--mix-ngram", *GIVEN["--mix-ngram"]], ["--dynamic", *GIVEN["--dynamic"]]):
            refused(
                "which is not there. Name the place where it is with --text", "evaluate", packed, "test.txt", *flags
            )
            moved = ["--text", tmp_path / "moved.txt"]
            assert as_json("evaluate", packed, "test.txt", *flags, *moved)["way"] != "plain"
    finally:
        shutil.move(tmp_path / "moved.txt", here / "text.txt")


def test_what_is_refused(here: Path) -> None:
    refused("--cache-size has no effect without --cache: add that", "evaluate", "run", "--cache-size", "3")
    refused("--ngram-order has no effect without --mix-ngram", "evaluate", "run", "--cache", "--ngram-order", "3")
    refused("--cache follows the text from its beginning, and --cold", "evaluate", "run", "--cache", "--cold")
    refused("choose one: another text, or --on", "evaluate", "run", "test.txt", "--on", "test", "--cache")
    given = ["--cache", *GIVEN["--cache"]]
    refused("choose one: another text, or --on", "evaluate", "run", "test.txt", "--text", "text.txt", *given)
    refused("--cache-weight .* at most 1", "evaluate", "run", "--cache", "--cache-weight", "2")
    refused("a WindowLM has no hidden states", "evaluate", "window", "--cache")


@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")  # engines disagree about what is infinite
def test_weights_that_run_away(here: Path) -> None:
    away = ["--dynamic-rate", "1e30", "--dynamic-decay", "0"]
    refused(r"no finite numbers after .* choose a smaller rate than 1e\+30", "evaluate", "run", "--dynamic", *away)


def test_dynamic_evaluation_of_a_window(here: Path) -> None:
    assert as_json("evaluate", "window", "--dynamic")["way"].startswith("dynamic evaluation (rate ")


def test_dynamic_settings_are_tuned_on_the_beginning(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "FOLLOWED", 20)
    run = lf.open_run("run")
    rms = lf.gradient_rms(run.model, run.tokens("train").ids)
    way = lf.DynamicEvaluation.tuned(run.model, run.tokens("valid").ids[:20], rms=rms)
    assert as_json("evaluate", "run", "--dynamic")["way"] == str(way)


def test_rows_of_different_ways_are_not_compared(here: Path, tmp_path: Path) -> None:
    plain, other = lf.Ledger(3.0, 4), lf.Ledger(3.0, 4, way="neural cache")
    rows = [Row("lstm 8", 9, None, 1.0, ledger) for ledger in (plain, other)]
    with pytest.raises(ValueError, match="scored in different ways cannot be compared: neural cache; plain"):
        Comparison("test", rows)
    table = Comparison("test", rows[1:])
    assert table.own("lstm 8", Path("x"), plain) is None
    assert table.own("lstm 8", Path("x"), other) is rows[1]
    stored = rows[1].as_json()
    assert Row.from_json(stored) == rows[1]
    del stored["ledger"]["way"]  # as it was stored before there were several
    assert Row.from_json(stored).ledger.way == "plain"
    shutil.copytree("run", tmp_path / "run")
    data = {"on": "test", "rows": [row.as_json() for row in rows]}
    (tmp_path / "run" / "comparison.json").write_text(json.dumps(data))
    refused(r"comparison.json is damaged \(rows that were scored in different ways", "report", tmp_path / "run")
