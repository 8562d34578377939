"""The standalone page of a comparison: begin in page.py; its HTML, CSS and JavaScript are in `templates/`."""
