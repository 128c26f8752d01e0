"""The experiments of the papers: which there are, their files, and how one is shrunk so that it runs in a minute.

Each paper has a folder with an `index.toml`: a table per table or figure of the paper, which names its experiment,
its rows (the methods that are compared), what the paper prints for them, and what cannot be configured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from wildflower.launch.experiment_file import SettingsError, read_experiment, read_toml
from wildflower.launch.sweeps import Row, parse_grid, read_rows
from wildflower.papers import made
from wildflower.plugins.nearest import did_you_mean

FOLDER = Path(__file__).parent
INDEX = "index.toml"

TINY_DEVICES = 3  # per round
TINY_WEAK = 5  # beside the strong ones; more of their kind would each train and score a model of their own
MADE_EXAMPLES = 240  # to train on; a hundred classes have two each, and one to test on

# Published encoders, of 768 channels in 12 heads each: kind, layers, positions, tokens, and the MLP's size's name.
PUBLISHED = {
    "FacebookAI/roberta-base": ("roberta", 12, 514, 50_265, "intermediate_size"),
    "google-bert/bert-base-uncased": ("bert", 12, 512, 30_522, "intermediate_size"),
    "distilbert/distilbert-base-uncased": ("distilbert", 6, 512, 30_522, "hidden_dim"),
}

# Training examples of the data sets, by which a plan at full size counts what a device trains on.
EXAMPLES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "mnist": 60_000,
    "fashion-mnist": 60_000,
    "svhn": 73_257,
    "stl10": 5_000,
    "unimib-shar": 3_353,
    "femnist": 732_850,
    "shakespeare": 338_944,
    "glue-cola": 8_551,
    "glue-mnli": 392_702,
    "glue-mrpc": 3_668,
    "glue-qnli": 104_743,
    "glue-qqp": 363_846,
    "glue-rte": 2_490,
    "glue-sst2": 67_349,
    "glue-stsb": 5_749,
    "text": 12_792,
}
DISTILLED = {"distillation.steps": 1, "distillation.batch-size": 4}  # in a run that takes a minute
PLANNED_EXAMPLES = 2_000  # of a device, at most, in a plan in which every device draws its own
MADE_FOR_PLANS = 2_500  # of which a task may keep a fifth to test on


class Entry(BaseModel):
    """A table or figure of a paper.

    Attributes:
        name: the paper's folder and the entry, such as "recipfl/table-3-mnist".
        paper: whose it is.
        what: what it compares, in one line.
        open: what the paper leaves open, and what stands here for it.
        missing: rows of the paper that cannot be configured here, and why.
        printed: the paper's figures by row, in its own units.
        data: the data set's name, as the paper calls it.
        grid: values that every row has, "key=value,value".
        tiny: settings of the shrunk experiment that are this entry's own, "key=value".
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    paper: str
    what: str
    experiment: str
    rows: str
    data: str
    open: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    printed: Mapping[str, str] = Field(default_factory=dict)
    grid: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return FOLDER / self.name.partition("/")[0]

    @property
    def experiment_file(self) -> Path:
        """Its experiment."""
        return self.folder / self.experiment

    def methods(self) -> list[Row]:
        """Return its rows; a fleet that lies beside the experiment has its whole path."""
        rows = read_rows(self.folder / self.rows)
        return [Row(row.name, tuple(self.placed(row.overrides)), row.seeds) for row in rows]

    def values(self) -> dict[str, list[str]]:
        """Return the values that every row has, by key."""
        return parse_grid(self.grid)

    def settings(self) -> list[str]:
        """Return what must be set so that its files are found from wherever the command is typed: "key=value"."""
        fleet = read_experiment(self.experiment_file).get("fleet", "")
        return self.placed([f"fleet={fleet}"])

    def placed(self, settings: Iterable[str]) -> list[str]:
        """Return settings ("key=value") in which a fleet's file that lies beside the experiment has its whole path."""
        found = []
        for text in settings:
            key, _, value = text.partition("=")
            beside = key == "fleet" and value.endswith(".toml")
            found.append(f"fleet={self.folder / value}" if beside else text)
        return found


