"""CPU time of a worker that trains devices in turn, against the bare loop, in one process and by turns.

    python -m benchmarks.overhead.in_turn

A turn is a message of ten devices to the worker, and ten devices in the loop of `bare.py`. Turns are so short that what
else the machine does hits both alike. The server's part of a round is not in it. Writes the table of README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.overhead.run import HERE, TABLE, make_data
from benchmarks.tables import markdown, write_between
from wildflower.client_app.prepared import use_one_core
from wildflower.client_app.work import do
from wildflower.messages.orders import Batch, LocalTraining, WorkOrder
from wildflower.messages.packing import pack
from wildflower.messages.tensor_sets import TensorSet, digest
from wildflower.models.family import make_family
from wildflower.strategies.method import Training
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.task import TaskSpec

DEVICES = 10  # in a turn


def seconds(do: Callable[[], object]) -> float:
    """CPU time of this process."""
    started = time.process_time()
    do()
    return time.process_time() - started


def message(data: Path) -> tuple[str, list[bytes]]:
    """A message to a worker, as the server of experiment.toml sends it."""
    family, local = make_family({"name": "pfl-cnn", "input_shape": [3, 32, 32]}), Training()
    architecture = family.full()
    sent, returned = local.sent(family, architecture), local.returned(family, architecture)
    orders = [
        WorkOrder(
            order=device,
            device=device,
            tier="all",
            architecture=architecture.to_json(),
            payloads={"weights": 0},
            group=0,
            digest=digest(sent, returned),
            client_step=local.reference(),
            seed=device,
            memory_bytes=0,
            predicted_memory_bytes=10**6,
        )
        for device in range(DEVICES)
    ]
    batch = Batch(
        run="a run",
        round=1,
        task=TaskSpec(name="cifar10", data_dir=str(data), devices=200, partition="iid", seed=1).to_json(),
        family=family.spec(),
        training=LocalTraining(batch_size=10, learning_rate=0.05, augment=False),
        shared_process=True,
        side_by_side=1,
        orders=orders,
    )
    weights = pack(initial_weights(family, 1), TensorSet.of(family.tensors(architecture)).layout)
    return batch.model_dump_json(), [weights]


def main(turns: int) -> None:
    """Measure, and write the table."""
    sys.path.insert(0, str(HERE / "flower_app"))
    from stock.workload import EXAMPLES_PER_DEVICE, network, train

    use_one_core()
    model = network()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        os.environ["WILDFLOWER_CACHE"] = f"{folder}/cache"
        make_data(Path(folder))
        text, arrays = message(Path(folder) / "parquet")

        def worker() -> None:
            answer, _ = do("train", text, arrays, {})
            assert answer.count('"trained"') == DEVICES, answer

        def loop() -> None:
            total = {name: torch.zeros_like(value) for name, value in weights.items()}
            for device in range(DEVICES):
                model.load_state_dict(weights)
                train(model, folder, device)
                for name, value in model.state_dict().items():
                    total[name].add_(value, alpha=EXAMPLES_PER_DEVICE)

        loop()
        worker()
        found = [(seconds(loop), seconds(worker)) for _ in range(turns)]
    ratios = [of_worker / of_loop for of_loop, of_worker in found]
    low, _, high = statistics.quantiles(ratios, n=4)
    row = [f"{1000 / DEVICES * statistics.median(times):.1f}" for times in zip(*found, strict=True)]
    row += [f"{statistics.median(ratios):.3f}", f"{low:.2f} to {high:.2f}"]
    heads = ["a device in the loop, ms", "in a worker, ms", "ratio of a turn, median", "half of the turns"]
    how = f"{turns} turns; torch {torch.__version__}; load average at the end {os.getloadavg()[0]:.0f}."
    print(write_between(TABLE, "in turn", f"{markdown(heads, [row])}\n\n{how}"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    main(parser.parse_args().turns)
