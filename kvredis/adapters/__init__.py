"""The engine doors: what turns an engine's KV cache into keyed blocks and back."""
