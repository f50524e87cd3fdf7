"""Configuration in LMCache's language: the schema, the sources, the parsers and the rules across keys. The factory,
the server, engines and the command line import it."""
