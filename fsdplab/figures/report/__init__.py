"""The standalone page of a comparison; begin in page.py."""
