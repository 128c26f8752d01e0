"""Models as files that are used without Wildflower, as `wildflower export` and devices write them.

What is written takes inputs as the task stores them, such as the bytes of an image: preparing them is part of the
program. It says logits, and beside it lies a JSON file with the names of the labels.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from wildflower.devices.validation import one_line
from wildflower.models.architecture import Architecture
from wildflower.models.family import make_family
from wildflower.models.network import MeanOfExits
from wildflower.models.weights import with_weights
from wildflower.plugins.extras import MissingExtraError, check_installed, needed
from wildflower.plugins.invalid import in_words
from wildflower.plugins.reference import PluginError, is_reference, one_sentence
from wildflower.plugins.user_error import UserError

Format = Literal["safetensors", "pt2", "onnx", "pte"]
ProgramFormat = Literal["pt2", "onnx", "pte"]
Program = Callable[[Tensor], Tensor]
FORMATS: tuple[str, ...] = get_args(Format)
LIBRARIES: dict[ProgramFormat, tuple[str, ...]] = {
    "pt2": (),
    "onnx": ("onnxscript", "onnxruntime"),
    "pte": ("executorch",),
}
MAX_BATCH = 1024  # inputs that a program takes at once
CHECKED = 8  # random inputs on which a written program is compared with the model
MAX_DIFFERENCE = 1e-4  # of its logits from the model's, relative to the largest of them
MAX_FACTS_BYTES = 10 * 2**20
DTYPES = {
    "uint8": torch.uint8,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}


class ExportError(UserError):
    """A model that cannot be written or read; the text says why, and what would be right."""


class Described(BaseModel):
    """The inputs and outputs of a model that was scored.

    Attributes:
        input_shape, input_dtype: of one input, without the batch, and as what inputs are stored.
        columns: names of an input's values, in their order, of a table; empty of other inputs.
        mean, std: of the training inputs by channel, with which inputs are normalized; None where they are tokens.
        metric: of its score on the task's test set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    task: str
    input_shape: Annotated[list[Annotated[int, Field(ge=1, le=2**20)]], Field(min_length=1, max_length=4)]
    input_dtype: Literal["uint8", "float32", "float64", "int32", "int64"]
    classes: Annotated[int, Field(ge=1)]
    columns: list[str] = []
    mean: list[float] | None
    std: list[float] | None
    metric: str
    round: int


class Facts(Described):
    """Facts beside an exported model as JSON: how inputs look, and what outputs mean.

    Attributes:
        labels: names of the outputs, in their order: "0", "1" and so on where classes have none; empty where the one
            output is a number.
        family, architecture, exits: from which the network is built again around the tensors of a safetensors file.
        score: the value of `metric`, or that on the tier's devices where they test; of a model that never left its
            device, on that one's examples, and None where it holds none out.
    """

    format: Format
    labels: list[str]
    family: dict[str, Any]
    architecture: dict[str, list[int]]
    exits: Literal["deepest", "mean"]
    score: float | None


def label_texts(names: Sequence[str], classes: int) -> list[str]:
    """Return the names of outputs, which are their numbers where classes have none; none of the one number."""
    return list(names) or ([] if classes == 1 else [str(number) for number in range(classes)])


