"""Shapes of published models, by name: what the benchmarks build with random weights."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_theta": 500000.0, "rope_type": "default"}

# What differs between the shapes; the rest of a configuration is the architecture's own.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_parameters": ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": ROPE,
        },
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "mistral-7b": (
        "mistral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 4096,
        },
    ),
}
ALIASES = {"llama": "llama-3.2-1b", "qwen2": "qwen2.5-1.5b", "mistral": "mistral-7b"}
