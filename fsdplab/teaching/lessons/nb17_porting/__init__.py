"""Notebook 17: one choice in five programs' words, ports, and where FSDP meets other things. Begin with `lesson.py`."""