class Deployed(nn.Module):
    """A model together with how its inputs are prepared: (batch, *input shape) as stored -> (batch, classes)."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module,
        mean: list[float] | None,
        std: list[float] | None,
        dimensions: int,
        precision: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokens = mean is None or std is None
        per_channel = (-1, *[1] * (dimensions - 1))
        self.register_buffer("mean", torch.tensor(mean or [0.0], dtype=precision).view(per_channel))
        self.register_buffer("std", torch.tensor(std or [1.0], dtype=precision).view(per_channel))

    def forward(self, inputs: Tensor) -> Tensor:
        """Prepare as `wildflower.tasks.task.Task.prepare` does, and ask the model."""
        if self.tokens:
            return self.model(inputs.long())
        return self.model(((inputs.to(self.mean.dtype) - self.mean) / self.std).float())


def facts_path(path: Path) -> Path:
    """Where the facts of an exported model lie: model.pt2.json beside model.pt2."""
    return path.with_name(f"{path.name}.json")


def program_of(deployed: Deployed, facts: Facts, where: str) -> bytes:
    """Return the file of a model that says finite numbers; ExportError for another, or where it cannot be made."""
    with torch.no_grad():
        check_numbers(deployed(examples(facts, CHECKED)), where)
    return written(deployed, facts)


def check_writable(file_format: ProgramFormat) -> None:
    """Raise MissingExtraError where a library is not installed that writes or reads a format."""
    for library in LIBRARIES[file_format]:
        check_installed(library, f"the format {file_format}")


def with_preparation(model: nn.Module, facts: Facts) -> Deployed:
    """A model that prepares its inputs."""
    precision = torch.float64 if facts.input_dtype == "float64" else torch.float32
    return Deployed(model, facts.mean, facts.std, len(facts.input_shape), precision).eval()


def check_numbers(outputs: Tensor, where: str) -> None:
    """Raise ExportError where a model says something that is no number."""
    if not bool(outputs.isfinite().all()):
        raise ExportError(
            f"{where}: what the model says are no finite numbers: its training has diverged; train with a smaller "
            "learning-rate, or with clip-norm"
        )


def examples(facts: Facts, count: int) -> Tensor:
    """Random inputs, always the same, as the task stores them."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, *facts.input_shape)
    if facts.input_dtype in ("float32", "float64"):
        return torch.randn(shape, generator=generator, dtype=DTYPES[facts.input_dtype])
    highest = 2 if facts.mean is None else 256  # tokens: the first two of any vocabulary
    return torch.randint(0, highest, shape, generator=generator).to(DTYPES[facts.input_dtype])


def _exported(deployed: Deployed, facts: Facts, *, one: bool = False) -> torch.export.ExportedProgram:
    """The program over batches of any size up to `MAX_BATCH`, or over `one` input at a time."""
    batch = {} if one else {0: torch.export.Dim("batch", min=1, max=MAX_BATCH)}
    with torch.no_grad():
        return torch.export.export(deployed, (examples(facts, 1 if one else 2),), dynamic_shapes=(batch,))


def written(deployed: Deployed, facts: Facts) -> bytes:
    """The file of a model; ExportError where PyTorch cannot make a program of a user's module."""
    try:
        return _WRITERS[facts.format](deployed, facts)
    except (ExportError, MissingExtraError):
        raise
    except Exception as error:  # of any kind: a model is any Python
        name = facts.family["name"]
        if not is_reference(name):
            raise
        why = one_line(one_sentence(error))
        raise ExportError(
            f"{name} cannot be written as {facts.format}: {why}. Its weights can: --format safetensors"
        ) from error


def _pt2(deployed: Deployed, facts: Facts) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(_exported(deployed, facts), buffer)
    return buffer.getvalue()


def _onnx(deployed: Deployed, facts: Facts) -> bytes:
    with needed("onnxscript", "the format onnx"):
        import onnxscript  # noqa: F401  what torch.onnx translates with
    with _quietly():
        program = torch.onnx.export(
            _exported(deployed, facts), input_names=["inputs"], output_names=["logits"], dynamo=True, verbose=False
        )
    assert program is not None
    return program.model_proto.SerializeToString()


def _pte(deployed: Deployed, facts: Facts) -> bytes:
    with needed("executorch", "the format pte"):
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
    with _quietly():
        # Its memory is planned beforehand, so that a board holds no more than one input needs.
        one = _exported(deployed, facts, one=True)
        lowered = to_edge_transform_and_lower(one, partitioner=[XnnpackPartitioner()])
        return bytes(lowered.to_executorch().buffer)


