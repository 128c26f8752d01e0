"""The methods of the model-search paper's table, on twins of its settings that run on two cores.

    python -m benchmarks.model_search.run STUDY [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]

STUDY is resnet, vit, bert, readings or readings-resnet.

Needs the link traces in ../shared/traces, beside the project's folder.
"""

import json
import tomllib
from pathlib import Path

from benchmarks.studies import Study, accuracy, main
from benchmarks.tables import markdown, write_between

HERE = Path(__file__).resolve().parent
TWINS = ("resnet", "vit", "bert")

# The paper distills for 100 steps of 64 inputs on a GPU. Five steps of 16 take a third of a transformer's round on a
# CPU, and half of a ResNet's.
# The smallest model is among the students, as in the published code; the rate falls as that of training does (ours).
DISTILLED = [
    *("distillation.steps=5", "distillation.batch-size=16"),
    *("distillation.students=with-smallest", "distillation.schedule=as-training"),
]
# What is ours of the search: the exact one, and HeteroFL's way to train.
SEARCH = [
    *("strategy=model-search", "model-search.searcher=exact"),
    *("model-search.masked-loss=true", "model-search.norm=static", "distillation.steps=0"),
]
METHODS = {
    "largest": ["strategy=fedavg", "fedavg.use=all-large"],
    "smallest": ["strategy=fedavg", "fedavg.use=all-small"],
    "heterofl": ["strategy=heterofl"],
    "fedrolex": ["strategy=fedrolex"],
    "federated-dropout": ["strategy=federated-dropout"],
    "fjord": ["strategy=fjord", "fjord.distillation=false"],
    "anycostfl": ["strategy=anycostfl"],
    "search": SEARCH,
    "search-distilled": [*SEARCH, *DISTILLED],
    "heterofl-distilled": ["strategy=heterofl", *DISTILLED],
    "search-distilled-1e-4": [*SEARCH, *DISTILLED, "distillation.learning-rate=1e-4"],
    "search-pool": [*SEARCH, "model-search.searcher=pool"],
    # What is due to HeteroFL's way to train, masked cross-entropy and static batch norm, and what to the search.
    "smallest-as-heterofl": ["strategy=heterofl", "widths=0.25"],
    "search-plain": [*SEARCH, "model-search.masked-loss=false"],
    "fjord-self-distilled": ["strategy=fjord", "fjord.distillation=true"],
    # Uniform widths nearer to what a device can afford: what the search gains by that alone.
    "heterofl-fine-widths": ["strategy=heterofl", "widths=1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25"],
}
TWICE = ["rounds=400", "schedule.decay-rounds=260, 350"]
# Of one twin only. ViT, the cheapest: as many steps as the paper's, 33 s a round. ResNet: what keeps its search below
# the smallest model.
OF = {
    "vit": {
        "search-distilled-100": [*SEARCH, *DISTILLED, "distillation.steps=100"],
    },
    "resnet": {
        "search-optimum": [*SEARCH, "model-search.tolerance=0"],
        "search-all-blocks": [*SEARCH, "model-search.min-blocks=2"],
        "search-two-shares": [*SEARCH, "model-search.shares=0.25, 1"],
        "smallest-400-rounds": ["strategy=fedavg", "fedavg.use=all-small", *TWICE],
        "search-400-rounds": [*SEARCH, *TWICE],
    },
}
NO_SCALER = "heterofl-without-scaler"  # for which the family's arguments are needed
# With the first seed only.
ONCE = (
    "search-distilled-1e-4",
    "search-pool",
    "smallest-as-heterofl",
    "search-plain",
    "fjord-self-distilled",
    "heterofl-fine-widths",
    NO_SCALER,
    *(name for rows in OF.values() for name in rows),
)


# Accuracies of the paper's settings 4 (of ResNets the one whose shares are nearest), 5 and 6, in percent.
PAPER = {
    "largest": (74.5, 84.4, 65.4),
    "smallest": (71.9, 67.9, 57.0),
    "heterofl": (61.0, 41.9, 54.3),
    "fedrolex": (30.5, 9.2, 22.4),
    "federated-dropout": (15.0, 22.6, 14.4),
    "fjord": (47.2, 24.9, 11.4),
    "anycostfl": (69.1, 8.6, 12.5),
    "search": (73.5, 81.8, 61.8),
    "search-distilled": (74.7, 83.7, 64.3),
}


def beside_the_paper() -> str:
    """Final accuracies of all twins beside those of the paper's settings, in Markdown."""
    files = [HERE / f"results-{twin}.json" for twin in TWINS]
    found = [json.loads(file.read_text())["results"] if file.exists() else {} for file in files]
    heads = ["method", *(cell for number, twin in enumerate(TWINS, 4) for cell in (f"paper, setting {number}", twin))]
    rows = []
    for method, papers in PAPER.items():
        rows.append([method])
        for paper, results in zip(papers, found, strict=True):
            finals = [figures["final_score"] for figures in results.get(method, {}).values()]
            rows[-1] += [f"{paper:.1f}", accuracy(finals) if finals else ""]
    return markdown(heads, rows)


def methods_of(twin: str) -> dict[str, list[str]]:
    """The rows of a twin's table."""
    arguments = tomllib.loads((HERE / f"{twin}.toml").read_text())["family-arguments"]
    no_scaler = [*METHODS["heterofl"], f"family-arguments={arguments}, scaler = false"]
    fleet = f"fleet={HERE / f'{twin}-fleet.toml'}"
    return {
        name: [fleet, *settings] for name, settings in (METHODS | {NO_SCALER: no_scaler} | OF.get(twin, {})).items()
    }


def readings(*search: str) -> dict[str, list[str]]:
    """The search without distillation and with each reading of Eq. 2 (docs/methods/distillation.md)."""
    five_steps = ["distillation.steps=5", "distillation.batch-size=16"]
    names = ("students", "frozen-teacher", "live-teacher")
    return {"none": [*search, "distillation.steps=0"]} | {
        name: [*search, *five_steps, f"distillation.reading={name}"] for name in names
    }


STUDIES = [
    *(Study(HERE / f"{twin}.toml", methods_of(twin), target="smallest", once=ONCE, tiers=False) for twin in TWINS),
    # The paper's own search: pool, plain loss and running statistics.
    Study(HERE / "readings.toml", readings("strategy=model-search", f"fleet={HERE / 'vit-fleet.toml'}"), tiers=False),
    Study(HERE / "readings-resnet.toml", readings("strategy=model-search"), tiers=False),
]

if __name__ == "__main__":
    try:
        main(STUDIES, __doc__ or "")
    finally:  # also where some runs are missing yet
        write_between(HERE / "README.md", "beside the paper", beside_the_paper())
