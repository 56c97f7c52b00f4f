"""The commands under hostile input: what is typed wrong, what cannot be read or written, and what is nobody's text."""

import bz2
import gzip
import inspect
import json
import lzma
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers import everything, said_by, sign
from safetensors.torch import load, save
from test_hostile_runs import altered, places, put, read

import loopfold as lf
from loopfold import cli
from loopfold.errors import Mendable
from loopfold.memory import free_memory
from loopfold.training.folder import RunFolder
from loopfold.training.loop import Progress
from loopfold.training.run import check_device, open_run
from loopfold.transitions import CELLS

pytestmark = pytest.mark.usefixtures("one_thread")
RHYME = "the cat sat on the mat, and the rat ran at the cat.\n"
SIZES = "--hidden-size 4 --streams 3 --window 16 --epochs 0.3 --dropout 0 --split 80/10/10"
TINY = [*SIZES.split(), "--quiet"]
BYTES = os.fsdecode(b"caf\xe9")  # a name that is no UTF-8, as Python has it


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and a run on it, of an LSTM."""
    path = tmp_path_factory.mktemp("home")
    (path / "text.txt").write_text(RHYME * 16)
    torch.set_num_threads(1)
    assert said_by("train", path / "text.txt", "--out", path / "run", "--cell", "lstm", *TINY)[0] == 0
    return path


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a copy of both."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(home / "run", tmp_path / "run")
    shutil.copy(home / "text.txt", tmp_path)
    return tmp_path


def refused(message: str, *arguments: object) -> None:
    """Exit code 2 and one sentence; nothing is left behind."""
    before = everything(Path())
    code, out, err = said_by(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"loopfold: .+\n", err), err
    assert re.search(message, err), err
    assert everything(Path()) == before


def forked(*arguments: str, out: str = "out", limit: int | None = None) -> tuple[int, str, str]:
    """The command in a child of this process, which has imported all; with real files to print on, and small ones."""
    with open(out, "wb") as printed, open("err", "wb") as said:
        child = os.fork()
        if child == 0:
            code: Any = 99
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(said.fileno(), 2)
                sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8")
                sys.stderr = os.fdopen(2, "w", closefd=False, encoding="utf-8")
                sys.argv = ["loopfold", *arguments]
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                with suppress(BaseException):
                    try:
                        cli.main()
                    except SystemExit as end:
                        code = end.code
                    sys.stderr.flush()
                    sys.stdout.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, Path(out).read_text() if out == "out" else "", Path("err").read_text()


# ------------------------------------------------------------------ what is typed wrong

MISTYPED: dict[str, tuple[list[object], str]] = {
    "unknown command": (["trian", "text.txt"], r"there is no command 'trian'\. Did you mean 'train'\?"),
    "no command at all": (["frobnicate"], r"there is no command 'frobnicate'\. Type loopfold --help to see all"),
    "unknown flag": (
        ["train", "text.txt", "--hiden-size", 4],
        r"no option --hiden-size\. Did you mean .*--hidden-size",
    ),
    "unknown letter": (["generate", "run", "-z"], "loopfold generate has no option -z. Type loopfold generate --help"),
    "word for a number": (["train", "text.txt", "--epochs", "ten"], "--epochs needs a number; got 'ten'"),
    "comma for a point": (["generate", "run", "--temperature", "0,8"], r"got '0,8'\. Did you mean 0\.8\?"),
    "comma in a number": (["train", "text.txt", "--hidden-size", "1,000"], r"whole .*'1,000'\. Did you mean 1000\?"),
    "equals and a comma": (["train", "text.txt", "--hidden-size=1,000"], r"got '1,000'\. Did you mean 1000\?"),
    "power for a number": (["train", "text.txt", "--hidden-size", "1e3"], r"got '1e3'\. Did you mean 1000\?"),
    "half a unit": (["train", "text.txt", "--hidden-size", "8.5"], r"needs a whole number; got '8\.5'\.\n"),
    "too small": (["evaluate", "run", "--window", "0"], r"--window needs a number of at least 1; got '0'\.\n"),
    "seed too large": (["generate", "run", "--seed", 1 << 70], "--seed needs a number of at most 9223372036854775807"),
    "no value": (["train", "text.txt", "--epochs"], "--epochs needs a value after it"),
    "value of a switch": (["evaluate", "run", "--json=yes"], "--json takes no value: leave it out"),
    "no run": (["evaluate"], "RUN is missing. Type loopfold evaluate --help"),
    "prompt without flag": (["generate", "run", "ROMEO:"], "takes no more arguments, and got 'ROMEO:'; a flag may be"),
    "dashes in a split": (["train", "text.txt", "--split", "80-10-10"], "such as 90/5/5 or 90/10/0; got '80-10-10'"),
    "file for a run": (["evaluate", "text.txt"], "text.txt"),
    "run for a text": (["train", "run", *TINY], "run is the folder of a run and holds no text: name a file"),
    "run for another text": (["evaluate", "run", "run"], "run is the folder of a run and holds no text"),
    "no such device": (["evaluate", "run", "--device", "gpu"], r"'gpu' cannot be used: there is no such device\. Use"),
    "a device of another build": (
        ["evaluate", "run", "--device", "xla"],
        "'xla' cannot be used: this PyTorch was built without it. Use --device cpu",
    ),
    "too large a model": (
        ["train", "text.txt", "--hidden-size", 10**6],
        "with 6,000,.* parameters, .* needs at least 96,003.6 GB of memory, and .* are free: choose a smaller --hid",
    ),
    "too many layers": (["train", "text.txt", "--layers", 10**5], "--layers must be from 1 to 1000; got 100000"),
    "too many subwords": (
        ["train", "text.txt", "--unit", "subwords", "--vocabulary-size", 99999999999],
        "--vocabulary-size of 256 or more, .* and at most 16777216; got 99999999999",
    ),
    "too fast a fall": (["train", "text.txt", "--optimiser", "sgd", "--momentum", 1], "--momentum must be from 0 up"),
    "more than 64 bits": (
        ["evaluate", "run", "--window", 1 << 63],
        "--window needs a number that fits in 64 bits; got",
    ),
    "an infinite number": (
        ["train", "text.txt", "--save-every", "inf"],
        "--save-every needs a finite number; got 'inf'",
    ),
    "far too large a power": (["train", "text.txt", "--streams", "1e300"], r"needs a whole number; got '1e300'\.\n"),
    "too sharp a cache": (["evaluate", "run", "--cache", "--cache-sharpness", "1e38"], "a number of at most 1000000"),
    "too long an n-gram": (["evaluate", "run", "--mix-ngram", "--ngram-order", 2000], "--ngram-order .* at most 100;"),
    "too cold": (
        ["generate", "run", "--temperature", "1e-9"],
        r"--temperature must be a finite number of at least 1e-6; got 1e-09\. For the likeliest, type --greedy\.\n",
    ),
    "too many texts": (["generate", "run", "--samples", 10**9], "--samples needs a number of at most 100000"),
    "two valid texts": (
        ["train", "text.txt", "--valid", "text.txt", "--valid", "more.txt"],
        "--valid takes one text; got 2: put them into a folder, and name that",
    ),
    "too many layers to draw": (["draw", "lstm", "--layers", 300], "--layers needs a number of at most 100; got '300'"),
    "too many arrows": (
        ["draw", "lstm", "--layers", 50, "--steps", 100, "--columns", 100],
        "Stacked has 30,000 arrows, and 20,000 can be drawn: choose fewer --steps or --columns, or a smaller network",
    ),
    "too many steps to draw": (
        ["draw", "lstm", "--steps", 10**9],
        "has 6,000,000,000 arrows, and 10,000,000 can be drawn: choose fewer --steps, or a smaller network",
    ),
    "too many operations to draw": (
        ["draw", "lstm", "--layers", 60, "--operations"],
        "take [0-9,]+ places, and 5,000 can be laid out: leave out --operations, or draw a smaller network",
    ),
    "no possible size": (["train", "text.txt", "--hidden-size", 10**10], "--hidden-size must be from 1 to 1048576"),
}


@pytest.mark.parametrize("name", MISTYPED)
def test_what_is_typed_wrong_is_one_sentence(name: str, here: Path) -> None:
    refused(MISTYPED[name][1], *MISTYPED[name][0])


def test_no_number_that_is_none_is_let_through() -> None:
    """Every flag of every command that takes a number."""
    tried = 0
    for command in cli.app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        for parameter in inspect.signature(command.callback or print).parameters.values():
            kind = get_args(parameter.annotation)[0]
            if {int, float} & {kind, *get_args(kind)} and kind is not bool:
                tried += 1
                flag = cli.base.flag(parameter.name)
                whole = float not in {kind, *get_args(kind)}
                for value in ("nan", "inf", "-inf", "", "x", *([str(1 << 64)] if whole else [])):
                    code, out, err = said_by(name, "none", flag, value)
                    assert (code, out) == (2, "")
                    said = rf"loopfold: {flag} needs a .*; got {value!r}\.\n"
                    assert re.fullmatch(said, err), (name, flag, value, err)
    assert tried >= 50


NO_EFFECT: dict[str, tuple[str, str]] = {
    "seed of what draws nothing": (
        "generate run --greedy --seed 3",
        "--seed has no effect with --greedy, which draws nothing: leave it out",
    ),
    "seed of a beam": ("generate run --beam 2 --seed 3", "--seed has no effect with --beam"),
    "seed of no heat": ("generate run --temperature 0 --seed 3", "--seed has no effect with --temperature 0"),
    "top of no heat": ("generate run --temperature 0 --top-k 3", "choose one: .*; --temperature 0 is greedy"),
    "text of a cell": ("draw lstm --text text.txt", "--text has no effect here: only --gradients of a run reads its"),
    "text of a circuit": ("draw run --text text.txt", "--text has no effect here: only --gradients of a run reads its"),
    "trust in a cell": ("draw lstm --trust", "--trust goes with a run"),
    "columns of a circuit": ("draw lstm --columns 9", "--columns has no effect on a circuit, which has one: add --ste"),
    "a layer of a run": ("draw run --layers 1", "a run has a network of its own: leave out --pattern, --layers"),
    "few columns": ("draw lstm --steps 9 --columns 3", "--columns needs a number of at least 6; got '3'"),
    "streams of one stream": (
        "evaluate run --dynamic --streams 3",
        "--streams has no effect with --dynamic, which read",
    ),
    "another window": (
        "evaluate run --dynamic --window 3",
        "--window has no effect with --dynamic, .* --dynamic-window",
    ),
    "saved without a run": ("train text.txt --dry-run --save-every 3", "--save-every has no effect with --dry-run"),
    "events of nothing": ("train text.txt --dry-run --tensorboard", "--tensorboard has no effect with --dry-run"),
    "dropout of one layer": (
        "train text.txt --output-dropout 0.1 --dropout 0.2",
        "--dropout has no effect here: one layer has none between .* add --layers 2",
    ),
}


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_has_no_effect_is_refused(name: str, here: Path) -> None:
    typed, message = NO_EFFECT[name]
    refused(message, *typed.split())


def test_a_run_that_goes_on_is_told_what_has_no_effect(here: Path) -> None:
    flags = [*TINY, "--split", "90/0/10"]
    assert said_by("train", "text.txt", "--out", "new", *flags)[0] == 0
    said = "--evaluate-every has no effect here: there is no valid text to evaluate on"
    refused(said, "train", "--resume", "new", "--evaluate-every", 3)


def test_nothing_to_compare_on(here: Path) -> None:
    """The advice of other commands, to choose a part, would lead nowhere."""
    assert said_by("train", "text.txt", "--out", "new", *TINY, "--split", "100/0/0")[0] == 0
    said = r"new was trained on all of its text, and models .*: train one that has some, with --split or --test\.\n"
    for on in ([], ["--on", "test"], ["--on", "valid"]):
        refused(said, "compare", "new", "--no-neural", *on)


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden 999", r"gru 999 with [0-9,]+ parameters, .* choose a smaller --hidden-size\."),
        ("--hidden 600 --layers 3", r"gru 600 × 3 with .* choose a smaller --hidden-size or --layers\."),
        ("--embedding-size 9999", r"choose a smaller --hidden-size or --embedding-size\."),
        ("--unit words --hidden 999", r"choose a smaller --hidden-size or --vocabulary-size\."),
        ("--model window --span 9999", r"window 320 with .* choose a smaller --hidden-size or --span\."),
        ("--model convolution --span 999", r"choose a smaller --streams or --window or --span\."),
        (
            "--hidden 4 --streams 700",
            r"gru 4 with .* 749 tokens at a time, .* choose a smaller --streams or --window\.",
        ),
        ("--cell own.py:Own --hidden 999", r"Own 999 with .* choose a smaller --hidden-size\."),
        ("--hidden 500 --average tail", r"choose a smaller --hidden-size\."),
        ("--from run", r"lstm 4 with [0-9,]+ parameters"),
    ],
)
def test_what_does_not_fit_into_memory_is_refused_before_it_is_made(
    flags: str, message: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.py").write_text("import loopfold as lf\n\nclass Own(lf.LSTM):\n    pass\n")
    free = 1_000 if "from" in flags else 10_000 if "streams" in flags else 20_000_000
    monkeypatch.setattr("loopfold.memory.free_memory", lambda device: free)
    said = rf"to train {message}" if message[0] != "c" else message
    for dry in ([], ["--dry-run"]):
        refused(said, "train", "text.txt", *flags.split(), *dry)
    if "from" not in flags:
        monkeypatch.setattr("loopfold.memory.free_memory", lambda device: None)  # not every system tells
        small = [*TINY, *flags.split()[:2]] if "cell" in flags else TINY
        assert said_by("train", "text.txt", "--out", "new", *small)[0] == 0


def test_how_much_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_memory()
    assert free is None or 10**7 < free < 10**15
    limit = tmp_path / "limit"
    monkeypatch.setattr("loopfold.memory._LIMITS", (str(limit), str(tmp_path / "none")))
    limit.write_text("max\n")
    assert free_memory() != 12345
    if sys.platform == "linux":
        limit.write_text("12345\n")
        assert free_memory() == 12345


def test_the_command_alone_shows_its_help() -> None:
    code, out, err = said_by()
    assert (code, err) == (0, "")
    assert "train" in out


def test_a_misuse_of_typer_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not told as if the user had mistyped something."""
    import typer

    def fail(**_: object) -> None:
        raise typer.TyperException("no such parameter")

    monkeypatch.setattr(cli.base, "app", fail)
    with pytest.raises(typer.TyperException):
        cli.main()


