"""`kvredis bench vllm`: real vLLM's time to first token and requests a second, by which cache has kept the KV. The
command line imports it."""
