"""First weights that exist already: read from a file or a folder, and fitted to the names of a global model."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.frozen import parts_of
from wildflower.models.layers import TensorSpec
from wildflower.models.placement import CLASSES, INPUT, Axis
from wildflower.plugins.extras import needed
from wildflower.plugins.nearest import LIKENESS, did_you_mean

# What a folder of Hugging Face's holds its weights in, the first that is there.
FILES = ("model.safetensors", "pytorch_model.bin")
# What training scripts put a state dict under.
WRAPPERS = ("state_dict", "model_state_dict", "model")
SHOWN = 6
GAMMA_AND_BETA = {"gamma": "weight", "beta": "bias"}  # of norms, in the files of the first BERTs
COUNTER = "num_batches_tracked"  # of PyTorch's batch norm; no model here has it


@dataclass(frozen=True)
class Initial:
    """Weights for a global model.

    Attributes:
        tensors: those that were found, by the global model's names.
        architecture: the sub-model that they are of: the full one, or the published one inside of it.
        missing: tensors of the global model that were not, which are drawn at random.
        left_over: names in the file that nothing was made of.
        source: the file.
        notes: what was changed so that it fits.
    """

    tensors: dict[str, Tensor]
    architecture: Architecture
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    source: Path
    notes: tuple[str, ...] = ()

    def whole(self, family: Family, drawn: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors found, in the global model's sizes; entries outside of the sub-model are as drawn."""
        if self.architecture == family.full():
            return self.tensors
        weights = drawn()
        whole = {name: weights[name].clone() for name in self.tensors}
        family.place(self.architecture).write_into(whole, self.tensors)
        return whole

    def describe(self) -> str:
        """Return what was found, in a few parts of a sentence."""
        text = f"{self.source}: {len(self.tensors)} of {len(self.tensors) + len(self.missing)} tensors"
        for what, names in (("drawn at random", self.missing), ("left over in the file", self.left_over)):
            if names:
                text += f"; {what}: {_some(names)}"
        return "; ".join([text, *self.notes])


def weights_file(source: str) -> Path:
    """Return the file that `initial.weights` stands for; of a name on Hugging Face's hub, where it was downloaded to.

    Raises ValueError where there is none.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        found = next((path / name for name in FILES if (path / name).is_file()), None)
        if found is None and (shards := sorted(path.glob("*.index.json"))):
            raise ValueError(
                f"the weights in the folder {path} are in several files ({shards[0].name}): write them into one, "
                "such as by save_pretrained(FOLDER, max_shard_size='100GB') of transformers"
            )
        if found is None:
            raise ValueError(f"the folder {path} has no weights: neither {' nor '.join(FILES)}")
        return found
    if not _is_hub_name(source):
        raise ValueError(f"there is no file or folder {path}")
    return _downloaded(source)


def folder_of_sizes(source: str) -> Path | None:
    """Return the folder with the configuration of the model that `initial.weights` names; None if there is none."""
    path = Path(source).expanduser()
    if not source or path.is_dir():
        return path if source and (path / "config.json").is_file() else None
    if path.exists() or not _is_hub_name(source):
        return None
    try:
        return _from_hub(source, "config.json").parent
    except ValueError:
        return None


def _is_hub_name(source: str) -> bool:
    return not Path(source).suffix and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) is not None


def _downloaded(name: str) -> Path:
    why = ""
    for file in FILES:
        try:
            return _from_hub(name, file)
        except ValueError as error:
            why = why or str(error)
    raise ValueError(f"there is no file or folder {name}, and no such model could be had from the hub: {why}")


def _from_hub(name: str, file: str) -> Path:
    """Return a file of a model on Hugging Face's hub, where it was downloaded to; ValueError if it cannot be had."""
    with needed("huggingface_hub", "a model of the hub"):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    try:
        return Path(hf_hub_download(name, file))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ValueError(str(error).strip().splitlines()[0]) from None


