"""Prints what LMCache itself makes of LMCACHE_CONFIG_FILE, as JSON. Run by test_examples.py where LMCache is."""

import json

from lmcache.v1.config import load_engine_config_with_overrides

NAMES = ("chunk_size", "local_cpu", "max_local_cpu_size", "remote_url", "remote_serde", "extra_config")

if __name__ == "__main__":
    config = load_engine_config_with_overrides()
    print(json.dumps({name: getattr(config, name) for name in NAMES}))
