"""Layers under torch.distributed.fsdp: two processes that share the parameters learn what one learns."""

import socket
import subprocess
import sys
from pathlib import Path

# What each process runs: a model wrapped and one that is not, on the same sequences, half of them to each process
PROGRAM = """
import sys
import warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
import loopfold as lf
from loopfold.engines.base import EngineWarning

rank, port = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


class Own(lf.Transition):  # a cell of one's own, with odd sizes
    def __init__(self, n_in, n):
        super().__init__()
        self.U, self.W = nn.Linear(n_in, n), nn.Linear(n, n, bias=False)

    def initial_state(self, batch):
        return self.W.weight.new_zeros(batch, self.W.out_features)

    def forward(self, h, x):
        return torch.tanh(self.U(x) + self.W(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = lf.Stacked([lf.LSTM(3, 5), Own(5, 7)])
        self.readout = nn.Linear(7, 2)

    def forward(self, x, lengths):
        run = self.layer(x, lengths=lengths)
        return self.readout(run.hidden).square().mean(0).sum(-1) + run.last_hidden.sum(-1)


def made():
    torch.manual_seed(0)
    return Net().double()


def trained(model, x, lengths, steps=4):
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model(x, lengths).mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach().clone())
    return torch.stack(losses)


torch.manual_seed(1)
x, lengths = torch.randn(9, 4, 3, dtype=torch.float64), torch.tensor([9, 1, 4, 7])
plain = made()
expected = trained(plain, x, lengths)

half = slice(2 * rank, 2 * rank + 2)


def sharded(how):
    model = made()
    if how == "flat":
        for i, layer in enumerate(model.layer.layers):
            model.layer.layers[i] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    for part in (*model.layer.layers, model):
        fully_shard(part, mesh=mesh)
    return torch.compile(model, backend="aot_eager") if how == "compiled" else model


mesh = init_device_mesh("cpu", (2,))
for how in ("fully_shard", "compiled", "flat"):
    # Where parameters are views of one flat tensor, a layer runs as a Python loop and says so; else it is compiled
    warnings.simplefilter("ignore" if how == "flat" else "error", EngineWarning)
    model = sharded(how)
    found = trained(model, x[:, half], lengths[half])
    dist.all_reduce(found)
    torch.testing.assert_close(found / 2, expected, rtol=1e-10, atol=1e-10)
    if how != "flat":
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-9, atol=1e-9)
    print("trained", how)
dist.destroy_process_group()
"""


def test_a_sharded_model_learns_what_one_learns(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    lines = [[sys.executable, "-W", "ignore", str(script), str(rank), port] for rank in range(2)]
    processes = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for line in lines]
    ends = [process.communicate(timeout=300) for process in processes]
    for process, (out, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err[-3000:]
        assert out.split("\n") == ["trained fully_shard", "trained compiled", "trained flat", ""]
