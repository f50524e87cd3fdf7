"""HTTP on metrics_port: the server, who may see what, routes and health. The server imports it."""
