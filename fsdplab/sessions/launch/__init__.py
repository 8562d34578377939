"""How ranks are started, watched and ended; begin in launcher.py, then starter.py (forked) or agent.py (torchrun)."""
