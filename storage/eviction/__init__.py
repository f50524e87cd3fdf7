"""Eviction policies, one file for each order that is more than a list. The store's state imports them; a policy
knows entries and nothing else of the store."""
