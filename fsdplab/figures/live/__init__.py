"""The planner as one page that answers in the browser: its controls, and what it shows for a choice.

Everything here is plain Python without plotly, numpy and torch, since it runs in the browser (Pyodide) as it does when
the site is built. `answer` is what the page calls; `teaching/site/live.py` puts the page and these sources together.
"""
