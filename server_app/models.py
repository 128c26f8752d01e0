"""The models of a run exactly as they were scored: those of the newest evaluation, of the best, and each tier's best.

`models/newest` and `models/best` in the run's folder hold one safetensors file per model, and models.json, which says
what each of them is and how an input is prepared. `models/tier-...` holds the model of one tier from the evaluation
that was best by the tier's own score. Methods whose models live on devices only have none. `modules` has copies of the
user's own modules, which lay beside the experiment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
from pydantic import Field, ValidationError
from torch import Tensor, float32, float64, nn, tensor

from wildflower.devices.validation import one_line
from wildflower.messages.programs import Described, network_of
from wildflower.models.any_network import AnyNetwork
from wildflower.models.architecture import Architecture
from wildflower.models.choice import Chosen
from wildflower.models.family import make_family
from wildflower.models.traced.family import Traced
from wildflower.models.traced.program import Program
from wildflower.plugins.beside import check_kept, digests, looked_for_beside
from wildflower.plugins.invalid import in_words
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import PluginError, is_reference, top_module
from wildflower.plugins.user_error import UserError
from wildflower.rounds.engine import Engine
from wildflower.server_app.run_folder import JournalError, read_config, read_rounds, read_summary
from wildflower.server_app.run_records import Record
from wildflower.server_app.whole_files import newest_whole, written_whole
from wildflower.tasks.inputs import readable
from wildflower.tasks.task import Task

Which = Literal["best", "newest"]
FOLDER, FACTS, MODULES = "models", "models.json", "modules"
NO_TIERS = (
    "it has none of any tier: either the run does not score tiers (evaluate-tiers = false), or its method leaves the "
    "models of tiers on devices"
)
_LOOKING = threading.RLock()


class ModelError(UserError, RuntimeError):
    """A model that is missing or not whole; the text says where, and what there is."""


class SavedModel(Record):
    """Facts of models.json about one model.

    Attributes:
        file, sha256: where its tensors are, batch norm's running statistics among them, and the hash of that file.
        family: from which `wildflower.models.family.make_family` makes the family.
        architecture: as of `Architecture.to_json`.
        is_global: whether this is the global model.
        tiers: the tiers most of whose devices would be given this model, and those whose devices would be given none
            now and were given this architecture last.
        exits: what a model with several exits says: what its "deepest" says, or the "mean" of the exits' logits.
        score: the value of the task's metric on its test set. Of the best model of a tier whose devices test
            themselves, that on the tier's devices.
    """

    file: str = Field(pattern=r"^[a-z0-9-]+\.safetensors$")
    sha256: str
    family: dict[str, Any]
    architecture: dict[str, list[int]]
    is_global: bool
    tiers: list[str]
    exits: Literal["deepest", "mean"]
    score: float


class Evaluated(Described):
    """Facts that all models of one evaluation have in common.

    Attributes:
        higher_is_better: which of the scores are better.
        label_names: of the classes, in their order; empty where the task has none.
    """

    higher_is_better: bool
    label_names: list[str] = Field(default_factory=list)


class SavedModels(Evaluated):
    """The contents of models.json."""

    models: list[SavedModel]

    def of(self, tier: str | None) -> list[SavedModel]:
        """The model of a tier, or the global one: one, or none where there is no such model."""
        return [model for model in self.models if (model.is_global if tier is None else tier in model.tiers)]


class ModelInfo(Evaluated):
    """Facts about a model that was loaded, and how its inputs are prepared."""

    model: SavedModel

    def prepare(self, inputs: Tensor) -> Tensor:
        """Inputs as the task stores them, (batch, *input_shape), to what the model reads; `Task.prepare`."""
        if self.mean is None or self.std is None:
            return readable(inputs, None)
        precision = float64 if inputs.dtype == float64 else float32
        return readable(inputs, (tensor(self.mean, dtype=precision), tensor(self.std, dtype=precision)))


def save_models(run_dir: Path, engine: Engine, task: Task) -> None:
    """Write the models that the engine has just scored, with their scores.

    They become the best where the global model is better than that of all evaluations before, and as long as none of
    these could score it. A tier's model becomes that tier's best where it is better than all of the tier's before. A
    crash at any moment leaves what there was, or the new models whole.
    """
    evaluation, scored = engine.evaluation, engine.method.scored_architecture
    normalization = task.normalization
    newest, best = run_dir / FOLDER / "newest", run_dir / FOLDER / "best"
    with written_whole(newest) as folder:
        found = []
        for number, (architecture, model) in enumerate(evaluation.scored.items()):
            tiers = [tier for tier, theirs in evaluation.models_of_tiers.items() if theirs == architecture]
            data = safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in model.weights.items()})
            saved = SavedModel(
                file="global.safetensors" if architecture == scored else f"sub-model-{number}.safetensors",
                sha256=hashlib.sha256(data).hexdigest(),
                family=model.family.spec(),
                architecture=architecture.to_json(),
                is_global=architecture == scored,
                tiers=tiers,
                exits=model.exits,
                score=evaluation.model_scores[architecture],
            )
            (folder / saved.file).write_bytes(data)
            found.append(saved)
        contents = SavedModels(
            round=engine.method.round,
            task=task.spec.name,
            metric=task.metric.name,
            higher_is_better=task.metric.scale.higher_is_better,
            classes=task.classes,
            input_shape=list(task.input_shape),
            mean=normalization and normalization[0].tolist(),
            std=normalization and normalization[1].tolist(),
            input_dtype=str(task.test.inputs.dtype).removeprefix("torch."),
            label_names=list(task.label_names),
            columns=list(task.columns),
            models=found,
        )
        (folder / FACTS).write_text(contents.model_dump_json(indent=2) + "\n")
    score = evaluation.model_scores.get(scored)
    before, rank = _score(best), task.metric.scale.rank
    if before is None or (score is not None and rank(score) > rank(before)):
        with written_whole(best) as folder:
            for path in newest.iterdir():
                _link(path, folder / path.name)
    for saved in found:
        for tier in saved.tiers:
            best_of_tier = _folder_of_tier(run_dir, tier)
            if evaluation.tests_on_devices and tier not in evaluation.tier_scores:
                continue  # none of its devices scored the model, and how others did says nothing of it
            own = saved.model_copy(update={"score": evaluation.tier_scores.get(tier, saved.score)})
            before = _score(best_of_tier, tier)
            if before is None or rank(own.score) > rank(before):
                with written_whole(best_of_tier) as folder:
                    _link(newest / saved.file, folder / saved.file)
                    alone = contents.model_copy(update={"models": [own]})
                    (folder / FACTS).write_text(alone.model_dump_json(indent=2) + "\n")


def tiers_of(run_dir: Path) -> list[str]:
    """Return the tiers of which a run's newest evaluation has a model."""
    folder = newest_whole(run_dir / FOLDER / "newest")
    return [] if folder is None else sorted({tier for model in _contents(folder).models for tier in model.tiers})


