"""Tables, figures and the HTML page that results are shown in."""
