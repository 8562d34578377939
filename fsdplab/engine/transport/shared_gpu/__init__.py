"""Several ranks on one GPU; begin in transport.py."""
