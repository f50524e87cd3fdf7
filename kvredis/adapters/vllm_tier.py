"""The public import path of vLLM's secondary tier, `kvredis.adapters.vllm_tier:KVRedisTier`."""

from .vllm.tier import KVRedisTier as KVRedisTier
