"""Transformers architectures by name: random weights, eager attention, nothing downloaded."""

from __future__ import annotations

import difflib
from typing import Any

from inductor_gqa.cli.terminal import CommandError

# Two layers, four query heads and two key/value heads: the smallest instance that shows every kind
# of site.
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "max_position_embeddings": 256,
}


def causal_lm(name: str, sizes: dict[str, Any]) -> Any:
    """A causal language model of the architecture `name` ("llama", "qwen2", ...) in float32.

    `sizes` are configuration fields; those that the architecture does not have are left out.
    Raises CommandError: Transformers is missing, or has no such architecture.
    """
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        message = "this needs Transformers: pip install 'transformers>=5'"
        raise CommandError(message, exit_code=3) from error

    known = sorted(CONFIG_MAPPING.keys())
    model_type = name.lower().replace("-", "_")
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=3, cutoff=0.5)
        hint = f", near: {', '.join(near)}" if near else ""
        raise CommandError(
            f"Transformers {transformers.__version__} has no model {name!r}{hint}; "
            "a callable of your own is module:name or file.py:name"
        )
    stock = transformers.AutoConfig.for_model(model_type)
    text = stock.get_text_config()
    if text is not stock:  # a model of several towers: its language model is what attends causally
        model_type, stock = text.model_type, text
    fields = {key: value for key, value in sizes.items() if _has(stock, key)}
    if _has(stock, "kv_lora_rank") and "num_attention_heads" in fields:
        # Keys and values come from one latent and are spread over all heads: there are no groups.
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(stock, token, None), int):
            fields[token] = 0  # the stock ids lie beyond a small vocabulary
    try:
        config = transformers.AutoConfig.for_model(model_type, **fields)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # what a configuration refuses, each says in a way of its own
        said = (str(error).splitlines() or [""])[0][:200]
        raise CommandError(
            f"{name} cannot be built as a causal language model of small sizes "
            f"({type(error).__name__}: {said}); explain a model of your own as file.py:name"
        ) from error


def _has(config: Any, field: str) -> bool:
    """Whether a configuration has a field that can be set: some differ by layer and raise, some
    follow from others."""
    found = getattr(type(config), field, None)
    if isinstance(found, property) and found.fset is None:
        return False
    try:
        return hasattr(config, field)
    except (RuntimeError, ValueError):
        return False
