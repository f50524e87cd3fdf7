"""What the server counts and times, the table of all metrics, and their Prometheus text. INFO, the HTTP server and
the page import it."""
