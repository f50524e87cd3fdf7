"""HTTP on metrics_port: the server, who may see what, health and the page. The server imports it."""
