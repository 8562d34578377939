"""Notebook 15: a training in files, on another number of ranks, after a kill, and as others open it. Begin with
`lesson.py`.
"""
