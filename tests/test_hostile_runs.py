"""Run folders that are damaged or made to do harm, with every checksum right: one clear error, never a traceback."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from helpers import said_by, sign, sign_checkpoint
from safetensors.torch import load, save

import loopfold as lf
from loopfold.comparison import compare
from loopfold.text.corpus import CorpusError
from loopfold.training.folder import RunFolder
from loopfold.training.options import OptionError, Options
from loopfold.training.run import open_run
from loopfold.training.stored import RunError
from loopfold.training.watching import Silent

pytestmark = pytest.mark.usefixtures("one_thread")

EXPECTED = (RunError, OptionError, CorpusError)
MISSING = object()
VALUES = [
    MISSING, None, True, 0, -1, 7, 1 << 62, 10**400, 0.5, 1e300, float("inf"), float("nan"), "", "x", "\x1b[2J", "[/x]",
    "\ud800", "../x", [], ["x"], [None], {}, {"x": None}, [[]] * 9,
]  # fmt: skip
FILES = ["config.json", "checkpoint.json", "vocabulary.json", "metrics.jsonl", "comparison.json"]


class Stopping(Silent):
    def step(self, step: int, loss: float) -> None:
        if step % 9 == 0:
            raise KeyboardInterrupt


def stopped(path: Path, **changes: Any) -> Path:
    """A run at step 8 of 37."""
    (path / "text.txt").write_text("the cat sat on the mat; the rat ran.\n" * 30)
    sizes: dict[str, Any] = {"cell": "lstm", "hidden_size": 4, "streams": 3, "window": 8, "epochs": 1.0, "warmup": 2}
    options = Options(sources=(str(path / "text.txt"),), split=(80, 10, 10), evaluate_every=4, **(sizes | changes))
    with pytest.raises(KeyboardInterrupt):
        lf.train(options, path / "run", watcher=Stopping(), save_every=0)
    ledger = {"tokens": 9, "unit": "character", "nll": 1.0, "perplexity": 2.0}
    row = {"name": "lstm 4", "parameters": 9, "ledger": ledger | {"nats_per_token": 1.0, "bits_per_character": None}}
    (path / "run" / "comparison.json").write_text(json.dumps({"on": "test", "rows": [row]}))
    return path / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped(tmp_path_factory.mktemp("stopped"))


def places(data: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, the whole first."""
    yield above
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield from places(value, (*above, key))


