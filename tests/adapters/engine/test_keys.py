"""Keys: the same in every process, different for everything that makes KV different."""

import os
import subprocess
import sys
from array import array
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_digest

from kvredis.adapters.engine.keys import ALGORITHMS, chunk_keys, fingerprint, key_of_shard
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.config.schema import HASH_ALGORITHMS

LAYOUT = ChunkLayout(4, 2, 64, "bf16", 256, model="meta-llama/Llama-3.1-8B")


def test_a_changed_token_changes_its_chunk_and_all_after_it_only() -> None:
    tokens = list(range(1024))
    before = chunk_keys(tokens, LAYOUT)
    tokens[300] += 1
    after = chunk_keys(tokens, LAYOUT)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


def test_the_key_is_the_documented_bytes() -> None:
    tokens = [5, 70000, 2**40]
    layout = replace(LAYOUT, chunk_tokens=2)
    canonical = (
        b'{"chunk_tokens":2,"dtype":"bf16","format":"kvredis-kv-1","head_dim":64,"kv_heads":2,"layers":4,'
        b'"model":"meta-llama/Llama-3.1-8B","world_size":1}'
    )
    root = sha256(canonical).digest()
    first = sha256(root + (5).to_bytes(8, "little") + (70000).to_bytes(8, "little")).digest()
    second = sha256(first + (2**40).to_bytes(8, "little")).hexdigest()
    keys = chunk_keys(tokens, layout, unfull=True)
    assert keys[1].key.decode() == f"kvredis:meta-llama/Llama-3.1-8B@{root[:8].hex()}@{{0@{first[:8].hex()}}}{second}"
    assert [(key.start, key.stop) for key in keys] == [(0, 2), (2, 3)]


def test_keys_are_equal_in_processes_with_other_hash_seeds() -> None:
    script = (
        "import sys; from kvredis.adapters.engine.keys import chunk_keys;"
        "from kvredis.adapters.engine.layout import ChunkLayout;"
        "l = ChunkLayout(4, 2, 64, 'bf16', 256, model='meta-llama/Llama-3.1-8B');"
        "names = ('sha256_cbor', 'sha256_cbor_64bit', 'xxhash', 'builtin');"
        "print(*(chunk_keys(range(1000), l, unfull=True, algorithm=name)[-1].key.decode() for name in names));"
        "assert 'torch' not in sys.modules"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1234")
    }
    names = ("sha256_cbor", "sha256_cbor_64bit", "xxhash", "builtin")
    keys = [chunk_keys(range(1000), LAYOUT, unfull=True, algorithm=name)[-1].key.decode() for name in names]
    assert [line.split() for line in seen] == [keys]


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 5},
        {"kv_heads": 3},
        {"head_dim": 32},
        {"dtype": "fp16"},
        {"chunk_tokens": 128},
        {"model": "meta-llama/Llama-3.1-8B-Instruct"},
        {"world_size": 2},
        {"world_size": 2, "rank": 1},
    ],
)
def test_everything_in_the_layout_is_in_the_key(change: dict[str, int]) -> None:
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    assert chunk_keys(range(256), LAYOUT)[0].key != chunk_keys(range(256), other)[0].key


def test_ranks_share_one_chain_and_differ_in_the_readable_part() -> None:
    one, two = (replace(LAYOUT, rank=rank, world_size=2) for rank in (0, 1))
    a, b = chunk_keys(range(256), one)[0].key, chunk_keys(range(256), two)[0].key
    assert a != b
    assert fingerprint(one) == fingerprint(two)
    assert a.rpartition(b"}")[2] == b.rpartition(b"}")[2]