def drop_models_after(run_dir: Path, round: int) -> None:
    """Remove the models of evaluations after a round: a run that goes on from there has not had them."""
    for folder in (run_dir / FOLDER).glob("*"):
        try:
            later = _contents(folder).round > round
        except ModelError:
            continue  # one that is not whole is passed over by whoever reads as well
        if later:
            shutil.rmtree(folder)


def load_model(
    run_dir: Path | str, which: Which = "best", tier: str | None = None, architecture: Architecture | None = None
) -> tuple[nn.Module, ModelInfo]:
    """Read a model of a run, in evaluation mode: it says what it said when it was scored.

    It maps prepared inputs (batch, *input shape) to logits (batch, classes); `ModelInfo.prepare` prepares them.

    Raises:
        ModelError: where the run has no such model, or its files are not what was written.
    """
    path, info = find_model(run_dir, which, tier, architecture)
    saved = info.model
    with raised_as(ModelError, f"cannot read the model {path}: ", OSError):
        data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != saved.sha256:
        raise ModelError(f"{path} is not the file that was written: its sha256 is not the one in {FACTS}")
    try:
        with modules_of(Path(run_dir)):
            module = network_of(saved.family, saved.architecture, data, saved.exits)
            _check_same_modules(Path(run_dir), saved.family)
    except PluginError as error:
        raise ModelError(f"{run_dir} has a model of your own, which is not made again: {error}") from error
    except (ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path} does not fit what {FACTS} says of it: {one_line(str(error))}") from error
    return module, info


def find_model(
    run_dir: Path | str, which: Which = "best", tier: str | None = None, architecture: Architecture | None = None
) -> tuple[Path, ModelInfo]:
    """Return the file with the tensors of a model of a run, which is not read, and the model's facts.

    Args:
        which: of the best evaluation (the earliest of several), or of the newest. The best is that of the tier's own
            score where a tier is named, and else of the global model's, or the newest where none could score that.
        tier: the model of a tier's devices; None is the global model.
        architecture: in place of a tier, the model of an architecture that was scored.

    Raises:
        ModelError: where the run has no such model.
    """
    if which not in ("best", "newest"):
        raise ModelError(f"which = {which!r}: a run has a 'best' and a 'newest' evaluation")
    if not isinstance(tier, str | None):
        raise ModelError(f"tier = {tier!r}: must be the name of a tier, or None for the global model")
    if tier is not None and architecture is not None:
        raise ModelError(f"the model of the tier {tier!r} or that of an architecture: give one of them")
    folder = newest_whole(Path(run_dir) / FOLDER / which)
    if tier is not None and which == "best":
        of_tier = newest_whole(_folder_of_tier(Path(run_dir), tier))
        folder = of_tier or newest_whole(Path(run_dir) / FOLDER / "newest")  # which says what tiers there are
    if folder is None:
        raise ModelError(_why_no_models(Path(run_dir)))
    contents = _contents(folder)
    if architecture is not None:
        wanted = [m for m in contents.models if m.architecture == architecture.to_json()]
    else:
        wanted = contents.of(tier)
    saved = next(iter(wanted), None)
    if saved is None and architecture is not None:
        there = "; ".join(str(model.architecture) for model in contents.models)
        raise ModelError(f"{folder} holds no model of the architecture {architecture.to_json()}; there are {there}")
    if saved is None:
        tiers = sorted(tier for model in contents.models for tier in model.tiers)
        has = f"there are {', '.join(tiers)}" if tiers else NO_TIERS
        missing = "global model, which could not be scored; of tiers" if tier is None else f"model of a tier {tier!r};"
        raise ModelError(f"{folder} holds no {missing} {has}")
    return folder / saved.file, ModelInfo(**contents.model_dump(exclude={"models"}), model=saved)


