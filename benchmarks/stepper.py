"""One step at a time, called from Python: `lf.Stepper`, torch's cell under inference_mode, and an ONNX Runtime session.

    python benchmarks/stepper.py

One stream, float32, numpy arrays in and out (tensors for torch), one thread. All have the same weights, and what they
give is compared first. Each takes blocks of calls in turn; a call is timed by itself. "median" and "99.9 %" are of all
calls, in µs, the checks that a stepper makes of itself included; "times" is the ratio of medians to the stepper's.
Without onnxruntime and onnx (`pip install onnxruntime onnx`) its rows are left out.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import loopfold as lf

ROWS = [("LSTM", 40), ("GRU", 128), ("LSTM", 256)]
BLOCK, BLOCKS = 500, 60
Call = Callable[[], Any]


def torch_cell(cell: Any, x: torch.Tensor) -> Call:
    """`nn.LSTMCell` or `nn.GRUCell`, from the state of the call before."""
    state: list[Any] = [None]

    def call() -> Any:
        with_state = state[0] = cell(x, state[0])
        return with_state

    return call


def onnx_session(cell: Any, x: np.ndarray) -> Call | None:
    """The same cell as ONNX's operator in a session of one thread."""
    try:
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        return None
    n, is_lstm = cell.hidden_size, isinstance(cell, nn.LSTMCell)
    order = [0, 3, 1, 2] if is_lstm else [1, 0, 2]  # torch has i f g o, and r z n; ONNX has i o f c, and z r h

    def arranged(*tensors: torch.Tensor) -> np.ndarray:
        parts = [t.detach().numpy().reshape(len(order), n, -1)[order].reshape(len(t), -1) for t in tensors]
        return np.concatenate(parts)[None]

    weights = {
        "W": arranged(cell.weight_ih),
        "R": arranged(cell.weight_hh),
        "B": arranged(cell.bias_ih, cell.bias_hh).reshape(1, -1),
    }
    states = ["h", "c"] if is_lstm else ["h"]
    options: dict[str, Any] = {} if is_lstm else {"linear_before_reset": 1}
    node = helper.make_node(
        "LSTM" if is_lstm else "GRU",
        ["x", "W", "R", "B", "", *states],
        ["", *[f"{s}_new" for s in states]],
        hidden_size=n,
        **options,
    )
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "step",
        [value("x", TensorProto.FLOAT, [1, 1, n]), *[value(s, TensorProto.FLOAT, [1, 1, n]) for s in states]],
        [value(f"{s}_new", TensorProto.FLOAT, [1, 1, n]) for s in states],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    onnx.checker.check_model(model)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    given = {"x": x[None], **{s: np.zeros((1, 1, n), np.float32) for s in states}}

    def call() -> Any:
        new = session.run(None, given)
        given.update(zip(states, new, strict=True))
        return new[0][0]

    return call


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'cell':12}{'':16}{'median':>9}{'99.9 %':>9}{'times':>8}")
    with torch.inference_mode():
        for name, n in ROWS:
            with torch.inference_mode(False):
                cell = getattr(nn, f"{name}Cell")(n, n)
                stepper = lf.Stepper(lf.from_torch(cell))
            x = np.random.default_rng(0).standard_normal((1, n), np.float32)
            calls: dict[str, Call] = {"Stepper": lambda stepper=stepper, x=x: stepper.step(x)}
            calls[f"nn.{name}Cell"] = torch_cell(cell, torch.from_numpy(x))
            session = onnx_session(cell, x)
            if session is not None:
                calls["ONNX Runtime"] = session
            for _ in range(20):  # they agree
                found = [call() for call in calls.values()]
            hidden = [np.asarray(h[0] if isinstance(h, tuple) else h) for h in found]
            assert all(np.allclose(h, hidden[0], atol=1e-5) for h in hidden), hidden
            times: dict[str, list[float]] = {key: [] for key in calls}
            for _ in range(BLOCKS):
                for key, call in calls.items():
                    for _ in range(BLOCK):
                        begin = time.perf_counter_ns()
                        call()
                        times[key].append((time.perf_counter_ns() - begin) / 1000)
            ours = statistics.median(times["Stepper"])
            for key, taken in times.items():
                median, late = statistics.median(taken), np.quantile(taken, 0.999)
                print(f"{name + ' ' + str(n):12}{key:16}{median:9.2f}{late:9.1f}{median / ours:8.1f}")


if __name__ == "__main__":
    main()