def digest_of(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def load_initial(file: Path, family: Family, names: Mapping[str, str | bool] | None = None) -> Initial:
    """Read weights for a family's global model.

    Args:
        names: what a name in the file, or some dotted parts of it, is called in the family; "" leaves these parts out,
            False the whole tensor. A prefix such as "bert." is left out or added where more names fit then; where
            `names` calls something otherwise, only if no name fits. `gamma` and `beta` of norms are called `weight` and
            `bias` where that fits. Where still no name fits, names are those of the family's published weights, if it
            has any, and the tensors are of that sub-model.

    Raises:
        ValueError: the file cannot be read, nothing in it fits, most of it is of another architecture and `names` calls
            nothing otherwise, a tensor has another shape, or nothing in the file is called what `names` renames.
    """
    full = wanted = family.tensors(family.full())
    renamed: dict[str, Tensor] = {}
    tensors = _read(file)
    steps = {name: _renamings(name, names or {}) for name in tensors}
    _check_left_sides(names or {}, steps, file)
    for name, tensor in tensors.items():
        new = steps[name][-1]
        if new in renamed:
            raise ValueError(f"{file}: by initial.names two tensors are called {new}, one of them {name}")
        if new:
            renamed[new] = tensor
    # Who says what a name of the file is called here has chosen what to take; false and "" only leave out.
    chosen = any(names.values() if names else ())
    if not (chosen and renamed.keys() & wanted.keys()):
        renamed = _with_prefix(_without_prefix(renamed, wanted, file), wanted)
    renamed = _norms_as_today(renamed, wanted)
    _join_ties(renamed, family.further_names(), file)
    architecture, notes = family.full(), []
    theirs: Mapping[str, str] = {}
    if not renamed.keys() & wanted.keys():
        published, why = _published(family)
        if published is not None:
            architecture, theirs = published
            ours = {called: name for name, called in theirs.items()}
            renamed = {ours.get(n, n): tensor for n, tensor in _without_prefix(renamed, ours, file).items()}
            wanted = family.tensors(architecture)
            notes = [f"they are of the published sub-network of {family.name}, and what is beyond it is drawn"]
            notes += _fit_ends(renamed, wanted, theirs)
    else:
        why = ""
    found = {name: tensor for name, tensor in renamed.items() if name in wanted}
    if not found:
        raise ValueError(
            f"{file} has no tensor of {family.name}: it has {_some(tuple(renamed))}, and the family "
            f"{_some(tuple(full))}; initial.names says how one is called in the other{why}"
        )
    if not chosen:
        _check_architecture(file, family.name, wanted, renamed)
    _check_shapes(file, family, found, wanted, theirs)
    return Initial(
        {n: _as_wanted(tensor, wanted[n].dtype, f"{file}: {theirs.get(n, n)}") for n, tensor in found.items()},
        architecture,
        tuple(name for name in full if name not in found),
        tuple(name for name in renamed if name not in wanted and not _is_counter(name)),
        file,
        tuple(notes),
    )


def _check_shapes(
    file: Path,
    family: Family,
    found: Mapping[str, Tensor],
    wanted: Mapping[str, TensorSpec],
    theirs: Mapping[str, str],
) -> None:
    """Raise ValueError where a tensor of a file has another shape than the model wants."""
    others = [name for name, tensor in found.items() if tuple(tensor.shape) != wanted[name].shape]
    if not others:
        return
    first = others[0]
    text = (
        f"{file}: {theirs.get(first, first)} has shape {tuple(found[first].shape)}, and {family.name} wants "
        f"{wanted[first].shape}"
    )
    if theirs or 2 * len(others) > len(found):
        raise ValueError(
            f"{text}: are these weights of another width or model? {len(others)} of {len(found)} tensors have other "
            "shapes: the family and family-arguments must be those of these weights"
        )
    module, _, own = first.rpartition(".")
    part = module if own in ("weight", "bias") and module else first
    raise ValueError(f"{text}: initial.names = \"'{part}' = false\" leaves it out")


def _as_wanted(tensor: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Return a tensor of a file as a model has it; ValueError if that is no finite number."""
    try:
        converted = (tensor if tensor.layout == torch.strided else tensor.to_dense()).to(dtype).contiguous()
        finite = tensor.is_floating_point() and bool(torch.isfinite(converted).all())
    except (RuntimeError, NotImplementedError):
        raise ValueError(f"{where} is of {tensor.dtype}, which cannot be read as {dtype}") from None
    if not finite:
        raise ValueError(f"{where} holds values that are no finite floating point numbers of {dtype}")
    return converted


def _join_ties(tensors: dict[str, Tensor], further_names: Mapping[str, str], file: Path) -> None:
    """Let tied weights have one name, in place; ValueError where a file has two different tensors for them.

    Files may have all of their names or any one: `safetensors.torch.save_model` keeps one of its own choice.
    """
    for further, first in further_names.items():
        if further not in tensors:
            continue
        tensor = tensors.pop(further)
        if not torch.equal(tensors.setdefault(first, tensor), tensor):
            raise ValueError(
                f"{file}: {further} and {first} are one tensor in the model, and differ in the file; "
                f"initial.names = \"'{further}' = false\" leaves one of them out"
            )


def _published(family: Family) -> tuple[tuple[Architecture, Mapping[str, str]] | None, str]:
    """Return the published sub-model and its names; if the family has no room for it, the end of an error."""
    try:
        return family.published(), ""
    except ValueError as error:
        return None, f"; {error}"


def _fit_ends(tensors: dict[str, Tensor], wanted: Mapping[str, TensorSpec], theirs: Mapping[str, str]) -> list[str]:
    """Fit published tensors to the inputs and the classes of a task, in place; return what was done.

    What reads three color channels reads one gray channel by the sum over them, which is what it makes of an image
    whose channels are equal. A classifier of other classes is left out.
    """
    notes = []
    for name, spec in wanted.items():
        if name not in tensors or tensors[name].dim() != len(spec.shape):
            continue
        groups = [axis.group if isinstance(axis, Axis) else None for axis in spec.axes]
        others = [d for d, size in enumerate(tensors[name].shape) if size != spec.shape[d]]
        if len(others) != 1:
            continue
        [dimension] = others
        has, wants = tensors[name].shape[dimension], spec.shape[dimension]
        if groups[dimension] == CLASSES:
            del tensors[name]
            notes.append(f"left out: {theirs[name]}, which is for {has} classes and not {wants}")
        elif groups[dimension] == INPUT and wants == 1:
            tensors[name] = tensors[name].sum(dimension, keepdim=True)
            notes.append(f"{theirs[name]} is summed over its {has} input channels, for the task has 1")
    return notes


def _check_architecture(file: Path, name: str, wanted: Mapping[str, TensorSpec], given: Mapping[str, Tensor]) -> None:
    """Raise ValueError where fewer than half of the model's tensors are in the file, and fewer than half of the file's.

    Both, because either alone is legitimate: a deeper file gives a model its first layers, and the weights of a few
    layers, or of adapters alone, begin a larger model. A few equal names, such as those of embeddings, are neither: the
    rest of the model would be trained from nothing. Heads do not count, which every task has for itself, and neither do
    counters of batch norm, which fit nowhere.
    """
    given = {tensor: value for tensor, value in given.items() if not _is_counter(tensor)}
    body = [tensor for tensor, spec in wanted.items() if not spec.of_classes]
    fitting, used = sum(tensor in given for tensor in body), sum(tensor in wanted for tensor in given)
    if 2 * fitting < len(body) and 2 * used < len(given):
        lacking = tuple(tensor for tensor in body if tensor not in given)
        over = tuple(tensor for tensor in given if tensor not in wanted)
        raise ValueError(
            f"{file} is of another architecture than {name}: of the model's {len(body)} tensors that are no heads it "
            f"has {fitting}, and lacks {_some(lacking)}; of its own {len(given)} tensors the model has {used}, and "
            f"lacks {_some(over)}. Take the family of these weights (of an encoder its `kind`), or where only names "
            "differ, or only a part is wanted, map them by initial.names"
        )


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == COUNTER


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt") as content:
                return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
        except SafetensorError:
            raise ValueError(f"{file} cannot be read: it is no safetensors file, or not a whole one") from None
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise ValueError(
            f"{file} cannot be read as weights only: it holds other objects beside tensors, or is no file of "
            "torch.save; save its state_dict() to a file"
        ) from None
    # What the bytes of a text or of anything else lead to.
    except (RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError):
        raise ValueError(
            f"{file} cannot be read as weights only: it is no file of torch.save, or not a whole one; save the "
            "model's state_dict() to a file"
        ) from None
    return _state(file, content)


def _state(file: Path, content: Any) -> dict[str, Tensor]:
    """Return the tensors of a state dict, or of one inside of what a training script has saved."""
    if isinstance(content, Mapping):
        # Before what lies beside it: a training script may keep a tensor there, such as its best accuracy.
        for wrapper in WRAPPERS:
            if isinstance(content.get(wrapper), Mapping):
                return _state(file, content[wrapper])
        # Parameters want gradients, and what is averaged and sent does not.
        tensors = {str(name): value.detach() for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    has = f"; it has {_some(tuple(map(str, content)))}" if isinstance(content, Mapping) and content else ""
    raise ValueError(
        f"{file} holds no state dict: a mapping of names to tensors, or one with such a mapping as "
        f"{' or '.join(map(repr, WRAPPERS))}{has}"
    )


def _renamings(name: str, names: Mapping[str, str | bool]) -> list[str]:
    """Return a name and what every entry of the table makes of it in turn; "" if the table leaves it out."""
    steps = [name]
    for old, new in names.items():
        if not _is_in(old, steps[-1]):
            continue
        if new is False:
            return [*steps, ""]
        renamed = re.sub(_pattern(old), str(new), steps[-1])
        steps.append(".".join(part for part in renamed.split(".") if part))
    return steps


def _pattern(part: str) -> str:
    """Return what finds a name, or some dotted parts of one, in a name."""
    return rf"(?<![^.]){re.escape(part)}(?![^.])"


def _is_in(part: str, name: str) -> bool:
    return re.search(_pattern(part), name) is not None


def _check_left_sides(names: Mapping[str, str | bool], found: Mapping[str, Sequence[str]], file: Path) -> None:
    """Raise ValueError for an entry of `initial.names` that no tensor of the file is called, nor a part of one.

    Args:
        found: the names in the file, each with what the entries make of it in turn.
    """
    called = {step for steps in found.values() for step in steps}
    for old in names:
        if not any(_is_in(old, step) for step in called):
            known = {*parts_of(found)}.union(*(name.split(".") for name in found))
            meant = did_you_mean(old, known, likeness=LIKENESS)
            hint = meant or f"it has {_some(tuple(found))}"
            raise ValueError(f"{file}: initial.names has {old!r}, and no tensor or part of one is called so; {hint}")


def _without_prefix(tensors: Mapping[str, Tensor], wanted: Mapping[str, object], file: Path) -> dict[str, Tensor]:
    """Return the tensors without the first part of their names that lets most of them fit.

    They stay as they are where as many fit already. A head alone may fit so, which is called alike in many models.
    Raises ValueError where two tensors would have one name.
    """
    fits: dict[str, int] = {}
    for name in tensors:
        prefix, _, rest = name.partition(".")
        fits[prefix] = fits.get(prefix, 0) + (rest in wanted)
    best = max(fits, key=lambda prefix: fits[prefix], default="")
    if fits.get(best, 0) <= len(tensors.keys() & wanted.keys()):
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(f"{best}.")
        if short != name and short in tensors:
            raise ValueError(
                f"{file} has {short} and {name}: initial.names = \"'{best}' = false\" leaves out the latter"
            )
        found[short] = tensor
    return found


def _with_prefix(tensors: Mapping[str, Tensor], wanted: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors under the part of the model that lets most of them fit, such as "bert", of a file of it alone.

    They stay as they are where as many fit already.
    """
    fits = {part: sum(f"{part}.{name}" in wanted for name in tensors) for part in {n.partition(".")[0] for n in wanted}}
    best = max(sorted(fits), key=lambda part: fits[part], default="")
    if fits.get(best, 0) <= len(tensors.keys() & wanted.keys()):
        return dict(tensors)
    return {f"{best}.{name}" if f"{best}.{name}" in wanted else name: tensor for name, tensor in tensors.items()}


def _norms_as_today(tensors: Mapping[str, Tensor], wanted: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors by the names of PyTorch's norms: files of the first BERTs call theirs gamma and beta."""

    def today(name: str) -> str:
        module, _, last = name.rpartition(".")
        new = f"{module}.{GAMMA_AND_BETA[last]}" if last in GAMMA_AND_BETA else name
        return new if new in wanted and new not in tensors and name not in wanted else name

    return {today(name): tensor for name, tensor in tensors.items()}


def _some(names: tuple[str, ...]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def checked_names(names: Mapping[str, Any]) -> Mapping[str, str | bool]:
    """Return the table of `initial.names`; ValueError if an entry is neither a name nor false."""
    for old, new in names.items():
        if not old or not (new is False or (isinstance(new, str) and re.fullmatch(r"[\w.-]*", new))):
            raise ValueError(f"'{old}' = {new!r}: an entry is like 'features.0' = 'stem', or 'classifier' = false")
    return names
