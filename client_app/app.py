"""The ClientApp: hands every message on to where it is worked on.

Many simulated devices share this process. On hardware Flower starts this process anew for every message; the work is
done by the device's worker, which has Python, torch and the data loaded already. So nothing here imports torch.
"""

from __future__ import annotations

import json

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from wildflower.client_app import ending, worker
from wildflower.messages.error import MessageError
from wildflower.messages.flower_records import make_records, read_records, release
from wildflower.plugins.raised_as import raised_as

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do the work orders of a batch."""
    return _answer("train", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the models of a batch."""
    return _answer("evaluate", message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Return which device this node carries, and what it can spend now; or a step of secure aggregation."""
    return _answer("query", message, context)


@app.query("data")
def data(message: Message, context: Context) -> Message:
    """Return what this node's device says of the data that it holds itself."""
    return _answer("data", message, context)


@app.query("delivery")
def delivery(message: Message, context: Context) -> Message:
    """Check a model that this node's device is to use, and return whether it uses it."""
    return _answer("delivery", message, context)


def _answer(kind: str, message: Message, context: Context) -> Message:
    # A query for a report has no content.
    text, arrays = read_records(message.content, f"the {kind} message") if len(message.content) else ("", [])
    if text and _is_simulated(text):
        from wildflower.client_app import work

        reply = work.do(kind, text, arrays, context.node_config)
    else:
        release(message.content)  # the weights are then in `arrays` alone, which the worker's side empties
        with ending.ends_for_sure():
            reply = worker.ask(kind, text, arrays, context.node_config)
    return Message(make_records(*reply), reply_to=message)


def _is_simulated(text: str) -> bool:
    """Say whether a batch's devices share this process; whoever works on it checks the rest.

    They do in Flower's simulation, whose devices keep their state where the server says. Where nodes of a deployment
    act as workers, the server does not say where, and the node's own worker does the work.
    """
    with raised_as(MessageError, "the message is not JSON: "):
        batch = json.loads(text)
    return isinstance(batch, dict) and batch.get("shared_process") is True and bool(batch.get("state_dir"))
