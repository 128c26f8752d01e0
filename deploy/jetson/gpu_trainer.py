#!/usr/bin/env python3
"""Trains on a Jetson's GPU for a Wildflower node that runs in a container.

NVIDIA builds PyTorch for the Python of each JetPack (4.6: 3.6, 5: 3.8, 6: 3.10) and Flower needs 3.11, so that the node
cannot use the GPU. It sends what is to be computed over a Unix socket to this program, which runs in the board's own
Python: the graph of the loss as a list of operators, the weights, and one batch after the other. This file needs Python
3.6, PyTorch 1.10 and nothing else.

    python3 gpu_trainer.py --socket /run/wildflower/gpu.sock [--device cpu]

A message is the length of a JSON header, the header, and the arrays whose sizes are in it; `client_app/board_gpu.py` is
the other end. Nothing that arrives is executed: an operator is a name out of `OPERATORS`. The socket is its user's
alone.
"""

import argparse
import ctypes
import json
import os
import platform
import socket
import struct
import sys
import traceback

import torch
import torch.nn.functional as F

PROTOCOL = 1
LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 2**26
MAX_ARRAYS_BYTES = 2**33
SILENCE_SECONDS = 600.0  # the other end decodes and augments a batch in between, and no more
TYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
NAMES = {kind: name for name, kind in TYPES.items()}
# PyTorch's allocator takes segments of 20 MiB for tensors of 1 MiB and more, and libraries take workspaces.
SEGMENTS_BYTES = 64 * 2**20
# What PyTorch says on CUDA and on the CPU, and cuBLAS and cuDNN.
NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")


# Messages ------------------------------------------------------------------------------------------------------------


def send(link, header, tensors=()):
    arrays = [as_bytes(tensor) for tensor in tensors]
    described = [{"shape": list(tensor.shape), "type": NAMES[tensor.dtype]} for tensor in tensors]
    text = json.dumps(dict(header, tensors=described, sizes=[len(array) for array in arrays])).encode()
    link.sendall(LENGTH.pack(len(text)) + text)
    for array in arrays:
        link.sendall(array)


def receive(link):
    """-> (header, tensors on the CPU). EOFError where the other end is gone, ValueError for what is no message."""
    (length,) = LENGTH.unpack(read(link, LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes: at most {MAX_HEADER_BYTES}")
    header = json.loads(read(link, length).decode())
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    sizes, described = header.pop("sizes", None), header.pop("tensors", None)
    if not isinstance(sizes, list) or not isinstance(described, list) or len(sizes) != len(described):
        raise ValueError("the header does not say which tensors follow it")
    if not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) > MAX_ARRAYS_BYTES:
        raise ValueError(f"tensors of {sizes} bytes: at most {MAX_ARRAYS_BYTES} in all")
    return header, [as_tensor(read(link, size), description) for size, description in zip(sizes, described)]


def read(link, nbytes):
    data = bytearray(nbytes)
    view, done = memoryview(data), 0
    while done < nbytes:
        count = link.recv_into(view[done:])
        if count == 0:
            raise EOFError(f"the connection ended after {done} of {nbytes} bytes")
        done += count
    return data


def as_tensor(data, description):
    kind, shape = TYPES[description["type"]], description["shape"]
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def as_bytes(tensor):
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


# Operators -----------------------------------------------------------------------------------------------------------


def batch_norm(x, mean, variance, weight, bias, momentum, epsilon):
    return F.batch_norm(x, mean, variance, weight, bias, True, momentum, epsilon)


def attention(query, key, value):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return scores.softmax(dim=-1) @ value


def unflatten(x, dim, sizes):
    return x.reshape(list(x.shape[:dim]) + list(sizes) + list(x.shape[dim:][1:]))


def getitem(x, index):
    return x[tuple(index) if isinstance(index, list) else index]


OPERATORS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "truediv": lambda x, y: x / y,
    "floordiv": lambda x, y: x // y,
    "getitem": getitem,
    "shape": lambda x: x.shape,
    "cat": torch.cat,
    "stack": torch.stack,
    "detach": lambda x: x.detach(),
    "flatten": lambda x, *dims: x.flatten(*dims),
    "masked_fill": lambda x, mask, value: x.masked_fill(mask, value),
    "mean": lambda x, *dims: x.mean(*dims),
    "sum": lambda x, *dims: x.sum(*dims),
    "permute": lambda x, *dims: x.permute(*dims),
    "reshape": lambda x, *sizes: x.reshape(*sizes),
    "transpose": lambda x, one, other: x.transpose(one, other),
    "unflatten": unflatten,
    "attention": attention,
    "conv1d": F.conv1d,
    "conv2d": F.conv2d,
    "linear": F.linear,
    "batch_norm": batch_norm,
    "layer_norm": F.layer_norm,
    "embedding": F.embedding,
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "dropout": F.dropout,
    "max_pool1d": F.max_pool1d,
    "max_pool2d": F.max_pool2d,
    "avg_pool1d": F.avg_pool1d,
    "avg_pool2d": F.avg_pool2d,
    "adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "log_softmax": F.log_softmax,
    "cross_entropy": F.cross_entropy,
    "nll_loss": F.nll_loss,
    "kl_div": F.kl_div,
}


