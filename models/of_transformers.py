"""Models of Hugging Face's `transformers` as modules: made from a configuration, and reading tokens alone."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wildflower.plugins.extras import needed
from wildflower.plugins.nearest import nearest_part
from wildflower.plugins.reference import PluginError, named

CONFIG = "config"  # among the arguments of a function: the settings of its configuration
SIZES = {"vocabulary": "vocab_size", "pad_id": "pad_token_id"}  # what a task says, as configurations call it


def is_configured(function: object) -> bool:
    """Return whether something is made from a configuration: a class of models, or one that chooses such a class."""
    return inspect.isclass(function) and (
        hasattr(function, "from_config") or getattr(function, "config_class", None) is not None
    )


def with_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a family's arguments with the settings of a model's configuration in place of `model`.

    `model` is a folder, a name on the hub, or a table of settings such as {model_type = "bert", hidden_size = 64}. What
    the task says of its tokens is added to a table.

    Raises:
        PluginError: a model of transformers has no `model`, or there is no such configuration.
    """
    found = dict(arguments)
    if "graph" in found:
        return found
    model, sizes = found.pop("model", ""), {name: found.pop(key) for key, name in SIZES.items() if key in found}
    where = str(found.get("function", ""))
    given = found.get("arguments", {})
    given = json.loads(given) if isinstance(given, str) else dict(given)
    if not where or CONFIG in given or not is_configured(function := named(where, nn.Module)):
        return found
    if not model:
        raise PluginError(
            f"{where} is made from a configuration: family-arguments = \"model = {{model_type = 'bert', hidden_size = "
            '64}", or a folder with its config.json'
        )
    with needed("transformers", f"the family {where}"):
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if isinstance(model, Mapping):
        settings = sizes | dict(model)
        kind = settings.pop("model_type", getattr(getattr(function, "config_class", None), "model_type", None))
        if kind is None:
            raise PluginError(f"{where}: model has no model_type, such as 'bert': {dict(model)!r}")
        if kind not in CONFIG_MAPPING_NAMES:
            known = nearest_part(str(kind), CONFIG_MAPPING_NAMES)
            raise PluginError(f"{where}: transformers knows no model_type = {kind!r}; {known}")
        settings = AutoConfig.for_model(kind, **settings).to_dict() | {"model_type": kind}
    else:
        folder = Path(str(model)).expanduser()
        try:
            settings = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else str(model)).to_dict()
        except (OSError, ValueError) as error:
            raise PluginError(f"{where}: no configuration in {model}: {str(error).splitlines()[0]}") from None
    pad_id = {} if settings.get("pad_token_id") is None else {"pad_id": settings["pad_token_id"]}
    return found | pad_id | {"arguments": given | {CONFIG: _plain(settings)}}


def made_from(function: Any, values: Mapping[str, Any], classes: int) -> nn.Module:
    """Return a model of a configuration, which leaves out padding and answers with its logits.

    Answers for every token are (batch, classes, positions), as losses want them.
    """
    with needed("transformers", "a model of transformers"):
        from transformers import AutoConfig

    settings = dict(values[CONFIG]) | {"num_labels": classes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    made: nn.Module = function.from_config(config) if hasattr(function, "from_config") else function(config)
    pad = getattr(config, "pad_token_id", None)

    def without_padding(_: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        mask = {} if pad is None or options or len(inputs) != 1 else {"attention_mask": (inputs[0] != pad).long()}
        return inputs, options | mask

    def logits(_: nn.Module, __: Any, answer: Any) -> Any:
        found = getattr(answer, "logits", answer)
        return found.transpose(1, 2) if isinstance(found, Tensor) and found.dim() == 3 else found

    made.register_forward_pre_hook(without_padding, with_kwargs=True)
    made.register_forward_hook(logits)
    return made


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that JSON has, without those of files and texts."""
    kept = {}
    for key, value in settings.items():
        if key not in ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "id2label", "label2id"):
            try:
                kept[key] = json.loads(json.dumps(value))
            except TypeError:
                continue
    return kept
