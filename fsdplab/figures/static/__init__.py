"""A plotly figure as an SVG picture without a browser; begin in svg.py."""
