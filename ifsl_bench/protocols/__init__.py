"""Episodes and sequences of sessions: sampling, loading, counting and metrics."""
