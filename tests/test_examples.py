"""The examples: each has what a page needs and uses public names alone; and small versions come out as claimed.

The others are in test_examples_6_to_10.py.
"""

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import loopfold as lf

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
pytestmark = pytest.mark.usefixtures("one_thread")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdicts(module: ModuleType, result: object) -> list[str]:
    return [verdict for _, verdict, _ in load("build").VERDICT.findall(module.found(result))]


def shown(module: ModuleType, result: object) -> None:
    """A table of several lines, verdicts, and a picture that can be written."""
    assert len(module.table(result).splitlines()) > 2
    assert verdicts(module, result)
    drawing = module.picture(result)
    assert isinstance(drawing, lf.Drawing)
    assert drawing.svg().startswith("<svg")


# ------------------------------------------------------------------ every script


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_has_what_a_page_needs(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    claim = ast.get_docstring(tree)
    assert claim is not None
    assert claim.splitlines()[0].endswith(".")
    assert claim.splitlines()[1] == ""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"experiment", "table", "found", "picture", "main"} <= functions
    assert (ROOT / "examples" / "pictures" / f"{script.stem}.svg").exists()
    assert f"(../examples/{script.name})" in (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_uses_public_names_alone(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in ("", "loopfold")
        elif isinstance(node, ast.Import):
            ours = [(alias.name, alias.asname) for alias in node.names if alias.name.split(".")[0] == "loopfold"]
            assert ours in ([], [("loopfold", "lf")])
        elif isinstance(node, ast.Attribute):
            dunder = node.attr.startswith("__") and node.attr.endswith("__")  # __name__ is public
            assert dunder or not node.attr.startswith("_"), f"line {node.lineno}"
            if isinstance(node.value, ast.Name) and node.value.id == "lf":
                assert node.attr in lf.__all__, f"line {node.lineno}"


def test_the_verdicts_on_the_page_are_those_of_its_sections() -> None:
    build, page = load("build"), (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert build.table(build.entries(page)) in page


# ------------------------------------------------------------------ what they find, at a small size


def test_folded_and_unfolded_are_the_same() -> None:
    module = load("01_unfolding")
    result = module.experiment(lengths=(1, 3, 200))
    assert result.system == 0
    assert all(value < 1e-12 and gradient < 1e-12 for value, gradient in result.engines.values())
    parameters, flat, nodes = zip(*result.sizes.values(), strict=True)
    assert len(set(parameters)) == 1
    assert flat[0] < flat[1] < flat[2]
    assert nodes == (3, 7, None)  # h(0), then x and h for each step
    assert verdicts(module, result) == ["holds", "holds"]
    assert verdicts(module, replace(result, system=0.1)) == ["does not hold here", "holds"]
    shown(module, result)


def test_a_shared_step_needs_fewer_examples_and_runs_on_longer_sequences() -> None:
    module = load("02_sharing")
    result = module.experiment(examples=(32, 512), seen=(4, 8), unseen=(30,), n=16, iterations=150, repeats=1)
    assert result.shared[1] > result.separate[1] + 0.05
    assert result.longer[30][1] > 0.9
    assert result.shared[1] > result.shared[0]
    assert verdicts(module, replace(result, separate=[0.6, 0.7], shared=[0.6, 0.8]))[0] == "does not hold here"
    assert verdicts(module, replace(result, separate=[0.6, 0.7], shared=[0.7, 0.8]))[0] == "holds"
    shown(module, result)


def test_longer_sequences_and_smaller_states_lose_more() -> None:
    module = load("03_summary")
    small = {"sizes": (2, 16), "lengths": (2, 6), "iterations": 100, "decoder": 32, "starts": 1}
    result = module.experiment(**small, longer=[(16, 2)], more=1)
    assert result.accuracy[2, 6] < result.accuracy[2, 2]
    assert result.accuracy[16, 6] < result.accuracy[16, 2]
    assert result.accuracy[2, 6] < result.accuracy[16, 6]
    assert min(result.accuracy.values()) > [0.25]  # something is kept
    assert result.longer[16, 2] == result.accuracy[16, 2]  # the same training gives the same result
    assert verdicts(module, result) == ["holds, long before its bits run out"]
    assert verdicts(module, replace(result, accuracy=result.accuracy | {(2, 6): [1.0]})) == ["does not hold here"]
    shown(module, result)


def test_outputs_carry_what_the_targets_say_alone() -> None:
    module = load("04_output_recurrence")
    result = module.experiment(delays=(1,), iterations=200, tau=200, rounds=3, starts=1)
    right = {name: share for name, ((share,),) in result.right.items()}
    assert right["hidden recurrence"] > 0.9
    assert right["output recurrence, state in the targets"] > 0.9
    assert right["output recurrence, teacher forcing"] < 0.4
    assert right["output recurrence, free running on ŷ"] < 0.4
    assert right["output recurrence, free running on o"] > 0.9
    slow, fast, *_ = result.milliseconds.values()
    assert slow > 4 * fast
    assert verdicts(module, result)[0] == "holds for the truth and ŷ; not where raw o goes back"
    every = [[1.0]]
    assert verdicts(module, replace(result, right=dict.fromkeys(right, every)))[0] == "does not hold here"
    reverse = dict(zip(result.milliseconds, (fast, slow, slow, fast), strict=True))
    assert verdicts(module, replace(result, milliseconds=reverse))[1] == "does not hold here"
    shown(module, result)


def test_teacher_forcing_goes_astray_when_it_runs_freely() -> None:
    module = load("05_teacher_forcing")
    result = module.experiment(noises=(0.0,), iterations=100, past=12, asked=10, written=10, starts=1)
    (own,), (true,) = result.free[0.0, "teacher forcing"], result.forced[0.0, "teacher forcing"]
    assert own[0] == pytest.approx(true[0])  # the first step reads nothing of either
    assert own[-1] > 3 * true[-1]
    for training in ("scheduled sampling", "free running"):
        assert result.free[0.0, training][0, -1] < own[-1]
    assert verdicts(module, result) == ["holds on clean inputs"]
    noisy = {(0.3, training): torch.ones(1, 10) for _, training in result.free}
    both = replace(result, free=result.free | noisy, forced=result.forced | noisy)
    assert verdicts(module, both) == ["holds on clean inputs, not with noise of 0.3"]
    assert verdicts(module, replace(both, free=noisy)) == ["does not hold here"]
    shown(module, result)
