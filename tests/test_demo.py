"""The demo learns what it claims to learn, and leaves nothing behind."""

import pytest
import torch

from loopfold.demo import Recall, main


def test_it_learns_to_remember_and_carries_over_to_longer_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """M4, M19: trained on 30 steps only, its accuracy on 1000 beats what any model without memory can reach."""
    accuracy = main(iterations=200)
    assert accuracy > 0.8 > Recall().memoryless_accuracy + 0.3
    printed = capsys.readouterr().out
    for line in ("Blind guess", "Best without a memory", "iteration", "Before training: ", "After training: "):
        assert line in printed


def test_it_is_repeatable_and_leaves_the_global_generator_alone(capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    main(iterations=2, seed=3)
    first = capsys.readouterr().out
    main(iterations=2, seed=3)
    assert capsys.readouterr().out == first
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_model_without_memory_can_reach_is_what_its_best_guess_reaches() -> None:
    task = Recall()
    x, y = task.draw(2000, 200, torch.Generator().manual_seed(0))
    same = (x.argmax(-1) == y).double().mean()
    assert float(same) == pytest.approx(task.memoryless_accuracy, abs=0.01)
    assert task.memoryless_loss == pytest.approx(
        -float(same.log() * same + (1 - same) * ((1 - same) / 3).log()), abs=0.01
    )


def test_the_task_is_to_name_the_symbol_of_some_steps_ago() -> None:
    task = Recall(delay=3)
    x, y = task.draw(50, 4, torch.Generator().manual_seed(0))
    assert torch.equal(y[3:], x.argmax(-1)[:-3])
    repeats = (x.argmax(-1)[1:] == x.argmax(-1)[:-1]).double().mean()
    assert float(repeats) == pytest.approx(task.repeat, abs=0.1)
