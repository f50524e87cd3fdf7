"""The attention of SGLang's backend for processors with AMX in torch, by the names of sgl_kernel."""

from typing import Any

import torch


def _attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    logit_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What [tokens, heads, width] read of [tokens, key heads, width] that they see, of [tokens, tokens] each."""
    share = queries.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(share, dim=1) for each in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", queries.float(), keys) * scaling
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sunk = sinks.float()[:, None, None].expand(-1, len(queries), 1)
        logits = torch.cat([logits, sunk], dim=-1)
    weights = logits.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)


def _seen(queries: int, keys: int, window: int, *, is_causal: bool) -> torch.Tensor:
    """Which keys each of the last queries sees: none behind it, and those of its window where that is not 0."""
    back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = back >= 0 if is_causal else torch.ones_like(back, dtype=torch.bool)
    return seen & (back < window) if window else seen


def extend_attention_cpu(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    scaling: float,
    logit_cap: float,
    is_cross_attn: bool,
    window: int,
    encoder_lens: Any,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Attend to prompts' tokens in the pool, and behind them to those that are computed now, which k and v have."""
    assert not is_cross_attn
    assert tree_mask is None, "drafts are chains"
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    start = 0
    for row, length, new in requests:
        span, slots = slice(start, start + new), req_to_token[row, :length].long()
        keys, values = k_buffer[slots], v_buffer[slots]
        if k is not None and v is not None:
            keys, values = (
                torch.cat([old[: length - new], each[span].reshape(new, *each.shape[1:])])
                if old.shape[1:] == each.shape[1:]
                else each[span]  # DeepSeek's own heads, in a prompt that has nothing before
                for old, each in ((keys, k.view(len(q), -1, q.shape[-1])), (values, v.view(len(q), -1, o.shape[-1])))
            )
        seen = _seen(new, len(keys), window, is_causal=is_causal)
        o[span] = _attended(q[span], keys, values, seen, scaling, logit_cap, sinks).to(o.dtype)
        start += new


def decode_attention_cpu(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    o: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    logit_cap: float,
    is_cross_attn: bool,
    window: int,
    encoder_lens: Any,
    sinks: torch.Tensor | None,
) -> None:
    """Write one more token of each prompt to the pool, and attend to all of it there."""
    assert not is_cross_attn
    if k is not None and v is not None:
        k_buffer[loc.long()] = k.view(len(q), *k_buffer.shape[1:])
        v_buffer[loc.long()] = v.view(len(q), *v_buffer.shape[1:])
    for place, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].long()
        seen = _seen(1, length, window, is_causal=True)
        one = q[place : place + 1]
        o[place] = _attended(one, k_buffer[slots], v_buffer[slots], seen, scaling, logit_cap, sinks)[0].to(o.dtype)


FUNCTIONS = (extend_attention_cpu, decode_attention_cpu)
