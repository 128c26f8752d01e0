"""What every key of the run configuration means.

The same words stand beside the keys in pyproject.toml, where Flower's own users read them, but which an installed
package does not hold. A test keeps the two equal.
"""

MEANINGS = {
    "task": "data set, and what is learned from it (docs/tasks.md)",
    "data-dir": 'folder with the data; "" looks in the usual places',
    "family": 'global model, and how it is cut (docs/families.md); "" takes the task\'s own',
    "family-arguments": 'of the family, such as "first_channels = 16" (docs/families.md)',
    "partition": "who holds what: iid, dirichlet, natural, strong-and-weak",
    "alpha": "of the Dirichlet partition: smaller is more unequal",
    "test-fraction": "share of each device's examples, kept for its own test",
    "examples-per-device": (
        "iid and dirichlet: every device draws this many, shared ones allowed; 0 deals out all examples once"
    ),
    "strong-devices": "strong-and-weak: the first so many devices, those of the fleet's first group",
    "strong-share": "share of the training examples, that strong devices hold together",
    "strong-test": "what strong devices test on: an equal share of the test set like all others, or the whole",
    "devices": "how many there are in all",
    "workers": "simulated nodes that carry them",
    "fleet": 'a bundled fleet or a .toml file (docs/fleets.md); "" for real devices, one per node',
    "devices-per-round": "that take part in a round, drawn at random",
    "over-selection": "ask this share more, and take the first devices-per-round that answer",
    "memory-fraction": "share of the reported available memory that training may use: the cost may be 10 % off",
    "transfer-seconds": "how long weights may travel one way: sets the payload budget; 0 is no limit",
    "deadline-seconds": "of a round; simulated seconds under a fleet, seconds on hardware; 0 waits for all",
    "report-max-age-seconds": "hardware: ask a node for a new report when its last one is older",
    "below-smallest": 'a device below the smallest architecture: skip it, or give it the "smallest" all the same',
    "both-models": (
        "a device that can afford more than the smallest candidate trains the smallest as well, in the same round"
    ),
    "strategy": (
        "fedavg, fedadam, fedprox, heterofl, fedrolex, federated-dropout, fjord, anycostfl, model-search, "
        "hypemefed, depthfl, scalefl, recipfl"
    ),
    "widths": "candidates; a device gets the widest that fits",
    "rounds": "of the whole run",
    "local-epochs": "passes of a device over its examples in a round",
    "local-steps": "instead of epochs",
    "batch-size": "of local training",
    "optimizer": "sgd, adam, adamw",
    "learning-rate": "of local training",
    "momentum": "of sgd; the other optimizers have none",
    "betas": "of adam and adamw",
    "weight-decay": "of local training",
    "clip-norm": "largest norm of a gradient; 0 does not clip",
    "norm-bound": "largest norm of a device's update, larger ones are scaled down; 0 does not bound (docs/security.md)",
    "schedule": "of the learning rate: steps (at decay-rounds), cosine (down to 0 in the last round)",
    "decay-rounds": "the learning rate is multiplied by decay-factor after each of these rounds",
    "decay-factor": "of the learning rate, at each of decay-rounds",
    "augment": "random crop and flip where the task has them",
    "seed": "of all that is drawn at random: partition, fleet, first weights, rounds",
    "fedavg.use": "all-small, all-large, exclusive, affordable, local",
    "fedprox.mu": "weight of the distance to the global model in a device's loss",
    "fedadam.eta": "learning rate of the server's Adam",
    "fedadam.beta-1": "what its mean of the updates keeps in a round",
    "fedadam.beta-2": "what its mean of their squares keeps in a round",
    "fedadam.tau": "added to the root of the squares: larger is less adaptive",
    "heterofl.dynamic": "every device draws its width anew each round",
    "heterofl.statistics-devices": "devices that take batch norm statistics for an evaluation; 0: devices-per-round",
    "fedrolex.statistics-devices": "as heterofl.statistics-devices",
    "federated-dropout.statistics-devices": "as heterofl.statistics-devices",
    "fjord.distillation": "every batch trains the widest model too, and the narrower one learns what that says",
    "fjord.statistics-devices": "as heterofl.statistics-devices",
    "anycostfl.statistics-devices": "as heterofl.statistics-devices",
    "model-search.searcher": "exact, or the paper's pool",
    "model-search.shares": "of its channels that a layer may keep; 0 removes layers that may be removed",
    "model-search.layer-shares": (
        "of single layers instead, such as \"stem = [1], 'stage3_*' = [0, 0.5]\" (docs/methods.md)"
    ),
    "model-search.least-blocks": "of each stage of a ResNet, or of a transformer: this many blocks stay",
    "model-search.tolerance": "exact: draw among architectures within this share of the optimum's parameters",
    "model-search.epsilon": "pool: probability to stop after each draw",
    "model-search.most-draws": "pool: T_max",
    "model-search.weighting": "of a coordinate's mean over its owners: uniform, examples",
    "model-search.masked-loss": "HeteroFL's masked cross-entropy; false: plain cross-entropy",
    "model-search.statistics-devices": "as heterofl.statistics-devices",
    "hypemefed.rank": "singular vectors of each layer that its hypernetwork sees",
    "hypemefed.hidden": "width of the hypernetworks' two MLPs",
    "hypemefed.epochs": "of the hypernetworks, in every round; the paper has 25",
    "hypemefed.learning-rate": "of the hypernetworks' Adam",
    "hypemefed.guess": (
        "of a deeper layer, from a shallower one: what a device's training changed, or (the paper) its weight"
    ),
    "hypemefed.fill": "what stands for layers behind a device's exit: hypernetwork, owners (nothing), stale",
    "hypemefed.generate": (
        "what is guessed: weights of convolutions and linear layers, or all: biases, norms and heads too"
    ),
    "hypemefed.exits": "devices train all of their exits; false: their deepest one",
    "depthfl.ramp-rounds": "the round from which on exits learn from each other with full weight; 0: from the first",
    "depthfl.alpha": "of FedDyn's regularizer (the paper: 0.1), for which devices keep a correction; 0 leaves it out",
    "scalefl.widths": 'of its levels, one per exit from the shallowest on; "" takes the last of 0.7, 0.7, 0.75, 1',
    "scalefl.gamma": "weight of what early exits learn from the device's last; 0 leaves it out",
    "scalefl.temperature": "of the softmaxes there",
    "recipfl.eta": "learning rate of Adam on the hypernetwork",
    "recipfl.clip-norm": "the most that the norm of its gradient may be",
    "recipfl.transfer": (
        "strong devices train the smallest model too: from their larger one (teacher), from labels (both), not (none)"
    ),
    "recipfl.divergence": 'of what both classifiers read; or "teacher || student"',
    "recipfl.weighting": "of the devices' gradients: sum, or their mean by examples",
    "recipfl.hidden": "width of the hypernetwork's node states; a multiple of 4",
    "recipfl.decoder-hidden": "of its decoders' hidden layer",
    "recipfl.tile": "the most channels that a decoder makes; larger tensors repeat them; 0: all",
    "recipfl.descriptor": (
        'what tells devices apart: how their labels are distributed, or a learned vector per "client"'
    ),
    "recipfl.conditioned": 'decoders that read it: all, or those of the "classifier"',
    "recipfl.virtual-edges": "messages also between operators further apart",
    "distillation.steps": "in-place distillation after each round: steps per sub-model (paper: 100); 0: none",
    "distillation.batch-size": "of in-place distillation",
    "distillation.learning-rate": "falls as learning-rate does",
    "evaluate-every": "rounds between evaluations of the global model; the last one is evaluated too",
    "evaluate-tiers": "whether the newest sub-model of every tier is scored too, not the global model alone",
    "personal-every": (
        "rounds between evaluations of every device on its own test shard, and in the last round; 0: never"
    ),
    "personal-epochs": "that a device trains the model before it is scored so; 0: it is scored as it is given",
    "personal-from": "the first round in which that is done",
    "output-dir": "absolute, or relative to where the SuperLink was started (wildflower run: where you are)",
    "run-name": '"" makes one of strategy, task and time',
    "resume": "go on with the run of this name from its checkpoint",
    "state-dir": 'where simulated devices keep what stays on them; "" is a folder of the run',
}