def test_ranks_that_split_the_heads_have_the_chain_of_the_one_rank_that_would_have_them_all() -> None:
    layouts = [
        replace(LAYOUT, kv_heads=8 // ranks, world_size=ranks, rank=rank, splits_heads=True, span=span)
        for ranks in (1, 2, 4)
        for rank in range(ranks)
        for span in ("", "8-15")
    ]
    keys = [chunk_keys(range(256), layout)[0].key for layout in layouts]
    assert len(set(keys)) == len(keys)
    whole = chunk_keys(range(256), replace(LAYOUT, kv_heads=8))[0].key
    assert keys[0] == whole, "one rank's keys do not tell that others may split its heads"
    for layout, key in zip(layouts, keys, strict=True):
        assert tag_of(key).startswith(layout.shard.encode() + b"@")
        assert key_of_shard(whole, layout.shard.encode()) == key
        assert key_of_shard(key, b"0") == whole
    assert [layout.shard for layout in layouts[4:8]] == ["1/2", "1/2:8-15", "0/4", "0/4:8-15"]


def tag_of(key: bytes) -> bytes:
    """What a Redis Cluster hashes of a key: what is between the first { and the first } behind it."""
    return key.partition(b"{")[2].partition(b"}")[0]


def test_chunks_of_one_prompt_share_a_hash_tag_and_other_prompts_and_ranks_have_others() -> None:
    layout = replace(LAYOUT, world_size=2)
    keys = chunk_keys(range(1074), layout, unfull=True)
    tags = {tag_of(chunk.key) for chunk in keys}
    assert tags == {b"0@" + keys[0].key.rpartition(b"}")[2][:16]}
    longer = chunk_keys([*range(1024), *range(5000, 5600)], layout)
    assert {tag_of(chunk.key) for chunk in longer} == tags, "a prompt that begins alike"
    assert tag_of(chunk_keys(range(1, 1075), layout)[0].key) not in tags
    assert tag_of(chunk_keys(range(1074), replace(layout, rank=1))[0].key) not in tags
    (partial,) = chunk_keys(range(50), layout, unfull=True)
    assert tag_of(partial.key) == b"0@" + partial.key.rpartition(b"}")[2][:16]


def test_a_model_with_braces_in_its_name_does_not_move_the_hash_tag() -> None:
    (key,) = chunk_keys(range(256), replace(LAYOUT, model="a{b}c"))
    assert tag_of(key.key).startswith(b"0@")


@pytest.mark.parametrize(
    ("algorithm", "digits"),
    [("sha256", 64), ("sha256_cbor_64bit", 16), ("xxhash", 32), ("xxhash_cbor", 32), ("builtin", 16)],
)
def test_another_hash_makes_other_keys_of_its_own_length_that_chain_as_well(algorithm: str, digits: int) -> None:
    tokens = list(range(1024))
    keys = chunk_keys(tokens, LAYOUT, algorithm=algorithm)
    assert {len(chunk.key.rpartition(b"}")[2]) for chunk in keys} == {digits}
    assert (keys == chunk_keys(tokens, LAYOUT)) == (algorithm == "sha256"), "vLLM's two names of one hash"
    tokens[300] += 1
    changed = chunk_keys(tokens, LAYOUT, algorithm=algorithm)
    assert [a == b for a, b in zip(keys, changed, strict=True)] == [True, False, False, False]
    assert fingerprint(LAYOUT, "xxhash") == fingerprint(LAYOUT, "xxhash_cbor") != fingerprint(LAYOUT)


def test_an_xxhash_key_is_the_documented_bytes() -> None:
    layout = replace(LAYOUT, chunk_tokens=2)
    canonical = (
        b'{"chunk_tokens":2,"dtype":"bf16","format":"kvredis-kv-1","hash":"xxhash","head_dim":64,"kv_heads":2,'
        b'"layers":4,"model":"meta-llama/Llama-3.1-8B","world_size":1}'
    )
    root = sha256(canonical).digest()
    first = xxh3_128_digest(root[:16] + (5).to_bytes(8, "little") + (6).to_bytes(8, "little"))
    (key,) = chunk_keys([5, 6], layout, algorithm="xxhash")
    tail = f"@{root[:8].hex()}@{{0@{first[:8].hex()}}}{first.hex()}"
    assert key.key.decode() == f"kvredis:meta-llama/Llama-3.1-8B{tail}"


def test_an_unknown_hash_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'md5'; known: sha256_cbor, sha256, .*, builtin"):
        chunk_keys([1], LAYOUT, algorithm="md5")


def test_every_hash_that_a_configuration_may_name_is_there_and_no_other() -> None:
    assert tuple(ALGORITHMS) == HASH_ALGORITHMS


def test_models_that_read_alike_still_differ() -> None:
    keys = [
        chunk_keys([1], replace(LAYOUT, model=model), unfull=True)[0].key
        for model in ("a b", "a*b", "a" * 97, "a" * 98)
    ]
    assert len(set(keys)) == 4
    assert all(key.isascii() and key.decode().isprintable() and b" " not in key for key in keys)


def test_a_partial_chunk_has_a_key_only_when_asked() -> None:
    assert chunk_keys([], LAYOUT, unfull=True) == []
    assert len(chunk_keys(range(1074), LAYOUT)) == 4
    keys = chunk_keys(range(1074), LAYOUT, unfull=True)
    assert (keys[4].start, keys[4].stop) == (1024, 1074)
    assert len(chunk_keys(range(1024), LAYOUT, unfull=True)) == 4


def test_lists_arrays_and_tensors_of_any_width_agree() -> None:
    expected = chunk_keys(list(range(512)), LAYOUT)
    for tokens in (
        range(512),
        array("i", range(512)),
        np.arange(512, dtype=np.int32),
        torch.arange(512),
        torch.arange(512, dtype=torch.int32),
    ):
        assert chunk_keys(tokens, LAYOUT) == expected


def test_anything_but_one_row_of_integers_is_refused() -> None:
    for tokens in (torch.zeros(1, 4, dtype=torch.long), torch.zeros(4), [1.5]):
        with pytest.raises(TypeError):
            chunk_keys(tokens, LAYOUT)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"dtype": "int3"}, {"rank": 1}, {"chunk_tokens": 0}])
def test_a_layout_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"needs|unknown|outside"):
        replace(LAYOUT, **wrong)  # type: ignore[arg-type]
