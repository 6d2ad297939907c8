"""Whole models of Transformers in eager attention, tiny and random: every site fuses, and every
gradient is right.
"""

import copy

import pytest
import torch
from fused import BACKWARD, FORWARD, Seen, backend, run, wrong

transformers = pytest.importorskip("transformers")

L = 23  # a length that nothing else in the models has
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "use_cache": False,
}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mistral():
    config = transformers.MistralConfig(**SIZES, sliding_window=5, head_dim=12)
    return transformers.MistralForCausalLM(config)


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))


MODELS = {f.__name__: f for f in (llama, mistral, qwen2)}
PADDINGS = ("none", "right", "left")


def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = MODELS[name]().eval().to(dtype)
    for name_, parameter in model.named_parameters():
        if "norm" not in name_:  # of the usual 0.02 every softmax would be flat
            parameter.data.mul_(8.0)
    return model


class Logits(torch.nn.Module):
    """Logits of the real tokens; those of padding are not compared, since the model leaves them
    arbitrary.
    """

    def __init__(self, model, padding):
        super().__init__()
        self.model = model
        keep = torch.ones(2, L, dtype=torch.long)
        if padding == "right":
            keep[1, -6:] = 0
        elif padding == "left":
            keep[1, :6] = 0
        self.register_buffer("keep", None if padding == "none" else keep)
        self.register_buffer("real", keep)

    def forward(self, ids):
        logits = self.model(input_ids=ids, attention_mask=self.keep).logits
        return logits * self.real[:, :, None]


def tokens():
    return torch.randint(0, 64, (2, L), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_fuses_both_layers_in_training(name, padding):
    seen = run(Logits(made(name), padding), tokens())
    assert (seen.fused, seen.reasons) == (2, [])
    assert (seen.count(FORWARD), seen.count(BACKWARD)) == (2, 2)
    assert seen.count("aten.amax.default") == 0
    assert not seen.with_dims(L, L)
    assert seen.summary.count("4 query / 2 key-value heads of 12, rotate-half RoPE,") == 2
    assert seen.summary.count("window 5" if name == "mistral" else "causal") == 2
    assert seen.summary.count("backward of q, k, v") == 2


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_fuses_both_layers_in_inference(name, padding):
    seen = run(Logits(made(name), padding), tokens(), train=False)
    assert (seen.fused, seen.reasons) == (2, [])
    assert (seen.count(FORWARD), seen.count(BACKWARD)) == (2, 0)
    assert seen.count("aten.amax.default") == 0
    assert not seen.with_dims(L, L)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_bf16_model_is_as_exact_as_eager(name):
    seen = run(Logits(made(name, torch.bfloat16), "left"), tokens())
    assert (seen.fused, seen.reasons) == (2, [])


class LogitsOfAnyLength(Logits):
    def forward(self, ids):
        return self.model(input_ids=ids).logits


def test_dynamic_lengths():
    ids, module = tokens(), LogitsOfAnyLength(made("llama"), "none")
    seen = run(module, ids, dynamic=True, train=False, more=[(ids[:1].repeat(3, 2),)])
    assert (seen.fused, seen.reasons) == (2, [])


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_fuses_attention_dropout_in_training(name):
    model = made(name)
    model.config.attention_dropout = 0.25
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.25
    with torch._inductor.config.patch(fallback_random=True):
        seen = run(Logits(model.train(), "left"), tokens())
    assert (seen.fused, seen.reasons) == (2, [])
    assert (seen.count(FORWARD), seen.count(BACKWARD)) == (2, 2)
    assert seen.summary.count("dropout") == 2


def test_frozen_but_for_q_and_v():
    model = made("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("q_proj.weight", "v_proj.weight")))
    seen = run(Logits(model, "none"), tokens())
    assert (seen.fused, seen.reasons) == (2, [])
    assert seen.count(BACKWARD) == 2


def test_a_step_of_training_moves_the_weights_as_eager_does():
    """With generated code, and the loss that the model itself computes."""
    import inductor_gqa

    torch._dynamo.reset()
    ids, stepped = tokens(), {}
    seen = Seen()
    for kind in ("ours", "eager", "truth"):
        model = copy.deepcopy(made("llama"))
        if kind == "truth":
            model.double()
        with inductor_gqa.enabled(always=True), backend(seen, codegen=True) as chosen:
            forward = torch.compile(model, backend=chosen) if kind == "ours" else model
            loss = forward(input_ids=ids, labels=ids).loss
            loss.backward()
        stepped[kind] = {"loss": loss.detach().float()} | {
            n: p.grad.float() if kind != "truth" else p.grad for n, p in model.named_parameters()
        }
    assert seen.fused == 2
    assert not wrong(stepped["ours"], stepped["eager"], stepped["truth"])
