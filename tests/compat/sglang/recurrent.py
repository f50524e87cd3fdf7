"""The gated delta rule of Qwen3-Next and its convolution in torch, by the names that they have in sgl_kernel.

Token by token, in float32; states are read and written where SGLang's pool has them: [slots, heads, values, keys].
"""

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

CHUNK = 64
"""Tokens between two states of a prompt of which SGLang may keep one."""


def _spans(query_start_loc: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(query_start_loc.tolist()))


def _convolved(
    tokens: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Convolve [channels, tokens] behind the state of a slot, which then has the last of them."""
    width = weight.shape[1]
    whole = torch.cat([state.to(tokens.dtype), tokens], dim=1)
    state.copy_(whole[:, -(width - 1) :])
    done = functional.conv1d(whole.float()[None], weight.float()[:, None], groups=len(weight))[0]
    done = done if bias is None else done + bias.float()[:, None]
    return (functional.silu(done) if activation in ("silu", "swish") else done).to(tokens.dtype)


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """Convolve prompts that stand behind each other in x, [channels, tokens]."""
    done = torch.empty_like(x)
    for place, (start, end) in enumerate(_spans(query_start_loc)):
        state = conv_states[cache_indices[place]]
        if not has_initial_state[place]:
            state.zero_()
        done[:, start:end] = _convolved(x[:, start:end], state, weight, bias, activation)
    return done


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve one more token of each prompt, [prompts, channels]."""
    slots = conv_state_indices.tolist()
    each = [
        _convolved(token[:, None], conv_states[slot], weight, bias, activation)
        for token, slot in zip(x, slots, strict=True)
    ]
    return torch.cat(each, dim=1).T


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,  # noqa: N803  # SGLang calls it by this name
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By how much a state decays at each token (its logarithm), and how much of the token it takes."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """What prompts read from their states, which are brought behind them, and each state before a chunk."""
    heads = v.shape[2]
    queries, keys = (
        functional.normalize(each[0].float(), dim=-1).repeat_interleave(heads // each.shape[2], dim=1)
        for each in (q, k)
    )
    queries, values, done, before = queries * q.shape[-1] ** -0.5, v[0].float(), torch.empty_like(v), []
    decay, taken = g[0].float().exp(), beta[0].float()
    for place, (start, end) in enumerate(_spans(cu_seqlens)):
        slot = initial_state[initial_state_indices[place]]
        state = slot.float()
        for at in range(start, end):
            if (at - start) % CHUNK == 0:
                before.append(state)
            state = state * decay[at, :, None, None]
            news = (values[at] - torch.einsum("hvk,hk->hv", state, keys[at])) * taken[at, :, None]
            state = state + torch.einsum("hv,hk->hvk", news, keys[at])
            done[0, at] = torch.einsum("hvk,hk->hv", state, queries[at])
        slot.copy_(state)
    return done, None, torch.stack(before)[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The same of one more token of each prompt."""
    decay, taken = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    done, *_states = chunk_gated_delta_rule_cpu(
        q=q, k=k, v=v, g=decay, beta=taken, initial_state=initial_state_source,
        initial_state_indices=initial_state_indices, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return done


def gated_norm(self: Any, x: torch.Tensor, g: torch.Tensor, **_: Any) -> torch.Tensor:
    """RMSNorm of x, and its gate: the forward of SGLang's FusedRMSNormGated."""
    normed = functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
    return (normed * (g.float().sigmoid() if self.activation == "sigmoid" else functional.silu(g.float()))).to(x.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add what the shared expert says of each token, as far as its gate is open."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    final_hidden_states += (gate[:, None] * shared_output.float()).to(final_hidden_states.dtype)


def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Keep the states of those prompts whose turn it is, in pools of [layers, slots, ...]."""
    chosen = mamba_track_mask[:batch_size]
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, mamba_track_indices[:batch_size][chosen].long()] = pool[:, cache_indices[:batch_size][chosen].long()]


FUNCTIONS = (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    fused_gdn_gating_cpu,
    chunk_gated_delta_rule_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
)
