"""A small Llama with random weights in a folder, as engines open models; loaded only when one is made."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

LAYERS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 64, 256
BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
"""Of KV, in float32."""


def save(folder: Path, tokenizer: Tokenizer, *, tokens_max: int, seed: int) -> None:
    """Write the model, in float32, and its tokenizer. Its weights are large, so that what comes out depends on all that
    went in, and of two tokens one is clearly the better one."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD_DIM,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=tokens_max,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)  # type: ignore[no-untyped-call]
