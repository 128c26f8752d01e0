"""Models of Hugging Face's `transformers` as modules: made from a configuration, and reading tokens alone."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wildflower.models.added_parts import Added
from wildflower.plugins.extras import needed
from wildflower.plugins.nearest import nearest_part
from wildflower.plugins.reference import PluginError, named

CONFIG = "config"  # among the arguments of a function: the settings of its configuration
SIZES = {"vocabulary": "vocab_size", "pad_id": "pad_token_id"}  # what a task says, as configurations call it
OF_TEXTS = ("labels", "separator")  # what a task says, and no configuration
NAME = "name"  # among the settings of a configuration: the folder or hub name from which all others come


def is_configured(function: object) -> bool:
    """Return whether something is made from a configuration: a class of models, or one that chooses such a class."""
    return inspect.isclass(function) and (
        hasattr(function, "from_config") or getattr(function, "config_class", None) is not None
    )


def with_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a family's arguments with the settings of a model's configuration in place of `model`.

    `model` is a folder, a name on the hub, or a table of settings such as {model_type = "bert", hidden_size = 64}, of
    which `name` may be a folder or a name on the hub. What the task says of its tokens is added to a table without one.

    Raises:
        PluginError: a model of transformers has no `model`, or there is no such configuration.
    """
    found = dict(arguments)
    if "graph" in found:
        return found
    model, sizes = found.pop("model", ""), {name: found.pop(key) for key, name in SIZES.items() if key in found}
    of_texts = {key: found.pop(key) for key in OF_TEXTS if key in found}
    where = str(found.get("function", ""))
    given = found.get("arguments", {})
    given = json.loads(given) if isinstance(given, str) else dict(given)
    if not where or CONFIG in given or not is_configured(function := named(where, nn.Module)):
        pad_id = sizes.get(SIZES["pad_id"])
        return found if pad_id is None else found | {"pad_id": pad_id}
    if not model:
        raise PluginError(
            f"{where} is made from a configuration: family-arguments = \"model = {{model_type = 'bert', hidden_size = "
            '64}", or a folder with its config.json'
        )
    settings = _settings(where, function, dict(model) if isinstance(model, Mapping) else {NAME: str(model)}, sizes)
    of_tokens = {} if settings.get("pad_token_id") is None else {"pad_id": settings["pad_token_id"]}
    if settings.get("type_vocab_size", 1) > 1:
        of_tokens |= {"separator": of_texts.get("separator", -1)}
    # A width cuts neither an adapter's channels nor a rank.
    marks = [mark for added, mark in (("adapter", "*.adapter"), ("lora", "*.lora_A")) if given.get(added)]
    kept = {"keep": (*found.get("keep", ()), *marks)}
    return found | of_tokens | kept | {"arguments": of_texts | given | {CONFIG: _plain(settings)}}


def _settings(where: str, function: object, given: dict[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a configuration by those that are given."""
    with needed("transformers", f"the family {where}"):
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name := given.pop(NAME, ""):
        folder = Path(str(name)).expanduser()
        try:
            config, unknown = AutoConfig.from_pretrained(
                str(folder) if folder.is_dir() else str(name), return_unused_kwargs=True, **given
            )
        except (OSError, ValueError) as error:
            raise PluginError(f"{where}: no configuration in {name}: {str(error).splitlines()[0]}") from None
        settings: dict[str, Any] = config.to_dict()
        if unknown:
            raise PluginError(f"{where}: model has {next(iter(unknown))!r}; {nearest_part(min(unknown), settings)}")
        return settings
    settings = dict(sizes) | given
    kind = settings.pop("model_type", getattr(getattr(function, "config_class", None), "model_type", None))
    if kind is None:
        raise PluginError(f"{where}: model has no model_type, such as 'bert': {given!r}")
    if kind not in CONFIG_MAPPING_NAMES:
        known = nearest_part(str(kind), CONFIG_MAPPING_NAMES)
        raise PluginError(f"{where}: transformers knows no model_type = {kind!r}; {known}")
    return AutoConfig.for_model(kind, **settings).to_dict() | {"model_type": kind}


def made_from(function: Any, values: Mapping[str, Any], classes: int) -> nn.Module:
    """Return a model of a configuration, which leaves out padding and answers with its logits.

    Answers for every token are (batch, classes, positions), as losses want them. `values` beside the configuration are
    those of `Added`. A model without a head of its own gets one, called "classifier".
    """
    with needed("transformers", "a model of transformers"):
        from transformers import AutoConfig

    settings = dict(values[CONFIG]) | {"num_labels": classes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    added = Added.of({key: value for key, value in values.items() if key != CONFIG})
    made: nn.Module = function.from_config(config) if hasattr(function, "from_config") else function(config)
    pad, types = getattr(config, "pad_token_id", None), getattr(config, "type_vocab_size", 1)
    added.put_into(made)
    if headless := getattr(made, "base_model", None) is made:
        if hasattr(made, "pooler"):
            made.pooler = None  # which no head here reads
        dropout = getattr(config, "hidden_dropout_prob", getattr(config, "dropout", 0.0))
        made.add_module("classifier", added.classifier(config.hidden_size, classes, dropout))

    def real(tokens: Tensor) -> Tensor:
        return torch.ones_like(tokens) if pad is None else (tokens != pad).long()

    def without_padding(_: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        more = {}
        if not options and len(inputs) == 1:
            more = {} if pad is None else {"attention_mask": real(inputs[0])}
            if added.separator >= 0 and types > 1:
                more["token_type_ids"] = types_of(inputs[0], added.separator) * real(inputs[0])
        return inputs, options | more

    def logits(module: nn.Module, inputs: tuple[Tensor, ...], answer: Any) -> Any:
        if headless:
            return added.read(module.get_submodule("classifier"), answer[0], real(inputs[0]))
        found = getattr(answer, "logits", answer)
        return found.transpose(1, 2) if isinstance(found, Tensor) and found.dim() == 3 else found

    made.register_forward_pre_hook(without_padding, with_kwargs=True)
    made.register_forward_hook(logits)
    return made


def types_of(tokens: Tensor, separator: int) -> Tensor:
    """Return 1 where a token is of the second text of a pair, or the separator behind it."""
    ends = (tokens == separator).long()
    return (ends.cumsum(1) - ends == 1).long()


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