def papers() -> list[Path]:
    """Return the folders of all papers."""
    return sorted(index.parent for index in FOLDER.glob(f"*/{INDEX}"))


def entries() -> list[Entry]:
    """Return all experiments, in the order of their papers' tables and figures."""
    found = []
    for folder in papers():
        index = read_toml(folder / INDEX, "the index of a paper")
        shared = {key: index[key] for key in ("paper", "open")}
        tables = {name: table for name, table in index.items() if isinstance(table, dict)}
        found += [Entry(name=f"{folder.name}/{name}", **(shared | table)) for name, table in tables.items()]
    return found


def entry(name: str) -> Entry:
    """Return the experiment of a name, "paper/table".

    Raises:
        SettingsError: there is none of that name; the nearest are named.
    """
    known = {one.name: one for one in entries()}
    if name in known:
        return known[name]
    begun = [other for other in known if other.startswith(name)]
    if begun:
        raise SettingsError(f"there is no experiment {name!r}, but {len(begun)} that begin so: {', '.join(begun)}")
    paper = name.partition("/")[0]
    of_paper = [other for other in known if other.partition("/")[0] == paper]
    told = f"`wildflower paper {paper}` lists that paper's" if of_paper else "`wildflower paper` lists all"
    meant = did_you_mean(name, of_paper or known)
    raise SettingsError(f"there is no experiment {name!r}: {meant + ' ' if meant else ''}{told}")


def tiny(one: Entry, row: Row, folder: Path) -> list[str]:
    """Return the settings ("key=value") under which a row of an experiment runs in seconds, on data made in `folder`.

    The method, its family and the kinds of devices stay what they are. There are two rounds of three devices, a step of
    four examples each, few weak devices beside the strong ones, and small encoders and hypernetworks; of what the row
    sets itself nothing else is changed, but for the steps of distillation.
    """
    own = dict(text.partition("=")[::2] for text in row.overrides)
    whole = {**read_experiment(one.experiment_file), **own}
    shared_out = whole["partition"] == "strong-and-weak"
    fewer = _with_fewer_weak(whole, one.folder, folder) if shared_out and "fleet" not in own else {}
    whole |= fewer
    train = max(MADE_EXAMPLES, 20 * int(whole["devices"]) if shared_out else 0)  # a weak device has ten of them
    found: dict[str, Any] = {
        "data-dir": _made(whole, folder, train),
        "rounds": 2,
        "devices-per-round": min(int(whole["devices-per-round"]), TINY_DEVICES),
        "local-epochs": 1,
        "local-steps": 1,
        "batch-size": 4,
        "evaluate-every": 2,
        "workers": 1,
        "statistics.devices": TINY_DEVICES,
        "statistics.examples": 8,
        **fewer,
    }
    if whole["partition"] == "natural":
        found["devices"] = min(int(whole["devices"]), made.PEOPLE)
    elif not shared_out:
        found["examples-per-device"] = 8
    found |= {key: 2 for key in ("personal.every", "personal.first-round") if key in whole}
    if "personal.every" in whole and not shared_out:  # every device trains a model of its own and says its score
        found |= {"devices": TINY_DEVICES, "devices-per-round": TINY_DEVICES}
    found |= {"schedule.decay-rounds": "1"} if "schedule.decay-rounds" in whole else {}
    if public := whole.get("public.task"):
        data = _made({**whole, "task": public}, folder, MADE_EXAMPLES)
        found |= {"public.data-dir": data, "public.examples": 8, "ensemble.steps": 1, "ensemble.batch-size": 4}
    found |= _of_method(whole) | dict(text.partition("=")[::2] for text in one.tiny)
    found = {key: value for key, value in found.items() if key not in own}
    found |= {key: value for key, value in DISTILLED.items() if own.get("distillation.steps", "0") != "0"}
    if texts := _of_texts(whole, folder, small=True):
        found |= texts | {"task-arguments": f"{texts['task-arguments']}, max_tokens = 12"}
    return [f"{key}={value}" for key, value in found.items()]


