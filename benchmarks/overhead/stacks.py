"""CPU time of the demo's trainings, by width: in turn, and as stacks of several devices of one width.

    python -m benchmarks.overhead.stacks

From these it computes what a round of the demo takes at best: with its ten devices, whose widths differ, as stacks of
equal widths, and with all of them as whole models that are masked, five at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.overhead.run import HERE
from benchmarks.tables import markdown, write_between
from wildflower.client_app.batches import batch_of, picks_of
from wildflower.client_app.fitting import Fit, fit_here
from wildflower.client_app.stack import fit_stacked
from wildflower.launch.experiment_file import place, resolve
from wildflower.messages.orders import LocalTraining
from wildflower.models.family import make_family
from wildflower.server_app.inputs import task_spec
from wildflower.strategies.shared_losses import PureLoss
from wildflower.tasks.task import Task, load_task

# Width -> how many of a round's ten devices have it on average, by the demo's fleet.
WIDTHS = {1.0: 1.0, 0.5: 1.5, 0.25: 2.5, 0.125: 2.5, 0.0625: 2.5}
STACKS = (2, 3, 5)
REPETITIONS = 3
FAMILY = {"name": "cnn3", "input_shape": [1, 8, 8], "norm": "static", "scaler": True}
TRAINING = LocalTraining(epochs=2, batch_size=16, learning_rate=0.05, momentum=0.9, weight_decay=0.0005)


def fits_of(task: Task, width: float, devices: int) -> list[Fit]:
    """The trainings of the first devices, with one width; those with more examples first."""
    family, found = make_family(FAMILY), []
    for device in range(devices):
        shard = task.shard(device).train

        def start(shard: Tensor = shard) -> Iterator[Tensor]:
            return picks_of(shard, TRAINING, torch.Generator().manual_seed(0))

        def examples_of(picked: Tensor) -> tuple[Tensor, Tensor]:
            return batch_of(task, picked, TRAINING, torch.device("cpu"), None)

        model = family.build(family.width(width))
        found.append(
            Fit(
                model,
                PureLoss(task, model),
                start,
                examples_of,
                len(shard),
                TRAINING,
                torch.device("cpu"),
                data=id(task),
            )
        )
    return sorted(found, key=lambda fit: -fit.examples)


def milliseconds(do: Callable[[], object]) -> float:
    """The least CPU time of some repetitions."""
    least = float("inf")
    for _ in range(REPETITIONS):
        started = time.process_time()
        do()
        least = min(least, time.process_time() - started)
    return 1000 * least


def main() -> None:
    """Measure, and write the table in README.md."""
    torch.set_num_threads(1)
    demo = resolve(HERE.parent / "demo" / "digits.toml", ["seed=1"]).config
    task = load_task(task_spec(place(demo, Path.cwd(), datetime.now())[0]))
    drawn = torch.Generator().get_state()
    rows = []
    in_turn = best = masked = 0.0
    for width, count in WIDTHS.items():
        ratios = []
        for size in STACKS:
            fits = fits_of(task, width, size)
            alone = milliseconds(partial(_in_turn, fits))
            ratios.append(milliseconds(partial(fit_stacked, fits, [drawn] * size)) / alone)
        of_device = count * alone / size
        in_turn += of_device
        # So many devices of a width are in a round on average: two of them, or three.
        best += of_device * (min(1.0, ratios[round(count) - 2]) if round(count) > 1 else 1.0)
        masked = masked or sum(WIDTHS.values()) * alone / size * ratios[-1]
        rows.append([f"{width:g}", f"{alone / size:.1f}", *(f"{ratio:.2f}" for ratio in ratios)])
        print(rows[-1], flush=True)
    found = [
        f"A round's ten trainings take {in_turn:.0f} ms in turn, and {best:.0f} ms as stacks of equal widths, "
        f"{best / in_turn:.2f} of it.",
        f"As stacks of five whole models, of which narrower devices would use a part, they take {masked:.0f} ms, "
        f"{masked / in_turn:.2f} of it.",
    ]
    header = ["width", "one device in turn, ms", *(f"{size} at once" for size in STACKS)]
    write_between(HERE / "README.md", "stacks", markdown(header, rows) + "\n\n" + "\n".join(found))


def _in_turn(fits: Sequence[Fit]) -> None:
    for fit in fits:
        fit_here(fit)


if __name__ == "__main__":
    main()
