"""Made data in the files of the data sets that the papers use, so that an experiment can be tried without those.

Every class has a pattern of its own under noise, so that a network can learn them. Nobody is to report figures of these
data, and no file says that it is the data set whose format it has: `wildflower paper NAME --tiny` alone reads them.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from wildflower.plugins.extras import needed

NOISE = 40
WORDS = ("film", "book", "plot", "play", "scene", "actor", "story", "music", "sound", "light", "stage", "song")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TOKENS = len(SPECIAL) + len(WORDS)
LONGEST = 100  # repetitions in the first text
PEOPLE = 12  # writers of FEMNIST, subjects of UniMiB SHAR


def images(count: int, classes: int, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes (count, *shape) and labels that go round all classes; a class is a pattern of blocks under noise."""
    patterns = np.random.default_rng(0).integers(60, 196, (classes, *shape))
    labels = np.arange(count) % classes
    noise = np.random.default_rng(seed).integers(-NOISE, NOISE, (count, *shape))
    return (patterns[labels] + noise).astype(np.uint8), labels


def write(task: str, folder: Path, *, train: int, test: int) -> None:
    """Write so many examples in the files that a task reads from its `data-dir`.

    Raises:
        KeyError: nothing is made for this task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = task.removeprefix("glue-")
    WRITERS[name if task.startswith("glue-") else task](folder, train, test)


def _parquet(file: Path, columns: Mapping[str, Sequence[object]]) -> None:
    with needed("datasets", "made data in the hub's format"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: list(column) for name, column in columns.items()}), file)


def _png(image: np.ndarray) -> dict[str, object]:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG", compress_level=1)
    return {"bytes": out.getvalue(), "path": None}


def _of_hub(image: str, label: str, classes: int, shape: tuple[int, ...]) -> Callable[[Path, int, int], None]:
    """Return what writes a copy of a data set of images on Hugging Face's hub."""

    def write_copy(folder: Path, train: int, test: int) -> None:
        for seed, (split, count) in enumerate((("train", train), ("test", test))):
            made, labels = images(count, classes, shape, seed)
            columns = {image: [_png(one) for one in made], label: labels.tolist()}
            _parquet(folder / f"{split}-00000-of-00001.parquet", columns)

    return write_copy


def _femnist(folder: Path, train: int, test: int) -> None:
    """One file, of which a tenth of every class is held out to test on."""
    made, labels = images(max(train + test, 62 * 10), 62, (28, 28), 0)
    writers = [f"f{number % PEOPLE:04d}" for number in np.random.default_rng(1).permutation(len(made))]
    columns = {"image": [_png(one) for one in made], "character": labels.tolist(), "writer_id": writers}
    _parquet(folder / "train-00000-of-00001.parquet", columns)


def _idx(folder: Path, train: int, test: int) -> None:
    for seed, (split, count) in enumerate((("train", train), ("t10k", test))):
        made, labels = images(count, 10, (28, 28), seed)
        for name, array in ((f"{split}-images-idx3-ubyte", made), (f"{split}-labels-idx1-ubyte", labels)):
            header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / name).write_bytes(header + array.astype(np.uint8).tobytes())


def _unimib(folder: Path, train: int, test: int) -> None:
    with needed("scipy", "made data in MATLAB's format"):
        from scipy.io import savemat

    count = train + test
    made, labels = images(count, 8, (3 * 151,), 0)
    said = np.stack([labels + 1, np.arange(count) % PEOPLE + 1, np.ones(count)], axis=1)
    savemat(folder / "fall_data.mat", {"fall_data": made.astype(np.float64) / 10})
    savemat(folder / "fall_labels.mat", {"fall_labels": said})


