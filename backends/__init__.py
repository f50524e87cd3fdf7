"""What an engine holds: one contract over a local Store or a remote server, chosen by LMCache's configuration."""
