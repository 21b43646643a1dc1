"""From result files to tables: rows, comparisons, ranks, text and LaTeX."""
