"""The page at the root of metrics_port and the walks over the store that it shows. The routes import it."""