# ------------------------------------------------------------------ texts


def test_compressed_texts_are_read_as_what_they_hold(here: Path) -> None:
    whole = (RHYME * 16).encode()
    Path("texts/deep").mkdir(parents=True)
    Path("texts/a.txt.gz").write_bytes(gzip.compress(whole))
    Path("texts/deep/b.TXT.BZ2").write_bytes(bz2.compress(whole))
    Path("texts/c.txt.xz").write_bytes(lzma.compress(whole))
    Path("texts/d.txt").write_bytes(whole)
    Path("texts/notes.gz").write_bytes(b"no text, and not named so")
    assert json.loads(said_by("evaluate", "run", "texts", "--json")[1])["bytes"] == 4 * len(whole)
    shutil.copy("texts/a.txt.gz", "text.gz")
    assert said_by("train", "text.gz", "--out", "new", *TINY)[0] == 0
    digest = open_run("run").config["corpus"]["sha256"]  # of the text, however it is packed
    assert open_run("new").config["corpus"]["sha256"] == digest == open_run("new").corpus().sha256
    assert said_by("train", "--resume", "new", "--quiet")[0] == 0


def test_texts_that_are_none(here: Path) -> None:
    packed = gzip.compress((RHYME * 16).encode())
    Path("cut.gz").write_bytes(packed[:-9])
    Path("altered.gz").write_bytes(packed[:30] + b"\xff\xff\xff" + packed[33:])
    Path("plain.bz2").write_text(RHYME * 16)
    Path("cut.bz2").write_bytes(bz2.compress(RHYME.encode())[:-9])
    Path("cut.xz").write_bytes(lzma.compress(RHYME.encode())[:-9])
    for name in ("cut.gz", "altered.gz", "plain.bz2", "cut.bz2", "cut.xz"):
        refused(rf"{name} cannot be decompressed \(.+\): it is damaged, or not", "train", name, "--out", "new", *TINY)
    Path("packed.txt").write_bytes(packed)
    refused("packed.txt is not text: it is compressed by gzip, which a name that ends in .gz", "train", "packed.txt")
    for name, raw, kind in [
        ("a.pdf", b"%PDF-1.7\n\xe2\xe3\xcf\xd3", "a PDF"),
        ("a.docx", b"PK\x03\x04\0\0\0\0", "a zip archive"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0", "a picture"),
    ]:
        Path(name).write_bytes(raw * 99)
        refused(f"{name} is not text: it is {kind}.* Name a text file in UTF-8", "evaluate", "run", name)


def test_a_text_may_begin_as_other_files_do(here: Path) -> None:
    Path("odd.txt").write_text("GIF89a, BZh and %PDF\n")
    assert said_by("evaluate", "run", "odd.txt")[0] == 0


def test_pipes_devices_and_sockets_among_the_texts(here: Path) -> None:
    """A pipe is read where that is enough; a run would have to read it again. None in a folder is waited for."""
    os.mkfifo("pipe.txt")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.txt")
        for name in ("pipe.txt", "socket.txt", "/dev/zero"):
            message = f"{name} is not a file, so the run could not read it again: save it to one, or pipe it in"
            for given in ([name], ["text.txt", "--valid", name]):
                before = sorted(os.listdir())
                code, _, err = said_by("train", *given, "--out", "new", "--quiet")
                assert (code, message in err, sorted(os.listdir())) == (2, True, before)
        for name in ("socket.txt", "/dev/zero"):
            code, _, err = said_by("evaluate", "run", name)
            assert (code, f"{name} is a device or a socket" in err) == (2, True)
        Path("folder").mkdir()
        os.rename("socket.txt", "folder/socket.txt")
        os.mkfifo("folder/pipe.txt")
        shutil.copy("text.txt", "folder")
        assert json.loads(said_by("evaluate", "run", "folder", "--json")[1])["bytes"] == 16 * len(RHYME)
    writer = threading.Thread(target=lambda: Path("pipe.txt").write_text(RHYME))
    writer.start()
    assert json.loads(said_by("evaluate", "run", "pipe.txt", "--json")[1])["bytes"] == len(RHYME)
    writer.join()


def test_a_folder_that_cannot_be_looked_into_is_not_half_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions are no hindrance to root, who may be running these tests."""
    Path("texts/dark").mkdir(parents=True)
    Path("texts/.hidden").mkdir()
    shutil.copy("text.txt", "texts")
    scan = os.scandir

    def forbidding(path: Any) -> Any:
        if "dark" in str(path) or ".hidden" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", forbidding)
        code, _, err = said_by("evaluate", "run", "texts")
        assert (code, "texts/dark cannot be read (Permission denied)" in err) == (2, True)
        Path("texts/dark").rmdir()
        assert said_by("evaluate", "run", "texts")[0] == 0


# ------------------------------------------------------------------ names that are not UTF-8


def test_names_that_are_not_utf8_are_read_where_they_can_be(here: Path) -> None:
    shutil.copytree("run", BYTES)
    shutil.copy("text.txt", f"{BYTES}.txt")
    for arguments in (
        ["evaluate", BYTES, f"{BYTES}.txt"],
        ["generate", BYTES, "--length", "3"],
        ["gradients", BYTES, "--steps", "3", "--out", BYTES + "2"],
        ["draw", "gru", "--out", f"{BYTES}.svg"],
    ):
        code, out, err = forked(*arguments)
        assert (code, err) == (0, ""), arguments
    assert r"caf\udce9.svg" in out
    assert Path(f"{BYTES}.svg").exists()


def test_names_that_are_not_utf8_are_refused_where_a_run_would_keep_them(here: Path) -> None:
    shutil.copy("text.txt", f"{BYTES}.txt")
    for given in ([f"{BYTES}.txt"], ["text.txt", "--valid", f"{BYTES}.txt"], ["text.txt", "--cell", f"{BYTES}.py:A"]):
        refused(r"caf\\udce9\.(txt|py:A)' is not UTF-8, and a run folder keeps it as text", "train", *given, *TINY)
    refused("no run folder caf.xe9", "evaluate", BYTES)  # as its bytes, not as Python's stand-in
    for arguments in (["train", "text.txt", "--unit", BYTES], ["evaluate", "run", "--on", BYTES], ["draw", BYTES]):
        refused("there is no (unit|part|cell)", *arguments)
    for arguments in ([BYTES], ["train", f"--{BYTES}"], ["train", "--epochs", BYTES], ["train", "--device", BYTES]):
        refused(r"caf", *arguments)


def test_a_passage_that_is_not_utf8(here: Path) -> None:
    refused(r"'the\\udce9' is not UTF-8: type it in UTF-8", "report", "run", "--passage", "on the\udce9 mat")


def test_a_folder_to_work_in_whose_name_is_not_utf8(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(BYTES).mkdir()
    monkeypatch.chdir(BYTES)
    shutil.copy("../text.txt", ".")
    refused("is not UTF-8, and a run folder keeps it as text: give the file, or the folder", "train", "text.txt", *TINY)
    assert said_by("draw", "gru")[0] == 0


# ------------------------------------------------------------------ what cannot be written

PRINTING = [
    ["evaluate", "run"],
    ["evaluate", "run", "--json"],
    ["generate", "run", "--length", "9"],
    ["compare", "run", "--no-neural"],
    ["gradients", "run", "--steps", "3", "--json"],
    ["draw", "gru"],
    ["train", "text.txt", "--out", "new", *TINY],
    ["--help"],
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_device_to_print_on(here: Path) -> None:
    """Every command in a child of this process, for speed; one as a process of its own, to its very end."""
    message = "loopfold: what the command prints cannot be written: No space left on device.\n"
    for arguments in PRINTING:
        assert forked(*arguments, out="/dev/full") == (2, "", message), arguments
    assert said_by("evaluate", "new")[0] == 0  # that run is whole
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "loopfold", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, message)


def test_a_disk_that_takes_no_more(here: Path) -> None:
    """In the middle of training, the run stays at its last checkpoint and goes on from there; results are not begun."""
    flags = ["--out", "new", *TINY, "--epochs", "40", "--hidden-size", "2"]
    code, _, err = forked("train", "text.txt", *flags, limit=6000)  # its log grows too large
    said = [line for line in err.splitlines() if "compiled" not in line]  # kernels may not be kept either
    why = "new cannot be written: File too large. Make it writable, or copy it to where you may write."
    assert (code, said) == (2, [f"loopfold: {why}"])
    assert not [*Path("new").glob("*.new")]
    before = RunFolder.open(Path("new")).checkpoint["step"]
    assert said_by("train", "--resume", "new", "--quiet")[0] == 0
    assert open_run("new").metrics[-1]["step"] > before > 0
    code, out, err = forked("draw", "gru", "--steps", "4", "--out", "a.svg", limit=6000)
    message = "loopfold: a.svg cannot be written: File too large. Choose another place with --out.\n"
    assert (code, out, err) == (2, "", message)
    assert not [*Path().glob("a.*")]


def forbidden(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "text.txt", "--out", "new", *TINY], r"new cannot be written: .+ Choose another place with --out\."),
        (["train", "--resume", "run"], r"run cannot be written: .+ Make it writable, or copy it"),
        (
            ["gradients", "run", "--steps", "3"],
            r"run/pictures.* cannot be written: Permission denied\. Choose .* --out",
        ),
        (["draw", "gru"], r"gru-circuit.svg cannot be written: Permission denied\. Choose another place with --out"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_folders_that_are_read_only(
    arguments: list[str], message: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = Path.open

    def opened(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return open_file(path, mode, *rest, **more) if "x" not in mode else forbidden()

    monkeypatch.setattr(Path, "mkdir", forbidden)
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(
        "loopfold.training.folder.open_plain", lambda path, mode: forbidden() if "+" in mode else open_file(path, mode)
    )
    refused(message, *arguments)


# ------------------------------------------------------------------ runs that someone else made

JSON: list[Any] = [None, True, -7, 10**400, 0.5, "x", [], {}, [[]], {"x": 1}]


@pytest.mark.parametrize("name", ["config.json", "checkpoint.json", "vocabulary.json", "metrics.jsonl"])
def test_every_value_of_every_file_in_every_form(name: str, here: Path) -> None:
    """To open it works, or one error says what is wrong; checksums are right, as whoever makes such a run has them."""
    run = Path("run")
    before = {path: path.read_bytes() for path in (run / name, run / "checkpoint.json")}
    good = read(run, name)
    refusals: list[str] = []
    for place in places(good):
        for value in [*JSON, {**good, "more": 1} if isinstance(good, dict) and not place else "more"]:
            try:
                put(run, name, altered(good, place, value))
                opened = open_run(run)
                assert opened.metrics is not None
                Progress.of(RunFolder(run))
            except Mendable as error:
                refusals.append(str(error))
            except Exception as error:
                error.add_note(f"{name} at {place}: {value!r:.50}")
                raise
            for path, content in before.items():
                path.write_bytes(content)
    assert len(refusals) > 20
    assert not any("\n" in refusal for refusal in refusals)


@pytest.mark.parametrize("raw", ["[]", "5", "null", '{"format": [1]}', "[" * 100_000], ids=range(5))
@pytest.mark.parametrize("name", ["config.json", "checkpoint.json", "vocabulary.json"])
def test_json_of_another_form(name: str, raw: str, here: Path) -> None:
    if name == "checkpoint.json":
        Path("run", name).write_text(raw)
    else:
        sign(Path("run"), name, raw.encode())
    for command in (["evaluate", "run"], ["train", "--resume", "run"]):
        refused(rf"run/{name} is damaged|run has format", *command)


def test_a_text_of_no_possible_name(here: Path) -> None:
    config = json.loads(Path("run/config.json").read_text())
    config["options"]["sources"] = ["a\0b"]
    sign(Path("run"), "config.json", json.dumps(config).encode())
    refused("not the name of a file|not there", "evaluate", "run")


def header(described: Any, data: bytes = b"") -> bytes:
    raw = described if isinstance(described, bytes) else json.dumps(described).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def tensor(kind: str = "F32", shape: tuple[int, ...] = (1,), begin: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


HEADERS = [
    (1 << 60).to_bytes(8, "little") + b"{}",
    header(b"[]"),
    header(b"{" * 100_000),
    header({"a": 5}),
    header({"a": tensor("F99")}, bytes(4)),
    header({"a": tensor(shape=(-1,))}, bytes(4)),
    header({"a": tensor(shape=(2,))}, bytes(4)),
    header({"a": tensor(shape=(1 << 62,), end=1 << 64)}, bytes(4)),
    header({"a": tensor(), "b": tensor(begin=2, end=6)}, bytes(6)),
    header({"a": tensor("F8_E4M3", (4,))}, bytes(4)),
    header({"a": tensor()}, bytes(4)),
]


@pytest.mark.parametrize("raw", HEADERS, ids=range(len(HEADERS)))
def test_headers_of_tensors(raw: bytes, here: Path) -> None:
    name = RunFolder(Path("run")).checkpoint["best"]
    sign(Path("run"), name, raw)
    refused(f"run/{name} (is damaged: it does not hold tensors|does not fit the model)", "evaluate", "run")


def test_weights_that_are_no_numbers(here: Path) -> None:
    """What shows a run shows this one too."""
    name = RunFolder(Path("run")).checkpoint["best"]
    tensors = {key: t * float("nan") for key, t in load(Path("run", name).read_bytes()).items()}
    sign(Path("run"), name, save(tensors))
    for command in (["gradients", "run", "--steps", "3"], ["compare", "run", "--no-neural"], ["draw", "run"]):
        code, out, err = said_by(*command)
        assert (code, "Traceback" in err, out != "") == (0, False, True), err


# ------------------------------------------------------------------ devices


def test_the_device_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: zeros(*sizes))  # as if a GPU were there
    assert check_device("auto") == "cuda"


def test_auto_is_a_device_for_every_command(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps the word, so that it goes on wherever it is resumed."""
    monkeypatch.setattr("loopfold.report.page.write_report", lambda run, *_, **__: run.path)  # it takes seconds
    assert said_by("train", "text.txt", "--out", "new", "--device", "auto", *TINY)[0] == 0
    assert open_run("new", "auto").options.device == "auto"
    assert said_by("train", "--resume", "new", "--quiet")[0] == 0
    commands = [command.name or getattr(command.callback, "__name__", "") for command in cli.app.registered_commands]
    more = {"compare": ["--no-neural"], "generate": ["--length", "3"]}
    found = 0
    for name in commands:
        if name != "train" and "--device" in said_by(name, "--help")[1]:
            code, _, err = said_by(name, "new", "--device", "auto", *more.get(name, []))
            assert (code, err) == (0, ""), name
            found += 1
    assert found >= 4


# ------------------------------------------------------------------ completion and help


def offered(*words: str, shell: str = "bash") -> list[str]:
    """What the shell is told when TAB is typed after these words."""
    typed = " ".join(["loopfold", *words])
    variables = {
        "_LOOPFOLD_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        code, out, err = said_by()
    assert (code, err) == (0, "")
    return re.findall(r"[\w-]+", out) if shell == "zsh" else out.split()


def test_the_shell_completes_commands_flags_and_names() -> None:
    assert offered("tr") == ["train"]
    assert offered("train", "--pres") == ["--preset"]
    assert offered("train", "--preset", "") == ["quick", "standard", "words", "words-large"]
    assert offered("train", "--cell", "") == [*CELLS]
    assert offered("train", "--unit", "w") == ["words"]
    assert offered("train", "--optimiser", "", shell="fish") == ["adamw", "sgd"]
    assert {"constant", "linear", "cosine"} <= {*offered("train", "--schedule", "", shell="zsh")}
    assert offered("generate", "run", "--device", "c") == ["cpu", "cuda"]
    assert offered("evaluate", "run", "--on", "") == ["test", "valid", "train"]
    assert offered("draw", "gru", "--pattern", "auto") == ["autoencoder"]
    assert offered("evaluate", "r") == []  # files, which the shell knows


def test_completion_and_the_answer_to_a_typo_are_fast() -> None:
    """Neither loads PyTorch."""
    code = "import sys, loopfold.cli\ntry: loopfold.cli.main()\nfinally: print('torch' in sys.modules)"
    variables = {"_LOOPFOLD_COMPLETE": "complete_bash", "COMP_WORDS": "loopfold train --cell l", "COMP_CWORD": "3"}
    for more, words, needed in [(variables, [], "lstm layernorm-lstm False"), ({}, ["trian"], "False")]:
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=os.environ | more
        )
        assert done.stdout.split() == needed.split()


def test_libraries_are_set_up_before_they_are_loaded_unless_the_user_has_done_so() -> None:
    names = ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE")
    code = f"import os, loopfold.cli\ntry: loopfold.cli.main()\nfinally: print(*[os.environ.get(n) for n in {names}])"
    plain = {name: value for name, value in os.environ.items() if name not in (*names, "OMP_WAIT_POLICY")}
    for given, needed in [
        ({}, "4000 1"),
        ({"GOMP_SPINCOUNT": "7", "THP_MEM_ALLOC_ENABLE": "0"}, "7 0"),
        ({"OMP_WAIT_POLICY": "active"}, "None 1"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", code, "trian"], capture_output=True, text=True, check=False, env=plain | given
        )
        assert done.stdout.split() == needed.split()


def test_completion_can_be_installed() -> None:
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("_LOOPFOLD_COMPLETE", f"source_{shell}")
            assert "loopfold" in said_by()[1]
    code, out, _ = said_by("--help")
    assert "--install-completion" in out
    assert "--show-completion" in out


def test_every_flag_says_what_leaving_it_out_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for command in ("evaluate", "compare", "generate", "draw", "gradients", "report"):
        shown = said_by(command, "--help")[1]
        flags = re.split(r"\n│ +(?=--)", shown.partition("─ Options")[2].partition("╰")[0])[1:]
        assert len(flags) > 3
        for flag in flags:
            value = re.match(
                r"(--\S+|-\w|\s)+(<|[A-Z]{2,}\s)", flag
            )  # a switch has none, and is off unless it is typed
            assert not value or "default" in flag, flag


# ------------------------------------------------------------------ advice that can be followed


def test_the_advice_on_gradients_names_flags_that_exist(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    known = {*re.findall(r"--[a-z-]+", said_by("train", "--help")[1])}
    for gated in (False, True):
        for scale in (0.0, 0.1, 10.0, float("nan")):
            norms = torch.full((40, 40), scale).pow(torch.arange(40) - torch.arange(40)[:, None]).tril()
            flow = lf.GradientFlow(1 / norms if scale else norms * 0, gated=gated)
            typed = cli.base.spelt(flow.said)
            assert {*re.findall(r"--[a-z-]+", typed)} <= known
            assert not re.search(r"lf\.|torch|loss_fn|_", typed), typed
            assert "--" not in flow.verdict  # and those who write Python are told of objects
    said = cli.base.spelt(lf.GradientFlow(torch.eye(40) + 1e-9, gated=True).said)
    assert "(--cell lstm --forget-bias 1.0), or start W orthogonal (--recurrent-init orthogonal)" in said


def test_the_start_of_a_network_is_an_option(here: Path) -> None:
    flags = ["--cell", "lstm", "--forget-bias", "2.5", "--recurrent-init", "orthogonal", "--learning-rate", "1e-12"]
    assert said_by("train", "text.txt", "--out", "new", *TINY, *flags)[0] == 0
    run = open_run("new")
    assert (run.options.recurrent_init, run.options.forget_bias) == ("orthogonal", 2.5)
    cell = next(part for part in run.model.modules() if isinstance(part, lf.LSTM))
    torch.testing.assert_close(cell.b[4:8], torch.full((4,), 2.5))
    for W in cell.W.split(4):
        torch.testing.assert_close(W @ W.T, torch.eye(4), atol=1e-5, rtol=0)
    assert "(It began with --recurrent-init orthogonal --forget-bias 2.5.)" in said_by("gradients", "new")[1]
    rows = json.loads(said_by("compare", "new", "--json", "--quiet")[1])["rows"]  # whose baselines have no cells
    assert [row["name"] for row in rows][-3:] == ["window", "convolution", "lstm 4"]
    assert said_by("train", "text.txt", "--out", "i", *TINY, *flags[-2:], "--recurrent-init", "identity")[0] == 0
    gru = next(part for part in open_run("i").model.modules() if isinstance(part, lf.GRU))
    torch.testing.assert_close(gru.W, torch.eye(4).repeat(3, 1), atol=1e-5, rtol=0)


def test_a_start_that_the_cell_does_not_have_is_refused(here: Path) -> None:
    Path("own.py").write_text(
        "import loopfold as lf\n"
        "class Own(lf.LSTM):\n"
        "    def __init__(self, n_in, n, forget_bias=0.0):\n"
        "        super().__init__(n_in, n, forget_bias=forget_bias)\n"
    )
    new = ["train", "text.txt", "--out", "new", *TINY]
    refused(
        r"gru does not take --forget-bias, only lstm and layernorm-lstm do: leave it out\.",
        *new,
        "--forget-bias",
        1,
    )
    refused(r"Own does not take --recurrent-init", *new, "--cell", "own.py:Own", "--recurrent-init", "orthogonal")
    refused("--forget-bias has no effect here: only a recur", *new, "--model", "window", "--forget-bias", 1)
    refused("--output-dropout has no effect here: a window", *new, "--model", "window", "--output-dropout", 0.3)
    refused("no recurrent_init 'ortho'; choose from uniform", *new, "--recurrent-init", "ortho")
    refused("--forget-bias must be from -1e6 to 1e6", *new, "--cell", "lstm", "--forget-bias", "1e7")
    assert said_by(*new, "--cell", "own.py:Own", "--forget-bias", 3)[0] == 0
    cell = next(part for part in open_run("new").model.modules() if isinstance(part, lf.LSTM))
    assert float(cell.b[4:8].detach().min()) > 2.5