class Graph:
    """A loss as a list of steps; step 0 is the inputs, step 1 the labels, the last one the loss."""

    def __init__(self, steps):
        self.steps = steps
        self.last_use = {}  # step -> the step after which its result is not needed any more
        for number, step in enumerate(steps):
            if step["operator"] not in OPERATORS:
                raise ValueError(f"there is no operator {step['operator']!r}")
            for used in references(step["arguments"]) + references(step["options"]):
                if not 0 <= used < number + 2:
                    raise ValueError(f"step {number + 2} reads step {used}")
                self.last_use[used] = number

    def loss(self, inputs, labels, tensors, min_momentum):
        results = {0: inputs, 1: labels}
        for number, step in enumerate(self.steps):
            arguments = resolve(step["arguments"], results, tensors)
            options = resolve(step["options"], results, tensors)
            if step["operator"] == "batch_norm":
                arguments[5] = max(arguments[5], min_momentum)
            results[number + 2] = OPERATORS[step["operator"]](*arguments, **options)
            for used in [used for used in results if self.last_use.get(used, -1) == number]:
                del results[used]
        return results[len(self.steps) + 1]


def references(value):
    """The steps that a value refers to."""
    if isinstance(value, list):
        return [used for item in value for used in references(item)]
    if isinstance(value, dict):
        if set(value) == {"step"}:
            return [value["step"]]
        return [used for item in value.values() for used in references(item)]
    return []