@contextmanager
def modules_of(run_dir: Path) -> Iterator[None]:
    """For the time of a `with` block, look for modules in a run's copies of them; where it has none, where one types.

    Runs of earlier versions have none. One thread at a time, because modules are the whole process's.

    Raises:
        ModelError: a copy is not what it was when the run began, or the process has another version of it.
    """
    expected = _plugins(run_dir)
    if not expected:
        yield
        return
    kept = run_dir / MODULES
    with _LOOKING:
        with raised_as(ModelError, f"{run_dir} has a model of your own, which is not made again: "):
            check_kept(kept, expected)
        with looked_for_beside(kept if kept.is_dir() else Path.cwd()):
            yield


def _plugins(run_dir: Path) -> Mapping[str, str]:
    """The hashes of the modules from outside with which a run began; {} where there is no run."""
    try:
        return read_config(run_dir).plugins
    except JournalError:
        return {}


def _check_same_modules(run_dir: Path, family: object) -> None:
    """Raise PluginError unless the modules that a family comes from, now imported, are those of the run's beginning."""
    before = _plugins(run_dir)
    now = digests(map(top_module, _references(family)))
    if changed := [name for name, digest in now.items() if before.get(name, digest) != digest]:
        raise PluginError(f"{', '.join(changed)} from outside the project changed since the run began")


def _references(value: object) -> Iterator[str]:
    """All references in what a family is made from, those of the members of a choice too."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _references(inner)
    elif isinstance(value, str) and is_reference(value):
        yield value


def _why_no_models(run_dir: Path) -> str:
    if not run_dir.is_dir():
        return f"there is no folder {run_dir}"
    try:
        read_config(run_dir)
        evaluated = any(record.score_by_tier is not None for record in read_rounds(run_dir))
        summary = read_summary(run_dir)
    except JournalError as error:
        return str(error)
    if not evaluated:
        failed = summary is not None and summary.status == "failed"
        when = "failed before its first evaluation" if failed else "has no evaluation yet"
        return f"{run_dir} holds no models: none was ever written, because the run {when}"
    return (
        f"{run_dir} holds no models: they are written when they are scored on the server, which those of methods "
        "that leave models on devices never are"
    )


def as_own_class(network: nn.Module, info: ModelInfo) -> nn.Module:
    """Return the network of a user's module as the user's class, as far as that answers alike."""
    network = network.alone if isinstance(network, Chosen) else network
    if isinstance(network, Program):
        from wildflower.models.traced.own_module import own_module  # which traces

        _, family, own = make_family(info.model.family).member_of(Architecture.from_json(info.model.architecture))
        assert isinstance(family, Traced)
        return own_module(family, own, network) or network
    return network.module if isinstance(network, AnyNetwork) else network


def _folder_of_tier(run_dir: Path, tier: str) -> Path:
    """Where a tier's best model is. Not under the tier's name, which may be any text."""
    return run_dir / FOLDER / f"tier-{hashlib.sha256(tier.encode()).hexdigest()[:16]}"


def _score(folder: Path, tier: str | None = None) -> float | None:
    """The score of the global model, or of a tier's, in the newest whole folder; None where none can be read."""
    whole = newest_whole(folder)
    try:
        found = [] if whole is None else _contents(whole).of(tier)
    except ModelError:
        return None
    return found[0].score if found else None


def _contents(folder: Path) -> SavedModels:
    try:
        found = SavedModels.model_validate_json((folder / FACTS).read_bytes())
    except OSError as error:
        raise ModelError(f"{folder / FACTS} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ModelError(f"{folder / FACTS} cannot be read: {in_words(error)}") from error
    if not found.models or sum(model.is_global for model in found.models) > 1:
        raise ModelError(f"{folder / FACTS} names no model, or several global ones")
    return found


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has one name per file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
