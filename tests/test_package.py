"""The package as a whole: its public names, the order of its modules, and what it needs to be imported."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import loopfold as lf

ROOT = Path(lf.__file__).parent
MAP = re.findall(r"^    (\w+) {2,}\S", lf.__doc__ or "", re.MULTILINE)

PUBLIC = """
    Transition Embedded Elman LSTM LSTMState LayerNormLSTM GRU MGU Uniform Orthogonal ScaledIdentity
    step_graph StepGraph Engine EngineWarning Recurrence Sequential Looped FusedCPU FusedGPU Auto
    Checkpointed TimeParallel
    unfold Unfolding Stepper
    Recurrent Stacked Bidirectional VariationalDropout WeightDrop EmbeddingDropout from_torch to_torch
    Outputs Classes Reals Pick Feeding TeacherForcing FreeRunning ScheduledSampling Coin Ramp
    GeneralisedTeacherForcing Soft Raw Greedy Sample
    Pattern Wiring When Readout
    Prediction SequenceToSequence SequenceToOne OutputRecurrence VectorToSequence EncoderDecoder Autoencoder
    AttentionDecoder
    draw draw_attention Drawing Level beside style
    bptt BPTT per_step_gradients StepGradients gradient_flow GradientFlow truncated_bptt eigenvalues Eigenvalues
    Corpus CorpusError read_corpus Tokens Vocabulary Characters Bytes Words Subwords
    LanguageModel Context Scored Next Processes RecurrentLM NGramLM WindowLM ConvolutionLM count_parameters
    Way DynamicEvaluation NeuralCache Mixture gradient_rms mixed_losses mixture_weights
    Ledger perplexity token_losses Options OptionError preset Run RunError train resume open_run pack_run Watcher
    Terminal Stopped Diverged PolyakAverage
    fit Fit
    export
    Beam generate hidden_states HiddenStates Tracked Row compare write_report
"""


def test_the_public_names() -> None:
    assert sorted(lf.__all__) == sorted(PUBLIC.split())
    assert all(hasattr(lf, name) for name in lf.__all__)
    assert all(getattr(lf, name).__doc__ for name in lf.__all__)


def test_the_version_is_the_one_installed() -> None:
    assert lf.__version__ == version("loopfold")


def modules() -> dict[str, Path]:
    """Every module of the package by its name; a package goes by its `__init__`."""
    names = {path: ".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(name: str, path: Path) -> Iterator[str]:
    """The modules of this package that a module imports, at its top or inside a function."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (up, node.module) if part)
            found = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names]
        else:
            continue
        yield from (module for module in found if module.split(".")[0] == "loopfold")


def test_every_module_is_on_the_map() -> None:
    """The docstring of the package names each module and subpackage, and no other."""
    assert set(MAP) == {name.split(".")[1] for name in modules() if "." in name}
    assert len(MAP) == len(set(MAP))


def test_a_module_imports_only_from_those_above_it() -> None:
    """Or from its own subpackage, or from the public names: that nothing comes round to itself is tested below."""
    place = {f"loopfold.{name}": i for i, name in enumerate(MAP)}

    def place_of(module: str) -> int:
        return place.get(".".join(module.split(".")[:2]), -1)

    below = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imports(name, path)
        if name != "loopfold" and place_of(other) > place_of(name) >= 0
    ]
    assert not below


def test_no_import_comes_round_to_itself() -> None:
    """Also within a subpackage, and through the public names."""
    graph = {name: set(imports(name, path)) - {name} for name, path in modules().items()}
    assert set(TopologicalSorter(graph).static_order()) == set(graph)


BLOCKED = [
    "numba",
    "llvmlite",
    "triton",
    "typer",
    "rich",
    "matplotlib",
    "plotly",
    "safetensors",
    "tokenizers",
]
IMPORT = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import torch
with_torch = set(sys.modules)
import loopfold as lf
new = {{name.split(".")[0] for name in set(sys.modules) - with_torch}}
print(*sorted(new - set(sys.stdlib_module_names) - {{"torch", "loopfold"}}))
print(lf.unfold(lf.LSTM(3, 5), torch.ones(7, 2, 3)).hidden.shape)
"""


def test_importing_it_needs_torch_alone() -> None:
    """Where nothing else is installed it imports and runs, and where more is installed it does not load it."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", "torch.Size([7, 2, 5])"]
