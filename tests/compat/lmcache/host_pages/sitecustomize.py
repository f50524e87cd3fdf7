"""Gives LMCache a connector to the pages of a vLLM on the CPU, which it has for GPUs alone; Python imports this file
when it starts. All else is LMCache's own.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

PAGES = "lmcache.v1.gpu_connector"


class Changed(SourceFileLoader):
    """Runs a module's file, and changes what it makes."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        kind = host_pages()
        vars(module)["CreateGPUConnector"] = lambda config, metadata, engine, layout_hints=None: kind(metadata)


class Finder(MetaPathFinder):
    """Finds those modules alone."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == PAGES else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Changed(spec.loader.name, spec.loader.path)
        return spec


def host_pages() -> type:
    """Make the connector's class; LMCache and torch are loaded by then."""
    import torch
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

    class HostPages(GPUConnectorInterface):  # type: ignore[misc]
        """Copies between LMCache's (2, layers, tokens, heads x head_dim) and pages of (heads, tokens, 2 x head_dim)."""

        def __init__(self, metadata: Any) -> None:
            self.layers, _, _, self.heads, self.head_dim = metadata.kv_shape

        def _pages(self, start: int, end: int, kwargs: dict[str, Any]) -> Iterator[tuple[int, Any, Any, Any]]:
            slots, layers = kwargs["slot_mapping"][start:end], kwargs["kvcaches"]
            page_tokens = layers[0].shape[2]
            for layer, pages in enumerate(layers):
                yield layer, pages, slots // page_tokens, slots % page_tokens

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for layer, pages, page, at in self._pages(start, end, kwargs):
                keys, values = pages[page, :, at].split(self.head_dim, dim=-1)
                memory_obj.tensor[0, layer] = keys.flatten(1)
                memory_obj.tensor[1, layer] = values.flatten(1)

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            has = min(end, max(start, kwargs["vllm_cached_tokens"]))  # vLLM has those before it, and others read them
            for layer, pages, page, at in self._pages(has, end, kwargs):
                split = memory_obj.tensor[:, layer, has - start :].unflatten(-1, (self.heads, self.head_dim))
                pages[page, :, at] = torch.cat((split[0], split[1]), dim=-1)

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **kwargs)

        def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **kwargs)

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([2, self.layers, num_tokens, self.heads * self.head_dim])

    return HostPages


sys.meta_path.insert(0, Finder())
