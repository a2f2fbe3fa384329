"""Models so small that a test can write them: a Llama as a folder of safetensors, and as GGUF."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def tiny_config(**changes) -> transformers.LlamaConfig:
    settings = {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    return transformers.LlamaConfig(**{**settings, **changes})


def write_folder(path: Path) -> None:
    """A tiny Llama with its tokenizer, in bfloat16."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def write_gguf(path: Path, *, seed: int = 0, arch: str = "llama") -> dict[str, torch.Tensor]:
    """A tiny Llama as GGUF; returns its matrices under GGUF's names."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *alphabet, "ĊĊ"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{n}": (32, 32) for n in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{n}": (32, 32) for n in ("ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {f"blk.0.{n}": (32,) for n in ("attn_norm", "ffn_norm")}
    weights = {}
    for name, shape in shapes.items():
        values = generator.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            continue
        blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        weights[name] = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