def resolve(value, results, tensors):
    """A value with results, tensors and slices in place of what refers to them."""
    if isinstance(value, list):
        return [resolve(item, results, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"step"}:
        return results[value["step"]]
    if set(value) == {"tensor"}:
        return tensors[value["tensor"]]
    if set(value) == {"slice"}:
        return slice(*resolve(value["slice"], results, tensors))
    return {key: resolve(item, results, tensors) for key, item in value.items()}


# Training ------------------------------------------------------------------------------------------------------------


def make_optimizer(parameters, settings):
    rate, decay = settings["learning_rate"], settings["weight_decay"]
    if settings["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=settings["momentum"], weight_decay=decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings["optimizer"]]
    return kind(parameters, lr=rate, betas=tuple(settings["betas"]), weight_decay=decay)


class Job:
    """One training. The regularizer is pull / 2 ||w - w_received||^2 - <correction, w>."""

    def __init__(self, header, given, device):
        self.device = device
        self.before_bytes = held_bytes(device)
        limit(device, header["memory_bytes"])
        torch.manual_seed(header["seed"])
        roles = header["roles"]  # [name, "parameter", "buffer", "constant" or "correction"] of every tensor
        self.tensors, self.parameters, self.kept, self.corrections = {}, {}, [], {}
        for (name, role), tensor in zip(roles, given):
            tensor = tensor.to(device)
            if role == "correction":
                self.corrections[name] = tensor
                continue
            self.tensors[name] = tensor
            if role != "constant":
                self.kept.append(name)
            if role == "parameter":
                self.parameters[name] = tensor.requires_grad_()
        self.graph = Graph(header["graph"])
        self.optimizer = make_optimizer(list(self.parameters.values()), header["training"])
        self.clip_norm = header["training"]["clip_norm"]
        self.pull = header["pull"]
        self.pull_is_reported = header["pull_is_reported"]  # whether the first term is in the loss that is reported
        self.received = {}
        if self.pull or self.corrections:
            self.received = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.new_statistics = header["new_statistics"]
        self.steps = 0

    def step(self, inputs, labels):
        self.steps += 1
        for parameter in self.parameters.values():
            parameter.grad = None
        min_momentum = 1.0 / self.steps if self.new_statistics else 0.0
        loss = self.graph.loss(inputs.to(self.device), labels.to(self.device), self.tensors, min_momentum)
        loss.backward()
        reported = float(loss.detach())
        for name, received in self.received.items():
            parameter = self.parameters[name]
            away = parameter.detach() - received
            if self.pull_is_reported:
                reported += self.pull / 2 * float(away.square().sum())
            gradient = self.pull * away
            if name in self.corrections:
                gradient -= self.corrections[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.clip_norm)
        self.optimizer.step()
        return reported

    def peak_bytes(self):
        if self.device.type != "cuda":
            return None
        return max(0, torch.cuda.max_memory_allocated(self.device) - self.before_bytes)

    def results(self):
        """Names and tensors, on the CPU."""
        return self.kept, [self.tensors[name].detach().cpu() for name in self.kept]


def held_bytes(device):
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def limit(device, limit_bytes):
    """Let PyTorch refuse memory beyond so many bytes of tensors more than it holds; None: all there is."""
    if device.type != "cuda":
        return
    share = 1.0
    if limit_bytes is not None:
        allowed_bytes = torch.cuda.memory_reserved(device) + limit_bytes + SEGMENTS_BYTES
        share = min(1.0, allowed_bytes / torch.cuda.get_device_properties(device).total_memory)
    torch.cuda.set_per_process_memory_fraction(share, device)


def serve_one(link, device):
    """Answer one node until it is done or gone."""
    job = None
    while True:
        try:
            header, tensors = receive(link)
        except EOFError:
            return
        try:
            if header["do"] == "hello":
                send(link, about(device))
            elif header["do"] == "begin":
                if header["protocol"] != PROTOCOL:
                    raise ValueError(f"this trainer speaks protocol {PROTOCOL}: install the node anew")
                job = Job(header, tensors, device)
                del tensors  # the board's memory is one: a second copy is not held for as long as the training takes
                send(link, {"begun": True})
            elif job is None:
                raise ValueError(f"begin comes before {header['do']!r}")
            elif header["do"] == "step":
                loss = job.step(*tensors)
                send(link, {"loss": loss, "peak_bytes": job.peak_bytes()})
            elif header["do"] == "finish":
                (names, values), peak_bytes = job.results(), job.peak_bytes()
                del job  # before the answer, because the node then looks how much is free
                give_back(device)
                send(link, {"names": names, "peak_bytes": peak_bytes}, values)
                return
            else:
                raise ValueError(f"nothing is called {header['do']!r}")
        except Exception as error:
            said = str(error).lower()
            no_memory = isinstance(error, MemoryError) or any(words in said for words in NO_MEMORY)
            if not no_memory:
                traceback.print_exc()
            job = tensors = None
            error.__traceback__ = None  # its frames hold tensors
            give_back(device)
            send(link, {"error": f"{type(error).__name__}: {error}", "out_of_memory": no_memory})
            if "cuda error" in said and not no_memory:
                sys.exit("The GPU's context is lost; a new process has to begin anew")
            return


def give_back(device):
    if device.type == "cuda":
        torch.cuda.empty_cache()


def warm_up(device):
    """Load what CUDA and its libraries take, hundreds of megabytes, from the start and not in the first training."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False  # as PyTorch since 1.12
        weight = torch.ones(8, 1, 3, 3, device=device, requires_grad=True)
        features = F.conv2d(torch.ones(4, 1, 8, 8, device=device), weight).flatten(1)
        F.linear(features, torch.ones(2, features.shape[1], device=device)).sum().backward()


def about(device):
    name, total_bytes = "cpu", 0
    if device.type == "cuda":
        name, total_bytes = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    return {
        "protocol": PROTOCOL,
        "device": name,
        "memory_total_bytes": total_bytes,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def is_own_user(link):
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket", required=True, help="where to listen")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it out")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "This Python's PyTorch sees no CUDA device: NVIDIA's build for this JetPack is wanted (docs/deployment.md)"
        )
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # with its number, which memory limits want
    warm_up(device)
    if os.path.exists(given.socket):
        os.unlink(given.socket)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    listener.bind(given.socket)
    os.umask(mask)
    listener.listen(8)
    print(f"Training on {device} with torch {torch.__version__}, Python {platform.python_version()}", flush=True)
    while True:
        link, _ = listener.accept()
        with link:
            try:
                link.settimeout(SILENCE_SECONDS)
                if is_own_user(link):
                    serve_one(link, device)
            except Exception as error:  # whatever one connection brings, the next one is answered
                print(f"A connection was given up: {error!r}", file=sys.stderr, flush=True)
        give_back(device)  # of a node that was gone before it was done


if __name__ == "__main__":
    main()
