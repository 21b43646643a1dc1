"""One HTML page of results that needs no network: ``ifsl-bench report``.

* ``data``: from the results of tasks to the content of the page, in plain dataclasses.
* ``references``: how the paper of a row is cited.
* ``page``: from these to one file. The template, the style sheet, the scripts and Plotly are in ``assets/``.

A method's name may be text of unknown origin. The template escapes it,
:func:`ifsl_bench.reporting.page.page.escape_script_json` does where it stands in a script, and ``assets/plots.js``
where it becomes a label of Plotly's, which reads labels as HTML.
"""
