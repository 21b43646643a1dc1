"""From result files to tables.

* What there is: ``result_file`` (one run), ``consistency`` (whether its counts can be), ``published`` (rows of papers),
  ``measured`` (a method on a task, over its seeds), ``boards`` (all that is known of a task).
* What follows from it: ``comparison`` (two rows, paired), ``over_classes`` (its interval over novel classes),
  ``ranking`` (all rows of a task), ``rank_intervals`` (the test that ranks rest on); docs/statistics.md.
* What is shown: ``entries`` (the rows of a task's table as numbers), ``columns`` (what its columns say), ``notes``
  (words below it), ``leaderboard`` (the tables of tasks), ``published_table`` (rows of papers in
  sessions), ``show`` (one result, one comparison).
* How: ``table`` (any table before it is text), ``render`` (text, Markdown, LaTeX, CSV, JSON), ``latex`` (LaTeX in the
  layout of papers).
"""
