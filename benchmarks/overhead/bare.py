"""Contestant 1: a loop in plain PyTorch, without any federated library.

python bare.py DATA_FOLDER ROUNDS FILE_OF_ROUNDS [PARTS]

With PARTS it trains that part of a round's devices alone: 2 stands for half of them.
"""

import sys

import torch
from stock.workload import DEVICES_PER_ROUND, EXAMPLES_PER_DEVICE, network, round_ended, train


def main(data: str, rounds: int, rounds_file: str, devices: int) -> None:
    torch.set_num_threads(1)
    model = network()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(rounds):
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        for device in range(devices):
            model.load_state_dict(weights)
            train(model, data, number * devices + device)
            for name, value in model.state_dict().items():
                total[name].add_(value, alpha=EXAMPLES_PER_DEVICE)
        weights = {name: value / (devices * EXAMPLES_PER_DEVICE) for name, value in total.items()}
        round_ended(rounds_file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], DEVICES_PER_ROUND // int((sys.argv[4:] or [1])[0]))
