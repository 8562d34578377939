"""What several folders need, with the standard library alone: files written whole, near words, sizes, process endings.

Nothing here concerns training; everything may import it.
"""
