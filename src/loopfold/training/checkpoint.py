"""A model, its optimiser and the carried state as named tensors, and back."""

import torch
from torch import Tensor, nn

from loopfold.language.base import Context
from loopfold.states import leaves, rebuild
from loopfold.training.folder import RunError, RunFolder


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """What a model has learned, by name."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())  # those that are shared come once
    return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}


def load_weights(model: nn.Module, folder: RunFolder, name: str) -> None:
    """Put the weights of the file `name` into the model."""
    stored = folder.tensors(name)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    if {k: v.shape for k, v in stored.items()} != {k: v.shape for k, v in own.items()}:
        raise RunError(f"{folder.path / name} does not fit the model of config.json.")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(stored[key])


def state_of(model: nn.Module, optimiser: torch.optim.Optimizer, context: Context) -> dict[str, Tensor]:
    """What training needs beside the weights, by name: the optimiser, and the state carried from window to window."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {
        f"optimiser/{names[parameter]}/{key}": value.detach().cpu().contiguous()
        for parameter, entries in optimiser.state.items()
        for key, value in entries.items()
        if value is not None
    }
    # clones, since a state may hold one tensor twice, which safetensors does not store
    return tensors | {f"context/{i}": leaf.cpu().clone() for i, leaf in enumerate(leaves(context))}


def load_state(folder: RunFolder, model: nn.Module, optimiser: torch.optim.Optimizer, cold: Context) -> Context:
    """Fill the optimiser; the carried state, which is `cold` before the first step."""
    stored = folder.tensors(folder.checkpoint["state"])
    if not stored:
        return cold
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    entries: dict[int, dict[str, Tensor]] = {}
    for key, tensor in stored.items():
        kind, _, rest = key.partition("/")
        if kind == "optimiser":
            name, _, entry = rest.rpartition("/")
            entries.setdefault(names.index(name), {})[entry] = tensor
    optimiser.load_state_dict({"state": entries, "param_groups": optimiser.state_dict()["param_groups"]})
    parts = (stored[f"context/{i}"].to(leaf.device) for i, leaf in enumerate(leaves(cold)))
    return rebuild(cold, parts)
