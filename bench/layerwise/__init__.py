"""`kvredis bench layerwise`: layers that leave and come while other layers compute. The command line imports it."""
