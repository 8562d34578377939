"""Memory: from allocator events to a timeline by category; begin in recorder.py and timeline.py."""
