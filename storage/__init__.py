"""The store: arena, allocator, index, policy and the one door, Store. No sockets, no event loop, no YAML, no engine."""
