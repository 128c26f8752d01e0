"""Which method delivers most to boards, phones and workstations that share one global model.

python -m benchmarks.methods_that_win.run cnn3|resnet6|vit|bert|hapt|five-widths [--jobs 1] [--seeds 1 2 3]
    [--methods NAME ...]
"""

import tomllib
from pathlib import Path

from benchmarks.model_search.run import DISTILLED, SEARCH
from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent
TWINS = ("cnn3", "resnet6", "vit", "bert", "hapt", "five-widths")

# Four nested architectures that the search finds for the fleet; smaller ones learn in every step, as in wildflower.
# That is a plug-in beside the experiments (nested_search.py).
NESTED = [
    "strategy=nested_search:NestedSearch",
    *(setting.replace("model-search.", "nested-search.") for setting in SEARCH[1:]),
    *("nested-search.architectures=4", "nested-search.sandwich=labels"),
]
BALANCED_NESTED = [*NESTED, "nested-search.criterion=balanced"]
# The number to beat: the widest network that all devices can train, with as much momentum.
ONE_MODEL = "strategy=one-model"
METHODS = {
    "all-large": ["strategy=fedavg", "fedavg.use=all-large"],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    # With as much momentum on the server as wildflower has in the row below.
    "all-large-momentum": ["strategy=fedavgm", "fedavgm.beta=0.5"],
    "heterofl": ["strategy=heterofl"],
    "fedrolex": ["strategy=fedrolex"],
    "fjord": ["strategy=fjord", "fjord.distillation=true"],
    "anycostfl": ["strategy=anycostfl"],
    "federated-dropout": ["strategy=federated-dropout"],
    # The whole network, on the devices that can train it; the others get nothing.
    "exclusive": ["strategy=fedavg", "fedavg.use=exclusive"],
    "model-search": SEARCH,
    # What the search makes largest: the FLOPs of training, or parameters and FLOPs in balance, in place of parameters.
    "model-search-flops": [*SEARCH, "model-search.criterion=flops"],
    "model-search-balanced": [*SEARCH, "model-search.criterion=balanced"],
    "search-four-nested": NESTED,
    "search-four-balanced": BALANCED_NESTED,
    # In-place distillation after every round, as benchmarks/model_search has it, and with the whole among the students.
    "model-search-distilled": [*SEARCH, *DISTILLED],
    "model-search-distilled-with-whole": [
        *SEARCH,
        *DISTILLED,
        "distillation.students=with-whole",
    ],
    "wildflower": ["strategy=wildflower", "wildflower.momentum=0"],
    "wildflower-momentum": ["strategy=wildflower", "wildflower.momentum=0.5"],
    # The largest network that all devices can train, layer by layer, and nothing beside it.
    "wildflower-one-level": ["strategy=wildflower", "wildflower.momentum=0.5", "wildflower.levels=1"],
    # The levels keep a part of every block, where those above have the most parameters that fit.
    "wildflower-balanced": ["strategy=wildflower", "wildflower.momentum=0.5", "wildflower.criterion=balanced"],
    "wildflower-balanced-one-level": [
        "strategy=wildflower",
        "wildflower.momentum=0.5",
        "wildflower.criterion=balanced",
        "wildflower.levels=1",
    ],
    # Levels are cuts of one width everywhere and of the depth; there is no search layer by layer.
    "wildflower-one-width": ["strategy=wildflower", "wildflower.momentum=0", "wildflower.shares="],
    # The levels are those of the methods of uniform widths: what is left is the way in which they are trained.
    "wildflower-given-widths": ["strategy=wildflower", "wildflower.momentum=0", "wildflower.levels=0"],
}
# The size of a step is not the same in all methods: wildflower's gradient is a mean over levels, the sandwich's a sum.
# On most of the twins these methods run with larger learning rates as well.
RATED = (
    "all-large",
    "all-small",
    "all-large-momentum",
    "heterofl",
    "fedrolex",
    "fjord",
    "model-search-balanced",
    "search-four-nested",
    "search-four-balanced",
    "wildflower",
    "wildflower-momentum",
    "wildflower-balanced",
)
# Beside the experiment file's own rate, which is 0.05, and 0.001 of the ViT.
RATES = {"cnn3": (0.1,), "resnet6": (0.1, 0.2), "hapt": (0.1,), "vit": (0.003,), "five-widths": (0.1,)}
# The sandwich adds up the gradients of up to four architectures. Its steps are therefore larger at the same rate, and
# it also runs with smaller ones.
SMALLER_RATES = {"hapt": (0.02, 0.01)}
# The small BERT is not done learning after the 40 rounds of its experiment file. These are three times as many, and the
# rate falls after the same shares of them.
LONGER = {"bert": {"120-rounds": ["rounds=120", "schedule.decay-rounds=84, 108"]}}
BALANCED = ("wildflower-balanced", "wildflower-balanced-one-level")
# Devices compute with 8 of 32 examples at once, so that a larger model fits their memory. On `resnet6` a method has the
# rate at which it delivers most with whole batches.
MICRO_BATCHES: dict[str, dict[str, tuple[float, ...]]] = {
    "cnn3": {
        "heterofl": (0.05, 0.1),
        **dict.fromkeys(("search-four-nested", "search-four-balanced"), (0.05,)),
        **dict.fromkeys(("wildflower-momentum", "wildflower-one-level", *BALANCED), (0.05,)),
    },
    "vit": dict.fromkeys(
        ("heterofl", "search-four-nested", "wildflower-momentum", "wildflower-one-level", *BALANCED), (0.003,)
    ),
    "resnet6": {
        **dict.fromkeys(("heterofl", "fjord", "wildflower", "wildflower-momentum", "wildflower-one-level"), (0.2,)),
        **dict.fromkeys(("all-small", "all-large", *BALANCED), (0.2,)),
        **dict.fromkeys(("search-four-nested", "search-four-balanced"), (0.1,)),
    },
    "hapt": {
        **dict.fromkeys(
            ("heterofl", "fjord", "wildflower", "wildflower-momentum", "all-small", "all-large"), (0.05, 0.1)
        ),
        **dict.fromkeys(("wildflower-one-level", *BALANCED), (0.1,)),
        "model-search-balanced": (0.05, 0.1),
        "search-four-balanced": (0.05,),
        "search-four-nested": (0.01, 0.02, 0.05, 0.1),
    },
    "five-widths": dict.fromkeys(
        (
            "heterofl",
            "search-four-nested",
            "search-four-balanced",
            "wildflower-momentum",
            "wildflower-one-level",
            *BALANCED,
        ),
        (0.05,),
    ),
}
# With parts of 8 examples all devices can train a wider network than the smallest, by memory and by link (but for two
# of 100 in one run, whose links do not carry the statistics of FedAvg's batch norm too). All train that one in the rows
# "all-common": the widest of HeteroFL's widths, and rates. With whole batches this is the smallest.
COMMON: dict[str, tuple[float, tuple[float, ...]]] = {
    "cnn3": (0.25, (0.05, 0.1)),
    "resnet6": (0.5, (0.2,)),
    "hapt": (0.25, (0.05, 0.1)),
    "five-widths": (0.25, (0.05, 0.1)),
}
# The widest network of all that all can train then, in steps of 0.02 of the width, and a rate: by FedAvg, and with as
# much momentum on the server as wildflower has. That one is FedAvgM with devices of equal weight.
WIDEST = {"cnn3": (0.42, 0.05), "resnet6": (0.5, 0.2), "hapt": (0.32, 0.1), "five-widths": (0.38, 0.05)}
# With whole batches this network is hardly wider than the smallest of HeteroFL's widths, or as wide: rows
# "all-small-momentum".
WIDEST_WHOLE = {
    "cnn3": (0.09, {"rate-0.1": ["learning-rate=0.1"]}),
    "resnet6": (0.125, {"rate-0.2": ["learning-rate=0.2"]}),
    "vit": (0.25, {"rate-0.003": ["learning-rate=0.003"]}),
    "bert": (0.0625, LONGER["bert"]),
    "hapt": (0.07, {"rate-0.1": ["learning-rate=0.1"]}),
    "five-widths": (0.0625, {f"rate-{rate}": [f"learning-rate={rate}"] for rate in (0.05, 0.1)}),
}
# Models of about the same size fit with a batch of 8 as with micro-batches; rates of such rows. Rounds have as many
# steps of fewer examples, or more steps and as many examples.
SMALL_BATCHES = {"resnet6": 0.2, "hapt": 0.1}
# Of five exact widths: as many levels as there are budgets, and each width by itself, trained by all devices whatever
# their budgets, which says what a device of that width could hold at best.
FIVE_WIDTHS = {
    "wildflower-five-levels": ["strategy=wildflower", "wildflower.momentum=0.5", "wildflower.levels=5"],
    **{
        f"all-width-{width}": [
            "strategy=fedavg",
            "fedavg.use=all-small",
            f"widths=1, {width}",
            "below-smallest=smallest",
        ]
        for width in (0.5, 0.25, 0.125)
    },
}

