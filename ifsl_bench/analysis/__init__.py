"""Statistics of results: rows over seeds, intervals, ranks, comparisons and the variance of sessions."""
