"""What holds for every test: a fixed seed, and no luck with uninitialised memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings

settings.register_profile("loopfold", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("loopfold")


@pytest.fixture(scope="session", autouse=True)
def _no_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test trusts is nothing to whoever runs it; processes that it starts inherit this."""
    with mock.patch.dict(os.environ, LOOPFOLD_CONFIG=str(tmp_path_factory.mktemp("config"))):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules whose tensors are tiny: a second thread only waits for the first, and for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a module, which makes it as `home`, as the one that commands are typed in."""
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile as in a new process, and nothing left of it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    torch.manual_seed(0)
    # In this mode torch.empty comes back full of NaN. On a GPU the mode refuses some operations, so not there.
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)
