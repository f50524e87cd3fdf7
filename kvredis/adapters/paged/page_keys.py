"""Two engines must never take each other's pages, however alike: a page's key names everything that its bytes mean.

    key = kvredis:<model>@<first 16 hex digits of sha256(facts)>:<what the engine calls the page>

`facts` is the ASCII JSON object of all that shapes the bytes (model, dtype, layout, ranks, sizes, format), keys sorted,
no blanks. The model is written as engine/keys.py writes it. There is no hash tag: an engine's name for a page tells
nothing of the prompt that it belongs to, so in a cluster the pages of a prompt spread over the nodes.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from kvredis.adapters.engine.keys import MODEL_CHARS_MAX

from .page_value import FORMAT


def page_prefix(model: str, facts: Mapping[str, Any]) -> bytes:
    """What every key of pages of this model and these `facts`, of JSON's types, begins with."""
    whole = {"format": FORMAT, "model": model, **facts}
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]
    return f"{model_prefix(model).decode('ascii')}{digest}:".encode("ascii")


def model_prefix(model: str) -> bytes:
    """What every key of pages of this model begins with."""
    name = re.sub(r"[^A-Za-z0-9._/-]", "_", model)[:MODEL_CHARS_MAX]
    return f"kvredis:{name}@".encode("ascii")
