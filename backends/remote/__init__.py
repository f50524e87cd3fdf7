"""The backend whose blocks live on one server or on several: connections, loads, the write queue and routing. The
factory and the tiered backend import it."""
