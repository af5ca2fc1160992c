"""Tiny model directories for tests: a random Dream and a byte-level BPE tokenizer, the same ones every time.

The defaults of both go together. torch is imported only to write a model, for the sake of the tests without it.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lopa_ascend.text.tokenizer import Tokenizer

VOCAB_SIZE = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What the merges build, in the byte-level alphabet, where \u0120 is the space: two of them are the UTF-8 bytes of an
# accented letter and of an emoji.
_WORDS = ("\u0120the", "\u0120and", "\u0120answer", "hello", "ing", "\u00c3\u00a9", "\u00f0\u0141\u013a\u0122", "ll")


def write_dream(  # noqa: PLR0913
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    hidden: int = 32,
    intermediate: int = 48,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    tie: bool = False,
    bias: bool = True,
    shards: int = 1,
    eos_token_id: int | list[int] | None = None,
    dtype: torch.dtype | None = None,
    scale: float = 0.3,
    **extra: Any,
) -> Path:
    """Writes config.json, generation_config.json and random weights (float32 if no ``dtype``); the last id is the mask.

    ``scale`` is the standard deviation of the weights; ``extra`` goes into config.json as it is.
    """
    import torch

    dtype = dtype or torch.float32
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": tie,
        "attention_bias": bias,
        "mask_token_id": vocab_size - 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    config |= {} if head_dim is None else {"head_dim": head_dim}
    _write_json(path / "config.json", config | extra)
    _write_json(path / "generation_config.json", {} if eos_token_id is None else {"eos_token_id": eos_token_id})
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in dream_shapes(config).items():
        values = torch.randn(shape, generator=generator) * scale
        tensors[name] = (1 + values if "norm" in name else values).to(dtype)
    write_weights(path, tensors, shards)
    return path


LLADA_NAMES = (
    ("model.embed_tokens", "model.transformer.wte"), ("model.norm", "model.transformer.ln_f"),
    ("model.layers", "model.transformer.blocks"), ("lm_head", "model.transformer.ff_out"),
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ff_norm"), ("self_attn.o_proj", "attn_out"),
    ("self_attn.", ""), ("mlp.gate_proj", "ff_proj"), ("mlp.up_proj", "up_proj"), ("mlp.down_proj", "ff_out"),
)  # fmt: skip
"""What LLaDA calls the tensors of Dream."""


def write_llada(path: Path, dream: Path) -> Path:
    """Writes the LLaDA with the weights of a Dream without biases: the same model, with logits of other positions."""
    from safetensors.torch import load_file

    from lopa_ascend.families import FAMILIES

    path.mkdir(parents=True, exist_ok=True)
    values, tensors = json.loads((dream / "config.json").read_text()), load_file(str(dream / "model.safetensors"))
    assert not values.pop("attention_bias")
    config = {FAMILIES["llada"].names.get(name, name): value for name, value in values.items()}
    config |= {"model_type": "llada", "vocab_size": values["vocab_size"], "rope": True}
    config |= {"block_type": "llama", "layer_norm_type": "rms"}
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", json.loads((dream / "generation_config.json").read_text()))
    for old, new in LLADA_NAMES:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    write_weights(path, tensors)
    return path


def dream_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Dream checkpoint with this config.json, in layer order."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            parts[f"self_attn.{name}_proj.weight"] = (rows, hidden)
            if config["attention_bias"]:
                parts[f"self_attn.{name}_proj.bias"] = (rows,)
        parts |= {
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def write_weights(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Writes model.safetensors, or that many shards and their index."""
    from safetensors.torch import save_file

    if shards == 1:
        save_file(tensors, str(path / "model.safetensors"))
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file({name: tensors[name] for name in part}, str(path / file))
        weight_map |= dict.fromkeys(part, file)
    _write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_tokenizer(
    path: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    special: tuple[str, ...] = SPECIAL,
    added: tuple[str, ...] = (),
    chat_template: str | list[dict[str, str]] | None = CHAT_TEMPLATE,
    **extra: Any,
) -> Path:
    """Writes vocab.json (256 bytes, then merges), merges.txt and tokenizer_config.json; ``special`` are the last ids,
    and before them ``added``, tokens that are not special.

    The last id is the mask token, the first special one the end of text. ``extra`` goes into tokenizer_config.json.
    """
    from tokenizers import pre_tokenizers

    path.mkdir(parents=True, exist_ok=True)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[str] = []
    prefixes = ((word[:size], word[size]) for word in _WORDS for size in range(1, len(word)))
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    for left, right in [*prefixes, *product(letters, letters)]:
        if len(tokens) + len(added) + len(special) < vocab_size and left + right not in tokens:
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    _write_json(path / "vocab.json", {token: index for index, token in enumerate(tokens)})
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    further = [{"content": token, "special": token in special, **flags} for token in (*added, *special)]
    config: dict[str, Any] = {
        "tokenizer_class": "DreamTokenizer",
        "added_tokens_decoder": {str(index): token for index, token in enumerate(further, len(tokens))},
        "eos_token": special[0],
        "pad_token": special[0],
        "mask_token": special[-1],
        "bos_token": None,
    }
    config |= {} if chat_template is None else {"chat_template": chat_template}
    _write_json(path / "tokenizer_config.json", config | extra)
    return path


@cache
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer that ``write_tokenizer`` writes by default."""
    from lopa_ascend.text.tokenizer_files import load_tokenizer

    with TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(write_tokenizer(Path(folder)), VOCAB_SIZE)
    assert tokenizer is not None
    return tokenizer


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")
