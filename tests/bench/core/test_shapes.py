"""Sizes of a model's KV: the five known shapes, and what is read from a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvredis import ChunkLayout
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.shapes import SHAPES, ModelShape, shape_of

QWEN = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}


def config(folder: Path, **fields: object) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "token_bytes", "block_kib", "chunk_mib"),
    [
        ("32b", 262_144, 4096, 64),
        ("7b", 57_344, 896, 14),
        ("3b", 36_864, 576, 9),
        ("glm", 81_920, 1280, 20),
        ("8b", 131_072, 2048, 32),
    ],
)
def test_the_known_shapes_have_the_sizes_that_the_field_publishes(
    name: str, token_bytes: int, block_kib: int, chunk_mib: int
) -> None:
    shape = shape_of(name)
    assert shape.bytes_per_token() == token_bytes
    assert shape.block_bytes() == block_kib * 1024
    assert shape.block_bytes(256) == chunk_mib * 1024**2
    assert shape.layer_bytes(256) * shape.layers == shape.block_bytes(256)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_a_shape_and_the_engines_chunk_layout_agree(shape: ModelShape) -> None:
    layout = ChunkLayout(shape.layers, shape.kv_heads, shape.head_dim, "bf16")
    assert (shape.bytes_per_token(), shape.block_bytes(256)) == (layout.bytes_per_token, layout.chunk_bytes())


def test_only_whole_blocks_are_counted() -> None:
    assert SHAPES["8b"].blocks(5 * 1024**3) == 2560
    assert SHAPES["8b"].blocks(2 * 1024**2 - 1) == 0


def test_head_dim_is_derived_where_the_config_does_not_say(tmp_path: Path) -> None:
    shape = shape_of(config(tmp_path, **QWEN))
    assert shape == ModelShape(tmp_path.name, 28, 4, 128, 2)


def test_the_path_of_the_file_does_as_well_as_that_of_its_folder(tmp_path: Path) -> None:
    assert shape_of(config(tmp_path, **QWEN) + "/config.json") == shape_of(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": 256}, (28, 4, 256, 2)),
        ({"num_key_value_heads": None}, (28, 28, 128, 2)),
        ({"torch_dtype": "float32"}, (28, 4, 128, 4)),
        ({"torch_dtype": None, "dtype": "float16"}, (28, 4, 128, 2)),
        ({"torch_dtype": "float8_e4m3fn"}, (28, 4, 128, 1)),
        ({"text_config": {"num_hidden_layers": 12}}, (12, 4, 128, 2)),
    ],
)
def test_what_a_config_says_counts(
    tmp_path: Path, changes: dict[str, object], expected: tuple[int, int, int, int]
) -> None:
    shape = shape_of(config(tmp_path, **QWEN | changes))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype_bytes) == expected


def test_chatglms_own_names_are_known(tmp_path: Path) -> None:
    names = {"num_layers": 40, "multi_query_group_num": 4, "kv_channels": 128, "num_attention_heads": 32}
    assert shape_of(config(tmp_path, **names)).bytes_per_token() == SHAPES["glm"].bytes_per_token()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": None}, "lacking: num_hidden_layers"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "lacking: num_key_value_heads, head_dim"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads must be a whole number"),
        ({"torch_dtype": "int4"}, "unknown torch_dtype 'int4'"),
        ({"kv_lora_rank": 512}, "lacking: qk_rope_head_dim"),
    ],
)
def test_a_config_that_does_not_tell_the_size_is_refused(tmp_path: Path, changes: dict[str, object], text: str) -> None:
    with pytest.raises(BenchError, match=text):
        shape_of(config(tmp_path, **QWEN | changes))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no model shape '9b': want one of 32b, 7b, 3b, glm, 8b, or the path"):
        shape_of("9b")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BenchError, match="not a model's configuration but a list"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BenchError, match="cannot read"):
        shape_of(str(tmp_path))
    with pytest.raises(BenchError, match="layers must be at least 1"):
        ModelShape("none", 0, 1, 1)
