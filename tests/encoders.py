"""Small encoders of `transformers`, as families that are cut by themselves."""

from typing import Any

OF_DISTILBERT = {"hidden": "dim", "depth": "n_layers", "heads": "n_heads", "mlp": "hidden_dim"}
OF_BERT = {
    **{"hidden": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads"},
    "mlp": "intermediate_size",
}
ADDED = ("adapter", "lora", "lora_alpha", "pooling", "head")


def model(kind: str = "bert", **changes: Any) -> dict[str, Any]:
    """Return settings of a small model, by short names of its sizes."""
    sizes = {"hidden": 16, "depth": 3, "heads": 4, "mlp": 20} | changes
    names = OF_DISTILBERT if kind == "distilbert" else OF_BERT
    named = {names.get(key, key): value for key, value in sizes.items()}
    drop = {"dropout": 0.0, "attention_dropout": 0.0}
    if kind != "distilbert":
        drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {"model_type": kind, "max_position_embeddings": 16, **drop, **named}


def encoder(kind: str = "bert", **changes: Any) -> dict[str, Any]:
    """Return the spec of a small model for `make_family`: of its sizes, of what is added to it, and of all else."""
    sizes = {key: changes.pop(key) for key in (*OF_BERT, "type_vocab_size") if key in changes}
    added = {key: changes.pop(key) for key in ADDED if key in changes}
    given = {"input_shape": [9], "classes": 3, "tokens": True, "vocabulary": 40, "pad_id": 1} | changes
    return {"name": "transformers:AutoModel", "model": model(kind, **sizes), "arguments": added, **given}


def family_arguments(kind: str = "bert", **sizes: Any) -> str:
    """Return the settings of a small model, as `family-arguments` of a run have them."""
    settings = {key: f"'{value}'" if isinstance(value, str) else value for key, value in model(kind, **sizes).items()}
    return f"model = {{{', '.join(f'{key} = {value}' for key, value in settings.items())}}}"
