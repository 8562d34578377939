"""The standalone page of a comparison: begin in page.py.

What is shown is gathered in Python; how it looks is in `templates/`, as HTML, CSS and JavaScript.
"""
