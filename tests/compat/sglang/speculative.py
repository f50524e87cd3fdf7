"""What SGLang's speculative decoding does with a draft that is a chain of tokens, in torch, by sgl_kernel's names."""

import ctypes
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Note the slots of tokens [start, end) of each request."""
    done = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read what was noted of tokens [start, end) of each request."""
    done = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[done : done + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Read what was noted of the tokens that come next."""
    ends = seq_lens + topk * num_cols
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def _spans(*columns: torch.Tensor) -> Any:
    return zip(*(each.tolist() for each in columns), strict=True)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """The slots of each request, those of its draft behind it."""
    assert topk == 1, "drafts are chains"
    return req_to_token[req_pool_indices.long()]


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Say of each token of a chain which one comes next, and which it may see."""
    assert topk == 1, "drafts are chains"
    steps = torch.arange(draft_token_num)
    requests = len(verified_seq_len)
    positions.copy_((verified_seq_len[:, None] + steps).view_as(positions))
    retrieve_index.copy_(torch.arange(requests * draft_token_num).view_as(retrieve_index))
    retrieve_next_token.copy_(torch.where(steps + 1 < draft_token_num, steps + 1, -1))
    retrieve_next_sibling.fill_(-1)
    before = steps[:, None] >= steps
    tree_mask.view(-1)[: requests * before.numel()] = before.flatten().repeat(requests).to(tree_mask.dtype)


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Take each draft as far as the model itself would have said it, and one token of the model's behind it."""
    for request, (draft, said) in enumerate(zip(candidates.tolist(), target_predict.tolist(), strict=True)):
        places = retrive_index[request].tolist()
        taken = 0
        while taken + 1 < accept_index.shape[1] and taken + 1 < len(draft) and draft[taken + 1] == said[taken]:
            taken += 1
        accept_index[request, : taken + 1] = torch.tensor(places[: taken + 1], dtype=accept_index.dtype)
        predicts[places[: taken + 1]] = torch.tensor(said[: taken + 1], dtype=predicts.dtype)
        accept_token_num[request] = taken


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """The last token that was taken of each request."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """The slots of the tokens that were taken."""
    taken = accept_index.view(-1)[accept_index.view(-1) > -1].long()
    accept_out_cache_loc[: len(taken)] = out_cache_loc[taken]


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """Move each request's tokens one to the front, and put its next one behind them."""
    for request, (start, length) in enumerate(_spans(extend_start_loc, extend_seq_lens)):
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[request])
        input_ids[last] = topk_index.view(-1)[request]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy tokens from slots to other slots of each layer's memory, of so many bytes each."""
    for start, nbytes in _spans(data_ptrs, strides):
        tokens = [ctypes.string_at(start + slot * nbytes, nbytes) for slot in src_loc.tolist()]
        for slot, token in zip(tgt_loc.tolist(), tokens, strict=True):
            ctypes.memmove(start + slot * nbytes, token, nbytes)


FUNCTIONS = (
    copy_all_layer_kv_cache_cpu,
    assign_req_to_token_pool_cpu,
    assign_extend_cache_locs_cpu,
    assign_draft_cache_locs_contiguous_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
    fill_bonus_tokens_cpu,
    fill_accept_out_cache_loc_cpu,
    rotate_input_ids_cpu,
)
