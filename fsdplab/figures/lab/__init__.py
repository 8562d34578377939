"""The strategy lab without Jupyter: its choices, what their runs take, what the instrument draws, and its script.

Two things show it: the widget in a notebook (`fsdplab.widgets`), and the first page of the course's site, which runs
these modules in the browser. So they import neither torch nor a library of figures or widgets.
"""