def _with_fewer_weak(row: Mapping[str, Any], beside: Path, folder: Path) -> dict[str, Any]:
    """Return the fleet of strong and weak devices with a few weak ones, which is written to `folder`."""
    strong = int(row["strong.devices"])
    every, few = f"count = {int(row['devices']) - strong}\n", f"count = {TINY_WEAK}\n"
    fleet = folder / f"{strong}-and-{TINY_WEAK}-of-{row['fleet']}"
    fleet.write_text((beside / row["fleet"]).read_text().replace(every, few))
    return {"fleet": fleet, "devices": strong + TINY_WEAK}


def full_size(one: Entry, row: Row, folder: Path) -> list[str]:
    """Return the settings ("key=value") under which a row can be planned at full size on data made in `folder`."""
    settings = {**read_experiment(one.experiment_file), **dict(text.partition("=")[::2] for text in row.overrides)}
    count, devices = EXAMPLES[settings["task"]], int(settings["devices"])
    if settings["partition"] == "strong-and-weak":
        found: dict[str, Any] = {"data-dir": _made(settings, folder, count)}
    else:
        each = min(PLANNED_EXAMPLES, max(1, count // devices))
        found = {"data-dir": _made(settings, folder, MADE_FOR_PLANS), "examples-per-device": each}
        found |= {"partition": "iid"} if settings["partition"] == "natural" else {}
    found |= _of_texts(settings, folder, small=False)
    return [f"{key}={value}" for key, value in found.items()]


def _made(row: Mapping[str, Any], folder: Path, train: int) -> Path:
    """Return a folder with so many examples for a row, made if they are not there."""
    task = str(row["task"])
    test = max(MADE_EXAMPLES // 6, int(row["devices"]) if row["partition"] == "strong-and-weak" else 0)
    data = folder / f"{task}-{train}-{test}"
    if not data.exists():
        made.write(task, data, train=train, test=test)
    return data


def _of_texts(row: Mapping[str, Any], folder: Path, *, small: bool) -> dict[str, Any]:
    """Return what encoders of random weights need in place of published ones, and a tokenizer that was made."""
    arguments, task_arguments = row.get("family-arguments", ""), row.get("task-arguments", "")
    if not any(f"'{model}'" in arguments for model in PUBLISHED):
        return {}
    for model, (kind, layers, positions, tokens, inside) in PUBLISHED.items():
        count = made.TOKENS if small else tokens
        hidden, heads, mlp, longest = (16, 4, 16, 32) if small else (768, 12, 3072, positions)
        sizes = f"hidden_size = {hidden}, num_attention_heads = {heads}, {inside} = {mlp}"
        sizes = f"model_type = '{kind}', {sizes}, max_position_embeddings = {longest}, vocab_size = {count}"
        # Depths are of the published encoder; where none is named, a sixth of its layers shows as much.
        few = small and "depths" not in arguments
        whole = f"model = {{{sizes}, num_hidden_layers = {layers // 6 if few else layers}}}"
        arguments = arguments.replace(f"model = '{model}'", whole).replace(f"name = '{model}'", sizes)
        if f"'{model}'" in task_arguments:
            tokenizer = made.write_tokenizer(folder / f"tokenizer-{count}", count)
            task_arguments = task_arguments.replace(f"'{model}'", repr(str(tokenizer)))
    return {"initial.weights": "", "family-arguments": arguments, "task-arguments": task_arguments}


def _of_method(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a method's own work small."""
    match row.get("strategy", ""):
        case "recipfl":
            return {"recipfl.hidden": 8, "recipfl.decoder-hidden": 8}
        case "hypemefed":
            return {"hypemefed.hidden": 8, "hypemefed.epochs": 1}
        case "model-search":
            return DISTILLED
    return {}