def altered(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The same with one value replaced, or left out."""
    if not place:
        return None if value is MISSING else value
    first, *rest = place
    inside = dict(data) if isinstance(data, dict) else list(data)
    if not rest and value is MISSING:
        del inside[first]
    else:
        inside[first] = altered(inside[first], tuple(rest), value)
    return inside


def put(path: Path, name: str, data: Any) -> None:
    if name == "checkpoint.json":
        sign_checkpoint(path, data)
    elif name == "comparison.json":
        (path / name).write_text(json.dumps(data))
    elif name == "metrics.jsonl":
        lines = data if isinstance(data, list) else [data]
        sign(path, name, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    else:
        sign(path, name, json.dumps(data).encode())


def read(path: Path, name: str) -> Any:
    text = (path / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name == "metrics.jsonl" else json.loads(text)


def use(path: Path) -> str:
    """All that is done with a run; what kept it from it, in one sentence."""
    try:
        run = open_run(path)
        run.learning_curve()
        compare([run], neural=False)
        lf.generate(run.model, run.vocabulary, "the ", 3)
        lf.resume(path, watcher=Stopping())
    except EXPECTED as error:
        return str(error)
    except KeyboardInterrupt:
        return ""
    return ""


@pytest.mark.parametrize("name", FILES)
def test_any_value_anywhere(name: str, run: Path, tmp_path: Path) -> None:
    good = read(run, name)
    refused = 0
    for place in places(good):
        for value in Random(str(place)).sample(VALUES, 5):
            path = Path(shutil.copytree(run, tmp_path / "run"))
            put(path, name, altered(good, place, value))
            try:
                refused += use(path) != ""
            except Exception as error:
                error.add_note(f"{name} at {place}: {value!r:.100}")
                raise
            shutil.rmtree(path)
    assert refused > 9


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff{}", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\0" * 99, b"null"], ids=range(7)
)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_json(name: str, raw: bytes, run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run"))
    if name in ("checkpoint.json", "comparison.json"):
        (path / name).write_bytes(raw)
    else:
        sign(path, name, raw)
    if raw or name != "metrics.jsonl":
        assert f"{path / name} is damaged" in use(path)


# ------------------------------------------------------------------ tensors

Tensors = dict[str, torch.Tensor]


def named(tensors: Tensors, part: str) -> str:
    return next(name for name in tensors if part in name)


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {named(tensors, part): change(tensors[named(tensors, part)]).contiguous()}


WEIGHTS: dict[str, Callable[[Tensors], Tensors]] = {
    "one is missing": without("readout"),
    "one more": lambda tensors: tensors | {"more": torch.zeros(3)},
    "another size": changed("embedding", lambda t: t[1:]),
    "another rank": changed("embedding", lambda t: t[None]),
    "whole numbers": changed("embedding", lambda t: t.long()),
    "none": lambda tensors: {},
}
STATES: dict[str, Callable[[Tensors], Tensors]] = {
    "an average is missing": without("exp_avg_sq"),
    "no steps": without("/step"),
    "an average of another size": changed("exp_avg", lambda t: t[1:]),
    "whole numbers": changed("exp_avg", lambda t: t.long()),
    "many steps": changed("/step", lambda t: torch.zeros(5)),
    "an unknown parameter": lambda tensors: tensors | {"optimiser/none/step": torch.zeros(())},
    "no context": without("context"),
    "more context": lambda tensors: tensors | {"context/99": torch.zeros(3)},
    "other streams": changed("context/1", lambda t: t[:2]),
    "a token that is none": changed("context/0", lambda t: t + 10_000),
    "a token below 0": changed("context/0", lambda t: t - 10_000),
    "something else": lambda tensors: tensors | {"else": torch.zeros(3)},
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit(case: str, run: Path, tmp_path: Path) -> None:
    check_tensors("weights", WEIGHTS[case], run, tmp_path)


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_does_not_fit(case: str, run: Path, tmp_path: Path) -> None:
    check_tensors("state", STATES[case], run, tmp_path)


def check_tensors(kind: str, change: Callable[[Tensors], Tensors], run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run"))
    name = RunFolder.open(path).checkpoint[kind]
    tensors = change(load((path / name).read_bytes()))
    sign(path, name, save(tensors))
    with pytest.raises(RunError, match=rf"^{path / name} does not fit the model of config.json\.$"):
        lf.resume(path)


@pytest.mark.parametrize("raw", [b"", b"x", b"\xff" * 8 + b"{}", b"\x02" + b"\0" * 7 + b"[]"], ids=range(4))
@pytest.mark.parametrize("kind", ["weights", "state"])
def test_what_is_no_file_of_tensors(kind: str, raw: bytes, run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run"))
    name = RunFolder.open(path).checkpoint[kind]
    sign(path, name, raw)
    with pytest.raises(RunError, match=rf"^{path / name} is damaged: it does not hold tensors \(.+\)\.$"):
        lf.resume(path)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden_size": 1 << 40},
            r"config.json is damaged: hidden_size must be from 1 to 1048576; got 1099511627776\.$",
        ),
        ({"layers": 1 << 40}, r"config.json is damaged: layers must be from 1 to 1000; got 1099511627776\.$"),
        ({"hidden_size": 1 << 20}, r"safetensors does not fit the model of config.json\.$"),
        ({"layers": 1000}, r"safetensors does not fit the model of config.json\.$"),
        ({"hidden_size": 50_000}, r"safetensors does not fit the model of config.json\.$"),
    ],
    ids=str,
)
def test_sizes_that_the_weights_do_not_have_take_no_memory(
    sizes: dict[str, int], message: str, run: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run"))
    config = read(path, "config.json")
    config["options"] |= sizes
    put(path, "config.json", config)
    with pytest.raises(RunError, match=message):
        open_run(path)


# ------------------------------------------------------------------ vocabularies


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped(tmp_path_factory.mktemp("subwords"), unit="subwords", vocabulary_size=260)


def test_subwords_run_nothing_but_their_merges(subwords: Path, tmp_path: Path) -> None:
    """The library's file may hold more: other rules, and patterns that take for ever."""
    path = Path(shutil.copytree(subwords, tmp_path / "run"))
    stored = read(path, "vocabulary.json")
    model = json.loads(stored["model"])
    model["normalizer"] = {"type": "Lowercase"}
    put(path, "vocabulary.json", stored | {"model": json.dumps(model)})
    came, needed = (lf.open_run(folder).vocabulary.encode("The Cat").ids for folder in (path, subwords))
    assert came.tolist() == needed.tolist()
    assert use(path) == ""


def test_any_value_anywhere_in_subwords(subwords: Path, tmp_path: Path) -> None:
    stored = read(subwords, "vocabulary.json")
    model = json.loads(stored["model"])
    for place in [
        (),
        ("model",),
        ("model", "vocab"),
        ("model", "vocab", "a"),
        ("model", "merges"),
        ("model", "merges", 0),
    ]:
        for value in VALUES:
            path = Path(shutil.copytree(subwords, tmp_path / "run"))
            text = json.dumps(altered(model, place, value))
            put(path, "vocabulary.json", stored | {"model": text})
            try:
                use(path)
            except Exception as error:
                error.add_note(f"{place}: {value!r:.100}")
                raise
            shutil.rmtree(path)


# ------------------------------------------------------------------ text and terminals


def test_a_text_that_is_no_file_is_not_waited_for(run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run"))
    config = read(path, "config.json")
    config["options"]["sources"] = ["/dev/zero"]
    put(path, "config.json", config)
    for again in (lambda: open_run(path).corpus(), lambda: lf.resume(path)):
        with pytest.raises(RunError, match=rf"^the text of {path} is /dev/zero, which is not a file"):
            again()


def test_a_folder_that_is_removed_while_a_run_is_open(run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run"))
    opened = open_run(path)
    shutil.rmtree(path)
    for use_it in (opened.corpus, lambda: open_run(path), lambda: lf.resume(path)):
        with pytest.raises(RunError, match=str(path)):
            use_it()


def test_names_are_no_commands_to_the_terminal(run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "[" / "x] [bold]"))
    config = read(path, "config.json")
    config["corpus"]["name"] = "[/x] name"
    put(path, "config.json", config)
    code, out, err = said_by("compare", path, path, "--no-neural")
    assert (code, err, "[/x] name, test text" in out) == (0, "", True)
    assert "lstm 4 (x] [bold])" in out
    assert said_by("train", "--resume", path)[0] == 0
    config["format"] = "\x1b[2J"
    put(path, "config.json", config)
    assert "\x1b" not in said_by("evaluate", path)[2]
    config["format"], config["options"]["unit"] = 1, "\x1b]0;title\x07"
    put(path, "config.json", config)
    code, _, err = said_by("evaluate", path)
    assert (code, "\x1b" in err) == (2, False)
