"""CacheEngine and what any engine needs: keys, the block format, load and store of tensors, whether a hit is worth
loading. Every adapter imports it; it knows no engine."""
