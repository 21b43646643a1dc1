"""One HTML page of results that needs no network: ``ifsl-bench report``.

* ``gather``: from boards to what the page says, in plain dataclasses; ``row_pairs`` and ``origins`` (where the
  numbers come from) are parts of it.
* ``references``: how the paper of a row is cited.
* ``html``: from these to one file. The template, the style sheet, the scripts and Plotly are in ``assets/``.

A method's name is somebody else's text. The template escapes it, :func:`ifsl_bench.reporting.page.html.script_json`
does where it stands in a script, and ``assets/plots.js`` where it becomes a label of Plotly's, which reads labels as
HTML.
"""
