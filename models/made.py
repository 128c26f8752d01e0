"""Modules that a function of the user's makes, with what their constructors want of the task."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from wildflower.models.held import ORTHOGONAL, check_parts
from wildflower.models.of_transformers import CONFIG, is_configured, made_from
from wildflower.plugins.reference import PluginError, named, one_sentence


def made_module(
    reference: str, arguments: Mapping[str, Any], input_shape: tuple[int, ...], classes: int, where: str = ""
) -> nn.Module:
    """Return what a function makes, or a class of modules.

    It gets the task's `classes` (or `num_classes`) and `input_shape` where it has parameters of these names, and
    `num_classes` where it takes parameters that it does not name and passes them on, as torchvision's and timm's do.

    Args:
        reference: such as "package.module:function".
        where: what a message begins with; the reference by default.

    Raises:
        PluginError: it fails, or returns what cannot be trained, with what to do.
    """
    where = where or reference
    function = named(reference, nn.Module)
    parameters = _parameters(function)
    task = {"classes": classes, "num_classes": classes, "input_shape": input_shape}
    values = {key: value for key, value in task.items() if key in parameters} | dict(arguments)
    try:
        if CONFIG in values and is_configured(function):
            module = made_from(function, values, classes)
        else:
            module = _called(function, values, classes)
    except Exception as error:  # of any kind: it is the user's code
        raise PluginError(f"{where} fails: {one_sentence(error)}{_hint(error)}") from error
    tensors = chain(module.parameters(), module.buffers()) if isinstance(module, nn.Module) else ()
    if (lazy := next(filter(is_lazy, tensors), None)) is not None:
        raise PluginError(
            f"{where} has a lazy layer ({type(lazy).__name__}), which has no shape before "
            "its first batch: say its sizes, as nn.Linear does"
        )
    if not isinstance(module, nn.Module):
        raise PluginError(f"{where} returns {type(module).__name__}, not an nn.Module")
    check_parts(where, module)
    return module


def _called(function: Callable[..., Any], values: Mapping[str, Any], classes: int) -> Any:
    """Return what a function makes of values, and of the number of classes if it may be told it without a name."""
    passed_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(function).values())
    if passed_on and not {"classes", "num_classes"} & values.keys():
        try:
            return function(**values, num_classes=classes)
        except TypeError as error:  # also from what it is passed on to
            if "'num_classes'" not in str(error):
                raise
    return function(**values)


def _hint(error: Exception) -> str:
    """Advice for an error of a function that makes a network without memory; "" where there is none."""
    if "from_pretrained" in str(error):
        return ": build the network from its configuration, and let initial.weights name the folder of its weights"
    if isinstance(error, TypeError) and re.search("argument.*'(classes|num_classes|input_shape)'", str(error)):
        return ": only what the function itself names among its parameters is filled in"
    if isinstance(error, NotImplementedError) and "meta tensor" in str(error):
        return ": leave .to(device) out, the run moves the network to its device"
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == "orthogonal" and "parametrizations" in frame.filename for frame in frames):
        return ORTHOGONAL
    if any("torch/jit/" in frame.filename for frame in frames):
        return ": leave torch.jit.script and torch.jit.trace out, what they make could not be exported"
    if isinstance(error, RuntimeError) and "meta tensor" in str(error):
        return (
            ": what makes a network must not read the values of parameters, which have none then: use Python's or "
            "NumPy's numbers"
        )
    return ""


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
