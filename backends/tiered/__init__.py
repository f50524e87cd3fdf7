"""The backend with two tiers: near memory before a far server. The factory imports it; it imports the local and the
remote backend."""
