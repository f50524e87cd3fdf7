"""Chunks and pages between an engine's paged KV and a backend: loads, stores, layer by layer, within a rate. vLLM's
and SGLang's adapters import it; it knows neither."""
