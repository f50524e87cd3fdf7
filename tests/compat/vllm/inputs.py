"""What a request may hold beside tokens, for program.py: LoRA adapters, pictures, and a model that looks at pictures.

All is made on the spot, of random numbers that follow from a seed: the same in every process.
"""

import json
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
SPECIAL = {"<fake_token_around_image>": 1020, "<global-img>": 1021, "<end_of_utterance>": 1022, "<image>": 1023}
"""Tokens of the model that looks at pictures. An <image> in a prompt becomes 3 tokens and (SIDE / PATCH) ** 2 more."""
SIDE, PATCH = 80, 8
RANK = 8


def idefics(text: Answer) -> Answer:
    """The config of a model that looks at pictures, and talks as the one of such a config does."""
    vision = {
        "model_type": "idefics3_vision", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.2,
    }  # fmt: skip
    return {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "scale_factor": 1,
        "image_token_id": SPECIAL["<image>"], "pad_token_id": text["pad_token_id"], "tie_word_embeddings": False,
        "text_config": text, "vision_config": vision,
    }  # fmt: skip


def processor() -> Any:
    """What makes that model's inputs of a prompt and pictures. Its tokenizer knows words by their numbers alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = {f"w{number}": number for number in range(3, min(SPECIAL.values()))}
    made = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2} | words | SPECIAL, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    edge: Any = {"longest_edge": SIDE}
    pictures = Idefics3ImageProcessorPil(do_image_splitting=False, size=edge, max_image_size=edge)
    return Idefics3Processor(pictures, tokenizer, image_seq_len=(SIDE // PATCH) ** 2)


def picture(seed: int) -> Any:
    """A picture of noise, as large as that model takes it."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


def save_adapter(folder: Path, seed: int, model: Answer) -> None:
    """A LoRA adapter of all attention of a model with such a config, as peft writes one."""
    import torch
    from safetensors.torch import save_file

    hidden, heads = model["hidden_size"], model["head_dim"]
    widths = {"q_proj": model["num_attention_heads"] * heads, "o_proj": hidden}
    widths |= dict.fromkeys(("k_proj", "v_proj"), model["num_key_value_heads"] * heads)
    made = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, hidden, generator=made) * 0.2
            weights[f"{at}.lora_B.weight"] = torch.randn(width, RANK, generator=made) * 0.2
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": sorted(widths)}))
