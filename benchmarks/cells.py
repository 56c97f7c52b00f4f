"""Cells from the literature, as users write them: Loopfold against their own Python loop and JAX's scan.

    python benchmarks/cells.py                      the whole table
    python benchmarks/cells.py --only "linear"      the rows whose name begins so

Every ratio is of medians from one run, in which the contenders take turns. A turn is one forward and one backward pass
with a given gradient of every output, in float32 on the CPU, for the gradients of all parameters and of a context. JAX
runs the same mathematics under `jit`, with random numbers drawn for all steps at once.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loopfold as lf
from loopfold.attention import Attention


def _matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


# ------------------------------------------------------------------ in torch


class LinearAttention(nn.Module):
    """S + v kᵀ, read by S q, with heads (Katharopoulos et al., 2020)."""

    def __init__(self, n: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d, self.P = heads, n // heads, _matrix(3 * n, n)

    def initial_state(self, batch: int) -> Tensor:
        return self.P.new_zeros(batch, self.heads, self.d, self.d)

    def forward(self, S: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x @ self.P.T).view(-1, 3, self.heads, self.d).unbind(1)
        S = S + v.unsqueeze(-1) * (F.elu(k) + 1).unsqueeze(-2)
        return (S @ q.unsqueeze(-1)).flatten(1), S


class DeltaNet(LinearAttention):
    """What the key finds is replaced by v (Schlag et al., 2021)."""

    def __init__(self, n: int, heads: int) -> None:
        super().__init__(n, heads)
        self.beta = _matrix(heads, n)

    def forward(self, S: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x @ self.P.T).view(-1, 3, self.heads, self.d).unbind(1)
        k, beta = F.normalize(k, dim=-1), torch.sigmoid(x @ self.beta.T).unsqueeze(-1)
        found = torch.einsum("bhij,bhj->bhi", S, k)
        S = S + torch.einsum("bhi,bhj->bhij", beta * (v - found), k)
        return torch.einsum("bhij,bhj->bhi", S, q).flatten(1), S


class SLSTM(nn.Module):
    """xLSTM's cell with a scalar memory, W in blocks for the heads (Beck et al., 2024)."""

    def __init__(self, n: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d, self.U = heads, n // heads, _matrix(4 * n, n)
        self.W, self.b = _matrix(heads, 4 * n // heads, n // heads), nn.Parameter(torch.zeros(4 * n))

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        zeros = self.b.new_zeros(batch, self.heads, self.d)
        return zeros, zeros, zeros + 1, zeros

    def forward(self, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        h, c, n, m = state
        a = (x @ self.U.T + self.b).view(-1, self.heads, 4 * self.d) + torch.einsum("bhi,hji->bhj", h, self.W)
        z, i, f, o = a.chunk(4, -1)
        f = F.logsigmoid(f) + m
        new = torch.maximum(f, i)
        i, f = torch.exp(i - new), torch.exp(f - new)
        c, n = f * c + i * torch.tanh(z), f * n + i
        return torch.sigmoid(o) * c / n, c, n, new


class Noisy(nn.Module):
    """A continuous-time network with noise in its state."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.W, self.U, self.b = _matrix(n, n), _matrix(n, n), nn.Parameter(torch.zeros(n))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        dh = -h + torch.tanh(h @ self.W.T + x @ self.U.T + self.b)
        return h + 0.1 * dh + 0.05 * torch.randn_like(h)


class Zoneout(nn.Module):
    """A GRU whose units keep their state by chance, in training (Krueger et al., 2017)."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(n, n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.where(torch.rand_like(h) < 0.1, h, self.cell(x, h))


# ------------------------------------------------------------------ in JAX: (p, state, x, context) -> (state, output)


def _heads(p: Any, x: Any, heads: int) -> Any:
    return jnp.moveaxis((x @ p["P"].T).reshape(len(x), 3, heads, -1), 1, 0)


def jax_linear_attention(p: Any, S: Any, x: Any, _: Any) -> Any:
    q, k, v = _heads(p, x, S.shape[1])
    S = S + v[..., None] * (jax.nn.elu(k) + 1)[..., None, :]
    return S, jnp.einsum("bhij,bhj->bhi", S, q).reshape(len(x), -1)


def jax_deltanet(p: Any, S: Any, x: Any, _: Any) -> Any:
    q, k, v = _heads(p, x, S.shape[1])
    k = k / jnp.maximum(jnp.sqrt((k * k).sum(-1, keepdims=True)), 1e-12)
    beta = jax.nn.sigmoid(x @ p["beta"].T)[..., None]
    S = S + jnp.einsum("bhi,bhj->bhij", beta * (v - jnp.einsum("bhij,bhj->bhi", S, k)), k)
    return S, jnp.einsum("bhij,bhj->bhi", S, q).reshape(len(x), -1)


def jax_attention(p: Any, s: Any, x: Any, context: Any) -> Any:
    keys = context @ p["K"].T
    e = jnp.tanh((s @ p["Q"].T)[:, None] + keys) @ p["v"]
    c = jnp.einsum("bp,bpn->bn", jax.nn.softmax(e, -1), context)
    a = jnp.concatenate([x, c], -1) @ p["cell.U"].T + p["cell.b"]
    r, z, n = jnp.split(a, 3, -1)
    hr, hz, hn = jnp.split(s @ p["cell.W"].T, 3, -1)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    s = (1 - z) * jnp.tanh(n + r * (hn + p["cell.b_hn"])) + z * s
    return s, s


def jax_slstm(p: Any, state: Any, x: Any, _: Any) -> Any:
    h, c, n, m = state
    a = (x @ p["U"].T + p["b"]).reshape(*h.shape[:2], -1) + jnp.einsum("bhi,hji->bhj", h, p["W"])
    z, i, f, o = jnp.split(a, 4, -1)
    f = jax.nn.log_sigmoid(f) + m
    new = jnp.maximum(f, i)
    i, f = jnp.exp(i - new), jnp.exp(f - new)
    c, n = f * c + i * jnp.tanh(z), f * n + i
    h = jax.nn.sigmoid(o) * c / n
    return (h, c, n, new), h


def jax_noisy(p: Any, h: Any, x: Any, _: Any) -> Any:
    x, noise = x
    h = h + 0.1 * (-h + jnp.tanh(h @ p["W"].T + x @ p["U"].T + p["b"])) + 0.05 * noise
    return h, h


def jax_zoneout(p: Any, h: Any, x: Any, _: Any) -> Any:
    x, chance = x
    r, z, n = jnp.split(x @ p["cell.weight_ih"].T + p["cell.bias_ih"], 3, -1)
    hr, hz, hn = jnp.split(h @ p["cell.weight_hh"].T + p["cell.bias_hh"], 3, -1)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    h = jnp.where(chance < 0.1, h, (1 - z) * jnp.tanh(n + r * hn) + z * h)
    return h, h


# ------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Row:
    name: str
    make: Callable[[], nn.Module]
    step: Callable[..., Any]  # in JAX
    batch: int
    n: int
    tau: int
    over_loop: float  # the targets: how many times faster
    draw: Any = None  # JAX's random numbers, for all steps
    places: int = 0
    over_jax: float = 1.5


ROWS = [
    Row("linear attention", lambda: LinearAttention(128, 4), jax_linear_attention, 4, 128, 500, 20),
    Row("DeltaNet", lambda: DeltaNet(128, 4), jax_deltanet, 4, 128, 500, 20),
    Row("attention decoder", lambda: Attention(lf.GRU(256, 128), 128, 128), jax_attention, 16, 128, 50, 5, places=50),
    Row("sLSTM", lambda: SLSTM(128, 4), jax_slstm, 1, 128, 1000, 30),
    Row("noisy network", lambda: Noisy(64), jax_noisy, 16, 64, 500, 15, jax.random.normal),
    Row("GRU with zoneout", lambda: Zoneout(128), jax_zoneout, 16, 128, 200, 8, jax.random.uniform),
]


def _ours(cell: Any, x: Tensor, g: Tensor, memory: Tensor | None, engine: lf.Engine) -> Callable[[], Tensor]:
    def turn() -> Tensor:
        cell.zero_grad()
        context = None if memory is None else cell.source(memory, None)
        hidden = lf.unfold(cell, x, context=context, engine=engine).hidden
        hidden.backward(g.view_as(hidden))
        return hidden.detach()

    return turn


def _in_jax(row: Row, cell: nn.Module, x: Tensor, g: Tensor, memory: Tensor | None) -> Callable[[], Any]:
    parameters = {k: jnp.asarray(p.detach().numpy()) for k, p in cell.named_parameters()}
    state = lf.transitions.initial_state(cell, row.batch, x[0])
    state = tuple(map(jnp.asarray, state)) if isinstance(state, tuple) else jnp.asarray(state.numpy())
    xs, gs = jnp.asarray(x.numpy()), jnp.asarray(g.numpy())
    given = 0.0 if memory is None else jnp.asarray(memory.detach().transpose(0, 1).numpy())

    def run(p: Any, given: Any, key: Any) -> Any:
        over = xs if row.draw is None else (xs, row.draw(key, (row.tau, row.batch, row.n)))
        hidden = jax.lax.scan(lambda s, x: row.step(p, s, x, given), state, over)[1]
        return (hidden.reshape(gs.shape) * gs).sum(), hidden

    both = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))

    def turn() -> Any:
        (_, hidden), gradient = both(parameters, given, jax.random.key(0))
        jax.block_until_ready(gradient)
        return hidden

    return turn


def measure(row: Row, rounds: int) -> None:
    torch.manual_seed(0)
    cell, x, g = row.make(), torch.randn(row.tau, row.batch, row.n), torch.randn(row.tau, row.batch, row.n)
    memory = torch.randn(row.places, row.batch, row.n, requires_grad=True) if row.places else None
    turns = {
        "Loopfold": _ours(cell, x, g, memory, lf.Auto()),
        "loop": _ours(cell, x, g, memory, lf.Sequential()),
        "JAX": _in_jax(row, cell, x, g, memory),
    }
    results = {name: turn() for name, turn in turns.items()}
    if row.draw is None:
        theirs = torch.tensor(jax.device_get(results["JAX"])).reshape(row.tau, row.batch, -1)
        torch.testing.assert_close(results["Loopfold"].flatten(2), theirs, rtol=1e-3, atol=1e-3)
    for name in ("Loopfold", "JAX"):
        for _ in range(5):  # past compilation, and the checks of first runs
            turns[name]()
    times: dict[str, list[float]] = {name: [] for name in turns}
    for i in range(rounds):
        for name, turn in turns.items():
            if name == "loop" and i > 2:
                continue
            begin = time.perf_counter()
            turn()
            times[name].append(time.perf_counter() - begin)
    ms = {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}
    loop, scan = ms["loop"] / ms["Loopfold"], ms["JAX"] / ms["Loopfold"]
    print(
        f"{row.name:18} {row.batch:3} {row.n:4} {row.tau:5}  {ms['Loopfold']:8.2f} {ms['loop']:8.1f} {ms['JAX']:8.2f}  "
        f"{loop:6.1f} (≥ {row.over_loop:g})  {scan:5.2f} (≥ {row.over_jax:g})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name begins so")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print("cell             batch    n     τ   Loopfold  Python      JAX   × the loop      × JAX      (ms)")
    for row in ROWS:
        if row.name.startswith(options.only):
            measure(row, options.rounds)


if __name__ == "__main__":
    main()
