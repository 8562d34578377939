"""For those who make the course: editions of a notebook, running a folder of notebooks, and what a start costs.

Begin with `course.py`.
"""