def write_tokenizer(folder: Path, tokens: int = TOKENS) -> Path:
    """Write a tokenizer of whole words, as BERT's, in a folder of Hugging Face's, and return the folder.

    Tokens behind `TOKENS` are of no text.
    """
    with needed("transformers", "a tokenizer"):
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

    unused = (f"[unused{number}]" for number in range(tokens - TOKENS))
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *WORDS, *unused))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = (("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.post_processor = processors.BertProcessing(*ends)
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", **names).save_pretrained(folder)
    return folder


def sentences(labels: Sequence[int], classes: int, rng: np.random.Generator) -> list[str]:
    """Return six words for each label, of which those of its class are more frequent.

    The first text is as long as any real one, because a plan is of the longest.
    """
    size = (len(labels), 6)
    own = np.array(labels)[:, None] + classes * rng.integers(0, len(WORDS) // classes, size)
    numbers = np.where(rng.random(size) < 0.6, own, rng.integers(0, len(WORDS), size))
    found = [" ".join(WORDS[number] for number in row) for row in numbers]
    return [" ".join([found[0]] * LONGEST), *found[1:]]


def _glue(name: str, columns: tuple[str, ...], classes: int, validation: str) -> Callable[[Path, int, int], None]:
    """Return what writes a copy of one of GLUE's tasks; `classes` of 0 are ratings from 0 to 5."""

    def write_copy(folder: Path, train: int, test: int) -> None:
        rng = np.random.default_rng(2)
        for split, count in (("train", train), (validation, test)):
            labels = [number % (classes or 6) for number in range(count)]
            texts = {column: sentences(labels, classes or 6, rng) for column in columns}
            values: Sequence[object] = labels if classes else [float(label) for label in labels]
            _parquet(folder / name / f"{split}-00000-of-00001.parquet", {**texts, "label": values})

    return write_copy


def _shakespeare(folder: Path, train: int, test: int) -> None:
    """A play of as many roles as there are people, each of whom says enough to take part."""
    rng = np.random.default_rng(3)
    lines = []
    for speech in range(4 * PEOPLE):
        lines += [f"ROLE{chr(ord('A') + speech % PEOPLE)}.", " ".join(map(str, rng.choice(WORDS, 140))), ""]
    (folder / "made_gut.txt").write_text("\n".join(lines), encoding="utf-8")


CORPORA = ("smm4h", "ade", "cadec")
ENTITIES = {"smm4h": ("ADE",), "ade": ("ADE", "Drug", "Dosage"), "cadec": ("ADE", "Drug", "Disease")}


def _entities(folder: Path, train: int, test: int) -> None:
    """Three files of sentences whose words are tagged, each with entities of its own."""
    rng = np.random.default_rng(4)
    for corpus in CORPORA:
        kinds = ENTITIES[corpus]
        with (folder / f"{corpus}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range((train + test) // len(CORPORA)):
                numbers = rng.integers(0, len(WORDS), 6)
                tags = [f"B-{kinds[n]}" if n < len(kinds) else "O" for n in numbers]
                file.write(json.dumps({"words": [WORDS[n] for n in numbers], "tags": tags}) + "\n")


WRITERS: dict[str, Callable[[Path, int, int], None]] = {
    "cifar10": _of_hub("img", "label", 10, (32, 32, 3)),
    "cifar100": _of_hub("img", "fine_label", 100, (32, 32, 3)),
    "femnist": _femnist,
    "mnist": _idx,
    "fashion-mnist": _idx,
    "svhn": _of_hub("image", "label", 10, (32, 32, 3)),
    "stl10": _of_hub("image", "label", 10, (96, 96, 3)),
    "unimib-shar": _unimib,
    "shakespeare": _shakespeare,
    "text": _entities,
    "cola": _glue("cola", ("sentence",), 2, "validation"),
    "sst2": _glue("sst2", ("sentence",), 2, "validation"),
    "mrpc": _glue("mrpc", ("sentence1", "sentence2"), 2, "validation"),
    "qqp": _glue("qqp", ("question1", "question2"), 2, "validation"),
    "stsb": _glue("stsb", ("sentence1", "sentence2"), 0, "validation"),
    "mnli": _glue("mnli", ("premise", "hypothesis"), 3, "validation_matched"),
    "qnli": _glue("qnli", ("question", "sentence"), 2, "validation"),
    "rte": _glue("rte", ("sentence1", "sentence2"), 2, "validation"),
}
