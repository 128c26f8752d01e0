"""What in-place distillation does to a trained model: agreement on noise, agreement on real inputs, accuracy.

    python -m benchmarks.model_search.distillation [RUN_FOLDER ...] [--inputs 1000]

From the checkpoint of a run, one distillation of ten sub-models with several settings. Measured before and after it:
the mean divergence KL(whole before it || sub-model) on noise, which distillation makes small, and on test inputs, which
it is for, the accuracies of the whole model and of the sub-models, and how far the whole tells inputs apart
(`mutual_information_nats`): one that says the same of all noise teaches to say it of everything. Scored without
training statistics: a static batch norm takes those of the batch. And what a distillation as long as the
paper's takes, beside the run's rounds. Writes distillation.json and the tables in README.md.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.runs import from_test_set, from_training_set, trained_method
from benchmarks.tables import markdown, write_between
from wildflower.messages.tensor_sets import Weights
from wildflower.models.base import Family
from wildflower.models.placement import Placement
from wildflower.models.weights import with_weights
from wildflower.strategies.distillation import Distillation, distill, mutual_information_nats
from wildflower.strategies.noise import Noise
from wildflower.strategies.static_norm import StaticNormMethod
from wildflower.strategies.submodel import Cut

HERE = Path(__file__).resolve().parent
FILE = HERE / "distillation.json"
AT_BEST = "20 x 64 of 1e-3, training inputs"  # the one case that does not distill on noise
CASES = {
    "before": None,
    "5 steps of 1e-3": Distillation(steps=5, batch_size=16, learning_rate=1e-3),
    "5 steps of 1e-4": Distillation(steps=5, batch_size=16, learning_rate=1e-4),
    "5 steps of 1e-5": Distillation(steps=5, batch_size=16, learning_rate=1e-5),
    "50 steps of 1e-4": Distillation(steps=50, batch_size=16, learning_rate=1e-4),
    AT_BEST: Distillation(steps=20, batch_size=64, learning_rate=1e-3),
}


class TrainingInputs(Noise):
    """Inputs of the task's training set, which no server has: what distillation could do at best."""

    def __init__(self, family: Family, weights: Weights, inputs: Tensor) -> None:
        super().__init__(family, weights)
        self.inputs = inputs

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Of (count, *an input's shape)."""
        return self.inputs[torch.randint(len(self.inputs), (count,), generator=generator)]

    def reader(self, model: nn.Module, placement: Placement) -> Callable[[Tensor], Tensor]:
        """The model itself: inputs stand for themselves."""
        return model


def distilled_method(run: Path) -> StaticNormMethod:
    """The method of a run's folder in the state of its last round; ValueError where it is none that is distilled."""
    method, _, config = trained_method(run)
    if not isinstance(method, StaticNormMethod):
        raise ValueError(f"{run}: strategy {config.strategy} has no sub-models to distill")
    return method


@torch.no_grad()
def says(family: Family, weights: Weights, cut: Cut, inputs: Tensor, noise: Noise | None = None) -> Tensor:
    """Log-probabilities (examples, classes) of a sub-model in evaluation mode."""
    architecture, placement = cut
    model = with_weights(family, architecture, placement.gather(weights)).eval()
    compute = noise.reader(model, placement) if noise else model
    return torch.cat([compute(part) for part in inputs.split(250)]).log_softmax(dim=1)


def divergence(target: Tensor, found: Tensor) -> float:
    """Mean of KL(target || found) over examples, of log-probabilities."""
    return float(F.kl_div(found, target, reduction="batchmean", log_target=True))


def measure(run: Path, examples: int) -> dict[str, dict[str, float]]:
    """The figures of every case, from the checkpoint of a run."""
    method = distilled_method(run)
    family, before = method.family, method.weights
    inputs, labels = from_test_set(method, examples)
    training = from_training_set(method, 5000)
    normal = Noise(family, before)
    noise = normal.draw(examples, torch.Generator().manual_seed(1))
    students = method.students(method.rng(5), "with-smallest")
    whole = method.scored_cut(method.scored_architecture)
    on_inputs = says(family, before, whole, inputs)
    on_noises = says(family, before, whole, noise, normal)

    def figures(weights: Weights) -> dict[str, float]:
        def accuracy(found: Sequence[Tensor]) -> float:
            return statistics.mean(float((f.argmax(dim=1) == labels).double().mean()) for f in found)

        said = [says(family, weights, student, inputs) for student in students]
        whole_said = says(family, weights, whole, inputs)
        return {
            "divergence_on_noise": statistics.mean(
                divergence(on_noises, says(family, weights, student, noise, normal)) for student in students
            ),
            "divergence_on_inputs": statistics.mean(divergence(on_inputs, found) for found in said),
            "accuracy_of_sub_models": accuracy(said),
            "accuracy_of_whole": accuracy([whole_said]),
            "noise_mutual_information_nats": mutual_information_nats(says(family, weights, whole, noise, normal)),
            "inputs_mutual_information_nats": mutual_information_nats(whole_said),
        }

    def after(case: str, settings: Distillation | None) -> Weights:
        inputs = TrainingInputs(family, before, training) if case == AT_BEST else normal
        return distill(family, before, whole, students, settings, 1, inputs).weights if settings else before

    return {case: figures(after(case, settings)) for case, settings in CASES.items()}


def seconds(run: Path) -> dict[str, float]:
    """Of a round without evaluation and distillation, and of distilling ten sub-models by 100 steps of 64 inputs."""
    method = distilled_method(run)
    whole, students = method.scored_cut(method.scored_architecture), method.students(method.rng(5), "with-smallest")
    tenth = Distillation(steps=10, batch_size=64)
    started = time.perf_counter()
    distill(method.family, method.weights, whole, students, tenth, seed=1)
    distilling = 10 * (time.perf_counter() - started)
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    server = [r["server_seconds"] for r in rounds]
    bare = [r["wall_seconds"] - s["evaluate"] - s.get("distill", 0.0) for r, s in zip(rounds, server, strict=True)]
    return {
        "distillation": distilling,
        "round": statistics.median(bare),
        "search": statistics.median(s["assign"] for s in server),
    }


def main() -> None:
    """Measure every run, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="none: only the table is written anew")
    parser.add_argument("--inputs", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    for run in arguments.runs:
        name = f"{run.resolve().parent.name.removeprefix('model_search_')}, {run.name}"
        results[name] = {"cases": measure(run, arguments.inputs), "seconds": seconds(run)}
        FILE.write_text(json.dumps(results, indent=1) + "\n")
    heads = ["run", "distillation", "divergence on noise", "on test inputs", "accuracy of sub-models", "of the whole"]
    heads += ["nats the whole tells apart of noise", "of test inputs"]
    rows = [
        [
            name,
            case,
            *(f"{r[key]:.3f}" for key in ("divergence_on_noise", "divergence_on_inputs")),
            *(f"{100 * r[key]:.1f}" for key in ("accuracy_of_sub_models", "accuracy_of_whole")),
            *(f"{r[key]:.3f}" for key in ("noise_mutual_information_nats", "inputs_mutual_information_nats")),
        ]
        for name, result in results.items()
        for case, r in result["cases"].items()
    ]
    print(write_between(HERE / "README.md", "distillation", markdown(heads, rows)))
    heads = [
        "run",
        "s per round",
        "s to assign",
        "s to distill, 10 x 100 steps of 64",
        "share of assigning and distilling",
    ]
    rows = [
        [
            name,
            f"{s['round']:.1f}",
            f"{s['search']:.3f}",
            f"{s['distillation']:.1f}",
            f"{100 * (s['search'] + s['distillation']) / (s['round'] + s['distillation']):.0f} %",
        ]
        for name, s in ((name, result["seconds"]) for name, result in results.items())
    ]
    print(write_between(HERE / "README.md", "distillation seconds", markdown(heads, rows)))


if __name__ == "__main__":
    main()
