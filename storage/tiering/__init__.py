"""Moving blocks between memory and disk: spill, promotion, flush and prefetch, and the threads that do it. The store
and the composition roots import it."""
