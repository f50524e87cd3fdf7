"""What benches share: servers and processes under test, workloads, model shapes, arithmetic, plots. Every bench
imports it; it imports no bench."""
