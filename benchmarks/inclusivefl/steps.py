"""CPU seconds of a device's local step beside a plain loop over the same encoder of `transformers`.

python -m benchmarks.inclusivefl.steps [--turns 5]    # writes steps.json, and prints the table

MiniLM-L6 with frozen embeddings and a new head, AdamW, batches of 16 questions that are padded to their longest. A
device trains through an order of a run of one device; the plain loop has `transformers`' own class, the same texts as
tokens, and `torch.optim.AdamW`. A step's time is the slope between few and many steps, so that what comes once for an
order (messages, packing, building the model) is not in it. Both take turns in one process, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.inclusivefl.run import ENCODER, STUDY, settings
from benchmarks.minilm import pretrained
from tests.grid import InProcessGrid
from wildflower.client_app.app import app as client
from wildflower.launch.experiment_file import resolve
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.server_app.inputs import task_spec
from wildflower.tasks.task import load_task

RESULTS = Path(__file__).with_name("steps.json")
FEW, MANY = 5, 45
HEAD_RATE = 10.0  # times the rate, as in the study


class Plain(nn.Module):
    """`transformers`' BERT, and a linear head over the mean of the tokens that are no padding."""

    def __init__(self, folder: str, classes: int) -> None:
        super().__init__()
        from transformers import BertModel

        self.bert = BertModel.from_pretrained(folder, add_pooling_layer=False)
        self.bert.embeddings.requires_grad_(False)
        self.classifier = nn.Linear(self.bert.config.hidden_size, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(batch, sequence) of tokens and whether they are no padding -> (batch, classes)."""
        hidden = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return self.classifier((hidden * weights).sum(1) / weights.sum(1))


def plain_seconds(model: Plain, tokens: Tensor, labels: Tensor, pad: int, steps: int, config: RunConfig) -> float:
    """CPU seconds of so many steps over the texts in a random order, with the rate and the batches of a run."""
    start = time.process_time()
    model.train()
    encoder = [p for p in model.bert.parameters() if p.requires_grad]
    rate, batch_size = config.learning_rate, config.batch_size
    head = {"params": list(model.classifier.parameters()), "lr": HEAD_RATE * rate}
    optimizer = torch.optim.AdamW([{"params": encoder}, head], lr=rate, weight_decay=0.0)
    done = 0
    while done < steps:
        for picked in torch.randperm(len(labels)).split(batch_size):
            if len(picked) < batch_size or done == steps:
                continue
            batch = tokens[picked].long()
            batch = batch[:, : int((batch != pad).sum(1).max())]
            optimizer.zero_grad()
            F.cross_entropy(model(batch, batch != pad), labels[picked]).backward()
            optimizer.step()
            done += 1
    return time.process_time() - start


def run_config(folder: str, steps: int) -> RunConfig:
    """A run of one device with that many steps in each round."""
    fleet = Path(folder) / "fleet.toml"
    fleet.write_text('[[group]]\nname = "device"\nshare = 1.0\nmemory = "8 GB"\nlink = "1 Gbit/s"\n')
    own = {
        "devices": 1,
        "devices-per-round": 1,
        "examples-per-device": 0,
        "evaluate-every": 1_000_000,
        "rounds": 1_000,
        "local-steps": steps,
        "weight-decay": 0.0,
        "fleet": str(fleet),
        "output-dir": folder,
        "run-name": f"steps-{steps}",
    }
    given = [setting.replace(ENCODER, pretrained()) for setting in settings("fine", "thirds", "all-large")]
    changed = [setting for setting in given if setting.partition("=")[0] not in own]
    return resolve(STUDY.experiment, [*changed, *(f"{key}={value}" for key, value in own.items())]).config


def measure(turns: int) -> dict[str, Any]:
    """Milliseconds of a step of both, by turn."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        configs = {steps: run_config(folder, steps) for steps in (FEW, MANY)}
        runs = {steps: (*build(config), InProcessGrid(client, 1)) for steps, config in configs.items()}
        task = load_task(task_spec(configs[FEW]))
        shard = task.shard(0).train
        tokens, labels = task.train.inputs[shard], task.train.labels[shard]
        assert task.vocabulary is not None
        pad, plain = task.vocabulary.pad_id, Plain(pretrained(), task.classes)

        def ours(steps: int, number: int) -> float:
            engine, scorer, grid = runs[steps]
            start = time.process_time()
            record = engine.run_round(grid, number, scorer).record
            assert record["devices_replied"] == 1
            return time.process_time() - start

        found: dict[str, list[float]] = {"plain": [], "device": []}
        for number in range(1, turns + 2):
            times = {"plain": lambda steps: plain_seconds(plain, tokens, labels, pad, steps, configs[FEW])}
            times["device"] = lambda steps, number=number: ours(steps, number)
            for name in sorted(times, reverse=bool(number % 2)):  # who is first is second the next time
                slope = (times[name](MANY) - times[name](FEW)) / (MANY - FEW)
                if number > 1:  # the first turn fills caches
                    found[name].append(1000 * slope)
    return found | {"load_average": os.getloadavg()[0]}


def table(found: dict[str, Any]) -> str:
    """Both, and the ratio of the medians."""
    lines = ["| | ms of CPU per step, median | lowest | highest |", "|---|---|---|---|"]
    for name, words in (("plain", "plain loop of `transformers`"), ("device", "a device's order")):
        mine = found[name]
        lines.append(f"| {words} | {statistics.median(mine):.1f} | {min(mine):.1f} | {max(mine):.1f} |")
    ratio = statistics.median(found["device"]) / statistics.median(found["plain"])
    return "\n".join([*lines, "", f"Ratio {ratio:.2f}; load average {found['load_average']:.1f}."])


def main() -> None:
    """Measure, write steps.json, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    found = measure(parser.parse_args().turns)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