def _safetensors(deployed: Deployed, facts: Facts) -> bytes:
    network = deployed.model.model if isinstance(deployed.model, MeanOfExits) else deployed.model
    return safetensors.torch.save(
        {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    )


_WRITERS: dict[str, Callable[[Deployed, Facts], bytes]] = {
    "safetensors": _safetensors,
    "pt2": _pt2,
    "onnx": _onnx,
    "pte": _pte,
}


# Reading -------------------------------------------------------------------------------------------------------------


def read_facts(path: Path) -> Facts:
    """The facts beside an exported model. Raises ExportError."""
    beside = facts_path(path)
    try:
        if beside.stat().st_size > MAX_FACTS_BYTES:
            raise ExportError(f"{beside}: no facts of a model have more than {MAX_FACTS_BYTES} bytes")
        facts = Facts.model_validate_json(beside.read_bytes())
    except OSError as error:
        raise ExportError(f"cannot read {beside}, which belongs to {path}: {error.strerror}") from None
    except ValidationError as error:
        raise ExportError(f"{beside} does not hold the facts of a model: {in_words(error)}") from None
    if path.suffix != f".{facts.format}":
        raise ExportError(f"{beside} is about a .{facts.format} file, and not about {path.name}")
    return facts


def read_program(path: Path) -> tuple[Program, Facts]:
    """An exported model, ready to be asked: inputs as the task stores them, at most `MAX_BATCH` -> logits.

    Raises ExportError where it cannot be read, or its library is not installed.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise ExportError(f"{path}: an exported model ends in {', '.join(f'.{name}' for name in FORMATS)}")
    if not path.is_file():
        raise ExportError(f"{path} is no file")
    facts = read_facts(path)
    try:
        return _READERS[facts.format](path, facts), facts
    except ExportError:
        raise
    except Exception as error:  # each library has its own
        raise ExportError(f"{path} cannot be read as {facts.format}: {one_line(str(error))}") from None


def network_of(family: dict[str, Any], architecture: dict[str, list[int]], data: bytes, exits: str) -> nn.Module:
    """The network of an architecture around the tensors of a safetensors file, in evaluation mode.

    Raises ValueError, RuntimeError or SafetensorError where they do not go together.
    """
    network = with_weights(make_family(family), Architecture.from_json(architecture), safetensors.torch.load(data))
    return (MeanOfExits(network) if exits == "mean" else network).eval()


def _read_safetensors(path: Path, facts: Facts) -> Program:
    try:
        model = network_of(facts.family, facts.architecture, path.read_bytes(), facts.exits)
    except PluginError as error:
        raise ExportError(
            f"{path} has the weights of a model of your own, whose module belongs beside it: {error}. A file of "
            "another format, such as --format pt2, needs no module"
        ) from None
    return asked(with_preparation(model, facts))


def asked(module: nn.Module) -> Program:
    """A module as a program."""

    def ask(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return module(inputs)

    return ask


def _read_onnx(path: Path, facts: Facts) -> Program:
    with needed("onnxruntime", "the format onnx"):
        import onnxruntime
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])


def _read_pte(path: Path, facts: Facts) -> Program:
    with needed("executorch", "the format pte"):
        from executorch.runtime import Runtime
    program = Runtime.get().load_program(path)
    method = program.load_method("forward")
    assert method is not None

    def ask(inputs: Tensor) -> Tensor:
        # A method reads the memory of its program, which lives as long as this function names it.
        assert program is not None
        return torch.cat([method.execute([one.contiguous()])[0].clone() for one in inputs.split(1)])

    return ask


_READERS: dict[str, Callable[[Path, Facts], Program]] = {
    "safetensors": _read_safetensors,
    "pt2": lambda path, _: asked(torch.export.load(path).module()),
    "onnx": _read_onnx,
    "pte": _read_pte,
}


def compare(deployed: Deployed, path: Path, facts: Facts) -> None:
    """Raise ExportError where what was written says something else than the model."""
    program, _ = read_program(path)
    inputs = examples(facts, CHECKED)
    with torch.no_grad():
        right = deployed(inputs)
    far = float((program(inputs) - right).abs().max())
    most = MAX_DIFFERENCE * max(1.0, float(right.abs().max()))
    if not far <= most:  # also where it is no number
        raise ExportError(
            f"{path} says other things than the model: logits differ by {far:.3g}, at most {most:.3g} is right"
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Exporters warn of their own future, and log every pass."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
