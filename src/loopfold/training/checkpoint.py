"""A model, its optimiser and the carried state as named tensors, and back. What is stored may come from anyone."""

from pathlib import Path

import torch
from torch import Tensor, nn

from loopfold.language.base import Context, LanguageModel
from loopfold.states import leaves, rebuild
from loopfold.training.averaging import PolyakAverage
from loopfold.training.folder import RunFolder
from loopfold.training.making import make_model, outline
from loopfold.training.options import Options
from loopfold.training.stored import RunError


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """What a model has learned, by name."""
    return {name: t.detach().cpu().contiguous() for name, t in _named(model).items()}


def model_with(options: Options, vocabulary_size: int, stored: dict[str, Tensor], path: Path) -> LanguageModel:
    """The model that the options describe, with the weights that are stored at `path`."""
    numbers = sum(t.numel() for t in stored.values())
    units = options.hidden_size if isinstance(options.hidden_size, tuple) else (options.hidden_size,)
    sizes = (*units, len(units), options.layers, options.embedding_size or 1)
    fits = max(sizes) <= numbers  # a model has more numbers than units or layers
    if fits and (form := outline(options, vocabulary_size)) is not None:
        fits = _same_form(stored, form)
    if fits:
        model = make_model(options, vocabulary_size)
        fits = _same_form(stored, model)
    if not fits:
        raise RunError(f"{path} does not fit the model of config.json.")
    with torch.no_grad():
        for name, tensor in _named(model).items():
            tensor.copy_(stored[name])
    return model


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and buffers that are meant to be kept; those that are shared come once."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: t for name, t in model.named_buffers() if name in kept}


def forms_of(model: nn.Module) -> dict[str, tuple[torch.Size, bool]]:
    """The shapes of what a model has learned, by name."""
    return {name: _form(t) for name, t in _named(model).items()}


def _same_form(stored: dict[str, Tensor], model: nn.Module) -> bool:
    return {name: _form(t) for name, t in stored.items()} == forms_of(model)


def _form(t: Tensor) -> tuple[torch.Size, bool]:
    return t.shape, t.is_floating_point()


def state_of(
    model: nn.Module, optimiser: torch.optim.Optimizer, context: Context, average: PolyakAverage
) -> dict[str, Tensor]:
    """What training needs beside the weights, by name: the optimiser, and the state carried from window to window.

    Where weights are averaged, those that are stored are the mean; here are the sums, and the weights of the last step.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {
        f"optimiser/{names[parameter]}/{key}": value.detach().cpu().contiguous()
        for parameter, entries in optimiser.state.items()
        for key, value in entries.items()
        if value is not None
    }
    if average.count:
        last = {name: p.detach().cpu().contiguous().clone() for name, p in average.weights.items()}
        tensors |= {f"last/{name}": p for name, p in last.items()}
        tensors |= {f"sum/{name}": total.cpu() for name, total in average.sums.items()}
    # clones, since a state may hold one tensor twice, which safetensors does not store
    return tensors | {f"context/{i}": leaf.cpu().clone() for i, leaf in enumerate(leaves(context))}


def load_state(
    folder: RunFolder,
    model: LanguageModel,
    optimiser: torch.optim.Optimizer,
    cold: Context,
    average: PolyakAverage,
    averaged: int,
) -> Context:
    """Fill the optimiser and the average over `averaged` steps; the carried state, `cold` before the first step."""
    name = folder.checkpoint["state"]
    stored = folder.tensors(name)
    if not stored and not averaged:
        return cold
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    entries: dict[str, dict[str, Tensor]] = {}
    for key in stored:
        kind, _, rest = key.partition("/")
        if kind == "optimiser":
            parameter, _, entry = rest.rpartition("/")
            entries.setdefault(parameter, {})[entry] = stored[key]
    parts = {f"context/{i}": leaf for i, leaf in enumerate(leaves(cold))}
    known = all(name in parameters and _is_of(parameters[name], found, optimiser) for name, found in entries.items())
    own = {f"{kind}/{name}": p for kind in ("last", "sum") for name, p in parameters.items()} if averaged else {}
    carried = {key for key in stored if not key.startswith("optimiser/")} == {*parts, *own} and all(
        _carries(stored[key], leaf, model) for key, leaf in parts.items()
    )
    if not (known and carried and all(_form(stored[key]) == _form(p) for key, p in own.items())):
        raise RunError(f"{folder.path / name} does not fit the model of config.json.")
    numbers = {name: number for number, name in enumerate(parameters)}
    state = {numbers[name]: found for name, found in entries.items()}
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    if averaged:
        average.load(averaged, {name: stored[f"sum/{name}"] for name in parameters})
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(stored[f"last/{name}"])
    return rebuild(cold, (stored[key].to(leaf) for key, leaf in parts.items()))


def _is_of(parameter: Tensor, found: dict[str, Tensor], optimiser: torch.optim.Optimizer) -> bool:
    """Whether these are what the optimiser keeps of a parameter."""
    averages = {"exp_avg", "exp_avg_sq"} if isinstance(optimiser, torch.optim.AdamW) else {"momentum_buffer"}
    needed = {name: _form(parameter) for name in averages}
    if isinstance(optimiser, torch.optim.AdamW):
        needed["step"] = torch.Size(), True
    return {name: _form(t) for name, t in found.items()} == needed


def _carries(t: Tensor, leaf: Tensor, model: LanguageModel) -> bool:
    """Whether a tensor can be part of the carried state; whole numbers in it are tokens, |V| before the first."""
    if _form(t) != _form(leaf):
        return False
    return t.is_floating_point() or not t.numel() or (int(t.min()) >= 0 and int(t.max()) <= model.vocabulary_size)
