"""`kvredis bench vllm`: real vLLM's time to first token and requests a second, by who has kept the KV. The command
line imports it."""
