"""Engine adapters: each turns an engine's KV cache into keyed blocks and back."""