OWN = {"five-widths": FIVE_WIDTHS}
# `five-widths.toml` gives devices what the method needs for a width. These methods need more for it than HeteroFL:
# they get the memory that HeteroFL's widths take. It is tight, so that they choose among more shares.
NEED_MORE = ("strategy=wildflower", "strategy=model-search", NESTED[0], ONE_MODEL, "strategy=fjord")
SHARES = "0.0625, 0.09375, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1"
SAME_MEMORY = [
    f"fleet={HERE / 'same-memory-fleet.toml'}",
    f"wildflower.shares={SHARES}",
    f"model-search.shares={SHARES}",
]


def methods_of(twin: str) -> dict[str, list[str]]:
    """The rows of a twin: name -> settings beside those of its experiment file."""
    file = HERE / f"{twin}-fleet.toml"
    fleet = [f"fleet={file}"] if file.exists() else []  # else the experiment names one of the project's fleets
    own = OWN.get(twin, {})
    rated = {
        f"{name}-rate-{rate}": [*METHODS[name], f"learning-rate={rate}"]
        for rate in RATES.get(twin, ())
        for name in RATED
    }
    rated |= {
        f"search-four-nested-rate-{rate}": [*NESTED, f"learning-rate={rate}"] for rate in SMALLER_RATES.get(twin, ())
    }
    longer = {
        f"{name}-{length}": [*METHODS[name], *settings]
        for length, settings in LONGER.get(twin, {}).items()
        for name in RATED
    }
    micro = {
        f"{name}-rate-{rate}-micro-8": [*METHODS[name], f"learning-rate={rate}", "micro-batch-size=8"]
        for name, rates in MICRO_BATCHES.get(twin, {}).items()
        for rate in rates
    }
    if twin in COMMON:
        width, rates = COMMON[twin]
        common = [*METHODS["all-small"], f"widths=1, {width}", "micro-batch-size=8"]
        micro |= {f"all-common-rate-{rate}-micro-8": [*common, f"learning-rate={rate}"] for rate in rates}
    if twin in WIDEST:
        width, rate = WIDEST[twin]
        # With one width alone the level is that one, also where a stack of blocks could lose some of them instead.
        widths = {"all-widest": f"1, {width}", "all-widest-momentum": width if twin == "resnet6" else f"1, {width}"}
        for name, settings in {"all-widest": METHODS["all-small"], "all-widest-momentum": [ONE_MODEL]}.items():
            widest = [*settings, f"widths={widths[name]}", f"learning-rate={rate}", "micro-batch-size=8"]
            micro[f"{name}-rate-{rate}-micro-8"] = widest
    if twin in WIDEST_WHOLE:
        width, lengths = WIDEST_WHOLE[twin]
        for name, settings in lengths.items():
            rated[f"all-small-momentum-{name}"] = [ONE_MODEL, f"widths={width}", *settings]
    if twin in SMALL_BATCHES:
        small = [*METHODS["wildflower-momentum"], f"learning-rate={SMALL_BATCHES[twin]}", "batch-size=8"]
        micro["wildflower-momentum-batch-8"] = small
        micro["wildflower-momentum-batch-8-20-steps"] = [*small, "local-steps=20"]
    rows = METHODS | own | rated | longer | micro
    if twin == "five-widths":
        # With micro-batches every width needs less than the fleet of exact budgets gives for it with whole batches.
        same = {name for name, settings in rows.items() if settings[0] in NEED_MORE or "micro" in name}
        rows = {name: [*(SAME_MEMORY if name in same else []), *settings] for name, settings in rows.items()}
    shares = tomllib.loads((HERE / f"{twin}.toml").read_text())["model-search"]["shares"]
    return {name: [*fleet, *_with_shares(settings, shares)] for name, settings in rows.items()}


def _with_shares(settings: list[str], shares: str) -> list[str]:
    """Return settings with the shares of model search for the plug-in that searches as it does."""
    if NESTED[0] not in settings:
        return settings
    given = [setting.partition("=")[2] for setting in settings if setting.startswith("model-search.shares=")]
    return [*settings, f"nested-search.shares={(given or [shares])[0]}"]


STUDIES = [Study(HERE / f"{twin}.toml", methods_of(twin), tiers=False, costs=True) for twin in TWINS]

if __name__ == "__main__":
    main(STUDIES, __doc__ or "")
