"""What vLLM lacks on a machine without a GPU: the worker that copies between its KV cache and its CPU tier.

All else of the OffloadingConnector is vLLM's own. Here "GPU" blocks are tensors in memory, and a copy is done at once.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of the KV cache into chunks of the region, and back."""

    def __init__(self, caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._done: list[Any] = []
        self._refs = caches.group_data_refs
        self._blocks = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors]
        sizes = [each.page_size_bytes * blocks_per_chunk for each in caches.tensors]
        self._chunks = [region.create_next_worker_view(size) for size in sizes]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks into chunks."""
        for block, part in self._pairs(src_spec, dst_spec):
            part.copy_(block)
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Copy chunks into blocks."""
        for block, part in self._pairs(dst_spec, src_spec):
            block.copy_(part)
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def get_finished(self) -> list[Any]:
        """What has been copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def _pairs(self, gpu: Any, cpu: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Block and part of a chunk, for each tensor of each group: the first block of a group may lie inside a chunk,
        and all groups' chunks follow each other."""
        pairs = []
        blocks, chunks = iter(gpu.block_ids.tolist()), cpu.block_ids.tolist()
        first_chunk = 0
        for refs, count, index in zip(self._refs, gpu.group_sizes, gpu.block_indices, strict=True):
            inside = index % self._blocks_per_chunk if count else 0
            for place in range(inside, inside + count):
                block = next(blocks)
                chunk, part = chunks[first_chunk + place // self._blocks_per_chunk], place % self._blocks_per_chunk
                for ref in refs:
                    source, size = self._blocks[ref.tensor_idx], ref.page_size_bytes
                    start = part * source.shape[1]
                    pairs.append((source[block][:size], self._chunks[ref.tensor_idx][chunk][start : start + size]))
            first_chunk += -(-(inside + count) // self._blocks_per_chunk) if count else 0
        return pairs


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec with that worker."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        """Give the worker."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
