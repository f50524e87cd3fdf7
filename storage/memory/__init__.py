"""The arena's memory: mapping, page-locking, copying and allocation. Any part of the store may import it; it knows
no entries and no disk."""
